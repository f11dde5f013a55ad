"""Search for the recurrences of a graph: each loop behind the outputs or the loss, with boundaries and cell."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tensorflow.python.ops.control_flow_util import IsInCond

from .loop_analysis import LoopAnalysis, output_of
from .loop_recorder import rewire
from .recurrences import Loop, LoopBoundary, without_steps
from .sequences import GraphSettings, course_of, sequences
from .split_loop import refused, split
from .unrolled import unrolled
from .while_loops import CONDITIONS, LOOPS, WHILES, Frame, ancestors, frames_of, types_of

#: Operations that run a whole recurrence, or cell; its steps are not in the graph.
_FUSED = frozenset(
    {"BlockLSTM", "BlockLSTMV2", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "LSTMBlockCell", "GRUBlockCell"}
)


def find(
    graph: Any,
    ends: Iterable[Any],
    value_of: Callable[[Any], Any] = lambda _: None,
    stacks: Sequence[frozenset[str]] = (),
    *,
    may_vary: bool = False,
) -> list[Loop]:
    """Find the recurrent loops among the ancestors of outputs and loss, in the order in which they were built.

    ``value_of`` returns the present value of a scalar such as a keep probability, which is another one in other runs if
    it ``may_vary``. Cells whose variables are a set of ``stacks`` are treated as one recurrence.
    """
    ends = list(ends)
    built = [
        (frame.built, loop)
        for frame in frames_of(graph, ends)
        for loop in _loops(frame, value_of, stacks, may_vary=may_vary)
    ]
    loops = zip((number for number, _ in built), _paired([loop for _, loop in built]), strict=True)
    # An unrolled loop stands where its first state is computed, a refused one last.
    steps = [(int(x.states[0].tensors[0].op._id) if x.states else math.inf, x) for x in unrolled(ends)]
    in_branches = [op.name for op in ancestors(ends) if op.type in CONDITIONS and WHILES & types_of([op])]
    ordered = [loop for _, loop in sorted([*loops, *steps], key=lambda pair: pair[0])]
    return [*ordered, *_fused(ends), *map(_of_a_branch, in_branches)]


def _loops(
    frame: Frame, value_of: Callable[[Any], Any], stacks: Sequence[frozenset[str]], *, may_vary: bool
) -> list[Loop]:
    """Return the recurrences of one while loop. The list is empty for a loop that has no state."""
    if frame.variables and IsInCond(frame.variables[0].reader[0]):
        return [_of_a_branch(frame.name)]
    if any(op.type in LOOPS for op in frame.ops):
        return [refused(frame, frame.floats, sequences(frame), "a loop within its body")] if frame.floats else []
    settings = GraphSettings(value_of)
    analysis = as_set = LoopAnalysis(frame, settings)
    if not analysis.states:
        return []
    if settings.used and (may_vary or not as_set.covered):
        analysis = LoopAnalysis(frame if may_vary else _without_dropout(as_set))
    read = frozenset[str]().union(*(match.cell.variables for match in analysis.matches))
    if len(analysis.matches) > 1 and any(read <= stack for stack in stacks):
        return split(analysis, as_one=True)
    if analysis is as_set or analysis.covered or not as_set.covered:
        return _cells(analysis)
    first, *others = _cells(as_set)
    conditions = (*first.cell.conditions, *settings.conditions(frame.name))
    return [replace(first, cell=replace(first.cell, conditions=conditions)), *others]


def _without_dropout(analysis: LoopAnalysis) -> Frame:
    """Rewrite a loop so that operations read the input of dropout in place of its result, where the rate is now 0."""
    frame, kept = analysis.frame, dict[int, Any]()
    for op in frame.ops:
        # At a rate of 0 dropout's condition "uniform draw >= rate" is always true.
        if op.type in ("Select", "SelectV2") and (analysis.probe.of(op.inputs[0]).numbers == 1.0).all():
            kept[id(op.outputs[0])] = op.inputs[1]
            rewire(op.outputs[0], op.inputs[1])
    return replace(frame, variables=tuple(replace(v, after=kept.get(id(v.after), v.after)) for v in frame.variables))


def _cells(analysis: LoopAnalysis) -> list[Loop]:
    """Return the loop of a single known cell, whose graph need not be rewritten, or the loops that rewriting yields."""
    if len(analysis.matches) != 1 or not analysis.covered:
        return split(analysis)
    match = analysis.matches[0]
    read = next((read for read in analysis.reads if analysis.probe.of(read.value).key == match.source), None)
    output = output_of(analysis, match.after[0])
    if output is None and not any(w.stacked is not None and w.variable.read for w in analysis.writes):
        output = None, "state"
    understood = analysis.mask is not None or analysis.condition is None
    in_one = any(columns is not None for _, columns in analysis.owners)
    if read is None or read.reader is None or output is None or not understood or in_one:
        return split(analysis)
    owners = [analysis.owners[i][0] for i in analysis.numbers(match)]
    loop = Loop(
        analysis.frame.name,
        analysis.frame.kind,
        replace(match.cell, conditions=analysis.runs_through(read.stacked)),
        tuple(LoopBoundary((v.entry,), ((v.reader,),)) for v in owners),
        tuple(LoopBoundary((v.exit,)) for v in owners),
        LoopBoundary((read.stacked,), ((read.reader,),), stacked=True),
        output[0],
        masked_output=output[1],
        scope=match.scope,
        **analysis.mask_words,
        **course_of(read.stacked)[1],
    )
    return [loop]


def _of_a_branch(scope: str) -> Loop:
    """Create the ``Loop`` of a recurrence that cannot be captured because it is inside a branch of a condition."""
    return without_steps(
        scope,
        f"The recurrence {scope!r} stands in one branch of a tf.cond, and its steps cannot be read from outside.",
        expected="a recurrence that is always run",
        hint="tf.cond around its input or its result: tf.cond(switch, lambda: outputs, lambda: others)",
    )


def _fused(ends: Iterable[Any]) -> list[Loop]:
    """Return a ``Loop`` that cannot be captured for each recurrence, or cell, that is a single fused operation."""
    scopes = {op.name.rpartition("/")[0] or op.name: op.type for op in ancestors(ends) if op.type in _FUSED}
    return [
        without_steps(
            scope,
            f"The recurrence {scope!r} is one operation, and its steps are not in the graph.",
            got=kind,
            expected="a loop of steps",
            hint="tf.nn.dynamic_rnn with tf.nn.rnn_cell.LSTMCell or GRUCell, on the same weights",
        )
        for scope, kind in scopes.items()
    ]


#: The rest of a scope; it excludes the numbered cells of a stack, which are not paired.
_WITHIN = r"(?:/(?!cell_\d+$).*)?$"
_HALVES = (
    re.compile(rf"^(?P<stem>.*?)(?:^|/)(?:fw|forward)\w*{_WITHIN}"),
    re.compile(rf"^(?P<stem>.*?)(?:^|/)(?:bw|backward)\w*{_WITHIN}"),
)


def _paired(loops: Sequence[Loop]) -> list[Loop]:
    """Give the two loops of a bidirectional layer a common name."""
    found = list(loops)
    for i, one in enumerate(loops):
        for k, other in enumerate(loops):
            stem = _stem(one, other)
            if stem is not None and not found[i].bidirectional and not found[k].bidirectional:
                found[i] = replace(one, name=stem, bidirectional=True)
                found[k] = replace(other, name=stem, bidirectional=True)
    return found


def _stem(forward: Loop, backward: Loop) -> str | None:
    """Return the common scope of two loops that are directions of one layer; None if they are not."""
    if (forward.direction, backward.direction) != ("forward", "backward"):
        return None
    if forward.cell.cell is not backward.cell.cell or forward.cell.units != backward.cell.units:
        return None
    names = [pattern.match(loop.name) for pattern, loop in zip(_HALVES, (forward, backward), strict=True)]
    if any(name is None for name in names) or len({name["stem"] for name in names if name}) != 1:
        return None
    same_source = course_of(forward.input.tensors[0])[0] is course_of(backward.input.tensors[0])[0]
    return names[0]["stem"] if same_source and names[0] is not None else None
