"""Sequence cells: linear recurrences that one call runs over all steps, S_t = A_t S_{t-1} + W_t, y_t = C_t S_t.

A whole-sequence layer of a framework (Mamba, Mamba-2, gated delta rules, RG-LRU) has no step function and mostly no
weights of its own: its coefficients are computed from the input for all steps at once. :class:`SequenceCell` has these
coefficients in factors that broadcast against the state, so that no A_t, W_t is stored for all steps; sweeps run in
chunks of steps and keep one state per chunk. The gradient of a complex number z is dL/dRe z + i dL/dIm z, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial, reduce
from math import isqrt, prod
from operator import mul
from typing import Any

from ..typing import Array
from .arrays import namespace
from .matrix_form import MatrixForm, has_matrix_form

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
        Vectors of the part of rank one along ``contracted``; ``right`` is None without one. With ``right``, and
        ``left`` None, the left vector is the first factor of the write, as in delta rules.
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

    def keeping(self, kept: Array) -> SequenceCell:
        """Return the cell without some entries of its state, which stay zero: ``kept`` is 0 there and 1 elsewhere."""
        writes, is_tied = list(self.write), self.right is not None and self.left is None
        on_axis = [i for i, factor in enumerate(writes) if factor.shape[self.axis] > 1]
        chosen = 0 if is_tied or not on_axis else on_axis[0]
        writes[chosen] = writes[chosen] * kept
        left = None if self.left is None else self.left * kept
        initial = None if self.initial is None else self.initial * kept[:, 0]
        return replace(self, write=tuple(writes), left=left, initial=initial)

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
        states = 8 + 2 * isqrt(steps // CHUNK) if has_matrix_form(self) else 8 * min(CHUNK, steps)
        coefficient_values = sum(prod(array.shape) for array in self.parts.values())
        return states * samples * prod(axes) + 2 * int(coefficient_values)

    @property
    def axis(self) -> int:
        """Position of the contracted axis (over which y_t = C_t S_t sums) in arrays (sample, *axes), from the end."""
        return self.contracted % len(self.axes) - len(self.axes)

    @property
    def left_vector(self) -> Any:
        """Left vector of the part of rank one."""
        return self.write[0] if self.left is None else self.left

    def at(self, steps: slice | Sequence[int]) -> SequenceCell:
        """Return the coefficients of some steps; of consecutive ones as views."""
        index = steps if isinstance(steps, slice) else list(steps)
        coefficients = replace(self, initial=None)
        selected = coefficients.with_parts(lambda part: part if part.shape[1] == 1 else part[:, index])
        return replace(selected, initial=self.initial)

    def decays(self) -> Array:
        """Return a_t (sample or 1, time or 1, ...), in the broadcast shape of its factors."""
        decay = _product(self.decay)
        return namespace(decay).exp(decay) if self.logarithmic else decay

    def writes(self) -> Array:
        """Return W_t (sample, time, *axes)."""
        return _product(self.write)

    def outputs(self, states: Array) -> Array:
        """Return y_t (sample, time, axes without the contracted one), from the states at the cell's steps."""
        return states if self.read is None else (self.read * states).sum(self.axis)

    def start(self) -> Array:
        """Return S before the first step, (sample, *axes)."""
        if self.initial is not None:
            return self.initial
        xp, like = namespace(self.write[0]), self.write[0]
        sizes = (self.shape[0], *self.shape[2:])
        return xp.zeros(sizes, dtype=xp.result_type(*self.decay, *self.write), device=like.device)


class SequenceChunk:
    """Consecutive steps of a cell: its outputs and states, and after :meth:`pull_back` the gradients of both.

    ``start`` returns the state before the first step, (sample, *axes); it is called where that state is needed.
    """

    def __init__(self, cell: SequenceCell, steps: slice, start: Callable[[], Array]) -> None:
        self.cell, self.steps, self._start = cell, steps, start

    def outputs(self) -> Array:
        """Return y_t (sample, time, axes without the contracted one)."""
        return self.cell.outputs(self.states())

    def last_state(self) -> Array:
        """Return the state after the last step, (sample, *axes)."""
        return self.states()[:, -1]

    @cached_property
    def _states(self) -> Array:
        cell, state, states = self.cell, self._start(), []
        decay, write = cell.decays(), cell.writes()
        for t in range(cell.steps):
            carried = _step(decay, t) * state
            if cell.right is not None:
                left, right = _step(cell.left_vector, t), _step(cell.right, t)
                carried = carried - left * _sum_keepdims(right * carried, cell.axis)
            state = carried + _step(write, t)
            states.append(state)
        return namespace(state).stack(states, axis=1)

    def states(self, at: Sequence[int] | None = None) -> Array:
        """Return S_t at positions of the chunk (by default all), (sample, position, *axes)."""
        return self._states if at is None else self._states[:, list(at)]

    def pull_back(self, direct: Array, later: Array) -> Array:
        """Return dL/dS before the chunk, from dL/dy_t and the gradient at the last state from later steps.

        References
        ----------
        Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5: dL/dS_t = C_t^H dL/dy_t + A_{t+1}^H dL/dS_{t+1}.
        """
        cell, self.direct, grads = self.cell, direct, []
        state_grads = direct if cell.read is None else cell.read.conj() * _expand_outputs(cell, direct)
        decay = cell.decays()
        for t in range(cell.steps - 1, -1, -1):
            total = later + _step(state_grads, t)
            grads.append(total)
            later = _pull_step(cell, decay, t, total)
        self._grads = namespace(later).stack(grads[::-1], axis=1)
        return later

    def grads(self, at: Sequence[int] | None = None) -> Array:
        """Return dL/dS_t, total through the recurrence, at positions of the chunk, (sample, position, *axes)."""
        return self._grads if at is None else self._grads[:, list(at)]

    def previous_states(self, at: Sequence[int] | None = None) -> Array:
        """Return S_{t-1} at positions of the chunk, (sample, position, *axes)."""
        positions = range(self.cell.steps) if at is None else at
        earlier = [t - 1 for t in positions]
        if min(earlier) >= 0:
            return self.states(earlier)
        later = [t for t in earlier if t >= 0]
        firsts = [self._start()[:, None]] * (len(earlier) - len(later))
        return namespace(firsts[0]).concat([*firsts, *([self.states(later)] if later else [])], axis=1)

    def _carried_grads(self, cell: SequenceCell, grads: Array) -> Array:
        """Return gradients at a_t S_{t-1}: dL/dS_t pulled back through the part of rank one."""
        if cell.right is None:
            return grads
        return grads - cell.right.conj() * _sum_keepdims(cell.left_vector.conj() * grads, cell.axis)

    def decay_grad(self, at: Sequence[int]) -> Array:
        """Return dL/da_t at positions of the chunk, in the broadcast shape of a_t."""
        cell = self.cell.at(at)
        return _sum_to_part(self._carried_grads(cell, self.grads(at)) * self.previous_states(at).conj(), cell.decays())

    def read_grad(self, at: Sequence[int]) -> Array:
        """Return dL/dC_t at positions of the chunk, in the shape of C_t."""
        cell, direct = self.cell.at(at), self.direct[:, list(at)]
        return _sum_to_part(self.states(at).conj() * _expand_outputs(cell, direct), cell.read)

    def part_grads(self) -> dict[str, Array]:
        """Return gradients of all coefficient arrays but ``initial``, by the names of ``SequenceCell.parts``."""
        cell, grads, states, previous = self.cell, self.grads(), self.states(), self.previous_states()
        named = {}
        decay = self._carried_grads(cell, grads) * previous.conj()
        decay = decay * cell.decays().conj() if cell.logarithmic else decay
        for name, factors, grad in (("decay", cell.decay, decay), ("write", cell.write, grads)):
            for i, factor in enumerate(factors):
                others = [other.conj() for j, other in enumerate(factors) if j != i]
                named[f"{name}_{i}"] = _sum_to_part(grad * _product([*others, 1.0]), factor)
        if cell.read is not None:
            named["read"] = _sum_to_part(states.conj() * _expand_outputs(cell, self.direct), cell.read)
        if cell.right is not None:
            carried = cell.decays() * previous
            right_carried = _sum_keepdims(cell.right * carried, cell.axis)
            left_grads = _sum_keepdims(cell.left_vector.conj() * grads, cell.axis)
            left_grad = -_sum_to_part(grads * right_carried.conj(), cell.left_vector)
            named["right"] = -_sum_to_part(carried.conj() * left_grads, cell.right)
            if cell.left is None:
                named["write_0"] = named["write_0"] + left_grad
            else:
                named["left"] = left_grad
        return named


class _MatrixSteps(SequenceChunk):
    """Steps of a cell in matrix form: states and gradients are computed at the positions that are asked for."""

    def __init__(self, cell: SequenceCell, steps: slice, start: Callable[[], Array]) -> None:
        super().__init__(cell, steps, start)
        self.form = MatrixForm(cell)
        self.chunk = self.form.chunk(start)

    def outputs(self) -> Array:
        return self.form.outputs(self.chunk.outputs())

    def last_state(self) -> Array:
        return self.form.matrix(self.chunk.last_state())

    def states(self, at: Sequence[int] | None = None) -> Array:
        return self._at(self.chunk.state, at)

    def pull_back(self, direct: Array, later: Array) -> Array:
        self.direct = direct
        return self.form.matrix(self.chunk.pull_back(self.form.output_rows(direct), self.form.matrix(later)))

    def grads(self, at: Sequence[int] | None = None) -> Array:
        return self._at(self.chunk.grad, at)

    def _at(self, matrix: Callable[[int], Array], at: Sequence[int] | None) -> Array:
        positions = range(self.cell.steps) if at is None else at
        matrices = [self.form.matrix(matrix(t)) for t in positions]
        return namespace(*matrices).stack(matrices, axis=1)

    def part_grads(self) -> dict[str, Array]:
        return self.form.part_grads(self.chunk.gradients(), _sum_to_part)


@dataclass
class SequenceRun:
    """A forward pass of a sequence cell: what a sweep needs of it, at most one state per chunk of steps.

    For a state in matrix form, ``states`` has one state per ``stride`` chunks, about the square root of their number;
    the others are computed again.
    """

    cell: SequenceCell
    states: list[Array]
    last_state: Array
    stride: int
    chunk_class: type[SequenceChunk]

    def chunks(self) -> Iterator[SequenceChunk]:
        """Yield the chunks of steps, the last one first."""
        slices = chunks(self.cell.steps)
        for number in reversed(range(len(self.states))):
            group: list[SequenceChunk] = []
            start: Callable[[], Array] = partial(self.states.__getitem__, number)
            for steps in slices[number * self.stride : (number + 1) * self.stride]:
                group.append(self.chunk_class(self.cell.at(steps), steps, start))
                start = cache(group[-1].last_state)
            while group:
                yield group.pop()

    def sweep(self, output_grad: Array, last_grad: Any = None) -> Iterator[tuple[SequenceChunk, Array]]:
        """Sweep back through all steps; yield chunks, the last one first, each with dL/dS before its first step.

        Parameters
        ----------
        output_grad : shaped as the outputs
            Direct gradient dL/dy_t.
        last_grad : (sample, *axes), optional
            Direct gradient at the last state.
        """
        xp = namespace(output_grad)
        grad = xp.zeros_like(self.last_state) if last_grad is None else last_grad
        for chunk in self.chunks():
            grad = chunk.pull_back(output_grad[:, chunk.steps], grad)
            yield chunk, grad


def forward(cell: SequenceCell) -> tuple[Array, SequenceRun]:
    """Run a sequence cell; return the outputs of all steps, and the run."""
    is_matrix = has_matrix_form(cell)
    chunk_class = _MatrixSteps if is_matrix else SequenceChunk
    slices = chunks(cell.steps)
    stride = max(1, isqrt(len(slices))) if is_matrix else 1
    state, states, outputs = cell.start(), [], []
    for number, steps in enumerate(slices):
        if number % stride == 0:
            states.append(state)
        chunk = chunk_class(cell.at(steps), steps, partial(_given, state))
        outputs.append(chunk.outputs())
        state = chunk.last_state()
    return namespace(state).concat(outputs, axis=1), SequenceRun(cell, states, state, stride, chunk_class)


def _given(state: Array) -> Array:
    return state


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


def carried_share(cell: SequenceCell) -> tuple[list[int], Array] | None:
    """Measure how much of an earlier state the last one holds: lags k, norms of dS_T/dS_{T-k} (sample, lag, *heads).

    The norm is the root mean square over directions of the state: 1 where all is kept. Lags are those of the borders of
    chunks. A head has the two last axes of a state with more than two axes, else the last one. With a part of rank one
    the map acts on the contracted axis alone, so that the identity of that axis, pulled back by chunks, gives all of
    it; None if that part has no matrix form.
    """
    if cell.right is not None and not has_matrix_form(cell):
        return None
    xp, lags, shares = namespace(cell.write[0]), [], []
    carried: Any = 1.0
    if cell.right is not None:
        like = cell.write[0]
        carried = xp.eye(max(part.shape[cell.axis] for part in cell.write), dtype=like.dtype, device=like.device)
    for steps in reversed(chunks(cell.steps)):
        part = cell.at(steps)
        if cell.right is None:
            decays = part.decays()
            product = xp.prod(abs(decays), axis=1)
            carried = carried * (product**part.steps if decays.shape[1] == 1 else product)
            shares.append(xp.sqrt((carried**2).mean(tuple(range(-2 if len(cell.axes) > 2 else -1, 0)))))
        else:
            carried = MatrixForm(part).chunk(cell.start).carry_back(carried)
            shares.append(xp.sqrt((carried**2).sum((-2, -1)) / carried.shape[-1]))
        lags.append(cell.steps - steps.start)
    return lags, xp.stack(shares, axis=1)


def later_influence(cell: SequenceCell) -> Array | None:
    """Compute the energy in all later outputs of what each step writes, (sample, time, *heads).

    With the coefficients held, y_s is the sum over t <= s of C_s A_s ... A_{t+1} W_t. The energy of step t is the sum
    over s >= t, and over the axes of an output after the heads, of |C_s A_s ... A_{t+1} W_t|^2. The reverse recurrence
    of the observability Gramian, O_t = C_t^H C_t + A_{t+1}^H O_{t+1} A_{t+1}, which acts on the contracted axis alone,
    gives W_t^H O_t W_t of all steps with one Gramian in memory. Heads are the axes of a state before the last two.
    None for a part of rank one without readout.
    """
    if cell.read is None:
        return None if cell.right is not None else _diagonal_influence(cell)
    if has_matrix_form(cell):
        return _matrix_influence(cell)
    xp, axis = namespace(cell.write[0]), cell.axis

    def vectors(part: Any) -> Any:
        return xp.moveaxis(part, axis, -1)

    gramian: Any = 0.0
    pieces = []
    for steps in reversed(chunks(cell.steps)):
        part, energies = cell.at(steps), []
        # Factors without the contracted axis stay outside the quadratic form, which then has no axis of values.
        is_inside = [factor.shape[axis] > 1 for factor in part.write]
        inside = [factor for factor, chosen in zip(part.write, is_inside, strict=True) if chosen]
        outside = [factor for factor, chosen in zip(part.write, is_inside, strict=True) if not chosen]
        rank_one = None if part.right is None else (vectors(part.left_vector), vectors(part.right))
        maps = [vectors(part.read), vectors(part.decays()), *(rank_one or ())]
        ones = _product([xp.ones_like(vector[:, :1]) for vector in maps])  # with the axes that a Gramian has
        keys, (read, decay) = _product([*map(vectors, inside), ones]), maps[:2]
        for t in reversed(range(part.steps)):
            gramian = gramian + _outer(_step(read, t).conj(), _step(read, t))
            key = _step(keys, t)
            energies.append((key.conj() * (gramian @ key[..., None])[..., 0]).sum(-1).real)
            if rank_one is not None:
                gramian = _around_rank_one(gramian, *(_step(vector, t) for vector in rank_one))
            gramian = gramian * _outer(_step(decay, t).conj(), _step(decay, t))
        energy = xp.stack(energies[::-1], axis=1)
        for factor in outside:
            energy = energy * abs(vectors(factor)[..., 0]) ** 2
        pieces.append(_sum_after_heads(cell, energy, contracted=1))
    return xp.concat(pieces[::-1], axis=1)


def _matrix_influence(cell: SequenceCell) -> Array:
    """Compute :func:`later_influence` of a cell in matrix form, by products over chunks."""
    xp, pieces, gramian = namespace(cell.write[0]), [], None
    for steps in reversed(chunks(cell.steps)):
        form = MatrixForm(cell.at(steps))
        chunk = form.chunk(cell.start)
        if gramian is None:
            first = chunk.coefficients.write[..., :1, :]
            gramian = xp.zeros_like(xp.matrix_transpose(first) * first)
        energies, gramian = chunk.influence(gramian)
        pieces.append(xp.moveaxis(energies * (chunk.coefficients.value**2).sum(-1), -1, 1))
    return xp.concat(pieces[::-1], axis=1)


def state_energy(run: SequenceRun) -> Array:
    """Return the mean square of what each entry of the state adds to an output, shaped as ``SequenceCell.keeping``.

    The entry i of a state adds C_t[i] S_t[i]; without readout S_t[i]. The mean is over samples, steps and the axis of
    the outputs of a matrix, which all entries along the contracted axis have in common.
    """
    cell, total = run.cell, 0.0
    axes = (0, 1, *((-3 - cell.axis,) if len(cell.axes) > 2 and cell.axis >= -2 else ()))
    for chunk in run.chunks():
        states = chunk.states()
        added = states if cell.read is None else chunk.cell.read * states
        total = total + (abs(added) ** 2).sum(axes, keepdims=True)
    return total / prod(cell.shape[axis] for axis in axes)


def _diagonal_influence(cell: SequenceCell) -> Array:
    """Compute :func:`later_influence` of a cell whose outputs are its states: no entry acts on another."""
    xp, pieces = namespace(cell.write[0]), []
    gains: Any = 0.0
    for steps in reversed(chunks(cell.steps)):
        part, energies = cell.at(steps), []
        squares, kept = abs(part.writes()) ** 2, abs(part.decays()) ** 2
        for t in reversed(range(part.steps)):
            gains = 1.0 + gains
            energies.append(_step(squares, t) * gains)
            gains = gains * _step(kept, t)
        pieces.append(_sum_after_heads(cell, xp.stack(energies[::-1], axis=1)))
    return xp.concat(pieces[::-1], axis=1)


def _sum_after_heads(cell: SequenceCell, energy: Array, contracted: int = 0) -> Array:
    """Sum an energy (sample, time, *axes of an output) over the axes after the heads."""
    heads = max(len(cell.axes) - 2, 0)
    return energy.sum(tuple(range(2 + heads, 2 + len(cell.axes) - contracted)))


def _outer(left: Array, right: Array) -> Array:
    """Return left right^T along the last axis."""
    return left[..., :, None] * right[..., None, :]


def _around_rank_one(gramian: Array, left: Array, right: Array) -> Array:
    """Return (I - left right^T)^H gramian (I - left right^T)."""
    gramian = gramian - _outer((gramian @ left[..., None])[..., 0], right)
    return gramian - _outer(right.conj(), (left.conj()[..., None, :] @ gramian)[..., 0, :])


def _pull_step(cell: SequenceCell, decay: Array, t: int, grad: Array) -> Array:
    """Pull the gradient of the state after step t back to the state before it: multiply by A_t^H."""
    if cell.right is not None:
        grad = grad - _step(cell.right, t).conj() * _sum_keepdims(_step(cell.left_vector, t).conj() * grad, cell.axis)
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
