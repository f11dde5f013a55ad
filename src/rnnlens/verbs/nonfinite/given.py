"""What there is before anything runs: the weights, and the data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ... import data
from ...adapters.protocol import LayerWeights, Port
from ...recurrence.nonfinite import NonfiniteValue, first, largest
from ...results.nonfinite import Origin
from ...results.schema import to_host
from ...vocabulary import DIRECTION, FORWARD, GATE
from ..weight_keys import assemble, dims_of_weight, sources
from .looked import Looked


def in_the_weights(looked: Looked) -> Iterator[Origin]:
    """Weights by layer, also those that are too large for what their layer computes in."""
    for layer, own in looked.adapter.weights(looked.model).items():
        dtype = getattr(looked.facts.submodules.get(layer), "dtype", "")
        limit = largest(dtype) if dtype in ("float16", "bfloat16") else np.inf
        for key, parts in sources(own).items():
            held = [to_host(own.values[part.key]) for part in parts]
            if any(array.dtype.kind != "f" for array in held):
                continue
            array = assemble(held, parts, key, own, 0)
            dims = [dim.rpartition(".")[2] for dim in dims_of_weight(key, own, array.ndim)]
            spot = first(key, array, dims, limit)
            if spot is not None:
                yield _of_weight(layer, own, spot, dtype)


def _of_weight(layer: str, own: LayerWeights, spot: NonfiniteValue, dtype: str) -> Origin:
    index = dict(spot.index)
    gate, direction = index.pop(GATE, None), index.pop(DIRECTION, None)
    cell = own.cells.get(FORWARD) or next(iter(own.cells.values()), None)
    return Origin(
        "weights",
        layer,
        spot.quantity,
        spot.value,
        index,
        gate="" if gate is None or cell is None else cell.gates[gate],
        direction="" if direction is None else ("forward", "backward")[direction],
        precision=dtype if np.isfinite(spot.value) else "",
    )


def in_the_data(looked: Looked) -> Iterator[Origin]:
    """Inputs, then targets, then weights of samples."""
    for i, array in enumerate(looked.inputs):
        spot = looked.first(Port("input", index=i), "value", array)
        if spot is not None:
            yield Origin("data", name_of_input(looked, i), "value", spot.value, spot.index)
    for name in ("y", "sample_weight"):
        for leaf in data.leaves_of(getattr(looked.batch, name)):
            array = to_host(leaf)
            spot = looked.first(Port("output"), "value", array) if array.ndim else None
            if spot is not None:
                yield Origin("data", name, "value", spot.value, spot.index)


def name_of_input(looked: Looked, index: int) -> str:
    """``"input"``, or which of several."""
    if len(looked.inputs) == 1:
        return "input"
    names = list(looked.batch.x) if isinstance(looked.batch.x, dict) else looked.facts.inputs
    return f"input[{names[index] if index < len(names) else index}]"
