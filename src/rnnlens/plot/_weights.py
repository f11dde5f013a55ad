"""Weights of one layer, as the weight figures draw them: kernel by kernel, gates and directions by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xarray as xr

from ..errors import InputError, message
from ..recurrence.cells import kinds
from ..results.schema import weight_of
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, GATE, TIME, UNIT
from ._data import Numbers, axis_label, labelled, names_of, numbers, value_label


def drawing_order() -> dict[str, int]:
    """From top to bottom as the cells list their weights; others follow."""
    names = dict.fromkeys(name for cell in kinds().values() for name in cell.parameters)
    return {name: position for position, name in enumerate(names)}


@dataclass(frozen=True)
class Kernel:
    """One weight of one direction, as (row, gate, unit); ``gates`` is empty where it has none."""

    name: str
    words: str
    direction: str | None
    values: Numbers
    gates: list[str]
    row_label: str

    @property
    def title(self) -> str:
        """The name in words."""
        return self.name.removesuffix("_grad").replace("_", " ") + ", gradient" * self.name.endswith("_grad")


def kernels_of(weights: Any, figure: str, *, grad: bool = False) -> tuple[list[Kernel], dict[str, Any]]:
    """All weights of a layer (their gradients with ``grad``) in drawing order, forward first; and its attributes.

    Raises
    ------
    InputError
        If there are none.
    """
    dataset = getattr(weights, "dataset", weights)
    if not isinstance(dataset, xr.Dataset | Mapping):
        raise InputError(
            message(
                f"plot.{figure} draws the weights of one layer.",
                got=type(weights).__name__,
                expected="a Dataset or a mapping from names to arrays",
                hint='pass rl.weights(model)["lstm"]',
            )
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
            message(
                f"plot.{figure} found no {'gradients of ' if grad else ''}weights here.",
                got=f"variables {', '.join(names) or 'none'}",
                expected="kernel, recurrent_kernel, bias" + (" with _grad" if grad else ""),
                hint="pass data to rl.weights(model, x, y) for gradients" if grad else 'pass rl.weights(model)["lstm"]',
            )
        )
    return found, dict(dataset.attrs) if isinstance(dataset, xr.Dataset) else {}


def _is_derived(name: str) -> bool:
    return name.endswith(("_count", "_norm")) or name.startswith("bias_total")


def _labelled(name: str, data: Any, figure: str, *, recurrent: bool) -> xr.DataArray:
    """Plain arrays have gates where there is a recurrent kernel among them."""
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
    """By direction; a gradient by time is summed over it, which is dL/dW."""
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
