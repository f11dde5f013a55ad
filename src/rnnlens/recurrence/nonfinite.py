"""Search for the first non-finite number of a recurrence: forward in time, or backward from the last step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..typing import Array
from ..vocabulary import CHANNEL, FEATURE, GATE, SAMPLE, TIME, UNIT
from .arrays import on_cpu
from .cells import affine
from .cells.cell import Cell
from .replay import Replay
from .trajectory import Adjoint

#: NumPy arrays; arrays of other libraries are converted for the search.
Values = np.ndarray[Any, Any]

_GATE_QUANTITIES = ("gates", "gate_preactivation", "gate_preactivation_grad")


@dataclass(frozen=True)
class NonfiniteValue:
    """One non-finite number: its quantity, its index by dimension, and its value."""

    quantity: str
    index: Mapping[str, int]
    value: float


def largest_finite(dtype: object) -> float:
    """Return the largest finite number of a dtype.

    >>> largest_finite("float16"), largest_finite("float32") > 1e38
    (65504.0, True)
    """
    name = str(dtype).rpartition(".")[2]
    return {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float64": float(np.finfo(np.float64).max)}.get(
        name, float(np.finfo(np.float32).max)
    )


def is_nonfinite(array: Values, limit: float) -> Values:
    """Return a boolean array: where an array is not finite or exceeds ``limit`` in magnitude."""
    with np.errstate(all="ignore"):
        is_broken: Values = ~np.isfinite(array) | (np.abs(array) > limit)
    return is_broken


def any_nonfinite(array: Values, limit: float) -> bool:
    """Return whether any number of an array is not finite or exceeds ``limit`` in magnitude.

    Real numbers are tested by their extremes. An array of flags could be larger than memory if the values are one
    number, repeated without a copy.
    """
    if array.dtype.kind == "f" and array.size:
        array = np.asarray([array.min(), array.max()])
    return bool(is_nonfinite(array, limit).any())


def find_nonfinite_value(quantity: str, array: Values, dims: Sequence[str], limit: float) -> NonfiniteValue | None:
    """Return the first number of an array, in the order of its axes, that is not finite or exceeds ``limit``."""
    if not any_nonfinite(array, limit):
        return None
    is_broken = is_nonfinite(array, limit)
    index = np.unravel_index(int(np.argmax(is_broken)), array.shape)
    return NonfiniteValue(quantity, dict(zip(dims, map(int, index), strict=True)), float(array[index]))


def first_nonfinite_forward(run: Replay, limit: float) -> NonfiniteValue | None:
    """Return the first non-finite number in the order of computation.

    The initial states are searched first, then each step: input, pre-activations, gates, states, output. Masked steps
    are skipped.
    """
    for index, state in enumerate(run.initial_state):
        name, values = f"initial_{run.cell.state_names[index]}", on_cpu(state)
        dims = (SAMPLE, *_dims_of_step(name, values.ndim - 1, run.cell))
        found_value = find_nonfinite_value(name, values, dims, limit)
        if found_value is not None:
            return found_value
    return _first_by_step(run, list(_forward(run)), limit)


def _forward(run: Replay) -> Iterator[tuple[str, Array]]:
    """Yield name and array (for all steps) of each quantity that a step computes, in their order of computation."""
    yield "input", run.input
    if run.record is not None:
        yield "gate_preactivation", run.record.preactivation
        yield "gates", run.record.gates
    # The state that the layer returns is computed last, such as h_t of an LSTM from c_t.
    yield from reversed(list(zip(run.cell.state_names, run.states, strict=True)))
    if run.step_output is not None:
        yield "output", run.step_output


def _first_by_step(
    run: Replay, arrays: Sequence[tuple[str, Array]], limit: float, *, reverse: bool = False
) -> NonfiniteValue | None:
    cpu_arrays = [(name, on_cpu(array)) for name, array in arrays]
    broken_steps: list[Any] = [
        is_nonfinite(array, limit).any(axis=tuple(range(2, array.ndim))) for _, array in cpu_arrays
    ]
    if run.mask is not None:
        broken_steps = [b & on_cpu(run.mask) for b in broken_steps]
    for t in run.steps(reverse=reverse):
        for (name, array), is_broken in zip(cpu_arrays, broken_steps, strict=True):
            if is_broken[:, t].any():
                sample = int(np.argmax(is_broken[:, t]))
                dims = _dims_of_step(name, array.ndim - 2, run.cell)
                found_value = find_nonfinite_value(name, array[sample, t], dims, limit)
                assert found_value is not None
                return NonfiniteValue(name, {SAMPLE: sample, TIME: t, **found_value.index}, found_value.value)
    return None


def _dims_of_step(quantity: str, rank: int, cell: Cell) -> tuple[str, ...]:
    """Return the dimension names of a quantity of one sample at one step: space, gate, and unit, channel or feature."""
    last = FEATURE if quantity in ("input", "input_grad") else CHANNEL if cell.space else UNIT
    dims = (*cell.space, *((GATE,) if quantity in _GATE_QUANTITIES else ()), last)
    # A cell that only the framework knows may have values of any rank.
    return dims if len(dims) == rank else (*(f"axis_{i}" for i in range(1, rank)), last)[:rank]


def first_nonfinite_backward(
    run: Replay, adjoint: Adjoint, direct: Mapping[str, Values], limit: float
) -> NonfiniteValue | None:
    """Return the first non-finite number in the order of BPTT.

    Steps are searched from the last; within a step: direct gradient, states, gates, input.

    ``direct``: direct gradients (sample, time, ..., unit) by name.
    """
    named: list[tuple[str, Any]] = list(direct.items())
    named += [(f"{n}_grad", g) for n, g in zip(run.cell.state_names, adjoint.state_grads, strict=True)]
    if adjoint.gate_grad is not None:
        named.append(("gate_preactivation_grad", adjoint.gate_grad))
    named.append(("input_grad", adjoint.input_grad))
    return _first_by_step(run, named, limit, reverse=True)


@dataclass(frozen=True)
class Term:
    """One product in a sum: an operand with its origin, and the weight that it is multiplied by."""

    source: str
    position: int
    operand: float
    weight: float

    def __str__(self) -> str:
        if self.source == "bias":
            return f"bias {self.weight:.3g}"
        by, dim = ("kernel", "feature") if self.source == "input" else ("recurrent_kernel", "unit")
        return f"{self.source} {self.operand:.3g} at {dim} {self.position} times {by} {self.weight:.3g}"


def largest_term(run: Replay, nonfinite: NonfiniteValue) -> Term | None:
    """Return the largest product in one pre-activation: of an input with the kernel, or of a previous state.

    Returns None if the cell's pre-activations are not sums of products with these kernels.
    """
    weights, index = run.cell.weights(), nonfinite.index
    kernel, recurrent = weights.get("kernel"), weights.get("recurrent_kernel")
    if kernel is None or len(kernel.shape) != 2:
        return None
    column = index.get(GATE, 0) * run.cell.units + index[UNIT]
    previous_state = run.state_before(index[TIME])[0][index[SAMPLE]]
    sums = [("input", run.input[index[SAMPLE], index[TIME]], kernel)]
    if recurrent is not None and len(recurrent.shape) == 2:
        sums.append((run.cell.state_names[0], previous_state, recurrent))
    terms = [Term("bias", 0, 1.0, float(b[column])) for b in _biases(weights, column)]
    for source, operands, matrix in sums:
        values, kernel_matrix = on_cpu(operands).astype(np.float64), on_cpu(matrix).astype(np.float64)
        if kernel_matrix.shape[0] != len(values) or column >= kernel_matrix.shape[1]:
            return None
        with np.errstate(all="ignore"):
            position = int(np.argmax(np.nan_to_num(np.abs(values * kernel_matrix[:, column]), nan=np.inf)))
        terms.append(Term(source, position, float(values[position]), float(kernel_matrix[position, column])))
    return max(terms, key=lambda term: abs(term.operand * term.weight))


def _biases(weights: Mapping[str, Array], column: int) -> list[Array]:
    biases = [weights[name] for name in ("bias", "recurrent_bias") if name in weights]
    return [bias for bias in biases if len(bias.shape) == 1 and column < bias.shape[0]]


def magnitude_by_step(run: Replay, sample: int) -> Values:
    """Return the largest magnitude (time,) of one sample's pre-activations, or of its states without gates."""
    values = run.states[-1] if run.record is None else affine.join_gates(run.record.preactivation, run.xp)
    with np.errstate(all="ignore"):
        by_step = np.abs(on_cpu(values)[sample])
        magnitudes: Values = np.max(by_step, axis=tuple(range(1, by_step.ndim)))
    return magnitudes
