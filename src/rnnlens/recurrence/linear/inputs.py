"""Input matrices B_t = ds_t/dx_t of linear systems whose A_t is not dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..arrays import Array, Workspace, at_step, namespace
from .steps import transposed


class InputAt(Protocol):
    """Interface of B_t at one step of some samples."""

    def pull(self, rows: Array, out: Array) -> None:
        """Compute rows @ B. rows : (sample, row, state); out : (sample, row, feature)."""

    def push(self, block: Array | None, out: Array) -> None:
        """Compute block @ B^T, or B^T if the block is None. block .

        (sample or 1, row, feature); out : (sample, row, state).
        """

    def matrix(self) -> Array:
        """Return B as a dense matrix (sample or 1, state, feature)."""


class Inputs(Protocol):
    """Interface of B_t at all steps. ``states`` and ``features`` are the sizes of each matrix."""

    states: int
    features: int

    def at(self, work: Workspace, samples: slice, t: int) -> InputAt:
        """Return B of some samples at one step."""

    def masked(self, work: Workspace, mask: Array) -> Inputs:
        """Return a copy with B_t = 0 where ``mask`` (sample, time) is False."""

    def multiplications(self) -> int:
        """Return the number of multiplications by B per row, step and sample."""

    def numbers(self) -> int:
        """Return how many numbers are stored per step and sample."""


class Matrices:
    """B_t as dense matrices (sample or 1, time or 1, state, feature)."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.states, self.features = (int(n) for n in values.shape[2:])

    def at(self, work: Workspace, samples: slice, t: int) -> _Matrix:
        """Return views of the matrices of one step."""
        return _Matrix(work, at_step(self.values, samples, t))

    def masked(self, work: Workspace, mask: Array) -> Matrices:
        """Return a copy with a matrix for every step, zero at masked steps."""
        return Matrices(work.xp.where(mask[:, :, None, None], self.values, work.zeros(1, 1, 1, 1)))

    def multiplications(self) -> int:
        """Return the number of entries of the dense B_t."""
        return self.states * self.features

    def numbers(self) -> int:
        """Return the number of entries of the dense B_t."""
        return self.states * self.features


class _Matrix:
    def __init__(self, work: Workspace, values: Array) -> None:
        self.work, self.values = work, values

    def pull(self, rows: Array, out: Array) -> None:
        self.work.matmul(rows, _for_each(self.values, rows), out)

    def push(self, block: Array | None, out: Array) -> None:
        turned = transposed(self.values)
        out[...] = turned if block is None else self.work.xp.matmul(block, turned)

    def matrix(self) -> Array:
        return self.values


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

    def at(self, work: Workspace, samples: slice, t: int) -> _Factors:
        """Return B of one step as views of its factors."""
        scale = self.scale
        if scale is not None:
            scale = scale[samples] if len(scale.shape) == 2 else scale[:, samples]
        return _Factors(work, at_step(self.coefficients, samples, t), self, scale)

    def masked(self, work: Workspace, mask: Array) -> Kernels:
        """Return a copy with coefficients for every step, zero at masked steps."""
        zero = work.zeros(1, 1, 1, 1)
        return Kernels(work.xp.where(mask[:, :, None, None], self.coefficients, zero), self.kernels, self.scale)

    def multiplications(self) -> int:
        """Return the number of multiplications by B per row, step and sample.

        With several gates B is built as a matrix, because that is faster.
        """
        return self.states * self.features * (1 if len(self.kernels) > 1 else 2)

    def numbers(self) -> int:
        """Return the number of coefficients per step and sample; kernels are stored once for all steps."""
        return self.states * len(self.kernels)


class _Factors:
    """B of one step in factors: coefficients (sample or 1, gate, state), scale (sample, feature) or (gate, ...)."""

    def __init__(self, work: Workspace, coefficients: Array, whole: Kernels, scale: Array | None) -> None:
        self.work, self.coefficients, self.scale = work, coefficients, scale
        self.kernels, self.stacked = whole.kernels, whole.stacked
        self.per_gate = scale is not None and len(scale.shape) == 3

    def pull(self, rows: Array, out: Array) -> None:
        if self.per_gate or (len(self.kernels) > 1 and rows.shape[1] > 1):
            self.work.matmul(rows, _for_each(self.matrix(), rows), out)
            return
        by_gate = rows[:, :, None, :] * self.coefficients[:, None]
        side_by_side = self.work.xp.reshape(by_gate, (*rows.shape[:2], self.stacked.shape[0]))
        self.work.matmul(side_by_side, _for_each(self.stacked[None], rows), out)
        if self.scale is not None:
            out *= self.scale[:, None, :]

    def push(self, block: Array | None, out: Array) -> None:
        for k, kernel in enumerate(self.kernels):
            scale = None if self.scale is None else (self.scale[k] if self.per_gate else self.scale)
            seen = block if scale is None or block is None else block * scale[:, None, :]
            into = kernel if seen is None else self.work.xp.matmul(seen, kernel)
            if scale is not None and block is None:
                into = into * scale[:, :, None]
            into = into * self.coefficients[:, None, k]
            out[...] = into if k == 0 else out + into

    def matrix(self) -> Array:
        first, *others = range(len(self.kernels))
        return sum((self._gate(k) for k in others), start=self._gate(first))

    def _gate(self, k: int) -> Array:
        states = self.coefficients.shape[2]
        part = self.coefficients[:, k, :, None] * self.stacked[k * states : (k + 1) * states]
        if self.scale is None:
            return part
        return part * (self.scale[k] if self.per_gate else self.scale)[:, None, :]


def as_inputs(b: Array | Inputs) -> Inputs:
    """Return ``b`` as :class:`Inputs`; an array is wrapped in :class:`Matrices`."""
    return Matrices(b) if hasattr(b, "dtype") else b  # type: ignore[arg-type]


def _for_each(matrices: Array, rows: Array) -> Array:
    """Return one matrix for each sample of ``rows``, as a view."""
    count = int(rows.shape[0])
    if int(matrices.shape[0]) == count:
        return matrices
    return matrices.expand(count, -1, -1) if hasattr(matrices, "expand") else matrices
