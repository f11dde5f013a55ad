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
from ..trajectory import (
    Adjoint,
    Gradients,
    Pulled,
    Record,
    RecurrentTerms,
    Scale,
    States,
    Stepped,
    Trajectory,
    scale_of_samples,
)
from . import affine
from .affine import Contraction, GateSystem, GateTerms
from .cell import Cell, by_name, flat_gate_grad
from .registry import built_in

_GATES = 3


def _gate_scales(scale: Scale, gates: int | slice) -> Array | None:
    """Return the dropout multipliers of some gates; those of all gates if they share them."""
    return scale if scale is None or len(scale.shape) == 2 else scale[gates]


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
            recurrent = affine.project(h, u_ur, _gate_scales(scale, slice(0, 2)), 2, xp)
            z_ur = affine.split_gates(projected[..., :split] + recurrent, 2, xp)
            ur = rec.value(z_ur, xp)
            inner = None
            z_n = projected[..., split:] + affine.project(ur[..., 1, :] * h, u_n, _gate_scales(scale, 2), 1, xp)
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
        (lam,), (u, r, _) = cotangent, (record.gates[..., k, :] for k in range(_GATES))
        grads, into_product = self._gate_gradients(record, before[0], lam, scale, xp)
        dz = self.through_activations(record, grads, xp)
        if self.reset_after:
            recurrent = xp.concat([dz[..., 0, :], dz[..., 1, :], dz[..., 2, :] * r], axis=-1)
            carry = lam * u + affine.unproject(recurrent, self.recurrent_kernel, scale, _GATES, xp)
        else:
            recurrent, kernel = affine.join_gates(dz[..., :2, :], xp), self._kernels()[0]
            carry = lam * u + into_product * r
            carry = carry + affine.unproject(recurrent, kernel, _gate_scales(scale, slice(0, 2)), 2, xp)
        return dz, (carry,), (lam,)

    def _gate_gradients(
        self, record: Record, previous_hidden: Array, lam: Array, scale: Scale, xp: Namespace
    ) -> tuple[list[Array], Array]:
        """Pull dL/dh_t back to the gates: dL/du, dL/dr, dL/dn, and the gradient at the tensor that r multiplies."""
        u, _, n = (record.gates[..., k, :] for k in range(_GATES))
        by_candidate = lam * (1 - u)
        into_product = self.activations[2].vjp(record.preactivation[..., 2, :], n, by_candidate, xp)
        if not self.reset_after:
            into_product = affine.unproject(into_product, self._kernels()[1], _gate_scales(scale, 2), 1, xp)
        by_reset = into_product * (record.inner if self.reset_after else previous_hidden)
        return [lam * (previous_hidden - n), by_reset, by_candidate], into_product

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the recurrent kernel and, with ``reset_after``, of the recurrent bias."""
        xp, scale, gates, gate_grad = run.xp, run.state_scale, run.gates, result.gate_grad
        assert gates is not None
        assert gate_grad is not None
        previous_hidden, reset, dz = run.before(0)[:, times, :], gates[:, times, 1, :], gate_grad[:, times, :, :]
        if self.reset_after:
            flat = xp.concat([dz[..., 0, :], dz[..., 1, :], dz[..., 2, :] * reset], axis=-1)
            grads = {"recurrent_kernel": affine.outer(previous_hidden, flat, scale, _GATES, how, xp)}
            if self.recurrent_bias is not None:
                grads["recurrent_bias"] = affine.total(flat, how, xp)
            return grads
        ur = affine.outer(
            previous_hidden, affine.join_gates(dz[..., :2, :], xp), _gate_scales(scale, slice(0, 2)), 2, how, xp
        )
        n = affine.outer(reset * previous_hidden, dz[..., 2, :], _gate_scales(scale, 2), 1, how, xp)
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
        grads = self._gate_gradients(run.known_record, run.before(0), result.state_grads[0], run.state_scale, run.xp)[0]
        return run.xp.stack(grads, axis=2)

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t as one unit x unit block, with the update gate on its diagonal."""
        if any(activation.slope is None for activation in self.activations):
            return super().linear_system(run)
        record, xp, update_gate = run.known_record, run.xp, run.known_record.gates[:, :, 0, :]
        ones = xp.ones_like(update_gate)
        if not self.reset_after:
            grads = [run.before(0) - record.gates[:, :, 2, :], ones, 1 - update_gate]
            slopes = self.through_activations(record, grads, xp)
            return ResetBeforeSystem(self, run, slopes)
        slopes = self.through_activations(record, self._gate_gradients(record, run.before(0), ones, None, xp)[0], xp)
        through_reset = xp.stack([slopes[:, :, 0], slopes[:, :, 1], slopes[:, :, 2] * record.gates[:, :, 1]], axis=2)
        state, inputs = ([GateTerms(slice(None), (0, 1, 2), c)] for c in (through_reset, slopes))
        return GateSystem(self, run, state, inputs, diagonal=update_gate)


class ResetBeforeSystem(GateSystem):
    """Linear system of a GRU with the reset before U_n (r h), whose gradient goes through U_n, then to h and r."""

    def __init__(self, cell: GRU, run: Trajectory, slopes: Array) -> None:
        update = GateTerms(slice(None), (0,), slopes[:, :, :1, :])
        update_and_candidate = GateTerms(slice(None), (0, 2), slopes[:, :, ::2, :])
        super().__init__(cell, run, [update], [update_and_candidate])
        self.update_gate = run.at_real_steps(run.known_record.gates[:, :, 0, :])
        self.candidate = run.at_real_steps(slopes[:, :, 2:, :])
        self.by_reset = run.at_real_steps(run.before(0) * slopes[:, :, 1, :])

    def build(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise steps ``first_step ... stop - 1``, with the candidate's side through h_{t-1} and the reset gate."""
        steps, index = super().build(first_step, stop, samples, inputs=inputs), (samples, slice(first_step, stop))
        units, xp, product = self.cell.units, self.run.xp, steps.product
        candidate_product = self.work.empty(*product.shape[:2], units, units)
        self.combine(candidate_product, self.candidate[index], (2,), "state", samples)
        reset_product = candidate_product * self.by_reset[index][:, :, None, :]
        sides = [(self.state_kernels[1], self.run.state_scale), (self.input_kernels[1], self.run.input_scale)]
        gate_products = []
        for kernel, scale in sides[: 2 if inputs else 1]:
            gate_scale = scale_of_samples(_gate_scales(scale, 1), samples)
            gate_product = xp.matmul(reset_product, kernel)
            gate_products.append(gate_product if gate_scale is None else gate_product * gate_scale[:, None, None, :])
        reset = self.run.known_record.gates[index][:, :, 1, :]
        product[:, :, :, :units] += gate_products[0] + candidate_product * reset[:, :, None, :]
        if inputs:
            product[:, :, :, units:] += gate_products[1]
        self.work.diagonal_add(product[:, :, :, :units], self.update_gate[index])
        return steps


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
        def find_weight(prefix: str, kind: str) -> Any:
            return next(named[f"{prefix}{sep}{kind}"] for sep in "/._" if f"{prefix}{sep}{kind}" in named)

        gate_kernel = find_weight(gates, "kernel")
        candidate_kernel = find_weight(candidate, "kernel")
        bias = find_weight(gates, "bias")
        xp, features = array_namespace(gate_kernel), gate_kernel.shape[0] - units
        kernels = xp.concat([gate_kernel[:, units:], gate_kernel[:, :units], candidate_kernel], axis=-1)
        biases = xp.concat([bias[units:], bias[:units], find_weight(candidate, "bias")], axis=-1)
        return {"kernel": kernels[:features], "recurrent_kernel": kernels[features:], "bias": biases}

    return layout


def gru_torch(named: Mapping[str, Array]) -> Gradients:
    """Convert weight_ih, weight_hh, bias_ih, bias_hh in the layout of ``torch.nn.GRUCell``: (r, z, n), transposed."""

    def reorder(array: Any) -> Array:
        xp, size = array_namespace(array), array.shape[0] // 3
        reset, update, candidate = (array[k * size : (k + 1) * size] for k in range(3))
        return xp.concat([update, reset, candidate], axis=0)

    names = {"weight_ih": "kernel", "weight_hh": "recurrent_kernel", "bias_ih": "bias", "bias_hh": "recurrent_bias"}
    arrays = {name: reorder(named[key]) for key, name in names.items() if key in named}
    return {name: array.T if len(array.shape) == 2 else array for name, array in arrays.items()}
