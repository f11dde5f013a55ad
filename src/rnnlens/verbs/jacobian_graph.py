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

from ..adapters.protocol import Adapter, Batch, Port, Pullback
from ..errors import UnsupportedError, message
from ..layout import Layout, canonical_order
from ..results.schema import plain
from ..typing import Array
from ..vocabulary import SAMPLE, TIME
from .axes import Axes, refuse_unknown, text_of
from .coupling import refusal
from .inside import Half, Inside, like
from .outside import patterns

Kind = Literal["local", "flat", "through"]


@dataclass(frozen=True)
class Border:
    """A tensor outside the recurrences, seen as (sample, time, feature) or (sample, feature).

    ``shape`` is the framework's own, and ``layout`` says how it lies in there: None for samples first, then time.
    ``count`` is the number of samples in the batch.
    """

    port: Port
    shape: tuple[int, ...]
    layout: Layout | None = None
    count: int = 0

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.shape[0] if self.layout is None else self._sizes.get(SAMPLE, 1)

    @property
    def times(self) -> int | None:
        """Number of steps; None where there is no time."""
        if self.layout is not None:
            return self._sizes.get(TIME)
        return self.shape[1] if len(self.shape) > 2 else None

    @property
    def features(self) -> int:
        """Numbers per sample and step."""
        return math.prod(self.shape) // (self.samples * (self.times or 1))

    @property
    def _sizes(self) -> dict[str, int]:
        assert self.layout is not None
        return dict(zip(self.layout.names, self.layout.sizes(self.shape, self.count), strict=True))

    def rows_out(self, rows: Array) -> Array:
        """(row, sample, [time,] feature) as the framework wants it."""
        if self.layout is not None:
            order = canonical_order(self.layout.names)
            sizes = list(self._sizes.values())
            rows = rows.reshape((rows.shape[0], *(sizes[i] for i in order)))
            rows = _permuted(rows, [order.index(i) for i in range(len(order))])
        return rows.reshape((rows.shape[0], *self.shape))

    def rows_in(self, rows: Array) -> Array:
        """From the framework, as (row, sample, [time,] feature)."""
        if self.layout is not None:
            rows = _permuted(self.layout.opened(rows, self.count, lead=1), canonical_order(self.layout.names))
        steps = () if self.times is None else (self.times,)
        return rows.reshape((rows.shape[0], self.samples, *steps, self.features))


def _permuted(rows: Array, order: Sequence[int]) -> Array:
    """Every axis but the first one in another order."""
    axes = (0, *(1 + i for i in order))
    return np.transpose(rows, axes) if isinstance(rows, np.ndarray) else rows.permute(axes)


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


def open_graph(
    adapter: Adapter, model: Any, batch: Batch, inside: Inside, of: Port | None, wrt: Port | None, axes: Axes
) -> Graph:
    """Run the model once more, ready to differentiate between recurrent layers. Close with ``graph.pullback``."""
    halves = [half for both in inside.halves.values() for half in both]
    sources = list(dict.fromkeys([*([of] if of else []), *(port for half in halves for port in half.below())]))
    above = [port for half in halves for port in half.above()]
    sinks = list(dict.fromkeys([*above, *([wrt] if wrt else [])]))
    return _opened(adapter.pullback(model, batch, sources, sinks, above), inside, (of, wrt), batch, axes)


def open_uncut(
    adapter: Adapter,
    model: Any,
    batch: Batch,
    inside: Inside,
    ends: tuple[Port | None, Port | None],
    axes: Axes,
    *readers: Port,
) -> Graph:
    """Run the model once more, ready to differentiate through everything: recurrences, loops, feedback.

    ``readers``: where gradients enter the recurrence that we differentiate by a state of.
    """
    of, wrt = ends
    halves = [half for both in inside.halves.values() for half in both]
    sources = list(dict.fromkeys([*([of] if of else []), *(port for half in halves for port in half.below())]))
    sinks = list(dict.fromkeys([*readers, *([wrt] if wrt else [])]))
    graph = _opened(adapter.pullback(model, batch, sources, sinks), inside, ends, batch, axes)
    graph.cut = False
    return graph


def _opened(
    pullback: Pullback, inside: Inside, ends: tuple[Port | None, Port | None], batch: Batch, axes: Axes
) -> Graph:
    """The graph of a pullback, with the ends that lie outside of recurrences as they lie there."""
    halves = [half for both in inside.halves.values() for half in both]
    samples = _samples_of(halves)
    outside = [port for port in ends if port is not None and port.layer not in inside.halves]
    axes.learn(batch, outside)
    borders = {port: Border(port, tuple(int(n) for n in array.shape)) for port, array in pullback.values.items()}
    for port in () if axes.adapter.samples_first else outside:
        layout = axes.layout(port, borders[port].shape)
        if layout.coupled:
            raise refusal("The time Jacobian", port)
        if samples > 1:
            refuse_unknown("The time Jacobian", text_of(port), layout.names)
        borders[port] = Border(port, borders[port].shape, layout, samples)
    return Graph(halves, pullback, borders)


def _samples_of(halves: Sequence[Half]) -> int:
    """The number of samples, the same in every recurrent call.

    Raises
    ------
    UnsupportedError
        If calls differ in it, since some then fold samples with something else.
    """
    counts = {half.call.layer: int(half.run.input.shape[0]) for half in halves}
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{layer}: {count}" for layer, count in counts.items())
        raise UnsupportedError(
            message(
                "Recurrent layers run on different numbers of samples: some fold samples with another axis.",
                got=listing,
                expected="one number of samples, for a time Jacobian of (sample, out_time, in_time)",
                hint="a Jacobian of the inner layer by itself: of= and wrt= within a model of that part",
            )
        )
    return next(iter(counts.values()))


def _probe(graph: Graph, source: Port) -> dict[Port, Link]:
    """Unit cotangents give the matrices; random ones on half of the steps tell whether these are all there is."""
    border = graph.borders[source]
    units, steps, apart = _unit_rows(border), _step_probes(border), _sample_probes(border)
    found = graph.pull(source, np.concatenate([units, steps[0], apart[0]]))
    _refuse_coupled(found, apart[1])
    links = {source: Link("local", border, border)} if source in found else {}
    for port, rows in found.items():
        if port == source:
            continue
        if rows is None or not bool((rows != 0).any()):
            continue
        links[port] = _link(border, graph.borders[port], rows[: len(units) + len(steps[0])], len(units), steps[1])
    return links


def _sample_probes(border: Border) -> tuple[Array, Array]:
    """Random rows on some samples, and which those are."""
    shape = (border.samples, *(() if border.times is None else (border.times,)), border.features)
    if border.samples == 1:
        return np.zeros((0, *shape)), np.zeros((0, 1), dtype=bool)
    on = patterns(border.samples)
    rows = np.random.default_rng(1).normal(size=(len(on), *shape))
    return rows * on.reshape(*on.shape, *[1] * (len(shape) - 1)), on


def refuse_coupled(graph: Graph, source: Port) -> None:
    """Raise if what starts at some samples of ``source`` arrives at others."""
    rows, on = _sample_probes(graph.borders[source])
    if len(on):
        _refuse_coupled(graph.pull(source, rows), on)


def _refuse_coupled(found: Mapping[Port, Array | None], on: Array) -> None:
    """Raise if what starts at some samples arrives at others: no sample then has a Jacobian of its own."""
    for port, rows in found.items():
        if rows is not None and len(on):
            arrived = plain(rows[len(rows) - len(on) :])
            hit = np.any(arrived != 0, axis=tuple(range(2, arrived.ndim)))
            if hit.shape == on.shape and bool((hit & ~on).any()):
                raise refusal("The time Jacobian", port)


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
