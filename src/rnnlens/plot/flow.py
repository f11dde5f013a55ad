"""``gradient_flow``: direct and total gradient of every layer over time, and how fast they fade."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..errors import InputError, message
from ..measures.profiles import band
from ..measures.transfer import theil_sen
from ..recurrence.measures import finite_mean, real_first, safe_norm
from ..results.schema import with_mask
from ..vocabulary import BACKWARD, SAMPLE, TIME
from ._data import DirectionView, Numbers, halves, labelled, positions, require_dim, unit_dim
from ._door import figure as figure_door
from ._keywords import checked
from ._layers import layers_of
from ._lines import log_limits
from ._padding import hidden, notes_of, shade
from ._panels import Grid, Panels, log_values, mark_steps, open_panels, whole_numbers

#: What is drawn of each layer, where it is there: words, colour, line style, marker.
LINES = {
    "hidden_grad": ("total, hidden state", "#0072b2", "-", None),
    "cell_grad": ("total, cell state", "#009e73", "-", None),
    "output_grad": ("direct, output", "#d55e00", "--", "o"),
}


@dataclass(frozen=True)
class _Profile:
    """Mean norm of one gradient at each step."""

    quantity: str
    steps: Numbers
    norms: Numbers
    decay: float
    peak: float
    runs_back: bool
    bad: Numbers
    padded: Numbers


@figure_door()
def gradient_flow(
    trace: Any,
    *,
    shared: bool = True,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw the size of direct and total gradients over time, a panel per layer (and direction), on a logarithmic scale.

    The size at a step is the Euclidean norm over units, averaged over the samples for which the step is no padding. The
    dotted line falls, from the largest total gradient against the layer's direction, by the factor per step that is
    written beside it: the Theil-Sen slope of the median over samples, each by its own peak, so that neither a spike nor
    a few hard samples decide it. A gradient that is exactly 0 has no place on a logarithmic axis: the legend says at
    how many steps.

    Parameters
    ----------
    trace
        A trace made with a loss, one layer of it, or a mapping from names to layers; each with some of ``hidden_grad``,
        ``cell_grad`` (sample, time, unit) and ``output_grad`` (also without time).
    shared
        Same value axis in all panels.
    as_computed
        Turn the backward half of a bidirectional layer round, into the order in which it was computed.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per layer and direction, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D.

    Returns
    -------
    1-D array of Axes, layer by layer, forward before backward

    Raises
    ------
    InputError
        If no layer has a gradient, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    keywords = checked(line, Line2D, figure="gradient_flow")
    content: dict[tuple[str, str | None], list[_Profile]] = {}
    labels: list[str] = []
    notes: list[str] = []
    for layer, dataset in layers_of(trace, "gradient_flow").items():
        for quantity in (name for name in LINES if name in dataset):
            array = labelled(with_mask(dataset[quantity], dataset), "gradient_flow")
            require_dim(array, unit_dim(array) or "unit", "gradient_flow")
            missing, *padding = notes_of(array)
            notes += [note for note in padding if note and note not in notes]
            notes += [f"{layer} {quantity}: {missing}"] if missing else []
            for half in halves(array, as_computed=as_computed):
                profile = _profile(quantity, half, dataset, as_computed=as_computed)
                content.setdefault((layer, half.name), []).append(profile)
                labels.append(half.time_label)
    if not content:
        raise InputError(
            message(
                "plot.gradient_flow found no gradient.",
                expected=" or ".join(LINES),
                hint="trace with a loss: rl.trace(model, x, y)",
            )
        )
    panels = _open(list(content), ax, figure)
    for place, (where, profiles) in zip(panels.axes, content.items(), strict=True):
        _draw(place, profiles, keywords)
        place.set_title(" · ".join(part for part in where if part), fontsize="small", pad=3)
    _scale(panels, list(content.values()), shared=shared)
    panels.label(max(set(labels), key=labels.count), "norm over units, mean over samples")
    panels.title(title or "gradient over time, per layer", notes)
    return panels.result()


def _open(keys: list[tuple[str, str | None]], ax: Any, figure: Any) -> Panels:
    """A row per layer with forward and backward side by side, or a near-square grid where no layer has directions."""
    size = (5.2, 3.0) if len(keys) == 1 else (3.8, 2.4)
    layers = list(dict.fromkeys(layer for layer, _ in keys))
    if ax is not None or all(direction is None for _, direction in keys):
        return open_panels(len(keys), name="gradient_flow", grid=Grid(size), ax=ax, figure=figure)
    panels = open_panels(2 * len(layers), name="gradient_flow", grid=Grid(size, shape=(len(layers), 2)), figure=figure)
    cells = {
        (layer, way): panels.axes[2 * row + (way == BACKWARD)]
        for row, layer in enumerate(layers)
        for way in _ways(layer, keys)
    }
    for unused in set(panels.axes) - set(cells.values()):
        unused.remove()
    panels.halves = [[cells[key] for key in keys]]
    return panels


def _ways(layer: str, keys: list[tuple[str, str | None]]) -> list[str | None]:
    return [direction for name, direction in keys if name == layer]


def _profile(quantity: str, half: DirectionView, dataset: xr.Dataset, *, as_computed: bool) -> _Profile:
    """Norm over units, mean over samples, and the decay per step against the direction of the layer."""
    backward = BACKWARD in (half.name, dataset.attrs.get("direction"))
    flipped = as_computed and half.name == BACKWARD
    values = half.data
    norms = np.asarray(safe_norm(values.values, axis=values.get_axis_num(unit_dim(values)), xp=np))
    norms = norms.reshape(-1, *norms.shape[1 if SAMPLE in values.dims else 0 :])
    norms = norms if TIME in values.dims else norms[:, None]
    padded = hidden(values)
    real = np.ones(norms.shape, dtype=bool) if padded is None else ~padded.transpose(SAMPLE, TIME).values
    count = dataset.sizes.get(TIME, 1)
    steps = positions(values, TIME) if TIME in values.dims else np.array([0 if backward and not flipped else count - 1])
    runs_back = backward and not flipped
    against = slice(None) if runs_back else slice(None, None, -1)
    by_lag = real_first(norms[:, against], real[:, against], xp=np)
    norms = finite_mean(np.where(real, norms, np.nan), axis=0, xp=np)
    nowhere = ~real.any(axis=0)
    bad = ~np.isfinite(values.values).all(axis=tuple(i for i, d in enumerate(values.dims) if d != TIME))
    finite = np.where(np.isfinite(norms), norms, -1.0)
    return _Profile(
        quantity,
        steps,
        norms,
        theil_sen(_fading(band(by_lag).median)),
        float(steps[int(finite.argmax())]),
        runs_back,
        steps[np.atleast_1d(bad) & ~nowhere],
        steps[nowhere],
    )


def _draw(ax: Any, profiles: list[_Profile], keywords: dict[str, Any]) -> None:
    """Lines of one layer, and how fast it fades."""
    for profile in profiles:
        words, colour, style, marker = LINES[profile.quantity]
        zeros = int(np.count_nonzero(profile.norms == 0))
        count = len(profile.norms) - len(profile.padded)
        label = f"{words} (0 at {zeros} of {count} steps)" if zeros else words
        drawn = int(np.count_nonzero(profile.norms > 0))
        marker = marker if drawn <= max(3, len(profile.norms) // 8) else None  # lone points would not show as a line
        look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 3.5, "linewidth": 1.3}
        shown = np.where(profile.norms > 0, profile.norms, np.nan)
        ax.plot(profile.steps, shown, **{"label": label, "gid": profile.quantity, **look, **keywords})
        mark_steps(ax, profile.bad)
    longest = max(profiles, key=lambda profile: len(profile.steps))
    shade(ax, longest.padded, np.ones(len(longest.padded), dtype=bool))
    main = next((p for p in profiles if p.quantity != "output_grad"), None)
    if main is not None:
        _mark_decay(ax, main)
    ends = [float(step) for profile in profiles for step in (profile.steps.min(), profile.steps.max())]
    ax.set_xlim(min(ends) - 0.5, max(ends) + 0.5)
    log_values(ax)
    whole_numbers(ax, "x")
    ax.legend(fontsize="x-small", loc="best")
    ax.tick_params(labelsize="small")


def _fading(median: Numbers) -> Numbers:
    """A profile by lag from its peak on."""
    return median[int(np.argmax(median)) :] if median.size else median


def _mark_decay(ax: Any, profile: _Profile) -> None:
    """A line from the peak that falls by the decay per step, and the factor in words."""
    if not math.isfinite(profile.decay):
        return
    lag = np.abs(profile.steps - profile.peak)
    beyond = profile.steps >= profile.peak if profile.runs_back else profile.steps <= profile.peak
    line = np.where(beyond, float(np.nanmax(profile.norms)) * np.exp(profile.decay * lag), np.nan)
    ax.plot(profile.steps, line, color="0.4", linewidth=0.9, linestyle=":", gid="decay")
    words = f"x {math.exp(profile.decay):.3g} a step"
    ax.annotate(words, (0.02, 0.03), xycoords="axes fraction", fontsize="x-small", gid="decay")


def _scale(panels: Panels, content: list[list[_Profile]], *, shared: bool) -> None:
    """Limits of the value axes: everything that is finite and positive, ``DEEPEST`` decades at most."""
    positive = [
        np.concatenate([p.norms[(p.norms > 0) & np.isfinite(p.norms)] for p in profiles]) for profiles in content
    ]
    for ax, own in zip(panels.axes, positive, strict=True):
        log_limits(ax, np.concatenate(positive) if shared else own, room=3)
