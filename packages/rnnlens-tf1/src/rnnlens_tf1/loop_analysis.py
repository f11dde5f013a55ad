"""Analysis of one while loop: its states, their updates, the sequences it reads and writes, and its known cells."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from rnnlens.errors import message

from .blocks import CONVOLUTIONS, VARIABLES, Outer, constant_of, value_source, width_of
from .cells import Match, matching_steps
from .probe import COMPUTED, PARTS, Key, Probe
from .recurrences import Condition, LoopBoundary
from .sequences import (
    NO_SETTINGS,
    GraphSettings,
    SequenceRead,
    SequenceWrite,
    is_filled_with,
    mask_of,
    read_sequences,
    step_count,
    written_sequences,
)
from .while_loops import Frame, LoopPaths, LoopVariable

#: Operations of known cells, including those that read variables and sequences.
_IN_CELLS = (COMPUTED - {"Floor"}) | PARTS | CONVOLUTIONS | VARIABLES
_IN_CELLS |= {"Const", "Enter", "RefEnter", "ReadVariableOp", "Switch", "Placeholder"}
_IN_CELLS |= {"TensorArrayReadV3", "TensorListGetItem", "Pack", "Less", "LogicalNot", "Cast"}


class LoopAnalysis:
    """Analysis of a while loop: its states, the operations that update them, and the known cells in these updates.

    ``settings`` replaces scalar tensors, such as keep probabilities, by their present values.
    """

    def __init__(self, frame: Frame, settings: GraphSettings = NO_SETTINGS) -> None:
        self.frame, self.reads, self.writes = frame, read_sequences(frame), written_sequences(frame)
        updates = {id(v): split_select(v.next_value, v.previous_value, frame.outer) for v in frame.floats}
        self.states = _state_variables(frame, updates, self.writes)
        self.paths = LoopPaths(frame, self.states)
        #: A tensor of the body, and whether samples keep their states where it is True; None if states are never kept.
        self.condition = _keep_condition(frame, self.reads, self.paths, [updates[id(v)][1] for v in self.states])
        #: The condition as a mask of steps; None if it is not known to be one.
        self.mask = None if self.condition is None else mask_of(self.condition[0], frame, self.reads)
        #: New value of each state at steps that are not masked, by id of the loop variable.
        self.new_values = {id(v): v.next_value if self.condition is None else updates[id(v)][0] for v in self.states}
        leaf_tensors = [
            *(v.previous_value for v in frame.floats),
            *(sequence_read.value for sequence_read in self.reads),
        ]
        self.probe = Probe([id(t) for t in leaf_tensors], frame.outer, settings)
        #: Quantities of each state before and after the step. A concatenation of several states counts as several.
        self.state_pairs: list[tuple[Key, Key]] = []
        #: Loop variable of each pair, and its columns there (None for all).
        self.pair_owners: list[tuple[LoopVariable, tuple[int, int] | None]] = []
        for variable in self.states:
            old_value = self.probe.value_of(variable.previous_value)
            new_value = self.probe.value_of(self.new_values[id(variable)])
            widths = _state_widths(self.new_values[id(variable)], frame.outer)
            for start, stop in pairwise([0, *accumulate(widths)]) if len(widths) > 1 else [(0, old_value.width)]:
                self.state_pairs.append((old_value.columns(start, stop).key, new_value.columns(start, stop).key))
                self.pair_owners.append((variable, (start, stop) if len(widths) > 1 else None))
        self.matches: list[Match] = []
        free_pairs = set(self.state_pairs)
        for match in matching_steps(self.probe):
            match_pairs = set(zip(match.previous_states, match.new_states, strict=True))
            if match_pairs <= free_pairs:
                self.matches.append(match)
                free_pairs -= match_pairs

    def state_indices(self, match: Match) -> list[int]:
        """Return the indices, among the state pairs (before, after) of the loop, of the states of a recognised cell."""
        return [self.state_pairs.index(pair) for pair in zip(match.previous_states, match.new_states, strict=True)]

    @property
    def mask_arguments(self) -> dict[str, Any]:
        """``lengths`` and ``mask`` as keyword arguments of ``Loop``; empty if the loop has no known mask."""
        if self.mask is None:
            return {}
        steps = None if self.mask.steps is None else flat_mask(self.mask.steps.sequence, self.mask.inverted)
        return {"lengths": self.mask.lengths, "mask": steps}

    def full_length_conditions(self, sequence: Any) -> tuple[Condition, ...]:
        """Return the condition that a run has all steps of ``sequence``; empty if it may end where all is padding."""
        total_steps = step_count(self.frame)
        if (self.mask is not None and self.mask.lengths is not None) or total_steps is None:
            return ()
        text = message(
            f"The loop {self.frame.name!r} does not run through all steps of what it reads.",
            expected="as many steps as its input has",
            hint="cut the input to the steps that are run, or dynamic_rnn(sequence_length=)",
        )
        with sequence.graph.as_default():
            return (Condition(total_steps - tf.shape(sequence)[0], 0, text),)

    @property
    def is_covered(self) -> bool:
        """True if every state belongs to a known cell."""
        return sum(len(match.previous_states) for match in self.matches) == len(self.state_pairs)


def flat_mask(mask: Any, inverted: bool) -> Any:
    """Return a mask as (time, sample) of bool, negated if it is inverted, in the copy."""
    with mask.graph.as_default():
        flat_steps = tf.reshape(mask, tf.shape(mask)[:2]) if mask.shape.rank != 2 else mask
        return tf.logical_not(flat_steps) if inverted else flat_steps


def _state_widths(tensor: Any, outer: Outer) -> list[int]:
    """Return the widths of the states that are concatenated in a tensor; one width for a single state."""
    op = value_source(tensor, outer).op
    if op.type != "ConcatV2" or constant_of(op.inputs[-1], outer) not in (-1, tensor.shape.rank - 1):
        return [width_of(tensor) or 0]
    return [width for state in op.inputs[:-1] for width in _state_widths(state, outer)]


def split_select(update: Any, previous: Any, outer: Outer) -> tuple[Any, tuple[Any, bool] | None]:
    """Split ``select(condition, new, old)`` into the new value and the condition under which the old one is kept.

    The condition is a pair: the tensor, and whether True keeps the old value. It is None for other updates.
    """
    selection = value_source(update, outer)
    if selection.op.type in ("Select", "SelectV2"):
        condition, if_true, if_false = selection.op.inputs
        if value_source(if_true, outer) is previous:
            return if_false, (condition, True)
        if value_source(if_false, outer) is previous:
            return if_true, (condition, False)
    return update, None


def _state_variables(frame: Frame, updates: dict[int, Any], writes: list[SequenceWrite]) -> list[LoopVariable]:
    """Return the loop variables on which the result of some step depends; copies of the previous output are none."""
    new_values = {id(value_source(v.next_value, frame.outer)): updates[id(v)][0] for v in frame.floats}
    targets = [updates[id(v)][0] for v in frame.floats]
    targets += [new_values.get(id(value_source(write.value, frame.outer)), write.value) for write in writes]
    read_ids = {id(v) for target in targets for v in LoopPaths(frame, []).variables_within_step(target)}
    return [v for v in frame.floats if id(v) in read_ids]


def _keep_condition(
    frame: Frame, reads: list[SequenceRead], paths: LoopPaths, keep_conditions: list[tuple[Any, bool] | None]
) -> tuple[Any, bool] | None:
    """Return the one condition per sample under which all states are kept; None if there is none or several."""
    conditions = [pair for pair in keep_conditions if pair is not None]
    if not conditions or len(conditions) != len(keep_conditions):
        return None
    masks = [mask_of(tensor, frame, reads) for tensor, _ in conditions]
    if all(mask is not None and mask.agrees(masks[0]) for mask in masks):
        return (
            conditions[0]
            if masks[0] is not None and all(keeps_where == masks[0].inverted for _, keeps_where in conditions)
            else None
        )
    tensor, keeps_where = conditions[0]
    by_sample = tensor.shape.rank == 1 or (tensor.shape.rank == 2 and tensor.shape[1] == 1)
    if (
        by_sample
        and not paths.depends_on_state(tensor)
        and all(t is tensor and other_keeps_where == keeps_where for t, other_keeps_where in conditions)
    ):
        return tensor, keeps_where
    return None


Output = tuple[LoopBoundary | None, Literal["state", "output", "zero"]]


def stacked_output(analysis: LoopAnalysis, hidden_key: Key) -> Output | None:
    """Return where a hidden state is stacked, and the output at masked steps; None if other numbers are stacked."""
    writes = [w for w in analysis.writes if w.sequence is not None]
    outer, probe = analysis.frame.outer, analysis.probe
    if len(writes) != 1 or not analysis.frame.is_time(writes[0].index):
        return None
    boundary = LoopBoundary((writes[0].sequence,), is_sequence=True)
    value = value_source(writes[0].value, outer)
    if analysis.condition is None:
        return (boundary, "state") if probe.value_of(value).key == hidden_key else None
    if value.op.type not in ("Select", "SelectV2") or analysis.mask is None:
        return None
    condition, if_true, if_false = value.op.inputs
    inverted = probe.value_of(if_false).key == hidden_key
    mask = mask_of(condition, analysis.frame, analysis.reads)
    masked_value = value_source(if_true if inverted else if_false, outer)
    selects_hidden = inverted or probe.value_of(if_true).key == hidden_key
    if not selects_hidden or mask is None or mask.inverted != inverted or not mask.agrees(analysis.mask):
        return None
    if is_filled_with(0, masked_value, outer):
        return boundary, "zero"
    if (probe.value_of(masked_value).key, hidden_key) in analysis.state_pairs:
        return boundary, "state"
    is_previous_output = any(
        masked_value is v.previous_value and is_filled_with(0, v.entry, outer) for v in analysis.frame.floats
    )
    return (boundary, "output") if is_previous_output else None  # the previous output


def unknown_reason(analysis: LoopAnalysis) -> str:
    """Return a text on why a loop's step is not recognised: unsupported operations, or other equations."""
    steps = [analysis.new_values[id(v)] for v in analysis.states]
    unsupported = {op.type: op.name for t in analysis.paths.tensors_behind(steps) if (op := t.op).type not in _IN_CELLS}
    if not unsupported:
        return "its equations are none of those of SimpleRNN, GRU, LSTM and ConvLSTM"
    return "its step has " + ", ".join(f"{kind} ({name!r})" for kind, name in list(unsupported.items())[:3])
