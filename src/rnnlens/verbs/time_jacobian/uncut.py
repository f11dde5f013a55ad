"""Executes pieces of the uncut route: rows pulled back through the whole model by the framework, loops included.

The framework has no tensor for what lies inside a fused layer. A row that starts there is swept down to the layer's
lower boundary first; a row that ends there is swept from what arrives at the layer's upper boundary. In between nothing
is cut, so that every path counts once, by way of the last boundary that it passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...adapters.protocol import Port
from ...autodiff.tensors import like
from ...recurrence.sweep_rows import FieldRows
from ...typing import Array
from .composed import enter, starting_rows, swept_through, times_of
from .linearised import Linearised
from .network import disconnected
from .outer import moved
from .pieces import Piece
from .plan import Part
from .tally import Tally


def pull_piece(part: Part, piece: Piece, tally: Tally) -> np.ndarray[Any, Any]:
    """(sample, output step and row, [time,] feature) of one piece, by every step of the lower end."""
    network, wrt = part.network, part.ends.wrt
    seeds, found = _seeds(part, times_of(part, piece), tally)
    for port in seeds:
        network.around.refuse_coupled(port)
    arrived = _arrived(part, seeds)
    if wrt.port is not None and wrt.port in arrived:
        found.append(arrived[wrt.port])
    for one in wrt.within:
        field = _entering(one, arrived)
        if field is not None:
            found.append(swept_through(one, field, (), wrt, tally)[1])
    parts = [rows for rows in found if rows is not None]
    if not parts:
        raise disconnected(part.ends.of, wrt)
    return network.recurrences[0].work.numpy(sum(parts[1:], start=parts[0]))


def _seeds(part: Part, times: Sequence[int] | None, tally: Tally) -> tuple[dict[Port, Array], list[Array | None]]:
    """Where the framework starts from, and what has arrived at the lower end before it.

    That is the upper end, or the lower boundary of the recurrence that it lies in.
    """
    of, ends, around = part.ends.of, part.ends, part.network.around
    if of.port is not None:
        tensor = around.tensors[of.port]
        return {of.port: starting_rows(tensor, times, ends.rows_at(tensor.features))}, []
    seeds: dict[Port, Array] = {}
    found = []
    for one in of.within:
        rows = enter(one, of, times, ends.rows_at(of.size))
        left, arrived = swept_through(one, rows, one.half.below(), ends.wrt, tally)
        seeds |= left
        found.append(arrived)
    return seeds, found


def _arrived(part: Part, seeds: Mapping[Port, Array]) -> dict[Port, Array]:
    """(sample, row, [time,] feature) at every tensor that the rows reach."""
    pulled = part.network.around.pull_all({port: moved(rows, 0, 1) for port, rows in seeds.items()})
    return {port: moved(rows, 0, 1) for port, rows in pulled.items() if rows is not None}


def _entering(one: Linearised, arrived: Mapping[Port, Array]) -> FieldRows | None:
    """Everything that came to the upper boundary of a recurrence, at the states that it moves."""
    work, time, half = one.work, one.system.time, one.half
    fields: dict[int, Array] = {}

    def put(state: int, steps: Any, rows: Array) -> None:
        rows = like(rows, half.run.input)
        if state not in fields:
            fields[state] = work.zeros(one.system.batch, int(rows.shape[1]), time, one.system.state_sizes[state])
        target = fields[state][:, :, steps]
        target[...] = target + rows

    for port, rows in arrived.items():
        if port not in half.readers():
            continue
        if port.kind == "output":
            moves = one.output_moves()
            rows = like(rows, half.run.input)
            if moves is not None:
                rows = work.xp.where(moves[:, None, :, None], rows, work.xp.zeros_like(rows))
            put(one.output, slice(None) if half.call.returns_sequences else half.last, rows)
        else:
            put(port.index, slice(None) if port.kind == "state_read" else half.last, rows)
    return FieldRows(fields, one.system.order) if fields else None
