"""Sequences, masks, direction and settings of a while loop: what it reads and writes per step, and scalars outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util

from ...errors import message
from .blocks import Outer, constant_of, same
from .recurrences import Condition
from .while_loops import CONDITIONS, Frame, Variable, body_graph

#: Operations that split a sequence into the steps of a loop, with the number of the input that is the sequence.
FILLS = {"TensorArrayScatterV3": 2, "TensorListFromTensor": 0}
#: Operations that read one step, with the number of the input that is the sequence.
_READS = {"TensorArrayReadV3": 2, "TensorListGetItem": 0}


@dataclass(frozen=True, eq=False)
class Read:
    """A time-first tensor ``stacked`` of which the body reads one step at a time, as its tensor ``value``."""

    value: Any
    stacked: Any
    #: Operation, with the number of its input, that reads ``stacked``; None if the body indexes the user's tensor.
    reader: tuple[Any, int] | None


@dataclass(frozen=True, eq=False)
class Written:
    """A tensor that the body writes at each step; ``stacked`` has all steps, or is None if these are never stacked."""

    value: Any
    #: Tensor of the body with the position that is written.
    index: Any
    stacked: Any
    variable: Variable


@dataclass(frozen=True, eq=False)
class Mask:
    """Mask of a loop: the steps beyond ``lengths`` (sample,), or those where ``steps`` (time, sample) is False."""

    lengths: Any = None
    steps: Read | None = None
    #: Whether the condition is True at masked steps.
    inverted: bool = False

    def agrees(self, other: Mask | None) -> bool:
        """Return whether two masks are equal at every step; False for None."""
        if other is None or self.inverted != other.inverted or self.lengths is not other.lengths:
            return False
        return (self.steps and self.steps.stacked) is (other.steps and other.steps.stacked)


def steps_run(frame: Frame) -> Any:
    """Return the number of steps that a loop runs, as a number or a tensor outside; None if it is unknown."""
    if frame.bounds and all(isinstance(bound, np.ndarray) for bound in frame.bounds):
        return min(int(bound) for bound in frame.bounds)
    with frame.variables[0].entry.graph.as_default():
        if frame.bounds:
            return tf.reduce_min(tf.stack([tf.cast(bound, tf.int32) for bound in frame.bounds]))
        ends = [clock.exit for clock in frame.clocks if clock.exit is not None]
        return tf.cast(ends[0], tf.int32) if ends else None


def sequences(frame: Frame) -> list[Read]:
    """Return the sequences of which a loop's body reads the current step."""
    found = []
    for op in frame.ops:
        axis = _indexed(op, frame)
        if axis is not None:
            tensor, count = frame.outer[id(op.inputs[0])], steps_run(frame)
            with tensor.graph.as_default():
                taken = tensor[:count] if axis == 0 else tensor[:, :count]
                first = taken if axis == 0 else tf.transpose(taken, [1, 0, *range(2, tensor.shape.rank)])
            found.append(Read(op.outputs[0], first, None))
        if op.type not in _READS:
            continue
        filled = frame.outer.get(id(op.inputs[_READS[op.type]]))
        if filled is None or not frame.is_time(op.inputs[1]):
            continue
        fill = same(filled).op
        if fill.type in FILLS:
            found.append(Read(op.outputs[0], fill.inputs[FILLS[fill.type]], (fill, FILLS[fill.type])))
    return found


def _indexed(op: Any, frame: Frame) -> int | None:
    """Return the axis along which an operation selects the current time step, as ``x[:, t]``; None for others."""
    if op.type not in ("StridedSlice", "GatherV2") or id(op.inputs[0]) not in frame.outer:
        return None
    begin = same(op.inputs[1], frame.outer)
    places = begin.op.inputs if begin.op.type == "Pack" else [begin]
    now = list(map(frame.is_time, places))
    if op.type == "GatherV2":
        axis = constant_of(op.inputs[2], frame.outer)
        return int(axis) if now == [True] and axis in (0, 1) and op.inputs[1].shape.rank == 0 else None
    axis = {1: 0, 2: 1}.get(op.get_attr("shrink_axis_mask"))
    wanted = [i == axis for i in range(len(now))]
    others = sum(1 << i for i, at in enumerate(wanted) if not at)
    plain = not op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask")
    kept = op.get_attr("begin_mask") & op.get_attr("end_mask")
    return axis if now == wanted and kept == others and plain else None


#: Operations that write a step: numbers of the inputs with the value, the index and the previous array.
_WRITES = {"TensorArrayWriteV3": (2, 1, 3), "TensorListSetItem": (2, 1, 0)}


def written(frame: Frame) -> list[Written]:
    """Return the tensors that the body writes at each step."""
    found = []
    for variable in frame.variables:
        op = same(variable.after).op
        if op.type in _WRITES:
            value, index, before = (op.inputs[i] for i in _WRITES[op.type])
            if same(before, frame.outer) is variable.before:
                found.append(Written(value, index, _stacked(variable.exit), variable))
    return found


def _stacked(tensor: Any) -> Any:
    waiting = [] if tensor is None else [tensor]
    while waiting:
        for op in waiting.pop(0).consumers():
            if op.type in ("TensorArrayGatherV3", "TensorListStack"):
                return op.outputs[0]
            if op.type in ("Identity", "Exit"):
                waiting.append(op.outputs[0])
    return None


#: Whether a comparison is True at padding, by operation and whether the step's number is its first input.
_BEYOND = {("GreaterEqual", True): True, ("Less", True): False, ("Greater", False): False, ("LessEqual", False): True}


def mask_of(condition: Any, frame: Frame, reads: Sequence[Read]) -> Mask | None:
    """Return the sequence mask behind the condition of a ``select`` in a loop's body; None if it is no mask."""
    condition = same(condition, frame.outer)
    if condition.op.type in ("GreaterEqual", "Greater", "Less", "LessEqual"):
        left, right = (same(t, frame.outer) for t in condition.op.inputs)
        ahead = frame.is_time(left)
        clock, lengths = (left, right) if ahead else (right, left)
        inverted = _BEYOND.get((condition.op.type, ahead))
        outside = frame.kind == "v1" or lengths.graph is not frame.graph
        known = inverted is not None and outside and lengths.shape.rank == 1 and frame.is_time(clock)
        return Mask(lengths=lengths, inverted=bool(inverted)) if known else None
    inverted_by = False
    while condition.op.type in ("Tile", "ExpandDims", "Reshape", "LogicalNot", "BroadcastTo", "Identity", "Squeeze"):
        inverted_by ^= condition.op.type == "LogicalNot"
        condition = condition.op.inputs[0]
    for read in reads:
        if read.value is condition and condition.dtype.name == "bool":
            return Mask(steps=read, inverted=inverted_by)
    return None


def is_filled_with(number: int, tensor: Any, outer: Outer) -> bool:
    """Return whether all elements of a tensor equal this number, 0 or 1."""
    tensor = same(tensor, outer)
    if tensor.op.type in ("ZerosLike", "OnesLike"):
        return bool((tensor.op.type == "OnesLike") == number)
    if tensor.op.type == "Fill":
        return bool(constant_of(tensor.op.inputs[1], outer) == number)
    value = tensor_util.constant_value(tensor) if tensor.op.type == "Const" else None
    return value is not None and bool(np.all(value == number))


def course_of(stacked: Any) -> tuple[Any, dict[str, Any]]:
    """Trace the time-first tensor that a loop reads back to the user's tensor, through reversals and transpositions.

    Returns that tensor, and the direction, the lengths of the reversal and the axis order as arguments of ``Loop``.
    """
    tensor, axis, words = stacked, 0, {"direction": "forward", "turned_by": None}
    while True:
        op, forward = tensor.op, words["direction"] == "forward"
        if op.type == "Transpose" and (was := before_transpose(op, axis)) is not None:
            axis = was
        elif op.type == "ReverseSequence" and op.get_attr("seq_dim") == axis and forward:
            words = {"direction": "backward", "turned_by": op.inputs[1]}
        elif op.type == "ReverseV2" and _turns(op, axis) and forward:
            words = {"direction": "backward", "turned_by": None}
        elif op.type != "Identity":
            return tensor, words | {"time_major": axis == 0}
        tensor = op.inputs[0]


def before_transpose(op: Any, axis: int) -> int | None:
    """Return the input axis, 0 or 1, that a transposition moves to ``axis``; None if it is a later one."""
    order = tensor_util.constant_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if order is not None:
        return int(order[axis]) if int(order[axis]) in (0, 1) else None
    # ``tf.nn.dynamic_rnn`` computes the permutation from the rank: it swaps the first two axes.
    return 1 - axis if rank is None or rank >= 2 else None


def _turns(op: Any, axis: int) -> bool:
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
        self.used: dict[Any, tuple[Any, Any]] = {}

    def value(self, tensor: Any, outer: Outer) -> Any:
        """Return the present value of a scalar setting, such as a dropout rate, that a body reads; None for others."""
        outside = same(tensor, outer)
        if outside.shape.rank != 0 or outside.op._get_control_flow_context() is not None:
            return None
        key = outside.ref()
        if key not in self.used:
            value = self._value_of(outside)
            if value is None:
                return None
            self.used[key] = (outside, value)
        return self.used[key][1]

    def chosen_branch(self, tensor: Any, outer: Outer) -> Any:
        """Return what a ``tf.cond`` returns at the present value of its predicate; None for other tensors."""
        op = tensor.op
        if op.type == "Merge":
            switch = same(op.inputs[0]).op
            taken = self.value(switch.inputs[1], outer) if switch.type == "Switch" else None
            passed = None if taken is None else same(op.inputs[int(taken)]).op
            return passed.inputs[0] if passed is not None and passed.type == "Switch" else None
        if op.type in CONDITIONS and (taken := self.value(op.inputs[0], outer)) is not None:
            branch = op.get_attr("then_branch" if taken else "else_branch").name
            _, given, returned = body_graph(op.graph, branch, op.inputs[1:])
            passed = same(returned[tensor.value_index])
            return next((t for t, p in zip(op.inputs[1:], given, strict=True) if p is passed), None)
        return None

    def conditions(self, loop: str) -> tuple[Condition, ...]:
        """Return the values of the settings that a run must have for the recognised cell to be valid."""
        words = message(
            f"The loop {loop!r} cannot be looked into in training: its states are dropped within it.",
            got="recurrent_dropout, training=True, eager execution disabled",
            hint="training=False; or run eagerly",
        )
        return tuple(Condition(tensor, value, words) for tensor, value in self.used.values())


#: No setting has a value: only constants of the graph are constant.
NO_SETTINGS = GraphSettings()
