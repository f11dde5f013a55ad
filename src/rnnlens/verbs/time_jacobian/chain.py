"""Segments of a model that is a chain of known layers, computed from weights and values without the framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ... import data
from ...adapters.protocol import Batch, ChainLink, Port
from ...recurrence.activations import ACTIVATIONS
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import SAMPLE, TIME
from ..recurrent_layers import ReplayedCall, ReplayedLayers
from .request import JacobianRequest
from .segments import OuterTensor, Segment, SegmentGraph


def known_chain(
    request: JacobianRequest, inside: ReplayedLayers, of: Port | None, wrt: Port | None
) -> SegmentGraph | None:
    """Return the segments around the recurrences if the model is a known chain that fits the captured run."""
    layers = inside.chain or request.adapter.chain(request.model, training=request.batch.training)
    if layers is None or any(len(both) != 1 for both in inside.replayed_calls.values()):
        return None
    chain = _Chain(layers, {name: both[0] for name, both in inside.replayed_calls.items()}, request.batch)
    return chain.surroundings(of, wrt) if chain.agrees(inside.output) else None


class _Chain:
    """A chain of known layers, with the values after every layer, computed from the captured outputs."""

    def __init__(self, layers: Sequence[ChainLink], replayed_calls: Mapping[str, ReplayedCall], batch: Batch) -> None:
        self.layers, self.replayed_calls = list(layers), dict(replayed_calls)
        leaves = data.leaves_of(batch.x)
        first = to_host(leaves[0]) if len(leaves) == 1 else None
        self.input = None if first is None or first.dtype.kind != "f" or not self._is_plain(0) else first
        self.before: list[Any] = []
        self.after: list[Any] = []

    def agrees(self, output: Any) -> bool:
        """Return whether inputs of recurrent layers and the model's output equal what the chain computes for them."""
        names = [e.name for e in self.layers if e.kind == "recurrent"]
        if names != list(self.replayed_calls) or not names:
            return False
        calls = [replayed.call for replayed in self.replayed_calls.values()]
        dtype = to_host(calls[0].input).dtype
        if self.input is not None and self.input.dtype != dtype:
            self.input = self.input.astype(dtype)
        value = self.input
        for layer in self.layers:
            self.before.append(value)
            if layer.kind == "recurrent":
                call = self.replayed_calls[layer.name].call
                got = to_host(call.input)
                if value is not None and not _is_close(got, value):
                    return False
                self.before[-1] = got
                value = to_host(call.output)
            elif layer.kind == "table":
                value = None
            elif value is not None and layer.kind == "dense":
                value = _dense(layer, value)[1]
            elif value is not None and layer.kind == "step":
                value = value[:, layer.step]
            self.after.append(value)
        return value is None or output is None or not self._is_plain(-1) or _is_close(to_host(output), value)

    def _is_plain(self, place: int) -> bool:
        """Return whether the framework's tensor after a layer has samples first, then time."""
        axes = self.layers[place].axes
        return axes[:1] in ((), (SAMPLE,)) and (TIME not in axes or axes[1] == TIME)

    def surroundings(self, of: Port | None, wrt: Port | None) -> SegmentGraph | None:
        """Return the segments below the upper end and below each recurrent layer; None if a value is unknown."""
        if wrt is not None and self._is_bypassed(wrt):
            return None
        self._fill_after_tables()
        values: dict[Port, Array] = {}
        found = SegmentGraph(values)
        starts: list[tuple[Port, int]] = []
        if of is not None:
            place = self._place(of)
            if place is None:
                return None
            starts.append((of, place))
        for i, layer in enumerate(self.layers):
            if layer.kind == "recurrent":
                below, *initial = self.replayed_calls[layer.name].below()
                starts.append((below, i - 1))
                found.segments |= {port: {} for port in initial}
        ends = [port for port in (of, wrt) if port is not None]
        for port in [*ends, *(port for port, _ in starts), *self._outputs()]:
            value = self._value(port)
            if value is None:
                return None
            found.tensors[port], values[port] = OuterTensor(port, tuple(value.shape)), value
        for port, place in starts:
            segments = self._segments(found.tensors, port, place, wrt)
            if segments is None:
                return None
            found.segments[port] = segments
        return found

    def _fill_after_tables(self) -> None:
        """Set the output of an embedding to the captured input of the recurrent layer above it."""
        for i, layer in enumerate(self.layers[:-1]):
            if self.after[i] is None and layer.kind in ("table", "same"):
                follower = next((e for e in self.layers[i + 1 :] if e.kind != "same"), None)
                if follower is not None and follower.kind == "recurrent":
                    self.after[i] = to_host(self.replayed_calls[follower.name].call.input)

    def _outputs(self) -> list[Port]:
        return [replayed.above()[0] for replayed in self.replayed_calls.values()]

    def _place(self, port: Port) -> int | None:
        """Return the index of the layer with this output port; -1 for the model's input.

        None if there is no such layer, several calls of it, or if the framework's tensor has its axes in another order.
        """
        if port.index != 0:
            return None
        if port.layer is None:
            place = -1 if port.kind == "input" else len(self.layers) - 1
            return place if self._is_plain(0 if place < 0 else place) else None
        places = [i for i, layer in enumerate(self.layers) if layer.name == port.layer]
        if len(places) != 1:
            return None
        if self.layers[places[0]].kind != "recurrent" and not self._is_plain(places[0]):
            return None
        return places[0] - (0 if port.kind == "output" else 1)

    def _is_bypassed(self, port: Port) -> bool:
        """Return whether a tensor is the output of a layer whose final state is read instead."""
        pairs = zip(self.layers, self.layers[1:], strict=False)
        return any(port == Port("output", layer.name) and above.is_state for layer, above in pairs)

    def _value(self, port: Port) -> Any:
        place = self._place(port)
        if place is None:
            return None
        return self.input if place < 0 else self.after[place]

    def _segments(
        self, tensors: Mapping[Port, OuterTensor], top: Port, place: int, wrt: Port | None
    ) -> dict[Port, Segment] | None:
        """Return the segments from a tensor down to the next recurrent layer; None if a value is unknown."""
        block, found, step = None, {}, None
        end = None if wrt is None else self._place(wrt)  # what one layer returns the next is fed: one place, two names
        for i in range(place, -2, -1):
            layer = self.layers[i] if i >= 0 else None
            recurrent = layer is not None and layer.kind == "recurrent"
            reached = [wrt] if wrt is not None and i == end else []
            reached += [Port("output", layer.name)] if layer is not None and recurrent else []
            for port in reached:
                found[port] = _segment(tensors[top], tensors[port], block, step)
            if layer is None or recurrent or layer.kind == "table":
                break
            before = self.before[i]
            if layer.kind == "dense":
                if before is None:
                    return None
                block = _pull(layer, before if step is None else before[:, step], block)
            step = layer.step if layer.kind == "step" else step
        return found


def _is_close(value: Array, computed: Array) -> bool:
    return value.shape == computed.shape and np.allclose(value, computed, rtol=1e-4, atol=1e-5, equal_nan=True)


def _dense(layer: ChainLink, value: Array) -> tuple[Array, Array]:
    z = value if layer.kernel is None else value @ layer.kernel
    z = z if layer.bias is None else z + layer.bias
    return z, ACTIVATIONS[layer.activation].value(z, array_namespace(z))


def _pull(layer: ChainLink, before: Array, block: Array | None) -> Array:
    """Pull rows (sample or 1, [time or 1,] row, unit) back from a dense layer's output to its input."""
    if block is None:
        units = before.shape[-1] if layer.kernel is None else layer.kernel.shape[1]
        block = np.eye(units, dtype=before.dtype)[(None,) * (before.ndim - 1)]
    if layer.activation != "linear":
        z, a = (v[..., None, :] for v in _dense(layer, before))
        block = ACTIVATIONS[layer.activation].vjp(z, a, block, array_namespace(z))
    return block if layer.kernel is None else block @ layer.kernel.T


def _segment(above: OuterTensor, below: OuterTensor, block: Array | None, step: int | None) -> Segment:
    if step is not None:
        return Segment("step", above, below, block, step)
    if above.times is not None:
        return Segment("local", above, below, block)
    if block is None:
        block = np.eye(above.features)[None]
    return Segment("flat", above, below, np.broadcast_to(block, (above.samples, *block.shape[1:])))
