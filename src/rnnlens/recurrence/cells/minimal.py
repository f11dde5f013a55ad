"""The minimal GRU and the minimal LSTM: gates depend on the input alone. Feng et al. 2024, arXiv:2410.01201.

GRU (section 3.1):  z = rec_act(W_z x_t + b_z),  n = act(W_n x_t + b_n),  h_t = (1 - z) h_{t-1} + z n
LSTM (section 3.2): f, i = rec_act(W x_t + b),   n as above,              h_t = f' h_{t-1} + i' n

with f' = f / (f + i) and i' = i / (f + i); without ``normalised``, f' = f and i' = i. The gate z is called ``input``
here, because in all cells of rnnlens ``update`` is the share of the state that is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL
from ..activations import ACTIVATIONS
from ..linear import Kernels, System, diagonal
from ..trajectory import Adjoint, Gradients, Pulled, Record, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction
from .cell import Cell, are_elementwise, by_name
from .registry import built_in


@built_in
@dataclass(frozen=True, eq=False)
class MinGRU(Cell):
    """A minimal GRU.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    bias : (gate * unit,) or None
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`; of the candidate, and of the gate.
    """

    kind = "min_gru"
    gates = ("input", "candidate")
    parameters = by_name(KERNEL, BIAS)
    at_once = True

    kernel: Array
    bias: Array | None = None
    activation: str = "linear"
    recurrent_activation: str = "sigmoid"

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute gates from the input, and h_t = (1 - z) h_{t-1} + z n."""
        z = affine.split_gates(projected, 2, xp)
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        a = xp.stack([rec.value(z[..., 0, :], xp), act.value(z[..., 1, :], xp)], axis=-2)
        return Record(z, a), (self.hidden(a, before[0], (), xp),)

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t = (1 - z) h_{t-1} + z n from the gates."""
        return (1 - gates[..., 0, :]) * before + gates[..., 0, :] * gates[..., 1, :]

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t back to the gates, and to h_{t-1} as (1 - z) dL/dh_t."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        (lam,), z, a = cotangent, record.preactivation, record.gates
        dz = rec.vjp(z[..., 0, :], a[..., 0, :], lam * (a[..., 1, :] - before[0]), xp)
        dn = act.vjp(z[..., 1, :], a[..., 1, :], lam * a[..., 0, :], xp)
        return xp.stack([dz, dn], axis=-2), (lam * (1 - a[..., 0, :]),), (lam,)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return an empty dict: the cell has no recurrent weights."""
        return {}

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return dL/dz = dL/dh (n - h_{t-1}) and dL/dn = dL/dh z."""
        a, lam = run.known_record.gates, result.state_grads[0]
        return run.xp.stack([lam * (a[:, :, 1] - run.before(0)), lam * a[:, :, 0]], axis=2)

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t = diag(1 - z_t)."""
        if not are_elementwise(self.activation, self.recurrent_activation):
            return super().linear_system(run)
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        z, a, xp = run.known_record.preactivation, run.known_record.gates, run.xp
        by_gate = (a[:, :, 1] - run.before(0)) * rec.slope(z[:, :, 0], a[:, :, 0], xp)  # type: ignore[misc]
        by_candidate = a[:, :, 0] * act.slope(z[:, :, 1], a[:, :, 1], xp)  # type: ignore[misc]
        kernels = [affine.columns(self.kernel, g, 2) for g in range(2)]
        inputs = Kernels(xp.stack([by_gate, by_candidate], axis=2), kernels, run.input_scale)
        return diagonal(1 - a[:, :, 0], inputs, order=run.order, mask=run.mask)


@built_in
@dataclass(frozen=True, eq=False)
class MinLSTM(Cell):
    """A minimal LSTM with the single state h, which is its output. Gates in results are those before normalisation.

    Attributes
    ----------
    kernel : (feature, gate * unit)
    bias : (gate * unit,) or None
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`; of the candidate, and of the gates.
    normalised
        Whether the two gates are divided by their sum.
    """

    kind = "min_lstm"
    gates = ("input", "forget", "candidate")
    parameters = by_name(KERNEL, BIAS)
    at_once = True

    kernel: Array
    bias: Array | None = None
    activation: str = "linear"
    recurrent_activation: str = "sigmoid"
    normalised: bool = True

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute gates from the input, and h_t = f' h_{t-1} + i' n."""
        z = affine.split_gates(projected, 3, xp)
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        a = xp.concat([rec.value(z[..., :2, :], xp), act.value(z[..., 2:, :], xp)], axis=-2)
        return Record(z, a), (self.hidden(a, before[0], (), xp),)

    def _sum(self, gates: Array) -> Array | float:
        return gates[..., 0, :] + gates[..., 1, :] if self.normalised else 1.0

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t = f' h_{t-1} + i' n from the gates."""
        return (gates[..., 1, :] * before + gates[..., 0, :] * gates[..., 2, :]) / self._sum(gates)

    def _by_gates(self, gates: Array, before: Array, after: Array, lam: Array) -> list[Array]:
        """Return dL/di, dL/df, dL/dn from dL/dh, of h = (f h' + i n) / (f + i) with dh/df = (h' - h) / (f + i)."""
        total, less = self._sum(gates), after if self.normalised else 0.0
        i, n = gates[..., 0, :], gates[..., 2, :]
        return [lam * (n - less) / total, lam * (before - less) / total, lam * i / total]

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t back to the gates, and to h_{t-1} as f' dL/dh_t."""
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        (lam,), z, a = cotangent, record.preactivation, record.gates
        grads = self._by_gates(a, before[0], after[0], lam)
        dz = [k.vjp(z[..., g, :], a[..., g, :], grads[g], xp) for g, k in enumerate((rec, rec, act))]
        return xp.stack(dz, axis=-2), (lam * a[..., 1, :] / self._sum(a),), (lam,)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return an empty dict: the cell has no recurrent weights."""
        return {}

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return the gradients of the gates before normalisation."""
        grads = self._by_gates(run.known_record.gates, run.before(0), run.states[0], result.state_grads[0])
        return run.xp.stack(grads, axis=2)

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t = diag(f'_t)."""
        if not are_elementwise(self.activation, self.recurrent_activation):
            return super().linear_system(run)
        act, rec = ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]
        z, a, xp = run.known_record.preactivation, run.known_record.gates, run.xp
        grads = self._by_gates(a, run.before(0), run.states[0], xp.ones_like(run.states[0]))
        slopes = [k.vjp(z[:, :, g], a[:, :, g], grads[g], xp) for g, k in enumerate((rec, rec, act))]
        kernels = [affine.columns(self.kernel, g, 3) for g in range(3)]
        inputs = Kernels(xp.stack(slopes, axis=2), kernels, run.input_scale)
        return diagonal(a[:, :, 1] / self._sum(a), inputs, order=run.order, mask=run.mask)
