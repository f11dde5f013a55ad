"""The LSTM with coupled input and forget gates: c_t = f c_{t-1} + (1 - f) g.

(f, o) = rec_act(W x_t + U h_{t-1} + b),  g = act(...),  h_t = o act(c_t)
Greff et al. 2015, arXiv:1503.04069, section 4: "coupled input and forget gate".
"""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL, RECURRENT_BIAS, RECURRENT_KERNEL
from ..activations import ACTIVATIONS
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction
from .cell import Cell, by_name, of_every_gate
from .lstm import LSTM
from .registry import built_in


@built_in
@dataclass(frozen=True, eq=False)
class CIFG(Cell):
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
    states = ("hidden", "cell")
    parameters = by_name(KERNEL, RECURRENT_KERNEL, BIAS, RECURRENT_BIAS)
    keeping = "forget"
    against_vanishing = LSTM.against_vanishing
    at_once = True

    kernel: Array
    recurrent_kernel: Array
    bias: Array | None = None
    recurrent_bias: Array | None = None
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute gates from h_{t-1}, then c_t, then h_t."""
        record = self.all_gates(projected, before[0], scale, xp)
        (c,) = self.others(record.gates, before[1:])
        return record, (self.hidden(record.gates, before[0], (c,), xp), c)

    def all_gates(self, projected: Array, hidden: Array, scale: Scale, xp: Namespace) -> Record:
        """Compute all gates of one step, or of all steps at once, from h_{t-1}."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        z = affine.split_gates(projected + affine.project(hidden, self.recurrent_kernel, scale, 3, xp), 3, xp)
        parts = [k.value(z[..., g, :], xp) for g, k in enumerate((rec, act, rec))]
        return Record(z, xp.stack(parts, axis=-2))

    def others(self, gates: Array, before: States) -> tuple[Array, ...]:
        """Compute c_t from the gates and c_{t-1}."""
        return (gates[..., 0, :] * before[0] + (1 - gates[..., 0, :]) * gates[..., 1, :],)

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t from the gates and c_t."""
        return gates[..., 2, :] * ACTIVATIONS[self.activation].value(others[0], xp)

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t and dL/dc_t back as in an LSTM, with c_{t-1} - g in place of c_{t-1} in the forget gate."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        (lam_h, lam_c), z, a = cotangent, record.preactivation, record.gates
        f, g, o = (a[..., k, :] for k in range(3))
        squashed = act.value(after[1], xp)
        total_c = lam_c + act.vjp(after[1], squashed, lam_h * o, xp)
        dz = [
            rec.vjp(z[..., 0, :], f, total_c * (before[1] - g), xp),
            act.vjp(z[..., 1, :], g, total_c * (1 - f), xp),
            rec.vjp(z[..., 2, :], o, lam_h * squashed, xp),
        ]
        stacked = xp.stack(dz, axis=-2)
        carry_h = affine.unproject(affine.join_gates(stacked, xp), self.recurrent_kernel, scale, 3, xp)
        return stacked, (carry_h, total_c * f), (lam_h, total_c)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradient of the recurrent kernel."""
        return of_every_gate(self, run, result, how, times)

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> RecurrentTerms | None:
        """Return dL/dz and h_{t-1}, the factors of the recurrent kernel's gradient."""
        return gate_grad, [(slice(None), before)]

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return dL/df = dL/dc (c_{t-1} - g), dL/dg = dL/dc (1 - f) and dL/do = dL/dh act(c), with total gradients."""
        gates = run.known_record.gates
        by_hidden, by_cell = result.state_grads
        squashed = ACTIVATIONS[self.activation].value(run.states[1], run.xp)
        parts = [by_cell * (run.before(1) - gates[:, :, 1]), by_cell * (1 - gates[:, :, 0]), by_hidden * squashed]
        return run.xp.stack(parts, axis=2)
