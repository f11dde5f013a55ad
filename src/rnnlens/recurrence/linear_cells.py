"""Linear systems of cells: what stands in the product matrices of :mod:`rnnlens.recurrence.linear`."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np

from .activations import ACTIVATIONS
from .adjoint_custom import output_is_state
from .arrays import Array, Namespace
from .cells import StepCell, affine
from .inplace import Workspace
from .linear import ProductSystem, Steps, System
from .replay import Replay


def linear_system(run: Replay, *, masked_output: str = "state") -> System:
    """The linear system of a run; the layer's output is among its states (see :func:`output_state`)."""
    return run.cell.linear_system(run, masked_output)


def output_state(run: Replay) -> int:
    """Index of the state that the layer's output is. A cell's own output comes after its states."""
    return run.cell.output_state if output_is_state(run) else len(run.states)


class _RunSystem(ProductSystem):
    """What all systems made from a run have in common."""

    def __init__(self, run: Replay) -> None:
        self.run = run
        self.work = Workspace(run.xp, run.input)
        self.batch, self.time, self.features = (int(n) for n in run.input.shape)
        self.order = run.order
        self.state_sizes = tuple(int(s.shape[-1]) for s in run.states)
        self.rows = self.columns = sum(self.state_sizes)

    def _real(self, *values: Array) -> tuple[Array, ...]:
        """Values at real steps, zero at masked ones."""
        if self.run.mask is None:
            return values
        mask, xp = self.run.mask, self.run.xp
        return tuple(xp.where(mask[(..., *[None] * (v.ndim - 2))], v, xp.zeros_like(v)) for v in values)

    def _carried(self, value: Array | None, like: Array) -> Array | None:
        """A diagonal at real steps, one at masked ones; None for no diagonal at all."""
        if self.run.mask is None:
            return value
        xp = self.run.xp
        inside = xp.zeros_like(like) if value is None else value
        return xp.where(self.run.mask[:, :, None], inside, xp.ones_like(like))

    def _empty(self, first: int, stop: int, samples: slice, inputs: bool) -> Array:
        count = len(range(*samples.indices(self.batch)))
        return self.work.empty(count, stop - first, self.rows, self.columns + (self.features if inputs else 0))


class _KnownSystem(_RunSystem):
    """Product matrices as sums over gates of diag(coefficient) @ kernel transposed."""

    def __init__(self, run: Replay) -> None:
        super().__init__(run)
        cell: Any = run.cell
        self.cell = cell
        gates = len(cell.gates)
        self.into_state = [_transposed(affine.columns(cell.recurrent_kernel, g, gates)) for g in range(gates)]
        self.into_input = [_transposed(affine.columns(cell.kernel, g, gates)) for g in range(gates)]

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """Linearise some steps."""
        raise NotImplementedError

    def _slopes(self) -> tuple[Any, Any]:
        names = self.cell.activation, getattr(self.cell, "recurrent_activation", "linear")
        act, rec = (ACTIVATIONS[name] for name in names)
        return (lambda z, a: act.slope(z, a, self.run.xp)), (lambda z, a: rec.slope(z, a, self.run.xp))  # type: ignore[misc]

    def _combine(self, out: Array, coefficients: Array, gates: tuple[int, ...], side: str, samples: slice) -> None:
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


def _transposed(kernel: Array) -> Array:
    return kernel.T if not isinstance(kernel, np.ndarray) else np.ascontiguousarray(kernel.T)


def _weighted_sum(work: Workspace, out: Any, coefficients: Any, kernels: list[Any]) -> None:
    if work.is_numpy and len(kernels) > 1:
        # One thin matrix product per unit, (sample * step, gate) @ (gate, n), beats passes over the whole block.
        lead, gates, units = coefficients.shape[:2], coefficients.shape[2], coefficients.shape[3]
        by_unit = np.ascontiguousarray(coefficients.reshape(-1, gates, units).transpose(2, 0, 1))
        base = _merge_lead(out, lead)
        np.matmul(by_unit, np.stack(kernels, axis=1), out=base.transpose(1, 0, 2))
        return
    work.multiply(coefficients[:, :, 0, :, None], kernels[0], out)
    for k, kernel in enumerate(kernels[1:], start=1):
        if work.is_torch:
            out.addcmul_(coefficients[:, :, k, :, None], kernel)
        else:
            out[...] = out + coefficients[:, :, k, :, None] * kernel


def _merge_lead(out: np.ndarray[Any, Any], lead: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """(sample, step, unit, n) as a (sample * step, unit, n) view: the block lies densely in memory along these two."""
    shape = (lead[0] * lead[1], *out.shape[2:])
    return np.lib.stride_tricks.as_strided(out, shape, out.strides[1:])


class LstmSystem(_KnownSystem):
    """The gated form."""

    gated = True

    def __init__(self, run: Replay) -> None:
        super().__init__(run)
        units = self.cell.units
        self.rows, self.columns = 2 * units, units
        act, rec = self._slopes()
        assert run.record is not None
        z, a = run.record.preactivation, run.record.gates
        i, f, g, o = (a[:, :, k, :] for k in range(4))
        squashed = ACTIVATIONS[self.cell.activation].value(run.states[1], run.xp)
        cell_coefficients = run.xp.stack(
            [g * rec(z[:, :, 0, :], i), run.before(1) * rec(z[:, :, 1, :], f), i * act(z[:, :, 2, :], g)],
            axis=2,
        )
        out_coefficient = (squashed * rec(z[:, :, 3, :], o))[:, :, None, :]
        lift = o * act(run.states[1], squashed)
        self.cell_coefficients, self.out_coefficient, self.lift = self._real(cell_coefficients, out_coefficient, lift)
        self.keep = self._carried(f, f)
        self.pass_hidden = self._carried(None, f)

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """Rows of c: the input, forget and candidate gates. Rows of h: the output gate."""
        units, at = self.cell.units, (samples, slice(first, stop))
        product = self._empty(first, stop, samples, inputs)
        sides = (("state", slice(0, units)), ("input", slice(units, None)))
        for side, columns in sides[: 2 if inputs else 1]:
            self._combine(product[:, :, :units, columns], self.cell_coefficients[at], (0, 1, 2), side, samples)
            self._combine(product[:, :, units:, columns], self.out_coefficient[at], (3,), side, samples)
        if self.pass_hidden is not None:
            self.work.diagonal_add(product[:, :, units:, :units], self.pass_hidden[at])
        return Steps(self.work, product, self.keep[at], self.lift[at])  # type: ignore[index]


class SimpleRnnSystem(_KnownSystem):
    """One H x H block."""

    def __init__(self, run: Replay) -> None:
        super().__init__(run)
        act, _ = self._slopes()
        assert run.record is not None
        (self.coefficient,) = self._real(act(run.record.preactivation, run.record.gates))
        self.diagonal = self._carried(None, run.states[0])

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """diag(act') @ [U | W] transposed."""
        units, at = self.cell.units, (samples, slice(first, stop))
        product = self._empty(first, stop, samples, inputs)
        self._combine(product[:, :, :, :units], self.coefficient[at], (0,), "state", samples)
        if inputs:
            self._combine(product[:, :, :, units:], self.coefficient[at], (0,), "input", samples)
        if self.diagonal is not None:
            self.work.diagonal_add(product[:, :, :, :units], self.diagonal[at])
        return Steps(self.work, product)


class GruSystem(_KnownSystem):
    """One H x H block; the update gate on its diagonal."""

    def __init__(self, run: Replay) -> None:
        super().__init__(run)
        act, rec = self._slopes()
        assert run.record is not None
        z, a, h = run.record.preactivation, run.record.gates, run.before(0)
        u, r, n = (a[:, :, k, :] for k in range(3))
        by_update = (h - n) * rec(z[:, :, 0, :], u)
        by_candidate = (1 - u) * act(z[:, :, 2, :], n)
        reset_slope = rec(z[:, :, 1, :], r)
        if self.cell.reset_after:
            by_reset = by_candidate * run.record.inner * reset_slope
            state = run.xp.stack([by_update, by_reset, by_candidate * r], axis=2)
            inputs = run.xp.stack([by_update, by_reset, by_candidate], axis=2)
        else:
            state = inputs = run.xp.stack([by_update, by_candidate], axis=2)
        self.by_state, self.by_input, self.through_reset = self._real(state, inputs, h * reset_slope)
        self.diagonal = self._carried(u, u)

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """diag(u) plus the gates' products; see :meth:`_reset_before` for the older form of the cell."""
        units, at = self.cell.units, (samples, slice(first, stop))
        product = self._empty(first, stop, samples, inputs)
        if self.cell.reset_after:
            self._combine(product[:, :, :, :units], self.by_state[at], (0, 1, 2), "state", samples)
            if inputs:
                self._combine(product[:, :, :, units:], self.by_input[at], (0, 1, 2), "input", samples)
        else:
            self._reset_before(product, at, samples, inputs)
        self.work.diagonal_add(product[:, :, :, :units], self.diagonal[at])  # type: ignore[index]
        return Steps(self.work, product)

    def _reset_before(self, product: Array, at: tuple[slice, slice], samples: slice, inputs: bool) -> None:
        """The candidate sees U_n (r h): its gradient passes U_n before it splits into h and r."""
        assert self.run.record is not None
        units, by = self.cell.units, self.by_state[at]
        reset, xp = self.run.record.gates[at][:, :, 1, :], self.run.xp
        through = self.work.empty(*by.shape[:2], units, units)
        self._combine(through, by[:, :, 1:, :], (2,), "state", samples)
        into_reset = through * self.through_reset[at][:, :, None, :]
        self._combine(product[:, :, :, :units], by[:, :, :1, :], (0,), "state", samples)
        scale = self.run.state_scale
        if scale is not None:
            scale = scale[samples] if len(scale.shape) == 2 else scale[1][samples]
        gate = xp.matmul(into_reset, self.into_state[1])
        gate = gate if scale is None else gate * scale[:, None, None, :]
        product[:, :, :, :units] += gate + through * reset[:, :, None, :]
        if not inputs:
            return
        self._combine(product[:, :, :, units:], by, (0, 2), "input", samples)
        scale = self.run.input_scale
        gate = xp.matmul(into_reset, self.into_input[1])
        if scale is not None:
            scale = scale[samples] if len(scale.shape) == 2 else scale[1][samples]
            gate = gate * scale[:, None, None, :]
        product[:, :, :, units:] += gate


class BasisSystem(_RunSystem):
    """Any cell with equations, by pulling the unit vectors back."""

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """Dense matrices, one cotangent per state entry."""
        run, xp, at = self.run, self.run.xp, (samples, slice(first, stop))
        product = self._empty(first, stop, samples, inputs)
        dz, carry, _ = self._pulled(at)
        parts = list(carry)
        if inputs:
            scale = _of_samples(run.input_scale, samples)
            x = _spread(run.input[at], self.rows, xp)
            parts.append(run.cell.input_gradient(x, affine.join_gates(dz, xp), scale, xp))
        product[...] = xp.reshape(xp.concat(parts, axis=-1), product.shape)
        _mask_dense(self, product, at)
        produced = cache(lambda: self._produced(at)) if len(self.state_sizes) > 1 else None
        return Steps(self.work, product, produced=produced)

    def _pulled(self, at: tuple[slice, slice]) -> Any:
        """What one cotangent per state entry becomes: (sample, step * row, size) each."""
        run, xp, size = self.run, self.run.xp, self.rows
        assert run.record is not None
        lead = run.states[0][at].shape[:2]
        record = run.record.map(lambda part: _spread(part[at], size, xp))
        basis = xp.broadcast_to(self.work.eye(size), (lead[0], lead[1], size, size))
        basis = xp.reshape(basis, (lead[0], lead[1] * size, size))
        cotangent, start = [], 0
        for width in self.state_sizes:
            cotangent.append(basis[:, :, start : start + width])
            start += width
        before = [_spread(s[at], size, xp) for s in run.states_before()]
        after = [_spread(s[at], size, xp) for s in run.states]
        return run.cell.pull_back(record, before, after, cotangent, _of_samples(run.state_scale, at[0]), xp)

    def _produced(self, at: tuple[slice, slice]) -> Array:
        """Rows by each state as the step produces it: the total gradients; at a masked step it is carried over."""
        xp, lead = self.run.xp, self.run.states[0][at].shape[:2]
        made = xp.reshape(xp.concat(list(self._pulled(at)[2]), axis=-1), (*lead, self.rows, self.rows))
        if self.run.mask is None:
            return made
        return xp.where(self.run.mask[at][:, :, None, None], made, self.work.eye(self.rows))


def _spread(array: Array, rows: int, xp: Namespace) -> Array:
    """(sample, step, ...) to (sample, step * row, ...), every row the same."""
    wide = xp.broadcast_to(array[:, :, None], (*array.shape[:2], rows, *array.shape[2:]))
    return xp.reshape(wide, (array.shape[0], array.shape[1] * rows, *array.shape[2:]))


def _of_samples(scale: Array | None, samples: slice) -> Array | None:
    if scale is None:
        return None
    return scale[samples] if len(scale.shape) == 2 else scale[:, samples]


def _mask_dense(system: _RunSystem, product: Array, at: tuple[slice, slice]) -> None:
    """Identity and no input at masked steps."""
    if system.run.mask is None:
        return
    real = system.run.mask[at]
    xp = system.run.xp
    product[...] = xp.where(real[:, :, None, None], product, xp.zeros_like(product))
    ones = xp.ones_like(product[:, :, :, 0])
    system.work.diagonal_add(product[:, :, :, : system.rows], xp.where(real[:, :, None], xp.zeros_like(ones), ones))


class CustomSystem(_RunSystem):
    """A cell of unknown equations: per-step Jacobians from the framework, sample and time folded into one batch.

    An output that is no state is carried along as one more state that nothing depends on, so that masked steps may
    repeat it.
    """

    def __init__(self, run: Replay, masked_output: str) -> None:
        super().__init__(run)
        self.cell, self.masked_output = cast(StepCell, run.cell), masked_output
        self.own_output = not output_is_state(run)
        if self.own_output:
            self.state_sizes = (*self.state_sizes, int(self.cell.output_size))
            self.rows = self.columns = sum(self.state_sizes)

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """Dense matrices."""
        run, xp, at = self.run, self.run.xp, (samples, slice(first, stop))
        states = sum(int(s.shape[-1]) for s in run.states)
        x = run.input[at]
        fold = [xp.reshape(s[at], (-1, s.shape[-1])) for s in run.states_before()]
        by_state, by_input = self.cell.jacobian(xp.reshape(x, (-1, x.shape[-1])), fold)
        product = self._empty(first, stop, samples, inputs)
        lead = product.shape[:2]
        product[:, :, :, states : self.columns] = 0
        product[:, :, :, :states] = xp.reshape(by_state[:, : self.rows], (*lead, self.rows, states))
        if inputs:
            product[:, :, :, self.columns :] = xp.reshape(by_input[:, : self.rows], (*lead, self.rows, self.features))
        _mask_dense(self, product, at)
        if self.own_output and run.mask is not None and self.masked_output != "output":
            self._masked_rows(product, states, ~run.mask[at])
        return Steps(self.work, product, produced=cache(lambda: self._produced(first, stop, samples)))

    def _produced(self, first: int, stop: int, samples: slice) -> Array:
        """Rows [states, own output] by each state as it is produced: one pull-back per row."""
        run, xp, at = self.run, self.run.xp, (samples, slice(first, stop))
        x = run.input[at]
        lead, before = x.shape[:2], [xp.reshape(s[at], (-1, s.shape[-1])) for s in run.states_before()]
        x, cell = xp.reshape(x, (-1, x.shape[-1])), self.cell
        sizes = (*(int(s.shape[-1]) for s in run.states), int(cell.output_size))
        rows = []
        for row in self.work.eye(sum(sizes))[: self.rows]:
            parts, start = [], 0
            for size in sizes:
                parts.append(xp.broadcast_to(row[start : start + size], (x.shape[0], size)))
                start += size
            found = cell.produced(x, before, parts[-1], parts[:-1])
            rows.append(xp.concat([xp.reshape(f, (*lead, f.shape[-1])) for f in found], axis=-1))
        made = xp.stack(rows, axis=2)
        return made if run.mask is None else self._not_at_masked(made, run.mask[at])

    def _not_at_masked(self, made: Array, mask: Array) -> Array:
        """At a masked step no state is produced, but carried over: by the output as well where the layer returns it."""
        xp, states = self.run.xp, int(made.shape[-1])
        carried = xp.zeros_like(made)
        carried[:, :, :states] = self.work.eye(states)
        if self.own_output and self.masked_output == "state":
            start = sum(self.state_sizes[: self.cell.output_state])
            size = self.state_sizes[-1]
            carried[:, :, states:, start : start + size] = self.work.eye(size)
        return xp.where(mask[:, :, None, None], made, carried)

    def _masked_rows(self, product: Array, states: int, masked: Array) -> None:
        """At masked steps the layer returns a state, or a constant, in place of an output."""
        xp, rows = self.run.xp, product[:, :, states:, :]
        new = xp.zeros_like(rows)
        if self.masked_output == "state":
            start = sum(self.state_sizes[: self.cell.output_state])
            size = self.state_sizes[-1]
            new[:, :, :, start : start + size] = self.work.eye(size)
        product[:, :, states:, :] = xp.where(masked[:, :, None, None], new, rows)
