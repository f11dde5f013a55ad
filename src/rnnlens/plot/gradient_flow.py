"""``gradient_flow``: how the gradient of every layer, network or moment fades over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..arguments import one_of
from ..errors import InputError, message
from ..measures.lags import gradient_decay, gradient_reach
from ..measures.samples import peak_band, quartiles, sample_peaks
from ..recurrence.measures import real_first, safe_norm
from ..results.schema import with_mask
from ..vocabulary import BACKWARD, SAMPLE, TIME
from ._axes import End, log_limits, log_ticks, log_values, mark_below, mark_steps, name_ends, step_axis
from ._call import drawing
from ._colour import line_colours
from ._data import (
    DirectionView,
    Numbers,
    dataset_of,
    halves,
    labelled,
    layers_of,
    positions,
    require_dim,
    unit_dim,
    value_label,
)
from ._frame import Grid, Panels, open_panels
from ._samples import hidden, notes_of, shade

#: What is drawn of each layer, where it is there: words, colour, line style.
LINES = {
    "hidden_grad": ("$dL/dh_t$, total", "#0072b2", "-"),
    "cell_grad": ("$dL/dc_t$, total", "#009e73", "-"),
    "output_grad": ("$\\partial{}L/\\partial{}y_t$, direct", "#d55e00", "--"),
}


@dataclass(frozen=True)
class Fading:
    """What is drawn of one gradient.

    Attributes
    ----------
    steps, median, low, high
        The shape: median and quartiles over samples of the norm, each sample by its own peak.
    size
        Lower quartile, median, upper quartile of the peaks.
    reach
        Steps back from the last that hold 95 % of the squared gradient; 0 without time.
    decay
        Factor per step back; NaN where there is none.
    zeros
        Steps at which the gradient is 0 in every sample.
    bad, padded
        Steps with a value that is not finite; steps that are padding in every sample.
    """

    gid: str
    words: str
    steps: Numbers
    median: Numbers
    low: Numbers
    high: Numbers
    size: tuple[float, float, float]
    reach: int
    decay: float
    zeros: int
    bad: Numbers
    padded: Numbers
    runs_back: bool
    time_label: str
    notes: tuple[str, ...] = ()
    colour: Any = "#0072b2"
    style: str = "-"
    _peak: int = field(default=0)

    def look(self, colour: Any, style: str) -> Fading:
        """The same in a colour and line style."""
        return replace(self, colour=colour, style=style)

    @property
    def sentence(self) -> str:
        """What stands at the end of the line."""
        count = len(self.steps) - len(self.padded)
        if self.zeros and count > 1:
            where = "0 at all steps" if self.zeros >= count else f"0 at {self.zeros} of {count} steps"
            return f"{self.words}\n{where}"
        if not self.reach:
            return self.words
        if not math.isfinite(self.decay):  # it is largest at the far end
            return f"{self.words}\nreach {self.reach}\nno decay"
        return f"{self.words}\nreach {self.reach}\nx {self.decay:.3g} a step"

    def span(self) -> tuple[float, float]:
        """First and last step of the reach."""
        ordered = self.steps if self.runs_back else self.steps[::-1]
        return float(ordered[0]), float(ordered[min(self.reach, len(ordered)) - 1])

    def falling(self) -> Numbers:
        """A line that falls from the median's peak by the decay per step; NaN before it."""
        lag = np.abs(self.steps - self.steps[self._peak])
        beyond = self.steps >= self.steps[self._peak] if self.runs_back else self.steps <= self.steps[self._peak]
        line: Numbers = np.where(beyond, self.median[self._peak] * self.decay**lag, np.nan)
        return line


def fading_of(
    dataset: xr.Dataset, quantity: str, words: str, *, as_computed: bool
) -> Iterator[tuple[str | None, Fading]]:
    """The directions of one gradient of a layer, with their names; none where it is not there."""
    if quantity not in dataset:
        return
    array = labelled(with_mask(dataset[quantity], dataset), "gradient_flow")
    require_dim(array, unit_dim(array) or "unit", "gradient_flow")
    missing, *padding = notes_of(array)
    layer = str(dataset.attrs.get("layer", ""))
    named = ", ".join(part for part in (layer, value_label(array).split(" [")[0]) if part)
    notes = (*(note for note in padding if note), *([f"{named}: {missing}"] if missing else []))
    for half in halves(array, as_computed=as_computed):
        found = _fading(quantity, half, dataset, as_computed=as_computed)
        yield half.name, replace(found, words=words, notes=notes)


def _fading(quantity: str, half: DirectionView, dataset: xr.Dataset, *, as_computed: bool) -> Fading:
    backward = BACKWARD in (half.name, dataset.attrs.get("direction"))
    flipped = as_computed and half.name == BACKWARD
    values = half.data
    norms = np.asarray(safe_norm(values.values, axis=values.get_axis_num(unit_dim(values)), xp=np), dtype=np.float64)
    norms = norms.reshape(-1, *norms.shape[1 if SAMPLE in values.dims else 0 :])
    norms = norms if TIME in values.dims else norms[:, None]
    padded = hidden(values)
    real = np.ones(norms.shape, dtype=bool) if padded is None else ~padded.transpose(SAMPLE, TIME).values
    count = dataset.sizes.get(TIME, 1)
    last = 0 if backward and not flipped else count - 1
    steps = positions(values, TIME) if TIME in values.dims else np.array([last])
    runs_back = backward and not flipped
    against = slice(None) if runs_back else slice(None, None, -1)
    by_lag = real_first(norms[:, against], real[:, against], xp=np)
    shape = peak_band(norms, real)
    nowhere = ~real.any(axis=0)
    bad = ~np.isfinite(values.values).all(axis=tuple(i for i, d in enumerate(values.dims) if d != TIME))
    bad = np.atleast_1d(bad) & ~nowhere
    median = np.where(bad, np.nan, shape.median)
    recurrent = TIME in values.dims and quantity != "output_grad"  # what comes from above has no decay of its own
    return Fading(
        gid=quantity,
        words=quantity,
        steps=steps,
        median=median,
        low=np.where(bad, np.nan, shape.low),
        high=np.where(bad, np.nan, shape.high),
        size=quartiles(sample_peaks(np.where(real, norms, 0.0))),
        reach=gradient_reach(by_lag) if recurrent else 0,
        decay=gradient_decay(by_lag) if recurrent else math.nan,
        zeros=int(((norms == 0) | ~real).all(axis=0).sum() - nowhere.sum()),
        bad=steps[bad],
        padded=steps[nowhere],
        runs_back=runs_back,
        time_label=half.time_label,
        _peak=int(np.argmax(np.where(np.isfinite(median), median, -1.0))),
    )


#: A panel: its layer and direction; the lines in it by name.
Content = dict[tuple[str, str | None], list[Fading]]


@drawing(Line2D, quantity=one_of(*LINES))
def gradient_flow(
    trace: Any,
    *,
    quantity: str = "hidden_grad",
    shared: bool = True,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw how direct and total gradients fade over time, and beside it how large they are.

    Of each sample the Euclidean norm over units, divided by its own peak: the line is the median over samples, the band
    its quartiles, so that a few hard samples do not speak for all. Each line is named at its end with its *reach*, the
    steps back that hold 95 % of the squared gradient (a bar at the top of the panel), and its *decay*, the factor per
    step (dotted: the Theil-Sen slope of the median). The narrow panel has the peaks themselves, median and quartiles.

    A gradient that is exactly 0 has no place on a logarithmic axis: its name says at how many steps.

    Parameters
    ----------
    trace
        A trace made with a loss, or one layer of it: a pair of panels per layer and direction, with its direct and
        total gradients. Or a mapping from names to traces or layers, networks or moments that are compared: one pair
        with a line for each. Layers have ``hidden_grad``, ``cell_grad`` (sample, time, unit) or ``output_grad`` (also
        without time).
    quantity
        Which gradient is compared: ``"hidden_grad"``, ``"cell_grad"`` or ``"output_grad"``.
    shared
        Same value axes in all panels.

    Returns
    -------
    1-D array of Axes, shape and size in turn, layer by layer, forward before backward

    Raises
    ------
    InputError
        If no layer has a gradient, a keyword is unknown, or ``ax`` has not two Axes per panel.
    """
    compared = _compared(trace)
    layers = layers_of(trace, "gradient_flow") if compared is None else None
    content = _of_one(layers, as_computed) if layers is not None else _of_several(compared or {}, quantity, as_computed)
    if not content:
        raise InputError(
            message(
                "plot.gradient_flow found no gradient.",
                expected=" or ".join(LINES),
                hint="trace with a loss: rl.trace(model, x, y)",
            )
        )
    panels = _open(list(content), ax, figure)
    values = list(content.values())
    for number, (where, fadings) in enumerate(content.items()):
        shape, size = panels.axes[2 * number : 2 * number + 2]
        _draw(shape, fadings, line)
        _draw_size(size, fadings)
        shape.set_title(" · ".join(part for part in where if part), fontsize="small", pad=4)
    _scale(panels, values, shared=shared)
    for number, fadings in enumerate(values):
        _finish(panels.axes[2 * number], fadings, outside=bool(panels.owners))
    _label(panels, values)
    notes = dict.fromkeys(note for fadings in values for fading in fadings for note in fading.notes)
    words = "gradient over time" if layers is None else "gradient over time, per layer"
    panels.title(title or words, notes)
    return panels.result()


def _compared(trace: Any) -> dict[str, dict[str, xr.Dataset]] | None:
    """Layers by network, where a plain mapping holds networks or moments to compare; None for one trace."""
    if isinstance(trace, xr.DataTree | xr.Dataset) or hasattr(trace, "layers") or not isinstance(trace, Mapping):
        return None
    found: dict[str, dict[str, xr.Dataset]] = {}
    for name, one in trace.items():
        if not isinstance(one, xr.DataTree) and dataset_of(one) is None and not isinstance(one, Mapping):
            return None  # whatever it is, it is named where it is refused
        found[str(name)] = layers_of(one, "gradient_flow")
    return found


def _of_one(layers: Mapping[str, xr.Dataset], as_computed: bool) -> Content:
    """A panel for each layer and direction, a line for each gradient."""
    content: Content = {}
    for layer, dataset in layers.items():
        for quantity, (words, colour, style) in LINES.items():
            for way, fading in fading_of(dataset, quantity, words, as_computed=as_computed):
                content.setdefault((layer, way), []).append(fading.look(colour, style))
    return content


def _of_several(compared: Mapping[str, Mapping[str, xr.Dataset]], quantity: str, as_computed: bool) -> Content:
    """A panel for each layer that they share, or one for all of them, and each direction; a line for each network."""
    content: Content = {}
    shared = len({tuple(layers) for layers in compared.values()}) == 1 and any(
        len(one) > 1 for one in compared.values()
    )
    for (name, layers), colour in zip(compared.items(), line_colours(len(compared)), strict=True):
        for layer, dataset in layers.items():
            words = name if shared or len(layers) == 1 else f"{name} {layer}"
            for way, fading in fading_of(dataset, quantity, words, as_computed=as_computed):
                content.setdefault((layer if shared else "", way), []).append(fading.look(colour, "-"))
    return content


def _open(keys: list[tuple[str, str | None]], ax: Any, figure: Any) -> Panels:
    """A wide and a narrow panel for each; forward and backward side by side."""
    ways = max(1, len({way for _, way in keys}))
    columns = ways if ways > 1 or len(keys) == 1 else min(3 if len(keys) != 4 else 2, len(keys))
    rows = math.ceil(len(keys) / columns)
    size = (3.3, 3.0) if len(keys) == 1 else (2.5 if columns < 3 else 2.0, 2.5)
    grid = Grid(size, margin=(1.0, 1.1), shape=(rows, 2 * columns), widths=[5, 1] * columns)
    return open_panels(2 * len(keys), name="gradient_flow", grid=grid, ax=ax, figure=figure)


def _draw(ax: Any, fadings: list[Fading], keywords: dict[str, Any]) -> None:
    """Median and band of each, and the line of its decay."""
    for fading in fadings:
        shown = np.where(fading.median > 0, fading.median, np.nan)
        lone = int(np.isfinite(shown).sum()) <= max(3, len(shown) // 8)  # points would not show as a line
        look = {"color": fading.colour, "linestyle": fading.style, "linewidth": 1.4, "markersize": 3.5}
        look |= {"marker": "o" if lone else None, "label": fading.words, "gid": fading.gid}
        ax.plot(fading.steps, shown, **{**look, **keywords})
        with np.errstate(invalid="ignore"):
            low = np.where(fading.low > 0, fading.low, np.nan)
        ax.fill_between(fading.steps, low, fading.high, color=fading.colour, alpha=0.15, linewidth=0, gid="band")
        mark_steps(ax, fading.bad)
        if math.isfinite(fading.decay):
            ax.plot(fading.steps, fading.falling(), color=fading.colour, linewidth=0.9, linestyle=":", gid="decay")
    longest = max(fadings, key=lambda fading: len(fading.steps))
    shade(ax, longest.padded, np.ones(len(longest.padded), dtype=bool))
    ends = [float(step) for fading in fadings for step in (fading.steps.min(), fading.steps.max())]
    ax.set_xlim(min(ends) - 0.5, max(ends) + 0.5)
    log_values(ax)
    ax.tick_params(labelsize="small")


def _draw_size(ax: Any, fadings: list[Fading]) -> None:
    """Peaks of the samples: a point at the median, a bar over the quartiles."""
    for place, fading in enumerate(fadings):
        low, middle, high = fading.size
        ax.plot([place, place], [low, high], color=fading.colour, linewidth=2.4, alpha=0.4, gid="size")
        ax.plot([place], [middle], "o", color=fading.colour, markersize=4.5, gid=f"size {fading.gid}")
    ax.set_yscale("log")
    ax.set_xlim(-0.7, len(fadings) - 0.3)
    ax.set_xticks([])
    ax.yaxis.tick_right()
    ax.tick_params(labelsize="small")


def _scale(panels: Panels, content: list[list[Fading]], *, shared: bool) -> None:
    """Limits of the value axes: of all panels, or of each by itself."""
    shapes = [np.concatenate([np.concatenate([f.median, f.low]) for f in fadings]) for fadings in content]
    sizes = [np.array([value for fading in fadings for value in fading.size]) for fadings in content]
    for number in range(len(content)):
        shape, size = panels.axes[2 * number : 2 * number + 2]
        log_limits(shape, np.concatenate(shapes) if shared else shapes[number], room=6)
        log_limits(size, np.concatenate(sizes) if shared else sizes[number], room=2)
        log_ticks(size)


def _finish(ax: Any, fadings: list[Fading], *, outside: bool) -> None:
    """Names at the ends where the lines come apart, reaches above, what is below the axis."""
    step_axis(ax, "x", np.concatenate([fading.steps for fading in fadings]))
    runs_back, spans = fadings[0].runs_back, []
    for row, fading in enumerate([f for f in fadings if f.reach and f.size[1] > 0]):
        here, there = fading.span()
        spans.append((abs(there - here), there, 0.975 - 0.025 * row))
        look = {"color": fading.colour, "linewidth": 2, "solid_capstyle": "butt", "gid": "reach"}
        ax.plot([here, there], [spans[-1][2]] * 2, transform=ax.get_xaxis_transform(), **look)
    _name_reach(ax, spans, runs_back=runs_back)
    for fading in fadings:
        mark_below(ax, fading.steps, np.where(fading.median > 0, fading.median, np.nan), fading.colour)
    name_ends(ax, [_end(fading) for fading in fadings], left=not runs_back, outside=outside)


def _name_reach(ax: Any, spans: list[tuple[float, float, float]], *, runs_back: bool) -> None:
    """The word beside the shortest bar (length, end, height), where the panel has room for it."""
    length, there, height = min(spans, default=(math.inf, 0.0, 0.0))
    if length > 0.8 * np.ptp(ax.get_xlim()):
        return
    side = {"ha": "left" if runs_back else "right", "va": "center", "fontsize": "x-small", "color": "0.3"}
    way = (3 if runs_back else -3, 0)
    ax.annotate("reach", (there, height), way, ax.get_xaxis_transform(), "offset points", gid="reach", **side)


def _end(fading: Fading) -> End:
    shown: Numbers = np.flatnonzero(fading.median > 0)
    at = 0 if not shown.size else int(shown[-1] if fading.runs_back else shown[0])
    y = float(fading.median[at]) if shown.size else float("nan")
    return End(float(fading.steps[at]), y, fading.sentence, fading.colour)


def _label(panels: Panels, content: list[list[Fading]]) -> None:
    """Words at the axes; on paper of our own once for all values, beyond the names of the lines."""
    words = [fading.time_label for fadings in content for fading in fadings]
    label, values = max(set(words), key=words.count), "share of the sample's peak"
    for shape, size in zip(panels.axes[::2], panels.axes[1::2], strict=True):
        shape.set_xlabel(label, fontsize="small")
        size.set_xlabel("peak [loss]", fontsize="small")
        if not panels.owners:
            shape.set_ylabel(values, fontsize="small")
    for owner in panels.owners:
        owner.supylabel(values, fontsize="small")
