"""``weights_heatmap``: all weights of a layer as images; ``weight_lags``: distribution of dL/dW over lags."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from ..arguments import switch
from ..errors import InputError, has_attribute
from ..measures.profiles import lag_shares
from ..recurrence.cells import kinds
from ..recurrence.measures import quantiles
from ..results.schema import weight_quantity_of
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, GATE, TIME, UNIT
from . import _axes, _data, _frame, _images
from ._call import drawing
from ._data import Numbers


def drawing_order(names: Iterable[str]) -> list[str]:
    """Sort names of weights and of their gradients from top to bottom, in the order in which cells list them."""
    listed_names = list(dict.fromkeys(name for cell in kinds().values() for name in cell.parameters))
    rank = {name: position for position, name in enumerate(listed_names)}
    return sorted(names, key=lambda name: rank.get(name.removesuffix("_grad"), len(rank)))


@dataclass(frozen=True)
class Kernel:
    """One weight of one direction, as (row, gate, unit); ``gates`` is empty without gates."""

    name: str
    value_label: str
    direction: str | None
    values: Numbers
    gates: list[str]
    row_label: str

    @property
    def title(self) -> str:
        """Name of the weight in words."""
        return self.name.removesuffix("_grad").replace("_", " ") + ", gradient" * self.name.endswith("_grad")

    @property
    def has_one_row(self) -> bool:
        """Whether the weight has a single row, as a bias does."""
        return len(self.values) == 1


def kernels_of(weights: Any, figure: str, *, grad: bool = False) -> tuple[list[Kernel], dict[str, Any]]:
    """Return weights of a layer (gradients with ``grad``) in drawing order, and its attributes; InputError for none."""
    dataset = weights.dataset if has_attribute(weights, "dataset") else weights
    if not isinstance(dataset, xr.Dataset | Mapping):
        raise InputError(
            f"plot.{figure} draws the weights of one layer.",
            got=type(weights).__name__,
            expected="a Dataset or a mapping from names to arrays",
            hint='pass rl.weights(model)["lstm"]',
        )
    names = {str(name): name for name in (dataset.data_vars if isinstance(dataset, xr.Dataset) else dataset)}
    derived_names = [name for name in names if name.endswith(("_count", "_norm")) or name.startswith("bias_total")]
    weight_names = drawing_order(name for name in names if name.endswith("_grad") == grad and name not in derived_names)
    is_recurrent = any(name.startswith("recurrent_kernel") for name in weight_names)
    arrays = {
        name: _label_weight(name, dataset[names[name]], figure, is_recurrent=is_recurrent) for name in weight_names
    }
    kernels = [kernel for name, array in arrays.items() for kernel in _split_directions(name, array)]
    if not kernels:
        raise InputError(
            f"plot.{figure} found no {'gradients of ' if grad else ''}weights here.",
            got=f"variables {', '.join(names) or 'none'}",
            expected="kernel, recurrent_kernel, bias" + (" with _grad" if grad else ""),
            hint="pass data to rl.weights(model, x, y) for gradients" if grad else 'pass rl.weights(model)["lstm"]',
        )
    return kernels, dict(dataset.attrs) if isinstance(dataset, xr.Dataset) else {}


def _label_weight(name: str, data: Any, figure: str, *, is_recurrent: bool) -> xr.DataArray:
    """Label the axes of a weight; a plain array has a gate axis if its layer ``is_recurrent`` and its rank fits."""
    if isinstance(data, xr.DataArray):
        return _data.label_array(data, figure)
    weight_info = weight_quantity_of(name.removesuffix("_grad")) if is_recurrent else None
    data = _data.to_real_numpy(data, figure)
    dims = () if weight_info is None else weight_info.dims
    if weight_info is not None and data.ndim == len(dims) + 1:
        dims = (DIRECTION, *dims)
    if weight_info is None or data.ndim != len(dims):
        dims = (*(f"axis_{i}" for i in range(data.ndim - 1)), UNIT)
    array = _data.label_array(data, figure, dims=dims).rename(name)
    if DIRECTION in dims:
        array = array.assign_coords({DIRECTION: [FORWARD, BACKWARD][: array.sizes[DIRECTION]]})
    return array


def _split_directions(name: str, array: xr.DataArray) -> list[Kernel]:
    """Split a weight by direction; a gradient by time is summed over its steps to dL/dW."""
    value_label, kernels = _data.value_label(array), []
    if TIME in array.dims:
        array = array.sum(TIME, skipna=False, keep_attrs=True)
    gates = _data.names_of(array, GATE) if GATE in array.dims else []
    for view in _data.direction_views(array):
        column_dim = str(view.data.dims[-1])
        row_dims = [str(dim) for dim in view.data.dims if dim not in (GATE, column_dim)]
        ordered_values = view.data.transpose(*row_dims, *([GATE] if gates else []), column_dim).values
        values = ordered_values.reshape(-1, len(gates) or 1, array.sizes[column_dim])
        row_label = ", ".join(_data.axis_label(array, row_dim) for row_dim in row_dims)
        kernels.append(Kernel(name, value_label, view.name, values, gates, row_label))
    return kernels


def group_by_direction(kernels: list[Kernel]) -> dict[str | None, list[Kernel]]:
    """Return the kernels of each direction, forward first."""
    kernels_by_direction: dict[str | None, list[Kernel]] = {}
    for kernel in kernels:
        kernels_by_direction.setdefault(kernel.direction, []).append(kernel)
    return kernels_by_direction


#: Largest number of rows and columns of one kernel.
CELLS = (256, 800)


@drawing(AxesImage, extra=_images.IMSHOW)
def weights_heatmap(
    weights: Any,
    *,
    grad: bool = False,
    absolute: bool = False,
    shared: bool = True,
    limit: float | None = None,
    log: bool = False,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw kernel, recurrent kernel and bias of a layer above each other, so that the columns of a unit line up.

    Gates are side by side with separators and names, the backward direction is beside the forward one. Missing values
    are grey and crossed out, and counted for each kernel; nothing is set to zero.

    Parameters
    ----------
    weights
        The weights of one layer: a Dataset with kernel (feature, gate, unit), recurrent_kernel (unit_in, gate, unit),
        bias (gate, unit), any of them with direction, in any order; or a mapping from names to such arrays. Weights of
        layers that are not recurrent are drawn with their last dimension across.
    absolute
        Draw magnitudes, on a scale from white at 0.
    shared
        One colour scale for all kernels; else each has its own scale and colour bar. A bias (a single row) always has
        its own, as a forget bias of 1 would make the kernels look empty.
    limit
        Colour scale up to this magnitude. By default the largest of the kernels, or the 99.5 % quantile of their
        magnitudes where the largest is more than twice that (a few outliers), which the title states.

    Returns
    -------
    1-D array of Axes, kernel by kernel, forward before backward

    Examples
    --------
    >>> axes = rl.plot.weights_heatmap(rl.weights(model)["lstm"])
    >>> len(axes)  # both kernels, both biases of torch
    4
    """
    kernels, attrs = kernels_of(weights, "weights_heatmap", grad=grad)
    kernels_by_direction = group_by_direction(kernels)
    panels = _open_panels(kernels_by_direction, ax, figure)
    common_limit, clip_note = (limit, None) if limit is not None else _common_limit(kernels)
    images = []
    for direction_kernels, direction_axes in zip(kernels_by_direction.values(), panels.axes_by_direction, strict=True):
        for kernel, panel_ax in zip(direction_kernels, direction_axes, strict=True):
            is_common = limit is not None or (shared and not kernel.has_one_row)
            panel_limit = common_limit if is_common else _data.largest_magnitude(kernel.values)
            images.append(_draw_weight_maps(panel_ax, kernel, panel_limit, image, absolute=absolute, log=log))
    value_label = kernels[0].value_label if len(kernels) == 1 else "gradient" if grad else "weight"
    if colorbar:
        _draw_colour_bars(
            panels,
            list(kernels_by_direction.values()),
            images,
            f"|{value_label}|" if absolute else value_label,
            shared=shared,
        )
    panels.label_axes("gate, unit" if any(kernel.gates for kernel in kernels) else "unit", "")
    quantity_name = "gradients of the weights" if grad else "weights"
    return panels.with_title(title or _data.layer_title(attrs, quantity_name), [_merge_note(kernels), clip_note])


def _merge_note(kernels: list[Kernel]) -> str | None:
    """Return one note on merged cells of all kernels: that of the only merged one, or the most that a cell shows."""
    notes = {kernel.title: _images.merge_note(*_cell_limits(kernel), "row", "unit") for kernel in kernels}
    merged = {title: note for title, note in notes.items() if note}
    if len(merged) < 2:
        return next((f"{title}: {note}" for title, note in merged.items()), None)
    rows, units = np.max([_images.merge_factors(*_cell_limits(kernel)) for kernel in kernels], axis=0)
    return f"one cell shows up to {rows} rows x {units} units, by their value of largest magnitude"


def _draw_colour_bars(
    panels: _frame.Panels, kernels_by_direction: list[list[Kernel]], images: list[Any], label: str, *, shared: bool
) -> None:
    """Draw a colour bar for the kernels and one for each bias; those of the first of two directions are invisible."""
    remaining_images = iter(images)
    for number, (direction_kernels, direction_axes) in enumerate(
        zip(kernels_by_direction, panels.axes_by_direction, strict=True)
    ):
        drawn_kernels = [
            (kernel, ax, next(remaining_images)) for kernel, ax in zip(direction_kernels, direction_axes, strict=True)
        ]
        shared_images = [(ax, image) for kernel, ax, image in drawn_kernels if shared and not kernel.has_one_row]
        bars = []
        if shared_images:
            shared_axes, shared_pictures = zip(*shared_images, strict=True)
            bars.append(_images.colour_bar(shared_axes, shared_pictures[-1], label, images=shared_pictures))
        for kernel, ax, image in drawn_kernels:
            if not shared or kernel.has_one_row:
                bars.append(_images.colour_bar([ax], image, label if len(drawn_kernels) == 1 else ""))
            if kernel.has_one_row:
                bars[-1].set_ticks([tick for tick in (image.norm.vmin, 0, image.norm.vmax) if tick is not None])
                bars[-1].ax.yaxis.set_major_formatter("{x:.2g}")
        for bar in bars if number + 1 < len(kernels_by_direction) and panels.direction_figures else ():
            _images.hide_colour_bar(bar)


def _open_panels(kernels_by_direction: dict[str | None, list[Kernel]], ax: Any, figure: Any) -> _frame.Panels:
    """Open one row per kernel, with heights by their numbers of rows, within limits."""
    kernel_rows, directions = list(zip(*kernels_by_direction.values(), strict=True)), list(kernels_by_direction)
    heights = [
        0.1 + 2.6 * min(1.0, max(kernel.values.shape[0] for kernel in kernel_row) / 64) ** 0.6
        for kernel_row in kernel_rows
    ]
    most_columns = max(kernel_row[0].values.shape[1] * kernel_row[0].values.shape[2] for kernel_row in kernel_rows)
    size = (
        float(
            np.clip(
                most_columns / 60,
                4.5 if len(kernels_by_direction) == 1 else 3.2,
                10.0 / len(kernels_by_direction) + 1.5,
            )
        ),
        sum(heights) / len(kernel_rows) + 0.35,
    )
    sizes: dict[str, Any] = {"size": size, "margin": (1.9, 1.0), "shape": (len(kernel_rows), 1), "heights": heights}
    return _frame.open_panels("weights_heatmap", len(kernel_rows), ax, figure, directions=directions, **sizes)


def _common_limit(kernels: list[Kernel]) -> tuple[float, str | None]:
    """Return the colour limit of all kernels, and a note if values exceed it."""
    matrices = [kernel.values for kernel in kernels if not kernel.has_one_row] or [kernel.values for kernel in kernels]
    largest = _data.largest_magnitude(*matrices)
    magnitudes = np.abs(np.concatenate([values.reshape(-1) for values in matrices]))
    (upper_quantile,) = quantiles(magnitudes[np.isfinite(magnitudes)], q=(0.995,), axis=0) if largest else (0.0,)
    if not upper_quantile or largest <= 2 * upper_quantile:
        return largest, None
    note = f"colours end at {upper_quantile:.2g}, the 99.5 % quantile of magnitudes; largest {largest:.3g}"
    return float(upper_quantile), note


def _cell_limits(kernel: Kernel) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return rows and columns of one gate's block of a kernel, and how many of them can be shown."""
    rows, gates, units = kernel.values.shape
    return (rows, units), (CELLS[0], max(1, CELLS[1] // gates))


def _draw_weight_maps(
    ax: Any, kernel: Kernel, limit: float, keywords: dict[str, Any], *, absolute: bool, log: bool
) -> Any:
    """Draw one kernel with its separators and its count of missing values."""
    rows, gates, units = kernel.values.shape
    matrix = kernel.values.reshape(rows, gates * units)
    matrix = np.abs(matrix) if absolute else matrix
    merged = _images.merge_factors(*_cell_limits(kernel))
    image = _images.draw_image(
        ax,
        _images.Matrix(matrix, np.arange(gates * units), np.arange(rows), over_time=False),
        style={**_axes.colour_scale(matrix, limit, log=log, positive=absolute), **keywords},
        cell_limits=(-(-rows // merged[0]), -(-gates * units // merged[1])),
    )
    nonfinite_note = _data.nonfinite_note(kernel.values)
    ax.set_title(
        " · ".join(title_part for title_part in (kernel.title, nonfinite_note) if title_part), fontsize="small", pad=3
    )
    ax.set_ylabel(textwrap.fill(kernel.row_label, 12), fontsize="small")
    if kernel.gates:
        _images.draw_separators(ax, "x", units, kernel.gates)
    if rows == 1:
        ax.set_yticks([])
    return image


@drawing(Line2D, cumulative=switch)
def weight_lags(
    weights: Any,
    *,
    cumulative: bool = True,
    delays: Any = (),
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw the share of dL/dW against the lag, cumulative or at each lag: a line per gate, a panel per weight.

    The contribution of a step is measured by its norm. If a cumulative line is near 1 at small lags, the weight learns
    from the last steps only, even if the states remember more.

    Parameters
    ----------
    weights
        One layer of ``rl.weights(model, x, y, by_time=True)``, also with ``measure="norm"``: variables such as
        ``recurrent_kernel_grad (time, unit_in, gate, unit)`` or ``recurrent_kernel_grad_norm (time, gate)``.
    cumulative
        Share of all lags up to each, or False: share of each lag, in which single steps that count stand out.

    Returns
    -------
    1-D array of Axes, weight by weight, forward before backward

    Examples
    --------
    >>> weights = rl.weights(model, x, y, loss=mse_loss, by_time=True)
    >>> axes = rl.plot.weight_lags(weights["lstm"])
    >>> len(axes)  # one per weight
    4
    """
    dataset = _data.dataset_of(weights)
    names = [] if dataset is None else [str(name).removesuffix("_norm") for name in dataset.data_vars]
    weights_of = drawing_order(sorted({name.removesuffix("_grad") for name in names if name.endswith("_grad")}))
    norms_by_weight = {name: array for name in weights_of if (array := _norms_by_time(dataset, name)) is not None}
    if dataset is None or not norms_by_weight:
        raise InputError(
            "plot.weight_lags needs gradients of the weights by time.",
            got=type(weights).__name__ if dataset is None else f"variables {', '.join(map(str, dataset.data_vars))}",
            expected="recurrent_kernel_grad (time, unit_in, gate, unit), or its norm (time, gate)",
            hint='pass rl.weights(model, x, y, by_time=True)["lstm"]',
        )
    first_norms = next(iter(norms_by_weight.values()))
    directions = [view.name for view in _data.direction_views(first_norms)]
    size = (4.6, 3.0) if len(norms_by_weight) == 1 else (4.6 / len(directions) ** 0.5, 1.5)
    sizes: dict[str, Any] = {"size": size, "shape": (len(norms_by_weight), 1)}  # one scale of lags below the other
    panels = _frame.open_panels("weight_lags", len(norms_by_weight), ax, figure, directions=directions, **sizes)
    for number, (direction_axes, direction) in enumerate(zip(panels.axes_by_direction, directions, strict=True)):
        for panel_ax, (name, array) in zip(direction_axes, norms_by_weight.items(), strict=True):
            direction_norms = array.isel({DIRECTION: number}) if direction else array
            half_text = _draw_weight_lags(
                panel_ax, direction_norms, BACKWARD in (direction, dataset.attrs.get("direction")), cumulative, line
            )
            _axes.mark_delays(panel_ax, delays)
            panel_ax.set_title(name.replace("_", " ") + half_text, fontsize="small", pad=3)
    panels.label_axes("lag (steps before the last)", "share of dL/dW" + ", cumulative" * cumulative)
    panels.hide_inner_ticks()
    handles, labels = panels.axes[0].get_legend_handles_labels()
    if labels != ["all"]:
        panels.draw_legend(handles, location="right center")
    all_norms = np.concatenate([array.values.reshape(-1) for array in norms_by_weight.values()])
    default_title = _data.layer_title(dataset.attrs, "lags that make up dL/dW")
    return panels.with_title(title or default_title, [_data.nonfinite_note(all_norms)])


def _norms_by_time(dataset: Any, name: str) -> xr.DataArray | None:
    """Return the norms of each step's part of dL/dW, (direction, time, gate); None without a gradient by time."""
    for key in (f"{name}_grad_norm", f"{name}_grad"):
        if key in dataset and TIME in dataset[key].dims:
            array = _data.label_array(dataset[key], "weight_lags")
            row_dims = [str(dim) for dim in array.dims if dim not in (TIME, GATE, DIRECTION)]
            if row_dims and not (row_dims == [UNIT] and GATE not in array.dims and key.endswith("_norm")):
                array = _data.norm_over(array, row_dims)
            return array if GATE in array.dims else array.expand_dims({GATE: [""]})
    return None


def _draw_weight_lags(ax: Any, norms: xr.DataArray, runs_back: bool, cumulative: bool, keywords: dict[str, Any]) -> str:
    """Draw the share of dL/dW of each lag, or of all lags up to it: one line for each gate of the weight.

    Return in words which lags make up half of it, the gates together; "" if it is not known.
    """
    names = _data.names_of(norms, GATE)
    shares = lag_shares(norms.transpose(TIME, GATE).values, runs_back=runs_back)
    together = shares.mean(axis=0)
    shares = shares if cumulative else np.diff(shares, axis=1, prepend=0.0)
    lags = np.arange(shares.shape[1])
    for name, share, colour in zip(names, shares, _axes.line_colours(len(names)), strict=True):
        style = {"color": colour, "linewidth": 1.3, "label": name or "all", "gid": f"share {name}".strip()}
        style["marker"] = "o" if len(lags) == 1 else None
        ax.plot(lags, share, **{**style, **keywords})
    if not np.isfinite(shares).all():
        undefined_gates = [name for name, share in zip(names, shares, strict=True) if not np.isfinite(share).all()]
        text = "no share: " + ", ".join(undefined_gates)
        _axes.write_text(ax, text, (0.97, 0.05), over="axes fraction", va="baseline", gid="silent")
    if cumulative:
        ax.axhline(1, color=_axes.REFERENCE_GREY, linewidth=0.6, zorder=0.5)
        ax.set_ylim(-0.03, 1.05)
    else:
        ax.set_ylim(bottom=0)
    _axes.tick_steps(ax, "x", lags, time=False, margin=0.5)
    if not np.isfinite(together).all():
        return ""
    if not cumulative:
        _name_peaks(ax, np.diff(together, prepend=0.0), shares.max(axis=0))
    last_lag = int(np.searchsorted(together, 0.5))
    return f": half from lag{f's 0 to {last_lag}' if last_lag else ' 0'}"


def _name_peaks(ax: Any, shares: Numbers, heights: Numbers) -> None:
    """Name the lags that stand out: up to three, with at least four times the share of a typical lag."""
    neighbours = np.pad(shares, 1)
    is_peak = (shares >= neighbours[:-2]) & (shares >= neighbours[2:])
    largest = np.argsort(np.where(is_peak, -shares, 0.0), kind="stable")[:3]
    for lag in largest[shares[largest] >= max(4 * float(np.median(shares)), 0.02)]:
        _axes.write_text(ax, f"{lag}", (float(lag), float(heights[lag])), (3, 0), ha="left", va="top", gid="peak")
