"""The composed route: any model, exact, through each recurrence by our sweep and between them by links.

Rows of cotangents travel down from layer to layer as fields (sample, row, time, feature), a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..adapters.protocol import Port
from ..recurrence.jacobian import Taps, reverse
from ..recurrence.reductions import FieldCollector
from ..recurrence.sources import Field, Points
from ..typing import Array
from .inside import like
from .jacobian_graph import Border, Graph, Link, through
from .jacobian_target import Swept, Tensor
from .jacobian_wanted import Ends, Tally


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
            if wrt.port in one.half.above() and wrt.port in arriving:
                found[0] = arriving[wrt.port]  # complete: everything above this call has been gone through
            source = self._gather(one, points.get(index), arriving)
            if source is not None and self.is_useful(index, wrt):
                self._through(index, one, source, wrt, arriving, found, tally)
        if wrt.port is not None and 0 not in found and wrt.port in arriving:
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
            if times is not None and output != self.ends.wrt.port and output in links and links[output].kind == "local":
                points[index] = one.output_points(times, through_rows(links[output], rows))
                rest.discard(output)
        if not rest:
            return
        reference = self.graph.pullback.values[start.port]
        _add(arriving, through(self.graph, start.port, like(starting_rows(border, times, rows), reference), rest))

    def _gather(self, one: Swept, points: Points | None, arriving: dict[Port, Array]) -> Points | Field | None:
        """Everything that comes into a call from above, as one source."""
        output, *finals = one.half.above()
        top, ends = arriving.pop(output, None), [arriving.pop(port, None) for port in finals]
        flat = {i: e for i, e in enumerate(ends) if e is not None}
        if top is not None and not one.half.call.returns_sequences:
            top = _where_last_moves(one, top)
            flat[one.output] = flat[one.output] + like(top, flat[one.output]) if one.output in flat else top
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
        below = [port for port in one.half.below() if self._leads(port, wrt)]
        fields = swept_through(one, source, below, wrt, found, tally)
        for port, value in fields.items():
            assert self.graph is not None
            _add(arriving, through(self.graph, port, value))


def swept_through(
    one: Swept, source: Points | Field, below: Sequence[Port], wrt: Tensor, found: dict[int, Array], tally: Tally
) -> dict[Port, Array]:
    """Rows through one recurrence: what leaves at the borders ``below``, in the order in which rows were asked for.

    What arrives at the states that we differentiate by is added to ``found``, by half of ``wrt``.
    """
    run, work, taps = one.half.run, one.work, Taps()
    batch, count = one.system.batch, source.count
    input_port, *initial = one.half.below()
    fields: dict[Port, Array] = {}
    if input_port in below:
        fields[input_port] = work.zeros(batch, count, one.system.time, one.system.features)
        taps.input = FieldCollector(fields[input_port])
    for state, port in enumerate(initial):
        if port in below:
            fields[port] = work.zeros(batch, count, 1, int(run.states[state].shape[-1]))
            taps.initial[state] = FieldCollector(fields[port])
    place = next((i for i, half in enumerate(wrt.halves) if half is one), None)
    value = None
    if place is not None:
        value = work.zeros(batch, count, wrt.times or 1, wrt.size)
        (taps.initial if wrt.what == "initial_state" else taps.states)[wrt.state] = FieldCollector(value)
    tally.flops += reverse(one.system, source, taps).flops
    order = _rows_as_asked(source) if isinstance(source, Points) else None
    if order is not None:
        fields = {port: rows[:, order] for port, rows in fields.items()}
    if place is not None and value is not None:
        value = value if order is None else value[:, order]
        value = value if wrt.times is not None else value[:, :, 0]
        found[place] = found[place] + value if place in found else value
    return {port: rows if port == input_port else rows[:, :, 0] for port, rows in fields.items()}


def starting_rows(border: Border, times: Sequence[int] | None, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows (sample or 1, time or 1, row, unit), each at its step, as a field (sample, row, [time,] unit)."""
    if times is None:
        return np.broadcast_to(rows[:, 0], (border.samples, *rows.shape[2:]))
    whole = np.zeros((border.samples, len(times), rows.shape[2], border.times or 1, border.features))
    for i, t in enumerate(times):
        whole[:, i, :, t] = rows[:, 0 if rows.shape[1] == 1 else t]
    return whole.reshape(border.samples, -1, *whole.shape[3:])


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


def _where_last_moves(one: Swept, top: Array) -> Array:
    """Rows (sample, row, unit) on a layer's last output, without samples whose last output is a constant."""
    moves = one.output_moves()
    if moves is None:
        return top
    *_, last = one.half.run.steps()
    top = like(top, one.half.run.input)
    return one.work.xp.where(moves[:, last][:, None, None], top, one.work.xp.zeros_like(top))


def _add(total: dict[Port, Array], more: Mapping[Port, Array]) -> None:
    for port, value in more.items():
        total[port] = total[port] + like(value, total[port]) if port in total else value
