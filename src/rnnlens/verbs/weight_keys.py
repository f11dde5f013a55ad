"""Between the weights as an adapter lists them and as results show them: by our names, gate and direction.

A framework may keep two biases in one array, or the two directions of a layer in separate ones. The weights of a cell
that is known by name are shown with the dimensions that the cell gives them, as ``kernel (feature, gate, unit)`` and
``bias (gate, unit)``, with ``direction`` first for a bidirectional layer. Weights of any other layer keep their name
and shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..adapters.protocol import LayerWeights
from ..recurrence.cells import Cell
from ..recurrence.cells.cell import has_gates
from ..typing import Array
from ..vocabulary import DIRECTION


@dataclass(frozen=True)
class Source:
    """Where a weight of ours lies in the adapter's list: its key, and which row of it where two share an array."""

    key: str
    direction: str | None = None
    row: int | None = None


def sources(weights: LayerWeights) -> dict[str, list[Source]]:
    """For each weight as we show it, the adapter's weights that it is made of: one per direction.

    >>> sources(LayerWeights({"gamma": 0, "beta": 0}, {}))["beta"]
    [Source(key='beta', direction=None, row=None)]
    """
    if not weights.cells:
        return {key: [Source(key)] for key in weights.values}
    found: dict[str, list[Source]] = {}
    directions = list(weights.cells)
    for key in weights.values:
        name = key.rpartition("/")[2]
        direction = _direction(key, directions)
        cell = weights.cells.get(direction)
        if cell is None or name not in cell.parameters:
            found[key] = [Source(key)]
        elif name == "bias" and _holds_both(weights, cell):
            found.setdefault("bias", []).append(Source(key, direction, 0))
            found.setdefault("recurrent_bias", []).append(Source(key, direction, 1))
        else:
            found.setdefault(name, []).append(Source(key, direction))
    return found


def dims_of_weight(key: str, weights: LayerWeights, rank: int) -> tuple[str, ...]:
    """Names of the axes of a weight as shown: words for weights of a cell, positions for every other layer."""
    found = sources(weights)[key]
    if found[0].direction is not None:
        return ((DIRECTION,) if len(found) > 1 else ()) + weights.cells[found[0].direction].parameters[key].dims
    stem = key.replace("/", ".")
    return tuple(f"{stem}_axis_{i}" for i in range(rank))


def assemble(parts: Sequence[Array], found: Sequence[Source], key: str, weights: LayerWeights, lead: int) -> Array:
    """One array as we show it from the adapter's, each with ``lead`` leading axes before the weight's own.

    Gates get an axis of their own; directions are stacked in front of the weight's own axes.
    """
    arrays = []
    for part, source in zip(parts, found, strict=True):
        array = np.asarray(part)
        if source.row is not None:
            array = array[(slice(None),) * lead + (source.row,)]
        cell = None if source.direction is None else weights.cells[source.direction]
        if cell is not None and has_gates(cell.parameters[key]):
            array = array.reshape(*array.shape[:-1], len(cell.gates), -1)
        arrays.append(array)
    return np.stack(arrays, axis=lead) if len(weights.cells) > 1 and len(arrays) > 1 else arrays[0]


def _direction(key: str, directions: Sequence[str]) -> str:
    """Which half a key belongs to; the only one there is, for a layer that runs one way."""
    if len(directions) == 1:
        return directions[0]
    return "backward" if "backward" in key.partition("/")[0] else "forward"


def _holds_both(weights: LayerWeights, cell: Cell) -> bool:
    """Whether input and recurrent bias share one array, (2, gate * unit)."""
    separate: Any = any(key.rpartition("/")[2] == "recurrent_bias" for key in weights.values)
    return "recurrent_bias" in cell.weights() and not separate
