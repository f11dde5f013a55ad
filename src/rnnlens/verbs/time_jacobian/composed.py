"""Pieces of the composed route (recurrence by recurrence) and of the uncut route (through the framework).

Composed: rows of cotangents are pulled back as fields (sample, row, time, feature), a chunk of rows at a time, through
the recurrences and the segments between them. Uncut: the framework differentiates, through loops and feedback. A row
that starts inside a fused layer is first swept to its lower boundary, and one that ends there is swept from the upper
boundary. So each path counts exactly once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ...adapters.protocol import Port
from ...autodiff.tensors import converted_like
from ...recurrence.jacobian import Taps, reverse
from ...recurrence.reductions import FieldCollector
from ...recurrence.sweep_rows import FieldRows, PointRows
from ...results.schema import to_host
from ...settings import current
from ...typing import Array
from ..recurrent_layers import ReplayedCall
from .network import disconnected_error
from .plan import JacobianPart, JacobianPiece, WorkCount
from .request import JacobianEnd, JacobianEnds
from .segments import OuterTensor, move_axis


def compose_piece(part: JacobianPart, piece: JacobianPiece, tally: WorkCount) -> np.ndarray[Any, Any]:
    """Compute one piece, recurrence by recurrence: (sample, output step and row, [time,] feature)."""
    rows_below = _Descent(part, tally).pull_down(times_of(part, piece))
    if rows_below is not None:
        return to_host(rows_below)
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
        self.rows_by_port: dict[Port, Array] = {}
        #: By the index of a recurrence: rows that enter it at single steps.
        self.points: dict[int, PointRows] = {}
        #: Rows at the lower end; None before any have reached it.
        self.end_rows: Array | None = None

    def pull_down(self, times: Sequence[int] | None) -> Array | None:
        """Pull rows back through each recurrence, after all recurrences that read it; return rows at the lower end."""
        wrt = self.ends.wrt
        self._start_rows(times)
        for number in self.network.path.order:
            replayed = self.network.recurrences[number]
            if wrt.port in replayed.upper_ports() and wrt.port in self.rows_by_port:
                # All recurrences above this call are done, so these rows are complete.
                self.end_rows = self.rows_by_port[wrt.port]
            rows_above = {
                port: self.rows_by_port.pop(port) for port in replayed.upper_ports() if port in self.rows_by_port
            }
            rows = join_rows(replayed, rows_above, self.points.get(number))
            if rows is not None and number in self.network.path.recurrences:
                self._pull_through(replayed, rows)
        if wrt.port is not None and self.end_rows is None:
            self.end_rows = self.rows_by_port.get(wrt.port)
        return self.end_rows

    def _start_rows(self, times: Sequence[int] | None) -> None:
        of, network = self.ends.of, self.network
        if of.port is None:
            for number, replayed in enumerate(network.recurrences):
                if replayed in of.within:
                    self.points[number] = _starting_points(replayed, self.ends, times)
            return
        tensor, segments = network.segment_graph.tensors[of.port], network.segment_graph.lower_segments(of.port)
        rows, other_ports = self.ends.rows_pulled, set(segments)
        for number, replayed in enumerate(network.recurrences):
            output = replayed.upper_ports()[0]
            kind = segments[output].kind if output in segments and output != self.ends.wrt.port else ""
            if kind == "step" or (kind == "local" and times is not None):
                start_times = [segments[output].step] if times is None else times
                block = segments[output].at_every_step(rows)
                self.points[number] = replayed.points(replayed.run.output_state, start_times, block, of_output=True)
                other_ports.discard(output)
        if other_ports:
            value, pulled_rows = network.segment_graph.values[of.port], defaultdict[Port, list[Array]](list)
            for chunk_times, chunk_rows in _chunks_of_rows(tensor, times, rows):
                field = converted_like(starting_rows(tensor, chunk_times, chunk_rows), value)
                for port, lower_rows in network.segment_graph.pull_through(of.port, field, other_ports).items():
                    pulled_rows[port].append(lower_rows)
            self._add_rows({port: _joined(lower_rows) for port, lower_rows in pulled_rows.items()})

    def _pull_through(self, replayed: ReplayedCall, rows: PointRows | FieldRows) -> None:
        lower_ports = [port for port in replayed.lower_ports() if port in self.network.path.tops]
        lower_rows, end_rows = sweep_through(replayed, rows, lower_ports, self.ends.wrt, self.tally)
        if end_rows is not None:
            self.end_rows = end_rows if self.end_rows is None else self.end_rows + end_rows
        for port, field in lower_rows.items():
            self._add_rows(self.network.segment_graph.pull_through(port, field))

    def _add_rows(self, rows_by_port: Mapping[Port, Array]) -> None:
        for port, rows in rows_by_port.items():
            present_rows = self.rows_by_port.get(port)
            self.rows_by_port[port] = (
                rows if present_rows is None else present_rows + converted_like(rows, present_rows)
            )


def join_rows(
    replayed: ReplayedCall, rows_by_port: Mapping[Port, Array], points: PointRows | None = None
) -> PointRows | FieldRows | None:
    """Join cotangents of output, final states and states read between steps with rows that enter at single steps."""
    output_rows = rows_by_port.get(replayed.port("output"))
    final_rows = {port.index: rows for port, rows in rows_by_port.items() if port.kind == "final_state"}
    read_rows = {port.index: rows for port, rows in rows_by_port.items() if port.kind == "state_read"}
    if output_rows is not None and not replayed.call.returns_sequences:
        moving_mask, state = replayed.moving_output_mask(), replayed.run.output_state
        if moving_mask is not None:  # zero for samples whose last output is a constant
            output_rows = converted_like(output_rows, replayed.run.input)
            output_rows = replayed.system.work.xp.where(
                moving_mask[:, replayed.last_step][:, None, None],
                output_rows,
                replayed.system.work.xp.zeros_like(output_rows),
            )
        final_rows[state] = (
            final_rows[state] + converted_like(output_rows, final_rows[state]) if state in final_rows else output_rows
        )
        output_rows = None
    if output_rows is None and not read_rows and points is None and final_rows:
        blocks = {state: converted_like(rows, replayed.run.input)[:, None] for state, rows in final_rows.items()}
        return PointRows([replayed.last_step], blocks, replayed.system.order)
    return (
        points
        if output_rows is None and not read_rows and not final_rows
        else _as_field(replayed, output_rows, final_rows, read_rows, points)
    )


def _as_field(
    replayed: ReplayedCall,
    output_rows: Array | None,
    final_rows: Mapping[int, Array],
    read_rows: Mapping[int, Array],
    points: PointRows | None,
) -> FieldRows:
    """Sum cotangent rows of output and states, at all or single steps, to arrays (sample, row, time, size)."""
    work, run = replayed.system.work, replayed.run
    any_rows = output_rows if output_rows is not None else next(iter([*final_rows.values(), *read_rows.values()]), None)
    count = points.count if any_rows is None and points is not None else int(any_rows.shape[1])  # type: ignore[union-attr]
    fields: dict[int, Array] = {}

    def add(state: int, steps: Any, rows: Array, row_slice: slice = slice(None)) -> None:
        if state not in fields and steps == slice(None) and row_slice == slice(None):
            fields[state] = work.xp.asarray(converted_like(rows, run.input), copy=True)
            return
        if state not in fields:
            fields[state] = work.zeros(
                replayed.system.batch, count, replayed.system.time, replayed.system.state_sizes[state]
            )
        target = fields[state][:, row_slice, steps]
        target += converted_like(rows, run.input)

    if output_rows is not None:
        output_rows, moving_mask = converted_like(output_rows, run.input), replayed.moving_output_mask()
        if moving_mask is not None:
            output_rows = work.xp.where(moving_mask[:, None, :, None], output_rows, work.xp.zeros_like(output_rows))
        add(run.output_state, slice(None), output_rows)
    for state, rows in read_rows.items():
        add(state, slice(None), rows)
    for state, rows in final_rows.items():
        add(state, replayed.last_step, rows)
    if points is not None:
        for g, t in enumerate(points.times):  # rows of fields are in the requested order, not in that of the sweep
            group = slice(g * points.group, (g + 1) * points.group)
            for state, part in points.parts(t, group.start, group.stop, slice(None)).items():
                add(state, t, part, group)
    return FieldRows(fields, replayed.system.order)


def sweep_through(
    replayed: ReplayedCall, rows: PointRows | FieldRows, lower_ports: Sequence[Port], wrt: JacobianEnd, tally: WorkCount
) -> tuple[dict[Port, Array], Array | None]:
    """Sweep rows through a recurrence; return them at the ports ``lower_ports``, and at a lower end within it."""
    run, work, taps = replayed.run, replayed.system.work, Taps()
    batch, count = replayed.system.batch, rows.count
    own_input, *initial = replayed.lower_ports()
    fields: dict[Port, Array] = {}
    if own_input in lower_ports:
        fields[own_input] = work.zeros(batch, count, replayed.system.time, replayed.system.features)
        taps.input = FieldCollector(fields[own_input])
    for state, port in enumerate(initial):
        if port in lower_ports:
            fields[port] = work.zeros(batch, count, 1, int(run.states[state].shape[-1]))
            taps.initial[state] = FieldCollector(fields[port])
    end_rows = None
    if replayed in wrt.within:
        end_rows = work.zeros(batch, count, wrt.times or 1, wrt.size)
        (taps.initial if wrt.kind == "initial_state" else taps.states)[wrt.state] = FieldCollector(end_rows)
    tally.flops += reverse(replayed.system, rows, taps).flops
    if isinstance(rows, PointRows) and list(rows.times) != list(rows.sequence):  # swept in another order than requested
        first_row = {t: i * rows.group for i, t in enumerate(rows.sequence)}
        order = [first_row[t] + row for t in rows.times for row in range(rows.group)]
        fields = {port: field[:, order] for port, field in fields.items()}
        end_rows = None if end_rows is None else end_rows[:, order]
    if end_rows is not None and wrt.times is None:
        end_rows = end_rows[:, :, 0]
    return {port: field if port == own_input else field[:, :, 0] for port, field in fields.items()}, end_rows


def starting_rows(tensor: OuterTensor, times: Sequence[int] | None, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Expand rows (sample or 1, time or 1, row, unit) to cotangents (sample, row, [time,] unit) at their steps."""
    if times is None:
        return np.broadcast_to(rows[:, 0], (tensor.samples, *rows.shape[2:]))
    cotangents = np.zeros((tensor.samples, len(times), rows.shape[2], tensor.times or 1, tensor.features))
    for i, t in enumerate(times):
        cotangents[:, i, :, t] = rows[:, 0 if rows.shape[1] == 1 else t]
    return cotangents.reshape(tensor.samples, -1, *cotangents.shape[3:])


def _chunks_of_rows(
    tensor: OuterTensor, times: Sequence[int] | None, rows: np.ndarray[Any, Any]
) -> Iterator[tuple[Sequence[int] | None, np.ndarray[Any, Any]]]:
    """Yield steps and rows whose cotangents take an eighth of the memory, in the order of :func:`starting_rows`."""
    count = max(1, current().memory // (8 * 8 * math.prod(tensor.shape)))
    if count >= rows.shape[2] * len(times or [0]):
        yield times, rows
        return
    for step in [None] if times is None else [[t] for t in times]:
        for start in range(0, rows.shape[2], count):
            yield step, rows[:, :, start : start + count]


def _joined(rows: Sequence[Array]) -> Array:
    """Concatenate rows (sample, row, ...) along the second axis."""
    return rows[0] if len(rows) == 1 else array_namespace(rows[0]).concat(list(rows), axis=1)


def _starting_points(replayed: ReplayedCall, ends: JacobianEnds, times: Sequence[int] | None) -> PointRows:
    """Return the cotangent rows that start at a state or the output of a recurrent call, at each requested step."""
    times = [replayed.last_step] if times is None else times
    return replayed.points(ends.of.state, times, ends.rows_pulled, of_output=ends.of.kind == "output")


def pull_piece(part: JacobianPart, piece: JacobianPiece, tally: WorkCount) -> np.ndarray[Any, Any]:
    """Compute one piece by the framework alone: (sample, output step and row, [time,] feature)."""
    network, wrt = part.network, part.ends.wrt
    seeds, end_rows = _seeds(part, times_of(part, piece), tally)
    for port in seeds:
        network.segment_graph.refuse_coupled(port)
    pulled = network.segment_graph.pull_all({port: move_axis(rows, 0, 1) for port, rows in seeds.items()})
    rows_by_port = {port: move_axis(rows, 0, 1) for port, rows in pulled.items() if rows is not None}
    if wrt.port is not None and wrt.port in rows_by_port:
        end_rows.append(rows_by_port[wrt.port])
    for replayed in wrt.within:
        rows = join_rows(
            replayed, {port: rows_by_port[port] for port in replayed.reader_ports() if port in rows_by_port}
        )
        if rows is not None:
            end_rows.append(sweep_through(replayed, rows, (), wrt, tally)[1])
    parts = [rows for rows in end_rows if rows is not None]
    if not parts:
        raise disconnected_error(part.ends.of, wrt)
    return to_host(sum(parts[1:], start=parts[0]))


def _seeds(
    part: JacobianPart, times: Sequence[int] | None, tally: WorkCount
) -> tuple[dict[Port, Array], list[Array | None]]:
    """Return the cotangents that the framework pulls back, by port, and those that are at the input end already."""
    of, ends, segment_graph = part.ends.of, part.ends, part.network.segment_graph
    if of.port is not None:
        tensor = segment_graph.tensors[of.port]
        return {of.port: starting_rows(tensor, times, ends.rows_pulled)}, []
    seeds: dict[Port, Array] = {}
    end_rows = []
    for replayed in of.within:
        lower_rows, rows_at_end = sweep_through(
            replayed, _starting_points(replayed, ends, times), replayed.lower_ports(), ends.wrt, tally
        )
        seeds |= lower_rows
        end_rows.append(rows_at_end)
    return seeds, end_rows
