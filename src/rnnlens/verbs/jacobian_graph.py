"""How cotangents travel outside the recurrences: from an output, or a recurrent layer's input, to what lies below.

The framework differentiates what is not recurrent. Its pullback is cut at every recurrent layer, so that each of these
*links* is free of recurrence, and our sweeps go through the layers. A link is *local* if each step depends on the same
step only: found out on the data itself, never assumed. A local link is a small matrix per step, costing almost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, Port, Pullback
from ..results.schema import plain
from ..typing import Array
from .inside import Half, Inside, like

Kind = Literal["local", "flat", "through"]


@dataclass(frozen=True)
class Border:
    """A tensor outside the recurrences, seen as (sample, time, feature) or (sample, feature).

    ``shape`` is the framework's own; ``swapped`` where that has time before sample (torch without ``batch_first``);
    ``single`` where it has no sample axis at all.
    """

    port: Port
    shape: tuple[int, ...]
    swapped: bool = False
    single: bool = False

    @property
    def samples(self) -> int:
        """Number of samples."""
        return 1 if self.single else self.shape[1 if self.swapped else 0]

    @property
    def times(self) -> int | None:
        """Number of steps; None where there is no time."""
        if self.single:
            return self.shape[0] if len(self.shape) > 1 else None
        if len(self.shape) < 3:
            return None
        return self.shape[0 if self.swapped else 1]

    @property
    def features(self) -> int:
        """Numbers per sample and step."""
        return math.prod(self.shape) // (self.samples * (self.times or 1))

    def rows_out(self, rows: Array) -> Array:
        """(row, sample, [time,] feature) as the framework wants it."""
        if self.swapped and self.times is not None:
            rows = np.moveaxis(rows, 1, 2) if isinstance(rows, np.ndarray) else rows.transpose(1, 2)
        return rows.reshape((rows.shape[0], *self.shape))

    def rows_in(self, rows: Array) -> Array:
        """From the framework, as (row, sample, [time,] feature)."""
        count = rows.shape[0]
        if self.times is None:
            return rows.reshape((count, self.samples, self.features))
        lead = (self.times, self.samples) if self.swapped else (self.samples, self.times)
        rows = rows.reshape((count, *lead, self.features))
        if not self.swapped:
            return rows
        return np.moveaxis(rows, 1, 2) if isinstance(rows, np.ndarray) else rows.transpose(1, 2)


@dataclass
class Link:
    """What lies between two borders.

    ``block``: of a local link (sample or 1, time or 1, source feature, sink feature), None for the identity; of a flat
    link, whose source has no time, (sample, source feature, everything below).
    """

    kind: Kind
    source: Border
    sink: Border
    block: Array | None = None

    @property
    def is_identity(self) -> bool:
        """Whether cotangents pass unchanged."""
        return self.kind == "local" and self.block is None


@dataclass
class Graph:
    """Everything between the target and the tensor differentiated by.

    Attributes
    ----------
    halves
        All recurrent calls, in the order in which they ran.
    links
        By source, what it leads to directly.
    cut
        Whether links end at recurrent layers; if not, the framework goes through these as well.
    """

    halves: list[Half]
    pullback: Pullback
    borders: dict[Port, Border]
    links: dict[Port, dict[Port, Link]] = field(default_factory=dict)
    cut: bool = True

    def reach(self, source: Port) -> dict[Port, Link]:
        """The links that start at ``source``; probed once."""
        if source not in self.links:
            self.links[source] = _probe(self, source)
        return self.links[source]

    def pull(self, source: Port, rows: Array) -> Mapping[Port, Array | None]:
        """(row, sample, [time,] feature) through the framework to every sink."""
        reference = self.pullback.values[source]
        cotangent = like(self.borders[source].rows_out(rows), reference)
        found = self.pullback.vjp({source: cotangent})
        return {p: None if a is None else self.borders[p].rows_in(a) for p, a in found.items()}


def open_graph(adapter: Adapter, model: Any, batch: Batch, inside: Inside, of: Port | None, wrt: Port | None) -> Graph:
    """Run the model once more, ready to differentiate between recurrent layers. Close with ``graph.pullback``."""
    halves = [half for both in inside.halves.values() for half in both]
    sources = list(dict.fromkeys([*([of] if of else []), *(port for half in halves for port in half.below())]))
    above = [port for half in halves for port in half.above()]
    sinks = list(dict.fromkeys([*above, *([wrt] if wrt else [])]))
    return _opened(adapter.pullback(model, batch, sources, sinks, above), halves, of, wrt)


def open_uncut(
    adapter: Adapter, model: Any, batch: Batch, inside: Inside, ends: tuple[Port | None, Port | None], *readers: Port
) -> Graph:
    """Run the model once more, ready to differentiate through everything: recurrences, loops, feedback.

    ``readers``: where gradients enter the recurrence that we differentiate by a state of. Outputs of recurrent layers
    are looked at as well where only they tell which axis counts samples.
    """
    of, wrt = ends
    halves = [half for both in inside.halves.values() for half in both]
    sources = list(dict.fromkeys([*([of] if of else []), *(port for half in halves for port in half.below())]))
    samples = int(halves[0].run.input.shape[0])
    square = any(tuple(leaf.shape[:2]) == (samples, samples) for leaf in data.leaves_of(batch.x))
    outputs = [half.port("output") for half in halves] if square else []
    sinks = list(dict.fromkeys([*readers, *([wrt] if wrt else []), *outputs]))
    graph = _opened(adapter.pullback(model, batch, sources, sinks), halves, of, wrt)
    graph.cut = False
    return graph


def _opened(pullback: Pullback, halves: list[Half], of: Port | None, wrt: Port | None) -> Graph:
    borders = {port: Border(port, tuple(int(n) for n in array.shape)) for port, array in pullback.values.items()}
    graph = Graph(halves, pullback, borders)
    samples = int(halves[0].run.input.shape[0])
    for port in (of, wrt):
        if port is not None and port.layer is None:
            borders[port] = _oriented(graph, port, samples, port is of)
    return graph


def _oriented(graph: Graph, port: Port, samples: int, is_source: bool) -> Border:
    """Which axis of a model's input or output counts samples, where the shape leaves it open."""
    border = graph.borders[port]
    shape = border.shape
    if len(shape) < 2 or (shape[0] != samples and shape[1] != samples):
        return Border(port, shape, single=True) if samples == 1 and shape[0] != 1 else border
    if shape[0] != samples:
        return Border(port, shape, swapped=True)
    if len(shape) < 3 or shape[1] != samples or samples == 1:
        return border
    return Border(port, shape, swapped=_time_first(graph, port, is_source))


def _time_first(graph: Graph, port: Port, is_source: bool) -> bool:
    """Square in its first two axes: see by experiment along which axis the first sample lies."""
    value = plain(graph.pullback.values[port])
    random = np.random.default_rng(0)
    if is_source:
        for axis in (0, 1):
            cotangent = np.zeros((1, *value.shape))
            index: list[Any] = [slice(None)] * cotangent.ndim
            index[1 + axis] = 0
            cotangent[tuple(index)] = random.normal(size=cotangent[tuple(index)].shape)
            found = graph.pullback.vjp({port: like(cotangent, graph.pullback.values[port])})
            arrays = [plain(a)[0] for p, a in found.items() if a is not None and p.layer is not None]
            if arrays and all(not a[1:].any() for a in arrays) and any(a.any() for a in arrays):
                return axis == 1
        return False
    for half in graph.halves:
        source = half.below()[0]
        shape = graph.borders[source].shape
        cotangent = np.zeros((1, *shape))
        cotangent[:, 0] = random.normal(size=shape[1:])
        arrived = graph.pullback.vjp({source: like(cotangent, graph.pullback.values[source])}).get(port)
        if arrived is not None and plain(arrived).any():
            return bool(plain(arrived)[0, 1:].any())
    return False


def _probe(graph: Graph, source: Port) -> dict[Port, Link]:
    """Unit cotangents give the matrices; random ones on half of the steps tell whether these are all there is."""
    border = graph.borders[source]
    units, steps = _unit_rows(border), _step_probes(border)
    found = graph.pull(source, np.concatenate([units, steps[0]]))
    links = {source: Link("local", border, border)} if source in found else {}
    for port, rows in found.items():
        if port == source:
            continue
        if rows is None or not bool((rows != 0).any()):
            continue
        links[port] = _link(border, graph.borders[port], rows, len(units), steps[1])
    return links


def _unit_rows(border: Border) -> Array:
    """One row per feature, on at all steps."""
    n = border.features
    rows = np.zeros((n, border.samples, border.times or 1, n))
    rows[np.arange(n), :, :, np.arange(n)] = 1
    return rows if border.times is not None else rows[:, :, 0]


def _step_probes(border: Border) -> tuple[Array, Array]:
    """Random rows on the steps whose index has bit i set, and on the others: any two steps are told apart."""
    shape = (border.samples, *(() if border.times is None else (border.times,)), border.features)
    if border.times is None or border.times == 1:
        return np.zeros((0, *shape)), np.zeros((0, border.times or 1), dtype=bool)
    bits = (np.arange(border.times)[None, :] >> np.arange((border.times - 1).bit_length())[:, None]) & 1
    on = np.concatenate([bits, 1 - bits]).astype(bool)
    rows = np.random.default_rng(0).normal(size=(len(on), *shape))
    return rows * on[:, None, :, None], on


def _link(source: Border, sink: Border, rows: Array, units: int, on: Array) -> Link:
    if source.times is None:
        return Link("flat", source, sink, _to_samples_first(rows[:units]))
    if sink.times != source.times or not _vanishes_elsewhere(rows[units:], on):
        return Link("through", source, sink)
    block = _move(rows[:units], 0, 2)  # (sample, time, source feature, sink feature)
    if source.features == sink.features and _is_identity(block):
        return Link("local", source, sink)
    same = block[:1, :1]
    return Link("local", source, sink, same if bool((block == same).all()) else block)


def _vanishes_elsewhere(rows: Array, on: Array) -> bool:
    values = plain(rows)
    return not bool((values * ~on[:, None, :, None]).any())


def _is_identity(block: Array) -> bool:
    values = plain(block)
    return bool((values == np.eye(values.shape[-1])).all())


def _to_samples_first(rows: Array) -> Array:
    """(row, sample, ...) to (sample, row, everything else)."""
    moved = _move(rows, 0, 1)
    return moved.reshape((moved.shape[0], moved.shape[1], -1))


def _move(array: Array, source: int, target: int) -> Array:
    return np.moveaxis(array, source, target) if isinstance(array, np.ndarray) else array.movedim(source, target)


def through(graph: Graph, source: Port, field_rows: Array, only: Collection[Port] | None = None) -> dict[Port, Array]:
    """A field of cotangents (sample, row, [time,] feature) at ``source`` to all that it leads to, same layout."""
    links = {p: link for p, link in graph.reach(source).items() if only is None or p in only}
    found = {port: _apply(link, field_rows) for port, link in links.items() if link.kind != "through"}
    rest = [port for port, link in links.items() if link.kind == "through"]
    if rest:
        pulled = graph.pull(source, _move(field_rows, 0, 1))
        for port in rest:
            rows = pulled[port]
            if rows is not None:
                found[port] = like(_move(rows, 0, 1), field_rows)
    return found


def _apply(link: Link, rows: Array) -> Array:
    if link.block is None:
        return rows
    if link.kind == "flat":
        flat = rows @ like(link.block, rows)
        tail = (link.sink.features,) if link.sink.times is None else (link.sink.times, link.sink.features)
        return flat.reshape((*rows.shape[:2], *tail))
    # (sample, time, row, source) @ (sample, time, source, sink)
    return _move(_move(rows, 1, 2) @ like(link.block, rows), 2, 1)


def on_path(graph: Graph, starts: Sequence[Port]) -> set[Port]:
    """Every sink that can be reached from these sources, through recurrent layers too."""
    seen: set[Port] = set()
    waiting = list(starts)
    asked: set[Port] = set()
    while waiting:
        source = waiting.pop()
        if source in asked:
            continue
        asked.add(source)
        for sink in graph.reach(source):
            if sink not in seen:
                seen.add(sink)
                waiting += [p for half in graph.halves if sink in half.above() for p in half.below()]
    return seen
