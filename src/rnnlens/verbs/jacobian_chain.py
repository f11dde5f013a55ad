"""The graph of a model that is a chain of layers known by type: its links follow from weights and values alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from .. import data
from ..adapters.protocol import Adapter, Batch, ChainLink, Port
from ..recurrence.activations import ACTIVATIONS
from ..results.schema import plain
from ..typing import Array
from .inside import Half, Inside
from .jacobian_graph import Border, Graph, Link


@dataclass
class NoPullback:
    """Stands where nothing has to be asked of the framework."""

    values: dict[Port, Array] = field(default_factory=dict)

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Never needed: every link of a chain is known."""
        raise NotImplementedError

    def __enter__(self) -> NoPullback:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def chain_graph(
    adapter: Adapter, model: Any, batch: Batch, inside: Inside, of: Port | None, wrt: Port | None
) -> Graph | None:
    """The graph, if the adapter knows the model as a chain and what was captured agrees with it; else None."""
    known = getattr(adapter, "chain", None)
    elements = None if known is None else known(model, training=batch.training)
    if elements is None or any(len(both) != 1 for both in inside.halves.values()):
        return None
    chain = _Chain(elements, {name: both[0] for name, both in inside.halves.items()}, batch)
    return chain.graph(of, wrt) if chain.agrees() else None


class _Chain:
    """Values after every layer, computed again from what the recurrent layers returned."""

    def __init__(self, elements: Sequence[ChainLink], halves: Mapping[str, Half], batch: Batch) -> None:
        self.elements, self.halves = list(elements), dict(halves)
        leaves = data.leaves_of(batch.x)
        first = plain(leaves[0]) if len(leaves) == 1 else None
        self.input = None if first is None or first.dtype.kind != "f" else first
        self.before: list[Any] = []
        self.after: list[Any] = []

    def agrees(self) -> bool:
        """Whether every recurrent layer was fed what the chain says."""
        names = [e.name for e in self.elements if e.kind == "recurrent"]
        if names != list(self.halves) or not names:
            return False
        calls = [half.call for half in self.halves.values()]
        dtype = plain(calls[0].input).dtype
        if self.input is not None and self.input.dtype != dtype:
            self.input = self.input.astype(dtype)
        value = self.input
        for element in self.elements:
            self.before.append(value)
            if element.kind == "recurrent":
                call = self.halves[element.name].call
                fed = plain(call.input)
                if value is not None and not np.allclose(fed, value, rtol=1e-4, atol=1e-5):
                    return False
                self.before[-1] = fed
                value = plain(call.output)
            elif element.kind == "table":
                value = None
            elif element.kind == "dense":
                value = None if value is None else _dense(element, value)[1]
            self.after.append(value)
        return True

    def graph(self, of: Port | None, wrt: Port | None) -> Graph | None:
        """Links from the target and from every recurrent layer's input."""
        self._fill_after_tables()
        pullback = NoPullback()
        graph = Graph(list(self.halves.values()), pullback, {})  # type: ignore[arg-type]
        starts: list[tuple[Port, int]] = []
        if of is not None:
            place = self._place(of)
            if place is None:
                return None
            starts.append((of, place))
        for i, element in enumerate(self.elements):
            if element.kind == "recurrent":
                below, *initial = self.halves[element.name].below()
                starts.append((below, i - 1))
                graph.links.update({port: {} for port in initial})
        if wrt is not None and self._value(wrt) is None:
            return None
        for port in [p for p in (of, wrt) if p is not None] + [p for p, _ in starts] + self._outputs():
            value = self._value(port)
            if value is None:
                return None
            graph.borders[port] = Border(port, tuple(value.shape))
            pullback.values[port] = value
        for port, place in starts:
            links = self._links(graph, port, place, wrt)
            if links is None:
                return None
            graph.links[port] = links
        return graph

    def _fill_after_tables(self) -> None:
        """What an embedding returned is what the recurrent layer next to it was fed."""
        for i, element in enumerate(self.elements[:-1]):
            if self.after[i] is None and element.kind in ("table", "same"):
                follower = next((e for e in self.elements[i + 1 :] if e.kind != "same"), None)
                if follower is not None and follower.kind == "recurrent":
                    self.after[i] = plain(self.halves[follower.name].call.input)

    def _outputs(self) -> list[Port]:
        return [half.above()[0] for half in self.halves.values()]

    def _place(self, port: Port) -> int | None:
        """Number of the layer whose output a port is; -1 for the model's input."""
        if port.kind == "input" and port.layer is None and port.index == 0:
            return -1
        if port.kind == "output" and port.layer is None and port.index == 0:
            return len(self.elements) - 1
        names = [e.name for e in self.elements]
        if port.layer not in names or port.index != 0:
            return None
        return names.index(port.layer) - (0 if port.kind == "output" else 1)

    def _value(self, port: Port) -> Any:
        place = self._place(port)
        if place is None:
            return None
        return self.input if place < 0 else self.after[place]

    def _links(self, graph: Graph, source: Port, place: int, wrt: Port | None) -> dict[Port, Link] | None:
        """Walk down from below a source to the next recurrent layer; None if a value on the way is not known."""
        start, block, links = graph.borders[source], None, {}
        for i in range(place, -2, -1):
            element = self.elements[i] if i >= 0 else None
            reached = Port("output", element.name) if element is not None else Port("input")
            recurrent = element is not None and element.kind == "recurrent"
            if reached == wrt or recurrent:
                links[reached] = _as_link(start, graph.borders[reached], block)
            if element is None or recurrent or element.kind == "table":
                break
            if element.kind == "dense":
                if self.before[i] is None:
                    return None
                block = _pull(element, self.before[i], block)
        return links


def _dense(element: ChainLink, value: Array) -> tuple[Array, Array]:
    z = value @ element.kernel
    z = z if element.bias is None else z + element.bias
    return z, ACTIVATIONS[element.activation].value(z, array_namespace(z))


def _pull(element: ChainLink, before: Array, block: Array | None) -> Array:
    """Rows (sample or 1, [time or 1,] row, unit) at a dense layer's output to its input."""
    kernel = element.kernel.T  # type: ignore[union-attr]
    if block is None:
        block = np.eye(kernel.shape[0], dtype=kernel.dtype)[(None,) * (before.ndim - 1)]
    if element.activation != "linear":
        z, a = (v[..., None, :] for v in _dense(element, before))
        block = ACTIVATIONS[element.activation].vjp(z, a, block, array_namespace(z))
    return block @ kernel


def _as_link(source: Border, sink: Border, block: Array | None) -> Link:
    if source.times is not None:
        return Link("local", source, sink, block)
    if block is None:
        block = np.eye(source.features)[None]
    return Link("flat", source, sink, np.broadcast_to(block, (source.samples, *block.shape[1:])))
