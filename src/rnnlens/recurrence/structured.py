"""Systems with a diagonal A_t, real or complex, which is never built as a matrix, and B_t in factors.

The matrices of all steps are arrays ``(sample or 1, time or 1, ...)``; ``select_step`` selects one step, as views
``(sample or 1, ...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..typing import Array
from .arrays import Workspace, at_step, namespace
from .linear import LinearStep, Pattern, System

Order = Literal["forward", "backward"]


class Kernels:
    """B_t in factors: a sum over gates, B = sum_g diag(coefficient_g) kernel_g^T.

    Parameters
    ----------
    coefficients : (sample or 1, time or 1, gate, state)
        Derivative of the state by each pre-activation: for h = z * n, with z and n from the input, (n z', z n').
    kernels : one (feature, state) array per gate
        Kernels, with pre-activation = x @ kernel.
    scale : (sample, feature) or (gate, sample, feature), optional
        Dropout multipliers of the input.
    """

    def __init__(self, coefficients: Array, kernels: Sequence[Array], scale: Array | None = None) -> None:
        self.coefficients, self.kernels, self.scale = coefficients, list(kernels), scale
        self.features, self.states = (int(n) for n in self.kernels[0].shape)
        #: Kernels (gate * state, feature), concatenated so that all gates need a single matrix product.
        self.stacked = namespace(coefficients).concat([kernel.T for kernel in self.kernels], axis=0)

    def select_step(self, work: Workspace, samples: slice, t: int) -> _KernelsAt:
        """Return B_t = ds_t/dx_t of one step as views of its factors."""
        scale = self.scale
        if scale is not None:
            scale = scale[samples] if len(scale.shape) == 2 else scale[:, samples]
        return _KernelsAt(work, at_step(self.coefficients, samples, t), self, scale)

    def with_mask(self, work: Workspace, mask: Array) -> Kernels:
        """Return a copy with B_t = 0 where ``mask`` (sample, time) is False."""
        return Kernels(_fill_masked(work, mask, self.coefficients, 0.0), self.kernels, self.scale)

    def multiplications(self) -> int:
        """Return the number of multiplications by B_t = ds_t/dx_t per cotangent row, step and sample.

        With several gates B_t is multiplied as a dense matrix.
        """
        return self.states * self.features * (1 if len(self.kernels) > 1 else 2)

    def numbers(self) -> int:
        """Return the number of coefficients of B_t per step and sample; kernels are stored once for all steps."""
        return self.states * len(self.kernels)


class _KernelsAt:
    """B of one step in factors: coefficients (sample or 1, gate, state), scale (sample, feature) or (gate, ...)."""

    def __init__(self, work: Workspace, coefficients: Array, kernels: Kernels, scale: Array | None) -> None:
        self.work, self.coefficients, self.scale = work, coefficients, scale
        self.kernels, self.stacked = kernels.kernels, kernels.stacked
        self.per_gate = scale is not None and len(scale.shape) == 3

    def pull(self, rows: Array, out: Array) -> None:
        """Pull cotangent rows (sample, row, state) back to the input: write rows @ B to out (sample, row, feature)."""
        if self.per_gate or (len(self.kernels) > 1 and rows.shape[1] > 1):
            self.work.matmul(rows, _broadcast_samples(self.matrix(), rows), out)
            return
        by_gate = rows[:, :, None, :] * self.coefficients[:, None]
        side_by_side = self.work.xp.reshape(by_gate, (*rows.shape[:2], self.stacked.shape[0]))
        self.work.matmul(side_by_side, _broadcast_samples(self.stacked[None], rows), out)
        if self.scale is not None:
            out *= self.scale[:, None, :]

    def push(self, block: Array | None, out: Array) -> None:
        """Write block (sample or 1, row, feature) @ B^T, or B^T without a block, to out (sample, row, state)."""
        for k, kernel in enumerate(self.kernels):
            scale = None if self.scale is None else (self.scale[k] if self.per_gate else self.scale)
            scaled_block = block if scale is None or block is None else block * scale[:, None, :]
            contribution = kernel if scaled_block is None else self.work.xp.matmul(scaled_block, kernel)
            if scale is not None and block is None:
                contribution = contribution * scale[:, :, None]
            contribution = contribution * self.coefficients[:, None, k]
            out[...] = contribution if k == 0 else out + contribution

    def matrix(self) -> Array:
        """Return B as a dense matrix (sample or 1, state, feature)."""
        first_gate, *other_gates = range(len(self.kernels))
        return sum((self._gate_matrix(k) for k in other_gates), start=self._gate_matrix(first_gate))

    def _gate_matrix(self, k: int) -> Array:
        states = self.coefficients.shape[2]
        product = self.coefficients[:, k, :, None] * self.stacked[k * states : (k + 1) * states]
        if self.scale is None:
            return product
        return product * (self.scale[k] if self.per_gate else self.scale)[:, None, :]


def _broadcast_samples(matrices: Array, rows: Array) -> Array:
    """Broadcast matrices (sample or 1, n, n) to the number of samples of ``rows``, as a view."""
    count = int(rows.shape[0])
    if int(matrices.shape[0]) == count:
        return matrices
    return matrices.expand(count, -1, -1) if hasattr(matrices, "expand") else matrices


def _fill_masked(work: Workspace, mask: Array, values: Array, otherwise: float) -> Array:
    """Replace values at masked steps by a constant."""
    fill = work.zeros(*[1] * len(values.shape)) + otherwise
    return work.xp.where(mask[(..., *[None] * (len(values.shape) - 2))], values, fill)


@dataclass
class Diagonal:
    """Diagonal A_t = diag(values); values : (sample, time, state)."""

    work: Workspace
    values: Array

    @property
    def states(self) -> int:
        """Number of states: the length of the diagonal."""
        return int(self.values.shape[-1])

    def select_step(self, samples: slice, t: int) -> Diagonal:
        """Return the diagonal of A_t at one step of some samples, as a view."""
        return Diagonal(self.work, at_step(self.values, samples, t))

    def with_mask(self, mask: Array) -> Diagonal:
        """Return a copy in which A_t is the identity at masked steps."""
        return Diagonal(self.work, _fill_masked(self.work, mask, self.values, 1.0))

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply cotangent rows by the diagonal of A_t."""
        self.work.multiply(rows, self.values[:, None, :], out)

    push = pull

    def multiplications(self) -> int:
        """Return the number of multiplications per row, one for each state."""
        return self.states

    def moduli(self) -> Array:
        """Return the magnitudes of the diagonal of A_t, its eigenvalues."""
        return self.work.xp.abs(self.values)

    def pattern(self) -> Pattern:
        """Return the colouring of a diagonal A_t: one colour, since no unit's cotangent reaches another unit."""
        column = np.arange(self.states)
        return Pattern(0 * column, column[:, None])


@dataclass
class ComplexDiagonal:
    """Diagonal A_t = diag(real + i imaginary) of complex states, in rows of [real parts | imaginary parts].

    As a real matrix [[diag(real), -diag(imaginary)], [diag(imaginary), diag(real)]]; both (sample, time, unit).
    """

    work: Workspace
    real: Array
    imaginary: Array

    @property
    def states(self) -> int:
        """Number of real and imaginary parts: two per complex state."""
        return 2 * int(self.real.shape[-1])

    def select_step(self, samples: slice, t: int) -> ComplexDiagonal:
        """Return the complex diagonal of A_t at one step of some samples, as a view."""
        return ComplexDiagonal(self.work, at_step(self.real, samples, t), at_step(self.imaginary, samples, t))

    def with_mask(self, mask: Array) -> ComplexDiagonal:
        """Return a copy in which A_t is the identity, 1 + 0i, at masked steps."""
        real = _fill_masked(self.work, mask, self.real, 1.0)
        imaginary = _fill_masked(self.work, mask, self.imaginary, 0.0)
        return ComplexDiagonal(self.work, real, imaginary)

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply rows by the conjugate diagonal, which is the transposed real matrix."""
        self._multiply(rows, out, -self.imaginary)

    def push(self, rows: Array, out: Array) -> None:
        """Multiply rows by the complex diagonal."""
        self._multiply(rows, out, self.imaginary)

    def _multiply(self, rows: Array, out: Array, imaginary: Array) -> None:
        units, work = int(self.real.shape[-1]), self.work
        real, imaginary = self.real[:, None, :], imaginary[:, None, :]
        x, y = rows[:, :, :units], rows[:, :, units:]
        work.multiply(x, real, out[:, :, :units])
        work.add_product(out[:, :, :units], y, -imaginary)
        work.multiply(y, real, out[:, :, units:])
        work.add_product(out[:, :, units:], x, imaginary)

    def multiplications(self) -> int:
        """Return the number of real multiplications per row: four for each complex state."""
        return 2 * self.states

    def moduli(self) -> Array:
        """Return the modulus of each complex eigenvalue of A_t, repeated for its real and imaginary part."""
        modulus = self.work.xp.sqrt(self.real**2 + self.imaginary**2)
        return self.work.xp.concat([modulus, modulus], axis=-1)

    def pattern(self) -> Pattern:
        """Return the colouring of a complex diagonal A_t: one colour for real parts, one for imaginary parts.

        The cotangent of either part reaches both parts of its own state.
        """
        units, column = self.states // 2, np.arange(self.states)
        return Pattern(column // units, np.stack([column % units, column % units + units], axis=1))


@dataclass
class StructuredStep(LinearStep):
    """One step of a :class:`StructuredSystem`: A and, if requested, B."""

    transition: Diagonal | ComplexDiagonal
    inputs: Any = None

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Pull cotangent rows back through a step: write rows @ A_t and, with ``inputs``, rows @ B_t.

        A_t is no dense matrix.
        """
        states = self.transition.states
        self.transition.pull(rows, out[:, :, :states])
        if inputs:
            self.inputs.pull(rows, out[:, :, states:])

    def push(self, rows: Array, out: Array) -> None:
        """Push tangent rows forward through a step without a dense A_t: write rows @ A_t^T."""
        self.transition.push(rows, out)

    def inject(self, block: Array | None, out: Array) -> None:
        """Write the state tangents block @ B_t^T of input tangents, with B_t in factored form."""
        self.inputs.push(block, out)

    def input_matrix(self) -> Array:
        """Return B_t = ds_t/dx_t as a dense matrix."""
        return self.inputs.matrix()


class StructuredSystem(System):
    """A linear system of one state with a structured A_t, which is never built as a matrix.

    Parameters
    ----------
    transition, inputs
        A_t and B_t of all steps.
    batch, time
        Numbers of samples and steps; arrays of length 1 along these axes are used for all of them.
    order
        Direction of the recurrence; arrays are chronological in both cases.
    mask : (sample, time) of bool, optional
        False where the state is carried over; A_t and B_t are ignored there.
    """

    def __init__(
        self,
        transition: Diagonal | ComplexDiagonal,
        inputs: Kernels,
        batch: int,
        time: int,
        order: Order = "forward",
        mask: Array | None = None,
    ) -> None:
        self.work: Workspace = transition.work
        self.transition = transition if mask is None else transition.with_mask(mask)
        self.inputs = inputs if mask is None else inputs.with_mask(self.work, mask)
        self.batch, self.time, self.features = batch, time, inputs.features
        self.order: Order = order
        self.rows = self.columns = transition.states
        self.state_sizes: tuple[int, ...] = (self.rows,)
        if self.rows != inputs.states:
            raise ValueError(f"A and B differ in size: A {self.rows}, B {inputs.states}")

    def build(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> list[StructuredStep]:
        """Return A_t = ds_t/ds_{t-1} and B_t = ds_t/dx_t at chronological steps ``first_step ... stop - 1`` (views)."""
        return [
            StructuredStep(
                self.transition.select_step(samples, t),
                self.inputs.select_step(self.work, samples, t) if inputs else None,
            )
            for t in range(first_step, stop)
        ]

    def multiplications(self, inputs: bool) -> int:
        """Return the number of multiplications by A_t and, with ``inputs``, B_t per cotangent row, step and sample."""
        return self.transition.multiplications() + (self.inputs.multiplications() if inputs else 0)

    def numbers(self, inputs: bool) -> int:
        """Return how many numbers A_t and B_t take per step and sample."""
        return self.rows + (self.inputs.numbers() if inputs else 0)

    def pattern(self, state: int) -> Pattern:
        """Return the colouring of the state's units by which cotangents of one colour never meet in a reverse sweep."""
        return self.transition.pattern()

    def moduli(self) -> Array | None:
        """Return |eigenvalue| (sample, time, state): all A_t have the same eigenvectors."""
        return self.work.xp.broadcast_to(self.transition.moduli(), (self.batch, self.time, self.rows))


def diagonal(a: Array, b: Kernels, order: Order = "forward", mask: Array | None = None) -> StructuredSystem:
    """Make a system with A_t = diag(a_t), a : (sample, time, state), as in minGRU, minLSTM or IndRNN.

    minGRU, minLSTM: arXiv:2410.01201. IndRNN: arXiv:1803.04831. ``order`` and ``mask`` as in :class:`StructuredSystem`.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.full((1, 5, 4), 0.5), Kernels(np.ones((1, 1, 1, 4)), [np.ones((2, 4))])
    >>> diagonal(a, b).multiplications(inputs=False)
    4
    """
    batch, time = (int(n) for n in a.shape[:2])
    return StructuredSystem(Diagonal(Workspace(namespace(a), a), a), b, batch, time, order, mask)
