"""Descriptions of a found loop: its kind, mask and direction, the scope of its cell, and why it is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from ...errors import message
from .cells import Match
from .loop_analysis import LoopAnalysis
from .recurrences import Condition, Loop, LoopBoundary, LoopCell
from .sequences import Course, Read, course_of, steps_run
from .while_loops import Frame, Variable, ancestors


def recognised_cell(match: Match) -> LoopCell:
    """Return the ``LoopCell`` of a recognised cell."""
    options = {name: value for name, value in match.options.items() if value is not None}
    return LoopCell(match.cell.kind, match.units, match.cell, options, match.weights)


def masking(analysis: LoopAnalysis) -> dict[str, Any]:
    """Return ``lengths`` and ``mask`` of a loop as keyword arguments of ``Loop``; empty if it has no known mask."""
    mask = analysis.mask
    if mask is None:
        return {}
    steps = None if mask.steps is None else flat_mask(mask.steps.stacked, mask.inverted)
    return {"lengths": mask.lengths, "mask": steps}


def flat_mask(stacked: Any, inverted: bool) -> Any:
    """Return a mask as (time, sample) of bool.

    An extra axis is removed, and an inverted mask is negated, in the copy.
    """
    with stacked.graph.as_default():
        flat = tf.reshape(stacked, tf.shape(stacked)[:2]) if stacked.shape.rank != 2 else stacked
        return tf.logical_not(flat) if inverted else flat


def runs_through(analysis: LoopAnalysis, stacked: Any) -> tuple[Condition, ...]:
    """Return the condition that the loop runs over all steps of the sequence it reads.

    It is empty if the loop has lengths, or if the number of steps run is unknown. With lengths, the loop may end early,
    since all later steps are padding.
    """
    mask, count = analysis.mask, steps_run(analysis.frame)
    if (mask is not None and mask.lengths is not None) or count is None:
        return ()
    words = message(
        f"The loop {analysis.frame.name!r} does not run through all steps of what it reads.",
        expected="as many steps as its input has",
        hint="cut the input to the steps that are run, or dynamic_rnn(sequence_length=)",
    )
    with stacked.graph.as_default():
        return (Condition(count - tf.shape(stacked)[0], 0, words),)


def course_words(course: Course) -> dict[str, Any]:
    """Return the direction and axis order of a loop as keyword arguments of ``Loop``."""
    return {"direction": course.direction, "turned_by": course.turned_by, "time_major": course.time_major}


def common_scope(names: Iterable[str]) -> str:
    """Return the scope that all names share; "" if there is none."""
    paths = [name.split("/")[:-1] for name in names]
    if not paths:
        return ""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def refused(frame: Frame, states: Sequence[Variable], found: Sequence[Read], reason: str, hint: str = "") -> Loop:
    """Return a refused loop, with the reason why its steps cannot be run one by one."""
    words = message(
        f"The loop {frame.name!r} is run by a cell that rnnlens does not know, and its steps cannot be run one by one.",
        got=reason,
        expected="a step that is a function of its input, the states before it and weights, sample by sample",
        hint=hint or 'dynamic_rnn with a cell of tf.nn.rnn_cell or of your own; other layers by layers=["..."]',
    )
    reads = [read for read in found if read.value.dtype.is_floating]
    readers = tuple(read.reader for read in reads[:1] if read.reader is not None)
    source = LoopBoundary((reads[0].stacked,), (readers,), stacked=True) if readers else LoopBoundary(())
    course = course_words(course_of(reads[0].stacked)) if reads else {}
    units = states[0].before.shape[-1] if states[0].before.shape.rank else None
    return Loop(
        frame.name,
        frame.kind,
        LoopCell("unknown", int(units or 0), refused=words),
        tuple(LoopBoundary((v.entry,), ((v.reader,),)) for v in states),
        tuple(LoopBoundary((v.exit,)) for v in states if v.exit is not None),
        source,
        None,
        **course,
    )


def of_a_branch(scope: str) -> Loop:
    """Return a refused loop for a recurrence inside a branch of a condition."""
    words = message(
        f"The recurrence {scope!r} stands in one branch of a tf.cond, and its steps cannot be read from outside.",
        expected="a recurrence that is always run",
        hint="tf.cond around its input or its result: tf.cond(switch, lambda: outputs, lambda: others)",
    )
    return without_steps(scope, scope, 0, words)


def without_steps(name: str, scope: str, units: int, words: str) -> Loop:
    """Return a refused loop of which no step can be read."""
    cell = LoopCell("unknown", units, refused=words)
    return Loop(name, "unrolled", cell, (), (), LoopBoundary(()), None, scope=scope)


#: Operations that run a whole recurrence, or cell; its steps are not in the graph.
_FUSED = frozenset(
    {"BlockLSTM", "BlockLSTMV2", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "LSTMBlockCell", "GRUBlockCell"}
)


def fused(ends: Iterable[Any]) -> list[Loop]:
    """Return a refused loop for each recurrence, or cell, that is a single fused operation."""
    found: dict[str, Loop] = {}
    for op in ancestors(ends):
        if op.type in _FUSED:
            scope = op.name.rpartition("/")[0] or op.name
            words = message(
                f"The recurrence {scope!r} is one operation, and its steps are not in the graph.",
                got=op.type,
                expected="a loop of steps",
                hint="tf.nn.dynamic_rnn with tf.nn.rnn_cell.LSTMCell or GRUCell, on the same weights",
            )
            found.setdefault(scope, without_steps(scope, scope, 0, words))
    return list(found.values())
