"""The simple (Elman) recurrent cell, and the independently recurrent one, whose recurrent weights are element-wise.

simple:      h_t = act(W x_t + U h_{t-1} + b). Elman 1990, doi:10.1207/s15516709cog1402_1.
independent: h_t = act(W x_t + u h_{t-1} + b). Li, Li, Cook, Zhu, Gao 2018, arXiv:1803.04831, eq. 2. Each unit depends
only on its own previous state, so that A_t is diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, GATE, KERNEL, RECURRENT_BIAS, RECURRENT_KERNEL, UNIT, Quantity
from ..activations import ACTIVATIONS
from ..linear import System
from ..structured import Kernels, diagonal
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction, GateSystem, GateTerms
from .cell import Cell, by_name, recurrent_kernel_gradient
from .registry import built_in

RECURRENT_WEIGHT = Quantity(
    "recurrent_weight", (GATE, UNIT), "recurrent weight", "1", "u: from h_{t-1} of a unit to the same unit"
)


@built_in
@dataclass(frozen=True, eq=False)
class SimpleRNN(Cell):
    """A simple recurrent cell: it has no gates, and ``gates`` has one row, its new state.

    Attributes
    ----------
    kernel : (feature, unit)
    recurrent_kernel : (unit, unit)
    bias, recurrent_bias : (unit,) or None
        Only their sum matters; torch has both.
    activation
        A name known to :mod:`rnnlens.recurrence.activations`.
    """

    kind = "simple_rnn"
    gates = ("candidate",)
    parameters = by_name(KERNEL, RECURRENT_KERNEL, BIAS, RECURRENT_BIAS)
    at_once = True

    kernel: Array
    recurrent_kernel: Array
    bias: Array | None = None
    recurrent_bias: Array | None = None
    activation: str = "tanh"

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute one step, or all steps at once if all previous states are known."""
        z = projected + affine.project(before[0], self.recurrent_kernel, scale, 1, xp)
        h = ACTIVATIONS[self.activation].value(z, xp)
        z, a = affine.split_gates(z, 1, xp), affine.split_gates(h, 1, xp)
        return Record(z, a), (h,)

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Return the only gate, which is h_t."""
        return gates[..., 0, :]

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Return dz = act'(z) dL/dh_t, and U^T dz for the state before."""
        (lam,) = cotangent
        dz = self.through_activations(record, cotangent, xp)
        carry = affine.unproject(dz[..., 0, :], self.recurrent_kernel, scale, 1, xp)
        return dz, (carry,), (lam,)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradient of the recurrent kernel."""
        return recurrent_kernel_gradient(self, run, result, how, times)

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> RecurrentTerms | None:
        """Return dL/dz and h_{t-1}, the factors of the recurrent kernel's gradient."""
        return gate_grad, [(slice(None), before)]

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return the gradient at the gates, (sample, time, gate, unit): dL/dh_t, as the only gate is the state."""
        return result.state_grads[0][:, :, None, :]

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t as one unit x unit block, diag(act'(z_t)) U^T."""
        if any(activation.slope is None for activation in self.activations):
            return super().linear_system(run)
        record = run.known_record
        slope = self.through_activations(record, [run.xp.ones_like(run.states[0])], run.xp)
        return GateSystem(self, run, [GateTerms(slice(None), (0,), slope)])


@built_in
@dataclass(frozen=True, eq=False)
class IndRNN(Cell):
    """An independently recurrent cell: it has no gates, and ``gates`` has one row, its new state.

    Attributes
    ----------
    kernel : (feature, unit)
    recurrent_weight : (unit,)
    bias : (unit,) or None
    activation
        A name known to :mod:`rnnlens.recurrence.activations`.
    """

    kind = "ind_rnn"
    gates = ("candidate",)
    parameters = by_name(KERNEL, RECURRENT_WEIGHT, BIAS)

    kernel: Array
    recurrent_weight: Array
    bias: Array | None = None
    activation: str = "relu"

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute h_t = act(projected + u h_{t-1}), element-wise."""
        z = projected + self.recurrent_weight * before[0]
        h = ACTIVATIONS[self.activation].value(z, xp)
        return self.record([z], [h], xp), (h,)

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Return dz = act'(z) dL/dh_t, and u dz for the state before."""
        dz = self.through_activations(record, cotangent, xp)
        return dz, (dz[..., 0, :] * self.recurrent_weight,), (cotangent[0],)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradient of the recurrent weight u."""
        assert result.gate_grad is not None
        terms = result.gate_grad[:, times, 0, :] * run.before(0)[:, times, :]
        return {"recurrent_weight": affine.total(terms, how, run.xp)}

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return the gradient at the gates, (sample, time, gate, unit): dL/dh_t, as the only gate is the state."""
        return result.state_grads[0][:, :, None, :]

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t = diag(u act'(z_t))."""
        if any(activation.slope is None for activation in self.activations):
            return super().linear_system(run)
        slope = self.through_activations(run.known_record, [run.xp.ones_like(run.states[0])], run.xp)
        inputs = Kernels(slope, [self.kernel], run.input_scale)
        return diagonal(slope[:, :, 0, :] * self.recurrent_weight, inputs, order=run.order, mask=run.mask)
