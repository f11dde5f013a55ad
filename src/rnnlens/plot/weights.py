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

from ..errors import InputError, has_attribute
from ..measures.profiles import lag_shares
from ..recurrence.cells import kinds
from ..recurrence.measures import quantiles
from ..results.schema import weight_of
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, GATE, TIME, UNIT
from . import _axes, _data, _frame, _images
from ._call import drawing
from ._data import Numbers


def drawing_order(names: Iterable[str]) -> list[str]:
    """Sort names of weights and of their gradients from top to bottom, in the order in which cells list them."""
    listed = list(dict.fromkeys(name for cell in kinds().values() for name in cell.parameters))
    rank = {name: position for position, name in enumerate(listed)}
    return sorted(names, key=lambda name: rank.get(name.removesuffix("_grad"), len(rank)))


@dataclass(frozen=True)
class Kernel:
    """One weight of one direction, as (row, gate, unit); ``gates`` is empty without gates."""

    name: str
    words: str
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
    derived = [name for name in names if name.endswith(("_count", "_norm")) or name.startswith("bias_total")]
    wanted = drawing_order(name for name in names if name.endswith("_grad") == grad and name not in derived)
    recurrent = any(name.startswith("recurrent_kernel") for name in wanted)
    arrays = {name: _labelled(name, dataset[names[name]], figure, recurrent=recurrent) for name in wanted}
    found = [kernel for name, array in arrays.items() for kernel in _split(name, array)]
    if not found:
        raise InputError(
            f"plot.{figure} found no {'gradients of ' if grad else ''}weights here.",
            got=f"variables {', '.join(names) or 'none'}",
            expected="kernel, recurrent_kernel, bias" + (" with _grad" if grad else ""),
            hint="pass data to rl.weights(model, x, y) for gradients" if grad else 'pass rl.weights(model)["lstm"]',
        )
    return found, dict(dataset.attrs) if isinstance(dataset, xr.Dataset) else {}


def _labelled(name: str, data: Any, figure: str, *, recurrent: bool) -> xr.DataArray:
    """Label the axes of a weight; a plain array of a ``recurrent`` layer has a gate axis if its rank fits."""
    if isinstance(data, xr.DataArray):
        return _data.labelled(data, figure)
    known = weight_of(name.removesuffix("_grad")) if recurrent else None
    data = _data.numbers(data, figure)
    dims = () if known is None else known.dims
    if known is not None and data.ndim == len(dims) + 1:
        dims = (DIRECTION, *dims)
    if known is None or data.ndim != len(dims):
        dims = (*(f"axis_{i}" for i in range(data.ndim - 1)), UNIT)
    array = _data.labelled(data, figure, dims=dims).rename(name)
    if DIRECTION in dims:
        array = array.assign_coords({DIRECTION: [FORWARD, BACKWARD][: array.sizes[DIRECTION]]})
    return array


def _split(name: str, array: xr.DataArray) -> list[Kernel]:
    """Split a weight by direction; a gradient by time is summed over its steps to dL/dW."""
    words, kernels = _data.value_label(array), []
    if TIME in array.dims:
        array = array.sum(TIME, skipna=False, keep_attrs=True)
    gates = _data.names_of(array, GATE) if GATE in array.dims else []
    for half in _data.halves(array):
        columns = str(half.data.dims[-1])
        rows = [str(d) for d in half.data.dims if d not in (GATE, columns)]
        ordered = half.data.transpose(*rows, *([GATE] if gates else []), columns).values
        values = ordered.reshape(-1, len(gates) or 1, array.sizes[columns])
        label = ", ".join(_data.axis_label(array, row) for row in rows)
        kernels.append(Kernel(name, words, half.name, values, gates, label))
    return kernels


def by_direction(kernels: list[Kernel]) -> dict[str | None, list[Kernel]]:
    """Return the kernels of each direction, forward first."""
    columns: dict[str | None, list[Kernel]] = {}
    for kernel in kernels:
        columns.setdefault(kernel.direction, []).append(kernel)
    return columns


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
    """
    kernels, attrs = kernels_of(weights, "weights_heatmap", grad=grad)
    columns = by_direction(kernels)
    panels = _open(columns, ax, figure)
    top, clipped = (limit, None) if limit is not None else _common_limit(kernels)
    drawn = []
    for column, axes in zip(columns.values(), panels.halves, strict=True):
        for kernel, place in zip(column, axes, strict=True):
            is_common = limit is not None or (shared and not kernel.has_one_row)
            own = top if is_common else _data.largest_magnitude(kernel.values)
            drawn.append(_draw_weight_maps(place, kernel, own, image, absolute=absolute, log=log))
    label = kernels[0].words if len(kernels) == 1 else "gradient" if grad else "weight"
    if colorbar:
        _bars(panels, list(columns.values()), drawn, f"|{label}|" if absolute else label, shared=shared)
    panels.label("gate, unit" if any(kernel.gates for kernel in kernels) else "unit", "")
    what = "gradients of the weights" if grad else "weights"
    merge_notes = [(kernel.title, _images.merge_note(*_cells(kernel), "row", "unit")) for kernel in kernels]
    merged = dict.fromkeys(f"{name}: {note}" for name, note in merge_notes if note)
    return panels.titled(title or _data.layer_title(attrs, what), [*merged, clipped])


def _bars(panels: _frame.Panels, columns: list[list[Kernel]], drawn: list[Any], label: str, *, shared: bool) -> None:
    """Draw a colour bar for the kernels and one for each bias; those of the first of two directions are invisible."""
    images = iter(drawn)
    for number, (column, axes) in enumerate(zip(columns, panels.halves, strict=True)):
        shown = [(kernel, ax, next(images)) for kernel, ax in zip(column, axes, strict=True)]
        together = [(ax, image) for kernel, ax, image in shown if shared and not kernel.has_one_row]
        bars = []
        if together:
            places, pictures = zip(*together, strict=True)
            bars.append(_images.colour_bar(places, pictures[-1], label, among=pictures))
        for kernel, ax, image in shown:
            if not shared or kernel.has_one_row:
                bars.append(_images.colour_bar([ax], image, label if len(shown) == 1 else ""))
            if kernel.has_one_row:
                bars[-1].set_ticks([tick for tick in (image.norm.vmin, 0, image.norm.vmax) if tick is not None])
                bars[-1].ax.yaxis.set_major_formatter("{x:.2g}")
        for bar in bars if number + 1 < len(columns) and panels.owners else ():
            _images.fade(bar)


def _open(columns: dict[str | None, list[Kernel]], ax: Any, figure: Any) -> _frame.Panels:
    """Open one row per kernel, with heights by their numbers of rows, within limits."""
    rows, ways = list(zip(*columns.values(), strict=True)), list(columns)
    tall = [0.1 + 2.6 * min(1.0, max(kernel.values.shape[0] for kernel in row) / 64) ** 0.6 for row in rows]
    wide = max(row[0].values.shape[1] * row[0].values.shape[2] for row in rows)
    size = float(np.clip(wide / 60, 4.5, 10.0 / len(columns) + 1.5)), sum(tall) / len(rows) + 0.35
    sizes: dict[str, Any] = {"size": size, "margin": (1.9, 1.0), "shape": (len(rows), 1), "heights": tall}
    return _frame.open_panels("weights_heatmap", len(rows), ax, figure, ways=ways, **sizes)


def _common_limit(kernels: list[Kernel]) -> tuple[float, str | None]:
    """Return the colour limit of all kernels, and a note if values exceed it."""
    matrices = [kernel.values for kernel in kernels if not kernel.has_one_row] or [kernel.values for kernel in kernels]
    largest = _data.largest_magnitude(*matrices)
    magnitudes = np.abs(np.concatenate([values.reshape(-1) for values in matrices]))
    (bulk,) = quantiles(magnitudes[np.isfinite(magnitudes)], q=(0.995,), axis=0) if largest else (0.0,)
    if not bulk or largest <= 2 * bulk:
        return largest, None
    return float(bulk), f"colours end at {bulk:.2g}, the 99.5 % quantile of magnitudes; largest {largest:.3g}"


def _cells(kernel: Kernel) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return rows and columns of one gate's block of a kernel, and how many of them can be shown."""
    rows, gates, units = kernel.values.shape
    return (rows, units), (CELLS[0], max(1, CELLS[1] // gates))


def _draw_weight_maps(
    ax: Any, kernel: Kernel, top: float, keywords: dict[str, Any], *, absolute: bool, log: bool
) -> Any:
    """Draw one kernel with its separators and its count of missing values."""
    rows, gates, units = kernel.values.shape
    matrix = kernel.values.reshape(rows, gates * units)
    matrix = np.abs(matrix) if absolute else matrix
    steps = _images.steps_for(*_cells(kernel))
    drawn = _images.draw_image(
        ax,
        _images.Matrix(matrix, np.arange(gates * units), np.arange(rows), over_time=False),
        look={**_axes.colours(matrix, top, log=log, positive=absolute), **keywords},
        limits=(-(-rows // steps[0]), -(-gates * units // steps[1])),
    )
    missing = _data.nonfinite_note(kernel.values)
    ax.set_title(" · ".join(part for part in (kernel.title, missing) if part), fontsize="small", pad=3)
    ax.set_ylabel(textwrap.fill(kernel.row_label, 12), fontsize="small")
    if kernel.gates:
        _images.separate(ax, "x", units, kernel.gates)
    if rows == 1:
        ax.set_yticks([])
    return drawn


@drawing(Line2D)
def weight_lags(
    weights: Any,
    *,
    delays: Any = (),
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw the cumulative share of dL/dW against the lag: a line per gate, a panel per weight.

    The contribution of a step is measured by its norm. If a line is near 1 at small lags, the weight learns from the
    last steps only, even if the states remember more.

    Parameters
    ----------
    weights
        One layer of ``rl.weights(model, x, y, by_time=True)``, also with ``measure="norm"``: variables such as
        ``recurrent_kernel_grad (time, unit_in, gate, unit)`` or ``recurrent_kernel_grad_norm (time, gate)``.

    Returns
    -------
    1-D array of Axes, weight by weight, forward before backward
    """
    dataset = _data.dataset_of(weights)
    names = [] if dataset is None else [str(name).removesuffix("_norm") for name in dataset.data_vars]
    weights_of = drawing_order(sorted({name.removesuffix("_grad") for name in names if name.endswith("_grad")}))
    found = {name: array for name in weights_of if (array := _by_time(dataset, name)) is not None}
    if dataset is None or not found:
        raise InputError(
            "plot.weight_lags needs gradients of the weights by time.",
            got=type(weights).__name__ if dataset is None else f"variables {', '.join(map(str, dataset.data_vars))}",
            expected="recurrent_kernel_grad (time, unit_in, gate, unit), or its norm (time, gate)",
            hint='pass rl.weights(model, x, y, by_time=True)["lstm"]',
        )
    first = next(iter(found.values()))
    ways = [half.name for half in _data.halves(first)]
    size = (4.6, 3.0) if len(found) == 1 else (3.0, 2.3)
    panels = _frame.open_panels("weight_lags", len(found), ax, figure, ways=ways, size=size)
    for number, (places, way) in enumerate(zip(panels.halves, ways, strict=True)):
        for place, (name, array) in zip(places, found.items(), strict=True):
            one = array.isel({DIRECTION: number}) if way else array
            _draw_weight_lags(place, one, BACKWARD in (way, dataset.attrs.get("direction")), delays, line)
            place.set_title(name.replace("_", " "), fontsize="small", pad=3)
    panels.label("lag (steps before the last)", "share of dL/dW, cumulative")
    panels.outer_ticks_only()
    handles, labels = panels.axes[0].get_legend_handles_labels()
    if labels != ["all"]:
        panels.legend(handles, beside="right center")
    everything = np.concatenate([array.values.reshape(-1) for array in found.values()])
    head = _data.layer_title(dataset.attrs, "lags that make up dL/dW")
    return panels.titled(title or head, [_data.nonfinite_note(everything)])


def _by_time(dataset: Any, name: str) -> xr.DataArray | None:
    """Return the norms of each step's part of dL/dW, (direction, time, gate); None without a gradient by time."""
    for key in (f"{name}_grad_norm", f"{name}_grad"):
        if key in dataset and TIME in dataset[key].dims:
            array = _data.labelled(dataset[key], "weight_lags")
            rows = [str(d) for d in array.dims if d not in (TIME, GATE, DIRECTION)]
            if rows and not (rows == [UNIT] and GATE not in array.dims and key.endswith("_norm")):
                array = _data.norm_over(array, rows)
            return array if GATE in array.dims else array.expand_dims({GATE: [""]})
    return None


def _draw_weight_lags(ax: Any, norms: xr.DataArray, runs_back: bool, delays: Numbers, keywords: dict[str, Any]) -> None:
    """Draw the gates of one weight."""
    names = _data.names_of(norms, GATE)
    shares = lag_shares(norms.transpose(TIME, GATE).values, runs_back=runs_back)
    lag = np.arange(shares.shape[1])
    for name, share, colour in zip(names, shares, _axes.line_colours(len(names)), strict=True):
        look = {"color": colour, "linewidth": 1.3, "label": name or "all", "gid": f"share {name}".strip()}
        look["marker"] = "o" if len(lag) == 1 else None
        ax.plot(lag, share, **{**look, **keywords})
    if not np.isfinite(shares).all():
        silent = [name for name, share in zip(names, shares, strict=True) if not np.isfinite(share).all()]
        words = "no share: " + ", ".join(silent)
        _axes.write(ax, words, (0.97, 0.05), over="axes fraction", va="baseline", gid="silent")
    _axes.mark_delays(ax, delays)
    ax.axhline(1, color="#909090", linewidth=0.6, zorder=0.5)
    ax.set_ylim(-0.03, 1.05)
    _axes.step_axis(ax, "x", lag, time=False, room=0.5)
