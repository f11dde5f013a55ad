"""Search for the operation that blocks a gradient between two tensors of a graph, without running the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import ops

from rnnlens.adapters.protocol import Batch, Obstacle, Port

from .blocks import is_variable, transitive_closure
from .boundaries import PortTensors
from .graph_copy import dependency_cone
from .open_net import OpenNet
from .weights import layers_of

_STOPS = ("StopGradient", "PreventGradient")
_PYTHON = ("PyFunc", "PyFuncStateless")
#: Piecewise constant operations, or those that depend on the shape only: their registered gradient is None or zero.
_FLAT = ("Round", "Rint", "Floor", "Ceil", "Sign", "FloorDiv", "FloorMod", "ZerosLike", "OnesLike")
#: Operations whose result depends on shapes only.
_SIZES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
_ASSIGNS = ("Assign", "AssignAdd", "AssignSub", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_STATISTICS = ("moving_mean", "moving_variance")


def find_obstacle(opened: OpenNet, batch: Batch, of: Sequence[Port], wrt: Port) -> Obstacle | None:
    """Return what blocks the gradient from targets to a tensor; None if the graph shows no obstacle."""
    port_tensors = PortTensors(opened, batch)
    targets = [tensor for port in of for tensor in _port_tensors(opened, port_tensors, port, source=False)]
    sources = _port_tensors(opened, port_tensors, wrt, source=True)
    if not sources or not targets:
        return None
    source_refs = {tensor.ref() for tensor in sources}
    integers = [t for t in sources if not (t.dtype.base_dtype.is_floating or t.dtype == tf.resource)]
    if len(integers) == len(sources):
        embedding_names = [
            name for name, layer in layers_of(opened).items() if layer.output is not None and "embed" in name
        ]
        remedy = " or ".join(f'wrt="{name}.output"' for name in embedding_names)
        dtype_name = integers[0].dtype.base_dtype.name
        sentence = f"{integers[0].name} holds integers ({dtype_name}): integers have no derivative."
        sentence += " TensorFlow, 1.8 as today, says None and no more."
        return Obstacle("integer_input", sentence, remedy or "the tensor that it is looked up to, by its name")
    dependent_ops = _dependent_operations(dependency_cone(targets), source_refs)
    if not dependent_ops and not source_refs.intersection(t.ref() for t in targets):
        return _disconnection_obstacle(opened, targets, sources, of, wrt)
    return _main_obstacle(targets, dependent_ops, source_refs)


def _port_tensors(opened: OpenNet, port_tensors: PortTensors, port: Port, *, source: bool) -> list[Any]:
    """Return the tensors of a port as a source or as a target; for a layer with loops all outputs and final states."""
    loops = opened.layer_loops(str(port.layer)) if port.kind == "output" else []
    if not loops:
        return list(port_tensors(port).sources) if source else [port_tensors(port).value]
    boundaries = [b for loop in loops for b in (*loop.final, *([] if loop.output is None else [loop.output]))]
    return [tensor for boundary in boundaries for tensor in boundary.tensors]


def _dependent_operations(operations: Iterable[Any], source_refs: set[Any]) -> set[Any]:
    """Return the operations, of those given, that depend on any of the sources."""
    candidates = {op for op in operations if op.type not in _SIZES}

    def readers(op: Any) -> list[Any]:
        return [reader for tensor in op.outputs for reader in tensor.consumers() if reader in candidates]

    return set(transitive_closure([op for op in candidates if any(t.ref() in source_refs for t in op.inputs)], readers))


def _main_obstacle(targets: Sequence[Any], dependent_ops: set[Any], source_refs: set[Any]) -> Obstacle | None:
    """Walk back through operations that pass gradients; return the main obstacle, None if a source is reached."""
    waiting_tensors, seen_refs, obstacles = [t for t in targets if t.op in dependent_ops], set(), []
    while waiting_tensors:
        tensor = waiting_tensors.pop(0)
        if tensor.ref() in seen_refs:
            continue
        seen_refs.add(tensor.ref())
        obstacle = _operation_obstacle(tensor)
        if obstacle is not None:
            obstacles.append(obstacle)
            continue
        if any(input_tensor.ref() in source_refs for input_tensor in tensor.op.inputs):
            return None
        waiting_tensors += [input_tensor for input_tensor in tensor.op.inputs if input_tensor.op in dependent_ops]
    return min(obstacles, key=lambda obstacle: _ORDER.index(obstacle.code), default=None)


#: Codes of obstacles, the main one first.
_ORDER = ["stop_gradient", "py_func", "no_back_prop", "no_gradient_registered", "integers_on_the_way"]
_ORDER += ["non_differentiable"]


def _operation_obstacle(tensor: Any) -> Obstacle | None:
    """Return how an operation blocks gradients; None if it passes them on."""
    operation, dtype = tensor.op, tensor.dtype.base_dtype
    description = f"{operation.name!r} ({operation.type})"
    if operation.type in _STOPS:
        remedy = "leave it out, or ask for what it returns"
        return Obstacle("stop_gradient", f"tf.stop_gradient stands in the way: {description}.", remedy)
    if operation.type in _PYTHON:
        remedy = "tf.custom_gradient around it, or the same in TensorFlow operations (tf.py_function has gradients)"
        return Obstacle("py_func", f"A Python function stands in the way: {description} has no gradient.", remedy)
    context = operation._get_control_flow_context()
    if operation.type == "Exit" and not getattr(context, "back_prop", True):
        sentence = f"The loop {context.name!r} was built with back_prop=False: TensorFlow kept nothing to go back by."
        remedy = "build it with back_prop=True (swap_memory=True where memory is short)"
        return Obstacle("no_back_prop", sentence, remedy)
    if dtype == tf.bool:
        return Obstacle(
            "non_differentiable", f"A comparison stands in the way: {description} gives yes or no.", _SMOOTH
        )
    if dtype.is_integer or dtype == tf.string:
        sentence = (
            f"Integers stand in the way: {description} gives {dtype.name}, and TensorFlow, 1.8 as today, says None."
        )
        return Obstacle("integers_on_the_way", sentence, _SMOOTH)
    if operation.type in ("OneHot", "Cast") and not operation.inputs[0].dtype.is_floating:
        return None  # the operation that returns the integers is named instead
    if operation.type in _FLAT:
        return Obstacle("non_differentiable", f"{description} is flat: it has no gradient.", _SMOOTH)
    return _unregistered_obstacle(operation, description)


_SMOOTH = "ask for the tensor behind it, or put something smooth in its place (a softmax for argmax, a sigmoid for >)"


def _unregistered_obstacle(operation: Any, description: str) -> Obstacle | None:
    if not operation.inputs or operation.type in ("While", "StatelessWhile", "If", "StatelessIf"):
        return None
    has_custom_gradient = "_gradient_op_type" in operation.node_def.attr  # or it calls a function
    if has_custom_gradient or "PartitionedCall" in operation.type or operation.type == "SymbolicGradient":
        return None
    try:
        gradient_function = ops.gradient_registry.lookup(operation.type)
    except LookupError:
        remedy = "another operation for the same (LSTMCell for LSTMBlockCell)"
        return Obstacle("no_gradient_registered", f"TensorFlow knows no gradient of {description}.", remedy)
    return (
        None
        if gradient_function is not None
        else Obstacle("non_differentiable", f"{description} has no gradient.", _SMOOTH)
    )


def _disconnection_obstacle(
    opened: OpenNet, targets: Sequence[Any], sources: Sequence[Any], of: Sequence[Port], wrt: Port
) -> Obstacle:
    """Return the obstacle for tensors that are connected only by a variable assigned between runs, or not at all."""
    read_ops = {op for op in dependency_cone(targets) if is_variable(op)}
    source_refs = {tensor.ref() for tensor in sources}
    for operation in opened.copy.graph.get_operations():
        if (
            operation.type not in _ASSIGNS
            or operation.name.startswith("rnnlens")
            or operation.inputs[0].op not in read_ops
        ):
            continue
        assigned_value = operation.inputs[1]
        if assigned_value.ref() in source_refs or _dependent_operations(dependency_cone([assigned_value]), source_refs):
            name = operation.inputs[0].op.name
            sentence = f"The value goes through the variable {name!r}, which {operation.name!r} assigns between runs."
            return Obstacle("through_state", sentence, "the tensor that is assigned, in place of the variable")
    source_name = f"{wrt.layer}/{wrt.key}" if wrt.kind == "weight" else sources[0].name
    if wrt.key in _STATISTICS:
        sentence = f"{source_name} is not read here: the layer takes the statistics of the batch itself."
        return Obstacle("batch_statistics", sentence, "feed the phase in which the layer takes what it keeps")
    target_names = ", ".join(dict.fromkeys(_target_name(port) for port in of))
    sentence = f"{source_name} is not on the way to {target_names}: no operation leads from the one to the other."
    return Obstacle("not_on_path", sentence, "leave it out of wrt=, or ask for a target above it")


def _target_name(port: Port) -> str:
    """Return the name of a target in the user's notation, such as "lstm.output"."""
    if port.layer is None:
        return "the loss" if port.kind == "loss" else f"output[{port.index}]" if port.index else "output"
    return port.layer if ":" in port.layer else f"{port.layer}.{port.kind}"
