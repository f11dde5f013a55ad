"""Sweeps of many cotangents or tangents at once through a linear system: G[t, k] = C A_t ... A_{k+1} B_k.

The reverse sweep pulls cotangents from the outputs back against the recurrence; the forward sweep pushes tangents from
the inputs along the recurrence. Each step is one batched matrix product over the rows that are alive, written to memory
that is allocated once. If more rows are alive than the state has numbers, the reverse sweep proceeds in blocks. Reverse
and forward accumulation: Griewank, Walther 2008, doi:10.1137/1.9780898717761, chapter 3; the linearisation
(:mod:`rnnlens.recurrence.linear`) and the blocks (:mod:`rnnlens.recurrence.sweep_reverse`) are rnnlens' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..typing import Array
from .arrays import at_step, namespace
from .linear import LinearStep, Pattern, System, state_columns, walk
from .reductions import Collector, frobenius, total
from .sweep_reverse import BlockedSweep, ReverseSweep, plan_blocks
from .sweep_rows import BLOCK_BUDGET, FLUSH_EVERY, Cost, Pruning, RowSink, RowSource, Taps, Units
from .trajectory import steps

#: Numbers in the blocks that are computed at a time.
_CHUNK_SIZE = 2**18

__all__ = ["Entrances", "Taps", "forward", "forward_flops", "reverse", "reverse_flops", "unit_flops"]


def reverse(
    system: System,
    source: RowSource | Units,
    taps: Taps,
    *,
    samples: slice = slice(None),
    pruning: Pruning | None = None,
    progress: Callable[[], None] | None = None,
) -> Cost:
    """Pull rows of cotangents back through the recurrence, and pass the gradients to the sinks in ``taps``.

    Parameters
    ----------
    source
        Rows of cotangents of the states, and the steps at which they enter. ``Units`` is only for systems whose units
        never meet (:class:`rnnlens.recurrence.linear.Pattern`).
    taps
        ``input`` receives dL/dx_t, ``states`` the total dL/ds_t as the step produces s_t, ``initial`` dL/ds_0.
    samples
        Samples to sweep.
    """
    if isinstance(source, Units):
        with system.work.no_autograd():
            return UnitSweep(system, source, taps, samples, pruning or Pruning()).run(progress)
    length = 0
    if not taps.states and pruning is None and not source.enters_every_step:
        order = list(steps(system.time, system.order, reverse=True))
        requested = [i for i, t in enumerate(order) if taps.wants(t)]
        stop = system.time if taps.initial or not requested else requested[-1] + 1
        alive_counts = [source.count - source.first_row(t) for t in order[:stop]]
        length = plan_blocks(
            system, alive_counts, system.features if requested and taps.input is not None else 0
        ).length
    with system.work.no_autograd():
        if length:
            return BlockedSweep(system, source, taps, samples, length).run(progress)
        return ReverseSweep(system, source, taps, samples, pruning or Pruning()).run(progress)


def forward(
    system: System,
    entrances: Entrances,
    sinks: Mapping[int, RowSink],
    steps: frozenset[int],
    *,
    samples: slice = slice(None),
    pruning: Pruning | None = None,
    progress: Callable[[], None] | None = None,
) -> Cost:
    """Push rows of tangents forward through the recurrence, and pass the states' tangents to the sinks.

    Parameters
    ----------
    entrances
        Rows of tangents and where they enter. Rows are in the opposite order of entry: a sink's row 0 belongs to the
        group that enters last.
    sinks
        For each state index a sink that receives the state's tangents after each of ``steps``.
    """
    with system.work.no_autograd():
        return ForwardSweep(system, entrances, sinks, steps, samples, pruning or Pruning()).run(progress)


def reverse_flops(system: System, alive_counts: Sequence[int] | np.ndarray[Any, Any], with_input: bool) -> float:
    """Return the FLOPs of a reverse sweep with ``alive_counts`` cotangent rows (step,).

    ``with_input``: gradients of the input are computed too, and the sweep may work in blocks of steps.
    """
    if with_input:
        return 2.0 * system.batch * plan_blocks(system, alive_counts, system.features).products
    return 2.0 * system.batch * float(np.sum(alive_counts)) * system.multiplications(False)


def unit_flops(system: System, state: int, alive_counts: Sequence[int] | np.ndarray[Any, Any], features: int) -> float:
    """Return the FLOPs of a reverse sweep of all units of a state, with ``alive_counts`` groups (step,).

    ``features`` is 1 if blocks are reduced immediately.
    """
    pattern = system.pattern(state)
    assert pattern is not None
    per_group = pattern.count * system.multiplications(False) + pattern.entries * features
    return 2.0 * system.batch * float(np.sum(alive_counts)) * per_group


def forward_flops(system: System, alive_count: int, out_rows: int) -> float:
    """Return the FLOPs of a forward sweep of ``alive_count`` pairs of row and step and ``out_rows`` readout rows."""
    readout = out_rows * system.state_sizes[0]
    return 2.0 * system.batch * alive_count * (system.multiplications(False) + readout)


@dataclass
class Entrances:
    """Rows of tangents and the place where they enter: the layer's input, its states, or its initial state.

    Attributes
    ----------
    kind
        ``"input"``, ``"state"`` or ``"initial"``.
    times
        Steps at which the rows enter; ignored for ``"initial"``.
    blocks : (sample or 1, time or 1, row, feature) or None
        For ``"input"``: the tangent of the layer's input of each row; None for unit vectors.
    state
        For ``"state"`` and ``"initial"``: index of the state at which unit vectors enter.
    """

    kind: str
    times: Sequence[int] = ()
    blocks: Array | None = None
    state: int = 0

    def group(self, system: System) -> int:
        """Return the number of tangent rows that enter at one step."""
        if self.kind != "input":
            return system.state_sizes[self.state]
        return system.features if self.blocks is None else int(self.blocks.shape[2])

    def count(self, system: System) -> int:
        """Return the total number of tangent rows that enter the recurrence."""
        return self.group(system) * (1 if self.kind == "initial" else len(self.times))


class ForwardSweep:
    """One forward sweep, with its buffers and steps. Each row contains the tangents of all states."""

    def __init__(
        self,
        system: System,
        entrances: Entrances,
        sinks: Mapping[int, RowSink],
        steps: frozenset[int],
        samples: slice,
        pruning: Pruning,
    ) -> None:
        self.system, self.entrances, self.sinks, self.steps = system, entrances, sinks, steps
        self.samples, self.pruning, self.work = samples, pruning, system.work
        self.sample_count = len(range(*samples.indices(system.batch)))
        self.group = entrances.group(system)
        self.start = self.stop = entrances.count(system)
        shape = (self.sample_count, self.stop + pruning.probes, system.rows)
        self.current, self.spare = self.work.empty(*shape), self.work.empty(*shape)
        self.cost = Cost(0.0, 2 * math.prod(shape) * self.work.itemsize)
        # Attribute lookups outside the loop over steps.
        self.columns = {state: state_columns(system, state) for state in sinks}
        self.flops_per_row = 2.0 * self.sample_count * system.multiplications(False)

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Push tangents from the first step to the last step that a sink requests; return the cost."""
        remaining, entering = len(self.steps), frozenset(self.entrances.times)
        if self.entrances.kind == "initial":
            self._add_state_rows(None)
        for t, step in walk(
            self.system, self.samples, reverse=False, inputs=self.entrances.kind == "input", budget=BLOCK_BUDGET
        ):
            if self.stop > self.start or self.pruning.active:
                self._step(step)
            if self.entrances.kind == "input" and t in entering:
                self._add_input_rows(t, step)
            elif self.entrances.kind == "state" and t in entering:
                self._add_state_rows(step)
            if t in self.steps:
                self._pass_states(t)
                remaining -= 1
            if remaining == 0:
                break
            self.stop = self.pruning.drop(self.current, self.system.rows, self.start, self.stop)
            if t % FLUSH_EVERY == 0:
                self.work.flush(self.current[:, self.start : self.stop + self.pruning.probes_alive])
            if progress is not None:
                progress()
        return self.cost

    def _step(self, step: LinearStep) -> None:
        """Push all tangent rows from the states before a step to the states after it."""
        rows = slice(self.start, self.stop + self.pruning.probes_alive)
        step.push(self.current[:, rows], self.spare[:, rows])
        self.cost.flops += (rows.stop - rows.start) * self.flops_per_row
        self.current, self.spare = self.spare, self.current

    def _add_input_rows(self, t: int, step: LinearStep) -> None:
        entering = slice(self.start - self.group, self.start)
        block = self.entrances.blocks
        if block is not None:
            block = at_step(block, self.samples, t)
            self.cost.flops += 2.0 * self.sample_count * self.group * self.system.features * self.system.rows
        step.inject(block, self.current[:, entering])
        self.start = entering.start
        self.pruning.record_entry(self.current, self.system.rows, entering.start, entering.stop)

    def _add_state_rows(self, step: LinearStep | None) -> None:
        """Add unit tangents of one new state of a step, such as c_t of an LSTM, with their effect on h_t."""
        entering, state = slice(self.start - self.group, self.start), self.entrances.state
        columns = state_columns(self.system, state)
        self.current[:, entering] = 0
        self.current[:, entering, columns] = self.work.eye(self.group)
        if step is not None:
            step.add_state_effects(self.current[:, entering], state, columns)
        self.start = entering.start
        self.pruning.record_entry(self.current, self.system.rows, entering.start, entering.stop)

    def _pass_states(self, t: int) -> None:
        for state, sink in self.sinks.items():
            columns = self.columns[state]
            sink.take(t, self.start, self.current[:, self.start : self.stop, columns])
            if self.pruning.probes_alive:
                sink.take_residue(t, self.current[:, self.stop : self.stop + self.pruning.probes_alive, columns])


class UnitSweep(ReverseSweep):
    """One reverse sweep of all units of a state, for systems whose units never meet.

    One row for each of S units would need S x S numbers per start step. Units of one colour reach different columns
    (:class:`rnnlens.recurrence.linear.Pattern`), so that their sum is swept instead: a single row for a diagonal
    recurrence. The blocks of all units at an input are computed from that row and B_t when needed, or reduced without
    being built.
    """

    def __init__(self, system: System, source: Units, taps: Taps, samples: slice, pruning: Pruning) -> None:
        pattern = system.pattern(source.state)
        assert pattern is not None
        self.pattern, self.unit_count, self.input_sink = pattern, source.size, taps.input
        pruning.group = pattern.count
        super().__init__(system, source.colour_rows(system.work, pattern), replace(taps, input=None), samples, pruning)
        self.needs_b = taps.input is not None

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Pull unit cotangents back from the last step to the earliest one that a sink requests; return the cost.

        Pruned rows are counted as units.
        """
        cost = super().run(progress)
        self.pruning.dropped = self.pruning.dropped * self.unit_count // self.pattern.count
        return cost

    def _pass_states(self, t: int, step: LinearStep) -> None:
        super()._pass_states(t, step)
        if self.input_sink is not None:
            self._pass_units(self.input_sink, t, step.input_matrix())

    def _pass_state(self, sink: RowSink, t: int, state: int, step: LinearStep | None) -> None:
        self._pass_units(sink, t, None)

    def _pass_units(self, sink: RowSink, t: int, matrix: Array | None) -> None:
        rows, alive_count = self._alive_rows(self.all_states), self.stop - self.start
        by_colour = (self.sample_count, alive_count // self.pattern.count, self.pattern.count, self.system.rows)
        grouped = self.work.xp.reshape(rows[:, :alive_count], by_colour)
        features = UnitRows(grouped, self.pattern, matrix).pass_to(sink, t, self.start // self.pattern.count)
        self.cost.flops += 2.0 * self.sample_count * by_colour[1] * self.pattern.entries * features
        if int(rows.shape[1]) > alive_count and isinstance(sink, Collector):
            # A probe is the sum of pruned rows of all colours with random signs, so that units which reach the same
            # columns cannot be told apart; they are treated as one unit.
            probes = UnitRows(rows[:, alive_count:, None], self.pattern.merged_units(), matrix)
            sink.add_error(t, probes.after_readout(sink, t).norms() ** 2)


@dataclass
class UnitRows:
    """All units of several groups at one step, stored as one summed row per colour.

    rows : (sample, group, colour, state)
    matrix : (sample or 1, state, feature) that multiplies each unit, or None for the state itself.
    """

    rows: Array
    pattern: Pattern
    matrix: Array | None

    def pass_to(self, sink: RowSink, t: int, first_group: int) -> int:
        """Pass the rows of all groups of units to a sink; return how many numbers were computed per entry.

        ``first_group`` is the number of the first group.
        """
        if isinstance(sink, Collector):
            if t not in sink.steps or not int(self.rows.shape[1]):
                return 0
            if sink.reduce in (frobenius, total):  # computed without the blocks
                unit_rows = self.after_readout(sink, t)
                sink.store(t, first_group, unit_rows.norms() if sink.reduce is frobenius else unit_rows._block_sums())
                return 1
        units, width = int(self.pattern.colour.size), 1
        for start, block in self.blocks():
            width = int(block.shape[3])
            flat = namespace(block).reshape(block, (block.shape[0], block.shape[1] * units, width))
            sink.take(t, (first_group + start) * units, flat)
        return width

    def after_readout(self, sink: Collector, t: int) -> UnitRows:
        """Multiply the matrix of each unit's cotangent by the sink's readout; return the result as rows."""
        if sink.readout is None or self.matrix is None:
            return self
        return replace(self, matrix=sink.readout(t, self.matrix))

    def norms(self) -> Array:
        """Return the Frobenius norm of each group's block of all units, (sample, group)."""
        xp = namespace(self.rows)
        if self.matrix is None:
            return frobenius(self.rows)
        r, s, q = self._reached_norms(self.matrix)
        norms = []
        for _, chunk in self._chunks(1):
            first_entries, last_entries = chunk._reached_entries(0) * r, chunk._reached_entries(-1)
            squares = _squares(first_entries if s is None else first_entries + last_entries * s)
            norms.append(xp.sqrt(squares if q is None else squares + _squares(last_entries * q)))
        return xp.concat(norms, axis=1)

    def _reached_norms(self, matrix: Array) -> tuple[Array, Array | None, Array | None]:
        """Return R of the QR factorisation of the one or two rows of ``matrix`` that each unit's cotangent reaches.

        R is returned as r, s, q, (sample, 1, unit) each; s and q are None for one row. The norm |v b + w c|^2 =
        (v r + w s)^2 + (w q)^2 is then a sum of two squares, without cancellation.
        """
        xp, (b, *other_rows) = namespace(matrix), [matrix[:, _index(w)] for w in self.pattern.reach.T]
        r = xp.sqrt(xp.sum(b * b, axis=2))
        if not other_rows:
            return r[:, None], None, None
        unit = b / xp.where(r > 0, r, xp.ones_like(r))[:, :, None]
        s = xp.sum(unit * other_rows[0], axis=2)
        remainder = other_rows[0] - s[:, :, None] * unit
        return r[:, None], s[:, None], xp.sqrt(xp.sum(remainder * remainder, axis=2))[:, None]

    def _block_sums(self) -> Array:
        """Return the sum of all entries of each group's block, (sample, group)."""
        xp = namespace(self.rows)
        if self.matrix is None:
            return total(self.rows)
        row_sums, block_sums = xp.sum(self.matrix, axis=2), []
        for _, chunk in self._chunks(1):
            products = [
                chunk._reached_entries(w) * row_sums[:, None, _index(column)]
                for w, column in enumerate(self.pattern.reach.T)
            ]
            block_sums.append(xp.sum(sum(products), axis=2))
        return xp.concat(block_sums, axis=1)

    def _reached_entries(self, w: int) -> Array:
        """Return the w-th of the entries that each unit's cotangent reaches, (sample, group, unit)."""
        colour, column = self.pattern.colour, self.pattern.reach[:, w]
        if self.pattern.count == 1:
            return self.rows[:, :, 0, _index(column)]
        return self.rows[:, :, colour, column]

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """Yield blocks (sample, group, unit, feature) of a few groups at a time, each with its first group's number."""
        width = int(self.rows.shape[3] if self.matrix is None else self.matrix.shape[2])
        for start, chunk in self._chunks(width):
            yield start, chunk._dense_blocks(width)

    def _dense_blocks(self, width: int) -> Array:
        xp, reach = namespace(self.rows), self.pattern.reach
        shape = (*self.rows.shape[:2], reach.shape[0], width)
        block = xp.zeros(shape, dtype=self.rows.dtype, device=getattr(self.rows, "device", None))
        for w in range(int(reach.shape[1])):
            value = self._reached_entries(w)
            if self.matrix is not None:
                block += value[..., None] * self.matrix[:, None, _index(reach[:, w])]
            else:
                block[:, :, np.arange(len(reach)), reach[:, w]] = value
        return block

    def _chunks(self, width: int) -> Iterator[tuple[int, UnitRows]]:
        """Yield slices of a few groups, so that intermediate arrays fit into the processor's cache."""
        samples, groups = (int(n) for n in self.rows.shape[:2])
        count = max(1, _CHUNK_SIZE // max(1, samples * int(self.pattern.colour.size) * width))
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
