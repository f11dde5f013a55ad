"""Ports in the copy of a graph: their tensors, axis names, and the conversion from run order to (sample, time, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import InputError, LayerNotFoundError, RnnlensError, did_you_mean
from ...layout import Layout, named
from ...typing import map_leaves
from ...vocabulary import FEATURE, SAMPLE, TIME, UNIT
from ..protocol import Batch, Port
from .blocks import dtype_of
from .inputs import fed, names_of_inputs
from .losses import loss_in
from .open_net import OpenNet, open_net
from .public import Net
from .recurrences import Block, Loop, LoopBoundary
from .weights import LayerVariables, layers_of


@dataclass(frozen=True)
class Spot:
    """One port in the copy of a graph: its value, and the tensors by which the loss is differentiated."""

    #: The port's tensor in the layout of the adapter protocol, (sample, time, ...) for a sequence.
    value: Any
    #: Tensors whose gradients :func:`joined` combines; gradients by copies that follow them are subtracted.
    sources: tuple[Any, ...]
    #: The loop, and its boundary, to which the port belongs; None for other ports.
    loop: Loop | None = None
    boundary: LoopBoundary | None = None
    #: For a weight: its blocks of variables, and the values of these variables, one for each of the sources.
    pieces: tuple[Block, ...] = ()
    wholes: tuple[Any, ...] = ()
    #: Tensors that differentiation treats as constants, so that the gradient by the port is the direct one.
    stop: tuple[Any, ...] = ()
    #: For the input of a bidirectional layer: the ports of its two directions.
    halves: tuple[Spot, ...] = ()


def chronological(loop: Loop, boundary: LoopBoundary) -> Any:
    """Return the tensor at a boundary of a loop: a chronological sequence (sample, time, unit), or one state."""
    if not boundary.stacked and len(boundary.tensors) == 1:
        return _flattened(loop, boundary.tensors[0], 1)
    if boundary.last:
        return _flattened(loop, boundary.tensors[0][-1] if boundary.stacked else boundary.tensors[-1], 1)
    if boundary.stacked:
        (steps,) = boundary.tensors
        found = tf.transpose(steps, [1, 0, *range(2, steps.shape.rank or 3)])
    else:
        found = tf.stack(boundary.tensors, axis=1)
    if loop.direction == "backward" and loop.turned_by is None:
        found = tf.reverse(found, [1])
    elif loop.direction == "backward":
        found = tf.reverse_sequence(found, tf.cast(loop.turned_by, tf.int64), seq_axis=1, batch_axis=0)
    return _flattened(loop, found, 2)


def _flattened(loop: Loop, tensor: Any, lead: int) -> Any:
    """Flatten images of a cell of unknown equations: (..., *space, channel) to (..., channel * space)."""
    rank = tensor.shape.rank
    if loop.cell.body is None or rank == lead + 1:
        return tensor
    first = tf.transpose(tensor, [*range(lead), rank - 1, *range(lead, rank - 1)])
    return tf.reshape(first, tf.concat([tf.shape(tensor)[:lead], [tensor.shape[lead:].num_elements()]], 0))


class PortTensors:
    """Lookup of ports in the copy of a graph: call it with a port to get its ``Spot``."""

    def __init__(self, found: OpenNet, batch: Batch) -> None:
        self._opened, self._batch = found, batch
        self._layers: dict[str, LayerVariables] = layers_of(found)

    def __call__(self, port: Port) -> Spot:
        """Return the tensors of a port. Raise LayerNotFoundError or InputError if there is none."""
        with self._opened.copy.graph.as_default(), tf.name_scope("rnnlens/ports"):
            if port.kind != "weight":
                return self._of_model(port) if port.layer is None else self._of_layer(port)
            layer = self._layers.get(str(port.layer), LayerVariables())
            pieces = layer.pieces(port.key, port.direction)
            if not pieces:
                hint = did_you_mean(port.key, list(layer.weights))
                raise LayerNotFoundError(f"There is no weight {port.key!r} in {port.layer!r}.", hint=hint)
            return weight_spot(self._opened.copy.graph, pieces)

    def _of_model(self, port: Port) -> Spot:
        if port.kind == "loss":
            loss = loss_in(self._opened.net, self._opened.copy, self._batch).tensor
            return Spot(loss, (loss,))
        if port.kind == "output":
            if port.index >= len(self._opened.outputs):
                known = ", ".join(self._opened.net.outputs) or "none: rl.tf1.graph(..., outputs={...})"
                raise InputError(f"The graph has no output number {port.index}.", expected=known)
            output = self._opened.outputs[port.index]
            return Spot(output, (output,))
        if port.kind == "input":
            names = names_of_inputs(self._opened.net, self._batch.x)
            alike = self._opened.inputs[list(self._opened.net.inputs).index(names[port.index])]
            return Spot(alike[0], alike)
        raise InputError(f"A graph has no {port.kind}.", hint="name a recurrent layer")

    def _of_layer(self, port: Port) -> Spot:
        loops = self._opened.layer(str(port.layer))
        if not loops:
            return self._of_tensor(port)
        if port.direction is not None:
            loops = [loop for loop in loops if loop.direction == port.direction]
        if not loops:
            raise InputError(f"Layer {port.layer!r} does not run {port.direction}.")
        if len(loops) == 1:
            return at_boundary(loops[0], port)
        if port.kind != "input":
            raise InputError(
                f"{port.kind} of the bidirectional layer {port.layer!r} exists once per direction.",
                hint='direction="forward" or direction="backward"',
            )
        halves = tuple(at_boundary(loop, port) for loop in loops)  # one tensor, which they read in opposite orders
        return Spot(halves[0].value, (), halves=halves)

    def _of_tensor(self, port: Port) -> Spot:
        """Return the ``Spot`` of a tensor, given its own name or the scope of the layer that outputs it."""
        name, tensor = str(port.layer), None
        if ":" in name:
            with suppress(KeyError, ValueError):
                tensor = self._opened.copy.tensor(name)
        elif name in self._layers:
            tensor = self._layers[name].output
        if port.kind != "output" or tensor is None:
            known = dict.fromkeys([*(loop.name for loop in self._opened.loops), *self._layers])
            raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, known))
        return Spot(_read(tensor), (tensor,))


def weight_spot(graph: Any, pieces: tuple[Block, ...]) -> Spot:
    """Return the ``Spot`` of a weight: its value, and the variables whose blocks it consists of."""
    sources = [graph.get_operation_by_name(name).outputs[0] for name in dict.fromkeys(p.variable for p in pieces)]
    wholes = tuple(map(_read, sources))
    return Spot(_assembled(pieces, wholes), tuple(sources), pieces=pieces, wholes=wholes)


def _assembled(pieces: Sequence[Block], wholes: Sequence[Any]) -> Any:
    """Assemble a weight, or its gradient, from the tensors of the variables whose blocks it consists of."""
    by_name = dict(zip(dict.fromkeys(piece.variable for piece in pieces), wholes, strict=True))
    parts = [piece.of(by_name[piece.variable]) for piece in pieces]
    return tf.concat(parts, axis=-1) if len(parts) > 1 else parts[0]


def _read(tensor: Any) -> Any:
    """Return the value of a variable, given its handle; any other tensor unchanged."""
    is_handle = tensor.op.type == "VarHandleOp"
    return tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype_of(tensor.op)) if is_handle else tensor


def at_boundary(loop: Loop, port: Port) -> Spot:
    """Return the tensors of one port of one loop."""
    kind, index = port.kind, port.index if port.kind != "input" else 0
    if loop.kind == "unrolled" and kind == "state_read":
        # State 0 is the output as well, whose port already has its gradient.
        return direct_state(loop, index) if index else replace(direct_state(loop, 0), sources=())
    if loop.carried and kind == "output" and not index:
        return direct_state(loop, 0)
    outputs = (loop.output or next(iter(loop.final), None), *loop.final)
    known = {"input": (loop.input,), "output": outputs, "final_state": loop.final, "initial_state": loop.initial}
    boundary = dict(enumerate(known.get(kind, ()))).get(index)
    if boundary is None:
        what = f"Layer {port.layer!r} has no {kind} number {index - (kind == 'output')}."
        raise InputError(what, expected=f"0 to {len(loop.final) - 1}")
    stop = every_state(loop) if kind in ("output", "final_state") else ()
    # If only the last state of a loop is read, it is the output too: its gradient is counted once.
    counted = kind == "final_state" and index == 0 and loop.output is None
    return Spot(chronological(loop, boundary), () if counted else boundary.tensors, loop, boundary, stop=stop)


def direct_state(loop: Loop, index: int) -> Spot:
    """Return the tensors of an unrolled loop's state at every step, by which to differentiate for its direct gradient.

    If the output is fed back to the cell as input, the gradient by what the next step reads is subtracted.
    """
    states = loop.states[index]
    if loop.carried and index == 0:
        return Spot(chronological(loop, states), (*states.tensors, *loop.carried[0].tensors), loop, states)
    return Spot(chronological(loop, states), states.tensors, loop, states, stop=every_state(loop))


def every_state(loop: Loop) -> tuple[Any, ...]:
    """Return all tensors that an unrolled loop passes from one step to the next; empty for a while loop."""
    return tuple(tensor for boundary in loop.states for tensor in boundary.tensors)


def joined(spot: Spot, parts: Sequence[Any]) -> Any:
    """Combine the gradients of the tensors behind a port in the layout of its value; return None if all are None."""
    if all(part is None for part in parts):
        return None
    if spot.pieces:
        return _assembled(spot.pieces, [_or_zeros(part, t) for part, t in zip(parts, spot.wholes, strict=True)])
    if spot.boundary is None:
        present = [part for part in parts if part is not None]
        return tf.add_n(present) if len(present) > 1 else present[0]
    assert spot.loop is not None
    steps = len(spot.boundary.tensors)
    by_next = [*parts[steps:], *[None] * (2 * steps - len(parts))]
    parts = [full if part is None else full - part for full, part in zip(parts[:steps], by_next, strict=True)]
    filled = [_or_zeros(part, tensor) for part, tensor in zip(parts, spot.boundary.tensors, strict=True)]
    if spot.boundary.last:  # with a mask, the output is the state at the last real step
        total = tf.add_n(filled) if not spot.boundary.stacked else tf.reduce_sum(filled[0], axis=0)
        return _flattened(spot.loop, total, 1)
    return chronological(spot.loop, replace(spot.boundary, tensors=tuple(filled)))


def _or_zeros(gradient: Any, tensor: Any) -> Any:
    return tf.zeros_like(tensor) if gradient is None else gradient


#: Axes of steps and samples in the inputs of a time-first graph.
_AXES = {TIME: 0, SAMPLE: 1}


def layouts(net: Net, batch: Batch, ports: Sequence[Port]) -> dict[Port, Layout]:
    """Return the axis names of inputs and outputs of a time-first graph, found by feeding one more step or sample.

    If the graph rejects the longer input (a shape is fixed, or lengths are fed separately), inputs are (time, sample,
    ...). The result is empty if the loops turn out to read (sample, time, ...).
    """
    found = open_net(net, batch.seed)
    wanted = [Port("input", index=i) for i in range(len(net.inputs))]
    wanted += [port for port in ports if port.kind == "output" and not found.first_call(str(port.layer))]
    shapes = _shapes(found, batch, wanted)
    known: dict[Port, dict[int, tuple[str, ...]]] = {port: {} for port in wanted}
    for name, axis in _AXES.items():
        try:
            longer = _shapes(found, replace(batch, x=map_leaves(partial(_one_more, axis=axis), batch.x)), wanted)
        except RnnlensError:
            longer = shapes
        if longer[None][1 - axis] != shapes[None][1 - axis]:
            return {}  # the loop reads samples first, against what the graph suggested
        for port in wanted:
            grown = [i for i, (old, new) in enumerate(zip(shapes[port], longer[port], strict=True)) if old != new]
            if len(grown) == 1:
                known[port][grown[0]] = (name,)
            elif port.kind == "input" and len(shapes[port]) > axis:
                known[port][axis] = (name,)
    steps, samples = shapes[wanted[0]][:2]
    for port in wanted:  # the graph may take no further sample: the length then shows the sample axis of an output
        shape = shapes[port]
        if (SAMPLE,) not in known[port].values() and len(shape) == 2 and shape[0] == samples != steps:
            known[port][0] = (SAMPLE,)
    last = {port: FEATURE if port.kind == "input" else UNIT for port in wanted}
    return {port: named(len(shapes[port]), known[port], last[port]) for port in wanted}


def _shapes(found: OpenNet, batch: Batch, ports: Sequence[Port]) -> dict[Any, tuple[int, ...]]:
    """Return shapes by port; the key None has the shape (time, sample, feature) of a tensor that a loop reads."""
    spots, feed = PortTensors(found, batch), fed(found, batch)
    tensors: dict[Any, Any] = {port: spots(port).value for port in ports}
    tensors[None] = next(loop.input.tensors[0] for loop in found.loops if loop.input.stacked)
    values = found.copy.run(tensors, feed, found.variables(list(tensors.values()), feed))
    return {port: np.shape(value) for port, value in values.items()}


def _one_more(leaf: Any, axis: int) -> Any:
    array = np.asarray(leaf)
    return np.concatenate([array, np.take(array, [-1], axis)], axis) if array.ndim > axis else leaf
