"""The LSTM with peepholes from the cell state to the gates, clipping and a projection, as in TensorFlow 1.

(i, f) = rec_act(W x_t + U h_{t-1} + p c_{t-1} + b),  g = act(...),  c_t = clip(f c_{t-1} + i g)
o = rec_act(W_o x_t + U_o h_{t-1} + p_o c_t + b_o),   h_t = clip(P (o act(c_t)))
Gers, Schmidhuber 2000, doi:10.1109/IJCNN.2000.861302 (peepholes); Sak, Senior, Beaufays 2014, arXiv:1402.1128,
eqs. 1-6 (projection).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL, PROJECTION, RECURRENT_KERNEL, UNIT, Quantity
from ..activations import ACTIVATIONS
from ..trajectory import Adjoint, Gradients, Pulled, Record, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction
from .cell import Cell, by_name, recurrent_kernel_gradient
from .lstm import LSTM
from .registry import built_in

_PEEPHOLES = by_name(
    *(
        Quantity(f"peephole_{gate}", (UNIT,), f"peephole of the {gate} gate", "1", f"from {state} to the {gate} gate")
        for gate, state in (("input", "c_{t-1}"), ("forget", "c_{t-1}"), ("output", "c_t"))
    )
)


@built_in
@dataclass(frozen=True, eq=False)
class PeepholeLSTM(Cell):
    """A long short-term memory cell with peepholes.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    recurrent_kernel : (unit_in, gate * unit)
    bias : (gate * unit,) or None
    peephole_input, peephole_forget, peephole_output : (unit,) or None
    projection : (unit, unit_in) or None
    cell_clip, projection_clip
        Largest magnitude of c_t, and of a projected h_t; None for no clipping.
    forget_bias
        Constant added to the forget gate's pre-activation in addition to the bias; 1 by default in TensorFlow 1.
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`.
    """

    kind = "lstm_peephole"
    gates = ("input", "forget", "candidate", "output")
    states = ("hidden", "cell")
    parameters = by_name(KERNEL, RECURRENT_KERNEL, BIAS, *_PEEPHOLES.values(), PROJECTION)
    keeping = "forget"
    against_vanishing = LSTM.against_vanishing

    kernel: Array
    recurrent_kernel: Array
    bias: Array | None = None
    peephole_input: Array | None = None
    peephole_forget: Array | None = None
    peephole_output: Array | None = None
    projection: Array | None = None
    cell_clip: float | None = None
    projection_clip: float | None = None
    forget_bias: float = 0.0
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Sizes of h and of c; h may be a projection of fewer numbers."""
        return int(self.recurrent_kernel.shape[0]), self.units

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute one step; the output gate reads the new cell state c_t."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        z = projected + affine.project(before[0], self.recurrent_kernel, scale, 4, xp)
        z_i, z_f, z_g, z_o = (self.gate(z, name) for name in self.gates)
        z_i = _add_peephole(z_i, self.peephole_input, before[1])
        z_f = _add_peephole(z_f, self.peephole_forget, before[1]) + self.forget_bias
        i, f, g = rec.value(z_i, xp), rec.value(z_f, xp), act.value(z_g, xp)
        c = _clip(f * before[1] + i * g, self.cell_clip, xp)
        z_o = _add_peephole(z_o, self.peephole_output, c)
        o = rec.value(z_o, xp)
        h = o * act.value(c, xp)
        if self.projection is not None:
            h = _clip(h @ self.projection, self.projection_clip, xp)
        return self.record([z_i, z_f, z_g, z_o], [i, f, g, o], xp), (h, c)

    def _unprojected_grads(self, gates: Array, c: Array, lam_h: Array, xp: Namespace) -> tuple[Array, Array, Array]:
        """Return from dL/dh the gradient of P m before clipping, dL/dm, and m = o act(c)."""
        m = gates[..., 3, :] * ACTIVATIONS[self.activation].value(c, xp)
        if self.projection is None:
            return lam_h, lam_h, m
        lam_p = lam_h * _clip_slope(m @ self.projection, self.projection_clip, xp)
        return lam_p, lam_p @ self.projection.T, m

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t and dL/dc_t back, including the paths through the peepholes."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        (lam_h, lam_c), z, a = cotangent, record.preactivation, record.gates
        i, f, g, o = (a[..., k, :] for k in range(4))
        _, inner, _ = self._unprojected_grads(a, after[1], lam_h, xp)
        squashed = act.value(after[1], xp)
        dz_o = rec.vjp(z[..., 3, :], o, inner * squashed, xp)
        total_c = _add_peephole(lam_c + act.vjp(after[1], squashed, inner * o, xp), self.peephole_output, dz_o)
        into_c = total_c * _clip_slope(f * before[1] + i * g, self.cell_clip, xp)
        dz_i = rec.vjp(z[..., 0, :], i, into_c * g, xp)
        dz_f = rec.vjp(z[..., 1, :], f, into_c * before[1], xp)
        dz = xp.stack([dz_i, dz_f, act.vjp(z[..., 2, :], g, into_c * i, xp), dz_o], axis=-2)
        carry_h = affine.unproject(affine.join_gates(dz, xp), self.recurrent_kernel, scale, 4, xp)
        carry_c = _add_peephole(_add_peephole(into_c * f, self.peephole_input, dz_i), self.peephole_forget, dz_f)
        return dz, (carry_h, carry_c), (lam_h, total_c)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the recurrent kernel, the peepholes and the projection."""
        grads, xp = recurrent_kernel_gradient(self, run, result, how, times), run.xp
        assert result.gate_grad is not None
        dz = result.gate_grad[:, times, ...]
        cell_before = run.before(1)[:, times, :]
        cell_after = run.states[1][:, times, :]
        for name, gate, cell_state in (
            ("input", 0, cell_before),
            ("forget", 1, cell_before),
            ("output", 3, cell_after),
        ):
            if getattr(self, f"peephole_{name}") is not None:
                grads[f"peephole_{name}"] = affine.total(dz[:, :, gate, :] * cell_state, how, xp)
        if self.projection is not None:
            lam_h = run.at_real_steps(result.state_grads[0])[:, times, :]
            lam_p, _, m = self._unprojected_grads(run.known_record.gates[:, times, ...], cell_after, lam_h, xp)
            grads["projection"] = affine.outer(m, lam_p, None, 1, how, xp)
        return grads

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return the gradients of the gates as in an LSTM, through the clipping."""
        a, cell_before, cell_after, xp = run.known_record.gates, run.before(1), run.states[1], run.xp
        i, f, g = (a[:, :, k] for k in range(3))
        _, inner, _ = self._unprojected_grads(a, cell_after, result.state_grads[0], xp)
        into_c = result.state_grads[1] * _clip_slope(f * cell_before + i * g, self.cell_clip, xp)
        squashed = ACTIVATIONS[self.activation].value(cell_after, xp)
        return xp.stack([into_c * g, into_c * cell_before, into_c * i, inner * squashed], axis=2)


def _add_peephole(z: Array, peephole: Array | None, cell_state: Array) -> Array:
    return z if peephole is None else z + peephole * cell_state


def _clip(value: Array, limit: float | None, xp: Namespace) -> Array:
    if limit is None:
        return value
    bound = xp.ones_like(value) * limit
    return xp.where(value > bound, bound, xp.where(value < -bound, -bound, value))


def _clip_slope(value: Array, limit: float | None, xp: Namespace) -> Array | float:
    """Return the derivative of clipping to +-limit: one inside the limits, zero where values were clipped."""
    if limit is None:
        return 1.0
    return xp.where((value > limit) | (value < -limit), xp.zeros_like(value), xp.ones_like(value))
