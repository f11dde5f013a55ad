"""The reverse sweep of rows of cotangents against the recurrence: step by step, or in blocks of steps.

Blocks save operations if more rows are alive than the state has numbers, S. Rows that entered before a block reach the
steps within it only through the state at the block's end. Therefore only the S unit vectors of that state are swept
through the block. They give M_k = Phi(end, k) B_k at each input and Phi(end, start) at the state before the block. All
older rows R follow by two large products, dx_k = R M_k and R Phi. With F features and blocks of L steps, the operations
per row and step fall from S (C + F) to S F + S^2 / L, where C of the S + F columns of a step's product are the state
before. The result is the same product in another order of multiplication (Griewank, Walther 2008,
doi:10.1137/1.9780898717761, chapter 10).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..typing import Array
from .arrays import Workspace
from .linear import LinearStep, System, state_columns, walk
from .sweep_rows import BLOCK_BUDGET, FLUSH_EVERY, Cost, Pruning, RowSink, RowSource, Taps
from .trajectory import steps

#: Block lengths to choose from.
LENGTHS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128)

#: Smallest share of operations that blocks must save to be used, because each also costs calls and memory.
LEAST_SAVING = 0.1


class ReverseSweep:
    """One reverse sweep, with its buffers and steps. Each row contains cotangents [states | dx].

    ``steps``: consecutive steps to sweep to the end; None for all steps, down to the last step of interest.
    """

    def __init__(
        self,
        system: System,
        source: RowSource,
        taps: Taps,
        samples: slice,
        pruning: Pruning,
        steps: Sequence[int] | None = None,
    ) -> None:
        self.system, self.source, self.taps, self.samples, self.pruning = system, source, taps, samples, pruning
        self.work: Workspace = system.work
        self.steps = steps
        self.has_input = self.needs_b = taps.input is not None
        self.width = system.rows + (system.features if self.has_input else 0)
        self.count = len(range(*samples.indices(system.batch)))
        shape = (self.count, source.count + pruning.probes, self.width)
        self.old, self.new = self.work.empty(*shape), self.work.empty(*shape)
        self.start = self.stop = source.count
        self.cost = Cost(0.0, 2 * math.prod(shape) * self.work.itemsize)
        # Attribute lookups outside the loop over steps.
        self.columns = [state_columns(system, state) for state in range(len(system.state_sizes))]
        self.whole = slice(0, system.rows)
        self.per_row = {inputs: 2.0 * self.count * system.multiplications(inputs) for inputs in (False, self.has_input)}

    @property
    def left(self) -> Array:
        """Cotangents (sample, row, state) of the states before the first step of the recurrence."""
        return self.old[:, self.start : self.stop, : self.system.rows]

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Pull cotangents back from the last step to the earliest one that a sink requests; return the cost."""
        whole = self.taps.steps is None or self.taps.initial or self.steps is not None
        remaining = None if whole else len(self.taps.steps)  # type: ignore[arg-type]
        for t, step in walk(
            self.system, self.samples, reverse=True, inputs=self.needs_b, budget=BLOCK_BUDGET, steps=self.steps
        ):
            self._enter(t, step)
            wanted = self.taps.wants(t)
            if self.stop > self.start or self.pruning.active:
                if wanted:
                    self._hand_out(t, step)
                self._step(step, wanted and self.has_input)
                if wanted and self.taps.input is not None:
                    self._give(self.taps.input, t, self._alive(slice(self.system.rows, self.width)))
                self.stop = self.pruning.drop(self.old, self.system.rows, self.start, self.stop)
            if t % FLUSH_EVERY == 0:
                self.work.flush(self.old[:, self.start : self.stop + self.pruning.probes_alive, : self.system.rows])
            if progress is not None:
                progress()
            if remaining is not None and wanted:
                remaining -= 1
                if remaining == 0:
                    break
        for state, sink in self.taps.initial.items():
            self._hand_state(sink, -1, state, None)
        return self.cost

    def _enter(self, t: int, step: LinearStep) -> None:
        """Add the source's cotangents of step t to the rows, and convert all rows to total gradients."""
        first = self.source.first(t)
        entering = slice(first, self.start)
        if first < self.start:
            self.old[:, entering, : self.system.rows] = 0
        stop = self.stop if self.source.lasting else self.start
        for state, part in self.source.parts(t, first, stop, self.samples).items():
            target = self.old[:, first:stop, self.columns[state]]
            target[...] = target + part
        self.start = first
        rows = self._alive(self.whole)
        if rows.shape[1]:
            step.arrive(rows, stop - first)
        if first < entering.stop:
            self.pruning.note(self.old, self.system.rows, first, entering.stop)

    def _alive(self, columns: slice) -> Array:
        """Return the cotangent rows that are not pruned, followed by the random probe rows of pruned ones."""
        return self.old[:, self.start : self.stop + self.pruning.probes_alive, columns]

    def _step(self, step: LinearStep, with_input: bool) -> None:
        """Pull all rows back by one step, from the states after it to [states before | dx]."""
        stop = self.stop + self.pruning.probes_alive
        width = self.width if with_input else self.system.rows
        rows, target = self.old[:, self.start : stop, self.whole], self.new[:, self.start : stop, :width]
        step.pull(rows, target, inputs=with_input)
        self.cost.flops += (stop - self.start) * self.per_row[with_input]
        self.old, self.new = self.new, self.old

    def _hand_out(self, t: int, step: LinearStep) -> None:
        """Pass the requested states' gradients at step t to their sinks, before the rows are pulled back."""
        for state, sink in self.taps.states.items():
            self._hand_state(sink, t, state, step)

    def _hand_state(self, sink: RowSink, t: int, state: int, step: LinearStep | None) -> None:
        """Pass the gradients of one state to a sink: total gradients after a step, or those of the initial state."""
        rows, columns = self._alive(self.whole), self.columns[state]
        self._give(sink, t, rows[:, :, columns] if step is None else step.produced(rows, state, columns))

    def _give(self, sink: RowSink, t: int, values: Array) -> None:
        """Pass cotangent rows to a sink, and the random-sign sums of pruned rows."""
        alive = self.stop - self.start
        sink.take(t, self.start, values[:, :alive])
        if int(values.shape[1]) > alive:
            sink.residue(t, values[:, alive:])


@dataclass(frozen=True)
class Blocks:
    """Split of a reverse sweep: steps per block (0: no blocks), and multiplications per sample."""

    length: int
    products: float


def plan_blocks(system: System, alive: Sequence[int] | np.ndarray[Any, Any], features: int) -> Blocks:
    """Choose the block length with the fewest multiplications.

    Parameters
    ----------
    alive : (step,)
        Number of rows alive at each step, in the order of the sweep; it never decreases.
    features
        Numbers per row that are passed to sinks at each step.
    """
    rows = np.asarray(alive, dtype=np.float64)
    per_row = float(system.multiplications(features > 0))
    plain = float(rows.sum()) * per_row
    best = Blocks(0, plain)
    if rows.size == 0 or rows[-1] <= system.rows:
        return best
    for length in (n for n in LENGTHS if n < rows.size):
        entries = np.arange(0, rows.size, length)
        carried = np.concatenate([[0.0], rows[entries[1:] - 1]])
        sizes = np.diff(np.append(entries, rows.size))
        own = float(rows.sum() - (carried * sizes).sum())
        units = float(system.rows * sizes[carried > 0].sum())
        moved = float((carried * (features * sizes + system.rows)).sum()) * system.rows
        cost = (own + units) * per_row + moved
        if cost < min(best.products, (1 - LEAST_SAVING) * plain):
            best = Blocks(length, cost)
    return best


class BlockedSweep:
    """One reverse sweep in blocks, with gradients of the input and of the initial state."""

    def __init__(self, system: System, source: RowSource, taps: Taps, samples: slice, length: int) -> None:
        self.system, self.source, self.taps, self.samples = system, source, taps, samples
        self.work: Workspace = system.work
        self.length = length
        self.count = len(range(*samples.indices(system.batch)))
        self.first = source.count
        self.carried = self.work.empty(self.count, 0, system.rows)
        self.cost = Cost()

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Sweep back through blocks of steps to the earliest step that a sink requests; return the cost."""
        system, wanted = self.system, self.taps.steps
        order = list(steps(system.time, system.order, reverse=True))
        left = None if wanted is None or self.taps.initial else len(wanted)
        for start in range(0, system.time, self.length):
            block = order[start : start + self.length]
            self._block(block, progress)
            if left is not None:
                left -= sum(self.taps.wants(t) for t in block)
                if left == 0:
                    break
        for state, sink in self.taps.initial.items():
            sink.take(-1, self.first, self.carried[:, :, state_columns(system, state)])
        return self.cost

    def _block(self, steps: Sequence[int], progress: Callable[[], None] | None) -> None:
        """Sweep the rows that enter in a block, and the unit vectors of its final state.

        All rows that entered before are then multiplied by the swept unit vectors.
        """
        system, work, older = self.system, self.work, int(self.carried.shape[1])
        units = system.rows if older else 0
        lowest = self.source.first(steps[-1])
        own = self.first - lowest
        kept = [t for t in steps if self.taps.wants(t)] if self.taps.input is not None else []
        window = _Window(self.source, system, steps[0], lowest, self.first, units)
        across = work.empty(self.count, units, len(kept), system.features)
        inner = Taps()
        if self.taps.input is not None:
            places = {t: i for i, t in enumerate(kept)}
            inner = Taps(_Split(self.taps.input, lowest, own, across, places), steps=frozenset(kept))
        sweep = ReverseSweep(system, window, inner, self.samples, Pruning(), steps)
        cost = sweep.run(progress)
        rows = work.empty(self.count, own + older, system.rows)
        rows[:, :own] = sweep.left[:, :own]
        if older:
            self._hand_out(kept, across)
            work.matmul(self.carried, sweep.left[:, own:], rows[:, own:])
            self.cost.flops += 2.0 * self.count * older * system.rows * system.rows
            work.flush(rows[:, own:])
        held = (rows, self.carried, across)
        self.cost.flops += cost.flops
        self.cost.buffer_bytes = max(
            self.cost.buffer_bytes, cost.buffer_bytes + sum(math.prod(array.shape) for array in held) * work.itemsize
        )
        self.carried, self.first = rows, lowest

    def _hand_out(self, kept: list[int], across: Array) -> None:
        """Pass rows of later blocks to the input's sink, several steps per matrix product, no wider than the state."""
        system, work, older = self.system, self.work, int(self.carried.shape[1])
        at_once = max(1, system.rows // max(1, system.features))
        for start in range(0, len(kept), at_once):
            steps = kept[start : start + at_once]
            width = len(steps) * system.features
            into = work.xp.reshape(across[:, :, start : start + len(steps)], (self.count, system.rows, width))
            moved = work.empty(self.count, older, width)
            work.matmul(self.carried, into, moved)
            self.cost.flops += 2.0 * self.count * older * system.rows * width
            for i, t in enumerate(steps):
                values = moved[:, :, i * system.features : (i + 1) * system.features]
                self.taps.input.take(t, self.first, values)  # type: ignore[union-attr]


@dataclass
class _Window:
    """Row source of one block: rows that enter within it, then the unit vectors of its final state."""

    source: RowSource
    system: System
    entry: int
    lowest: int
    stop: int
    units: int
    #: Only sources whose rows enter once are swept in blocks.
    lasting: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.group = self.source.group
        self.own = self.stop - self.lowest
        self.count = self.own + self.units

    def first(self, t: int) -> int:
        """Return the number of the first row that is non-zero at step t, counted from the block's lowest row."""
        return self.source.first(t) - self.lowest

    def parts(self, t: int, first: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return the cotangents of rows that enter at step t; at the block's end also the unit vectors of its state."""
        entering = min(stop, self.own)
        found = self.source.parts(t, first + self.lowest, entering + self.lowest, samples)
        if t != self.entry or not self.units:
            return found
        work = self.system.work
        unit = work.eye(self.units)
        whole = {}
        for state in range(len(self.system.state_sizes)):
            columns = state_columns(self.system, state)
            part = found.get(state)
            size = columns.stop - columns.start
            rows = work.zeros(1 if part is None else int(part.shape[0]), stop - first, size)
            if part is not None:
                rows[:, : entering - first] = part
            rows[:, entering - first :] = unit[:, columns]
            whole[state] = rows
        return whole


@dataclass
class _Split:
    """A sink that passes on a block's own rows, and stores rows of unit vectors (sample, unit, step, feature)."""

    sink: RowSink
    lowest: int
    own: int
    across: Array
    places: Mapping[int, int]

    def take(self, t: int, first: int, values: Array) -> None:
        """Pass the block's own rows to the sink, and store the rows that started as unit vectors."""
        own = self.own - first
        if own:
            self.sink.take(t, first + self.lowest, values[:, :own])
        if self.across.shape[1]:
            self.across[:, :, self.places[t]] = values[:, own:]

    def residue(self, t: int, values: Array) -> None:
        """Do nothing: blocked sweeps are not pruned."""
