"""The reverse sweep of all units of a state at once, for systems whose units never meet.

One row for each of S units would need S x S numbers per start step. Units of one colour reach different columns
(:class:`rnnlens.recurrence.linear.Pattern`), so that their sum is swept instead: a single row for a diagonal
recurrence. The blocks of all units at an input are computed from that row and B_t when needed, or reduced without being
built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..typing import Array
from .arrays import namespace
from .linear import LinearStep, Pattern, System
from .reductions import Collector, frobenius, total
from .sweep_reverse import ReverseSweep
from .sweep_rows import Cost, Pruning, RowSink, Taps, Units

#: Numbers in the blocks that are computed at a time.
_AT_ONCE = 2**18


class UnitSweep(ReverseSweep):
    """One reverse sweep of :class:`Units`. Each row is the sum of the unit vectors of one colour."""

    def __init__(self, system: System, source: Units, taps: Taps, samples: slice, pruning: Pruning) -> None:
        pattern = system.pattern(source.state)
        assert pattern is not None
        self.pattern, self.units, self.into = pattern, source.size, taps.input
        pruning.group = pattern.count
        super().__init__(system, source.summed(system.work, pattern), replace(taps, input=None), samples, pruning)
        self.needs_b = taps.input is not None

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Walk through all steps, or down to the last step of interest. Pruned rows are counted as units."""
        cost = super().run(progress)
        self.pruning.dropped = self.pruning.dropped * self.units // self.pattern.count
        return cost

    def _hand_out(self, t: int, step: LinearStep) -> None:
        super()._hand_out(t, step)
        if self.into is not None:
            self._give_units(self.into, t, step.input_matrix())

    def _hand_state(self, sink: RowSink, t: int, state: int, step: LinearStep | None) -> None:
        self._give_units(sink, t, None)

    def _give_units(self, sink: RowSink, t: int, matrix: Array | None) -> None:
        rows, alive = self._alive(self.whole), self.stop - self.start
        by_colour = (self.count, alive // self.pattern.count, self.pattern.count, self.system.rows)
        grouped = self.work.xp.reshape(rows[:, :alive], by_colour)
        features = UnitRows(grouped, self.pattern, matrix).hand(sink, t, self.start // self.pattern.count)
        self.cost.flops += 2.0 * self.count * by_colour[1] * self.pattern.entries * features
        if int(rows.shape[1]) > alive and isinstance(sink, Collector):
            # A probe is the sum of pruned rows of all colours with random signs, so that units which reach the same
            # columns cannot be told apart; they are treated as one unit.
            probes = UnitRows(rows[:, alive:, None], self.pattern.cells(), matrix)
            sink.lose(t, probes.through(sink, t).norms() ** 2)


@dataclass
class UnitRows:
    """All units of several groups at one step, stored as one summed row per colour.

    rows : (sample, group, colour, state)
    matrix : (sample or 1, state, feature) that multiplies each unit, or None for the state itself.
    """

    rows: Array
    pattern: Pattern
    matrix: Array | None

    def hand(self, sink: RowSink, t: int, first: int) -> int:
        """Pass the groups from ``first`` on to a sink; return how many numbers were computed per entry."""
        if isinstance(sink, Collector):
            if t not in sink.steps or not int(self.rows.shape[1]):
                return 0
            if sink.reduce in (frobenius, total):  # computed without the blocks
                seen = self.through(sink, t)
                sink.put(t, first, seen.norms() if sink.reduce is frobenius else seen._totals())
                return 1
        units, width = int(self.pattern.colour.size), 1
        for start, block in self.blocks():
            width = int(block.shape[3])
            flat = namespace(block).reshape(block, (block.shape[0], block.shape[1] * units, width))
            sink.take(t, (first + start) * units, flat)
        return width

    def through(self, sink: Collector, t: int) -> UnitRows:
        """Return these rows with the sink's readout applied to the matrix that multiplies each unit."""
        if sink.readout is None or self.matrix is None:
            return self
        return replace(self, matrix=sink.readout(t, self.matrix))

    def norms(self) -> Array:
        """Return the Frobenius norm (sample, group) of the block of all units."""
        xp = namespace(self.rows)
        if self.matrix is None:
            return frobenius(self.rows)
        first, both, second = self._triangle(self.matrix)
        parts = []
        for _, some in self._chunks(1):
            value, other = some._entry(0) * first, some._entry(-1)
            squares = _squares(value if both is None else value + other * both)
            parts.append(xp.sqrt(squares if second is None else squares + _squares(other * second)))
        return xp.concat(parts, axis=1)

    def _triangle(self, matrix: Array) -> tuple[Array, Array | None, Array | None]:
        """Return R of the QR factorisation of the one or two rows of ``matrix`` that each unit reaches, by entry.

        The norm |v b + w c|^2 = (v r + w s)^2 + (w q)^2 is then a sum of two squares, without cancellation.
        """
        xp, (b, *others) = namespace(matrix), [matrix[:, _index(w)] for w in self.pattern.reach.T]
        r = xp.sqrt(xp.sum(b * b, axis=2))
        if not others:
            return r[:, None], None, None
        unit = b / xp.where(r > 0, r, xp.ones_like(r))[:, :, None]
        s = xp.sum(unit * others[0], axis=2)
        rest = others[0] - s[:, :, None] * unit
        return r[:, None], s[:, None], xp.sqrt(xp.sum(rest * rest, axis=2))[:, None]

    def _totals(self) -> Array:
        """Return the sum (sample, group) over the block of all units."""
        xp = namespace(self.rows)
        if self.matrix is None:
            return total(self.rows)
        sums, parts = xp.sum(self.matrix, axis=2), []
        for _, some in self._chunks(1):
            found = [some._entry(w) * sums[:, None, _index(column)] for w, column in enumerate(self.pattern.reach.T)]
            parts.append(xp.sum(sum(found), axis=2))
        return xp.concat(parts, axis=1)

    def _entry(self, w: int) -> Array:
        """Return the value (sample, group, unit) of each unit in the w-th of the columns that it reaches."""
        colour, column = self.pattern.colour, self.pattern.reach[:, w]
        if self.pattern.count == 1:
            return self.rows[:, :, 0, _index(column)]
        return self.rows[:, :, colour, column]

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """Yield blocks (sample, group, unit, feature) of a few groups at a time, each with its first group's number."""
        width = int(self.rows.shape[3] if self.matrix is None else self.matrix.shape[2])
        for start, some in self._chunks(width):
            yield start, some._written_out(width)

    def _written_out(self, width: int) -> Array:
        xp, reach = namespace(self.rows), self.pattern.reach
        shape = (*self.rows.shape[:2], reach.shape[0], width)
        block = xp.zeros(shape, dtype=self.rows.dtype, device=getattr(self.rows, "device", None))
        for w in range(int(reach.shape[1])):
            value = self._entry(w)
            if self.matrix is not None:
                block += value[..., None] * self.matrix[:, None, _index(reach[:, w])]
            else:
                block[:, :, np.arange(len(reach)), reach[:, w]] = value
        return block

    def _chunks(self, width: int) -> Iterator[tuple[int, UnitRows]]:
        """Yield slices of a few groups, so that intermediate arrays fit into the processor's cache."""
        samples, groups = (int(n) for n in self.rows.shape[:2])
        count = max(1, _AT_ONCE // max(1, samples * int(self.pattern.colour.size) * width))
        for start in range(0, groups, count):
            yield start, replace(self, rows=self.rows[:, start : start + count])


def _squares(values: Array) -> Array:
    """Sum squares over units: (sample, group, unit) to (sample, group)."""
    if isinstance(values, np.ndarray):
        return np.einsum("bgu,bgu->bg", values, values)
    return namespace(values).sum(values * values, axis=2)


def _index(columns: np.ndarray[Any, Any]) -> slice | np.ndarray[Any, Any]:
    """Return column indices as a slice if they are consecutive, so that indexing gives a view."""
    if columns.size and int(columns[-1] - columns[0]) == columns.size - 1 and (np.diff(columns) == 1).all():
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return columns
