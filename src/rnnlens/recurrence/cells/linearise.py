"""Linear systems of cells around a trajectory: base classes, and the default by pulling back unit vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from ..activations import ACTIVATIONS
from ..arrays import Array, Namespace, Workspace
from ..linear import ProductSteps, ProductSystem
from ..trajectory import Record, Trajectory, scale_of_samples
from . import affine

#: Gradients of the pre-activations, of the previous states, and of the states as the step produces them.
Pulled = tuple[Array, tuple[Array, ...], tuple[Array, ...]]


class TrajectorySystem(ProductSystem):
    """Base class of systems whose product matrices are computed from a trajectory."""

    def __init__(self, run: Trajectory) -> None:
        self.run = run
        self.work = Workspace(run.xp, run.input)
        self.batch, self.time, self.features = (int(n) for n in run.input.shape)
        self.order = run.order
        self.state_sizes = tuple(int(s.shape[-1]) for s in run.states)
        self.rows = self.columns = sum(self.state_sizes)

    def empty(self, first: int, stop: int, samples: slice, inputs: bool) -> Array:
        """Allocate product matrices (sample, step, row, column) for the steps ``first ... stop - 1``."""
        count = len(range(*samples.indices(self.batch)))
        return self.work.empty(count, stop - first, self.rows, self.columns + (self.features if inputs else 0))

    def mask_product(self, product: Array, at: tuple[slice, slice]) -> None:
        """Set A to the identity and B to zero in the product matrices of masked steps, in place."""
        if self.run.mask is None:
            return
        real, xp = self.run.mask[at], self.run.xp
        product[...] = xp.where(real[:, :, None, None], product, xp.zeros_like(product))
        ones = xp.ones_like(product[:, :, :, 0])
        self.work.diagonal_add(product[:, :, :, : self.rows], xp.where(real[:, :, None], xp.zeros_like(ones), ones))


class GateSystem(TrajectorySystem):
    """System whose product matrices are sums over gates of diag(coefficient) @ kernel^T.

    Parameters
    ----------
    cell
        A cell with ``gates``, ``units``, ``kernel``, ``recurrent_kernel`` and element-wise activations.
    """

    def __init__(self, cell: Any, run: Trajectory) -> None:
        super().__init__(run)
        self.cell = cell
        gates = len(cell.gates)
        self.into_state = [_transposed_rows(affine.columns(cell.recurrent_kernel, g, gates)) for g in range(gates)]
        self.into_input = [_transposed_rows(affine.columns(cell.kernel, g, gates)) for g in range(gates)]

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise the chronological steps ``first ... stop - 1`` of some samples."""
        raise NotImplementedError

    def slopes(self) -> tuple[Any, Any]:
        """Return derivatives of the cell's activation and recurrent activation, as functions of (z, a = act(z))."""
        names = self.cell.activation, getattr(self.cell, "recurrent_activation", "linear")
        act, rec = (ACTIVATIONS[name] for name in names)
        return (lambda z, a: act.slope(z, a, self.run.xp)), (lambda z, a: rec.slope(z, a, self.run.xp))  # type: ignore[misc]

    def carried(self, value: Array | None, like: Array) -> Array | None:
        """Return a diagonal with ones at masked steps; None if the value is None."""
        if self.run.mask is None:
            return value
        xp = self.run.xp
        inside = xp.zeros_like(like) if value is None else value
        return xp.where(self.run.mask[:, :, None], inside, xp.ones_like(like))

    def combine(self, out: Array, coefficients: Array, gates: tuple[int, ...], side: str, samples: slice) -> None:
        """Write the sum over gates of diag(coefficient_g) @ kernel_g^T @ diag(dropout) to out (sample, step, unit, n).

        coefficients : (sample, step, gate, unit)
        """
        kernels = self.into_state if side == "state" else self.into_input
        scale = self.run.state_scale if side == "state" else self.run.input_scale
        if scale is not None and len(scale.shape) == 3:
            scaled = [kernels[g] * scale[g][samples][:, None, None, :] for g in gates]
            out[...] = sum(coefficients[:, :, k, :, None] * scaled[k] for k in range(len(gates)))
            return
        _weighted_sum(self.work, out, coefficients, [kernels[g] for g in gates])
        if scale is not None:
            out[...] = out * scale[samples][:, None, None, :]


def _transposed_rows(kernel: Array) -> Array:
    """Return the transposed kernel, for NumPy as a contiguous copy."""
    return kernel.T if not isinstance(kernel, np.ndarray) else np.ascontiguousarray(kernel.T)


def _weighted_sum(work: Workspace, out: Any, coefficients: Any, kernels: list[Any]) -> None:
    """Write the sum over gates of diag(coefficient_g) @ kernel_g to out (sample, step, unit, n)."""
    if work.is_numpy and len(kernels) > 1:
        # One thin matrix product per unit, (sample * step, gate) @ (gate, n), is faster than whole-block operations.
        lead, gates, units = coefficients.shape[:2], coefficients.shape[2], coefficients.shape[3]
        by_unit = np.ascontiguousarray(coefficients.reshape(-1, gates, units).transpose(2, 0, 1))
        # A view (sample * step, unit, n): the block is contiguous along these two axes.
        base = np.lib.stride_tricks.as_strided(out, (lead[0] * lead[1], *out.shape[2:]), out.strides[1:])
        np.matmul(by_unit, np.stack(kernels, axis=1), out=base.transpose(1, 0, 2))
        return
    work.multiply(coefficients[:, :, 0, :, None], kernels[0], out)
    for k, kernel in enumerate(kernels[1:], start=1):
        if work.is_torch:
            out.addcmul_(coefficients[:, :, k, :, None], kernel)
        else:
            out[...] = out + coefficients[:, :, k, :, None] * kernel


class Differentiable(Protocol):
    """Interface of a cell whose step can be differentiated; see :class:`rnnlens.recurrence.cells.Cell`."""

    def pull_back(
        self,
        record: Record,
        before: Sequence[Array],
        after: Sequence[Array],
        cotangent: Sequence[Array],
        scale: Array | None,
        xp: Namespace,
    ) -> Pulled:
        """Pull cotangents of the states after a step back to the pre-activations and the previous states."""

    def input_gradient(self, x: Array, gate_grad: Array, scale: Array | None, xp: Namespace) -> Array:
        """Pull gradients of the pre-activations back to the input."""


class UnitVectorSystem(TrajectorySystem):
    """Dense product matrices of any cell with known equations, by pulling back unit cotangents of the states."""

    def __init__(self, cell: Differentiable, run: Trajectory) -> None:
        super().__init__(run)
        self.cell = cell

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise the steps ``first ... stop - 1`` by one unit cotangent per number of the state."""
        run, xp, at = self.run, self.run.xp, (samples, slice(first, stop))
        product = self.empty(first, stop, samples, inputs)
        dz, carry, _ = self._pulled(at)
        parts = list(carry)
        if inputs:
            scale = scale_of_samples(run.input_scale, samples)
            x = _spread(run.input[at], self.rows, xp)
            parts.append(self.cell.input_gradient(x, affine.join_gates(dz, xp), scale, xp))
        product[...] = xp.reshape(xp.concat(parts, axis=-1), product.shape)
        self.mask_product(product, at)
        produced = cache(lambda: self._produced(at)) if len(self.state_sizes) > 1 else None
        return ProductSteps(self.work, product, produced=produced)

    def _pulled(self, at: tuple[slice, slice]) -> Pulled:
        """Pull one unit cotangent per number of the state back through each step: (sample, step * row, size) each."""
        run, xp, size = self.run, self.run.xp, self.rows
        lead = run.states[0][at].shape[:2]
        record = run.known_record.map(lambda part: _spread(part[at], size, xp))
        basis = xp.broadcast_to(self.work.eye(size), (lead[0], lead[1], size, size))
        basis = xp.reshape(basis, (lead[0], lead[1] * size, size))
        cotangent, start = [], 0
        for width in self.state_sizes:
            cotangent.append(basis[:, :, start : start + width])
            start += width
        before = [_spread(s[at], size, xp) for s in run.states_before()]
        after = [_spread(s[at], size, xp) for s in run.states]
        return self.cell.pull_back(record, before, after, cotangent, scale_of_samples(run.state_scale, at[0]), xp)

    def _produced(self, at: tuple[slice, slice]) -> Array:
        """Return the Jacobians of the states after each step by the states as the step produces them.

        They are the identity at masked steps.
        """
        xp, lead = self.run.xp, self.run.states[0][at].shape[:2]
        made = xp.reshape(xp.concat(list(self._pulled(at)[2]), axis=-1), (*lead, self.rows, self.rows))
        if self.run.mask is None:
            return made
        return xp.where(self.run.mask[at][:, :, None, None], made, self.work.eye(self.rows))


def _spread(array: Array, rows: int, xp: Namespace) -> Array:
    """Repeat an array (sample, step, ...) ``rows`` times per step: (sample, step * row, ...)."""
    wide = xp.broadcast_to(array[:, :, None], (*array.shape[:2], rows, *array.shape[2:]))
    return xp.reshape(wide, (array.shape[0], array.shape[1] * rows, *array.shape[2:]))
