"""The gated recurrent unit: h_t = u h_{t-1} + (1 - u) n, with the reset gate before or after the recurrent product.

u, r = rec_act(W x_t + U h_{t-1} + b)
reset_after:   n = act(W_n x_t + b_n + r (U_n h_{t-1} + b'_n))      (cuDNN; arXiv:1406.1078v1)
reset before:  n = act(W_n x_t + b_n + U_n (r h_{t-1}))             (Cho et al. 2014, arXiv:1406.1078v3, eqs. 5-8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...vocabulary import BIAS, KERNEL, RECURRENT_BIAS, RECURRENT_KERNEL
from ..activations import ACTIVATIONS
from ..arrays import Array, Namespace
from . import affine
from .cell import Cell, Pulled, are_elementwise, by_name, flat_gate_grad
from .record import Record

if TYPE_CHECKING:
    from ..adjoint import Adjoint
    from ..linear import System
    from ..replay import Replay

_GATES = 3


def _scale_of(scale: Array | None, gates: slice) -> Array | None:
    return scale if scale is None or len(scale.shape) == 2 else scale[gates]


def _candidate_scale(scale: Array | None) -> Array | None:
    return scale if scale is None or len(scale.shape) == 2 else scale[2]


@dataclass(frozen=True, eq=False)
class GRU(Cell):
    """A gated recurrent unit.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    recurrent_kernel : (unit, gate * unit)
    bias : (gate * unit,) or None
    recurrent_bias : (gate * unit,) or None
        It matters on its own only with ``reset_after``, where the reset gate multiplies it.
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`.
    reset_after
        Whether the reset gate is applied after the recurrent matrix product.
    """

    kind = "gru"
    gates = ("update", "reset", "candidate")
    parameters = by_name(KERNEL, RECURRENT_KERNEL, BIAS, RECURRENT_BIAS)
    keeping = "update"
    against_vanishing = (
        "an update bias of 1 or more at the start (arXiv:1804.11188), or the input shortened or strided."
    )
    at_once = True

    kernel: Array
    recurrent_kernel: Array
    bias: Array | None = None
    recurrent_bias: Array | None = None
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"
    reset_after: bool = True

    @property
    def keeps_inner(self) -> bool:
        """The recurrent part of the candidate, before the reset gate multiplies it."""
        return self.reset_after

    @property
    def biases_add_up(self) -> bool:
        """Not where the reset gate comes between them."""
        return super().biases_add_up and not self.reset_after

    def _kernels(self) -> tuple[Array, Array]:
        """The recurrent kernel of (update, reset), and that of the candidate."""
        split = 2 * self.units
        return self.recurrent_kernel[:, :split], self.recurrent_kernel[:, split:]

    def project(self, x: Array, scale: Array | None, xp: Namespace) -> Array:
        """Without the recurrent bias where the reset gate multiplies it."""
        if not self.reset_after:
            whole: Array = super().project(x, scale, xp)
            return whole
        z = affine.project(x, self.kernel, scale, _GATES, xp)
        if self.bias is not None:
            z += self.bias
        return z

    def input_gradients(
        self, run: Replay, result: Adjoint, how: affine.Contraction, times: slice = slice(None)
    ) -> dict[str, Array]:
        """The recurrent bias is on the other side where the reset gate multiplies it."""
        grads = super().input_gradients(run, result, how, times)
        if self.recurrent_bias is not None and not self.reset_after:
            grads["recurrent_bias"] = affine.total(flat_gate_grad(run, result, times), how, run.xp)
        return grads

    def step(
        self, projected: Array, before: Sequence[Array], scale: Array | None, xp: Namespace
    ) -> tuple[Record, tuple[Array, ...]]:
        """One step, or all steps at once where every state before is known."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        h, split = before[0], 2 * self.units
        if self.reset_after:
            recurrent = affine.project(h, self.recurrent_kernel, scale, _GATES, xp)
            if self.recurrent_bias is not None:
                recurrent = recurrent + self.recurrent_bias
            z_ur = affine.split_gates(projected[..., :split] + recurrent[..., :split], 2, xp)
            ur = rec.value(z_ur, xp)
            inner = recurrent[..., split:]
            z_n = projected[..., split:] + ur[..., 1, :] * inner
        else:
            u_ur, u_n = self._kernels()
            recurrent = affine.project(h, u_ur, _scale_of(scale, slice(0, 2)), 2, xp)
            z_ur = affine.split_gates(projected[..., :split] + recurrent, 2, xp)
            ur = rec.value(z_ur, xp)
            inner = None
            z_n = projected[..., split:] + affine.project(ur[..., 1, :] * h, u_n, _candidate_scale(scale), 1, xp)
        n = act.value(z_n, xp)
        z = xp.concat([z_ur, z_n[..., None, :]], axis=-2)
        gates = xp.concat([ur, n[..., None, :]], axis=-2)
        return Record(z, gates, inner), (self.hidden(gates, h, (), xp),)

    def hidden(self, gates: Array, before: Array, others: Sequence[Array], xp: Namespace) -> Array:
        """h_t from the gates and h_{t-1}."""
        return gates[..., 0, :] * before + (1 - gates[..., 0, :]) * gates[..., 2, :]

    def pull_back(
        self,
        record: Record,
        before: Sequence[Array],
        after: Sequence[Array],
        cotangent: Sequence[Array],
        scale: Array | None,
        xp: Namespace,
    ) -> Pulled:
        """Through the candidate into the reset gate, and through all three into h_{t-1}."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        (lam,), h = cotangent, before[0]
        z, a = record.preactivation, record.gates
        u, r, n = (a[..., k, :] for k in range(_GATES))
        dz_u = rec.vjp(z[..., 0, :], u, lam * (h - n), xp)
        dz_n = act.vjp(z[..., 2, :], n, lam * (1 - u), xp)
        if self.reset_after:
            dz_r = rec.vjp(z[..., 1, :], r, dz_n * record.inner, xp)
            recurrent = xp.concat([dz_u, dz_r, dz_n * r], axis=-1)
            carry = lam * u + affine.unproject(recurrent, self.recurrent_kernel, scale, _GATES, xp)
        else:
            u_ur, u_n = self._kernels()
            into_product = affine.unproject(dz_n, u_n, _candidate_scale(scale), 1, xp)
            dz_r = rec.vjp(z[..., 1, :], r, into_product * h, xp)
            recurrent = xp.concat([dz_u, dz_r], axis=-1)
            carry = lam * u + into_product * r + affine.unproject(recurrent, u_ur, _scale_of(scale, slice(0, 2)), 2, xp)
        return xp.stack([dz_u, dz_r, dz_n], axis=-2), (carry,), (lam,)

    def recurrent_gradients(
        self, run: Replay, result: Adjoint, how: affine.Contraction, times: slice = slice(None)
    ) -> dict[str, Array]:
        """The reset gate lies on one side of the candidate's product or on the other."""
        xp, scale, gates, gate_grad = run.xp, run.state_scale, run.gates, result.gate_grad
        assert gates is not None
        assert gate_grad is not None
        before, reset, dz = run.before(0)[:, times, :], gates[:, times, 1, :], gate_grad[:, times, :, :]
        if self.reset_after:
            flat = xp.concat([dz[..., 0, :], dz[..., 1, :], dz[..., 2, :] * reset], axis=-1)
            grads = {"recurrent_kernel": affine.outer(before, flat, scale, _GATES, how, xp)}
            if self.recurrent_bias is not None:
                grads["recurrent_bias"] = affine.total(flat, how, xp)
            return grads
        ur = affine.outer(before, affine.join_gates(dz[..., :2, :], xp), _scale_of(scale, slice(0, 2)), 2, how, xp)
        n = affine.outer(reset * before, dz[..., 2, :], _candidate_scale(scale), 1, how, xp)
        return {"recurrent_kernel": xp.concat([ur, n], axis=-1)}

    def recurrent_terms(
        self, gate_grad: Array, gates: Array, before: Array
    ) -> tuple[Array, list[tuple[slice, Array]]] | None:
        """The reset gate multiplies what the candidate's product gives, or what it is fed."""
        reset = gates[:, :, 1]
        if not self.reset_after:
            return gate_grad, [(slice(0, 2), before), (slice(2, 3), reset * before)]
        multiplied = gate_grad * 1
        multiplied[:, :, 2] = reset * gate_grad[:, :, 2]
        return multiplied, [(slice(None), before)]

    def gate_gradient(self, run: Replay, result: Adjoint) -> Array:
        """dL/du = dL/dh (h_{t-1} - n), dL/dn = dL/dh (1 - u), dL/dr through n."""
        gates: Any = run.gates
        update, candidate = gates[:, :, 0], gates[:, :, 2]
        by_hidden, before = result.state_grads[0], run.before(0)
        by_candidate_input: Any = result.gate_grad[:, :, 2]  # type: ignore[index]
        if self.reset_after:
            assert run.record is not None
            by_reset = by_candidate_input * run.record.inner
        else:
            kernel = self._kernels()[1]
            by_reset = affine.unproject(by_candidate_input, kernel, _candidate_scale(run.state_scale), 1, run.xp)
            by_reset = by_reset * before
        return run.xp.stack([by_hidden * (before - candidate), by_reset, by_hidden * (1 - update)], axis=2)

    def linear_system(self, run: Replay, masked_output: str = "state") -> System:
        """One H x H block; the update gate on its diagonal."""
        from ..linear_cells import GruSystem

        plain = are_elementwise(self.activation, self.recurrent_activation)
        return GruSystem(run) if plain else super().linear_system(run)
