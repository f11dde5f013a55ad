"""The long short-term memory cell. Hochreiter, Schmidhuber 1997; Gers, Schmidhuber, Cummins 2000 (forget gate).

z = W x_t + U h_{t-1} + b,  (i, f, o) = rec_act(z_i, z_f, z_o),  g = act(z_g)
c_t = f c_{t-1} + i g,      h_t = o act(c_t), projected where the cell has a projection (arXiv:1402.1128, eq. 6)

With coupled gates, i = 1 - f (Greff et al. 2015, arXiv:1503.04069, section 4: "coupled input and forget gate").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL, PROJECTION, RECURRENT_BIAS, RECURRENT_KERNEL
from ..activations import ACTIVATIONS
from ..linear import System
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction, GateSystem, GateTerms, UnitVectorSystem
from .cell import Cell, by_name, recurrent_kernel_gradient
from .registry import built_in


@built_in
@dataclass(frozen=True, eq=False)
class LSTM(Cell):
    """A long short-term memory cell.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    recurrent_kernel : (unit_in, gate * unit)
        ``unit_in`` is the size of h; it differs from ``unit`` only with a projection.
    bias, recurrent_bias : (gate * unit,) or None
        Only their sum matters; torch has both.
    projection : (unit, unit_in) or None
        h_t = (o_t * act(c_t)) @ projection.
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`.
    """

    kind = "lstm"
    gates: ClassVar[tuple[str, ...]] = ("input", "forget", "candidate", "output")
    states = ("hidden", "cell")
    parameters = by_name(KERNEL, RECURRENT_KERNEL, BIAS, RECURRENT_BIAS, PROJECTION)
    keeping = "forget"
    against_vanishing = (
        "a forget bias of 1 to ln(T) at the start (Jozefowicz et al. 2015; chrono initialisation, "
        "arXiv:1804.11188), or the input shortened or strided."
    )
    at_once = True

    kernel: Array
    recurrent_kernel: Array
    bias: Array | None = None
    recurrent_bias: Array | None = None
    projection: Array | None = None
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Sizes of h and of c."""
        return int(self.recurrent_kernel.shape[0]), self.units

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute one step from the projected input (sample, gate * unit) and the states before."""
        record = self.all_gates(projected, before[0], scale, xp)
        (c,) = self.others(record.gates, before[1:])
        return record, (self.hidden(record.gates, before[0], (c,), xp), c)

    def all_gates(self, projected: Array, hidden: Array, scale: Scale, xp: Namespace) -> Record:
        """Compute all gates of one step, or of all steps at once, from h_{t-1}."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        z = affine.split_gates(self.from_hidden(hidden, scale, xp) + projected, len(self.gates), xp)
        candidate = self.gates.index("candidate")
        gates = rec.value(z, xp)
        gates[..., candidate, :] = act.value(z[..., candidate, :], xp)
        return Record(z, gates)

    def from_hidden(self, hidden: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the recurrent side of all pre-activations: (..., unit_in) to (..., gate * unit)."""
        return affine.project(hidden, self.recurrent_kernel, scale, len(self.gates), xp)

    def to_hidden(self, dz: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute dL/dh_{t-1} (..., unit_in) from dL/dz, the gradient at the gates before their activation."""
        return affine.unproject(dz, self.recurrent_kernel, scale, len(self.gates), xp)

    def others(self, gates: Array, before: States) -> tuple[Array, ...]:
        """Compute the states of a step other than h_t: c_t = f c_{t-1} + i g, from the gates and c_{t-1}."""
        return (gates[..., 1, :] * before[0] + gates[..., 0, :] * gates[..., 2, :],)

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t from the gates and c_t."""
        h = gates[..., -1, :] * ACTIVATIONS[self.activation].value(others[0], xp)
        return h if self.projection is None else h @ self.projection

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t and dL/dc_t back; the total gradient of c_t includes the path through h_t."""
        act, a, (lam_h, lam_c) = ACTIVATIONS[self.activation], record.gates, cotangent
        inner = lam_h if self.projection is None else lam_h @ self.projection.T
        squashed = act.value(after[1], xp)
        total_c = lam_c + act.vjp(after[1], squashed, inner * a[..., -1, :], xp)
        dz = self.through_activations(record, self._gate_gradients(a, before[1], total_c, inner * squashed), xp)
        carry_h = self.to_hidden(affine.join_gates(dz, xp), scale, xp)
        return dz, (carry_h, total_c * a[..., self.gates.index("forget"), :]), (lam_h, total_c)

    def _gate_gradients(self, gates: Array, previous_cell: Array, by_cell: Any, by_output: Array) -> list[Array]:
        """Return dL/di = dL/dc g, dL/df = dL/dc c_{t-1}, dL/dg = dL/dc i, and dL/do, from total gradients."""
        return [by_cell * gates[..., 2, :], by_cell * previous_cell, by_cell * gates[..., 0, :], by_output]

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the recurrent kernel and of the projection."""
        grads = recurrent_kernel_gradient(self, run, result, how, times)
        if self.projection is not None:
            gates = run.known_record.gates
            hidden_grad = run.at_real_steps(result.state_grads[0])[:, times, :]
            squashed = ACTIVATIONS[self.activation].value(run.states[1][:, times, :], run.xp)
            unprojected = gates[:, times, -1, :] * squashed
            grads["projection"] = affine.outer(unprojected, hidden_grad, None, 1, how, run.xp)
        return grads

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> RecurrentTerms | None:
        """Return dL/dz and h_{t-1}, the factors of the recurrent kernel's gradient; None with a projection."""
        return None if self.projection is not None else (gate_grad, [(slice(None), before)])

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return the total gradients of the gates, with dL/do = dL/dh act(c)."""
        by_hidden, by_cell = result.state_grads
        if self.projection is not None:
            by_hidden = by_hidden @ self.projection.T
        squashed = ACTIVATIONS[self.activation].value(run.states[1], run.xp)
        grads = self._gate_gradients(run.known_record.gates, run.before(1), by_cell, by_hidden * squashed)
        return run.xp.stack(grads, axis=-2)

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise in gated form: two dense unit x unit blocks of A_t, the rest diagonal."""
        if self.projection is not None or any(activation.slope is None for activation in self.activations):
            return super().linear_system(run)
        act, gates = ACTIVATIONS[self.activation], run.known_record.gates
        squashed = act.value(run.states[1], run.xp)
        gate_slopes = self._gate_gradients(gates, run.before(1), 1, squashed)
        coefficients = self.through_activations(run.known_record, gate_slopes, run.xp)
        cell_terms = GateTerms(slice(0, self.units), (0, 1, 2), coefficients[:, :, :3, :])
        hidden_terms = GateTerms(slice(self.units, None), (3,), coefficients[:, :, 3:, :])
        lift = act.vjp(run.states[1], squashed, gates[:, :, 3, :], run.xp)
        return GateSystem(self, run, [cell_terms, hidden_terms], keep=gates[:, :, 1, :], lift=lift)


@built_in
@dataclass(frozen=True, eq=False)
class CIFG(LSTM):
    """A long short-term memory cell whose input gate is one minus its forget gate.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    recurrent_kernel : (unit, gate * unit)
    bias, recurrent_bias : (gate * unit,) or None
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`.
    """

    kind = "cifg"
    gates = ("forget", "candidate", "output")
    parameters = by_name(KERNEL, RECURRENT_KERNEL, BIAS, RECURRENT_BIAS)

    def others(self, gates: Array, before: States) -> tuple[Array, ...]:
        """Compute the states of a step other than h_t: c_t = f c_{t-1} + (1 - f) g, from the gates and c_{t-1}."""
        return (gates[..., 0, :] * before[0] + (1 - gates[..., 0, :]) * gates[..., 1, :],)

    def _gate_gradients(self, gates: Array, previous_cell: Array, by_cell: Any, by_output: Array) -> list[Array]:
        """Return dL/df = dL/dc (c_{t-1} - g), dL/dg = dL/dc (1 - f), and dL/do."""
        f, g = gates[..., 0, :], gates[..., 1, :]
        return [by_cell * (previous_cell - g), by_cell * (1 - f), by_output]

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise by pulling unit cotangents through each step."""
        return UnitVectorSystem(self, run)
