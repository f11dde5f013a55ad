"""``weights_heatmap``: all weights of a layer as images; ``weight_lags``: distribution of dL/dW over lags."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from ..errors import InputError, has_attribute
from ..measures.profiles import lag_shares
from ..recurrence.cells import kinds
from ..recurrence.measures import quantiles, safe_norm
from ..results.schema import weight_of
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, GATE, TIME, UNIT
from ._axes import DIVERGING, POSITIVE, around_zero, from_zero, line_colours, step_axis
from ._call import drawing
from ._data import (
    Numbers,
    axis_label,
    dataset_of,
    labelled,
    largest_magnitude,
    layer_title,
    names_of,
    nonfinite_note,
    numbers,
    value_label,
)
from ._frame import Grid, Panels, open_panels
from ._images import IMSHOW, Matrix, colour_bar, draw_image, fade, merge_note, separate, steps_for


def drawing_order() -> dict[str, int]:
    """Return the rank of each weight name from top to bottom, in the order in which cells list them."""
    names = dict.fromkeys(name for cell in kinds().values() for name in cell.parameters)
    return {name: position for position, name in enumerate(names)}


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


def kernels_of(weights: Any, figure: str, *, grad: bool = False) -> tuple[list[Kernel], dict[str, Any]]:
    """Return weights of a layer (gradients with ``grad``) in drawing order, forward first, and its attributes.

    Raise InputError if there are none to draw.
    """
    dataset = weights.dataset if has_attribute(weights, "dataset") else weights
    if not isinstance(dataset, xr.Dataset | Mapping):
        raise InputError(
            f"plot.{figure} draws the weights of one layer.",
            got=type(weights).__name__,
            expected="a Dataset or a mapping from names to arrays",
            hint='pass rl.weights(model)["lstm"]',
        )
    names = {str(name): name for name in (dataset.data_vars if isinstance(dataset, xr.Dataset) else dataset)}
    wanted = [name for name in names if name.endswith("_grad") == grad and not _is_derived(name)]
    order = drawing_order()
    wanted.sort(key=lambda name: order.get(name.removesuffix("_grad"), len(order)))
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


def _is_derived(name: str) -> bool:
    return name.endswith(("_count", "_norm")) or name.startswith("bias_total")


def _labelled(name: str, data: Any, figure: str, *, recurrent: bool) -> xr.DataArray:
    """Label a weight; plain arrays have gates if there is a recurrent kernel among them."""
    if isinstance(data, xr.DataArray):
        return labelled(data, figure)
    known = weight_of(name.removesuffix("_grad")) if recurrent else None
    dims = None if known is None else known.dims
    data = numbers(data, figure)
    rank = data.ndim
    if dims is not None and rank == len(dims) + 1:
        dims = (DIRECTION, *dims)
    if dims is None or rank != len(dims):
        dims = (*(f"axis_{i}" for i in range(rank - 1)), UNIT)
    array = labelled(data, figure, dims=dims).rename(name)
    if DIRECTION in dims:
        array = array.assign_coords({DIRECTION: [FORWARD, BACKWARD][: array.sizes[DIRECTION]]})
    return array


def _split(name: str, array: xr.DataArray) -> list[Kernel]:
    """Return one weight by direction; a gradient by time is summed over its steps to dL/dW."""
    words = value_label(array)
    if TIME in array.dims:
        array = array.sum(TIME, skipna=False, keep_attrs=True)
    if DIRECTION not in array.dims:
        return [_kernel(name, words, None, array)]
    parts = [array.isel({DIRECTION: i}, drop=True) for i in range(array.sizes[DIRECTION])]
    return [_kernel(name, words, half, part) for half, part in zip(names_of(array, DIRECTION), parts, strict=True)]


def _kernel(name: str, words: str, direction: str | None, array: xr.DataArray) -> Kernel:
    gates = names_of(array, GATE) if GATE in array.dims else []
    columns = str(array.dims[-1])
    rows = [str(d) for d in array.dims if d not in (GATE, columns)]
    ordered = array.transpose(*rows, *([GATE] if gates else []), columns).values
    values = ordered.reshape(-1, len(gates) or 1, array.sizes[columns])
    row_label = ", ".join(axis_label(array, row) for row in rows)
    return Kernel(name, words, direction, values, gates, row_label)


#: Largest number of rows and columns of one kernel.
CELLS = (256, 800)


@drawing(AxesImage, extra=IMSHOW)
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
    grad
        Draw the gradients (variables ending in ``_grad``); those by time are summed over time.
    absolute
        Draw magnitudes, on a scale from white at 0.
    shared
        One colour scale for all kernels; else each has its own scale and colour bar. A bias (a single row) always has
        its own, as a forget bias of 1 would make the kernels look empty.
    limit
        Colour scale up to this magnitude. By default the largest of the kernels, or the 99.5 % quantile of their
        magnitudes where the largest is more than twice that (a few outliers), which the title states.
    log
        Logarithmic colours over 4 decades.

    Returns
    -------
    1-D array of Axes, kernel by kernel, forward before backward
    """
    kernels, attrs = kernels_of(weights, "weights_heatmap", grad=grad)
    directions = list(dict.fromkeys(kernel.direction for kernel in kernels))
    columns = [[kernel for kernel in kernels if kernel.direction == way] for way in directions]
    panels = _open(columns, directions, ax, figure)
    top, clipped = (limit, None) if limit is not None else _common_limit(kernels)
    drawn = []
    for column, axes in zip(columns, panels.halves, strict=True):
        for kernel, place in zip(column, axes, strict=True):
            own = top if limit is not None or (shared and not _alone(kernel)) else largest_magnitude(kernel.values)
            drawn.append(_draw_weight_maps(place, kernel, own, image, absolute=absolute, log=log))
    label = kernels[0].words if len(kernels) == 1 else "gradient" if grad else "weight"
    if colorbar:
        _bars(panels, columns, drawn, f"|{label}|" if absolute else label, shared=shared)
    panels.label("gate, unit" if any(kernel.gates for kernel in kernels) else "unit", "")
    what = "gradients of the weights" if grad else "weights"
    merged = dict.fromkeys(f"{k.title}: {note}" for k in kernels if (note := merge_note(_steps(k), "row", "unit")))
    return panels.titled(title or layer_title(attrs, what), [*merged, clipped])


def _alone(kernel: Kernel) -> bool:
    """Return whether a weight has a single row, as a bias does."""
    return len(kernel.values) == 1


def _bars(panels: Panels, columns: list[list[Kernel]], drawn: list[Any], label: str, *, shared: bool) -> None:
    """Draw a colour bar for the kernels and one for each bias; those of the first of two directions are invisible."""
    images = iter(drawn)
    for number, (column, axes) in enumerate(zip(columns, panels.halves, strict=True)):
        triples = [(kernel, ax, next(images)) for kernel, ax in zip(column, axes, strict=True)]
        together = [(ax, image) for kernel, ax, image in triples if shared and not _alone(kernel)]
        bars = (
            [colour_bar([ax for ax, _ in together], together[-1][1], label, among=[image for _, image in together])]
            if together
            else []
        )
        for kernel, ax, image in triples:
            if not shared or _alone(kernel):
                bars.append(colour_bar([ax], image, label if len(triples) == 1 else ""))
                if _alone(kernel):
                    bars[-1].set_ticks([tick for tick in (image.norm.vmin, 0, image.norm.vmax) if tick is not None])
                    bars[-1].ax.yaxis.set_major_formatter("{x:.2g}")
        for bar in bars if number + 1 < len(columns) and panels.owners else ():
            fade(bar)


def _open(columns: list[list[Kernel]], directions: list[str | None], ax: Any, figure: Any) -> Panels:
    """Open one row per kernel, with heights by their numbers of rows, within limits."""
    count = max(len(column) for column in columns)
    tall = [0.1 + 2.6 * min(1.0, max(c.values.shape[0] for c in row) / 64) ** 0.6 for row in zip(*columns, strict=True)]
    wide = max(kernel.values.shape[1] * kernel.values.shape[2] for kernel in columns[0])
    width = float(np.clip(wide / 60, 4.5, 10.0 / len(columns) + 1.5))
    return open_panels(
        "weights_heatmap",
        count,
        Grid((width, sum(tall) / count + 0.35), (1.9, 1.0), (count, 1), heights=tall),
        directions,
        ax,
        figure,
    )


def _common_limit(kernels: list[Kernel]) -> tuple[float, str | None]:
    """Return the colour limit of all kernels, and a note if values exceed it."""
    matrices = [kernel.values for kernel in kernels if not _alone(kernel)] or [kernel.values for kernel in kernels]
    largest = largest_magnitude(*matrices)
    magnitudes = np.abs(np.concatenate([values.reshape(-1) for values in matrices]))
    (bulk,) = quantiles(magnitudes[np.isfinite(magnitudes)], q=(0.995,), axis=0, xp=np) if largest else (0.0,)
    if not bulk or largest <= 2 * bulk:
        return largest, None
    return float(bulk), f"colours end at {bulk:.2g}, the 99.5 % quantile of magnitudes; largest {largest:.3g}"


def _steps(kernel: Kernel) -> tuple[int, int]:
    rows, gates, units = kernel.values.shape
    return steps_for((rows, units), (CELLS[0], max(1, CELLS[1] // gates)))


def _draw_weight_maps(
    ax: Any, kernel: Kernel, top: float, keywords: dict[str, Any], *, absolute: bool, log: bool
) -> Any:
    """Draw one kernel with its separators and its count of missing values."""
    rows, gates, units = kernel.values.shape
    matrix = kernel.values.reshape(rows, gates * units)
    matrix = np.abs(matrix) if absolute else matrix
    norm = from_zero(matrix, top, log=log) if absolute else around_zero(top, log=log)
    look = {"cmap": POSITIVE if absolute else DIVERGING, "norm": norm, **keywords}
    steps = _steps(kernel)
    limits = (-(-rows // steps[0]), -(-gates * units // steps[1]))
    drawn = draw_image(
        ax, Matrix(matrix, np.arange(gates * units), np.arange(rows), over_time=False), look=look, limits=limits
    )
    missing = nonfinite_note(kernel.values)
    ax.set_title(" · ".join(part for part in (kernel.title, missing) if part), fontsize="small", pad=3)
    ax.set_ylabel(textwrap.fill(kernel.row_label, 12), fontsize="small")
    ax.tick_params(labelsize="small")
    if kernel.gates:
        separate(ax, "x", units, kernel.gates)
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
    delays : int or sequence of int
        Lags, to be marked, at which the task is known to need its input.

    Returns
    -------
    1-D array of Axes, weight by weight, forward before backward
    """
    dataset = dataset_of(weights)
    given = [] if dataset is None else [(name, _by_time(dataset, name)) for name in _weights_of(dataset)]
    found = {name: array for name, array in given if array is not None}
    if dataset is None or not found:
        raise InputError(
            "plot.weight_lags needs gradients of the weights by time.",
            got=type(weights).__name__ if dataset is None else f"variables {', '.join(map(str, dataset.data_vars))}",
            expected="recurrent_kernel_grad (time, unit_in, gate, unit), or its norm (time, gate)",
            hint='pass rl.weights(model, x, y, by_time=True)["lstm"]',
        )
    first = next(iter(found.values()))
    ways = names_of(first, DIRECTION) if DIRECTION in first.dims else [None]
    size = (4.6, 3.0) if len(found) == 1 else (3.0, 2.3)
    panels = open_panels("weight_lags", len(found), Grid(size), ways, ax, figure)
    for number, (places, way) in enumerate(zip(panels.halves, ways, strict=True)):
        for place, (name, array) in zip(places, found.items(), strict=True):
            one = array.isel({DIRECTION: number}) if way else array
            _draw_weight_lags(place, one, way == BACKWARD or dataset.attrs.get("direction") == BACKWARD, delays, line)
            place.set_title(name.replace("_", " "), fontsize="small", pad=3)
    panels.label("lag (steps before the last)", "share of dL/dW, cumulative")
    if panels.owners:
        panels.outer_ticks_only()
    _legend(panels.axes, panels.owners)
    everything = np.concatenate([array.values.reshape(-1) for array in found.values()])
    head = layer_title(dataset.attrs, "lags that make up dL/dW")
    return panels.titled(title or head, [nonfinite_note(everything)])


def _weights_of(dataset: xr.Dataset) -> list[str]:
    """Return the names of the weights that have a gradient, in drawing order."""
    gradients = [str(name).removesuffix("_norm") for name in dataset.data_vars]
    found = {name.removesuffix("_grad") for name in gradients if name.endswith("_grad")}
    order = drawing_order()
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))


def _by_time(dataset: xr.Dataset, name: str) -> xr.DataArray | None:
    """Return the norms of each step's part of dL/dW, (direction, time, gate); None without a gradient by time."""
    for key in (f"{name}_grad_norm", f"{name}_grad"):
        if key in dataset and TIME in dataset[key].dims:
            array = labelled(dataset[key], "weight_lags")
            rows = [str(d) for d in array.dims if d not in (TIME, GATE, DIRECTION)]
            kept = [d for d in array.dims if d not in rows]
            if rows and not (rows == [UNIT] and GATE not in array.dims and key.endswith("_norm")):
                axes = tuple(array.get_axis_num(d) for d in rows)
                norms = safe_norm(array.values, axis=axes, xp=np)
                coords = {d: array.coords[d] for d in kept if d in array.coords}
                array = xr.DataArray(norms, dims=kept, coords=coords)
            return array if GATE in array.dims else array.expand_dims({GATE: [""]})
    return None


def _draw_weight_lags(ax: Any, norms: xr.DataArray, runs_back: bool, delays: Numbers, keywords: dict[str, Any]) -> None:
    """Draw the gates of one weight."""
    names = names_of(norms, GATE)
    shares = lag_shares(norms.transpose(TIME, GATE).values, runs_back=runs_back)
    lag = np.arange(shares.shape[1])
    for name, share, colour in zip(names, shares, line_colours(len(names)), strict=True):
        look = {"color": colour, "linewidth": 1.3, "label": name or "all", "gid": f"share {name}".strip()}
        look["marker"] = "o" if len(lag) == 1 else None
        ax.plot(lag, share, **{**look, **keywords})
    if not np.isfinite(shares).all():
        silent = [name for name, share in zip(names, shares, strict=True) if not np.isfinite(share).all()]
        words = "no share: " + ", ".join(silent)
        ax.annotate(words, (0.97, 0.05), xycoords="axes fraction", ha="right", fontsize="x-small", gid="silent")
    for delay in delays:
        ax.axvline(delay, color="#111111", linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.8, gid="delay")
    ax.axhline(1, color="#909090", linewidth=0.6, zorder=0.5)
    ax.set(xlim=(-0.5, len(lag) - 0.5), ylim=(-0.03, 1.05))
    step_axis(ax, "x", lag, time=False)
    ax.tick_params(labelsize="small")


def _legend(axes: list[Any], owners: list[Any]) -> None:
    handles, names = axes[0].get_legend_handles_labels()
    if names != ["all"]:
        where = {"loc": "outside right center"} if owners else {"loc": "best"}
        (owners[-1] if owners else axes[0]).legend(handles, names, fontsize="small", **where)
