"""Pieces of the composed route (recurrence by recurrence) and of the uncut route (through the framework).

Composed: rows of cotangents are pulled back as fields (sample, row, time, feature), a chunk of rows at a time, through
the recurrences and the segments between them. Uncut: the framework differentiates, through loops and feedback. A row
that starts inside a fused layer is first swept to its lower boundary, and one that ends there is swept from the upper
boundary. So each path counts exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...adapters.protocol import Port
from ...autodiff.tensors import like
from ...recurrence.jacobian import Taps, reverse
from ...recurrence.reductions import FieldCollector
from ...recurrence.sweep_rows import FieldRows, PointRows
from ...results.schema import to_host
from ...typing import Array
from ..recurrent_layers import ReplayedCall
from .network import disconnected
from .plan import JacobianPart, JacobianPiece, WorkCount
from .request import JacobianEnd, JacobianEnds
from .segments import OuterTensor, moved


def compose_piece(part: JacobianPart, piece: JacobianPiece, tally: WorkCount) -> np.ndarray[Any, Any]:
    """Compute one piece, recurrence by recurrence: (sample, output step and row, [time,] feature)."""
    found = _Descent(part, tally).go(times_of(part, piece))
    if found is not None:
        return to_host(found)
    # There is no path, such as from one direction of a layer to the other.
    wrt, rows = part.ends.wrt, (piece.outs.stop - piece.outs.start) * part.ends.rows
    return np.zeros((part.network.samples, rows, *(() if wrt.times is None else (wrt.times,)), wrt.size))


def times_of(part: JacobianPart, piece: JacobianPiece) -> list[int] | None:
    """Return the output steps of a piece; None without a time axis."""
    return None if part.ends.out_times is None else part.ends.out_times[piece.outs]


class _Descent:
    """Rows of cotangents, pulled back from the upper end to the lower one."""

    def __init__(self, part: JacobianPart, tally: WorkCount) -> None:
        self.network, self.ends, self.tally = part.network, part.ends, tally
        #: (sample, row, [time,] feature) by tensor: rows pulled back so far.
        self.arriving: dict[Port, Array] = {}
        #: By the index of a recurrence: rows that enter it at single steps.
        self.points: dict[int, PointRows] = {}
        #: Rows at the lower end; None before any have reached it.
        self.arrived: Array | None = None

    def go(self, times: Sequence[int] | None) -> Array | None:
        """Pull rows back through each recurrence, after all recurrences that read it; return rows at the lower end."""
        wrt = self.ends.wrt
        self._start(times)
        for number in self.network.path.order:
            one = self.network.recurrences[number]
            if wrt.port in one.above() and wrt.port in self.arriving:
                # All recurrences above this call are done, so these rows are complete.
                self.arrived = self.arriving[wrt.port]
            arrived = {port: self.arriving.pop(port) for port in one.above() if port in self.arriving}
            rows = entering(one, arrived, self.points.get(number))
            if rows is not None and number in self.network.path.recurrences:
                self._through(one, rows)
        if wrt.port is not None and self.arrived is None:
            self.arrived = self.arriving.get(wrt.port)
        return self.arrived

    def _start(self, times: Sequence[int] | None) -> None:
        of, network = self.ends.of, self.network
        if of.port is None:
            for number, one in enumerate(network.recurrences):
                if one in of.within:
                    self.points[number] = _enter(one, self.ends, times)
            return
        tensor, segments = network.around.tensors[of.port], network.around.below(of.port)
        rows, rest = self.ends.rows_pulled, set(segments)
        for number, one in enumerate(network.recurrences):
            output = one.above()[0]
            kind = segments[output].kind if output in segments and output != self.ends.wrt.port else ""
            if kind == "step" or (kind == "local" and times is not None):
                at = [segments[output].step] if times is None else times
                block = segments[output].at_every_step(rows)
                self.points[number] = one.points(one.run.output_state, at, block, of_output=True)
                rest.discard(output)
        if rest:
            field = like(starting_rows(tensor, times, rows), network.around.values[of.port])
            self._add(network.around.through(of.port, field, rest))

    def _through(self, one: ReplayedCall, rows: PointRows | FieldRows) -> None:
        below = [port for port in one.below() if port in self.network.path.tops]
        left, arrived = swept_through(one, rows, below, self.ends.wrt, self.tally)
        if arrived is not None:
            self.arrived = arrived if self.arrived is None else self.arrived + arrived
        for port, field in left.items():
            self._add(self.network.around.through(port, field))

    def _add(self, more: Mapping[Port, Array]) -> None:
        for port, rows in more.items():
            here = self.arriving.get(port)
            self.arriving[port] = rows if here is None else here + like(rows, here)


def entering(
    one: ReplayedCall, arrived: Mapping[Port, Array], points: PointRows | None = None
) -> PointRows | FieldRows | None:
    """Join cotangents of output, final states and states read between steps with rows that enter at single steps."""
    top = arrived.get(one.port("output"))
    flat = {port.index: rows for port, rows in arrived.items() if port.kind == "final_state"}
    reads = {port.index: rows for port, rows in arrived.items() if port.kind == "state_read"}
    if top is not None and not one.call.returns_sequences:
        moves, state = one.output_moves(), one.run.output_state
        if moves is not None:  # zero for samples whose last output is a constant
            top = like(top, one.run.input)
            top = one.system.work.xp.where(moves[:, one.last][:, None, None], top, one.system.work.xp.zeros_like(top))
        flat[state] = flat[state] + like(top, flat[state]) if state in flat else top
        top = None
    if top is None and not reads and points is None and flat:
        blocks = {state: like(rows, one.run.input)[:, None] for state, rows in flat.items()}
        return PointRows([one.last], blocks, one.system.order)
    return points if top is None and not reads and not flat else _as_field(one, top, flat, reads, points)


def _as_field(
    one: ReplayedCall,
    top: Array | None,
    flat: Mapping[int, Array],
    reads: Mapping[int, Array],
    points: PointRows | None,
) -> FieldRows:
    """Sum cotangent rows of output and states, at all or single steps, to arrays (sample, row, time, size)."""
    work, run = one.system.work, one.run
    first = top if top is not None else next(iter([*flat.values(), *reads.values()]), None)
    count = points.count if first is None and points is not None else int(first.shape[1])  # type: ignore[union-attr]
    fields: dict[int, Array] = {}

    def add(state: int, steps: Any, rows: Array, some: slice = slice(None)) -> None:
        if state not in fields and steps == slice(None) and some == slice(None):
            fields[state] = work.xp.asarray(like(rows, run.input), copy=True)
            return
        if state not in fields:
            fields[state] = work.zeros(one.system.batch, count, one.system.time, one.system.state_sizes[state])
        target = fields[state][:, some, steps]
        target += like(rows, run.input)

    if top is not None:
        top, moves = like(top, run.input), one.output_moves()
        if moves is not None:
            top = work.xp.where(moves[:, None, :, None], top, work.xp.zeros_like(top))
        add(run.output_state, slice(None), top)
    for state, rows in reads.items():
        add(state, slice(None), rows)
    for state, rows in flat.items():
        add(state, one.last, rows)
    if points is not None:
        for g, t in enumerate(points.times):  # rows of fields are in the requested order, not in that of the sweep
            group = slice(g * points.group, (g + 1) * points.group)
            for state, part in points.parts(t, group.start, group.stop, slice(None)).items():
                add(state, t, part, group)
    return FieldRows(fields, one.system.order)


def swept_through(
    one: ReplayedCall, rows: PointRows | FieldRows, below: Sequence[Port], wrt: JacobianEnd, tally: WorkCount
) -> tuple[dict[Port, Array], Array | None]:
    """Sweep rows through a recurrence; return them at the ports ``below``, and at a lower end within it."""
    run, work, taps = one.run, one.system.work, Taps()
    batch, count = one.system.batch, rows.count
    own_input, *initial = one.below()
    fields: dict[Port, Array] = {}
    if own_input in below:
        fields[own_input] = work.zeros(batch, count, one.system.time, one.system.features)
        taps.input = FieldCollector(fields[own_input])
    for state, port in enumerate(initial):
        if port in below:
            fields[port] = work.zeros(batch, count, 1, int(run.states[state].shape[-1]))
            taps.initial[state] = FieldCollector(fields[port])
    arrived = None
    if one in wrt.within:
        arrived = work.zeros(batch, count, wrt.times or 1, wrt.size)
        (taps.initial if wrt.kind == "initial_state" else taps.states)[wrt.state] = FieldCollector(arrived)
    tally.flops += reverse(one.system, rows, taps).flops
    if isinstance(rows, PointRows) and list(rows.times) != list(rows.sequence):  # swept in another order than requested
        start = {t: i * rows.group for i, t in enumerate(rows.sequence)}
        order = [start[t] + row for t in rows.times for row in range(rows.group)]
        fields = {port: field[:, order] for port, field in fields.items()}
        arrived = None if arrived is None else arrived[:, order]
    if arrived is not None and wrt.times is None:
        arrived = arrived[:, :, 0]
    return {port: field if port == own_input else field[:, :, 0] for port, field in fields.items()}, arrived


def starting_rows(tensor: OuterTensor, times: Sequence[int] | None, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Expand rows (sample or 1, time or 1, row, unit) to cotangents (sample, row, [time,] unit) at their steps."""
    if times is None:
        return np.broadcast_to(rows[:, 0], (tensor.samples, *rows.shape[2:]))
    whole = np.zeros((tensor.samples, len(times), rows.shape[2], tensor.times or 1, tensor.features))
    for i, t in enumerate(times):
        whole[:, i, :, t] = rows[:, 0 if rows.shape[1] == 1 else t]
    return whole.reshape(tensor.samples, -1, *whole.shape[3:])


def _enter(one: ReplayedCall, ends: JacobianEnds, times: Sequence[int] | None) -> PointRows:
    """Return the cotangent rows that start at a state or the output of a recurrent call, at each requested step."""
    times = [one.last] if times is None else times
    return one.points(ends.of.state, times, ends.rows_pulled, of_output=ends.of.kind == "output")


def pull_piece(part: JacobianPart, piece: JacobianPiece, tally: WorkCount) -> np.ndarray[Any, Any]:
    """Compute one piece by the framework alone: (sample, output step and row, [time,] feature)."""
    network, wrt = part.network, part.ends.wrt
    seeds, found = _seeds(part, times_of(part, piece), tally)
    for port in seeds:
        network.around.refuse_coupled(port)
    pulled = network.around.pull_all({port: moved(rows, 0, 1) for port, rows in seeds.items()})
    arrived = {port: moved(rows, 0, 1) for port, rows in pulled.items() if rows is not None}
    if wrt.port is not None and wrt.port in arrived:
        found.append(arrived[wrt.port])
    for one in wrt.within:
        rows = entering(one, {port: arrived[port] for port in one.readers() if port in arrived})
        if rows is not None:
            found.append(swept_through(one, rows, (), wrt, tally)[1])
    parts = [rows for rows in found if rows is not None]
    if not parts:
        raise disconnected(part.ends.of, wrt)
    return to_host(sum(parts[1:], start=parts[0]))


def _seeds(
    part: JacobianPart, times: Sequence[int] | None, tally: WorkCount
) -> tuple[dict[Port, Array], list[Array | None]]:
    """Return the cotangents that the framework pulls back, by port, and those that are at the input end already."""
    of, ends, around = part.ends.of, part.ends, part.network.around
    if of.port is not None:
        tensor = around.tensors[of.port]
        return {of.port: starting_rows(tensor, times, ends.rows_pulled)}, []
    seeds: dict[Port, Array] = {}
    found = []
    for one in of.within:
        left, arrived = swept_through(one, _enter(one, ends, times), one.below(), ends.wrt, tally)
        seeds |= left
        found.append(arrived)
    return seeds, found
