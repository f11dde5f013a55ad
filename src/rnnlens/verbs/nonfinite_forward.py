"""Search of the forward pass and of the loss, in the order of computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Outputs, Port
from ..recurrence.arrays import on_cpu
from ..recurrence.nonfinite import NonfiniteValue, first_forward, largest, largest_term
from ..recurrence.replay import Replay
from ..results.nonfinite import Origin
from ..results.schema import to_host
from ..typing import Array
from ..vocabulary import GATE, SAMPLE, TIME
from .observed_run import Node, ObservedCall, ObservedRun, name_of_input

#: Distances from a suspected pole at which a function is evaluated; large enough for single precision.
_DISTANCES = (1e-1, 1e-2, 1e-3)
#: Distances used if nothing near is finite: to leave the undefined range of a function, or its overflow.
_FAR = (1.0, 10.0, 100.0)


def singularity(function: Callable[[float], float], at: float) -> str:
    """Return why a function of one number is not finite at ``at``; ``""`` if changing the number does not show it.

    Nearer to a pole of order p values grow by 10 to the p at each of the distances 1e-1, 1e-2, 1e-3; at the end of a
    logarithm they grow by the same amount each time.

    >>> singularity(lambda v: -math.log(v) if v > 0 else math.inf, 0.0)
    'log of 0'
    >>> singularity(lambda v: 1 / v if v else math.inf, 0.0)
    'division by 0'
    >>> singularity(lambda v: math.sqrt(v) if v >= 0 else math.nan, -4.0)
    'log, root or power of a negative number'
    >>> singularity(lambda v: v * v if abs(v) < 1e19 else math.inf, 1e30)
    'overflow'
    """
    scale = max(1.0, abs(at))
    for side in (1.0, -1.0):
        values = [function(at + side * distance * scale) for distance in _DISTANCES]
        if all(map(math.isfinite, values)):
            first, second = abs(values[1] - values[0]), abs(values[2] - values[1])
            if first == 0.0 or second < 0.5 * first:
                return ""
            return "log of 0" if second < 2.0 * first else "division by 0"
    far = [function(at + side * distance * scale) for distance in _FAR for side in (1.0, -1.0)]
    if not any(map(math.isfinite, far)):
        return ""
    return "log, root or power of a negative number" if math.isnan(function(at)) else "overflow"


def slope(gradient: Callable[[float], float], at: float) -> str:
    """Return why a function has no finite derivative at ``at``, from the growth of the derivative towards it.

    >>> slope(lambda v: 0.5 / math.sqrt(v) if v > 0 else math.inf, 0.0)
    'root of 0, which has no derivative there'
    """
    for side in (1.0, -1.0):
        values = [abs(gradient(at + side * distance)) for distance in _DISTANCES]
        if all(math.isfinite(v) and v > 0 for v in values):
            power = math.log10(values[2] / values[1])
            if 0.2 < power < 0.8:
                return "root of 0, which has no derivative there"
            return "log of 0" if 0.8 <= power < 1.5 else "division by 0" if power >= 1.5 else ""
    return ""


def in_a_cell(run: Replay, spot: NonfiniteValue) -> str:
    """Return text on the input or state value that makes an unknown cell non-finite, or on the sizes of all."""
    sample, t = spot.index[SAMPLE], spot.index[TIME]
    x = on_cpu(run.input)[sample, t]
    states = [on_cpu(s)[sample] for s in run.state_before(t)]
    parts = [("input", "feature", x), *((n, "unit", s) for n, s in zip(run.cell.state_names, states, strict=True))]
    before = " and ".join(f"{name} up to {np.max(np.abs(v), initial=0.0):.3g}" for name, _, v in parts)
    for name, dim, values in parts:
        order = np.argsort(np.abs(values))
        for position in map(int, dict.fromkeys([*order[:4], *order[::-1][:4]])):  # smallest and largest magnitudes
            function = _moving(run, spot, x, states, name, position)
            found = singularity(function, float(values[position]))
            if found:
                return f"{found} in the cell, with {name} {values[position]:.3g} at {dim} {position}; {before}"
    return f"the cell's output from {before}"


def _moving(
    run: Replay, spot: NonfiniteValue, x: Array, states: Sequence[Array], name: str, position: int
) -> Callable[[float], float]:
    """Return a function that maps one input or state value of a cell to the value at ``spot``."""
    names = list(run.cell.state_names)

    def function(value: float) -> float:
        fed, held = x.copy(), [s.copy() for s in states]
        target = fed if name == "input" else held[names.index(name)]
        target[position] = value
        output, new = run.cell.advance(_like(fed[None], run), [_like(s[None], run) for s in held])  # type: ignore[attr-defined]
        computed = output if spot.quantity == "output" else new[names.index(spot.quantity)]
        return float(on_cpu(computed)[0, spot.index["unit"]])

    return function


def _like(array: Array, run: Replay) -> Array:
    return run.xp.asarray(array, dtype=run.input.dtype, device=getattr(run.input, "device", None))


_HALVES = ("float16", "bfloat16")


def in_the_forward_pass(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the origins of non-finite values in the forward pass: in layers by their calls, then in model outputs."""
    for node in observed.nodes:
        for replayed in node.directions:
            yield from _in_recurrence(observed, node, replayed)
        for one in node.plain:
            port, array = Port("output", one.layer), to_host(one.output)
            spot = observed.first(port, "output", array)
            if spot is not None:
                # The layer's input may not be finite although all earlier layers are.
                given = observed.value_at(Port("input", one.layer))
                inner = None if given is None else observed.first(Port("input", one.layer), "input", given)
                if inner is not None:
                    fed = f"an operation of the model between layers, on {below(observed, node, inner)}"
                    yield Origin("forward", one.layer, "input", inner.value, inner.index, fed_by=fed)
                yield Origin("forward", one.layer, "output", spot.value, spot.index, fed_by=below(observed, node, spot))
    for i, array in enumerate(observed.returned):
        spot = observed.first(Port("output", index=i), "value", array)
        if spot is not None:
            name = "output" if len(observed.returned) == 1 else f"output[{i}]"
            fed = "an operation of the model on the outputs of its layers, which are finite"
            yield Origin("forward", name, "value", spot.value, spot.index, fed_by=fed)


def _in_recurrence(observed: ObservedRun, node: Node, replayed: ObservedCall) -> Iterator[Origin]:
    spot = first_forward(replayed.run, replayed.limit)
    if spot is None:
        return
    origin = origin_of(replayed, spot, "forward")
    if spot.quantity == "input":
        origin = replace(origin, fed_by=below(observed, node, spot, replayed))
    elif spot.quantity.startswith("initial_"):
        origin = replace(origin, fed_by="the initial state of the layer")
    else:
        origin = replace(origin, fed_by=_fed_by(replayed, spot))
    yield origin


def origin_of(replayed: ObservedCall, spot: NonfiniteValue, phase: str) -> Origin:
    """Return the origin of a value inside a recurrence, with the axis names of its quantity."""
    call, index = replayed.call, dict(spot.index)
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


def _fed_by(replayed: ObservedCall, spot: NonfiniteValue) -> str:
    """Return text on the values behind a non-finite one: its largest term, the cell's inputs, or the states before."""
    run, call = replayed.run, replayed.call
    if call.cell.by_framework:
        return in_a_cell(run, spot)
    term = largest_term(run, spot) if spot.quantity == "gate_preactivation" else None
    if term is not None:
        return f"{term}, the largest of its terms"
    before = run.state_before(spot.index[TIME])
    sizes = [
        f"{name} up to {np.max(np.abs(on_cpu(state)[spot.index[SAMPLE]])):.3g}"
        for name, state in zip(call.cell.state_names, before, strict=True)
    ]
    return f"{', '.join(sizes)} before the step"


def below(observed: ObservedRun, node: Node, spot: NonfiniteValue, replayed: ObservedCall | None = None) -> str:
    """Return text on the largest value below a layer at the same sample (and step), with its source."""
    for name, port, array in observed.below(node):
        found = _largest(observed, port, array, spot)
        if found is None:
            continue
        value, index = found
        what = name_of_input(observed, port.index) if port.layer is None else f"{name}.output"
        rest = ", ".join(f"{dim} {i}" for dim, i in index.items() if dim not in (TIME, SAMPLE))
        text = f"{what} {value:.3g}" + (f" at {rest}" if rest else "")
        dtype = getattr(observed.facts.submodules.get(node.name), "dtype", "")
        dtype = dtype if replayed is None or replayed.call.compute_dtype is None else str(replayed.call.compute_dtype)
        if dtype in _HALVES and abs(value) > largest(dtype):
            return f"{text}, more than {dtype} holds ({largest(dtype):.6g})"
        return text
    return ""


def _largest(
    observed: ObservedRun, port: Port, array: np.ndarray, spot: NonfiniteValue
) -> tuple[float, dict[str, int]] | None:
    """Return the largest value and its index at a spot's sample and step; None if the tensor is not finite."""
    array = np.asarray(array)
    if array.dtype.kind not in "fiu" or not array.size or not np.all(np.isfinite(array)):
        return None
    index = observed.names(port, array)
    pick = tuple(
        spot.index[name] if name in (SAMPLE, TIME) and spot.index.get(name, size) < size else slice(None)
        for name, size in zip(index, array.shape, strict=True)
    )
    part = np.abs(array[pick].astype(np.float64))
    place = np.unravel_index(int(np.argmax(part)), part.shape) if part.ndim else ()
    free = [name for name, one in zip(index, pick, strict=True) if isinstance(one, slice)]
    value = float(array[pick][place])
    return value, dict(zip(free, map(int, place), strict=True))


#: Largest number of output values that are perturbed, in the order of suspicion.
_TRIED = 12


class LossOfOutputs:
    """The loss as a function of the model's outputs, of all samples or of some."""

    def __init__(self, observed: ObservedRun) -> None:
        self.observed, self.outputs = observed, observed.outputs
        self.leaves = [np.asarray(leaf) for leaf in self.outputs.leaves]

    def __call__(self, leaves: Sequence[Array], some: slice = slice(None), **changed: Any) -> tuple[float, list[Any]]:
        """Return loss and gradients for the outputs of the samples ``some``."""
        batch = replace(self.observed.batch, **changed)
        if some != slice(None):
            own = {name: data.take(getattr(batch, name), some.start, some.stop) for name in ("y", "sample_weight")}
            batch = replace(batch, **own)
        masks = [None if mask is None else mask[some] for mask in self.outputs.masks]
        some_outputs = Outputs(list(leaves), self.outputs.tree, masks)
        return self.observed.adapter.loss_of(self.observed.model, batch, some_outputs)

    def of(self, some: slice) -> tuple[float, list[Any]]:
        """Return loss and gradients of some of the samples."""
        return self([leaf[some] for leaf in self.leaves], some)

    def guilty(self) -> int | None:
        """Find the first sample whose own loss is not finite; None if no single sample causes it."""
        sizes = {len(leaf) for leaf in self.leaves if leaf.ndim}
        first = [self.observed.names(Port("output", index=i), leaf)[:1] for i, leaf in enumerate(self.leaves)]
        if len(sizes) != 1 or any(names != (SAMPLE,) for names in first):
            return None
        low, high = 0, sizes.pop()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if not math.isfinite(self.of(slice(low, middle))[0]) else (middle, high)
        return low if not math.isfinite(self.of(slice(low, low + 1))[0]) else None


def in_the_loss(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the output value or the sample that makes the loss non-finite, as an origin; nothing for a finite loss."""
    value = observed.capture.loss
    if value is None or math.isfinite(value):
        return
    found = observed.attempt(lambda: _located(observed))
    yield found or Origin("loss", "loss", "value", value, fed_by="outputs that are finite")


def _located(observed: ObservedRun) -> Origin | None:
    loss = LossOfOutputs(observed)
    value, gradients = loss(loss.leaves)
    if math.isfinite(value):
        fed = "a penalty that the model adds to its loss"
        return Origin("loss", "loss", "value", float(observed.capture.loss or 0), fed_by=fed)
    sample = loss.guilty()
    some = slice(None) if sample is None else slice(sample, sample + 1)
    if sample is not None:
        value, gradients = loss.of(some)
    for leaf, place in _loss_suspects(loss, some, gradients):
        why = _why(loss, some, leaf, place)
        if why:
            return _origin(observed, loss, sample, leaf, place, value, why)
    # No single output value explains it.
    sizes = [float(np.max(np.abs(output[some]), initial=0.0)) for output in observed.returned if output.ndim]
    cause = f"outputs that are finite, up to {max(sizes, default=0.0):.3g}"
    given = [to_host(weight)[some] for weight in data.leaves_of(observed.batch.sample_weight)]
    if math.isnan(value) and given and not any(np.any(weight) for weight in given):
        cause = "0 divided by 0 in the loss: all its sample weights are 0"
    return Origin("loss", "loss", "value", value, {} if sample is None else {SAMPLE: sample}, fed_by=cause)


def _loss_suspects(loss: LossOfOutputs, some: slice, gradients: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Rank output elements to test: non-finite gradients first, then zeros and the largest values."""
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for i, (leaf, gradient) in enumerate(zip(loss.leaves, gradients, strict=True)):
        part = leaf[some]
        if gradient is None or part.dtype.kind != "f":
            continue
        sick = ~np.isfinite(np.asarray(gradient))
        with np.errstate(all="ignore"):
            oddness = np.abs(np.log10(np.maximum(np.abs(part.astype(np.float64)), 1e-300))) + 1e6 * sick
        for flat in np.argsort(-oddness, axis=None, kind="stable")[:_TRIED]:
            place = tuple(map(int, np.unravel_index(int(flat), part.shape)))
            found.append((float(oddness[place]), i, place))
    found.sort(key=lambda one: -one[0])
    return [(i, place) for _, i, place in found[:_TRIED]]


def _why(loss: LossOfOutputs, some: slice, leaf: int, place: tuple[int, ...]) -> str:
    leaves = [array[some].copy() for array in loss.leaves]

    def moved(value: float) -> float:
        leaves[leaf][place] = value
        return loss(leaves, some)[0]

    at = float(leaves[leaf][place])
    why = singularity(moved, at)
    leaves[leaf][place] = at
    return why


def _origin(
    observed: ObservedRun,
    loss: LossOfOutputs,
    sample: int | None,
    leaf: int,
    place: tuple[int, ...],
    value: float,
    why: str,
) -> Origin:
    array = loss.leaves[leaf]
    whole = place if sample is None else (sample, *place[1:])
    index = dict(observed.element(Port("output", index=leaf), array, whole))
    name = "output" if len(loss.leaves) == 1 else f"output[{leaf}]"
    cause = f"{why} in the loss: {name} {float(array[whole]):.3g}"
    targets = [to_host(leaf) for leaf in data.leaves_of(observed.batch.y)]
    if len(targets) == 1 and targets[0].shape == array.shape:
        cause += f", target {float(targets[0][whole]):.3g}"
    elif len(targets) == 1 and targets[0].shape[:1] == array.shape[:1] and targets[0][0].size == 1:
        cause += f", target {float(targets[0][whole[0]].reshape(())):.3g}"
    return Origin("loss", "loss", "value", value, index, fed_by=cause)


def gradient_at_the_outputs(observed: ObservedRun) -> Origin | None:
    """Return the output value at which the derivative of a finite loss is not finite, as an origin, or None."""
    loss = LossOfOutputs(observed)
    _, gradients = loss(loss.leaves)
    for i, gradient in enumerate(gradients):
        sick = (
            None if gradient is None else observed.first(Port("output", index=i), "output_grad", np.asarray(gradient))
        )
        if sick is None:
            continue
        place = tuple(int(n) for n in np.argwhere(~np.isfinite(np.asarray(gradient)))[0])
        leaves = [leaf.copy() for leaf in loss.leaves]

        def derivative(value: float, i: int = i, place: Any = place, leaves: Any = leaves) -> float:
            leaves[i][place] = value
            return float(np.asarray(loss(leaves)[1][i])[place])

        at = float(loss.leaves[i][place])
        why = slope(derivative, at) or "the derivative of the loss"
        name = "output" if len(gradients) == 1 else f"output[{i}]"
        index = observed.element(Port("output", index=i), loss.leaves[i], place)
        value = float(np.asarray(gradient)[place])
        return Origin("backward", "loss", "output_grad", value, index, fed_by=f"{why} in the loss: {name} {at:.3g}")
    return None
