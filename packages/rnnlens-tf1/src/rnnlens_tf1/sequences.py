"""Sequences, masks, direction and settings of a while loop: what it reads and writes per step, and scalars outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util

from rnnlens.errors import message

from .blocks import Outer, constant_of, value_source
from .recurrences import Condition
from .while_loops import CONDITIONS, Frame, LoopVariable, body_graph

#: Operations that split a sequence into the steps of a loop, with the number of the input that is the sequence.
FILLS = {"TensorArrayScatterV3": 2, "TensorListFromTensor": 0}
#: Operations that read one step, with the number of the input that is the sequence.
_READS = {"TensorArrayReadV3": 2, "TensorListGetItem": 0}


@dataclass(frozen=True, eq=False)
class SequenceRead:
    """A time-first tensor ``sequence`` of which the body reads one step at a time, as its tensor ``value``."""

    value: Any
    sequence: Any
    #: Operation, with the number of its input, that reads ``sequence``; None if the body indexes the user's tensor.
    reader: tuple[Any, int] | None


@dataclass(frozen=True, eq=False)
class SequenceWrite:
    """A tensor that the body writes at each step; ``sequence`` has all steps, or is None if these are never stacked."""

    value: Any
    #: Tensor of the body with the position that is written.
    index: Any
    sequence: Any
    variable: LoopVariable


@dataclass(frozen=True, eq=False)
class Mask:
    """Mask of a loop: the steps beyond ``lengths`` (sample,), or those where ``steps`` (time, sample) is False."""

    lengths: Any = None
    steps: SequenceRead | None = None
    #: Whether the condition is True at masked steps.
    inverted: bool = False

    def agrees(self, other: Mask | None) -> bool:
        """Return whether two masks are equal at every step; False for None."""
        if other is None or self.inverted != other.inverted or self.lengths is not other.lengths:
            return False
        return (self.steps and self.steps.sequence) is (other.steps and other.steps.sequence)


def step_count(frame: Frame) -> Any:
    """Return the number of steps that a loop runs, as a number or a tensor outside; None if it is unknown."""
    if frame.bounds and all(isinstance(bound, np.ndarray) for bound in frame.bounds):
        return min(int(bound) for bound in frame.bounds)
    with frame.variables[0].entry.graph.as_default():
        if frame.bounds:
            return tf.reduce_min(tf.stack([tf.cast(bound, tf.int32) for bound in frame.bounds]))
        clock_exits = [clock.exit for clock in frame.clocks if clock.exit is not None]
        return tf.cast(clock_exits[0], tf.int32) if clock_exits else None


def read_sequences(frame: Frame) -> list[SequenceRead]:
    """Return the sequences of which a loop's body reads the current step."""
    reads = []
    for op in frame.ops:
        axis = _time_axis(op, frame)
        if axis is not None:
            tensor, count = frame.outer[id(op.inputs[0])], step_count(frame)
            with tensor.graph.as_default():
                steps_read = tensor[:count] if axis == 0 else tensor[:, :count]
                time_first = steps_read if axis == 0 else tf.transpose(steps_read, [1, 0, *range(2, tensor.shape.rank)])
            reads.append(SequenceRead(op.outputs[0], time_first, None))
        if op.type not in _READS:
            continue
        filled_array = frame.outer.get(id(op.inputs[_READS[op.type]]))
        if filled_array is None or not frame.is_time(op.inputs[1]):
            continue
        fill = value_source(filled_array).op
        if fill.type in FILLS:
            reads.append(SequenceRead(op.outputs[0], fill.inputs[FILLS[fill.type]], (fill, FILLS[fill.type])))
    return reads


def _time_axis(op: Any, frame: Frame) -> int | None:
    """Return the axis along which an operation selects the current time step, as ``x[:, t]``; None for others."""
    if op.type not in ("StridedSlice", "GatherV2") or id(op.inputs[0]) not in frame.outer:
        return None
    begin = value_source(op.inputs[1], frame.outer)
    index_tensors = begin.op.inputs if begin.op.type == "Pack" else [begin]
    is_time_index = list(map(frame.is_time, index_tensors))
    if op.type == "GatherV2":
        axis = constant_of(op.inputs[2], frame.outer)
        return int(axis) if is_time_index == [True] and axis in (0, 1) and op.inputs[1].shape.rank == 0 else None
    axis = {1: 0, 2: 1}.get(op.get_attr("shrink_axis_mask"))
    expected = [i == axis for i in range(len(is_time_index))]
    unindexed_mask = sum(1 << i for i, is_indexed in enumerate(expected) if not is_indexed)
    is_plain = not op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask")
    full_axes_mask = op.get_attr("begin_mask") & op.get_attr("end_mask")
    return axis if is_time_index == expected and full_axes_mask == unindexed_mask and is_plain else None


#: Operations that write a step: numbers of the inputs with the value, the index and the previous array.
_WRITES = {"TensorArrayWriteV3": (2, 1, 3), "TensorListSetItem": (2, 1, 0)}


def written_sequences(frame: Frame) -> list[SequenceWrite]:
    """Return the tensors that the body writes at each step."""
    writes = []
    for variable in frame.variables:
        op = value_source(variable.next_value).op
        if op.type in _WRITES:
            value, index, previous_array = (op.inputs[i] for i in _WRITES[op.type])
            if value_source(previous_array, frame.outer) is variable.previous_value:
                writes.append(SequenceWrite(value, index, _stacked_tensor(variable.exit), variable))
    return writes


def _stacked_tensor(tensor: Any) -> Any:
    waiting_tensors = [] if tensor is None else [tensor]
    while waiting_tensors:
        for op in waiting_tensors.pop(0).consumers():
            if op.type in ("TensorArrayGatherV3", "TensorListStack"):
                return op.outputs[0]
            if op.type in ("Identity", "Exit"):
                waiting_tensors.append(op.outputs[0])
    return None


#: Whether a comparison is True at padding, by operation and whether the step's number is its first input.
_BEYOND = {("GreaterEqual", True): True, ("Less", True): False, ("Greater", False): False, ("LessEqual", False): True}


def mask_of(condition: Any, frame: Frame, reads: Sequence[SequenceRead]) -> Mask | None:
    """Return the sequence mask behind the condition of a ``select`` in a loop's body; None if it is no mask."""
    condition = value_source(condition, frame.outer)
    if condition.op.type in ("GreaterEqual", "Greater", "Less", "LessEqual"):
        left, right = (value_source(t, frame.outer) for t in condition.op.inputs)
        clock_is_first = frame.is_time(left)
        clock, lengths = (left, right) if clock_is_first else (right, left)
        inverted = _BEYOND.get((condition.op.type, clock_is_first))
        is_outside = frame.kind == "v1" or lengths.graph is not frame.graph
        is_mask = inverted is not None and is_outside and lengths.shape.rank == 1 and frame.is_time(clock)
        return Mask(lengths=lengths, inverted=bool(inverted)) if is_mask else None
    is_inverted = False
    while condition.op.type in ("Tile", "ExpandDims", "Reshape", "LogicalNot", "BroadcastTo", "Identity", "Squeeze"):
        is_inverted ^= condition.op.type == "LogicalNot"
        condition = condition.op.inputs[0]
    for sequence_read in reads:
        if sequence_read.value is condition and condition.dtype.name == "bool":
            return Mask(steps=sequence_read, inverted=is_inverted)
    return None


def is_filled_with(number: int, tensor: Any, outer: Outer) -> bool:
    """Return whether all elements of a tensor equal this number, 0 or 1."""
    tensor = value_source(tensor, outer)
    if tensor.op.type in ("ZerosLike", "OnesLike"):
        return bool((tensor.op.type == "OnesLike") == number)
    if tensor.op.type == "Fill":
        return bool(constant_of(tensor.op.inputs[1], outer) == number)
    value = tensor_util.constant_value(tensor) if tensor.op.type == "Const" else None
    return value is not None and bool(np.all(value == number))


def find_user_tensor(sequence: Any) -> tuple[Any, dict[str, Any]]:
    """Trace the time-first tensor that a loop reads back to the user's tensor, through reversals and transpositions.

    Returns that tensor, and the direction, the lengths of the reversal and the axis order as arguments of ``Loop``.
    """
    tensor, axis, arguments = sequence, 0, {"direction": "forward", "reversed_lengths": None}
    while True:
        op, forward = tensor.op, arguments["direction"] == "forward"
        if op.type == "Transpose" and (input_axis := axis_before_transpose(op, axis)) is not None:
            axis = input_axis
        elif op.type == "ReverseSequence" and op.get_attr("seq_dim") == axis and forward:
            arguments = {"direction": "backward", "reversed_lengths": op.inputs[1]}
        elif op.type == "ReverseV2" and _reverses_axis(op, axis) and forward:
            arguments = {"direction": "backward", "reversed_lengths": None}
        elif op.type != "Identity":
            return tensor, arguments | {"time_major": axis == 0}
        tensor = op.inputs[0]


def axis_before_transpose(op: Any, axis: int) -> int | None:
    """Return the input axis, 0 or 1, that a transposition moves to ``axis``; None if it is a later one."""
    order = tensor_util.constant_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if order is not None:
        return int(order[axis]) if int(order[axis]) in (0, 1) else None
    # ``tf.nn.dynamic_rnn`` computes the permutation from the rank: it swaps the first two axes.
    return 1 - axis if rank is None or rank >= 2 else None


def _reverses_axis(op: Any, axis: int) -> bool:
    axes = tensor_util.constant_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    return axes is not None and [int(a) % rank if rank else int(a) for a in np.reshape(axes, -1)] == [axis]


class GraphSettings:
    """Scalars outside of the loops that do not depend on data, such as keep probabilities, at their present values.

    ``value_of`` returns the value of such a tensor, None for others.
    """

    def __init__(self, value_of: Callable[[Any], Any] = lambda _: None) -> None:
        self._value_of = value_of
        #: Tensors and values read so far.
        self.used_settings: dict[Any, tuple[Any, Any]] = {}

    def value(self, tensor: Any, outer: Outer) -> Any:
        """Return the present value of a scalar setting, such as a dropout rate, that a body reads; None for others."""
        outside_tensor = value_source(tensor, outer)
        if outside_tensor.shape.rank != 0 or outside_tensor.op._get_control_flow_context() is not None:
            return None
        key = outside_tensor.ref()
        if key not in self.used_settings:
            value = self._value_of(outside_tensor)
            if value is None:
                return None
            self.used_settings[key] = (outside_tensor, value)
        return self.used_settings[key][1]

    def chosen_branch(self, tensor: Any, outer: Outer) -> Any:
        """Return what a ``tf.cond`` returns at the present value of its predicate; None for other tensors."""
        op = tensor.op
        if op.type == "Merge":
            switch = value_source(op.inputs[0]).op
            predicate = self.value(switch.inputs[1], outer) if switch.type == "Switch" else None
            branch_end = None if predicate is None else value_source(op.inputs[int(predicate)]).op
            return branch_end.inputs[0] if branch_end is not None and branch_end.type == "Switch" else None
        if op.type in CONDITIONS and (predicate := self.value(op.inputs[0], outer)) is not None:
            branch = op.get_attr("then_branch" if predicate else "else_branch").name
            _, placeholders, returned = body_graph(op.graph, branch, op.inputs[1:])
            branch_end = value_source(returned[tensor.value_index])
            return next((t for t, p in zip(op.inputs[1:], placeholders, strict=True) if p is branch_end), None)
        return None

    def conditions(self, loop: str) -> tuple[Condition, ...]:
        """Return the values of the settings that a run must have for the recognised cell to be valid."""
        text = message(
            f"The loop {loop!r} cannot be looked into in training: its states are dropped within it.",
            got="recurrent_dropout, training=True, eager execution disabled",
            hint="training=False; or run eagerly",
        )
        return tuple(Condition(tensor, value, text) for tensor, value in self.used_settings.values())


#: No setting has a value: only constants of the graph are constant.
NO_SETTINGS = GraphSettings()
