"""Ports in the copy of a graph: their tensors, axis names, and the conversion from run order to (sample, time, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import Batch, Port
from rnnlens.errors import InputError, LayerNotFoundError, RnnlensError, did_you_mean
from rnnlens.layout import Layout, layout_of_axes
from rnnlens.typing import map_leaves
from rnnlens.vocabulary import FEATURE, SAMPLE, TIME, UNIT

from .blocks import dtype_of
from .inputs import feed_of_batch, names_of_inputs
from .losses import loss_in
from .open_net import OpenNet, open_net
from .public import Net
from .recurrences import Block, Loop, LoopBoundary
from .weights import LayerVariables, layers_of


@dataclass(frozen=True)
class ResolvedPort:
    """One port in the copy of a graph: its value, and the tensors by which the loss is differentiated."""

    #: The port's tensor in the layout of the adapter protocol, (sample, time, ...) for a sequence.
    value: Any
    #: Tensors whose gradients :func:`combine_gradients` combines; gradients by copies that follow them are subtracted.
    sources: tuple[Any, ...]
    #: The loop, and its boundary, to which the port belongs; None for other ports.
    loop: Loop | None = None
    boundary: LoopBoundary | None = None
    #: For a weight: its blocks of variables, and the values of these variables, one for each of the sources.
    blocks: tuple[Block, ...] = ()
    variable_values: tuple[Any, ...] = ()
    #: Tensors that differentiation treats as constants, so that the gradient by the port is the direct one.
    stop_tensors: tuple[Any, ...] = ()
    #: For the input of a bidirectional layer: the ports of its two directions.
    direction_ports: tuple[ResolvedPort, ...] = ()


def chronological_tensor(loop: Loop, boundary: LoopBoundary) -> Any:
    """Return the tensor at a boundary of a loop: a chronological sequence (sample, time, unit), or one state."""
    if not boundary.is_sequence and len(boundary.tensors) == 1:
        return _flatten_space(loop, boundary.tensors[0], 1)
    if boundary.last_only:
        return _flatten_space(loop, boundary.tensors[0][-1] if boundary.is_sequence else boundary.tensors[-1], 1)
    if boundary.is_sequence:
        (steps,) = boundary.tensors
        sequence = tf.transpose(steps, [1, 0, *range(2, steps.shape.rank or 3)])
    else:
        sequence = tf.stack(boundary.tensors, axis=1)
    if loop.direction == "backward" and loop.reversed_lengths is None:
        sequence = tf.reverse(sequence, [1])
    elif loop.direction == "backward":
        sequence = tf.reverse_sequence(sequence, tf.cast(loop.reversed_lengths, tf.int64), seq_axis=1, batch_axis=0)
    return _flatten_space(loop, sequence, 2)


def _flatten_space(loop: Loop, tensor: Any, leading_axes: int) -> Any:
    """Flatten images of a cell of unknown equations: (..., *space, channel) to (..., channel * space)."""
    rank = tensor.shape.rank
    if loop.cell.body is None or rank == leading_axes + 1:
        return tensor
    channels_first = tf.transpose(tensor, [*range(leading_axes), rank - 1, *range(leading_axes, rank - 1)])
    return tf.reshape(
        channels_first, tf.concat([tf.shape(tensor)[:leading_axes], [tensor.shape[leading_axes:].num_elements()]], 0)
    )


class PortTensors:
    """Lookup of ports in the copy of a graph: call it with a port to get its ``ResolvedPort``."""

    def __init__(self, opened: OpenNet, batch: Batch) -> None:
        self._opened, self._batch = opened, batch
        self._layers: dict[str, LayerVariables] = layers_of(opened)

    def __call__(self, port: Port) -> ResolvedPort:
        """Return the tensors of a port. Raise LayerNotFoundError or InputError if there is none."""
        with self._opened.copy.graph.as_default(), tf.name_scope("rnnlens/ports"):
            if port.kind != "weight":
                return self._locate_model_port(port) if port.layer is None else self._locate_layer_port(port)
            layer = self._layers.get(str(port.layer), LayerVariables())
            blocks = layer.weight_blocks(port.key, port.direction)
            if not blocks:
                hint = did_you_mean(port.key, list(layer.weights))
                raise LayerNotFoundError(f"There is no weight {port.key!r} in {port.layer!r}.", hint=hint)
            return weight_port(self._opened.copy.graph, blocks)

    def _locate_model_port(self, port: Port) -> ResolvedPort:
        if port.kind == "loss":
            loss = loss_in(self._opened.net, self._opened.copy, self._batch).tensor
            return ResolvedPort(loss, (loss,))
        if port.kind == "output":
            if port.index >= len(self._opened.outputs):
                known_names = ", ".join(self._opened.net.outputs) or "none: rl.tf1.graph(..., outputs={...})"
                raise InputError(f"The graph has no output number {port.index}.", expected=known_names)
            output = self._opened.outputs[port.index]
            return ResolvedPort(output, (output,))
        if port.kind == "input":
            names = names_of_inputs(self._opened.net, self._batch.x)
            input_tensors = self._opened.inputs[list(self._opened.net.inputs).index(names[port.index])]
            return ResolvedPort(input_tensors[0], input_tensors)
        raise InputError(f"A graph has no {port.kind}.", hint="name a recurrent layer")

    def _locate_layer_port(self, port: Port) -> ResolvedPort:
        loops = self._opened.layer_loops(str(port.layer))
        if not loops:
            return self._locate_tensor(port)
        if port.direction is not None:
            loops = [loop for loop in loops if loop.direction == port.direction]
        if not loops:
            raise InputError(f"Layer {port.layer!r} does not run {port.direction}.")
        if len(loops) == 1:
            return boundary_port(loops[0], port)
        if port.kind != "input":
            raise InputError(
                f"{port.kind} of the bidirectional layer {port.layer!r} exists once per direction.",
                hint='direction="forward" or direction="backward"',
            )
        # Both directions read the same tensor, in opposite orders.
        direction_ports = tuple(boundary_port(loop, port) for loop in loops)
        return ResolvedPort(direction_ports[0].value, (), direction_ports=direction_ports)

    def _locate_tensor(self, port: Port) -> ResolvedPort:
        """Return the ``ResolvedPort`` of a tensor, given its own name or the scope of the layer that outputs it."""
        name, tensor = str(port.layer), None
        if ":" in name:
            with suppress(KeyError, ValueError):
                tensor = self._opened.copy.tensor(name)
        elif name in self._layers:
            tensor = self._layers[name].output
        if port.kind != "output" or tensor is None:
            known_names = dict.fromkeys([*(loop.name for loop in self._opened.loops), *self._layers])
            raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, known_names))
        return ResolvedPort(_variable_value(tensor), (tensor,))


def weight_port(graph: Any, blocks: tuple[Block, ...]) -> ResolvedPort:
    """Return the ``ResolvedPort`` of a weight: its value, and the variables whose blocks it consists of."""
    sources = [
        graph.get_operation_by_name(name).outputs[0] for name in dict.fromkeys(block.variable for block in blocks)
    ]
    variable_values = tuple(map(_variable_value, sources))
    return ResolvedPort(
        _assemble_weight(blocks, variable_values), tuple(sources), blocks=blocks, variable_values=variable_values
    )


def _assemble_weight(blocks: Sequence[Block], variable_values: Sequence[Any]) -> Any:
    """Assemble a weight, or its gradient, from the tensors of the variables whose blocks it consists of."""
    value_by_name = dict(zip(dict.fromkeys(block.variable for block in blocks), variable_values, strict=True))
    block_values = [block.select_from(value_by_name[block.variable]) for block in blocks]
    return tf.concat(block_values, axis=-1) if len(block_values) > 1 else block_values[0]


def _variable_value(tensor: Any) -> Any:
    """Return the value of a variable, given its handle; any other tensor unchanged."""
    is_handle = tensor.op.type == "VarHandleOp"
    return tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype_of(tensor.op)) if is_handle else tensor


def boundary_port(loop: Loop, port: Port) -> ResolvedPort:
    """Return the tensors of one port of one loop."""
    kind, index = port.kind, port.index if port.kind != "input" else 0
    if loop.kind == "unrolled" and kind == "state_read":
        # State 0 is the output as well, whose port already has its gradient.
        return direct_state_port(loop, index) if index else replace(direct_state_port(loop, 0), sources=())
    if loop.carried_states and kind == "output" and not index:
        return direct_state_port(loop, 0)
    outputs = (loop.output or next(iter(loop.final), None), *loop.final)
    boundaries = {"input": (loop.input,), "output": outputs, "final_state": loop.final, "initial_state": loop.initial}
    boundary = dict(enumerate(boundaries.get(kind, ()))).get(index)
    if boundary is None:
        problem = f"Layer {port.layer!r} has no {kind} number {index - (kind == 'output')}."
        raise InputError(problem, expected=f"0 to {len(loop.final) - 1}")
    stop_tensors = state_tensors(loop) if kind in ("output", "final_state") else ()
    # If only the last state of a loop is read, it is the output too: its gradient is counted once.
    is_counted_already = kind == "final_state" and index == 0 and loop.output is None
    return ResolvedPort(
        chronological_tensor(loop, boundary),
        () if is_counted_already else boundary.tensors,
        loop,
        boundary,
        stop_tensors=stop_tensors,
    )


def direct_state_port(loop: Loop, index: int) -> ResolvedPort:
    """Return the tensors of an unrolled loop's state at every step, by which to differentiate for its direct gradient.

    If the output is fed back to the cell as input, the gradient by what the next step reads is subtracted.
    """
    states = loop.states[index]
    if loop.carried_states and index == 0:
        return ResolvedPort(
            chronological_tensor(loop, states), (*states.tensors, *loop.carried_states[0].tensors), loop, states
        )
    return ResolvedPort(
        chronological_tensor(loop, states), states.tensors, loop, states, stop_tensors=state_tensors(loop)
    )


def state_tensors(loop: Loop) -> tuple[Any, ...]:
    """Return all tensors that an unrolled loop passes from one step to the next; empty for a while loop."""
    return tuple(tensor for boundary in loop.states for tensor in boundary.tensors)


def combine_gradients(resolved: ResolvedPort, gradients: Sequence[Any]) -> Any:
    """Combine the gradients of the tensors behind a port in the layout of its value; return None if all are None."""
    if all(gradient is None for gradient in gradients):
        return None
    if resolved.blocks:
        return _assemble_weight(
            resolved.blocks,
            [_gradient_or_zeros(gradient, t) for gradient, t in zip(gradients, resolved.variable_values, strict=True)],
        )
    if resolved.boundary is None:
        present_gradients = [gradient for gradient in gradients if gradient is not None]
        return tf.add_n(present_gradients) if len(present_gradients) > 1 else present_gradients[0]
    assert resolved.loop is not None
    steps = len(resolved.boundary.tensors)
    next_step_gradients = [*gradients[steps:], *[None] * (2 * steps - len(gradients))]
    gradients = [
        full if gradient is None else full - gradient
        for full, gradient in zip(gradients[:steps], next_step_gradients, strict=True)
    ]
    filled_gradients = [
        _gradient_or_zeros(gradient, tensor)
        for gradient, tensor in zip(gradients, resolved.boundary.tensors, strict=True)
    ]
    if resolved.boundary.last_only:  # with a mask, the output is the state at the last real step
        total = (
            tf.add_n(filled_gradients)
            if not resolved.boundary.is_sequence
            else tf.reduce_sum(filled_gradients[0], axis=0)
        )
        return _flatten_space(resolved.loop, total, 1)
    return chronological_tensor(resolved.loop, replace(resolved.boundary, tensors=tuple(filled_gradients)))


def _gradient_or_zeros(gradient: Any, tensor: Any) -> Any:
    return tf.zeros_like(tensor) if gradient is None else gradient


#: Axes of steps and samples in the inputs of a time-first graph.
_AXES = {TIME: 0, SAMPLE: 1}


def find_layouts(net: Net, batch: Batch, ports: Sequence[Port]) -> dict[Port, Layout]:
    """Return the axis names of inputs and outputs of a time-first graph, found by feeding one more step or sample.

    If the graph rejects the longer input (a shape is fixed, or lengths are fed separately), inputs are (time, sample,
    ...). The result is empty if the loops turn out to read (sample, time, ...).
    """
    opened = open_net(net, batch.seed)
    layout_ports = [Port("input", index=i) for i in range(len(net.inputs))]
    layout_ports += [port for port in ports if port.kind == "output" and not opened.first_call_loops(str(port.layer))]
    shapes = _shapes(opened, batch, layout_ports)
    axis_names: dict[Port, dict[int, tuple[str, ...]]] = {port: {} for port in layout_ports}
    for name, axis in _AXES.items():
        try:
            longer_shapes = _shapes(
                opened, replace(batch, x=map_leaves(partial(_repeat_last, axis=axis), batch.x)), layout_ports
            )
        except RnnlensError:
            longer_shapes = shapes
        if longer_shapes[None][1 - axis] != shapes[None][1 - axis]:
            return {}  # the loop reads samples first, against what the graph suggested
        for port in layout_ports:
            grown_axes = [
                i
                for i, (size, longer_size) in enumerate(zip(shapes[port], longer_shapes[port], strict=True))
                if size != longer_size
            ]
            if len(grown_axes) == 1:
                axis_names[port][grown_axes[0]] = (name,)
            elif port.kind == "input" and len(shapes[port]) > axis:
                axis_names[port][axis] = (name,)
    steps, samples = shapes[layout_ports[0]][:2]
    for (
        port
    ) in layout_ports:  # the graph may take no further sample: the length then shows the sample axis of an output
        shape = shapes[port]
        if (SAMPLE,) not in axis_names[port].values() and len(shape) == 2 and shape[0] == samples != steps:
            axis_names[port][0] = (SAMPLE,)
    last_axis_names = {port: FEATURE if port.kind == "input" else UNIT for port in layout_ports}
    return {port: layout_of_axes(len(shapes[port]), axis_names[port], last_axis_names[port]) for port in layout_ports}


def _shapes(opened: OpenNet, batch: Batch, ports: Sequence[Port]) -> dict[Any, tuple[int, ...]]:
    """Return shapes by port; the key None has the shape (time, sample, feature) of a tensor that a loop reads."""
    port_tensors, feed = PortTensors(opened, batch), feed_of_batch(opened, batch)
    tensors: dict[Any, Any] = {port: port_tensors(port).value for port in ports}
    tensors[None] = next(loop.input.tensors[0] for loop in opened.loops if loop.input.is_sequence)
    values = opened.copy.run(tensors, feed, opened.variable_values(list(tensors.values()), feed))
    return {port: np.shape(value) for port, value in values.items()}


def _repeat_last(leaf: Any, axis: int) -> Any:
    array = np.asarray(leaf)
    return np.concatenate([array, np.take(array, [-1], axis)], axis) if array.ndim > axis else leaf
