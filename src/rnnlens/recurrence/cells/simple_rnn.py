"""The simple (Elman) recurrent cell: h_t = act(W x_t + U h_{t-1} + b). Elman 1990, doi:10.1207/s15516709cog1402_1."""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL, RECURRENT_BIAS, RECURRENT_KERNEL
from ..activations import ACTIVATIONS
from ..linear import ProductSteps, System
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction, GateSystem
from .cell import Cell, are_elementwise, by_name, of_every_gate
from .registry import built_in


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
        z, a = record.preactivation[..., 0, :], record.gates[..., 0, :]
        dz = ACTIVATIONS[self.activation].vjp(z, a, lam, xp)
        carry = affine.unproject(dz, self.recurrent_kernel, scale, 1, xp)
        return dz[..., None, :], (carry,), (lam,)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradient of the recurrent kernel."""
        return of_every_gate(self, run, result, how, times)

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> RecurrentTerms | None:
        """Return dL/dz and h_{t-1}, the factors of the recurrent kernel's gradient."""
        return gate_grad, [(slice(None), before)]

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return dL/dh_t: the only gate is the state itself."""
        return result.state_grads[0][:, :, None, :]

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t as one unit x unit block, diag(act'(z_t)) U^T."""
        return SimpleRnnSystem(self, run) if are_elementwise(self.activation) else super().linear_system(run)


class SimpleRnnSystem(GateSystem):
    """Linear system of a simple RNN, with A_t as one unit x unit block."""

    def __init__(self, cell: SimpleRNN, run: Trajectory) -> None:
        super().__init__(cell, run)
        act, _ = self.slopes()
        self.coefficient = run.at_real_steps(act(run.known_record.preactivation, run.known_record.gates))
        self.diagonal = self.carried(None, run.states[0])

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise the steps ``first ... stop - 1``: the product matrix is diag(act') [U | W]^T."""
        units, at = self.cell.units, (samples, slice(first, stop))
        product = self.empty(first, stop, samples, inputs)
        self.combine(product[:, :, :, :units], self.coefficient[at], (0,), "state", samples)
        if inputs:
            self.combine(product[:, :, :, units:], self.coefficient[at], (0,), "input", samples)
        if self.diagonal is not None:
            self.work.diagonal_add(product[:, :, :, :units], self.diagonal[at])
        return ProductSteps(self.work, product)
