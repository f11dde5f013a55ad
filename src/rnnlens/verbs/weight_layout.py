"""Weights under the names and axes of results: gates split, directions stacked, shared bias arrays separated.

Weights of a known cell have the dimensions of the cell, such as ``kernel (feature, gate, unit)`` and ``bias (gate,
unit)``, with ``direction`` first for a bidirectional layer. Weights of any other layer keep their name and shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ..adapters.protocol import LayerWeights
from ..recurrence.cells import Cell
from ..recurrence.cells.cell import has_gates
from ..results.schema import LabelledLayer, coordinates, provenance_line, to_host, weight_quantity
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, GATE, TIME


@dataclass(frozen=True)
class WeightSource:
    """Location of a weight among the adapter's: its key, direction, and row if two weights share an array."""

    key: str
    direction: str | None = None
    row: int | None = None


def sources(weights: LayerWeights) -> dict[str, list[WeightSource]]:
    """Return, for each weight of a result, the adapter's weights that it consists of: one per direction.

    >>> sources(LayerWeights({"gamma": 0, "beta": 0}, {}))["beta"]
    [WeightSource(key='beta', direction=None, row=None)]
    """
    if not weights.cells:
        return {key: [WeightSource(key)] for key in weights.values}
    sources_by_name: dict[str, list[WeightSource]] = {}
    directions = list(weights.cells)
    has_recurrent_bias = any(key.rpartition("/")[2] == "recurrent_bias" for key in weights.values)
    for key in weights.values:
        name, direction = key.rpartition("/")[2], directions[0]
        if len(directions) > 1:
            direction = "backward" if "backward" in key.partition("/")[0] else "forward"
        cell = weights.cells.get(direction)
        if cell is None or name not in cell.parameters:
            sources_by_name[key] = [WeightSource(key)]
        elif name == "bias" and "recurrent_bias" in cell.weights() and not has_recurrent_bias:  # both in one array
            sources_by_name.setdefault("bias", []).append(WeightSource(key, direction, 0))
            sources_by_name.setdefault("recurrent_bias", []).append(WeightSource(key, direction, 1))
        else:
            sources_by_name.setdefault(name, []).append(WeightSource(key, direction))
    return sources_by_name


def outside_cells(weights: LayerWeights) -> dict[str, Array]:
    """Return the weights of a layer that its known cells do not use: all of them if it has none."""
    return {key: weights.values[key] for key, (source, *_) in sources(weights).items() if source.direction is None}


def dims_of_weight(key: str, weights: LayerWeights, rank: int) -> tuple[str, ...]:
    """Return the axis names of a weight in results: names for known cells, positions for other layers."""
    weight_sources = sources(weights)[key]
    if weight_sources[0].direction is not None:
        return ((DIRECTION,) if len(weight_sources) > 1 else ()) + weights.cells[
            weight_sources[0].direction
        ].parameters[key].dims
    stem = key.replace("/", ".")
    return tuple(f"{stem}_axis_{i}" for i in range(rank))


def assemble(
    parts: Sequence[Array], weight_sources: Sequence[WeightSource], key: str, weights: LayerWeights, leading_axes: int
) -> Array:
    """Assemble one weight, with axes of direction and gates, from arrays with ``leading_axes`` axes in front."""
    arrays = []
    for part, source in zip(parts, weight_sources, strict=True):
        array = np.asarray(part)
        if source.row is not None:
            array = array[(slice(None),) * leading_axes + (source.row,)]
        cell = None if source.direction is None else weights.cells[source.direction]
        if cell is not None and has_gates(cell.parameters[key]):
            array = array.reshape(*array.shape[:-1], len(cell.gates), array.shape[-1] // len(cell.gates))
        arrays.append(array)
    return np.stack(arrays, axis=leading_axes) if len(weights.cells) > 1 and len(arrays) > 1 else arrays[0]


Values = np.ndarray[Any, Any]


class LabelledWeight(NamedTuple):
    """Values with dimension names, descriptive texts, the kind of cell, and its direction if it has only one."""

    values: Values
    dims: tuple[str, ...]
    words: Mapping[str, str]
    cell: str = ""
    direction: str = ""


def label_cell(
    by_direction: Mapping[str, Mapping[str, Any]],
    cells: Mapping[str, Cell],
    *,
    suffix: str = "",
    by_time: bool | str = False,
) -> dict[str, LabelledWeight]:
    """Label the weights or gradients of a known cell per direction: gates split, directions stacked."""
    cell = next(iter(cells.values()))
    order = [direction for direction in (FORWARD, BACKWARD) if direction in by_direction]
    labelled = {}
    for name in by_direction[order[0]]:
        parts, dims = [to_host(by_direction[direction][name]) for direction in order], cell.parameters[name].dims
        if by_time == "norm":
            dims = (TIME, GATE) if GATE in dims else (TIME,)
        elif has_gates(cell.parameters[name]):
            parts = [part.reshape(*part.shape[:-1], len(cell.gates), -1) for part in parts]
        dims = (TIME, *dims) if by_time is True else dims
        attributes = _weight_attributes(name, cell, suffix, by_time)
        values = np.stack(parts) if len(order) > 1 else parts[0]
        key = f"{name}{suffix}_norm" if by_time == "norm" else name + suffix
        lone_direction = order[0] if len(order) == 1 else ""
        dims = dims if lone_direction else (DIRECTION, *dims)
        labelled[key] = LabelledWeight(values, dims, attributes, cell.kind, lone_direction)
    if cell.biases_add_up and not by_time and "recurrent_bias" in labelled:
        bias_sum = labelled["bias"].values + labelled["recurrent_bias"].values
        attributes = {"long_name": "sum of both biases", "units": "1", "definition": "bias + recurrent_bias"}
        labelled["bias_total"] = labelled["bias"]._replace(values=bias_sum, words=attributes)
    return labelled


def label_plain(values: Mapping[str, Any]) -> dict[str, LabelledWeight]:
    """Label the weights of a non-recurrent layer: axes by position."""
    labelled = {}
    for name, array in values.items():
        array = to_host(array)
        stem = name.removesuffix("_grad").replace("/", ".")
        dims = tuple(f"{stem}_axis_{i}" for i in range(array.ndim))
        gradient = name.endswith("_grad")
        attributes = {
            "long_name": f"gradient of {stem}" if gradient else stem,
            "units": "loss" if gradient else "1",
            "definition": f"dL/d{stem}" if gradient else f"weight {stem} as the framework holds it",
        }
        labelled[name.replace("/", ".")] = LabelledWeight(array, dims, attributes)
    return labelled


def weights_of_layer(
    name: str, variables: Mapping[str, LabelledWeight], provenance: Mapping[str, str]
) -> LabelledLayer:
    """Return all variables of one layer, with the counts of NaN and infinite values per gate and direction."""
    common = {"layer": name, "provenance": provenance_line(provenance)}
    data: dict[str, xr.Variable] = {}
    for key, entry in variables.items():
        data[key] = xr.Variable(entry.dims, entry.values, {**entry.words, **common})
        kept_dims = tuple(dim for dim in entry.dims if dim in (DIRECTION, GATE))
        axes = tuple(i for i, dim in enumerate(entry.dims) if dim not in kept_dims)
        for kind, test in (("nan", np.isnan), ("inf", np.isinf)):
            attrs = {"long_name": f"{kind} values in {key}", "units": "1", **common}
            data[f"{key}_{kind}_count"] = xr.Variable(kept_dims, np.sum(test(entry.values), axis=axes), attrs)
    sizes = {dim: size for variable in data.values() for dim, size in variable.sizes.items()}
    first_weight = next((entry for entry in variables.values() if entry.cell), None)
    cell = "" if first_weight is None else first_weight.cell
    attrs = {"layer": name, "cell": cell}
    if first_weight is not None and first_weight.direction:
        attrs[DIRECTION] = first_weight.direction
    return LabelledLayer(data, coordinates(sizes, {"cell": cell}), attrs)


def _weight_attributes(name: str, cell: Cell, suffix: str, by_time: bool | str) -> dict[str, str]:
    quantity = weight_quantity(cell.parameters[name], gradient=bool(suffix))
    attributes = {"long_name": quantity.long_name, "units": quantity.units, "definition": quantity.definition}
    if by_time == "norm":
        attributes["long_name"] = f"norm of the {quantity.long_name} by step"
        attributes["definition"] = f"Frobenius norm, per gate, of the contribution of step t to {quantity.definition}"
    elif by_time:
        attributes["long_name"] = f"{quantity.long_name} by step"
        attributes["definition"] = f"contribution of step t to {quantity.definition}; its sum over time is dL/dW"
    return attributes
