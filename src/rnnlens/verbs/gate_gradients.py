"""Gradients with respect to the values of gates, after their activation: what moving an open gate a little would do.

A sweep yields dL/dz, before the activation. Dividing by its slope would lose everything in saturated gates, so dL/dgate
is taken from the state equations instead.
"""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError, message
from ..recurrence.activations import ACTIVATIONS
from ..recurrence.adjoint import Adjoint
from ..recurrence.cells import KnownCell, affine
from ..recurrence.run import Run
from ..typing import Array


def gate_value_gradient(run: Run, swept: Adjoint) -> Array:
    """dL/dgate, (sample, time, gate, unit), exactly 0 at masked steps.

    LSTM, with total gradients: dL/di = dL/dc g, dL/df = dL/dc c_{t-1}, dL/dg = dL/dc i, dL/do = dL/dh act(c).
    GRU: dL/du = dL/dh (h_{t-1} - n), dL/dn = dL/dh (1 - u), dL/dr through n. SimpleRNN: its one gate is h itself.
    """
    if not isinstance(run.cell, KnownCell):
        raise UnsupportedError(message("The gates of a custom cell are not known.", hint="hidden, output or weights"))
    gradient = {"simple_rnn": _simple_rnn, "lstm": _lstm, "gru": _gru}[run.cell.kind](run, swept, run.cell)
    if run.mask is None:
        return gradient
    return run.xp.where(run.mask[:, :, None, None], gradient, run.xp.zeros_like(gradient))


def _simple_rnn(run: Run, swept: Adjoint, cell: KnownCell) -> Array:
    return swept.state_grads[0][:, :, None, :]


def _lstm(run: Run, swept: Adjoint, cell: KnownCell) -> Array:
    gates: Any = run.gates
    by_hidden, by_cell = swept.state_grads
    if cell.projection is not None:
        by_hidden = by_hidden @ cell.projection.T
    squashed = ACTIVATIONS[cell.activation].value(run.states[1], run.xp)
    before = run.before(1)
    parts = [by_cell * gates[:, :, 2], by_cell * before, by_cell * gates[:, :, 0], by_hidden * squashed]
    return run.xp.stack(parts, axis=2)


def _gru(run: Run, swept: Adjoint, cell: KnownCell) -> Array:
    gates: Any = run.gates
    update, candidate = gates[:, :, 0], gates[:, :, 2]
    by_hidden, before = swept.state_grads[0], run.before(0)
    by_candidate_input: Any = swept.gate_grad[:, :, 2]  # type: ignore[index]
    if cell.reset_after:
        assert run.record is not None
        by_reset = by_candidate_input * run.record.inner
    else:
        scale = run.state_scale
        own = scale[2] if scale is not None and len(scale.shape) == 3 else scale
        kernel = cell.recurrent_kernel[:, 2 * cell.units :]
        by_reset = affine.unproject(by_candidate_input, kernel, own, 1, run.xp) * before
    return run.xp.stack([by_hidden * (before - candidate), by_reset, by_hidden * (1 - update)], axis=2)
