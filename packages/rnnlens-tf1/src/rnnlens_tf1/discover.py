"""Search for the recurrences of a graph: each loop behind the outputs or the loss, with boundaries and cell."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tensorflow.python.ops.control_flow_util import IsInCond

from .loop_analysis import LoopAnalysis, stacked_output
from .loop_recorder import rewire
from .recurrences import Loop, LoopBoundary, uncapturable_loop
from .sequences import GraphSettings, find_user_tensor, read_sequences
from .split_loop import refused_loop, split
from .unrolled import unrolled_loops
from .while_loops import CONDITIONS, LOOPS, WHILES, Frame, ancestors, frames_of, types_of

#: Operations that run a whole recurrence, or cell; its steps are not in the graph.
_FUSED = frozenset(
    {"BlockLSTM", "BlockLSTMV2", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "LSTMBlockCell", "GRUBlockCell"}
)


def find_loops(
    graph: Any,
    end_tensors: Iterable[Any],
    value_of: Callable[[Any], Any] = lambda _: None,
    stack_variables: Sequence[frozenset[str]] = (),
    *,
    may_vary: bool = False,
) -> list[Loop]:
    """Find the recurrent loops among the ancestors of outputs and loss, in the order in which they were built.

    ``value_of`` returns the present value of a scalar such as a keep probability, which is another one in other runs if
    it ``may_vary``. Cells whose variables are a set of ``stack_variables`` are treated as one recurrence.
    """
    end_tensors = list(end_tensors)
    built_loops = [
        (frame.first_op_number, loop)
        for frame in frames_of(graph, end_tensors)
        for loop in _frame_loops(frame, value_of, stack_variables, may_vary=may_vary)
    ]
    numbered_loops = zip(
        (number for number, _ in built_loops), _pair_directions([loop for _, loop in built_loops]), strict=True
    )
    # An unrolled loop stands where its first state is computed, a refused one last.
    numbered_unrolled = [
        (int(loop.states[0].tensors[0].op._id) if loop.states else math.inf, loop)
        for loop in unrolled_loops(end_tensors)
    ]
    branch_names = [op.name for op in ancestors(end_tensors) if op.type in CONDITIONS and WHILES & types_of([op])]
    ordered_loops = [loop for _, loop in sorted([*numbered_loops, *numbered_unrolled], key=lambda pair: pair[0])]
    return [*ordered_loops, *_fused_loops(end_tensors), *map(_branch_loop, branch_names)]


def _frame_loops(
    frame: Frame, value_of: Callable[[Any], Any], stack_variables: Sequence[frozenset[str]], *, may_vary: bool
) -> list[Loop]:
    """Return the recurrences of one while loop. The list is empty for a loop that has no state."""
    if frame.variables and IsInCond(frame.variables[0].reader[0]):
        return [_branch_loop(frame.name)]
    if any(op.type in LOOPS for op in frame.ops):
        return (
            [refused_loop(frame, frame.floats, read_sequences(frame), "a loop within its body")] if frame.floats else []
        )
    settings = GraphSettings(value_of)
    analysis = settings_analysis = LoopAnalysis(frame, settings)
    if not analysis.states:
        return []
    if settings.used_settings and (may_vary or not settings_analysis.is_covered):
        analysis = LoopAnalysis(frame if may_vary else _without_dropout(settings_analysis))
    read_names = frozenset[str]().union(*(match.cell.variables for match in analysis.matches))
    if len(analysis.matches) > 1 and any(read_names <= stack for stack in stack_variables):
        return split(analysis, as_one=True)
    if analysis is settings_analysis or analysis.is_covered or not settings_analysis.is_covered:
        return _cell_loops(analysis)
    first_loop, *other_loops = _cell_loops(settings_analysis)
    conditions = (*first_loop.cell.conditions, *settings.conditions(frame.name))
    return [replace(first_loop, cell=replace(first_loop.cell, conditions=conditions)), *other_loops]


def _without_dropout(analysis: LoopAnalysis) -> Frame:
    """Rewrite a loop so that operations read the input of dropout in place of its result, where the rate is now 0."""
    frame, replacements = analysis.frame, dict[int, Any]()
    for op in frame.ops:
        # At a rate of 0 dropout's condition "uniform draw >= rate" is always true.
        if op.type in ("Select", "SelectV2") and (analysis.probe.value_of(op.inputs[0]).numbers == 1.0).all():
            replacements[id(op.outputs[0])] = op.inputs[1]
            rewire(op.outputs[0], op.inputs[1])
    return replace(
        frame,
        variables=tuple(
            replace(v, next_value=replacements.get(id(v.next_value), v.next_value)) for v in frame.variables
        ),
    )


def _cell_loops(analysis: LoopAnalysis) -> list[Loop]:
    """Return the loop of a single known cell, whose graph need not be rewritten, or the loops that rewriting yields."""
    if len(analysis.matches) != 1 or not analysis.is_covered:
        return split(analysis)
    match = analysis.matches[0]
    source_read = next(
        (
            source_read
            for source_read in analysis.reads
            if analysis.probe.value_of(source_read.value).key == match.source
        ),
        None,
    )
    output = stacked_output(analysis, match.new_states[0])
    if output is None and not any(w.sequence is not None and w.variable.is_read for w in analysis.writes):
        output = None, "state"
    is_mask_known = analysis.mask is not None or analysis.condition is None
    is_concatenated = any(columns is not None for _, columns in analysis.pair_owners)
    if source_read is None or source_read.reader is None or output is None or not is_mask_known or is_concatenated:
        return split(analysis)
    state_variables = [analysis.pair_owners[i][0] for i in analysis.state_indices(match)]
    loop = Loop(
        analysis.frame.name,
        analysis.frame.kind,
        replace(match.cell, conditions=analysis.full_length_conditions(source_read.sequence)),
        tuple(LoopBoundary((v.entry,), ((v.reader,),)) for v in state_variables),
        tuple(LoopBoundary((v.exit,)) for v in state_variables),
        LoopBoundary((source_read.sequence,), ((source_read.reader,),), is_sequence=True),
        output[0],
        masked_output=output[1],
        scope=match.scope,
        **analysis.mask_arguments,
        **find_user_tensor(source_read.sequence)[1],
    )
    return [loop]


def _branch_loop(scope: str) -> Loop:
    """Create the ``Loop`` of a recurrence that cannot be captured because it is inside a branch of a condition."""
    return uncapturable_loop(
        scope,
        f"The recurrence {scope!r} stands in one branch of a tf.cond, and its steps cannot be read from outside.",
        expected="a recurrence that is always run",
        hint="tf.cond around its input or its result: tf.cond(switch, lambda: outputs, lambda: others)",
    )


def _fused_loops(end_tensors: Iterable[Any]) -> list[Loop]:
    """Return a ``Loop`` that cannot be captured for each recurrence, or cell, that is a single fused operation."""
    scopes = {op.name.rpartition("/")[0] or op.name: op.type for op in ancestors(end_tensors) if op.type in _FUSED}
    return [
        uncapturable_loop(
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


def _pair_directions(loops: Sequence[Loop]) -> list[Loop]:
    """Give the two loops of a bidirectional layer a common name."""
    paired_loops = list(loops)
    for i, forward in enumerate(loops):
        for k, backward in enumerate(loops):
            stem = _common_stem(forward, backward)
            if stem is not None and not paired_loops[i].bidirectional and not paired_loops[k].bidirectional:
                paired_loops[i] = replace(forward, name=stem, bidirectional=True)
                paired_loops[k] = replace(backward, name=stem, bidirectional=True)
    return paired_loops


def _common_stem(forward: Loop, backward: Loop) -> str | None:
    """Return the common scope of two loops that are directions of one layer; None if they are not."""
    if (forward.direction, backward.direction) != ("forward", "backward"):
        return None
    if forward.cell.cell is not backward.cell.cell or forward.cell.units != backward.cell.units:
        return None
    name_matches = [pattern.match(loop.name) for pattern, loop in zip(_HALVES, (forward, backward), strict=True)]
    if (
        any(name_match is None for name_match in name_matches)
        or len({name_match["stem"] for name_match in name_matches if name_match}) != 1
    ):
        return None
    is_same_source = find_user_tensor(forward.input.tensors[0])[0] is find_user_tensor(backward.input.tensors[0])[0]
    return name_matches[0]["stem"] if is_same_source and name_matches[0] is not None else None
