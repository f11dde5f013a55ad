"""The known cells: their equations, one file per cell with the same functions in each, and the record of their weights.

Every cell module has

``step(cell, projected, state, scale, xp) -> (preactivation, gates, new_state)``
    one time step from the projected input (see :func:`affine.project_input`);
``replay(cell, projected, hidden_before, hidden_after, initial_state, order, mask, scale, xp) -> (preactivation, gates, states)``
    all time steps at once where the hidden states are already known;
``pull_back(cell, at, cotangent, scale, xp) -> (gate_cotangent, carry)``
    the adjoint of ``step``: from dL/ds_t to dL/dz_t and the part of dL/ds_{t-1} that it causes;
``push_forward(cell, at, gate_tangent_x, tangent, scale, xp) -> tangent``
    the tangent of ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...typing import Array
from ...vocabulary import GATES, STATES


@dataclass(frozen=True)
class KnownCell:
    """A SimpleRNN, LSTM or GRU cell: which equations, which weights.

    Attributes
    ----------
    kind
        ``"simple_rnn"``, ``"lstm"`` or ``"gru"``.
    kernel : (feature, gate * unit)
        Gates laid side by side in the order of ``vocabulary.GATES``.
    recurrent_kernel : (unit_in, gate * unit)
        ``unit_in`` is the size of h; it differs from ``unit`` only with a projection.
    bias : (gate * unit,) or None
        Added to the input side.
    recurrent_bias : (gate * unit,) or None
        Added to the recurrent side. It matters on its own only for a GRU with ``reset_after``, where the reset gate
        multiplies it; elsewhere it is a second bias (torch has one on every cell).
    projection : (unit, unit_in) or None
        LSTM only: h_t = (o_t * act(c_t)) @ projection.
    activation, recurrent_activation
        Names known to :mod:`rnnlens.recurrence.activations`.
    reset_after
        GRU only: whether the reset gate is applied after the recurrent matrix product.
    """

    kind: str
    kernel: Array
    recurrent_kernel: Array
    bias: Array | None = None
    recurrent_bias: Array | None = None
    projection: Array | None = None
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"
    reset_after: bool = True

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of the gates, in kernel order."""
        return GATES[self.kind]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states; the first is the output."""
        return STATES[self.kind]

    @property
    def units(self) -> int:
        """Number of units per gate."""
        return int(self.kernel.shape[1]) // len(self.gates)

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Size of each state."""
        hidden = int(self.recurrent_kernel.shape[0])
        return (hidden, self.units)[: len(self.states)]

    def weights(self) -> dict[str, Array]:
        """The weights that exist, by name."""
        names = ("kernel", "recurrent_kernel", "bias", "recurrent_bias", "projection")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def equations(cell: KnownCell) -> Any:
    """The module that holds the equations of ``cell``."""
    from . import gru, lstm, simple_rnn

    return {"simple_rnn": simple_rnn, "lstm": lstm, "gru": gru}[cell.kind]
