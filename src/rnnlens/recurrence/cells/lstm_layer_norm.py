"""The LSTM with layer normalisation of its two products and of its cell state.

z = LN(W x_t) gain_x + LN(U h_{t-1}) gain_h + b,  (i, f, o) = rec_act(z),  g = act(z_g)
c_t = f c_{t-1} + i g,   h_t = o act(LN(c_t) gain_c + shift_c),   LN(v) = (v - mean) / sqrt(var + epsilon)
Ba, Kiros, Hinton 2016, arXiv:1607.06450, eqs. 20-22. LN normalises each product over all gates together.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, GATE, KERNEL, RECURRENT_KERNEL, UNIT, Quantity
from ..activations import ACTIVATIONS
from ..trajectory import Adjoint, Gradients, Pulled, Record, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction
from .cell import Cell, by_name, flat_gate_grad
from .lstm import LSTM
from .registry import built_in


@built_in
@dataclass(frozen=True, eq=False)
class LayerNormLSTM(Cell):
    """A long short-term memory cell with layer normalisation.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    recurrent_kernel : (unit, gate * unit)
    gain_input, gain_recurrent, bias : (gate * unit,)
    gain_cell, shift_cell : (unit,)
    epsilon
        Added to the variance.
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`.
    """

    kind = "lstm_layer_norm"
    gates = ("input", "forget", "candidate", "output")
    states = ("hidden", "cell")
    parameters = by_name(
        KERNEL,
        RECURRENT_KERNEL,
        Quantity("gain_input", (GATE, UNIT), "gain of the input side", "1", "after W x_t was normalised"),
        Quantity("gain_recurrent", (GATE, UNIT), "gain of the recurrent side", "1", "after U h_{t-1} was normalised"),
        BIAS,
        Quantity("gain_cell", (UNIT,), "gain of the cell state", "1", "after c_t was normalised, on its way to h_t"),
        Quantity("shift_cell", (UNIT,), "shift of the cell state", "1", "added to the normalised c_t"),
    )
    keeping = "forget"
    against_vanishing = LSTM.against_vanishing

    kernel: Array
    recurrent_kernel: Array
    gain_input: Array
    gain_recurrent: Array
    bias: Array
    gain_cell: Array
    shift_cell: Array
    epsilon: float = 1e-5
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"

    def project(self, x: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the input side LN(W x_t) gain_x + b of all gates."""
        return self._normalise(affine.project(x, self.kernel, scale, 4, xp), xp)[0] * self.gain_input + self.bias

    def _normalise(self, value: Array, xp: Namespace) -> tuple[Array, Array]:
        """Return LN(value) and its standard deviation, sqrt(var + epsilon)."""
        centred = value - xp.mean(value, axis=-1, keepdims=True)
        spread = xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + self.epsilon)
        return centred / spread, spread

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute one step of an LSTM with both products and c_t normalised."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        product = affine.project(before[0], self.recurrent_kernel, scale, 4, xp)
        z = projected + self._normalise(product, xp)[0] * self.gain_recurrent
        z_i, z_f, z_g, z_o = (self.gate(z, name) for name in self.gates)
        i, f, g, o = rec.value(z_i, xp), rec.value(z_f, xp), act.value(z_g, xp), rec.value(z_o, xp)
        c = f * before[1] + i * g
        h = o * act.value(self._normalise(c, xp)[0] * self.gain_cell + self.shift_cell, xp)
        return self.record([z_i, z_f, z_g, z_o], [i, f, g, o], xp), (h, c)

    def _output_terms(self, gates: Array, c: Array, lam_h: Array, xp: Namespace) -> tuple[Array, Array, Array, Array]:
        """Return LN(c), its standard deviation, act(LN(c) gain_c + shift_c), and the gradient at its argument."""
        act = ACTIVATIONS[self.activation]
        normal, spread = self._normalise(c, xp)
        inner = normal * self.gain_cell + self.shift_cell
        squashed = act.value(inner, xp)
        return normal, spread, squashed, act.vjp(inner, squashed, lam_h * gates[..., 3, :], xp)

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t and dL/dc_t back as in an LSTM, through the normalisations of c_t and U h_{t-1}."""
        (lam_h, lam_c), a = cotangent, record.gates
        normal, spread, squashed, inner = self._output_terms(a, after[1], lam_h, xp)
        total_c = lam_c + _pull_layer_norm(normal, spread, inner * self.gain_cell, xp)
        grads = [total_c * a[..., 2, :], total_c * before[1], total_c * a[..., 0, :], lam_h * squashed]
        dz = self.through_activations(record, grads, xp)
        by_product = self._product_gradient(affine.join_gates(dz, xp), before[0], scale, xp)[1]
        carry_h = affine.unproject(by_product, self.recurrent_kernel, scale, 4, xp)
        return dz, (carry_h, total_c * a[..., 1, :]), (lam_h, total_c)

    def _product_gradient(self, dz: Array, hidden: Array, scale: Scale, xp: Namespace) -> tuple[Array, Array]:
        """Return LN(U h) and the gradient of the product U h."""
        normal, spread = self._normalise(affine.project(hidden, self.recurrent_kernel, scale, 4, xp), xp)
        return normal, _pull_layer_norm(normal, spread, dz * self.gain_recurrent, xp)

    def input_gradient(self, x: Array, gate_grad: Array, scale: Scale, xp: Namespace) -> Array:
        """Pull dL/dz back to the input through LN(W x_t)."""
        normal, spread = self._normalise(affine.project(x, self.kernel, scale, 4, xp), xp)
        return affine.unproject(
            _pull_layer_norm(normal, spread, gate_grad * self.gain_input, xp), self.kernel, scale, 4, xp
        )

    def input_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the input kernel, its gain and the bias."""
        xp, flat, x = run.xp, flat_gate_grad(run, result, times), run.input[:, times, :]
        normal, spread = self._normalise(affine.project(x, self.kernel, run.input_scale, 4, xp), xp)
        by_product = _pull_layer_norm(normal, spread, flat * self.gain_input, xp)
        return {
            "kernel": affine.outer(x, by_product, run.input_scale, 4, how, xp),
            "gain_input": affine.total(flat * normal, how, xp),
            "bias": affine.total(flat, how, xp),
        }

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of the recurrent kernel and its gain, and of the cell state's gain and shift."""
        xp, flat, previous_hidden = run.xp, flat_gate_grad(run, result, times), run.before(0)[:, times, :]
        normal, by_product = self._product_gradient(flat, previous_hidden, run.state_scale, xp)
        lam_h = run.at_real_steps(result.state_grads[0])
        gates, c = run.known_record.gates[:, times, ...], run.states[1][:, times, :]
        normal_cell, _, _, inner = self._output_terms(gates, c, lam_h[:, times, :], xp)
        return {
            "recurrent_kernel": affine.outer(previous_hidden, by_product, run.state_scale, 4, how, xp),
            "gain_recurrent": affine.total(flat * normal, how, xp),
            "gain_cell": affine.total(inner * normal_cell, how, xp),
            "shift_cell": affine.total(inner, how, xp),
        }

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return the gradients of the gates as in an LSTM, with dL/do = dL/dh act(LN(c) gain_c + shift_c)."""
        a, (by_hidden, by_cell) = run.known_record.gates, result.state_grads
        _, _, squashed, _ = self._output_terms(a, run.states[1], by_hidden, run.xp)
        grads = [by_cell * a[:, :, 2], by_cell * run.before(1), by_cell * a[:, :, 0], by_hidden * squashed]
        return run.xp.stack(grads, axis=2)


def _pull_layer_norm(normal: Array, spread: Array, cotangent: Array, xp: Namespace) -> Array:
    """Pull cotangents back through LN: subtract their mean and their component along the normalised vector."""
    centred = cotangent - xp.mean(cotangent, axis=-1, keepdims=True)
    return (centred - normal * xp.mean(cotangent * normal, axis=-1, keepdims=True)) / spread
