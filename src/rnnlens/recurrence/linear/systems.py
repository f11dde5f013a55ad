"""Systems from arrays: one constructor for each structure of A_t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..arrays import Array, namespace
from ..inplace import Workspace
from .inputs import InputAt, Inputs, as_inputs
from .products import ProductSystem, Steps
from .protocol import Pattern
from .structured import ComplexDiagonal, Diagonal, MinusLowRank, PerHead, Transition

Order = Literal["forward", "backward"]


@dataclass
class StructuredStep:
    """One step of a :class:`StructuredSystem`: its A, and its B where that was asked for."""

    transition: Transition
    inputs: InputAt | None = None

    def arrive(self, rows: Array, fresh: int) -> None:
        """Nothing: no state is computed from another one within the step."""

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """The states by structure, the input by its factors."""
        states = self.transition.states
        self.transition.pull(rows, out[:, :, :states])
        if inputs:
            self._b.pull(rows, out[:, :, states:])

    def push(self, rows: Array, out: Array) -> None:
        """The states by structure."""
        self.transition.push(rows, out)

    def inject(self, block: Array | None, out: Array) -> None:
        """By the factors of B."""
        self._b.push(block, out)

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Nothing, as on arrival."""

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """As they left the step."""
        return rows[:, :, columns]

    def after(self, earlier: StructuredStep) -> StructuredStep:
        """The same structure."""
        return StructuredStep(self.transition.after(earlier.transition))

    def input_matrix(self) -> Array:
        """Built on request."""
        return self._b.matrix()

    @property
    def _b(self) -> InputAt:
        assert self.inputs is not None
        return self.inputs


class StructuredSystem:
    """A recurrence whose A_t is never built: see :mod:`rnnlens.recurrence.linear`.

    Parameters
    ----------
    transition
        A_t of all steps.
    inputs
        B_t of all steps.
    batch, time
        Samples and steps, where arrays of one sample or step stand for all.
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
        """Views."""
        return [
            StructuredStep(self.transition.at(samples, t), self.inputs.at(self.work, samples, t) if inputs else None)
            for t in range(first, stop)
        ]

    def multiplications(self, inputs: bool) -> int:
        """Of the structure."""
        return self.transition.multiplications() + (self.inputs.multiplications() if inputs else 0)

    def numbers(self, inputs: bool) -> int:
        """Of the structure."""
        return self.transition.numbers() + (self.inputs.numbers() if inputs else 0)

    def pattern(self, state: int) -> Pattern | None:
        """That of the structure."""
        start = sum(self.state_sizes[:state])
        return self.transition.pattern(slice(start, start + self.state_sizes[state]))

    def moduli(self) -> Array | None:
        """Those of the structure, for all samples and steps."""
        found = self.transition.moduli()
        return None if found is None else self.work.xp.broadcast_to(found, (self.batch, self.time, self.rows))


def diagonal(a: Array, b: Array | Inputs, **options: Any) -> StructuredSystem:
    """A_t = diag(a_t): minGRU, minLSTM (arXiv:2410.01201), IndRNN (arXiv:1803.04831), Mamba (arXiv:2312.00752).

    Parameters
    ----------
    a : (sample, time, state)
        ds_t/ds_{t-1} of each state: of IndRNN u act'(z_t), of minGRU 1 - z_t.
    b : (sample or 1, time or 1, state, feature), or Kernels
        ds_t/dx_t, as it is or by its factors (:class:`Kernels`).
    order : {"forward", "backward"}
        Which way the recurrence ran; arrays are chronological either way.
    mask : (sample, time) of bool, optional
        False where the state is carried over: what ``a`` and ``b`` hold there is not looked at.
    state_sizes : sequence of int, optional
        Sizes of the states that lie side by side; one state by default.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.full((1, 5, 4), 0.5), np.ones((1, 1, 4, 2))
    >>> diagonal(a, b).multiplications(inputs=False)
    4
    """
    return _system(Diagonal(_work(a), a), a, b, options)


def complex_diagonal(real: Array, imaginary: Array, b: Array | Inputs, **options: Any) -> StructuredSystem:
    """A_t = diag(real_t + i imaginary_t): LRU (arXiv:2303.06349, eq. 5), S4D (arXiv:2206.11893).

    Parameters
    ----------
    real, imaginary : (sample or 1, time or 1, unit)
        The two parts. A row is [real parts | imaginary parts] of the states, and so are the states of ``b``:
        2 * unit of them, two states of ``unit`` unless ``state_sizes`` says otherwise.
    b, order, mask, state_sizes
        As of :func:`diagonal`. ``batch=`` and ``time=`` are needed where neither ``real`` nor ``mask`` has them.
    """
    units = int(real.shape[-1])
    options.setdefault("state_sizes", (units, units))
    return _system(ComplexDiagonal(_work(real), real, imaginary), real, b, options)


def per_head(a: Array, b: Array | Inputs, *, size: int, **options: Any) -> StructuredSystem:
    """A_t = a_t of each head times the identity: Mamba-2 (arXiv:2405.21060), RetNet (arXiv:2307.08621), GLA's decay.

    Parameters
    ----------
    a : (sample or 1, time or 1, head)
    size
        States of a head, which lie side by side.
    b, order, mask, state_sizes
        As of :func:`diagonal`.
    """
    return _system(PerHead(_work(a), a, size), a, b, options)


def minus_rank_one(
    decay: Array, left: Array, right: Array, b: Array | Inputs, *, size: int, **options: Any
) -> StructuredSystem:
    """A_t = (diag(decay) - left right^T) of each head, for each of its values: delta rules (arXiv:2406.06484, eq. 4).

    The state of a head is a matrix (key, value), S_t = (diag(decay) - left right^T) S_{t-1} + what is written. With a
    gate alpha, a rate beta and a key k (arXiv:2412.06464, eq. 10): decay = alpha, left = alpha beta k, right = k.

    Parameters
    ----------
    decay, left, right : (sample or 1, time or 1, head, key)
    size
        Values of a head. States lie in a row by head, key and value, values innermost.
    b, order, mask, state_sizes
        As of :func:`diagonal`.
    """
    transition = MinusLowRank(_work(decay), decay, left[..., None], right[..., None], size)
    return _system(transition, decay, b, options)


class _DenseSystem(ProductSystem):
    """Given matrices."""

    def __init__(self, a: Array, b: Array, order: Order, state_sizes: Sequence[int]) -> None:
        self.work = _work(a)
        self.batch, self.time, self.rows = (int(n) for n in a.shape[:3])
        self.columns, self.features, self.order = self.rows, int(b.shape[3]), order
        self.state_sizes = tuple(state_sizes)
        self.product = self.work.xp.concat([a, b], axis=3)

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """Views."""
        width = self.rows + (self.features if inputs else 0)
        return Steps(self.work, self.product[samples, first:stop, :, :width])


def dense(a: Array, b: Array, *, order: Order = "forward", state_sizes: Sequence[int] | None = None) -> _DenseSystem:
    """Any A_t as matrices (sample, time, state, state), and B_t (sample, time, state, feature)."""
    return _DenseSystem(a, b, order, (int(a.shape[2]),) if state_sizes is None else state_sizes)


def _work(like: Array) -> Workspace:
    return Workspace(namespace(like), like)


def _system(transition: Transition, like: Array, b: Array | Inputs, options: dict[str, Any]) -> StructuredSystem:
    """The system, as many samples and steps as the array, or else the mask, has."""
    mask = options.get("mask")
    batch, time = (int(n) for n in (like if mask is None else mask).shape[:2])
    options.setdefault("batch", batch)
    options.setdefault("time", time)
    return StructuredSystem(transition, as_inputs(b), **options)
