"""The uncut route: rows pulled back through the whole model by the framework itself, loops and feedback included.

The framework has no tensor for what lies inside a fused layer. A row that starts there is swept down to the layer's
lower border first; a row that ends there is swept from what arrives at the layer's upper border. In between nothing is
cut, so that every path counts once, by way of the last border that it passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..adapters.protocol import Port
from ..recurrence.sources import Field
from ..typing import Array
from .inside import like
from .jacobian_composed import enter, starting_rows, swept_through
from .jacobian_graph import Graph, refuse_coupled
from .jacobian_target import Swept, Tensor, disconnected
from .jacobian_wanted import Ends, Tally


@dataclass
class Uncut:
    """The uncut route.

    Parameters
    ----------
    graph
        The run of the model, cut nowhere.
    """

    graph: Graph
    swept: list[Swept]
    ends: Ends
    _known: set[Port] = field(default_factory=set)

    def pull(
        self, start: Tensor, wrt: Tensor, times: Sequence[int] | None, tally: Tally
    ) -> dict[int, np.ndarray[Any, Any]]:
        """(sample, row, [time,] feature) with rows (output step, row), by half of ``wrt`` (0 at a border)."""
        found: dict[int, Array] = {}
        seeds = self._seeds(start, wrt, times, found, tally)
        for port in seeds.keys() - self._known:
            refuse_coupled(self.graph, port)
            self._known.add(port)
        arrived = self._arrived(seeds)
        if wrt.port is not None and wrt.port in arrived:
            found[0] = arrived[wrt.port]
        for one in wrt.halves:
            source = _source(one, arrived)
            if source is not None:
                swept_through(one, source, (), wrt, found, tally)
        if not found:
            raise disconnected(start, wrt)
        return {key: self.swept[0].work.numpy(value) for key, value in found.items()}

    def _seeds(
        self, start: Tensor, wrt: Tensor, times: Sequence[int] | None, found: dict[int, Array], tally: Tally
    ) -> dict[Port, Array]:
        """Where the framework starts from: the target, or the lower border of the recurrence that it lies in."""
        if start.port is not None:
            border = self.graph.borders[start.port]
            return {start.port: starting_rows(border, times, self.ends.rows_at(border.features))}
        seeds: dict[Port, Array] = {}
        for one in start.halves:
            source = enter(one, start, times, self.ends.rows_at(start.size))
            seeds |= swept_through(one, source, one.half.below(), wrt, found, tally)
        return seeds

    def _arrived(self, seeds: Mapping[Port, Array]) -> dict[Port, Array]:
        """(sample, row, [time,] feature) at every border that the rows reach."""
        values, borders = self.graph.pullback.values, self.graph.borders
        cotangents = {
            port: borders[port].rows_out(like(_rows_first(rows), values[port])) for port, rows in seeds.items()
        }
        pulled = self.graph.pullback.vjp(cotangents)
        return {port: _rows_first(borders[port].rows_in(rows)) for port, rows in pulled.items() if rows is not None}


def _source(one: Swept, arrived: Mapping[Port, Array]) -> Field | None:
    """Everything that came to the upper border of a recurrence, at the states that it moves."""
    work, time, half = one.work, one.system.time, one.half
    *_, last = half.run.steps()
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
            put(one.output, slice(None) if half.call.returns_sequences else last, rows)
        else:
            put(port.index, slice(None) if port.kind == "state_read" else last, rows)
    return Field(fields, one.system.order) if fields else None


def _rows_first(rows: Array) -> Array:
    """(sample, row, ...) to (row, sample, ...), or back."""
    return np.swapaxes(rows, 0, 1) if isinstance(rows, np.ndarray) else rows.transpose(0, 1)
