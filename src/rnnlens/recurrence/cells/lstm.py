"""The long short-term memory cell. Hochreiter, Schmidhuber 1997; Gers, Schmidhuber, Cummins 2000 (forget gate).

z = W x_t + U h_{t-1} + b,  (i, f, o) = rec_act(z_i, z_f, z_o),  g = act(z_g)
c_t = f c_{t-1} + i g,      h_t = o act(c_t), projected where the cell has a projection (arXiv:1402.1128, eq. 6)

With coupled gates, i = 1 - f (Greff et al. 2015, arXiv:1503.04069, section 4: "coupled input and forget gate").
"""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL, PROJECTION, RECURRENT_BIAS, RECURRENT_KERNEL
from ..activations import ACTIVATIONS
from ..linear import ProductSteps, System
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction, GateSystem
from .cell import Cell, are_elementwise, by_name, of_every_gate
from .registry import built_in

_GATES = 4


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
    gates = ("input", "forget", "candidate", "output")
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
        z = self.from_hidden(hidden, scale, xp)
        z += projected
        z = affine.split_gates(z, _GATES, xp)
        gates = rec.value(z, xp)
        gates[..., 2, :] = act.value(z[..., 2, :], xp)
        return Record(z, gates)

    def from_hidden(self, hidden: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the recurrent side of all pre-activations: (..., unit_in) to (..., gate * unit)."""
        return affine.project(hidden, self.recurrent_kernel, scale, _GATES, xp)

    def to_hidden(self, dz: Array, scale: Scale, xp: Namespace) -> Array:
        """Pull dL/dz (..., gate * unit) back to h_{t-1} (..., unit_in)."""
        return affine.unproject(dz, self.recurrent_kernel, scale, _GATES, xp)

    def others(self, gates: Array, before: States) -> tuple[Array, ...]:
        """Compute the states of a step other than h_t: c_t = f c_{t-1} + i g, from the gates and c_{t-1}."""
        return (gates[..., 1, :] * before[0] + gates[..., 0, :] * gates[..., 2, :],)

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t from the gates and c_t."""
        h = gates[..., 3, :] * ACTIVATIONS[self.activation].value(others[0], xp)
        return h if self.projection is None else h @ self.projection

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t and dL/dc_t back; the total gradient of c_t includes the path through h_t."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        lam_h, lam_c = cotangent
        inner = lam_h if self.projection is None else lam_h @ self.projection.T
        z, a = record.preactivation, record.gates
        i, f, g, o = (a[..., k, :] for k in range(_GATES))
        squashed = act.value(after[1], xp)
        total_c = lam_c + act.vjp(after[1], squashed, inner * o, xp)
        dz = xp.stack(
            [
                rec.vjp(z[..., 0, :], i, total_c * g, xp),
                rec.vjp(z[..., 1, :], f, total_c * before[1], xp),
                act.vjp(z[..., 2, :], g, total_c * i, xp),
                rec.vjp(z[..., 3, :], o, inner * squashed, xp),
            ],
            axis=-2,
        )
        carry_h = self.to_hidden(affine.join_gates(dz, xp), scale, xp)
        return dz, (carry_h, total_c * f), (lam_h, total_c)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the recurrent kernel and of the projection."""
        grads = of_every_gate(self, run, result, how, times)
        if self.projection is not None:
            gates = run.known_record.gates
            hidden_grad = run.at_real_steps(result.state_grads[0])[:, times, :]
            squashed = ACTIVATIONS[self.activation].value(run.states[1][:, times, :], run.xp)
            unprojected = gates[:, times, 3, :] * squashed
            grads["projection"] = affine.outer(unprojected, hidden_grad, None, 1, how, run.xp)
        return grads

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> RecurrentTerms | None:
        """Return dL/dz and h_{t-1}, the factors of the recurrent kernel's gradient; None with a projection."""
        return None if self.projection is not None else (gate_grad, [(slice(None), before)])

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return dL/di = dL/dc g, dL/df = dL/dc c_{t-1}, dL/dg = dL/dc i, dL/do = dL/dh act(c), of total gradients."""
        gates = run.known_record.gates
        by_hidden, by_cell = result.state_grads
        if self.projection is not None:
            by_hidden = by_hidden @ self.projection.T
        squashed = ACTIVATIONS[self.activation].value(run.states[1], run.xp)
        parts = [by_cell * gates[..., 2, :], by_cell * run.before(1), by_cell * gates[..., 0, :], by_hidden * squashed]
        return run.xp.stack(parts, axis=-2)

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise in gated form: two dense unit x unit blocks of A_t, the rest diagonal."""
        plain = self.projection is None and are_elementwise(self.activation, self.recurrent_activation)
        return LstmSystem(self, run) if plain else super().linear_system(run)


class LstmSystem(GateSystem):
    """Linear system of an LSTM in gated form: A_t has two dense unit x unit blocks and is otherwise diagonal."""

    gated = True

    def __init__(self, cell: LSTM, run: Trajectory) -> None:
        super().__init__(cell, run)
        units = self.cell.units
        self.rows, self.columns = 2 * units, units
        act, rec = self.slopes()
        z, a = run.known_record.preactivation, run.known_record.gates
        i, f, g, o = (a[:, :, k, :] for k in range(4))
        squashed = ACTIVATIONS[self.cell.activation].value(run.states[1], run.xp)
        cell_coefficients = run.xp.stack(
            [g * rec(z[:, :, 0, :], i), run.before(1) * rec(z[:, :, 1, :], f), i * act(z[:, :, 2, :], g)],
            axis=2,
        )
        out_coefficient = (squashed * rec(z[:, :, 3, :], o))[:, :, None, :]
        lift = o * act(run.states[1], squashed)
        self.cell_coefficients, self.out_coefficient, self.lift = map(
            run.at_real_steps, (cell_coefficients, out_coefficient, lift)
        )
        self.keep = self.carried(f, f)
        self.pass_hidden = self.carried(None, f)

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise steps ``first ... stop - 1``: rows of c by three gates, rows of h by the output gate."""
        units, at = self.cell.units, (samples, slice(first, stop))
        product = self.empty(first, stop, samples, inputs)
        sides = (("state", slice(0, units)), ("input", slice(units, None)))
        for side, columns in sides[: 2 if inputs else 1]:
            self.combine(product[:, :, :units, columns], self.cell_coefficients[at], (0, 1, 2), side, samples)
            self.combine(product[:, :, units:, columns], self.out_coefficient[at], (3,), side, samples)
        if self.pass_hidden is not None:
            self.work.diagonal_add(product[:, :, units:, :units], self.pass_hidden[at])
        return ProductSteps(self.work, product, self.keep[at], self.lift[at])  # type: ignore[index]


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
        """Compute the states of a step other than h_t: c_t = f c_{t-1} + i g, from the gates and c_{t-1}."""
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
