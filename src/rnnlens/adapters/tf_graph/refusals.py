"""Loops whose steps cannot be looked into, with the reason as an error text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import message
from .blocks import width_of
from .recurrences import Loop, LoopBoundary, LoopCell
from .sequences import Read, course_of
from .while_loops import Frame, Variable, ancestors


def refused(frame: Frame, states: Sequence[Variable], found: Sequence[Read], reason: str, hint: str = "") -> Loop:
    """Create the ``Loop`` of a while loop whose steps cannot be run one by one, which an error then states."""
    words = message(
        f"The loop {frame.name!r} is run by a cell that rnnlens does not know, and its steps cannot be run one by one.",
        got=reason,
        expected="a step that is a function of its input, the states before it and weights, sample by sample",
        hint=hint or 'dynamic_rnn with a cell of tf.nn.rnn_cell or of your own; other layers by layers=["..."]',
    )
    reads = [read for read in found if read.value.dtype.is_floating]
    readers = tuple(read.reader for read in reads[:1] if read.reader is not None)
    source = LoopBoundary((reads[0].stacked,), (readers,), stacked=True) if readers else LoopBoundary(())
    course = course_of(reads[0].stacked)[1] if reads else {}
    return Loop(
        frame.name,
        frame.kind,
        LoopCell("unknown", width_of(states[0].before) or 0, refused=words),
        tuple(LoopBoundary((v.entry,), ((v.reader,),)) for v in states),
        tuple(LoopBoundary((v.exit,)) for v in states if v.exit is not None),
        source,
        None,
        **course,
    )


def of_a_branch(scope: str) -> Loop:
    """Create the ``Loop`` of a recurrence that cannot be captured because it is inside a branch of a condition."""
    return without_steps(
        scope,
        scope,
        0,
        f"The recurrence {scope!r} stands in one branch of a tf.cond, and its steps cannot be read from outside.",
        expected="a recurrence that is always run",
        hint="tf.cond around its input or its result: tf.cond(switch, lambda: outputs, lambda: others)",
    )


def without_steps(name: str, scope: str, units: int, what: str, **words: str) -> Loop:
    """Create the ``Loop`` of a recurrence of which no step can be read, with the text and details of the error."""
    cell = LoopCell("unknown", units, refused=message(what, **words))
    return Loop(name, "unrolled", cell, (), (), LoopBoundary(()), None, scope=scope)


#: Operations that run a whole recurrence, or cell; its steps are not in the graph.
_FUSED = frozenset(
    {"BlockLSTM", "BlockLSTMV2", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "LSTMBlockCell", "GRUBlockCell"}
)


def fused(ends: Iterable[Any]) -> list[Loop]:
    """Return a ``Loop`` that cannot be captured for each recurrence, or cell, that is a single fused operation."""
    scopes = {op.name.rpartition("/")[0] or op.name: op.type for op in ancestors(ends) if op.type in _FUSED}
    return [
        without_steps(
            scope,
            scope,
            0,
            f"The recurrence {scope!r} is one operation, and its steps are not in the graph.",
            got=kind,
            expected="a loop of steps",
            hint="tf.nn.dynamic_rnn with tf.nn.rnn_cell.LSTMCell or GRUCell, on the same weights",
        )
        for scope, kind in scopes.items()
    ]
