"""Two ways from a target to what it is differentiated by, both exact.

*Direct*: one recurrent layer in between, with nothing but local links around it. Values are reduced inside the sweep,
and the sweep may run either way. *Composed*: anything else. Rows of cotangents travel down from layer to layer as
fields (sample, row, time, feature), through each recurrence by our sweep and between them by links, a chunk of rows at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..adapters.protocol import Port
from ..recurrence.jacobian import Entrances, Taps, forward, forward_flops, reverse, reverse_flops
from ..recurrence.pruning import Vanished
from ..recurrence.reductions import Collector, FieldCollector
from ..recurrence.sources import Field, Points
from ..typing import Array
from .inside import like
from .jacobian_graph import Graph, Link, through
from .jacobian_target import Swept, Tensor

Reduce = Callable[[Array], Array]


@dataclass
class Ends:
    """The two ends, and what is wanted of them.

    Attributes
    ----------
    out_times, in_times
        Steps asked for, in the order asked; None where there is no time.
    weights : (sample or 1, time or 1, row, unit) or None
        Rows that are pulled instead of single output units.
    reduce, tail
        What becomes of a block (sample, group, out, in).
    """

    of: Tensor
    wrt: Tensor
    out_times: list[int] | None
    in_times: list[int] | None
    weights: np.ndarray[Any, Any] | None
    reduce: Reduce | None
    tail: tuple[int, ...]
    average: bool

    @property
    def rows(self) -> int:
        """Rows per output step."""
        return self.of.size if self.weights is None else int(self.weights.shape[2])

    @property
    def groups(self) -> int:
        """Output steps."""
        return 1 if self.out_times is None else len(self.out_times)

    def rows_at(self, size: int) -> np.ndarray[Any, Any]:
        """(sample or 1, time or 1, row, unit)."""
        return np.eye(size)[None, None] if self.weights is None else self.weights


@dataclass
class Tally:
    """What was done."""

    mode: str = "reverse"
    route: str = "direct"
    flops: float = 0.0
    peak_bytes: int = 0
    pruned_error_square: float = 0.0
    pruned_rows: int = 0
    pruned: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass
class Direct:
    """The direct route: points enter one recurrent call, and one tap of it is wanted.

    Attributes
    ----------
    readout
        (sample or 1, time or 1, row, size) from the state to the rows; None for the state itself.
    link
        The local link below the layer's input; None where the tap is a state of the layer itself.
    """

    swept: Swept
    state: int
    readout: Array | None
    link: Link | None
    ends: Ends

    @property
    def times(self) -> list[int]:
        """Steps at which targets lie."""
        if self.ends.out_times is not None:
            return self.ends.out_times
        *_, last = self.swept.half.run.steps()
        return [last]

    @property
    def in_times(self) -> list[int]:
        """Steps of interest below; -1 for the initial state."""
        return [-1] if self.ends.in_times is None else self.ends.in_times

    def flops(self, mode: str) -> float:
        """Operations that a sweep in this mode takes."""
        run, system, ends = self.swept.half.run, self.swept.system, self.ends
        position = {t: i for i, t in enumerate(run.steps())}
        outs, ins = sorted(position[t] for t in self.times), sorted(position.get(t, -1) for t in self.in_times)
        if mode == "reverse":
            steps = np.arange(max(ins[0], 0), outs[-1] + 1)
            alive = ends.rows * (len(outs) - np.searchsorted(outs, steps))
            return reverse_flops(system, int(alive.sum()), self.link is not None)
        alive = ends.wrt.size * np.searchsorted(ins, np.arange(ins[0] + 1, outs[-1] + 1))
        return forward_flops(system, int(alive.sum()), 0 if self.readout is None else ends.rows)

    def buffer_bytes(self, mode: str, groups: int) -> int:
        """Bytes per sample of a sweep's buffers with so many output steps (reverse) or input steps (forward)."""
        system, features = self.swept.system, self.swept.system.features
        rows = groups * (self.ends.rows if mode == "reverse" else self.ends.wrt.size)
        width = 2 * (system.rows + (features if mode == "reverse" else 0)) + (system.columns if system.gated else 0)
        return rows * width * self.swept.work.itemsize

    def sweep(
        self,
        mode: str,
        samples: slice,
        times: Sequence[int],
        rtol: float | None,
        tally: Tally,
        progress: Callable[[], None] | None,
    ) -> np.ndarray[Any, Any]:
        """(sample, group, [row,] in step, [feature]); reduced (sample, group, in step, *tail); averaged no sample."""
        if mode == "reverse":
            return self._reverse(samples, times, rtol, tally, progress)
        return self._forward(samples, times, rtol, tally, progress)

    def _count(self, samples: slice) -> int:
        return len(range(*samples.indices(self.swept.system.batch)))

    def _pruning(self, rtol: float | None, group: int) -> Vanished | None:
        return None if rtol is None else Vanished(self.swept.work, rtol, group)

    def _reverse(
        self,
        samples: slice,
        times: Sequence[int],
        rtol: float | None,
        tally: Tally,
        progress: Callable[[], None] | None,
    ) -> np.ndarray[Any, Any]:
        swept, ends = self.swept, self.ends
        system, work = swept.system, swept.work
        block = np.eye(system.state_sizes[self.state])[None, None] if self.readout is None else self.readout
        points = (swept.output_points if ends.of.what == "output" else lambda t, b: swept.points(self.state, t, b))(
            times, block
        )
        places = {t: i for i, t in enumerate(self.in_times)}
        collector = Collector(
            work,
            self._count(samples),
            len(times),
            ends.rows,
            ends.wrt.size,
            places,
            reduce=ends.reduce,
            tail=ends.tail,
            readout=self._below(samples),
            average=ends.average,
        )
        pruning = self._pruning(rtol, ends.rows)
        cost = reverse(system, points, self._taps(collector), samples=samples, pruning=pruning, progress=progress)
        self._count_cost(tally, cost, pruning, collector)
        result: np.ndarray[Any, Any] = work.numpy(collector.result)
        axis = 0 if ends.average else 1
        order = {t: i for i, t in enumerate(points.sequence)}
        result = _reorder(result, [order[t] for t in times], axis + 1)
        if ends.reduce is not None:
            return np.moveaxis(result, axis, axis + 1)
        return np.moveaxis(result, axis, axis + 2)

    def _taps(self, collector: Collector) -> Taps:
        wrt = self.ends.wrt
        if wrt.what == "initial_state":
            return Taps(initial={wrt.state: collector}, steps=frozenset())
        steps = frozenset(self.in_times)
        if self.link is not None:
            return Taps(input=collector, steps=steps)
        return Taps(states={wrt.state: collector}, steps=steps)

    def _below(self, samples: slice) -> Callable[[int, Array], Array] | None:
        if self.link is None or self.link.block is None:
            return None
        block = like(self.link.block, self.swept.half.run.input)

        def readout(t: int, values: Array) -> Array:
            at = block[:, 0 if block.shape[1] == 1 else t]
            return values @ (at if at.shape[0] == 1 else at[samples])

        return readout

    def _forward(
        self,
        samples: slice,
        times: Sequence[int],
        rtol: float | None,
        tally: Tally,
        progress: Callable[[], None] | None,
    ) -> np.ndarray[Any, Any]:
        swept, ends = self.swept, self.ends
        system, work = swept.system, swept.work
        entrances = self._entrances()
        places = {t: i for i, t in enumerate(times)}
        groups = 1 if entrances.kind == "initial" else len(self.in_times)
        collector = Collector(
            work,
            self._count(samples),
            groups,
            ends.wrt.size,
            ends.rows,
            places,
            reduce=ends.reduce,
            tail=ends.tail,
            readout=self._above(samples),
            swapped=True,
            average=ends.average,
        )
        pruning = self._pruning(rtol, ends.wrt.size)
        cost = forward(
            system,
            entrances,
            {self.state: collector},
            frozenset(times),
            samples=samples,
            pruning=pruning,
            progress=progress,
        )
        self._count_cost(tally, cost, pruning, collector)
        result = work.numpy(collector.result)  # (sample, out, in group, [feature, row] or *tail)
        axis = 0 if ends.average else 1
        entered = [t for t in swept.half.run.steps() if t in set(self.in_times)][::-1]
        if groups > 1:
            order = {t: i for i, t in enumerate(entered)}
            result = _reorder(result, [order[t] for t in self.in_times], axis + 1)
        return result if ends.reduce is not None else np.moveaxis(result, -1, axis + 1)

    def _entrances(self) -> Entrances:
        wrt = self.ends.wrt
        if wrt.what == "initial_state":
            return Entrances("initial", state=wrt.state)
        if self.link is None:
            return Entrances("state", self.in_times, state=wrt.state)
        block = self.link.block
        if block is not None:
            block = like(block, self.swept.half.run.input)
            block = block.swapaxes(-1, -2)
        return Entrances("input", self.in_times, block)

    def _above(self, samples: slice) -> Callable[[int, Array], Array] | None:
        block = self.readout
        moves = self.swept.output_moves() if self.ends.of.what == "output" else None
        if block is None and moves is None:
            return None
        if block is not None:
            block = like(block, self.swept.half.run.input)

        def readout(t: int, values: Array) -> Array:
            if block is not None:
                at = block[:, 0 if block.shape[1] == 1 else t]
                values = values @ (at if at.shape[0] == 1 else at[samples]).swapaxes(-1, -2)
            if moves is not None:
                values = values * like(moves[samples, t], values)[:, None, None]
            return values

        return readout

    @staticmethod
    def _count_cost(tally: Tally, cost: Any, pruning: Vanished | None, collector: Collector) -> None:
        tally.flops += cost.flops
        if pruning is not None:
            tally.pruned_error_square += collector.error_squares
            tally.pruned_rows += pruning.dropped
            tally.pruned = True


def _reorder(array: np.ndarray[Any, Any], order: list[int], axis: int) -> np.ndarray[Any, Any]:
    """Take along an axis, as a view where the order is straight or reversed."""
    count = len(order)
    index: list[Any] = [slice(None)] * array.ndim
    if order == list(range(count)):
        return array
    if order == list(range(count))[::-1]:
        index[axis] = slice(None, None, -1)
    else:
        index[axis] = order
    taken: np.ndarray[Any, Any] = array[tuple(index)]
    return taken


class Composed:
    """The composed route.

    Parameters
    ----------
    swept
        Every recurrent call, in the order in which they ran.
    """

    def __init__(self, graph: Graph | None, swept: list[Swept], ends: Ends) -> None:
        self.graph, self.swept, self.ends = graph, swept, ends
        self._useful: dict[int, bool] = {}

    def pull(
        self, start: Tensor, wrt: Tensor, times: Sequence[int] | None, tally: Tally
    ) -> dict[int, np.ndarray[Any, Any]]:
        """(sample, row, [time,] feature) with rows (output step, row), by half of ``wrt`` (0 at a border)."""
        arriving: dict[Port, Array] = {}
        points: dict[int, Points] = {}
        self._start(start, times, arriving, points)
        found: dict[int, Array] = {}
        for index in range(len(self.swept) - 1, -1, -1):
            one = self.swept[index]
            source = self._gather(one, points.get(index), arriving)
            if source is not None and self.is_useful(index, wrt):
                self._through(index, one, source, wrt, arriving, found, tally)
        if wrt.port is not None and wrt.port in arriving:
            found[0] = arriving[wrt.port]
        return {key: self.swept[0].work.numpy(value) for key, value in found.items()}

    def is_useful(self, index: int, wrt: Tensor) -> bool:
        """Whether anything that leaves this call downwards can reach what we differentiate by."""
        if index not in self._useful:
            one = self.swept[index]
            inside = any(one is half for half in wrt.halves)
            self._useful[index] = inside or any(self._leads(port, wrt) for port in one.half.below())
        return self._useful[index]

    def _leads(self, source: Port, wrt: Tensor) -> bool:
        if self.graph is None:
            return False
        for sink in self.graph.reach(source):
            if sink == wrt.port:
                return True
            if any(sink in one.half.above() and self.is_useful(i, wrt) for i, one in enumerate(self.swept)):
                return True
        return False

    def _start(
        self, start: Tensor, times: Sequence[int] | None, arriving: dict[Port, Array], points: dict[int, Points]
    ) -> None:
        if start.port is None:
            for one in start.halves:
                index = next(i for i, s in enumerate(self.swept) if s is one)
                points[index] = enter(one, start, times, self.ends.rows_at(start.size))
            return
        assert self.graph is not None
        border = self.graph.borders[start.port]
        rows = self.ends.rows_at(border.features)
        links = self.graph.reach(start.port)
        rest = set(links)
        for index, one in enumerate(self.swept):
            output = one.half.above()[0]
            if times is not None and output in links and links[output].kind == "local":
                points[index] = one.output_points(times, through_rows(links[output], rows))
                rest.discard(output)
        if not rest:
            return
        if times is None:
            whole = np.broadcast_to(rows[:, 0], (border.samples, *rows.shape[2:]))
        else:
            whole = np.zeros((border.samples, len(times), rows.shape[2], border.times or 1, border.features))
            for i, t in enumerate(times):
                whole[:, i, :, t] = rows[:, 0 if rows.shape[1] == 1 else t]
            whole = whole.reshape(border.samples, -1, *whole.shape[3:])
        reference = self.graph.pullback.values[start.port]
        _add(arriving, through(self.graph, start.port, like(whole, reference), rest))

    def _gather(self, one: Swept, points: Points | None, arriving: dict[Port, Array]) -> Points | Field | None:
        """Everything that comes into a call from above, as one source."""
        output, *finals = one.half.above()
        top, ends = arriving.pop(output, None), [arriving.pop(port, None) for port in finals]
        flat = {i: e for i, e in enumerate(ends) if e is not None}
        if top is not None and not one.half.call.returns_sequences:
            flat[one.output] = flat[one.output] + top if one.output in flat else top
            top = None
        if top is None and not flat:
            return points
        if top is None and points is None:
            *_, last = one.half.run.steps()
            return Points(
                [last], {state: like(e, one.half.run.input)[:, None] for state, e in flat.items()}, one.system.order
            )
        return self._field(one, top, flat, points)

    def _field(self, one: Swept, top: Array | None, flat: Mapping[int, Array], points: Points | None) -> Field:
        work, time = one.work, one.system.time
        first = top if top is not None else next(iter(flat.values()), None)
        count = points.count if first is None and points is not None else int(first.shape[1])  # type: ignore[union-attr]
        *_, last = one.half.run.steps()
        sizes, batch = one.system.state_sizes, one.system.batch
        fields: dict[int, Array] = {}

        def at(state: int) -> Array:
            if state not in fields:
                fields[state] = work.zeros(batch, count, time, sizes[state])
            return fields[state]

        if top is not None:
            top, moves = like(top, one.half.run.input), one.output_moves()
            if moves is not None:
                top = work.xp.where(moves[:, None, :, None], top, work.xp.zeros_like(top))
            fields[one.output] = top + 0
        for state, value in flat.items():
            target = at(state)[:, :, last]
            target[...] = target + like(value, one.half.run.input)
        if points is not None:
            for g, t in enumerate(points.sequence):
                rows = slice(g * points.group, (g + 1) * points.group)
                for state, part in points.parts(t, rows.start, rows.stop, slice(None)).items():
                    target = at(state)[:, rows, t]
                    target[...] = target + part
        return Field(fields, one.system.order)

    def _through(
        self,
        index: int,
        one: Swept,
        source: Points | Field,
        wrt: Tensor,
        arriving: dict[Port, Array],
        found: dict[int, Array],
        tally: Tally,
    ) -> None:
        run, work, taps = one.half.run, one.work, Taps()
        batch, count = one.system.batch, source.count
        below, *initial = one.half.below()
        fields: dict[Port, Array] = {}
        if self._leads(below, wrt):
            fields[below] = work.zeros(batch, count, one.system.time, one.system.features)
            taps.input = FieldCollector(fields[below])
        for state, port in enumerate(initial):
            if self._leads(port, wrt):
                fields[port] = work.zeros(batch, count, 1, int(run.states[state].shape[-1]))
                taps.initial[state] = FieldCollector(fields[port])
        place = next((i for i, half in enumerate(wrt.halves) if half is one), None)
        if place is not None:
            found[place] = work.zeros(batch, count, *(() if wrt.times is None else (wrt.times,)), wrt.size)
            value = found[place] if wrt.times is not None else found[place][:, :, None]
            (taps.initial if wrt.what == "initial_state" else taps.states)[wrt.state] = FieldCollector(value)
        cost = reverse(one.system, source, taps)
        tally.flops += cost.flops
        if isinstance(source, Points):
            order = _rows_as_asked(source)
            if order is not None:
                fields = {port: value[:, order] for port, value in fields.items()}
                if place is not None:
                    found[place] = found[place][:, order]
        for port, value in fields.items():
            assert self.graph is not None
            value = value if port == below else value[:, :, 0]
            _add(arriving, through(self.graph, port, value))


def _rows_as_asked(points: Points) -> list[int] | None:
    """Where to find the rows in the order in which steps were asked for; None if they are in it."""
    if list(points.times) == list(points.sequence):
        return None
    order = {t: i for i, t in enumerate(points.sequence)}
    return [order[t] * points.group + r for t in points.times for r in range(points.group)]


def through_rows(link: Link, rows: np.ndarray[Any, Any]) -> Array:
    """Rows (sample or 1, time or 1, row, source) through a local link, at every step."""
    return rows if link.block is None else like(rows, link.block) @ link.block


def enter(one: Swept, start: Tensor, times: Sequence[int] | None, block: Array) -> Points:
    """Rows that start inside a recurrent call."""
    if times is None:
        *_, last = one.half.run.steps()
        times = [last]
    return one.output_points(times, block) if start.what == "output" else one.points(start.state, times, block)


def _add(total: dict[Port, Array], more: Mapping[Port, Array]) -> None:
    for port, value in more.items():
        total[port] = total[port] + value if port in total else value
