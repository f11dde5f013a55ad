"""The forward pass: layers in the order of their calls, recurrent ones opened step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...adapters.protocol import Port
from ...recurrence.nonfinite import NonfiniteValue, largest, largest_term, on_cpu
from ...results.nonfinite import Origin
from ...results.schema import to_host
from ...vocabulary import GATE, SAMPLE, TIME
from .causes import in_a_cell
from .given import name_of_input
from .looked import Half, Looked, Node

_HALVES = ("float16", "bfloat16")


def in_the_forward_pass(looked: Looked) -> Iterator[Origin]:
    """Outputs of layers; of recurrent ones whatever a step computes; then what the model returned."""
    for node in looked.nodes:
        for half in node.halves:
            yield from _in_recurrence(looked, node, half)
        for one in node.plain:
            port, array = Port("output", one.layer), to_host(one.output)
            spot = looked.first(port, "output", array)
            if spot is not None:
                yield from _before(looked, node, one.layer)
                yield Origin("forward", one.layer, "output", spot.value, spot.index, fed_by=below(looked, node, spot))
    for i, array in enumerate(looked.returned):
        spot = looked.first(Port("output", index=i), "value", array)
        if spot is not None:
            name = "output" if len(looked.returned) == 1 else f"output[{i}]"
            fed = "what the model makes of its layers' outputs, which are finite"
            yield Origin("forward", name, "value", spot.value, spot.index, fed_by=fed)


def _before(looked: Looked, node: Node, layer: str) -> Iterator[Origin]:
    """What a layer took, where that is not finite though the layers before it are: the model's own operations."""
    port = Port("input", layer)
    taken = looked.value_at(port)
    spot = None if taken is None else looked.first(port, "input", taken)
    if spot is not None:
        fed = f"what the model itself computes between layers, of {below(looked, node, spot)}"
        yield Origin("forward", layer, "input", spot.value, spot.index, fed_by=fed)


def _in_recurrence(looked: Looked, node: Node, half: Half) -> Iterator[Origin]:
    spot = half.first_forward()
    if spot is None:
        return
    origin = origin_of(half, spot, "forward")
    if spot.quantity == "input":
        origin = replace(origin, fed_by=below(looked, node, spot, half))
    elif spot.quantity.startswith("initial_"):
        origin = replace(origin, fed_by="the state that the layer started from")
    else:
        origin = replace(origin, fed_by=_fed_by(half, spot))
    yield origin


def origin_of(half: Half, spot: NonfiniteValue, phase: str) -> Origin:
    """A number of a recurrence, with the names that its index has there."""
    call, index = half.call, dict(spot.index)
    gate = index.pop(GATE, None)
    if spot.quantity.startswith("input") and "unit" in index:
        index["feature"] = index.pop("unit")
    return Origin(
        phase,  # type: ignore[arg-type]
        call.layer,
        spot.quantity,
        spot.value,
        index,
        gate=call.cell.gates[gate] if gate is not None and call.cell.gates else "",
        direction=call.direction if call.bidirectional else "",
        precision=str(call.compute_dtype) if np.isfinite(spot.value) else "",
    )


def _fed_by(half: Half, spot: NonfiniteValue) -> str:
    """The largest product of a pre-activation; what a cell of unknown equations made of what; else the step's parts."""
    run, call = half.run, half.call
    if call.cell.by_framework:
        return in_a_cell(run, spot)
    term = None
    if spot.quantity == "gate_preactivation":
        term = largest_term(run, spot)
    if term is not None:
        return f"{term}, the largest of its terms"
    before = run.state_before(spot.index[TIME])
    sizes = [
        f"{name} up to {np.max(np.abs(on_cpu(state)[spot.index[SAMPLE]])):.3g}"
        for name, state in zip(call.cell.state_names, before, strict=True)
    ]
    return f"{', '.join(sizes)} before the step"


def below(looked: Looked, node: Node, spot: NonfiniteValue, half: Half | None = None) -> str:
    """The largest number of that sample (and step) that the layer was fed, and where it comes from."""
    for name, port, array in looked.below(node):
        found = _largest(looked, port, array, spot)
        if found is None:
            continue
        value, index = found
        what = name_of_input(looked, port.index) if port.layer is None else f"{name}.output"
        rest = ", ".join(f"{dim} {i}" for dim, i in index.items() if dim not in (TIME, SAMPLE))
        text = f"{what} {value:.3g}" + (f" at {rest}" if rest else "")
        dtype = getattr(looked.facts.submodules.get(node.name), "dtype", "")
        dtype = dtype if half is None or half.call.compute_dtype is None else str(half.call.compute_dtype)
        if dtype in _HALVES and abs(value) > largest(dtype):
            return f"{text}, more than {dtype} holds ({largest(dtype):.6g})"
        return text
    return ""


def _largest(
    looked: Looked, port: Port, array: np.ndarray, spot: NonfiniteValue
) -> tuple[float, dict[str, int]] | None:
    """The largest magnitude of a tensor where the sample, and the step where it has steps, are those of a spot."""
    array = np.asarray(array)
    if array.dtype.kind not in "fiu" or not array.size or not np.all(np.isfinite(array)):
        return None
    index = looked.names(port, array)
    pick = tuple(
        spot.index[name] if name in (SAMPLE, TIME) and spot.index.get(name, size) < size else slice(None)
        for name, size in zip(index, array.shape, strict=True)
    )
    part = np.abs(array[pick].astype(np.float64))
    place = np.unravel_index(int(np.argmax(part)), part.shape) if part.ndim else ()
    free = [name for name, one in zip(index, pick, strict=True) if isinstance(one, slice)]
    value = float(array[pick][place])
    return value, dict(zip(free, map(int, place), strict=True))
