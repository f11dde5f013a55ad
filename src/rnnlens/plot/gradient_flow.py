"""``gradient_flow``: decay of the gradient over time, for layers, networks or moments of a training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from ..arguments import one_of
from ..errors import InputError, has_attribute
from ..measures.profiles import gradient_reach, peak_band
from ..recurrence.measures import real_first
from ..results.schema import with_mask
from ..vocabulary import BACKWARD, TIME
from . import _axes, _data, _frame, _samples
from ._call import drawing
from ._data import Numbers

#: Gradients that are drawn for each layer that has them: label, colour, line style.
GRADIENTS = {
    "hidden_grad": ("total, $dL/dh_t$", "#0072b2", "-"),
    "cell_grad": ("total, $dL/dc_t$", "#009e73", "-"),
    "output_grad": ("direct, $\\partial{}L/\\partial{}y_t$", "#d55e00", "--"),
}
#: Styles if there are two lines: before, in grey, and after.
_PAIR = ("#8c8c8c", "#d55e00")
#: Lower end of the value axis as a share of the peak; smaller shares are marked by an arrow.
FLOOR = 1e-6
#: Width in inches of the user's figure below which panels are stacked.
_NARROW = 5.0


@dataclass(frozen=True)
class FadingLine:
    """One line of the figure: one gradient of one direction over time."""

    gid: str
    words: str
    steps: Numbers
    #: Median and quartiles over samples of the norm over units, each sample divided by its own peak.
    median: Numbers
    low: Numbers
    high: Numbers
    #: Steps back from the last that hold 95 % of the squared gradient; 0 if it is not defined.
    reach: int
    #: Number of steps at which the gradient is 0 in every sample.
    zeros: int
    #: Steps with a non-finite value; steps that are padding in every sample.
    bad: Numbers
    padded: Numbers
    time_label: str
    #: Where a sample's state was set anew, with a time axis; None if nowhere.
    reset: xr.DataArray | None
    notes: tuple[str, ...]
    colour: str
    style: str = "-"

    @property
    def name(self) -> str:
        """The line's entry in the legend."""
        count = len(self.steps) - len(self.padded)
        if self.zeros and count > 1:
            where = "all" if self.zeros >= count else f"{self.zeros} of {count}"
            return f"{self.words}: 0 at {where} steps"
        return f"{self.words}: {_steps(self.reach)}" if self.reach else self.words


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


#: Lines of each panel; a panel is a layer and a direction.
PanelLines = dict[tuple[str, str | None], list[FadingLine]]


@drawing(Line2D, quantity=one_of(*GRADIENTS))
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
    """Draw how the gradient of the loss decays over time, a panel per layer and direction.

    A line is the median over samples of the Euclidean norm over units, each sample divided by its own peak, so that a
    few hard samples do not dominate; the band has the quartiles. The legend gives the *reach* of each line: the number
    of steps back from the last that hold 95 % of the squared gradient. The value axis ends at 1e-6; an arrow marks
    where a line falls below. The legend counts steps with a gradient of exactly 0, which a logarithmic axis cannot
    show.

    Parameters
    ----------
    trace
        A trace made with a loss, or one layer of it: its direct and total gradients. Or a mapping from names to traces
        or layers (networks, or moments of a training): a line for each; of two, the first is grey. Layers have
        ``hidden_grad``, ``cell_grad`` (sample, time, unit) or ``output_grad`` (also without time).
    quantity
        Gradient to compare: ``"hidden_grad"``, ``"cell_grad"`` or ``"output_grad"``.

    Returns
    -------
    1-D array of Axes, one per layer and direction, forward before backward; below each other on a narrow ``figure``
    """
    networks = _networks(trace)
    layers = _data.layers_of(trace, "gradient_flow") if networks is None else None
    content = _of_one(layers, as_computed) if layers is not None else _of_several(networks or {}, quantity, as_computed)
    if not content:
        expected, hint = " or ".join(GRADIENTS), "trace with a loss: rl.trace(model, x, y)"
        raise InputError("plot.gradient_flow found no gradient.", expected=expected, hint=hint)
    panels = _open(list(content), ax, figure)
    everything = np.concatenate([part for lines in content.values() for one in lines for part in (one.median, one.low)])
    for place, ((layer, way), lines) in zip(panels.axes, content.items(), strict=True):
        values = everything if shared else np.concatenate([part for one in lines for part in (one.median, one.low)])
        _draw(place, lines, line, values)
        name = " · ".join(part for part in (layer, way) if part)
        place.set_title(_finding(name, lines), fontsize="small", pad=4)
        place.legend(fontsize="x-small", loc="best", framealpha=0.85)
    if shared:
        panels.outer_ticks_only()
    for place, lines in zip(panels.axes, content.values(), strict=True):
        if place.xaxis.get_tick_params().get("labelbottom", True):
            place.set_xlabel(lines[0].time_label, fontsize="small")
    panels.value_label("share of the sample's peak")
    notes = dict.fromkeys(note for lines in content.values() for one in lines for note in one.notes)
    how = "median over samples, each by its own peak; band: quartiles; steps: how many carry 95 % of the gradient"
    return panels.titled(title or "Gradient of the loss through time", [how, *notes])


def _networks(trace: Any) -> dict[str, dict[str, xr.Dataset]] | None:
    """Return layers by network if a mapping has several networks or moments; None for one trace."""
    if isinstance(trace, xr.DataTree | xr.Dataset) or has_attribute(trace, "layers") or not isinstance(trace, Mapping):
        return None
    found: dict[str, dict[str, xr.Dataset]] = {}
    for name, one in trace.items():
        if not isinstance(one, xr.DataTree) and _data.dataset_of(one) is None and not isinstance(one, Mapping):
            return None  # layers_of raises a clear error
        found[str(name)] = _data.layers_of(one, "gradient_flow")
    return found


def _of_one(layers: Mapping[str, xr.Dataset], as_computed: bool) -> PanelLines:
    """Return the lines to draw for one network, by panel (layer, direction): one for each kind of gradient."""
    content: PanelLines = {}
    for layer, dataset in layers.items():
        for quantity, (words, colour, style) in GRADIENTS.items():
            for way, one in _lines_of(dataset, quantity, as_computed, words=words, colour=colour, style=style):
                content.setdefault((layer, way), []).append(one)
    return content


def _of_several(networks: Mapping[str, Mapping[str, xr.Dataset]], quantity: str, as_computed: bool) -> PanelLines:
    """Return the lines of several networks by panel: a panel for each shared layer, or one, with a line per network."""
    content: PanelLines = {}
    several = any(len(layers) > 1 for layers in networks.values())
    shared = several and len({tuple(layers) for layers in networks.values()}) == 1
    colours = _PAIR if len(networks) == 2 else _axes.line_colours(len(networks))
    for (network, layers), colour in zip(networks.items(), colours, strict=True):
        for layer, dataset in layers.items():
            words = network if shared or len(layers) == 1 else f"{network} {layer}"
            for way, one in _lines_of(dataset, quantity, as_computed, words=words, colour=colour):
                content.setdefault((layer if shared else "", way), []).append(one)
    return content


def _lines_of(
    dataset: xr.Dataset, quantity: str, as_computed: bool, **look: str
) -> Iterator[tuple[str | None, FadingLine]]:
    """Yield direction and line of one gradient of a layer; nothing if the layer does not have it."""
    if quantity not in dataset:
        return
    array = _data.labelled(with_mask(dataset, quantity), "gradient_flow")
    _data.require_dim(array, _data.unit_dim(array) or "unit", "gradient_flow")
    missing, *padding = _samples.notes_of(array)
    layer = str(dataset.attrs.get("layer", ""))
    named = ", ".join(part for part in (layer, _data.value_label(array).split(" [")[0]) if part)
    notes = (*(note for note in padding if note), *([f"{named}: {missing}"] if missing else []))
    for half in _data.halves(array, as_computed=as_computed):
        backward = BACKWARD in (half.name, dataset.attrs.get("direction"))
        from_start = backward and not (as_computed and half.name == BACKWARD)
        count = dataset.sizes.get(TIME, 1)
        yield half.name, _fading(quantity, half, count, from_start=from_start, notes=notes, **look)


def _fading(quantity: str, half: _data.DirectionView, count: int, *, from_start: bool, **other: Any) -> FadingLine:
    """Summarise one direction over samples; ``from_start``: the recurrence ends at the first step."""
    values = half.data
    timed = values if TIME in values.dims else values.expand_dims(TIME)
    norms = _data.of_samples(_data.norm_over(timed, [_data.unit_dim(timed)]), TIME).astype(np.float64)
    real = _samples.real_steps(values)
    steps = _data.positions(values, TIME) if TIME in values.dims else np.array([0 if from_start else count - 1])
    against = slice(None) if from_start else slice(None, None, -1)
    shape = peak_band(norms, real)
    nowhere = ~real.any(axis=0)
    bad = ~np.isfinite(values.values).all(axis=tuple(i for i, d in enumerate(values.dims) if d != TIME))
    bad = np.atleast_1d(bad) & ~nowhere
    band: dict[str, Any] = {name: np.where(bad, np.nan, getattr(shape, name)) for name in ("median", "low", "high")}
    recurrent = TIME in values.dims and quantity != "output_grad"
    reach = gradient_reach(real_first(norms[:, against], real[:, against])) if recurrent else 0
    zeros = int(((norms == 0) | ~real).all(axis=0).sum() - nowhere.sum())
    other |= {"bad": steps[bad], "padded": steps[nowhere], "reset": values.coords.get("reset")}
    label = half.time_label
    return FadingLine(quantity, steps=steps, reach=reach, zeros=zeros, time_label=label, **band, **other)


def _open(keys: Sequence[tuple[str, str | None]], ax: Any, figure: Any) -> _frame.Panels:
    """Open one panel per layer and direction: side by side, or below each other in a narrow figure."""
    ways = max(1, len({way for _, way in keys}))
    columns = ways if ways > 1 or len(keys) == 1 else min(2 if len(keys) == 4 else 3, len(keys))
    if isinstance(figure, Figure | SubFigure) and figure.bbox.width / figure.dpi < _NARROW:
        columns = 1
    size = (5.2, 3.1) if len(keys) == 1 else (3.5, 2.7) if columns < 3 else (2.9, 2.7)
    shape = (math.ceil(len(keys) / columns), columns)
    return _frame.open_panels("gradient_flow", len(keys), ax, figure, size=size, margin=(0.8, 1.0), shape=shape)


def _finding(name: str, lines: Sequence[FadingLine]) -> str:
    """Return the panel's title: over how many steps the gradient reaches back, for one or two networks."""
    reaches = [one.reach for one in lines if one.gid != "output_grad" and one.reach]
    compared = len({one.words for one in lines}) == 2 and len(reaches) == 2 and lines[0].gid == lines[1].gid
    if not reaches or not (compared or len(lines) == 1 or lines[0].gid != lines[-1].gid):
        return name
    carried = f"{reaches[0]} → {_steps(reaches[1])}" if compared else _steps(reaches[0])
    words = f"{carried} back carry 95 % of the gradient"
    return f"{name}: {carried} back\ncarry 95 % of the gradient" if name else words


def _draw(ax: Any, lines: Sequence[FadingLine], keywords: Mapping[str, Any], values: Numbers) -> None:
    """Draw median and band of each line, padding, and an arrow where a line falls below the axis."""
    for one in lines:
        shown = np.where(one.median > 0, one.median, np.nan)
        lone = int(np.isfinite(shown).sum()) <= max(3, len(shown) // 8)  # points would not show as a line
        look = {"color": one.colour, "linestyle": one.style, "linewidth": 2.2, "markersize": 4}
        look |= {"marker": "o" if lone else None, "label": one.name, "gid": one.gid}
        ax.plot(one.steps, shown, **{**look, **keywords})
        low = np.where(one.low > 0, one.low, np.where(one.median > 0, FLOOR * 1e-3, np.nan))
        _axes.draw_band(ax, one.steps, low, one.high, one.colour, alpha=0.18)
        _axes.mark_steps(ax, one.bad)
    longest = max(lines, key=lambda one: len(one.steps))
    _samples.shade(ax, longest.padded, np.ones(len(longest.padded), dtype=bool))
    _samples.mark_resets(ax, longest.reset, longest.steps)
    _axes.log_axis(ax)
    _axes.log_limits(ax, np.maximum(values, np.where(values > 0, FLOOR, 0)), room=2)
    if ax.get_ylim()[0] < FLOOR or (values == 0).any():
        ax.set_ylim(bottom=FLOOR)
    _axes.step_axis(ax, "x", np.concatenate([one.steps for one in lines]), room=0.5)
    for one in lines:
        _point_down(ax, one)


def _point_down(ax: Any, one: FadingLine) -> None:
    """Draw an arrow at the lower border where a line leaves the axis."""
    floor = ax.get_ylim()[0]
    below = (one.median > 0) & (one.median < floor)
    edge = np.flatnonzero(below & ~(np.roll(below, 1) & np.roll(below, -1)))
    inner = [i for i in edge if any(0 <= j < len(below) and one.median[j] >= floor for j in (i - 1, i + 1))]
    if not inner:
        return
    if not any(text.get_gid() == "below" for text in ax.texts):
        rises = inner[-1] + 1 < len(below) and one.median[inner[-1] + 1] >= floor  # the text is under the line
        offset, side = ((12, 2), "left") if rises else ((-12, 2), "right")
        look: dict[str, Any] = {"over": ax.get_xaxis_transform(), "color": "0.3", "bbox": _axes.PAPER, "zorder": 5}
        at = (float(one.steps[inner[-1]]), 0)
        _axes.write(ax, f"below {_axes.short_number(floor)}", at, offset, ha=side, va="baseline", gid="below", **look)
    look = {"marker": "v", "markersize": 6, "linestyle": "", "clip_on": False, "zorder": 4, "color": one.colour}
    ax.plot(one.steps[inner], np.zeros(len(inner)), transform=ax.get_xaxis_transform(), gid="below", **look)
