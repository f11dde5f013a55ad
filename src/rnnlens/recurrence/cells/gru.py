"""The gated recurrent unit: h_t = u h_{t-1} + (1 - u) n, with the reset gate before or after the recurrent product.

u, r = rec_act(W x_t + U h_{t-1} + b)
reset_after:   n = act(W_n x_t + b_n + r (U_n h_{t-1} + b'_n))      (cuDNN; arXiv:1406.1078v1)
reset before:  n = act(W_n x_t + b_n + U_n (r h_{t-1}))             (Cho et al. 2014, arXiv:1406.1078v3, eqs. 5-8)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL, RECURRENT_BIAS, RECURRENT_KERNEL
from ..activations import ACTIVATIONS
from ..linear import ProductSteps, System
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction, GateSystem
from .cell import Cell, are_elementwise, by_name, flat_gate_grad
from .registry import built_in

_GATES = 3


def _scale_of(scale: Scale, gates: slice) -> Array | None:
    return scale if scale is None or len(scale.shape) == 2 else scale[gates]


def _candidate_scale(scale: Scale) -> Array | None:
    return scale if scale is None or len(scale.shape) == 2 else scale[2]


@built_in
@dataclass(frozen=True, eq=False)
class GRU(Cell):
    """A gated recurrent unit.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    recurrent_kernel : (unit, gate * unit)
    bias : (gate * unit,) or None
    recurrent_bias : (gate * unit,) or None
        With ``reset_after`` the reset gate multiplies it; otherwise only the sum of both biases matters.
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
        """Whether a step records the candidate's recurrent part before the reset gate multiplies it."""
        return self.reset_after

    @property
    def biases_add_up(self) -> bool:
        """Whether the cell has two biases of which only the sum matters; False with ``reset_after``."""
        return super().biases_add_up and not self.reset_after

    def _kernels(self) -> tuple[Array, Array]:
        """Return the recurrent kernel of (update, reset), and the recurrent kernel of the candidate."""
        split = 2 * self.units
        return self.recurrent_kernel[:, :split], self.recurrent_kernel[:, split:]

    def project(self, x: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the input side of all gates, without a recurrent bias that the reset gate multiplies."""
        if not self.reset_after:
            return super().project(x, scale, xp)
        z = affine.project(x, self.kernel, scale, _GATES, xp)
        if self.bias is not None:
            z += self.bias
        return z

    def input_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return dL/dW of kernel and bias, and of the recurrent bias unless ``reset_after``."""
        grads = super().input_gradients(run, result, how, times)
        if self.recurrent_bias is not None and not self.reset_after:
            grads["recurrent_bias"] = affine.total(flat_gate_grad(run, result, times), how, run.xp)
        return grads

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute one step, or all steps at once if all previous states are known."""
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

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t from the gates and h_{t-1}."""
        return gates[..., 0, :] * before + (1 - gates[..., 0, :]) * gates[..., 2, :]

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t back through the candidate into the reset gate, and through all three gates into h_{t-1}."""
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

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the recurrent kernel and, with ``reset_after``, of the recurrent bias."""
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

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> RecurrentTerms | None:
        """Return dL/dz and h_{t-1}, the factors of the recurrent kernel's gradient.

        In the candidate the reset gate multiplies one of them: the first with ``reset_after``, else the second.
        """
        reset = gates[:, :, 1]
        if not self.reset_after:
            return gate_grad, [(slice(0, 2), before), (slice(2, 3), reset * before)]
        multiplied = gate_grad * 1
        multiplied[:, :, 2] = reset * gate_grad[:, :, 2]
        return multiplied, [(slice(None), before)]

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return dL/du = dL/dh (h_{t-1} - n), dL/dn = dL/dh (1 - u), and dL/dr through n."""
        gates = run.known_record.gates
        update, candidate = gates[:, :, 0], gates[:, :, 2]
        by_hidden, before = result.state_grads[0], run.before(0)
        by_candidate_input: Any = result.gate_grad[:, :, 2]  # type: ignore[index]
        if self.reset_after:
            by_reset = by_candidate_input * run.known_record.inner
        else:
            kernel = self._kernels()[1]
            by_reset = affine.unproject(by_candidate_input, kernel, _candidate_scale(run.state_scale), 1, run.xp)
            by_reset = by_reset * before
        return run.xp.stack([by_hidden * (before - candidate), by_reset, by_hidden * (1 - update)], axis=2)

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t as one unit x unit block, with the update gate on its diagonal."""
        plain = are_elementwise(self.activation, self.recurrent_activation)
        return GruSystem(self, run) if plain else super().linear_system(run)


class GruSystem(GateSystem):
    """Linear system of a GRU: A_t is one unit x unit block with the update gate on its diagonal."""

    def __init__(self, cell: GRU, run: Trajectory) -> None:
        super().__init__(cell, run)
        act, rec = self.slopes()
        z, a, h = run.known_record.preactivation, run.known_record.gates, run.before(0)
        u, r, n = (a[:, :, k, :] for k in range(3))
        by_update = (h - n) * rec(z[:, :, 0, :], u)
        by_candidate = (1 - u) * act(z[:, :, 2, :], n)
        reset_slope = rec(z[:, :, 1, :], r)
        if self.cell.reset_after:
            by_reset = by_candidate * run.known_record.inner * reset_slope
            state = run.xp.stack([by_update, by_reset, by_candidate * r], axis=2)
            inputs = run.xp.stack([by_update, by_reset, by_candidate], axis=2)
        else:
            state = inputs = run.xp.stack([by_update, by_candidate], axis=2)
        self.by_state, self.by_input, self.through_reset = map(run.at_real_steps, (state, inputs, h * reset_slope))
        self.diagonal = self.carried(u, u)

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise the chronological steps ``first ... stop - 1`` of some samples.

        The product matrix is diag(u) plus the products of the gates; :meth:`_reset_before` computes the form of the
        cell with the reset gate before the product.
        """
        units, at = self.cell.units, (samples, slice(first, stop))
        product = self.empty(first, stop, samples, inputs)
        if self.cell.reset_after:
            self.combine(product[:, :, :, :units], self.by_state[at], (0, 1, 2), "state", samples)
            if inputs:
                self.combine(product[:, :, :, units:], self.by_input[at], (0, 1, 2), "input", samples)
        else:
            self._reset_before(product, at, samples, inputs)
        self.work.diagonal_add(product[:, :, :, :units], self.diagonal[at])  # type: ignore[index]
        return ProductSteps(self.work, product)

    def _reset_before(self, product: Array, at: tuple[slice, slice], samples: slice, inputs: bool) -> None:
        """Write A_t and B_t with the reset before U_n (r h), whose gradient goes through U_n, then to h and r."""
        units, by = self.cell.units, self.by_state[at]
        reset, xp = self.run.known_record.gates[at][:, :, 1, :], self.run.xp
        through = self.work.empty(*by.shape[:2], units, units)
        self.combine(through, by[:, :, 1:, :], (2,), "state", samples)
        into_reset = through * self.through_reset[at][:, :, None, :]
        self.combine(product[:, :, :, :units], by[:, :, :1, :], (0,), "state", samples)
        scale = self.run.state_scale
        if scale is not None:
            scale = scale[samples] if len(scale.shape) == 2 else scale[1][samples]
        gate = xp.matmul(into_reset, self.into_state[1])
        gate = gate if scale is None else gate * scale[:, None, None, :]
        product[:, :, :, :units] += gate + through * reset[:, :, None, :]
        if not inputs:
            return
        self.combine(product[:, :, :, units:], by, (0, 2), "input", samples)
        scale = self.run.input_scale
        gate = xp.matmul(into_reset, self.into_input[1])
        if scale is not None:
            scale = scale[samples] if len(scale.shape) == 2 else scale[1][samples]
            gate = gate * scale[:, None, None, :]
        product[:, :, :, units:] += gate


def gru_tensorflow1(
    units: int, *, gates: str = "gates", candidate: str = "candidate"
) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    """Return a converter from weights of ``tf.compat.v1.nn.rnn_cell.GRUCell`` to :class:`GRU`.

    In that layout, (r, u) multiply [x, h] by one matrix, and n multiplies [x, r h] by another.

    Cho et al. 2014, arXiv:1406.1078v3, eqs. 5-8; h_t = u h_{t-1} + (1 - u) n.

    Parameters
    ----------
    units
        Size of the state.
    gates, candidate
        Prefixes of the weights' names before ``/kernel`` and ``/bias``, or before ``.kernel`` and ``.bias``.
    """

    def layout(named: Mapping[str, Array]) -> Gradients:
        def of(part: str, what: str) -> Any:
            return next(named[f"{part}{sep}{what}"] for sep in "/._" if f"{part}{sep}{what}" in named)

        two, one, bias = of(gates, "kernel"), of(candidate, "kernel"), of(gates, "bias")
        xp, features = array_namespace(two), two.shape[0] - units
        whole = xp.concat([two[:, units:], two[:, :units], one], axis=-1)
        biases = xp.concat([bias[units:], bias[:units], of(candidate, "bias")], axis=-1)
        return {"kernel": whole[:features], "recurrent_kernel": whole[features:], "bias": biases}

    return layout


def gru_torch(named: Mapping[str, Array]) -> Gradients:
    """Convert weight_ih, weight_hh, bias_ih, bias_hh in the layout of ``torch.nn.GRUCell``: (r, z, n), transposed."""

    def ordered(array: Any) -> Array:
        xp, size = array_namespace(array), array.shape[0] // 3
        reset, update, candidate = (array[k * size : (k + 1) * size] for k in range(3))
        return xp.concat([update, reset, candidate], axis=0)

    names = {"weight_ih": "kernel", "weight_hh": "recurrent_kernel", "bias_ih": "bias", "bias_hh": "recurrent_bias"}
    found = {name: ordered(named[key]) for key, name in names.items() if key in named}
    return {name: array.T if len(array.shape) == 2 else array for name, array in found.items()}
