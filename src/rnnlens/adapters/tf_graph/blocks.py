"""Variables of a graph: their values, and the block of a variable, or the constant, that a tensor equals."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util

from ...errors import ModelError, UnsupportedError
from ...typing import Array
from .recurrences import Block, Convolution

_IDENTITIES = frozenset({"Identity", "Enter", "EnsureShape"})
_READERS = _IDENTITIES | {"ReadVariableOp", "RefEnter", "Switch", "PreventGradient"}
#: Operation types of variables.
VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
#: Operations that take a part of a tensor.
CUTS = frozenset({"Split", "SplitV", "StridedSlice", "Slice", "Unpack"})
#: Operations of convolutions; one along a single axis is computed by Conv2D.
CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})
#: Size of an axis in place of an unknown one, which no slice of a program has as its end.
_ANY_SIZE = 4_999


def reached(starts: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return the transitive closure of some objects under ``following``, the objects themselves included."""
    found: dict[int, Any] = {}
    waiting = list(starts)
    while waiting:
        item = waiting.pop()
        if id(item) not in found:
            found[id(item)] = item
            waiting.extend(following(item))
    return list(found.values())


#: Tensors that have to be known before another one, and a function that then computes it.
Plan = tuple[list[Any], Callable[[], Any]]


def evaluated(tensor: Any, values: dict[int, Any], plan: Callable[[Any], Plan]) -> Any:
    """Compute the value of a tensor after those that it depends on, as ``plan`` returns them; store all by id."""
    waiting, plans = [tensor], dict[int, Plan]()
    while waiting:
        current = waiting[-1]
        if id(current) in values:
            waiting.pop()
            continue
        if id(current) not in plans:
            plans[id(current)] = plan(current)
        needed, compute = plans[id(current)]
        missing = [t for t in needed if id(t) not in values]
        waiting.extend(missing)
        if not missing:
            values[id(current)] = compute()
    return values[id(tensor)]


#: From ids of the loop invariants in a loop's body to the tensors outside of the loop.
Outer = Mapping[int, Any]
NO_LOOP: Outer = {}


def same(tensor: Any, outer: Outer = NO_LOOP, passing: Container[str] = _IDENTITIES) -> Any:
    """Trace a tensor back through loop invariants and operations of the types ``passing``, which keep its value."""
    while (outside := outer.get(id(tensor))) is not None or tensor.op.type in passing:
        tensor = tensor.op.inputs[0] if outside is None else outside
    return tensor


def convolved_by(op: Any) -> tuple[Any, Any, Convolution] | None:
    """Return input, kernel and options of a convolution with channels last; None for another operation."""
    inner = op.inputs[0].op if op.type == "Squeeze" else op
    if inner.type not in CONVOLUTIONS or inner.get_attr("data_format") not in (b"NHWC", b"NDHWC"):
        return None
    flat = int(op.type == "Squeeze")  # along one axis: TensorFlow computes it along two, after ExpandDims
    source, kernel = inner.inputs
    if flat:
        opened = source.op.type == kernel.op.type == "ExpandDims" and list(op.get_attr("squeeze_dims")) in ([1], [-3])
        places = [tensor_util.constant_value(t.op.inputs[1]) for t in inner.inputs] if opened else []
        if not opened or int(places[0]) not in (1, -3) or int(places[1]) not in (0, -4):
            return None
        source, kernel = source.op.inputs[0], kernel.op.inputs[0]
    padding = inner.get_attr("padding").decode().lower()
    strides, dilation = (tuple(inner.get_attr(name)[1 + flat : -1]) for name in ("strides", "dilations"))
    return (source, kernel, Convolution(strides, dilation, padding)) if padding in ("valid", "same") else None


def variable_of(tensor: Any, outer: Outer) -> Any:
    """Return the operation of the variable whose value ``tensor`` is; None if it is not the value of a variable."""
    operation = same(tensor, outer, _READERS).op
    return operation if is_variable(operation) else None


def block_of(tensor: Any, outer: Outer) -> Block | None:
    """Return the block of a weight variable, such as some rows of it, that a tensor equals; None if it equals none.

    Cuts are applied to an uninitialised array of the variable's shape, whose memory shows where the rest lies.
    """
    if not tensor.dtype.base_dtype.is_floating and tensor.dtype.name != "resource":
        return None
    cuts, tensor = [], same(tensor, outer, _READERS)
    while tensor.op.type in CUTS:
        cuts.append(tensor)
        tensor = same(uncut(tensor), outer, _READERS)
    shape = [dim.size for dim in tensor.op.get_attr("shape").dim] if is_variable(tensor.op) else []
    if not 1 <= len(shape) <= 5 or any(size < 0 for size in shape):
        return None
    whole = part = np.empty(shape, np.int8)
    for each in reversed(cuts):
        part = cut(part, each)
        if part is None:
            return None
    window = tuple(shape[:-2])
    if part.ndim != len(shape) and (part.ndim != 1 or window):
        return None
    if not part.size or part.strides != whole.strides[-part.ndim :] or part.shape[: len(window)] != window:
        return None
    first, last = (array.__array_interface__["data"][0] for array in (whole, part))
    row, column = divmod(last - first, shape[-1])
    rows = None if len(shape) == 1 else row if part.ndim == 1 else (row, row + part.shape[-2])
    return Block(tensor.op.name, rows, (column, column + part.shape[-1]), window=window)


def width_of(tensor: Any) -> int | None:
    """Return the length of a tensor's last axis; None if it is unknown."""
    sizes: list[int | None] = tensor.shape.as_list() if tensor.shape.rank else [None]
    return sizes[-1]


def uncut(tensor: Any) -> Any:
    """Return the input of the split or slice operation that outputs ``tensor``."""
    return tensor.op.inputs[1] if tensor.op.type == "Split" else tensor.op.inputs[0]


def cut(array: Any, tensor: Any) -> Any:
    """Apply the split or slice that outputs ``tensor`` to a NumPy array; return None if its indices may vary."""
    op, constant = tensor.op, tensor_util.constant_value
    if op.type == "Unpack":
        return np.moveaxis(array, op.get_attr("axis"), 0)[tensor.value_index]
    if op.type in ("Split", "SplitV"):
        axis = constant(op.inputs[0] if op.type == "Split" else op.inputs[2])
        known = axis is not None and op.outputs[0].shape.rank is not None
        widths = [part.shape.as_list()[int(axis)] if known else None for part in op.outputs]
        if any(width is None for width in widths):
            return None
        start = sum(int(width or 0) for width in widths[: tensor.value_index])
        return np.moveaxis(np.moveaxis(array, axis, 0)[start : start + widths[tensor.value_index]], 0, axis)
    numbers = [constant(t) for t in op.inputs[1:]]
    if any(n is None for n in numbers):
        return None
    if op.type == "Slice":
        return array[tuple(slice(b, None if s < 0 else b + s) for b, s in zip(*numbers, strict=True))]

    def entry(i: int, begin: int, end: int, stride: int) -> Any:
        marked = {name for name in ("begin", "end", "ellipsis", "shrink_axis") if op.get_attr(f"{name}_mask") >> i & 1}
        if "ellipsis" in marked or "shrink_axis" in marked:
            return ... if "ellipsis" in marked else begin
        return slice(None if "begin" in marked else begin, None if "end" in marked else end, stride)

    return None if op.get_attr("new_axis_mask") else array[tuple(map(entry, range(len(numbers[0])), *numbers))]


def columns_of(tensor: Any) -> tuple[int, int] | None:
    """Return the range (start, stop) of the last axis that a split or slice selects; None for other slices."""
    whole, width = uncut(tensor), width_of(uncut(tensor))
    if width is None:
        return None
    others = tuple(size or _ANY_SIZE for size in whole.shape.as_list()[:-1])
    columns = cut(np.broadcast_to(np.arange(width, dtype=np.int32), (*others, width)), tensor)
    if columns is None or columns.shape[:-1] != others or not columns.size or columns.strides[-1] != columns.itemsize:
        return None
    start = int(columns.flat[0])
    return start, start + columns.shape[-1]


def constant_of(tensor: Any, outer: Outer) -> Any:
    """Return the value of a constant tensor of one element; None for any other tensor."""
    tensor = same(tensor, outer, ("Identity", "Enter", "Cast"))
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


def read(session: Any, names: Iterable[str]) -> dict[str, Array]:
    """Return the present values of variables in a session, by operation. Raise ModelError without a value."""
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
    """Return an existing tensor of the user's graph that reads a variable, so that fetching it assigns nothing."""
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
