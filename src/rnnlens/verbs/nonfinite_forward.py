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
from ..recurrence.nonfinite import NonfiniteValue, first_nonfinite_forward, largest_finite, largest_term
from ..recurrence.replay import Replay
from ..results.nonfinite import Origin
from ..results.schema import to_host
from ..typing import Array
from ..vocabulary import GATE, SAMPLE, TIME
from .observed_run import Node, ObservedCall, ObservedRun, name_of_input

#: Distances from a suspected pole at which a function is evaluated; large enough for single precision.
_DISTANCES = (1e-1, 1e-2, 1e-3)
#: Distances used if nothing near is finite: to leave the undefined range of a function, or its overflow.
_FAR_DISTANCES = (1.0, 10.0, 100.0)


def singularity(function: Callable[[float], float], point: float) -> str:
    """Return why a function of one number is not finite at ``point``; ``""`` if changing the number does not show it.

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
    scale = max(1.0, abs(point))
    for side in (1.0, -1.0):
        values = [function(point + side * distance * scale) for distance in _DISTANCES]
        if all(map(math.isfinite, values)):
            first, second = abs(values[1] - values[0]), abs(values[2] - values[1])
            if first == 0.0 or second < 0.5 * first:
                return ""
            return "log of 0" if second < 2.0 * first else "division by 0"
    far_values = [function(point + side * distance * scale) for distance in _FAR_DISTANCES for side in (1.0, -1.0)]
    if not any(map(math.isfinite, far_values)):
        return ""
    return "log, root or power of a negative number" if math.isnan(function(point)) else "overflow"


def slope(gradient: Callable[[float], float], point: float) -> str:
    """Return why a function has no finite derivative at ``point``, from the growth of the derivative towards it.

    >>> slope(lambda v: 0.5 / math.sqrt(v) if v > 0 else math.inf, 0.0)
    'root of 0, which has no derivative there'
    """
    for side in (1.0, -1.0):
        values = [abs(gradient(point + side * distance)) for distance in _DISTANCES]
        if all(math.isfinite(v) and v > 0 for v in values):
            power = math.log10(values[2] / values[1])
            if 0.2 < power < 0.8:
                return "root of 0, which has no derivative there"
            return "log of 0" if 0.8 <= power < 1.5 else "division by 0" if power >= 1.5 else ""
    return ""


def cause_in_cell(run: Replay, nonfinite: NonfiniteValue) -> str:
    """Return text on the input or state value that makes an unknown cell non-finite, or on the sizes of all."""
    sample, t = nonfinite.index[SAMPLE], nonfinite.index[TIME]
    x = on_cpu(run.input)[sample, t]
    states = [on_cpu(s)[sample] for s in run.state_before(t)]
    arguments = [("input", "feature", x), *((n, "unit", s) for n, s in zip(run.cell.state_names, states, strict=True))]
    sizes_text = " and ".join(f"{name} up to {np.max(np.abs(v), initial=0.0):.3g}" for name, _, v in arguments)
    for name, dim, values in arguments:
        order = np.argsort(np.abs(values))
        for position in map(int, dict.fromkeys([*order[:4], *order[::-1][:4]])):  # smallest and largest magnitudes
            function = _output_of_argument(run, nonfinite, x, states, name, position)
            reason = singularity(function, float(values[position]))
            if reason:
                return f"{reason} in the cell, with {name} {values[position]:.3g} at {dim} {position}; {sizes_text}"
    return f"the cell's output from {sizes_text}"


def _output_of_argument(
    run: Replay, nonfinite: NonfiniteValue, x: Array, states: Sequence[Array], name: str, position: int
) -> Callable[[float], float]:
    """Return a function that maps one input or state value of a cell to the value at ``nonfinite``."""
    names = list(run.cell.state_names)

    def function(value: float) -> float:
        new_input, new_states = x.copy(), [s.copy() for s in states]
        target = new_input if name == "input" else new_states[names.index(name)]
        target[position] = value
        output, next_states = run.cell.advance(_like(new_input[None], run), [_like(s[None], run) for s in new_states])  # type: ignore[attr-defined]
        computed = output if nonfinite.quantity == "output" else next_states[names.index(nonfinite.quantity)]
        return float(on_cpu(computed)[0, nonfinite.index["unit"]])

    return function


def _like(array: Array, run: Replay) -> Array:
    return run.xp.asarray(array, dtype=run.input.dtype, device=getattr(run.input, "device", None))


_HALF_DTYPES = ("float16", "bfloat16")


def forward_origins(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the origins of non-finite values in the forward pass: in layers by their calls, then in model outputs.

    Of layers that run in turn at the steps of one loop, that of the earliest step comes first.
    """
    for node in observed.nodes:
        loop = next((names for names in observed.capture.loops if node.name in names), None)
        origins = list(_layer_origins(observed, node))
        if origins and loop is not None:
            others = (other for other in observed.nodes if other.name in loop and other is not node)
            origins += [origin for other in others for origin in _layer_origins(observed, other)]
            origins.sort(key=lambda origin: origin.index.get(TIME, -1))  # an initial state has no step
        yield from origins
    for i, array in enumerate(observed.returned_outputs):
        nonfinite = observed.first_nonfinite(Port("output", index=i), "value", array)
        if nonfinite is not None:
            name = "output" if len(observed.returned_outputs) == 1 else f"output[{i}]"
            cause = "an operation of the model on the outputs of its layers, which are finite"
            yield Origin("forward", name, "value", nonfinite.value, nonfinite.index, fed_by=cause)


def _layer_origins(observed: ObservedRun, node: Node) -> Iterator[Origin]:
    for replayed in node.directions:
        yield from _recurrence_origins(observed, node, replayed)
    for plain_call in node.plain_calls:
        port, array = Port("output", plain_call.layer), to_host(plain_call.output)
        nonfinite = observed.first_nonfinite(port, "output", array)
        if nonfinite is not None:
            # The layer's input may not be finite although all earlier layers are.
            layer_input = observed.value_at(Port("input", plain_call.layer))
            input_nonfinite = (
                None
                if layer_input is None
                else observed.first_nonfinite(Port("input", plain_call.layer), "input", layer_input)
            )
            if input_nonfinite is not None:
                cause = f"an operation of the model between layers, on {cause_below(observed, node, input_nonfinite)}"
                yield Origin(
                    "forward", plain_call.layer, "input", input_nonfinite.value, input_nonfinite.index, fed_by=cause
                )
            yield Origin(
                "forward",
                plain_call.layer,
                "output",
                nonfinite.value,
                nonfinite.index,
                fed_by=cause_below(observed, node, nonfinite),
            )


def _recurrence_origins(observed: ObservedRun, node: Node, replayed: ObservedCall) -> Iterator[Origin]:
    nonfinite = first_nonfinite_forward(replayed.run, replayed.limit)
    if nonfinite is None:
        return
    origin = origin_of(replayed, nonfinite, "forward")
    if nonfinite.quantity == "input":
        origin = replace(origin, fed_by=cause_below(observed, node, nonfinite, replayed))
    elif nonfinite.quantity.startswith("initial_"):
        origin = replace(origin, fed_by="the initial state of the layer")
    else:
        origin = replace(origin, fed_by=_cause_in_recurrence(replayed, nonfinite))
    yield origin


def origin_of(replayed: ObservedCall, nonfinite: NonfiniteValue, phase: str) -> Origin:
    """Return the origin of a value inside a recurrence."""
    call, index = replayed.call, dict(nonfinite.index)
    gate = index.pop(GATE, None)
    return Origin(
        phase,  # type: ignore[arg-type]
        call.layer,
        nonfinite.quantity,
        nonfinite.value,
        index,
        gate=call.cell.gates[gate] if gate is not None and call.cell.gates else "",
        direction=call.direction if call.bidirectional else "",
        precision=str(call.compute_dtype) if np.isfinite(nonfinite.value) else "",
    )


def _cause_in_recurrence(replayed: ObservedCall, nonfinite: NonfiniteValue) -> str:
    """Return text on the values behind a non-finite one: its largest term, the cell's inputs, or the states before."""
    run, call = replayed.run, replayed.call
    if call.cell.by_framework:
        return cause_in_cell(run, nonfinite)
    term = largest_term(run, nonfinite) if nonfinite.quantity == "gate_preactivation" else None
    if term is not None:
        return f"{term}, the largest of its terms"
    states_before = run.state_before(nonfinite.index[TIME])
    sizes = [
        f"{name} up to {np.max(np.abs(on_cpu(state)[nonfinite.index[SAMPLE]])):.3g}"
        for name, state in zip(call.cell.state_names, states_before, strict=True)
    ]
    return f"{', '.join(sizes)} before the step"


def cause_below(
    observed: ObservedRun, node: Node, nonfinite: NonfiniteValue, replayed: ObservedCall | None = None
) -> str:
    """Return text on the largest value below a layer at the same sample (and step), with its source."""
    for name, port, array in observed.tensors_below(node):
        largest_value = _largest_at_sample(observed, port, array, nonfinite)
        if largest_value is None:
            continue
        value, index = largest_value
        source = name_of_input(observed, port.index) if port.layer is None else f"{name}.output"
        index_text = ", ".join(f"{dim} {i}" for dim, i in index.items() if dim not in (TIME, SAMPLE))
        text = f"{source} {value:.3g}" + (f" at {index_text}" if index_text else "")
        dtype = getattr(observed.facts.submodules.get(node.name), "dtype", "")
        dtype = dtype if replayed is None or replayed.call.compute_dtype is None else str(replayed.call.compute_dtype)
        if dtype in _HALF_DTYPES and abs(value) > largest_finite(dtype):
            return f"{text}, more than {dtype} holds ({largest_finite(dtype):.6g})"
        return text
    return ""


def _largest_at_sample(
    observed: ObservedRun, port: Port, array: np.ndarray, nonfinite: NonfiniteValue
) -> tuple[float, dict[str, int]] | None:
    """Return the largest value and its index at a spot's sample and step; None if the tensor is not finite."""
    array = np.asarray(array)
    if array.dtype.kind not in "fiu" or not array.size or not np.all(np.isfinite(array)):
        return None
    dims = observed.names(port, array)
    selection = tuple(
        nonfinite.index[name] if name in (SAMPLE, TIME) and nonfinite.index.get(name, size) < size else slice(None)
        for name, size in zip(dims, array.shape, strict=True)
    )
    magnitudes = np.abs(array[selection].astype(np.float64))
    position = np.unravel_index(int(np.argmax(magnitudes)), magnitudes.shape) if magnitudes.ndim else ()
    free_dims = [name for name, index in zip(dims, selection, strict=True) if isinstance(index, slice)]
    value = float(array[selection][position])
    return value, dict(zip(free_dims, map(int, position), strict=True))


#: Largest number of output values that are perturbed, in the order of suspicion.
_MAX_SUSPECTS = 12


class LossOfOutputs:
    """The loss as a function of the model's outputs, of all samples or of some."""

    def __init__(self, observed: ObservedRun) -> None:
        self.observed, self.outputs = observed, observed.outputs
        self.leaves = [np.asarray(leaf) for leaf in self.outputs.leaves]

    def __call__(
        self, leaves: Sequence[Array], samples: slice = slice(None), **changed: Any
    ) -> tuple[float, list[Any]]:
        """Return loss and gradients for the outputs of the samples ``samples``."""
        batch = replace(self.observed.batch, **changed)
        if samples != slice(None):
            sample_data = {
                name: data.samples_of_arrays(getattr(batch, name), samples.start, samples.stop)
                for name in ("y", "sample_weight")
            }
            batch = replace(batch, **sample_data)
        masks = [None if mask is None else mask[samples] for mask in self.outputs.masks]
        sample_outputs = Outputs(list(leaves), self.outputs.tree, masks)
        return self.observed.adapter.loss_of(self.observed.model, batch, sample_outputs)

    def of_samples(self, samples: slice) -> tuple[float, list[Any]]:
        """Return loss and gradients of some of the samples."""
        return self([leaf[samples] for leaf in self.leaves], samples)

    def first_nonfinite_sample(self) -> int | None:
        """Find the first sample whose own loss is not finite; None if no single sample causes it."""
        sizes = {len(leaf) for leaf in self.leaves if leaf.ndim}
        first_axes = [self.observed.names(Port("output", index=i), leaf)[:1] for i, leaf in enumerate(self.leaves)]
        if len(sizes) != 1 or any(names != (SAMPLE,) for names in first_axes):
            return None
        low, high = 0, sizes.pop()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if not math.isfinite(self.of_samples(slice(low, middle))[0]) else (middle, high)
        return low if not math.isfinite(self.of_samples(slice(low, low + 1))[0]) else None


def loss_origins(observed: ObservedRun) -> Iterator[Origin]:
    """Yield the output value or the sample that makes the loss non-finite, as an origin; nothing for a finite loss."""
    value = observed.capture.loss
    if value is None or math.isfinite(value):
        return
    origin = observed.attempt(lambda: _locate_loss_origin(observed))
    yield origin or Origin("loss", "loss", "value", value, fed_by="outputs that are finite")


def _locate_loss_origin(observed: ObservedRun) -> Origin | None:
    loss = LossOfOutputs(observed)
    value, gradients = loss(loss.leaves)
    if math.isfinite(value):
        penalty_text = "a penalty that the model adds to its loss"
        return Origin("loss", "loss", "value", float(observed.capture.loss or 0), fed_by=penalty_text)
    sample = loss.first_nonfinite_sample()
    samples = slice(None) if sample is None else slice(sample, sample + 1)
    if sample is not None:
        value, gradients = loss.of_samples(samples)
    for leaf, position in _loss_suspects(loss, samples, gradients):
        reason = _singularity_reason(loss, samples, leaf, position)
        if reason:
            return _output_value_origin(observed, loss, sample, leaf, position, value, reason)
    # No single output value explains it.
    sizes = [float(np.max(np.abs(output[samples]), initial=0.0)) for output in observed.returned_outputs if output.ndim]
    cause = f"outputs that are finite, up to {max(sizes, default=0.0):.3g}"
    sample_weights = [to_host(weight)[samples] for weight in data.leaves_of(observed.batch.sample_weight)]
    if math.isnan(value) and sample_weights and not any(np.any(weight) for weight in sample_weights):
        cause = "0 divided by 0 in the loss: all its sample weights are 0"
    return Origin("loss", "loss", "value", value, {} if sample is None else {SAMPLE: sample}, fed_by=cause)


def _loss_suspects(loss: LossOfOutputs, samples: slice, gradients: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Rank output elements to test: non-finite gradients first, then zeros and the largest values."""
    suspects: list[tuple[float, int, tuple[int, ...]]] = []
    for i, (leaf, gradient) in enumerate(zip(loss.leaves, gradients, strict=True)):
        values = leaf[samples]
        if gradient is None or values.dtype.kind != "f":
            continue
        is_nonfinite = ~np.isfinite(np.asarray(gradient))
        with np.errstate(all="ignore"):
            oddness = np.abs(np.log10(np.maximum(np.abs(values.astype(np.float64)), 1e-300))) + 1e6 * is_nonfinite
        for flat_index in np.argsort(-oddness, axis=None, kind="stable")[:_MAX_SUSPECTS]:
            position = tuple(map(int, np.unravel_index(int(flat_index), values.shape)))
            suspects.append((float(oddness[position]), i, position))
    suspects.sort(key=lambda suspect: -suspect[0])
    return [(i, position) for _, i, position in suspects[:_MAX_SUSPECTS]]


def _singularity_reason(loss: LossOfOutputs, samples: slice, leaf: int, position: tuple[int, ...]) -> str:
    leaves = [array[samples].copy() for array in loss.leaves]

    def loss_at(value: float) -> float:
        leaves[leaf][position] = value
        return loss(leaves, samples)[0]

    original = float(leaves[leaf][position])
    reason = singularity(loss_at, original)
    leaves[leaf][position] = original
    return reason


def _output_value_origin(
    observed: ObservedRun,
    loss: LossOfOutputs,
    sample: int | None,
    leaf: int,
    position: tuple[int, ...],
    value: float,
    reason: str,
) -> Origin:
    array = loss.leaves[leaf]
    full_position = position if sample is None else (sample, *position[1:])
    index = dict(observed.element(Port("output", index=leaf), array, full_position))
    name = "output" if len(loss.leaves) == 1 else f"output[{leaf}]"
    cause = f"{reason} in the loss: {name} {float(array[full_position]):.3g}"
    targets = [to_host(leaf) for leaf in data.leaves_of(observed.batch.y)]
    if len(targets) == 1 and targets[0].shape == array.shape:
        cause += f", target {float(targets[0][full_position]):.3g}"
    elif len(targets) == 1 and targets[0].shape[:1] == array.shape[:1] and targets[0][0].size == 1:
        cause += f", target {float(targets[0][full_position[0]].reshape(())):.3g}"
    return Origin("loss", "loss", "value", value, index, fed_by=cause)


def find_output_gradient(observed: ObservedRun) -> Origin | None:
    """Return the output value at which the derivative of a finite loss is not finite, as an origin, or None."""
    loss = LossOfOutputs(observed)
    _, gradients = loss(loss.leaves)
    for i, gradient in enumerate(gradients):
        nonfinite = (
            None
            if gradient is None
            else observed.first_nonfinite(Port("output", index=i), "output_grad", np.asarray(gradient))
        )
        if nonfinite is None:
            continue
        position = tuple(int(n) for n in np.argwhere(~np.isfinite(np.asarray(gradient)))[0])
        leaves = [leaf.copy() for leaf in loss.leaves]

        def derivative(value: float, i: int = i, position: Any = position, leaves: Any = leaves) -> float:
            leaves[i][position] = value
            return float(np.asarray(loss(leaves)[1][i])[position])

        output_value = float(loss.leaves[i][position])
        reason = slope(derivative, output_value) or "the derivative of the loss"
        name = "output" if len(gradients) == 1 else f"output[{i}]"
        index = observed.element(Port("output", index=i), loss.leaves[i], position)
        value = float(np.asarray(gradient)[position])
        return Origin(
            "backward", "loss", "output_grad", value, index, fed_by=f"{reason} in the loss: {name} {output_value:.3g}"
        )
    return None
