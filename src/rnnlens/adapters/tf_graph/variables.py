"""The variables of the user's graph, and their present values, read from his session: all that is run there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import ModelError, UnsupportedError, message
from ...typing import Array

#: Operations that hold the value of a variable.
VARIABLES = frozenset({"VariableV2", "Variable", "VarHandleOp"})


def is_variable(operation: Any) -> bool:
    """Whether an operation holds the value of a variable; of floats, integers or flags."""
    return operation.type in VARIABLES


def dtype_of(operation: Any) -> Any:
    """The dtype of the value of a variable."""
    return tf.as_dtype(operation.get_attr("dtype")).base_dtype


def shape_of(operation: Any) -> tuple[int, ...]:
    """The shape that a variable was made with."""
    return tuple(tf.TensorShape(operation.get_attr("shape")).as_list())


def trainable_names(graph: Any) -> frozenset[str]:
    """Names of the operations of trainable variables."""
    return frozenset(variable.op.name for variable in graph.get_collection("trainable_variables"))


def read(session: Any, names: Iterable[str]) -> dict[str, Array]:
    """Present values by name of the operation.

    Raises
    ------
    ModelError
        If one has none yet.
    UnsupportedError
        If the graph has no operation that reads it.
    """
    wanted = list(names)
    tensors = [_readable(session.graph.get_operation_by_name(name)) for name in wanted]
    try:
        values = session.run(tensors) if tensors else []
    except tf.errors.FailedPreconditionError as error:
        raise ModelError(
            message(
                "A variable of the graph has no value in this session.",
                got=(re.search(r"node ([\w/.-]+)", error.message) or [error.message[:80]] * 2)[1],
                hint="session.run(tf.compat.v1.global_variables_initializer()), or restore a checkpoint first; of a "
                "tf_keras model: model.get_weights(), since Keras sets its variables when they are first read",
            )
        ) from error
    return {name: np.array(value) for name, value in zip(wanted, values, strict=True)}


def _readable(operation: Any) -> Any:
    """A tensor of the user's graph that is the value of a variable, and that assigns nothing when it is fetched."""
    tensor = operation.outputs[0]
    if operation.type != "VarHandleOp":
        return tensor
    for reader in tensor.consumers():
        plain = reader.type == "ReadVariableOp" and not reader.control_inputs
        if plain and reader._get_control_flow_context() is None:
            return reader.outputs[0]
    raise UnsupportedError(
        message(
            f"The graph has no operation that reads the variable {operation.name!r}, and none is added to it.",
            expected="tf.compat.v1.get_variable, which makes one",
            hint="variable.read_value(), before the graph is finalised",
        )
    )
