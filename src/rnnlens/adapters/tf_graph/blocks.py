"""Variables of a graph: their values, and the block of a variable, or the constant, that a tensor equals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util

from ...errors import ModelError, UnsupportedError
from ...typing import Array
from .recurrences import WeightPiece

#: Range (start, stop) along one axis; ``(0, None)`` is the whole axis.
Window = tuple[int, int | None]

_SAME = frozenset({"Identity", "EnsureShape", "ReadVariableOp", "Enter", "RefEnter", "Switch", "PreventGradient"})
#: Operation types of variables.
VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_CUTS = frozenset({"Split", "SplitV", "StridedSlice", "Slice", "Unpack"})


def reached(starts: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return all objects that are reached from some by applying ``following`` again and again, these included."""
    found: dict[int, Any] = {}
    waiting = list(starts)
    while waiting:
        item = waiting.pop()
        if id(item) not in found:
            found[id(item)] = item
            waiting.extend(following(item))
    return list(found.values())


class Source:
    """Mapping from the loop invariants in a loop's body to the tensors outside of it."""

    def __init__(self, pairs: Mapping[int, Any] | None = None) -> None:
        self._pairs = dict(pairs or {})

    def get(self, tensor: Any) -> Any:
        """Return the tensor outside that is passed in as this one; None for a tensor computed in the loop."""
        return self._pairs.get(id(tensor))

    def settled(self, tensor: Any) -> Any:
        """Return the tensor outside that is passed in as this one; a tensor computed in the loop is unchanged."""
        while (outside := self.get(tensor)) is not None:
            tensor = outside
        return tensor

    def __iter__(self) -> Iterator[int]:
        return iter(self._pairs)


@dataclass(frozen=True)
class Block:
    """Block ``variable[rows, columns]`` of a variable.

    ``rows`` is None for a vector, and a number for one row as a vector.
    """

    variable: str
    rows: tuple[int, int] | int | None
    columns: tuple[int, int]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns[1] - self.columns[0]

    @property
    def is_vector(self) -> bool:
        """True for a vector, or a single row of a matrix, such as a bias of shape (1, unit)."""
        return not isinstance(self.rows, tuple) or self.rows[1] - self.rows[0] == 1

    def piece(self, plus: float = 0.0, *, vector: bool = False) -> WeightPiece:
        """Return the block as a part of a weight; ``plus`` is a constant that the graph adds."""
        rows: slice | int | None = slice(*self.rows) if isinstance(self.rows, tuple) else self.rows
        if vector and isinstance(self.rows, tuple):
            rows = self.rows[0]
        return WeightPiece(self.variable, rows, slice(*self.columns), plus)

    def columns_of(self, start: int, stop: int) -> Block:
        """Return the columns ``start:stop`` of the block."""
        return replace(self, columns=(self.columns[0] + start, self.columns[0] + stop))

    def rows_of(self, start: int, stop: int) -> Block:
        """Return the rows ``start:stop`` of the block."""
        assert isinstance(self.rows, tuple)
        return replace(self, rows=(self.rows[0] + start, self.rows[0] + stop))


def variable_of(tensor: Any, outer: Source) -> Any:
    """Return the operation of the variable whose value a tensor is; None if it is no variable."""
    while True:
        tensor = outer.settled(tensor)
        if tensor.op.type in VARIABLES:
            return tensor.op
        if tensor.op.type not in _SAME:
            return None
        tensor = tensor.op.inputs[0]


def block_of(tensor: Any, outer: Source) -> Block | None:
    """Return the block of a variable that a tensor equals; None if it is no such block."""
    if not tensor.dtype.base_dtype.is_floating and tensor.dtype.name != "resource":
        return None
    cuts = []
    while True:
        tensor = outer.settled(tensor)
        op = tensor.op
        if op.type in _SAME:
            tensor = op.inputs[0]
        elif op.type in _CUTS:
            cuts.append(tensor)
            tensor = op.inputs[1] if op.type == "Split" else op.inputs[0]
        else:
            break
    return _cut(tensor.op, cuts) if tensor.op.type in VARIABLES else None


def _cut(variable: Any, cuts: list[Any]) -> Block | None:
    shape = [dim.size for dim in variable.get_attr("shape").dim]
    if len(shape) not in (1, 2) or any(size < 0 for size in shape):
        return None
    rows = (0, shape[0]) if len(shape) == 2 else None
    block = Block(variable.name, rows, (0, shape[-1]))
    for tensor in reversed(cuts):
        window = window_of(tensor)
        if window is None:
            return None
        *before, (start, stop) = window
        if before and isinstance(block.rows, tuple):
            first, last = block.rows
            if isinstance(before[0], int):
                block = replace(block, rows=first + before[0])
            else:
                top, bottom = before[0]
                block = block.rows_of(top, last - first if bottom is None else bottom)
        block = block.columns_of(start, block.width if stop is None else stop)
    return block


def window_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return the range that a slice or split takes along each axis.

    None if it is not constant. An axis that is dropped has one index in place of a range. The last axis always has a
    range.
    """
    op = tensor.op
    if op.type in ("Split", "SplitV", "Unpack"):
        return _part_of(op, tensor.value_index)
    begin = tensor_util.constant_value(op.inputs[1])
    size = tensor_util.constant_value(op.inputs[2])
    if begin is None or size is None:
        return None
    if op.type == "Slice":
        return tuple((int(b), None if s < 0 else int(b + s)) for b, s in zip(begin, size, strict=True))
    return _strided(op, begin, size)


def _part_of(op: Any, index: int) -> tuple[Any, ...] | None:
    source = op.inputs[1] if op.type == "Split" else op.inputs[0]
    rank = source.shape.rank
    if op.type == "Unpack":
        axis = op.get_attr("axis")
    else:
        axis = tensor_util.constant_value(op.inputs[0] if op.type == "Split" else op.inputs[2])
    if rank is None or axis is None:
        return None
    axis = int(axis) % rank
    window: list[Any] = [(0, None)] * rank
    if op.type == "Unpack":
        window[axis] = index
        return tuple(window) if axis != rank - 1 else None
    widths = [out.shape[axis] for out in op.outputs]
    if any(width is None for width in widths):
        return None
    start = sum(int(width) for width in widths[:index])
    window[axis] = (start, start + int(widths[index]))
    return tuple(window)


def _strided(op: Any, begin: Any, end: Any) -> tuple[Any, ...] | None:
    strides, rank = tensor_util.constant_value(op.inputs[3]), op.inputs[0].shape.rank
    if strides is None or rank is None or any(s != 1 for s in strides) or op.get_attr("new_axis_mask"):
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "shrink_axis")}
    window: list[Any] = []
    for i in range(len(begin)):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            window += [(0, None)] * (rank - len(begin) + 1)
        elif masks["shrink_axis"] & bit:
            window.append(int(begin[i]))
        else:
            low = 0 if masks["begin"] & bit else int(begin[i])
            high = None if masks["end"] & bit else int(end[i])
            if low < 0 or (high is not None and high < 0):
                size = op.inputs[0].shape[len(window)]
                if size is None:
                    return None
                low, high = low % size if low < 0 else low, high % size if high is not None and high < 0 else high
            window.append((low, high))
    window += [(0, None)] * (rank - len(window))
    return tuple(window) if isinstance(window[-1], tuple) else None


def behind_identities(tensor: Any) -> Any:
    """Return the tensor behind a chain of Identity operations."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def constant_of(tensor: Any, outer: Source) -> Any:
    """Return the number that a constant tensor has; None if it is not constant or has several elements."""
    tensor = outer.settled(tensor)
    while tensor.op.type in ("Identity", "Enter", "Cast"):
        tensor = outer.settled(tensor.op.inputs[0])
    if tensor.shape.rank not in (0, None) and tensor.shape.num_elements() != 1:
        return None
    value = tensor_util.constant_value(tensor)
    return None if value is None or value.size != 1 else value.reshape(-1)[0]


def is_variable(operation: Any) -> bool:
    """Return whether an operation is a variable, of any dtype."""
    return operation.type in VARIABLES


def dtype_of(operation: Any) -> Any:
    """Return the dtype of the value of a variable."""
    return tf.as_dtype(operation.get_attr("dtype")).base_dtype


def trainable_names(graph: Any) -> frozenset[str]:
    """Return the names of the operations of trainable variables."""
    return frozenset(variable.op.name for variable in graph.get_collection("trainable_variables"))


def read(session: Any, names: Iterable[str]) -> dict[str, Array]:
    """Return the present values of variables in a session, by name of the operation.

    Raise ModelError if a variable is not initialised. Raise UnsupportedError if the graph has no operation that reads a
    resource variable.
    """
    wanted = list(names)
    tensors = [_readable(session.graph.get_operation_by_name(name)) for name in wanted]
    try:
        values = session.run(tensors) if tensors else []
    except tf.errors.FailedPreconditionError as error:
        raise ModelError(
            "A variable of the graph has no value in this session.",
            got=(re.search(r"node ([\w/.-]+)", error.message) or [error.message[:80]] * 2)[1],
            hint="session.run(tf.compat.v1.global_variables_initializer()), or restore a checkpoint first; of a "
            "tf_keras model: model.get_weights(), since Keras sets its variables when they are first read",
        ) from error
    return {name: np.array(value) for name, value in zip(wanted, values, strict=True)}


def _readable(operation: Any) -> Any:
    """Return an existing tensor of the user's graph that is a variable's value. Fetching it must assign nothing."""
    tensor = operation.outputs[0]
    if operation.type != "VarHandleOp":
        return tensor
    for reader in tensor.consumers():
        plain = reader.type == "ReadVariableOp" and not reader.control_inputs
        if plain and reader._get_control_flow_context() is None:
            return reader.outputs[0]
    raise UnsupportedError(
        f"The graph has no operation that reads the variable {operation.name!r}, and none is added to it.",
        expected="tf.compat.v1.get_variable, which makes one",
        hint="variable.read_value(), before the graph is finalised",
    )
