"""Sequence cells: linear recurrences that one call runs over all steps, S_t = A_t S_{t-1} + W_t, y_t = C_t S_t.

A whole-sequence layer of a framework (Mamba, Mamba-2, gated delta rules, RG-LRU) has no step function and mostly no
weights of its own: its coefficients are computed from the input for all steps at once. :class:`SequenceCell` has these
coefficients in factors that broadcast against the state, so that no A_t, W_t is stored for all steps; sweeps run in
chunks of steps and keep one state per chunk. The gradient of a complex number z is dL/dRe z + i dL/dIm z, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from math import prod
from operator import mul
from typing import Any

from ..typing import Array
from .arrays import namespace

#: Number of steps of a chunk: coefficients and states of one chunk are in memory at once.
CHUNK = 32


@dataclass(frozen=True)
class SequenceCell:
    """Coefficients of one linear recurrence at all steps: S_t = (I - left_t right_t^T) a_t S_{t-1} + W_t.

    Every array is (sample or 1, time or 1, *axes of the state), with size 1 along axes on which it does not depend.

    Attributes
    ----------
    axes
        Names of the axes of a state: ``("channel", "state_unit")`` for Mamba, ``("head", "key", "value")`` for delta
        rules.
    decay
        Factors of a_t; with ``logarithmic`` of log a_t.
    write
        Factors of W_t, what a step adds to the state: the input times its coefficients.
    read
        C_t: y_t is its product with S_t, summed over ``contracted``. None: the output is the state.
    left, right
        Vectors of the part of rank one along ``contracted``, of a delta rule; None without one.
    contracted
        Index, in ``axes``, of the axis that C_t and ``right`` sum over.
    logarithmic
        Whether ``decay`` has the factors of log a_t.
    initial
        S before the first step, (sample, *axes); None for zero.
    relative
        Whether states are relative to a running maximum, whose change from step to step is part of a_t.
    """

    axes: tuple[str, ...]
    decay: tuple[Array, ...]
    write: tuple[Array, ...]
    read: Array | None = None
    left: Array | None = None
    right: Array | None = None
    contracted: int = -1
    logarithmic: bool = True
    initial: Array | None = None
    relative: bool = False

    @property
    def parts(self) -> dict[str, Array]:
        """Coefficient arrays by name: ``decay_0``, ``decay_1``, ..., ``read``; without those that do not exist."""
        arrays = {f"decay_{i}": array for i, array in enumerate(self.decay)}
        arrays |= {f"write_{i}": array for i, array in enumerate(self.write)}
        single_arrays = {name: getattr(self, name) for name in ("read", "left", "right", "initial")}
        return arrays | {name: array for name, array in single_arrays.items() if array is not None}

    def with_parts(self, change: Callable[[Array], Any]) -> SequenceCell:
        """Return a copy with ``change`` applied to every coefficient array."""
        changed: dict[str, Any] = {}
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if attribute.name in ("decay", "write"):
                changed[attribute.name] = tuple(change(array) for array in value)
            elif attribute.name in ("read", "left", "right", "initial") and value is not None:
                changed[attribute.name] = change(value)
        return replace(self, **changed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (sample, time, *axes) of the states of all steps."""
        shapes = [array.shape for array in (*self.decay, *self.write)]
        return tuple(max(sizes) for sizes in zip(*shapes, strict=True))

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.shape[1])

    @property
    def sweep_size(self) -> int:
        """Number of values that a sweep keeps for one cotangent: states of a chunk, gradients of the coefficients."""
        samples, steps, *axes = self.shape
        state_values = samples * min(CHUNK, steps) * prod(axes)
        coefficient_values = sum(prod(array.shape) for array in self.parts.values())
        return 8 * state_values + 2 * int(coefficient_values)

    @property
    def axis(self) -> int:
        """Position of the contracted axis (over which y_t = C_t S_t sums) in arrays (sample, *axes), from the end."""
        return self.contracted % len(self.axes) - len(self.axes)

    def at(self, steps: slice) -> SequenceCell:
        """Return views of the coefficients of some consecutive steps."""
        return replace(
            self.with_parts(lambda part: part if part.shape[1] == 1 else part[:, steps]), initial=self.initial
        )

    def decays(self) -> Array:
        """Return a_t (sample or 1, time or 1, ...), in the broadcast shape of its factors."""
        decay = _product(self.decay)
        return namespace(decay).exp(decay) if self.logarithmic else decay

    def writes(self) -> Array:
        """Return W_t (sample, time, *axes)."""
        return _product(self.write)

    def start(self) -> Array:
        """Return S before the first step, (sample, *axes)."""
        if self.initial is not None:
            return self.initial
        xp, like = namespace(self.write[0]), self.write[0]
        sizes = (self.shape[0], *self.shape[2:])
        return xp.zeros(sizes, dtype=xp.result_type(*self.decay, *self.write), device=like.device)


def run(cell: SequenceCell, start: Array) -> tuple[Array, Array]:
    """Run consecutive steps of a sequence cell from ``start``.

    Return all states (sample, time, *axes) and the last one.
    """
    decay, write, xp = cell.decays(), cell.writes(), namespace(start)
    state, states = start, []
    for t in range(cell.steps):
        carried = _step(decay, t) * state
        if cell.left is not None and cell.right is not None:
            carried = carried - _step(cell.left, t) * _sum_keepdims(_step(cell.right, t) * carried, cell.axis)
        state = carried + _step(write, t)
        states.append(state)
    return xp.stack(states, axis=1), state


def outputs(cell: SequenceCell, states: Array) -> Array:
    """Return y_t (sample, time, axes without the contracted one), from the states at the cell's steps."""
    return states if cell.read is None else (cell.read * states).sum(cell.axis)


def forward(cell: SequenceCell) -> tuple[Array, list[Array], Array]:
    """Return the outputs of all steps, the states before every chunk, and the last state."""
    state = cell.start()
    chunk_outputs, states_before = [], []
    for steps in chunks(cell.steps):
        states_before.append(state)
        states, state = run(cell.at(steps), state)
        chunk_outputs.append(outputs(cell.at(steps), states))
    return namespace(state).concat(chunk_outputs, axis=1), states_before, state


@dataclass
class SequenceChunk:
    """States and total gradients of consecutive steps: dL/dS_t through the recurrence, (sample, time, *axes).

    ``previous`` are the states before each step; ``direct`` is dL/dy_t, shaped as an output.
    """

    steps: slice
    cell: SequenceCell
    states: Array
    previous: Array
    grads: Array
    direct: Array

    @property
    def carried_grads(self) -> Array:
        """Gradient at a_t S_{t-1}: dL/dS_t pulled back through the rank-one factor I - left_t right_t^T."""
        cell = self.cell
        if cell.left is None or cell.right is None:
            return self.grads
        return self.grads - cell.right.conj() * _sum_keepdims(cell.left.conj() * self.grads, cell.axis)

    @property
    def decay_grad(self) -> Array:
        """Gradient dL/da_t in the broadcast shape of a_t."""
        return _sum_to_part(self.carried_grads * self.previous.conj(), self.cell.decays())

    @property
    def read_grad(self) -> Array:
        """Gradient dL/dC_t in the shape of C_t."""
        read = self.cell.read
        assert read is not None
        return _sum_to_part(self.states.conj() * _expand_outputs(self.cell, self.direct), read)

    def part_grads(self) -> dict[str, Array]:
        """Return gradients of all coefficient arrays at one chunk of steps, by the names of ``SequenceCell.parts``."""
        cell, grads = self.cell, {}
        decay = self.carried_grads * self.previous.conj()
        decay = decay * cell.decays().conj() if cell.logarithmic else decay
        for name, factors, grad in (("decay", cell.decay, decay), ("write", cell.write, self.grads)):
            for i, factor in enumerate(factors):
                others = [other.conj() for j, other in enumerate(factors) if j != i]
                grads[f"{name}_{i}"] = _sum_to_part(grad * _product([*others, 1.0]), factor)
        if cell.read is not None:
            grads["read"] = self.read_grad
        if cell.left is not None and cell.right is not None:
            carried = cell.decays() * self.previous
            right_carried = _sum_keepdims(cell.right * carried, cell.axis)
            left_grads = _sum_keepdims(cell.left.conj() * self.grads, cell.axis)
            grads["left"] = -_sum_to_part(self.grads * right_carried.conj(), cell.left)
            grads["right"] = -_sum_to_part(carried.conj() * left_grads, cell.right)
        return grads


def sweep(
    cell: SequenceCell, states_before: Sequence[Array], output_grad: Array
) -> Iterator[tuple[SequenceChunk, Array]]:
    """Sweep back through all steps; yield chunks in reverse order, each with dL/dS before its first step.

    Parameters
    ----------
    states_before
        States before every chunk, of :func:`forward`.
    output_grad : shaped as the outputs
        Direct gradient dL/dy_t.

    References
    ----------
    Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5: dL/dS_t = C_t^H dL/dy_t + A_{t+1}^H dL/dS_{t+1}.
    """
    carried_grad: Any = 0.0
    for number, steps in reversed(list(enumerate(chunks(cell.steps)))):
        chunk_cell = cell.at(steps)
        states, _ = run(chunk_cell, states_before[number])
        xp = namespace(states)
        previous = xp.concat([states_before[number][:, None], states[:, :-1]], axis=1)
        direct = output_grad[:, steps]
        read = chunk_cell.read
        state_grads = direct if read is None else read.conj() * _expand_outputs(chunk_cell, direct)
        decay, grads = chunk_cell.decays(), []
        for t in range(chunk_cell.steps - 1, -1, -1):
            total = carried_grad + _step(state_grads, t)
            grads.append(total)
            carried_grad = _pull_step(chunk_cell, decay, t, total)
        yield SequenceChunk(steps, chunk_cell, states, previous, xp.stack(grads[::-1], axis=1), direct), carried_grad


def pull_back(cell: SequenceCell, cotangent: Array) -> Iterator[Array]:
    """Pull a cotangent on the last state, (sample, *axes), back through all steps.

    Yield it before every step, from the last one to the first: A_t^H ... A_T^H u.
    """
    for steps in reversed(chunks(cell.steps)):
        chunk_cell = cell.at(steps)
        decay = chunk_cell.decays()
        for t in range(chunk_cell.steps - 1, -1, -1):
            cotangent = _pull_step(chunk_cell, decay, t, cotangent)
            yield cotangent


def _pull_step(cell: SequenceCell, decay: Array, t: int, grad: Array) -> Array:
    """Pull the gradient of the state after step t back to the state before it: multiply by A_t^H."""
    if cell.left is not None and cell.right is not None:
        grad = grad - _step(cell.right, t).conj() * _sum_keepdims(_step(cell.left, t).conj() * grad, cell.axis)
    return _step(decay, t).conj() * grad


def chunks(steps: int) -> list[slice]:
    """Return the slices of consecutive steps that sweeps work on."""
    return [slice(start, min(start + CHUNK, steps)) for start in range(0, steps, CHUNK)]


def _product(factors: Sequence[Any]) -> Any:
    return reduce(mul, factors)


def _step(array: Array, t: int) -> Array:
    return array[:, 0 if array.shape[1] == 1 else t]


def _expand_outputs(cell: SequenceCell, direct: Array) -> Array:
    """Insert an axis of size 1 into a cotangent of the outputs, for the state axis over which y_t = C_t S_t sums."""
    return namespace(direct).expand_dims(direct, axis=cell.axis) if cell.read is not None else direct


def _sum_keepdims(array: Array, axis: int) -> Array:
    """Sum over one axis and keep it with size 1."""
    xp = namespace(array)
    return xp.expand_dims(array.sum(axis), axis=axis)


def _sum_to_part(array: Array, part: Array) -> Array:
    """Sum a gradient over the axes along which ``part`` has size 1; of a real part return the real gradient."""
    for axis, size in enumerate(part.shape):
        if size == 1 and array.shape[axis] != 1:
            array = _sum_keepdims(array, axis)
    return real_like(array, part)


def real_like(grad: Array, part: Array) -> Array:
    """Return a gradient, without its imaginary part if ``part`` is real."""
    xp = namespace(grad, part)
    is_dropped = xp.isdtype(grad.dtype, "complex floating") and not xp.isdtype(part.dtype, "complex floating")
    return grad.real if is_dropped else grad
