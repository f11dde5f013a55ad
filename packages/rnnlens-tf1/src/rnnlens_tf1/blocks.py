"""Variables of a graph: their values, and the block of a variable, or the constant, that a tensor equals."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_util

from rnnlens.errors import ModelError, UnsupportedError
from rnnlens.typing import Array

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


def transitive_closure(starts: Iterable[Any], successors: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return the transitive closure of some objects under ``successors``, the objects themselves included."""
    items: dict[int, Any] = {}
    waiting_items = list(starts)
    while waiting_items:
        item = waiting_items.pop()
        if id(item) not in items:
            items[id(item)] = item
            waiting_items.extend(successors(item))
    return list(items.values())


#: Tensors that have to be known before another one, and a function that then computes it.
TensorPlan = tuple[list[Any], Callable[[], Any]]


def evaluate(tensor: Any, values: dict[int, Any], make_plan: Callable[[Any], TensorPlan]) -> Any:
    """Compute the value of a tensor after those that it depends on, as ``make_plan`` returns them; store all by id."""
    waiting_tensors, plans = [tensor], dict[int, TensorPlan]()
    while waiting_tensors:
        current_tensor = waiting_tensors[-1]
        if id(current_tensor) in values:
            waiting_tensors.pop()
            continue
        if id(current_tensor) not in plans:
            plans[id(current_tensor)] = make_plan(current_tensor)
        needed, compute = plans[id(current_tensor)]
        missing = [t for t in needed if id(t) not in values]
        waiting_tensors.extend(missing)
        if not missing:
            values[id(current_tensor)] = compute()
    return values[id(tensor)]


#: From ids of the loop invariants in a loop's body to the tensors outside of the loop.
Outer = Mapping[int, Any]
NO_LOOP: Outer = {}


def value_source(tensor: Any, outer: Outer = NO_LOOP, passing_types: Container[str] = _IDENTITIES) -> Any:
    """Trace a tensor back through loop invariants and operations of ``passing_types``, which keep its value."""
    while (outer_tensor := outer.get(id(tensor))) is not None or tensor.op.type in passing_types:
        tensor = tensor.op.inputs[0] if outer_tensor is None else outer_tensor
    return tensor


def convolution_parts(op: Any) -> tuple[Any, Any, Convolution] | None:
    """Return input, kernel and options of a convolution with channels last; None for another operation."""
    conv_op = op.inputs[0].op if op.type == "Squeeze" else op
    if conv_op.type not in CONVOLUTIONS or conv_op.get_attr("data_format") not in (b"NHWC", b"NDHWC"):
        return None
    is_1d = int(op.type == "Squeeze")  # along one axis: TensorFlow computes it along two, after ExpandDims
    source, kernel = conv_op.inputs
    if is_1d:
        is_expanded = source.op.type == kernel.op.type == "ExpandDims" and list(op.get_attr("squeeze_dims")) in (
            [1],
            [-3],
        )
        expanded_axes = [tensor_util.constant_value(t.op.inputs[1]) for t in conv_op.inputs] if is_expanded else []
        if not is_expanded or int(expanded_axes[0]) not in (1, -3) or int(expanded_axes[1]) not in (0, -4):
            return None
        source, kernel = source.op.inputs[0], kernel.op.inputs[0]
    padding = conv_op.get_attr("padding").decode().lower()
    strides, dilation = (tuple(conv_op.get_attr(name)[1 + is_1d : -1]) for name in ("strides", "dilations"))
    return (source, kernel, Convolution(strides, dilation, padding)) if padding in ("valid", "same") else None


def variable_of(tensor: Any, outer: Outer) -> Any:
    """Return the operation of the variable whose value ``tensor`` is; None if it is not the value of a variable."""
    operation = value_source(tensor, outer, _READERS).op
    return operation if is_variable(operation) else None


def block_of(tensor: Any, outer: Outer) -> Block | None:
    """Return the block of a weight variable, such as some rows of it, that a tensor equals; None if it equals none.

    Cuts are applied to an uninitialised array of the variable's shape, whose memory shows where the rest lies.
    """
    if not tensor.dtype.base_dtype.is_floating and tensor.dtype.name != "resource":
        return None
    cuts, tensor = [], value_source(tensor, outer, _READERS)
    while tensor.op.type in CUTS:
        cuts.append(tensor)
        tensor = value_source(slice_input(tensor), outer, _READERS)
    shape = [dim.size for dim in tensor.op.get_attr("shape").dim] if is_variable(tensor.op) else []
    if not 1 <= len(shape) <= 5 or any(size < 0 for size in shape):
        return None
    variable_array = block_array = np.empty(shape, np.int8)
    for cut_tensor in reversed(cuts):
        block_array = apply_slice(block_array, cut_tensor)
        if block_array is None:
            return None
    window = tuple(shape[:-2])
    if block_array.ndim != len(shape) and (block_array.ndim != 1 or window):
        return None
    if (
        not block_array.size
        or block_array.strides != variable_array.strides[-block_array.ndim :]
        or block_array.shape[: len(window)] != window
    ):
        return None
    variable_address, block_address = (array.__array_interface__["data"][0] for array in (variable_array, block_array))
    row, column = divmod(block_address - variable_address, shape[-1])
    rows = None if len(shape) == 1 else row if block_array.ndim == 1 else (row, row + block_array.shape[-2])
    return Block(tensor.op.name, rows, (column, column + block_array.shape[-1]), window=window)


def width_of(tensor: Any) -> int | None:
    """Return the length of a tensor's last axis; None if it is unknown."""
    sizes: list[int | None] = tensor.shape.as_list() if tensor.shape.rank else [None]
    return sizes[-1]


def slice_input(tensor: Any) -> Any:
    """Return the input of the split or slice operation that outputs ``tensor``."""
    return tensor.op.inputs[1] if tensor.op.type == "Split" else tensor.op.inputs[0]


def apply_slice(array: Any, tensor: Any) -> Any:
    """Apply the split or slice that outputs ``tensor`` to a NumPy array; return None if its indices may vary."""
    op, constant = tensor.op, tensor_util.constant_value
    if op.type == "Unpack":
        return np.moveaxis(array, op.get_attr("axis"), 0)[tensor.value_index]
    if op.type in ("Split", "SplitV"):
        axis = constant(op.inputs[0] if op.type == "Split" else op.inputs[2])
        has_axis = axis is not None and op.outputs[0].shape.rank is not None
        widths = [output.shape.as_list()[int(axis)] if has_axis else None for output in op.outputs]
        if any(width is None for width in widths):
            return None
        start = sum(int(width or 0) for width in widths[: tensor.value_index])
        return np.moveaxis(np.moveaxis(array, axis, 0)[start : start + widths[tensor.value_index]], 0, axis)
    indices = [constant(t) for t in op.inputs[1:]]
    if any(n is None for n in indices):
        return None
    if op.type == "Slice":
        return array[tuple(slice(b, None if s < 0 else b + s) for b, s in zip(*indices, strict=True))]

    def index_entry(i: int, begin: int, end: int, stride: int) -> Any:
        flags = {name for name in ("begin", "end", "ellipsis", "shrink_axis") if op.get_attr(f"{name}_mask") >> i & 1}
        if "ellipsis" in flags or "shrink_axis" in flags:
            return ... if "ellipsis" in flags else begin
        return slice(None if "begin" in flags else begin, None if "end" in flags else end, stride)

    return None if op.get_attr("new_axis_mask") else array[tuple(map(index_entry, range(len(indices[0])), *indices))]


def columns_of_slice(tensor: Any) -> tuple[int, int] | None:
    """Return the range (start, stop) of the last axis that a split or slice selects; None for other slices."""
    uncut_tensor, width = slice_input(tensor), width_of(slice_input(tensor))
    if width is None:
        return None
    leading_sizes = tuple(size or _ANY_SIZE for size in uncut_tensor.shape.as_list()[:-1])
    columns = apply_slice(np.broadcast_to(np.arange(width, dtype=np.int32), (*leading_sizes, width)), tensor)
    if (
        columns is None
        or columns.shape[:-1] != leading_sizes
        or not columns.size
        or columns.strides[-1] != columns.itemsize
    ):
        return None
    start = int(columns.flat[0])
    return start, start + columns.shape[-1]


def constant_of(tensor: Any, outer: Outer) -> Any:
    """Return the value of a constant tensor of one element; None for any other tensor."""
    tensor = value_source(tensor, outer, ("Identity", "Enter", "Cast"))
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


def read_variables(session: Any, names: Iterable[str]) -> dict[str, Array]:
    """Return the present values of variables in a session, by operation. Raise ModelError without a value."""
    variable_names = list(names)
    tensors = [_reading_tensor(session.graph.get_operation_by_name(name)) for name in variable_names]
    try:
        values = session.run(tensors) if tensors else []
    except tf.errors.FailedPreconditionError as error:
        raise ModelError(
            "A variable of the graph has no value in this session.",
            got=(re.search(r"node ([\w/.-]+)", error.message) or [error.message[:80]] * 2)[1],
            hint="session.run(tf.compat.v1.global_variables_initializer()), or restore a checkpoint first; of a "
            "tf_keras model: model.get_weights(), since Keras sets its variables when they are first read",
        ) from error
    return {name: np.array(value) for name, value in zip(variable_names, values, strict=True)}


def _reading_tensor(operation: Any) -> Any:
    """Return an existing tensor of the user's graph that reads a variable, so that fetching it assigns nothing."""
    tensor = operation.outputs[0]
    if operation.type != "VarHandleOp":
        return tensor
    for reader in tensor.consumers():
        is_plain_read = reader.type == "ReadVariableOp" and not reader.control_inputs
        if is_plain_read and reader._get_control_flow_context() is None:
            return reader.outputs[0]
    raise UnsupportedError(
        f"The graph has no operation that reads the variable {operation.name!r}, and none is added to it.",
        expected="tf.compat.v1.get_variable, which makes one",
        hint="variable.read_value(), before the graph is finalised",
    )
