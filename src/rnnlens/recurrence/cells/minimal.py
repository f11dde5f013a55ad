"""The minimal GRU and the minimal LSTM: gates depend on the input alone. Feng et al. 2024, arXiv:2410.01201.

GRU (section 3.1):  z = rec_act(W_z x_t + b_z),  n = act(W_n x_t + b_n),  h_t = (1 - z) h_{t-1} + z n
LSTM (section 3.2): f, i = rec_act(W x_t + b),   n as above,              h_t = f' h_{t-1} + i' n

with f' = f / (f + i) and i' = i / (f + i); without ``normalised``, f' = f and i' = i. The gate z is called ``input``
here, because in all cells of rnnlens ``update`` is the share of the state that is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...typing import Array, Namespace
from ...vocabulary import BIAS, KERNEL
from ..linear import System
from ..structured import Kernels, diagonal
from ..trajectory import Adjoint, Gradients, Pulled, Record, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction
from .cell import Cell, by_name
from .registry import built_in


@dataclass(frozen=True, eq=False)
class _Minimal(Cell):
    """Base class of minimal cells: one state, kept by a factor that depends on the input alone."""

    parameters = by_name(KERNEL, BIAS)
    at_once = True

    kernel: Array
    bias: Array | None = None
    activation: str = "linear"
    recurrent_activation: str = "sigmoid"

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute the gates from the projected input alone, and h_t from the gates and h_{t-1}."""
        z = affine.split_gates(projected, len(self.gates), xp)
        activated = [k.value(z[..., g, :], xp) for g, k in enumerate(self.activations)]
        gates = xp.stack(activated, axis=-2)
        return Record(z, gates), (self.hidden(gates, before[0], (), xp),)

    def _apply_kept_share(self, gates: Array, value: Any) -> Array:
        """Multiply a value by dh_t/dh_{t-1}."""
        raise NotImplementedError

    def _gate_gradients(self, gates: Array, previous_hidden: Array, new_hidden: Array, lam: Array) -> list[Array]:
        """Return dL/dgate of each gate from dL/dh_t."""
        raise NotImplementedError

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/dh_t back to the gates, and to h_{t-1}."""
        (lam,) = cotangent
        dz = self.through_activations(record, self._gate_gradients(record.gates, before[0], after[0], lam), xp)
        return dz, (self._apply_kept_share(record.gates, lam),), (lam,)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return an empty dict: the cell has no recurrent weights."""
        return {}

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return the total gradients dL/dgate of all gates."""
        grads = self._gate_gradients(run.known_record.gates, run.before(0), run.states[0], result.state_grads[0])
        return run.xp.stack(grads, axis=2)

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise the recurrence with a diagonal A_t."""
        if any(activation.slope is None for activation in self.activations):
            return super().linear_system(run)
        ones = run.xp.ones_like(run.states[0])
        grads = self._gate_gradients(run.known_record.gates, run.before(0), run.states[0], ones)
        slopes = self.through_activations(run.known_record, grads, run.xp)
        kernels = [affine.columns(self.kernel, g, len(self.gates)) for g in range(len(self.gates))]
        inputs = Kernels(slopes, kernels, run.input_scale)
        return diagonal(self._apply_kept_share(run.known_record.gates, 1), inputs, order=run.order, mask=run.mask)


@built_in
@dataclass(frozen=True, eq=False)
class MinGRU(_Minimal):
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

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t = (1 - z) h_{t-1} + z n from the gates."""
        return self._apply_kept_share(gates, before) + gates[..., 0, :] * gates[..., 1, :]

    def _apply_kept_share(self, gates: Array, value: Any) -> Array:
        return (1 - gates[..., 0, :]) * value

    def _gate_gradients(self, gates: Array, previous_hidden: Array, new_hidden: Array, lam: Array) -> list[Array]:
        """Return dL/dz = dL/dh (n - h_{t-1}) and dL/dn = dL/dh z."""
        return [lam * (gates[..., 1, :] - previous_hidden), lam * gates[..., 0, :]]


@built_in
@dataclass(frozen=True, eq=False)
class MinLSTM(_Minimal):
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

    normalised: bool = True

    def _gate_sum(self, gates: Array) -> Array | float:
        return gates[..., 0, :] + gates[..., 1, :] if self.normalised else 1.0

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute h_t = f' h_{t-1} + i' n from the gates, with f' = f / (f + i) and i' = i / (f + i)."""
        return (gates[..., 1, :] * before + gates[..., 0, :] * gates[..., 2, :]) / self._gate_sum(gates)

    def _apply_kept_share(self, gates: Array, value: Any) -> Array:
        return value * gates[..., 1, :] / self._gate_sum(gates)

    def _gate_gradients(self, gates: Array, previous_hidden: Array, new_hidden: Array, lam: Array) -> list[Array]:
        """Return dL/di, dL/df, dL/dn from dL/dh, of h = (f h' + i n) / (f + i) with dh/df = (h' - h) / (f + i)."""
        total, subtracted = self._gate_sum(gates), new_hidden if self.normalised else 0.0
        i, n = gates[..., 0, :], gates[..., 2, :]
        return [lam * (n - subtracted) / total, lam * (previous_hidden - subtracted) / total, lam * i / total]
