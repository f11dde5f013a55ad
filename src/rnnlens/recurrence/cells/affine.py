"""Products with kernels, shared by all cells, and the linear systems of cells around a trajectory.

Dropout multipliers are as in Keras and torch: ``scale`` is None, an array (sample, n) for all gates, or an array
(gate, sample, n) with one row per gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from ...typing import Array, Namespace
from ..arrays import Workspace, namespace
from ..linear import ProductSteps, ProductSystem
from ..trajectory import Pulled, Scale, Trajectory, scale_of_samples


def columns(kernel: Array, gate: int, gates: int) -> Array:
    """Select the columns of one gate from a kernel (n, gate * unit): (n, unit)."""
    units = kernel.shape[1] // gates
    return kernel[:, gate * units : (gate + 1) * units]


def split_gates(z: Array, gates: int, xp: Namespace) -> Array:
    """Split the last axis by gates: (..., gate * unit) to (..., gate, unit)."""
    return xp.reshape(z, (*z.shape[:-1], gates, z.shape[-1] // gates))


def join_gates(z: Array, xp: Namespace) -> Array:
    """Join the last two axes: (..., gate, unit) to (..., gate * unit)."""
    return xp.reshape(z, (*z.shape[:-2], z.shape[-2] * z.shape[-1]))


def _expand_scale(scale: Array, like: Array) -> Array:
    """Insert axes after the first so that a multiplier (sample, n) broadcasts against (sample, ..., n)."""
    extra = len(like.shape) - 2
    return scale[(slice(None), *([None] * extra), slice(None))]


def project(x: Array, kernel: Array, scale: Scale, gates: int, xp: Namespace) -> Array:
    """Multiply x (sample, ..., n), scaled by dropout if there is any, by a kernel (n, gate * unit)."""
    if scale is None:
        return x @ kernel
    if len(scale.shape) == 2:
        return (x * _expand_scale(scale, x)) @ kernel
    projections = [(x * _expand_scale(scale[g], x)) @ columns(kernel, g, gates) for g in range(gates)]
    return xp.concat(projections, axis=-1)


def unproject(dz: Array, kernel: Array, scale: Scale, gates: int, xp: Namespace) -> Array:
    """Pull cotangents (sample, ..., gate * unit) of :func:`project` back to its input (sample, ..., n)."""
    if scale is None:
        return dz @ kernel.T
    if len(scale.shape) == 2:
        product = dz @ kernel.T
        return product * _expand_scale(scale, product)
    first_part, *other_parts = (_unproject_gate(dz, kernel, scale, gate, gates) for gate in range(gates))
    return sum(other_parts, start=first_part)


def _unproject_gate(dz: Array, kernel: Array, scale: Array, gate: int, gates: int) -> Array:
    units = dz.shape[-1] // gates
    product = dz[..., gate * units : (gate + 1) * units] @ columns(kernel, gate, gates).T
    return product * _expand_scale(scale[gate], product)


class Contraction(NamedTuple):
    """Options for summing the terms x_t dz_t^T of a kernel's gradient.

    ``by_time`` keeps the time axis; otherwise the terms are summed over time. ``probes`` > 0 returns that many random
    combinations of the gradient's rows, which suffice for a check at a small part of the cost (Freivalds 1977).
    """

    by_time: bool = False
    probes: int = 0


def probe_rows(rows: int, like: Array, contraction: Contraction) -> Array:
    """Return random signs (probes, rows) with a fixed seed."""
    return namespace(like).asarray(_signs(contraction.probes, rows), dtype=like.dtype, device=device(like))


@lru_cache(maxsize=64)  # drawn eight times for one small trace, where a new generator takes as long as a step
def _signs(probes: int, rows: int) -> Array:
    return 2.0 * np.random.default_rng(rows).integers(0, 2, size=(probes, rows)) - 1.0


def total(dz: Array, contraction: Contraction, xp: Namespace) -> Array:
    """Sum the pre-activation gradients dz to the gradient of a bias (gate * unit,).

    Keep time in front if ``contraction.by_time``. Steps are summed first: one sum over all of a million float32 numbers
    would lose those that are small beside it.
    """
    return xp.sum(dz if contraction.by_time else xp.sum(dz, axis=1), axis=0)


def outer(x: Array, dz: Array, scale: Scale, gates: int, contraction: Contraction, xp: Namespace) -> Array:
    """Return the gradient of the kernel in :func:`project`, summed over samples.

    x : (sample, time, n); dz : (sample, time, gate * unit). The result is (n, gate * unit), or (probes, gate * unit),
    with a leading time axis if ``contraction.by_time``.
    """
    if scale is not None and len(scale.shape) == 3:
        units = dz.shape[-1] // gates
        gate_grads = [
            outer(x * _expand_scale(scale[g], x), dz[..., g * units : (g + 1) * units], None, gates, contraction, xp)
            for g in range(gates)
        ]
        return xp.concat(gate_grads, axis=-1)
    if scale is not None:
        x = x * _expand_scale(scale, x)
    if contraction.probes:
        x = x @ probe_rows(x.shape[-1], x, contraction).T
    if contraction.by_time:
        return xp.permute_dims(x, (1, 2, 0)) @ xp.permute_dims(dz, (1, 0, 2))
    rows = x.shape[0] * x.shape[1]
    return xp.reshape(x, (rows, x.shape[2])).T @ xp.reshape(dz, (rows, dz.shape[2]))


class TrajectorySystem(ProductSystem):
    """Base class of systems whose product matrices are computed from a trajectory."""

    def __init__(self, run: Trajectory) -> None:
        self.run = run
        self.work = Workspace(run.xp, run.input)
        self.batch, self.time = (int(n) for n in run.input.shape[:2])
        self.features = prod(run.input.shape[2:])
        self.order = run.order
        self.state_sizes = tuple(prod(s.shape[2:]) for s in run.states)
        self.rows = self.columns = sum(self.state_sizes)

    def empty(self, first_step: int, stop: int, samples: slice, inputs: bool) -> Array:
        """Allocate product matrices (sample, step, row, column) for the steps ``first_step ... stop - 1``."""
        count = len(range(*samples.indices(self.batch)))
        return self.work.empty(count, stop - first_step, self.rows, self.columns + (self.features if inputs else 0))

    def mask_product(self, product: Array, index: tuple[slice, slice]) -> None:
        """Set A to the identity and B to zero in the product matrices of masked steps, in place."""
        if self.run.mask is None:
            return
        is_real, xp = self.run.mask[index], self.run.xp
        product[...] = xp.where(is_real[:, :, None, None], product, xp.zeros_like(product))
        ones = xp.ones_like(product[:, :, :, 0])
        self.work.diagonal_add(product[:, :, :, : self.rows], xp.where(is_real[:, :, None], xp.zeros_like(ones), ones))


class GateTerms(NamedTuple):
    """Rows of a product matrix that are a sum over gates of diag(coefficient) @ kernel^T.

    coefficients : (sample, time, gate, unit) of the gates with the indices ``gates``
    """

    rows: slice
    gates: tuple[int, ...]
    coefficients: Array


class GateSystem(TrajectorySystem):
    """System whose product matrices are sums over gates of diag(coefficient) @ kernel^T, and a diagonal.

    Parameters
    ----------
    cell
        A cell with ``gates``, ``units``, ``kernel``, ``recurrent_kernel`` and element-wise activations.
    state, inputs
        Terms of A_t and of B_t; by default those of B_t are those of A_t.
    diagonal : (sample, time, unit), optional
        Diagonal added to the block of h_t by h_{t-1}.
    keep, lift : (sample, time, unit), optional
        Factors of a gated system (:class:`rnnlens.recurrence.linear.GatedStep`).
    """

    def __init__(
        self,
        cell: Any,
        run: Trajectory,
        state: Sequence[GateTerms],
        inputs: Sequence[GateTerms] | None = None,
        *,
        diagonal: Array | None = None,
        keep: Array | None = None,
        lift: Array | None = None,
    ) -> None:
        super().__init__(run)
        self.cell, self.gated = cell, keep is not None
        self.columns = cell.units
        kernel_sides = (cell.recurrent_kernel, cell.kernel)
        transposed = [
            [columns(kernel, g, len(cell.gates)).T for g in range(len(cell.gates))] for kernel in kernel_sides
        ]
        if self.work.is_numpy:
            transposed = [[np.ascontiguousarray(kernel) for kernel in kernels] for kernels in transposed]
        self.state_kernels, self.input_kernels = transposed
        real = [term._replace(coefficients=run.at_real_steps(term.coefficients)) for term in state]
        self.terms = {"state": real, "input": real}
        if inputs is not None:
            self.terms["input"] = [term._replace(coefficients=run.at_real_steps(term.coefficients)) for term in inputs]
        if run.mask is not None:  # ones at masked steps
            real, zero = run.mask[:, :, None], run.xp.zeros_like(run.states[0])
            diagonal = run.xp.where(real, zero if diagonal is None else diagonal, zero + 1)
            keep = None if keep is None else run.xp.where(real, keep, zero + 1)
        self.diagonal, self.keep = diagonal, keep
        self.lift = None if lift is None else run.at_real_steps(lift)

    def build(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise the chronological steps ``first_step ... stop - 1`` of some samples."""
        units, index = self.cell.units, (samples, slice(first_step, stop))
        product = self.empty(first_step, stop, samples, inputs)
        sides = {"state": slice(0, units), "input": slice(units, None)}
        for side in sides if inputs else ["state"]:
            for rows, gates, coefficients in self.terms[side]:
                self.combine(product[:, :, rows, sides[side]], coefficients[index], gates, side, samples)
        if self.diagonal is not None:
            self.work.diagonal_add(product[:, :, -units:, :units], self.diagonal[index])
        if self.keep is None or self.lift is None:
            return ProductSteps(self.work, product)
        return ProductSteps(self.work, product, self.keep[index], self.lift[index])

    def combine(self, out: Any, coefficients: Any, gates: tuple[int, ...], side: str, samples: slice) -> None:
        """Write the sum over gates of diag(coefficient_g) @ kernel_g^T @ diag(dropout) to out (sample, step, unit, n).

        coefficients : (sample, step, gate, unit)
        """
        gate_kernels = self.state_kernels if side == "state" else self.input_kernels
        scale = self.run.state_scale if side == "state" else self.run.input_scale
        kernels: list[Any] = [gate_kernels[g] for g in gates]
        if scale is not None and len(scale.shape) == 3:
            scaled = [kernel * scale[g][samples][:, None, None, :] for g, kernel in zip(gates, kernels, strict=True)]
            out[...] = sum(coefficients[:, :, k, :, None] * scaled[k] for k in range(len(gates)))
            return
        if self.work.is_numpy and len(kernels) > 1:
            # One thin product per unit, (sample * step, gate) @ (gate, n), is faster than whole-block operations.
            sample_step, count, units = coefficients.shape[:2], coefficients.shape[2], coefficients.shape[3]
            by_unit = np.ascontiguousarray(coefficients.reshape(-1, count, units).transpose(2, 0, 1))
            # A view (sample * step, unit, n): the block is contiguous along these two axes.
            block_view = np.lib.stride_tricks.as_strided(
                out, (sample_step[0] * sample_step[1], *out.shape[2:]), out.strides[1:]
            )
            np.matmul(by_unit, np.stack(kernels, axis=1), out=block_view.transpose(1, 0, 2))
        else:
            self.work.multiply(coefficients[:, :, 0, :, None], kernels[0], out)
            for k, kernel in enumerate(kernels[1:], start=1):
                self.work.add_product(out, coefficients[:, :, k, :, None], kernel)
        if scale is not None:
            out[...] = out * scale[samples][:, None, None, :]


class UnitVectorSystem(TrajectorySystem):
    """Dense product matrices of any cell with known equations, by pulling back unit cotangents of the states.

    Axes of space are flattened, channel last: a row is one number of a state at one place.
    """

    #: Largest number of cotangents that are pulled back at once.
    MAX_NUMBERS = 2**22

    def __init__(self, cell: Any, run: Trajectory) -> None:
        super().__init__(run)
        self.cell = cell

    def build(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise the steps ``first_step ... stop - 1`` by one unit cotangent per number of the state."""
        run, xp, index = self.run, self.run.xp, (samples, slice(first_step, stop))
        product = self.empty(first_step, stop, samples, inputs)
        for rows in self._row_blocks(index):
            dz, carry, _ = self._pull_units(index, rows)
            grads = list(carry)
            if inputs:
                scale = scale_of_samples(run.input_scale, samples)
                x = _repeat_rows(run.input[index], len(rows), xp)
                grads.append(self.cell.input_gradient(x, join_gates(dz, xp), scale, xp))
            block = product[:, :, rows.start : rows.stop]
            block[...] = xp.reshape(self._join_flattened(grads), block.shape)
        self.mask_product(product, index)
        produced_jacobian = cache(lambda: self._produced_jacobian(index)) if len(self.state_sizes) > 1 else None
        return ProductSteps(self.work, product, produced_jacobian=produced_jacobian)

    def _row_blocks(self, index: tuple[slice, slice]) -> Iterator[range]:
        """Yield ranges of unit-cotangent rows whose working memory fits into :attr:`MAX_NUMBERS`."""
        leading_shape = self.run.states[0][index].shape[:2]
        size = max(1, self.MAX_NUMBERS // (leading_shape[0] * leading_shape[1] * self.rows))
        return (range(start, min(start + size, self.rows)) for start in range(0, self.rows, size))

    def _join_flattened(self, arrays: Sequence[Array]) -> Array:
        """Join arrays (sample, step * row, ...) side by side, with their last axes flattened."""
        xp = self.run.xp
        return xp.concat([xp.reshape(array, (*array.shape[:2], -1)) for array in arrays], axis=-1)

    def _pull_units(self, index: tuple[slice, slice], rows: range) -> Pulled:
        """Pull unit cotangents of some numbers of the state back through each step: (sample, step * row, ...) each."""
        run, xp, size = self.run, self.run.xp, len(rows)
        leading_shape = run.states[0][index].shape[:2]
        record = run.known_record.map(lambda unit_cotangents: _repeat_rows(unit_cotangents[index], size, xp))
        basis = xp.broadcast_to(self.work.eye(self.rows)[rows.start : rows.stop], (*leading_shape, size, self.rows))
        basis = xp.reshape(basis, (leading_shape[0], leading_shape[1] * size, self.rows))
        cotangent, start = [], 0
        for width, state in zip(self.state_sizes, run.states, strict=True):
            unit_cotangents = basis[:, :, start : start + width]
            cotangent.append(xp.reshape(unit_cotangents, (*unit_cotangents.shape[:2], *state.shape[2:])))
            start += width
        states_before = [_repeat_rows(s[index], size, xp) for s in run.states_before()]
        states_after = [_repeat_rows(s[index], size, xp) for s in run.states]
        scale = scale_of_samples(run.state_scale, index[0])
        pulled: Pulled = self.cell.pull_back(record, states_before, states_after, cotangent, scale, xp)
        return pulled

    def _produced_jacobian(self, index: tuple[slice, slice]) -> Array:
        """Return Jacobians of the states after each step by each new state at the operation that computes it.

        At masked steps they are the identity.
        """
        xp, leading_shape = self.run.xp, self.run.states[0][index].shape[:2]
        blocks = [
            (len(rows), self._join_flattened(self._pull_units(index, rows)[2])) for rows in self._row_blocks(index)
        ]
        produced = xp.concat([xp.reshape(block, (*leading_shape, count, self.rows)) for count, block in blocks], axis=2)
        if self.run.mask is None:
            return produced
        return xp.where(self.run.mask[index][:, :, None, None], produced, self.work.eye(self.rows))


def _repeat_rows(array: Array, rows: int, xp: Namespace) -> Array:
    """Repeat an array (sample, step, ...) ``rows`` times per step: (sample, step * row, ...)."""
    repeated = xp.broadcast_to(array[:, :, None], (*array.shape[:2], rows, *array.shape[2:]))
    return xp.reshape(repeated, (array.shape[0], array.shape[1] * rows, *array.shape[2:]))
