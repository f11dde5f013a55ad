"""``histogram`` of values, and ``weights_histogram`` of the weights of each gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, StepPatch
from matplotlib.ticker import MaxNLocator

from ..arguments import either, one_of, switch
from ..errors import InputError
from ..vocabulary import IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from . import _axes, _data, _frame, _images
from ._call import drawing
from ._data import Numbers
from .weights import Kernel, by_direction, kernels_of


def equal_bins(arrays: Sequence[Numbers], bins: int | None) -> Numbers:
    """Return the edges of equal bins over the finite values of all arrays; :func:`histogram` states their number."""
    if bins is None:
        bins = int(np.clip(np.sqrt(max(array.size for array in arrays)), 10, 60))
    ranges = [found for found in map(_data.finite_range, arrays) if found is not None]
    low = min((low for low, _ in ranges), default=0.0)
    high = max((high for _, high in ranges), default=0.0)
    if low == high:
        room = abs(low) * 0.1 or 0.5
        low, high = low - room, high + room
    return np.linspace(low, high, bins + 1)


def count_in_bins(values: Numbers, edges: Numbers) -> Numbers:
    """Count finite values per bin, in pieces, so that memory does not grow with the data."""
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    span = (np.float64(edges[0]), np.float64(edges[-1]))  # Python floats would put the bin edges into float32
    for piece in _data.chunks(values):
        finite = np.isfinite(piece)
        counts += np.histogram(piece if finite.all() else piece[finite], bins=len(counts), range=span)[0]
    return counts


def draw_panel(ax: Any, content: Mapping[str, Numbers], edges: Numbers, keywords: Mapping[str, Any]) -> None:
    """Draw one histogram per layer, or write value and count if all finite values of the panel are equal."""
    several, first = len(content) > 1, next(iter(content.values()))
    low, value = _data.finite_range(first) or (0.0, 1.0)
    if not several and low == value and first.size > 1:
        count = int(np.isfinite(first).sum())
        ax.axvline(value, color="#0072b2", linewidth=1.4, gid="constant")
        at, over = (value, 0.5), ax.get_xaxis_transform()
        _axes.write(ax, f"{count:,} x {value:g}", at, (4, 0), over=over, ha="left", fontsize="small", gid="constant")
        ax.set_xlim(*((edges[0], edges[-1]) if edges[0] < value < edges[-1] else (value - 0.5, value + 0.5)))
        ax.set_yticks([])
        ax.set_xticks([value])
        return
    for (name, values), colour in zip(content.items(), _axes.line_colours(len(content)), strict=True):
        counts = count_in_bins(values, edges)
        outlined = len(content) > 2
        look: dict[str, Any] = {"fill": not outlined, "edgecolor": colour, "linewidth": 0.2}
        look |= {} if outlined else {"facecolor": colour}
        look |= {"linewidth": 1.3 if outlined else 0.9} if several else {}
        look["alpha"] = 1.0 if outlined or not several else 0.35
        if "color" in keywords:
            look = {key: look[key] for key in ("fill", "linewidth", "alpha")}
        ax.stairs(counts, edges, **{"gid": f"histogram {name}".strip(), **look, **keywords})
    ax.set_xlim(edges[0], edges[-1])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4))


def _steps_of(ax: Any) -> list[Any]:
    return [patch for patch in ax.patches if isinstance(patch, StepPatch)]


def scale_counts(axes: Sequence[Any], *, shared: bool, log: bool, clip_peaks: int) -> None:
    """Set the axes of counts; with ``clip_peaks``, cut off the tallest bars and write their counts."""
    drawn = [ax for ax in axes if _steps_of(ax)]
    ordered = [np.sort(np.concatenate([step.get_data().values for step in _steps_of(ax)])) for ax in drawn]
    tops = [float(max(1, counts[: len(counts) - clip_peaks].max(initial=1))) for counts in ordered]
    for ax, own in zip(drawn, tops, strict=True):
        top = max(tops) if shared else own
        if log:
            ax.set_yscale("log")
            ax.set_ylim(0.6, top * 2)
        else:
            ax.set_ylim(0, top * 1.12)
        if clip_peaks:
            bars = [(s.get_data().values, s.get_data().edges) for s in _steps_of(ax)]
            beyond = [
                (count, 0.5 * (left + right))
                for counts, edges in bars
                for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True)
                if count > own
            ]
            centre, over = 0.5 * sum(ax.get_xlim()), ax.get_xaxis_transform()
            for row, (count, middle) in enumerate(sorted(beyond, reverse=True)[:clip_peaks]):
                offset, side = (4, "left") if middle < centre else (-4, "right")
                at = (middle, 0.97 - 0.1 * row)
                _axes.write(ax, f"{int(count):,} ↑", at, (offset, 0), over=over, ha=side, va="top", gid="clipped peak")


#: Dimensions of a plain array by its rank.
GUESS = {**_data.OVER_TIME, 1: ("value",), 5: (SAMPLE, OUT_TIME, OUT_UNIT, IN_TIME, IN_FEATURE)}


@drawing(StepPatch)
def histogram(
    data: Any,
    *,
    dims: Sequence[str] | None = None,
    panel: str | Sequence[str] | None = None,
    overlay: str | None = None,
    bins: int | None = None,
    shared: bool = True,
    log: bool = False,
    clip_peaks: int = 0,
    max_panels: int = 36,
    page: int | None = None,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **step: Any,
) -> Any:
    """Draw the distribution of values; NaN and infinite values are left out and counted in the panel's title.

    Parameters
    ----------
    data
        A DataArray or array of any rank, or a mapping from names to such arrays, which are overlaid.
    panel
        A dimension with a panel for each of its positions (``"unit"``), or two: rows and columns. None: one panel.
    overlay
        A dimension whose positions are overlaid in each panel, in colours (``"gate"``).
    bins
        Number of equal bins between the lowest and the highest finite value; by default the square root of the number
        of values in a panel, 10 at least and 60 at most.
    shared
        Same bins and same counts axis in all panels.
    log
        Logarithmic counts; without them gradients are mostly one spike at 0.
    clip_peaks
        Number of tallest bars that are cut off in each panel, just above the next one; their counts are written there.

    Returns
    -------
    1-D array of Axes, in panel order
    """
    layers = _layers(data, dims, overlay)
    first = next(iter(layers.values()))
    by = [panel] if isinstance(panel, str) else list(panel or ())
    for dim in by:
        _data.require_dim(first, dim, "histogram")
    slots = _images.slots_of(first, by)
    picked, thinned = _data.choose(len(slots), max_panels, " x ".join(f"{d}s" for d in by) or "panels", page=page)
    grid = (first.sizes[by[0]], first.sizes[by[1]]) if len(by) == 2 and not thinned else None
    size = (5.0, 3.2) if len(picked) == 1 else (2.4, 1.7)
    panels = _frame.open_panels("histogram", len(picked), ax, figure, size=size, shape=grid)
    contents = [{name: array.isel(slots[i][0]).values for name, array in layers.items()} for i in picked]
    common = equal_bins([values for content in contents for values in content.values()], bins) if shared else None
    for place, content, i in zip(panels.axes, contents, picked, strict=True):
        draw_panel(place, content, equal_bins(list(content.values()), bins) if common is None else common, step)
        notes = map(_data.nonfinite_note, content.values())  # the exact share of NaN and Inf
        place.set_title("\n".join(part for part in (slots[i][1], *notes) if part), fontsize="small", pad=3)
    scale_counts(panels.axes, shared=shared, log=log, clip_peaks=clip_peaks)
    panels.label(_data.value_label(first), "count" + (", log scale" if log else ""))
    if len(layers) > 1:
        pairs = list(zip(layers, _axes.line_colours(len(layers)), strict=True))
        handles: list[Any] = [Line2D([], [], color=colour, label=name) for name, colour in pairs]
        if len(pairs) == 2:
            handles = [Patch(color=colour, alpha=0.6, label=name) for name, colour in pairs]
        panels.legend(handles, title=_data.axis_label(first, overlay) if overlay else None)
    if shared:
        panels.outer_ticks_only()
    everything = None if len(layers) > 1 else _data.nonfinite_note(first.values)
    clipped = f"tallest {clip_peaks} per panel cut off, with their count" if clip_peaks else None
    return panels.titled(title or _data.title_of(first), [thinned, everything, clipped])


def _layers(data: Any, dims: Sequence[str] | None, overlay: str | None) -> dict[str, xr.DataArray]:
    """Return the arrays whose histograms are drawn over each other, by name."""
    if isinstance(data, Mapping) and _data.dataset_of(data) is None:
        if overlay is not None:
            raise InputError(
                "A mapping is overlaid already.", got=f"overlay={overlay!r} and a mapping", expected="one of them"
            )
        found = {str(name): _data.labelled(array, "histogram", dims=dims, guess=GUESS) for name, array in data.items()}
        if not found:
            raise InputError("plot.histogram got nothing to draw.", got="an empty mapping", expected="arrays by name")
        return found
    array = _data.labelled(data, "histogram", dims=dims, guess=GUESS)
    if overlay is None:
        return {"": array}
    _data.require_dim(array, overlay, "histogram")
    return {name: array.isel({overlay: i}) for i, name in enumerate(_data.names_of(array, overlay))}


@drawing(StepPatch, shared=either(switch, one_of("row"), expected="True, False or 'row'"))
def weights_histogram(
    weights: Any,
    *,
    grad: bool = False,
    bins: int | None = None,
    shared: bool | str = "row",
    log: bool = False,
    clip_peaks: int = 0,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **step: Any,
) -> Any:
    """Draw a histogram for every kernel (rows) and gate (columns); directions side by side.

    Each panel's title gives the exact share of its values that are NaN or infinite; these are left out of the bars.

    Parameters
    ----------
    weights
        The weights of one layer, as for :func:`weights_heatmap`.
    bins
        Number of equal bins; by default the square root of the number of values in a panel, 10 to 60.
    shared
        ``"row"`` (default): the gates of one kernel have the same bins and counts axis; True: all panels have; False:
        none.
    log
        Logarithmic counts.
    clip_peaks
        Number of tallest bars that are cut off in each panel; their counts are written.

    Returns
    -------
    1-D array of Axes, kernel by kernel and within it gate by gate, forward before backward
    """
    kernels, attrs = kernels_of(weights, "weights_histogram", grad=grad)
    columns = by_direction(kernels)
    panels, places = _open(columns, ax, figure)
    edges = equal_bins([kernel.values for kernel in kernels], bins) if shared is True else None
    for column, axes in zip(columns.values(), places, strict=True):
        for kernel, row in zip(column, axes, strict=True):
            _draw_row(row, kernel, equal_bins([kernel.values], bins) if shared == "row" else edges, bins, step)
            if shared is not True:
                scale_counts(row, shared=bool(shared), log=log, clip_peaks=clip_peaks)
    if shared is True:
        scale_counts(panels.axes, shared=True, log=log, clip_peaks=clip_peaks)
    what = "gradients of the weights" if grad else "weights"
    panels.label("gradient" if grad else "weight", "count" + (", log scale" if log else ""))
    clipped = f"tallest {clip_peaks} per panel cut off, with their count" if clip_peaks else None
    total = _data.nonfinite_note(np.concatenate([kernel.values.reshape(-1) for kernel in kernels]))
    return panels.titled(title or _data.layer_title(attrs, what), [total, clipped])


def _open(columns: dict[str | None, list[Kernel]], ax: Any, figure: Any) -> tuple[_frame.Panels, list[list[list[Any]]]]:
    """Open a row per kernel, and return its Axes by direction and kernel; kernels without gates have fewer panels."""
    used = [len(kernel.gates) or 1 for kernel in next(iter(columns.values()))]
    wide = max(used) if ax is None else 0
    rows = [wide or count for count in used]
    shape = (len(used), max(used))
    panels = _frame.open_panels(
        "weights_histogram", sum(rows), ax, figure, ways=list(columns), size=(2.3, 1.75), shape=shape
    )
    places = []
    for half in panels.halves:
        ends = np.cumsum(rows)
        whole = [half[end - row : end] for end, row in zip(ends, rows, strict=True)]
        for unused in [one for row, count in zip(whole, used, strict=True) for one in row[count:]]:
            unused.remove()
        places.append([row[:count] for row, count in zip(whole, used, strict=True)])
    panels.halves = [[one for row in half for one in row] for half in places]
    return panels, places


def _draw_row(
    row: list[Any], kernel: Kernel, edges: Numbers | None, bins: int | None, keywords: dict[str, Any]
) -> None:
    """Draw the gates of one kernel in common bins, or each in ``bins`` of its own."""
    for number, ax in enumerate(row):
        values = np.ascontiguousarray(kernel.values[:, number, :])
        draw_panel(ax, {"": values}, edges if edges is not None else equal_bins([values], bins), keywords)
        words = " · ".join(part for part in (kernel.title, kernel.gates[number] if kernel.gates else "") if part)
        ax.set_title("\n".join(part for part in (words, _data.nonfinite_note(values)) if part), fontsize="small", pad=3)
        if number and edges is not None:
            ax.tick_params(labelleft=False)
