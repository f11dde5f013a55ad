"""The known cells: their equations, one file per cell with the same functions in each, and the record of their weights.

Every cell module has

``step(cell, projected, before, scale, xp) -> (record, after)``
    from the projected input and the states before to the gates and the states after; one step, or all at once
    where every state before is known (``scale``: dropout multipliers of the recurrent side);
``pull_back(cell, record, before, after, cotangent, scale, xp) -> (gate_cotangent, carry, total)``
    the adjoint of ``step``; it broadcasts over axes between sample and unit;
``recurrent_gradients(cell, record, before, gate_cotangent, scale, how, xp) -> dict``
    gradients of the weights on the recurrent side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...typing import Array, Namespace
from ...vocabulary import GATES, STATES
from . import affine


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


def project_input(cell: KnownCell, x: Array, scale: Array | None, xp: Namespace) -> Array:
    """The input side of all pre-activations: (sample, ..., feature) to (sample, ..., gate * unit), biases included.

    The recurrent bias is included too, save where a GRU's reset gate multiplies it.
    """
    z = affine.project(x, cell.kernel, scale, len(cell.gates), xp)
    if cell.bias is not None:
        z += cell.bias
    if cell.recurrent_bias is not None and not (cell.kind == "gru" and cell.reset_after):
        z += cell.recurrent_bias
    return z


def equations(cell: KnownCell) -> Any:
    """The module that holds the equations of ``cell``."""
    from . import gru, lstm, simple_rnn

    return {"simple_rnn": simple_rnn, "lstm": lstm, "gru": gru}[cell.kind]
