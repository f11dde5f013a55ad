"""The simple (Elman) recurrent cell: h_t = act(W x_t + U h_{t-1} + b). Elman 1990, doi:10.1207/s15516709cog1402_1."""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL, RECURRENT_BIAS, RECURRENT_KERNEL
from ..activations import ACTIVATIONS
from ..linear import System
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction, GateSystem, GateTerms
from .cell import Cell, by_name, of_every_gate
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
        dz = self.through_activations(record, cotangent, xp)
        carry = affine.unproject(dz[..., 0, :], self.recurrent_kernel, scale, 1, xp)
        return dz, (carry,), (lam,)

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
        if not self.is_elementwise:
            return super().linear_system(run)
        record = run.known_record
        slope = self.through_activations(record, [run.xp.ones_like(run.states[0])], run.xp)
        return GateSystem(self, run, [GateTerms(slice(None), (0,), slope)])
