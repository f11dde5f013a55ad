"""Sequences, masks, direction and settings of a while loop: what it reads and writes per step, and scalars outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util

from ...errors import message
from .blocks import Source, constant_of, same
from .recurrences import Condition
from .while_loops import CONDITIONS, Frame, Variable, body_graph

_READS = frozenset({"TensorArrayReadV3", "TensorListGetItem"})


@dataclass(frozen=True, eq=False)
class Read:
    """A time-first tensor of which the body reads one step at a time.

    ``value`` is the tensor of one step in the body. ``reader`` is the operation, with the number of its input, that
    reads ``stacked``. It is None if the body indexes the user's tensor itself, which other operations may read too.
    """

    value: Any
    stacked: Any
    reader: tuple[Any, int] | None


@dataclass(frozen=True, eq=False)
class Written:
    """A tensor that the body writes at each step; ``stacked`` has all steps, or is None if these are never stacked.

    ``index`` is the tensor of the body with the position that is written.
    """

    value: Any
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
    times = [v.before for v in frame.clocks]
    found = []
    for op in frame.ops:
        axis = _indexed(op, frame, times)
        if axis is not None:
            found.append(Read(op.outputs[0], _taken(frame, frame.outer.get(op.inputs[0]), axis), None))
        if op.type not in _READS:
            continue
        place, source = (1, 2) if op.type == "TensorArrayReadV3" else (1, 0)
        filled = frame.outer.get(op.inputs[source])
        if filled is None or not any(same(op.inputs[place], frame.outer) is t for t in times):
            continue
        filled = same(filled)
        if filled.op.type == "TensorArrayScatterV3":
            found.append(Read(op.outputs[0], filled.op.inputs[2], (filled.op, 2)))
        elif filled.op.type == "TensorListFromTensor":
            found.append(Read(op.outputs[0], filled.op.inputs[0], (filled.op, 0)))
    return found


def _indexed(op: Any, frame: Frame, times: Sequence[Any]) -> int | None:
    """Return the axis along which an operation selects the current time step, as ``x[:, t]``.

    Returns None for other operations.
    """
    if op.type not in ("StridedSlice", "GatherV2") or frame.outer.get(op.inputs[0]) is None:
        return None
    begin = same(op.inputs[1], frame.outer)
    places = begin.op.inputs if begin.op.type == "Pack" else [begin]
    now = [any(same(t, frame.outer) is time for time in times) for t in places]
    if op.type == "GatherV2":
        axis = constant_of(op.inputs[2], frame.outer)
        return int(axis) if now == [True] and axis in (0, 1) and op.inputs[1].shape.rank == 0 else None
    kept = op.get_attr("begin_mask") & op.get_attr("end_mask")
    marks = (op.get_attr("shrink_axis_mask"), kept, op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask"))
    for axis in (0, 1):
        others = sum(1 << i for i in range(len(now)) if i != axis)
        if (
            now == [i == axis for i in range(len(now))]
            and marks[0] == 1 << axis
            and marks[1] == others
            and not marks[2]
        ):
            return axis
    return None


def _taken(frame: Frame, tensor: Any, axis: int) -> Any:
    """Return the sequence (time first) that a loop reads step by step along an axis of ``tensor``."""
    count = steps_run(frame)
    with tensor.graph.as_default():
        taken = tensor[:count] if axis == 0 else tensor[:, :count]
        return taken if axis == 0 else tf.transpose(taken, [1, 0, *range(2, tensor.shape.rank)])


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


def mask_of(condition: Any, frame: Frame, reads: Sequence[Read]) -> Mask | None:
    """Return the sequence mask behind the condition of a ``select`` in a loop's body; None if it is no mask."""
    times = [v.before for v in frame.clocks]
    condition = same(condition, frame.outer)
    if condition.op.type in ("GreaterEqual", "Greater", "Less", "LessEqual"):
        left, right = (same(t, frame.outer) for t in condition.op.inputs)
        ahead = any(left is t for t in times)
        lengths = right if ahead else left
        clock = left if ahead else right
        inverted = {("GreaterEqual", True): True, ("Less", True): False, ("Greater", False): False}
        inverted[("LessEqual", False)] = True
        key = (condition.op.type, ahead)
        known = (
            any(clock is t for t in times)
            and key in inverted
            and (frame.kind == "v1" or lengths.graph is not frame.graph)
        )
        return Mask(lengths=lengths, inverted=inverted[key]) if known and lengths.shape.rank == 1 else None
    inverted_by = False
    while condition.op.type in ("Tile", "ExpandDims", "Reshape", "LogicalNot", "BroadcastTo", "Identity", "Squeeze"):
        inverted_by ^= condition.op.type == "LogicalNot"
        condition = condition.op.inputs[0]
    for read in reads:
        if read.value is condition and condition.dtype.name == "bool":
            return Mask(steps=read, inverted=inverted_by)
    return None


def is_filled_with(number: int, tensor: Any, outer: Source) -> bool:
    """Return whether all elements of a tensor equal this number, 0 or 1."""
    tensor = same(tensor, outer)
    if tensor.op.type in ("ZerosLike", "OnesLike"):
        return bool((tensor.op.type == "OnesLike") == number)
    if tensor.op.type == "Fill":
        return bool(constant_of(tensor.op.inputs[1], outer) == number)
    value = tensor_util.constant_value(tensor) if tensor.op.type == "Const" else None
    return value is not None and bool(np.all(value == number))


@dataclass(frozen=True)
class Course:
    """Direction of a loop: the user's tensor ``source``, the lengths of the reversal, and whether time is first."""

    source: Any
    direction: Literal["forward", "backward"]
    turned_by: Any
    time_major: bool

    @property
    def words(self) -> dict[str, Any]:
        """Direction and axis order as keyword arguments of ``Loop``."""
        return {"direction": self.direction, "turned_by": self.turned_by, "time_major": self.time_major}


def course_of(stacked: Any) -> Course:
    """Trace the time-first tensor that a loop reads back to the user's tensor, through reversals and transpositions."""
    tensor, axis, turned_by = stacked, 0, None
    direction: Literal["forward", "backward"] = "forward"
    while True:
        op = tensor.op
        if op.type == "Identity":
            tensor = op.inputs[0]
        elif op.type == "Transpose" and (was := before_transpose(op, axis)) is not None:
            tensor, axis = op.inputs[0], was
        elif op.type == "ReverseSequence" and op.get_attr("seq_dim") == axis and direction == "forward":
            tensor, direction, turned_by = op.inputs[0], "backward", op.inputs[1]
        elif op.type == "ReverseV2" and _turns(op, axis) and direction == "forward":
            tensor, direction = op.inputs[0], "backward"
        else:
            return Course(tensor, direction, turned_by, axis == 0)


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
    """Scalars outside of the loops that do not depend on data, with their present values.

    Some cells are known at these values only, for example at a keep probability of 1. ``value_of`` returns the value of
    such a tensor, None for others. ``used`` has the values read so far.
    """

    def __init__(self, value_of: Callable[[Any], Any] = lambda _: None) -> None:
        self._value_of = value_of
        self.used: dict[Any, tuple[Any, Any]] = {}

    def value(self, tensor: Any, outer: Source) -> Any:
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

    def chosen_branch(self, tensor: Any, outer: Source) -> Any:
        """Return the branch output that a ``tf.cond`` returns at the present value of its predicate.

        Returns None for other tensors.
        """
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
