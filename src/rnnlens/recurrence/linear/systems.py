"""Linear systems from arrays, one constructor per structure of A_t, and a system with its output as a state.

:func:`with_output` adds the output y_t = C s_t + D x_t to a system as one more state, on which no other state depends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..arrays import Array, Workspace, namespace
from .inputs import InputAt, Inputs, Matrices, as_inputs
from .steps import LinearStep, LinearSteps, Pattern, ProductSteps, ProductSystem, System
from .structured import ComplexDiagonal, Diagonal, MinusLowRank, PerHead, Transition

Order = Literal["forward", "backward"]


@dataclass
class StructuredStep:
    """One step of a :class:`StructuredSystem`: A and, if requested, B."""

    transition: Transition
    inputs: InputAt | None = None

    def arrive(self, rows: Array, fresh: int) -> None:
        """Do nothing: within a step no state is computed from another."""

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Compute rows @ A by structure and, with ``inputs``, rows @ B."""
        states = self.transition.states
        self.transition.pull(rows, out[:, :, :states])
        if inputs:
            self._b.pull(rows, out[:, :, states:])

    def push(self, rows: Array, out: Array) -> None:
        """Compute rows @ A^T by structure."""
        self.transition.push(rows, out)

    def inject(self, block: Array | None, out: Array) -> None:
        """Multiply changes of the input with B_t in factored form."""
        self._b.push(block, out)

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Do nothing: within a step no state is computed from another."""

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """Return the columns of the state, unchanged."""
        return rows[:, :, columns]

    def after(self, earlier: StructuredStep) -> StructuredStep:
        """Return the composition with an earlier step of the same structure, without B."""
        return StructuredStep(self.transition.after(earlier.transition))

    def input_matrix(self) -> Array:
        """Return B_t as a dense matrix."""
        return self._b.matrix()

    @property
    def _b(self) -> InputAt:
        assert self.inputs is not None
        return self.inputs


class StructuredSystem:
    """A linear system with a structured A_t, which is never built as a matrix.

    Parameters
    ----------
    transition
        A_t of all steps.
    inputs
        B_t of all steps.
    batch, time
        Numbers of samples and steps; arrays of length 1 along these axes are used for all of them.
    """

    scratch = 1

    def __init__(
        self,
        transition: Transition,
        inputs: Inputs,
        *,
        batch: int,
        time: int,
        order: Order = "forward",
        mask: Array | None = None,
        state_sizes: Sequence[int] | None = None,
    ) -> None:
        self.work: Workspace = transition.work
        self.transition = transition if mask is None else transition.masked(mask)
        self.inputs = inputs if mask is None else inputs.masked(self.work, mask)
        self.batch, self.time, self.features = batch, time, inputs.features
        self.order: Order = order
        self.rows = self.columns = transition.states
        self.state_sizes = (self.rows,) if state_sizes is None else tuple(int(n) for n in state_sizes)
        self.layout = tuple(range(len(self.state_sizes)))
        if not self.rows == inputs.states == sum(self.state_sizes):
            sizes = f"A {self.rows}, B {inputs.states}, state_sizes {self.state_sizes}"
            raise ValueError(f"A, B and the states differ in size: {sizes}")

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> list[StructuredStep]:
        """Return the chronological steps ``first ... stop - 1`` as views."""
        return [
            StructuredStep(self.transition.at(samples, t), self.inputs.at(self.work, samples, t) if inputs else None)
            for t in range(first, stop)
        ]

    def multiplications(self, inputs: bool) -> int:
        """Return the number of multiplications per row, step and sample."""
        return self.transition.multiplications() + (self.inputs.multiplications() if inputs else 0)

    def numbers(self, inputs: bool) -> int:
        """Return how many numbers are stored per step and sample."""
        return self.transition.numbers() + (self.inputs.numbers() if inputs else 0)

    def pattern(self, state: int) -> Pattern | None:
        """Return the pattern of a state, by the structure of A_t; None if all units can meet."""
        start = sum(self.state_sizes[:state])
        return self.transition.pattern(slice(start, start + self.state_sizes[state]))

    def moduli(self) -> Array | None:
        """Return |eigenvalue| (sample, time, state) if all A_t have the same eigenvectors; else None."""
        found = self.transition.moduli()
        return None if found is None else self.work.xp.broadcast_to(found, (self.batch, self.time, self.rows))


def diagonal(a: Array, b: Array | Inputs, **options: Any) -> StructuredSystem:
    """Make a system with A_t = diag(a_t), as in minGRU (arXiv:2410.01201), IndRNN (arXiv:1803.04831) or Mamba.

    Gu, Dao 2023, arXiv:2312.00752 (Mamba). minLSTM (arXiv:2410.01201) has the same structure.

    Parameters
    ----------
    a : (sample, time, state)
        ds_t/ds_{t-1} of each state: u act'(z_t) in IndRNN, 1 - z_t in minGRU.
    b : (sample or 1, time or 1, state, feature), or Kernels
        ds_t/dx_t, as a matrix or in factors (:class:`Kernels`).
    order : {"forward", "backward"}
        Direction of the recurrence; arrays are chronological in both cases.
    mask : (sample, time) of bool, optional
        False where the state is carried over; ``a`` and ``b`` are ignored there.
    state_sizes : sequence of int, optional
        Sizes of the states, concatenated in a row; one state by default.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.full((1, 5, 4), 0.5), np.ones((1, 1, 4, 2))
    >>> diagonal(a, b).multiplications(inputs=False)
    4
    """
    return _system(Diagonal(_work(a), a), a, b, options)


def complex_diagonal(real: Array, imaginary: Array, b: Array | Inputs, **options: Any) -> StructuredSystem:
    """Make a system with A_t = diag(real_t + i imaginary_t), as in LRU or S4D.

    LRU: arXiv:2303.06349, eq. 5. S4D: arXiv:2206.11893.

    Parameters
    ----------
    real, imaginary : (sample or 1, time or 1, unit)
        Real and imaginary parts. A row, and the state axis of ``b``, is [real parts | imaginary parts] with length
        2 * unit: two states of size ``unit`` unless ``state_sizes`` is given.
    b, order, mask, state_sizes
        Same as in :func:`diagonal`. ``batch=`` and ``time=`` are needed if neither ``real`` nor ``mask`` has these
        axes.
    """
    units = int(real.shape[-1])
    options.setdefault("state_sizes", (units, units))
    return _system(ComplexDiagonal(_work(real), real, imaginary), real, b, options)


def per_head(a: Array, b: Array | Inputs, *, size: int, **options: Any) -> StructuredSystem:
    """Make a system with A_t = a_t of each head times the identity, as in Mamba-2, RetNet or GLA's decay.

    Mamba-2: arXiv:2405.21060. RetNet: arXiv:2307.08621.

    Parameters
    ----------
    a : (sample or 1, time or 1, head)
    size
        Number of states per head, which are adjacent in a row.
    b, order, mask, state_sizes
        Same as in :func:`diagonal`.
    """
    return _system(PerHead(_work(a), a, size), a, b, options)


def minus_rank_one(
    decay: Array, left: Array, right: Array, b: Array | Inputs, *, size: int, **options: Any
) -> StructuredSystem:
    """Make a system with A_t = (diag(decay) - left right^T) per head, as in delta rules (arXiv:2406.06484, eq. 4).

    The state of a head is a matrix (key, value), S_t = (diag(decay) - left right^T) S_{t-1} + new content. With a
    gate alpha, a rate beta and a key k (arXiv:2412.06464, eq. 10): decay = alpha, left = alpha beta k, right = k.

    Parameters
    ----------
    decay, left, right : (sample or 1, time or 1, head, key)
    size
        Number of values per head. Columns of a row are ordered by head, key and value, values innermost.
    b, order, mask, state_sizes
        Same as in :func:`diagonal`.
    """
    transition = MinusLowRank(_work(decay), decay, left[..., None], right[..., None], size)
    return _system(transition, decay, b, options)


class _DenseSystem(ProductSystem):
    """A linear system with dense matrices A_t and B_t."""

    def __init__(self, a: Array, b: Array, order: Order, state_sizes: Sequence[int]) -> None:
        self.work = _work(a)
        self.batch, self.time, self.rows = (int(n) for n in a.shape[:3])
        self.columns, self.features, self.order = self.rows, int(b.shape[3]), order
        self.state_sizes = tuple(state_sizes)
        self.product = self.work.xp.concat([a, b], axis=3)

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Return the chronological steps ``first ... stop - 1`` as views."""
        width = self.rows + (self.features if inputs else 0)
        return ProductSteps(self.work, self.product[samples, first:stop, :, :width])


def dense(a: Array, b: Array, *, order: Order = "forward", state_sizes: Sequence[int] | None = None) -> _DenseSystem:
    """Make a system with dense A_t (sample, time, state, state) and B_t (sample, time, state, feature)."""
    return _DenseSystem(a, b, order, (int(a.shape[2]),) if state_sizes is None else state_sizes)


def _work(like: Array) -> Workspace:
    return Workspace(namespace(like), like)


def _system(transition: Transition, like: Array, b: Array | Inputs, options: dict[str, Any]) -> StructuredSystem:
    """Make a structured system, with the numbers of samples and steps of the mask, or else of ``like``."""
    mask = options.get("mask")
    batch, time = (int(n) for n in (like if mask is None else mask).shape[:2])
    options.setdefault("batch", batch)
    options.setdefault("time", time)
    return StructuredSystem(transition, as_inputs(b), **options)


def with_output(
    system: System, c: Array, d: Array | Inputs | None = None, *, mask: Array | None = None, repeats: bool = False
) -> System:
    """Return a system extended by the output y_t = C s_t + D x_t as its last state.

    Parameters
    ----------
    c : (sample or 1, time or 1, output, state)
        dy_t/ds_t; for LRU it is [Re C | -Im C].
    d : (sample or 1, time or 1, output, feature), or Kernels, optional
        dy_t/dx_t without the path through the states.
    mask : (sample, time) of bool, optional
        False where the layer's output is not y_t but zero, or with ``repeats`` the previous output.
    """
    return _WithOutput(system, c, None if d is None else as_inputs(d), mask, repeats)


class _WithOutput:
    """A system whose last state is its output, made by :func:`with_output`."""

    def __init__(self, system: System, c: Array, d: Inputs | None, mask: Array | None, repeats: bool) -> None:
        self.system, self.work, self.features, self.order = system, system.work, system.features, system.order
        self.batch, self.time = system.batch, system.time
        self.outputs, self.states = int(c.shape[2]), system.rows
        self.rows = self.columns = self.states + self.outputs
        self.state_sizes = (*system.state_sizes, self.outputs)
        self.layout = (*system.layout, len(system.state_sizes))
        self.scratch = max(system.scratch, 1)
        self.hold = None
        if mask is not None:
            c = self.work.xp.where(mask[:, :, None, None], c, self.work.zeros(1, 1, 1, 1))
            d = None if d is None else d.masked(self.work, mask)
            self.hold = mask if repeats else None
        self.c, self.d = Matrices(c), d

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> LinearSteps:
        """Linearise the chronological steps ``first ... stop - 1``, each with its C and D."""
        inner = self.system.build(first, stop, samples, inputs=inputs)
        return [self._step(inner[t - first], t, samples, inputs) for t in range(first, stop)]

    def _step(self, inner: LinearStep, t: int, samples: slice, inputs: bool) -> _StepWithOutput:
        held = None
        if self.hold is not None:
            held = self.work.asarray(~self.hold[samples, t])[:, None, None]
        d = self.d.at(self.work, samples, t) if inputs and self.d is not None else None
        return _StepWithOutput(self.work, inner, self.states, self.c.at(self.work, samples, t), d, held)

    def multiplications(self, inputs: bool) -> int:
        """Return the number of multiplications by A, B and D; C only multiplies rows that enter at a step."""
        return self.system.multiplications(inputs) + (self.d.multiplications() if inputs and self.d else 0)

    def numbers(self, inputs: bool) -> int:
        """Return how many numbers are stored per step and sample: of the recurrence, C and D."""
        return self.system.numbers(inputs) + self.c.numbers() + (self.d.numbers() if inputs and self.d else 0)

    def pattern(self, state: int) -> Pattern | None:
        """Return the pattern of a state of the recurrence; None for the output, whose units meet in the states."""
        return self.system.pattern(state) if state < len(self.system.state_sizes) else None

    def moduli(self) -> Array | None:
        """Return the moduli of the recurrence alone: no state depends on the output."""
        return self.system.moduli()


@dataclass
class _StepWithOutput:
    """One step with rows [states | output]. held : (sample, 1, 1), one where the step repeats the previous output."""

    work: Workspace
    inner: LinearStep
    states: int
    c: InputAt
    d: InputAt | None
    held: Array | None

    def arrive(self, rows: Array, fresh: int) -> None:
        """Add cotangents of the output to the states that it is computed from, in place."""
        fresh = int(rows.shape[1]) if self.held is not None else fresh
        if fresh:
            into = self.work.empty(int(rows.shape[0]), fresh, self.states)
            self.c.pull(rows[:, :fresh, self.states :], into)
            rows[:, :fresh, : self.states] += into
        self.inner.arrive(rows[:, :, : self.states], fresh)

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Pull states back by A and B, and the output by D.

        Of the values before the step, the output depends directly only on itself, where it is repeated.
        """
        own, states = slice(self.states, int(rows.shape[2])), self.states
        features = int(out.shape[2]) - own.stop
        inner = self.work.empty(int(rows.shape[0]), int(rows.shape[1]), states + (features if inputs else 0))
        self.inner.pull(rows[:, :, :states], inner, inputs=inputs)
        out[:, :, :states] = inner[:, :, :states]
        out[:, :, own] = 0 if self.held is None else rows[:, :, own] * self.held
        if not inputs:
            return
        out[:, :, own.stop :] = inner[:, :, states:]
        if self.d is not None:
            self.d.pull(rows[:, :, own], inner[:, :, states:])
            out[:, :, own.stop :] += inner[:, :, states:]

    def push(self, rows: Array, out: Array) -> None:
        """Push states forward by A, and compute the output's tangents by C."""
        self.inner.push(rows[:, :, : self.states], out[:, :, : self.states])
        self.c.push(out[:, :, : self.states], out[:, :, self.states :])
        if self.held is not None:
            out[:, :, self.states :] += rows[:, :, self.states :] * self.held

    def inject(self, block: Array | None, out: Array) -> None:
        """Write the tangents for tangents of the input: of the states by B, of the output by C and D."""
        self.inner.inject(block, out[:, :, : self.states])
        self.c.push(out[:, :, : self.states], out[:, :, self.states :])
        if self.d is not None:
            by_input = self.work.empty(int(out.shape[0]), int(out.shape[1]), int(out.shape[2]) - self.states)
            self.d.push(block, by_input)
            out[:, :, self.states :] += by_input

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Add the effect of a state's tangents on the output, in place."""
        if columns.start < self.states:
            self.inner.spread(rows[:, :, : self.states], state, columns)
            self.c.push(rows[:, :, : self.states], rows[:, :, self.states :])

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """Return cotangents of a state as the recurrence produces it; cotangents of the output are unchanged."""
        if columns.start >= self.states:
            return rows[:, :, columns]
        return self.inner.produced(rows[:, :, : self.states], state, columns)

    def after(self, earlier: Any) -> LinearStep:
        """Return the composition with an earlier step.

        Its output is the later step's, or the earlier one's where the later repeats it.
        """
        c, held = self.c, None
        if self.held is not None:
            c = Matrices((c.matrix() + self.held * earlier.c.matrix())[:, None]).at(self.work, slice(None), 0)
            held = None if earlier.held is None else self.held * earlier.held
        return _StepWithOutput(self.work, self.inner.after(earlier.inner), self.states, c, None, held)

    def input_matrix(self) -> Array:
        """Return B_t of [states | output] as a dense matrix."""
        b = self.inner.input_matrix()
        rows = self.work.xp.matmul(self.c.matrix(), b)
        if self.d is not None:
            rows = rows + self.d.matrix()
        return self.work.xp.concat([b, rows], axis=1)
