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
from .weights import Kernel, group_by_direction, kernels_of


def equal_bins(arrays: Sequence[Numbers], bins: int | None) -> Numbers:
    """Return the edges of equal bins over the finite values of all arrays; :func:`histogram` states their number."""
    if bins is None:
        bins = int(np.clip(np.sqrt(max(array.size for array in arrays)), 10, 60))
    ranges = [value_range for value_range in map(_data.finite_range, arrays) if value_range is not None]
    low = min((low for low, _ in ranges), default=0.0)
    high = max((high for _, high in ranges), default=0.0)
    if low == high:
        margin = abs(low) * 0.1 or 0.5
        low, high = low - margin, high + margin
    return np.linspace(low, high, bins + 1)


def count_in_bins(values: Numbers, edges: Numbers) -> Numbers:
    """Count finite values per bin, in pieces, so that memory does not grow with the data."""
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    bin_range = (np.float64(edges[0]), np.float64(edges[-1]))  # Python floats would put the bin edges into float32
    for chunk in _data.chunks(values):
        is_finite = np.isfinite(chunk)
        counts += np.histogram(chunk if is_finite.all() else chunk[is_finite], bins=len(counts), range=bin_range)[0]
    return counts


def draw_panel(ax: Any, content: Mapping[str, Numbers], edges: Numbers, keywords: Mapping[str, Any]) -> None:
    """Draw one histogram per layer, or write value and count if all finite values of the panel are equal."""
    has_several, first_values = len(content) > 1, next(iter(content.values()))
    lowest, value = _data.finite_range(first_values) or (0.0, 1.0)
    if not has_several and lowest == value and first_values.size > 1:
        count = int(np.isfinite(first_values).sum())
        ax.axvline(value, color=_axes.BLUE, linewidth=1.4, gid="constant")
        point, transform = (value, 0.5), ax.get_xaxis_transform()
        _axes.write_text(
            ax, f"{count:,} x {value:g}", point, (4, 0), over=transform, ha="left", fontsize="small", gid="constant"
        )
        ax.set_xlim(*((edges[0], edges[-1]) if edges[0] < value < edges[-1] else (value - 0.5, value + 0.5)))
        ax.set_yticks([])
        ax.set_xticks([value])
        return
    for (name, values), colour in zip(content.items(), _axes.line_colours(len(content)), strict=True):
        counts = count_in_bins(values, edges)
        is_outlined = len(content) > 2
        style: dict[str, Any] = {"fill": not is_outlined, "edgecolor": colour, "linewidth": 0.2}
        style |= {} if is_outlined else {"facecolor": colour}
        style |= {"linewidth": 1.3 if is_outlined else 0.9} if has_several else {}
        style["alpha"] = 1.0 if is_outlined or not has_several else 0.35
        if "color" in keywords:
            style = {key: style[key] for key in ("fill", "linewidth", "alpha")}
        ax.stairs(counts, edges, **{"gid": f"histogram {name}".strip(), **style, **keywords})
    ax.set_xlim(edges[0], edges[-1])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4))


def _step_patches(ax: Any) -> list[Any]:
    return [patch for patch in ax.patches if isinstance(patch, StepPatch)]


def scale_counts(axes: Sequence[Any], *, shared: bool, log: bool, clip_peaks: int) -> None:
    """Set the axes of counts; with ``clip_peaks``, cut off the tallest bars and write their counts."""
    axes_with_bars = [ax for ax in axes if _step_patches(ax)]
    sorted_counts = [
        np.sort(np.concatenate([step.get_data().values for step in _step_patches(ax)])) for ax in axes_with_bars
    ]
    tops = [float(max(1, counts[: len(counts) - clip_peaks].max(initial=1))) for counts in sorted_counts]
    for ax, panel_top in zip(axes_with_bars, tops, strict=True):
        top = max(tops) if shared else panel_top
        if log:
            ax.set_yscale("log")
            ax.set_ylim(0.6, top * 2)
        else:
            ax.set_ylim(0, top * 1.12)
        if clip_peaks:
            counts_and_edges = [
                (step_patch.get_data().values, step_patch.get_data().edges) for step_patch in _step_patches(ax)
            ]
            clipped_bars = [
                (count, 0.5 * (left + right))
                for counts, edges in counts_and_edges
                for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True)
                if count > panel_top
            ]
            centre, transform = 0.5 * sum(ax.get_xlim()), ax.get_xaxis_transform()
            for row, (count, bar_middle) in enumerate(sorted(clipped_bars, reverse=True)[:clip_peaks]):
                offset, alignment = (4, "left") if bar_middle < centre else (-4, "right")
                point = (bar_middle, 0.97 - 0.1 * row)
                _axes.write_text(
                    ax,
                    f"{int(count):,} ↑",
                    point,
                    (offset, 0),
                    over=transform,
                    ha=alignment,
                    va="top",
                    gid="clipped peak",
                )


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

    Examples
    --------
    >>> axes = rl.plot.histogram(trace["lstm"].hidden_grad)
    >>> len(axes)
    1
    """
    arrays = _arrays_by_name(data, dims, overlay)
    first_array = next(iter(arrays.values()))
    panel_dims = [panel] if isinstance(panel, str) else list(panel or ())
    for dim in panel_dims:
        _data.require_dim(first_array, dim, "histogram")
    selections = _images.panel_selections(first_array, panel_dims)
    panel_indices, panel_note = _data.select_evenly(
        len(selections), max_panels, " x ".join(f"{d}s" for d in panel_dims) or "panels", page=page
    )
    grid_shape = (
        (first_array.sizes[panel_dims[0]], first_array.sizes[panel_dims[1]])
        if len(panel_dims) == 2 and not panel_note
        else None
    )
    size = (5.0, 3.2) if len(panel_indices) == 1 else (2.4, 1.7)
    panels = _frame.open_panels("histogram", len(panel_indices), ax, figure, size=size, shape=grid_shape)
    contents = [{name: array.isel(selections[i][0]).values for name, array in arrays.items()} for i in panel_indices]
    common_edges = equal_bins([values for content in contents for values in content.values()], bins) if shared else None
    for panel_ax, content, i in zip(panels.axes, contents, panel_indices, strict=True):
        draw_panel(
            panel_ax, content, equal_bins(list(content.values()), bins) if common_edges is None else common_edges, step
        )
        notes = map(_data.nonfinite_note, content.values())  # the exact share of NaN and Inf
        panel_ax.set_title("\n".join(part for part in (selections[i][1], *notes) if part), fontsize="small", pad=3)
    scale_counts(panels.axes, shared=shared, log=log, clip_peaks=clip_peaks)
    panels.label_axes(_data.value_label(first_array), "count" + (", log scale" if log else ""))
    if len(arrays) > 1:
        pairs = list(zip(arrays, _axes.line_colours(len(arrays)), strict=True))
        handles: list[Any] = [Line2D([], [], color=colour, label=name) for name, colour in pairs]
        if len(pairs) == 2:
            handles = [Patch(color=colour, alpha=0.6, label=name) for name, colour in pairs]
        panels.draw_legend(handles, title=_data.axis_label(first_array, overlay) if overlay else None)
    if shared:
        panels.hide_inner_ticks()
    total_note = None if len(arrays) > 1 else _data.nonfinite_note(first_array.values)
    clip_note = f"tallest {clip_peaks} per panel cut off, with their count" if clip_peaks else None
    return panels.with_title(title or _data.title_of(first_array), [panel_note, total_note, clip_note])


def _arrays_by_name(data: Any, dims: Sequence[str] | None, overlay: str | None) -> dict[str, xr.DataArray]:
    """Return the arrays whose histograms are drawn over each other, by name."""
    if isinstance(data, Mapping) and _data.dataset_of(data) is None:
        if overlay is not None:
            raise InputError(
                "A mapping is overlaid already.", got=f"overlay={overlay!r} and a mapping", expected="one of them"
            )
        arrays = {
            str(name): _data.label_array(array, "histogram", dims=dims, guess=GUESS) for name, array in data.items()
        }
        if not arrays:
            raise InputError("plot.histogram got nothing to draw.", got="an empty mapping", expected="arrays by name")
        return arrays
    array = _data.label_array(data, "histogram", dims=dims, guess=GUESS)
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

    Examples
    --------
    >>> axes = rl.plot.weights_histogram(rl.weights(model)["lstm"])
    >>> len(axes)  # a row per kernel, a column per gate
    16
    """
    kernels, attrs = kernels_of(weights, "weights_histogram", grad=grad)
    columns = group_by_direction(kernels)
    panels, axes_by_kernel = _open_panels(columns, ax, figure)
    edges = equal_bins([kernel.values for kernel in kernels], bins) if shared is True else None
    for column, kernel_axes in zip(columns.values(), axes_by_kernel, strict=True):
        for kernel, row_axes in zip(column, kernel_axes, strict=True):
            _draw_row(row_axes, kernel, equal_bins([kernel.values], bins) if shared == "row" else edges, bins, step)
            if shared is not True:
                scale_counts(row_axes, shared=bool(shared), log=log, clip_peaks=clip_peaks)
    if shared is True:
        scale_counts(panels.axes, shared=True, log=log, clip_peaks=clip_peaks)
    quantity_name = "gradients of the weights" if grad else "weights"
    panels.label_axes("gradient" if grad else "weight", "count" + (", log scale" if log else ""))
    clip_note = f"tallest {clip_peaks} per panel cut off, with their count" if clip_peaks else None
    nonfinite_note = _data.nonfinite_note(np.concatenate([kernel.values.reshape(-1) for kernel in kernels]))
    return panels.with_title(title or _data.layer_title(attrs, quantity_name), [nonfinite_note, clip_note])


def _open_panels(
    columns: dict[str | None, list[Kernel]], ax: Any, figure: Any
) -> tuple[_frame.Panels, list[list[list[Any]]]]:
    """Open a row per kernel, and return its Axes by direction and kernel; kernels without gates have fewer panels."""
    used_counts = [len(kernel.gates) or 1 for kernel in next(iter(columns.values()))]
    common_width = max(used_counts) if ax is None else 0
    row_lengths = [common_width or count for count in used_counts]
    shape = (len(used_counts), max(used_counts))
    panels = _frame.open_panels(
        "weights_histogram", sum(row_lengths), ax, figure, directions=list(columns), size=(2.3, 1.75), shape=shape
    )
    axes_by_kernel = []
    for direction_axes in panels.axes_by_direction:
        row_ends = np.cumsum(row_lengths)
        axes_rows = [direction_axes[end - row : end] for end, row in zip(row_ends, row_lengths, strict=True)]
        for unused_ax in [
            panel_ax for row, count in zip(axes_rows, used_counts, strict=True) for panel_ax in row[count:]
        ]:
            unused_ax.remove()
        axes_by_kernel.append([row[:count] for row, count in zip(axes_rows, used_counts, strict=True)])
    panels.axes_by_direction = [
        [panel_ax for row in direction_axes for panel_ax in row] for direction_axes in axes_by_kernel
    ]
    return panels, axes_by_kernel


def _draw_row(
    row_axes: list[Any], kernel: Kernel, edges: Numbers | None, bins: int | None, keywords: dict[str, Any]
) -> None:
    """Draw the gates of one kernel in common bins, or each in ``bins`` of its own."""
    for number, ax in enumerate(row_axes):
        values = np.ascontiguousarray(kernel.values[:, number, :])
        draw_panel(ax, {"": values}, edges if edges is not None else equal_bins([values], bins), keywords)
        panel_title = " · ".join(
            title_part for title_part in (kernel.title, kernel.gates[number] if kernel.gates else "") if title_part
        )
        ax.set_title(
            "\n".join(title_part for title_part in (panel_title, _data.nonfinite_note(values)) if title_part),
            fontsize="small",
            pad=3,
        )
        if number and edges is not None:
            ax.tick_params(labelleft=False)
