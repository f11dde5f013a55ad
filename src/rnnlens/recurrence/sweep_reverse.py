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
        self.sample_count = len(range(*samples.indices(system.batch)))
        shape = (self.sample_count, source.count + pruning.probes, self.width)
        self.current, self.spare = self.work.empty(*shape), self.work.empty(*shape)
        self.start = self.stop = source.count
        self.cost = Cost(0.0, 2 * math.prod(shape) * self.work.itemsize)
        # Attribute lookups outside the loop over steps.
        self.columns = [state_columns(system, state) for state in range(len(system.state_sizes))]
        self.all_states = slice(0, system.rows)
        self.flops_per_row = {
            inputs: 2.0 * self.sample_count * system.multiplications(inputs) for inputs in (False, self.has_input)
        }

    @property
    def initial_cotangents(self) -> Array:
        """Cotangents (sample, row, state) of the states before the first step of the recurrence."""
        return self.current[:, self.start : self.stop, : self.system.rows]

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Pull cotangents back from the last step to the earliest one that a sink requests; return the cost."""
        all_steps = self.taps.steps is None or self.taps.initial or self.steps is not None
        remaining = None if all_steps else len(self.taps.steps)  # type: ignore[arg-type]
        for t, step in walk(
            self.system, self.samples, reverse=True, inputs=self.needs_b, budget=BLOCK_BUDGET, steps=self.steps
        ):
            self._add_entering_rows(t, step)
            is_requested = self.taps.wants(t)
            if self.stop > self.start or self.pruning.active:
                if is_requested:
                    self._pass_states(t, step)
                self._step(step, is_requested and self.has_input)
                if is_requested and self.taps.input is not None:
                    self._pass_rows(self.taps.input, t, self._alive_rows(slice(self.system.rows, self.width)))
                self.stop = self.pruning.drop(self.current, self.system.rows, self.start, self.stop)
            if t % FLUSH_EVERY == 0:
                self.work.flush(self.current[:, self.start : self.stop + self.pruning.probes_alive, : self.system.rows])
            if progress is not None:
                progress()
            if remaining is not None and is_requested:
                remaining -= 1
                if remaining == 0:
                    break
        for state, sink in self.taps.initial.items():
            self._pass_state(sink, -1, state, None)
        return self.cost

    def _add_entering_rows(self, t: int, step: LinearStep) -> None:
        """Add the source's cotangents of step t to the rows, and convert all rows to total gradients."""
        first_row = self.source.first_row(t)
        entering = slice(first_row, self.start)
        if first_row < self.start:
            self.current[:, entering, : self.system.rows] = 0
        stop = self.stop if self.source.enters_every_step else self.start
        for state, cotangents in self.source.parts(t, first_row, stop, self.samples).items():
            target = self.current[:, first_row:stop, self.columns[state]]
            target[...] = target + cotangents
        self.start = first_row
        rows = self._alive_rows(self.all_states)
        if rows.shape[1]:
            step.to_total_gradients(rows, stop - first_row)
        if first_row < entering.stop:
            self.pruning.record_entry(self.current, self.system.rows, first_row, entering.stop)

    def _alive_rows(self, columns: slice) -> Array:
        """Return the cotangent rows that are not pruned, followed by the random probe rows of pruned ones."""
        return self.current[:, self.start : self.stop + self.pruning.probes_alive, columns]

    def _step(self, step: LinearStep, with_input: bool) -> None:
        """Pull all rows back by one step, from the states after it to [states before | dx]."""
        stop = self.stop + self.pruning.probes_alive
        width = self.width if with_input else self.system.rows
        rows, target = self.current[:, self.start : stop, self.all_states], self.spare[:, self.start : stop, :width]
        step.pull(rows, target, inputs=with_input)
        self.cost.flops += (stop - self.start) * self.flops_per_row[with_input]
        self.current, self.spare = self.spare, self.current

    def _pass_states(self, t: int, step: LinearStep) -> None:
        """Pass the requested states' gradients at step t to their sinks, before the rows are pulled back."""
        for state, sink in self.taps.states.items():
            self._pass_state(sink, t, state, step)

    def _pass_state(self, sink: RowSink, t: int, state: int, step: LinearStep | None) -> None:
        """Pass the gradients of one state to a sink: total gradients after a step, or those of the initial state."""
        rows, columns = self._alive_rows(self.all_states), self.columns[state]
        self._pass_rows(sink, t, rows[:, :, columns] if step is None else step.state_gradients(rows, state, columns))

    def _pass_rows(self, sink: RowSink, t: int, values: Array) -> None:
        """Pass cotangent rows to a sink, and the random-sign sums of pruned rows."""
        alive_count = self.stop - self.start
        sink.take(t, self.start, values[:, :alive_count])
        if int(values.shape[1]) > alive_count:
            sink.take_residue(t, values[:, alive_count:])


@dataclass(frozen=True)
class Blocks:
    """Split of a reverse sweep: steps per block (0: no blocks), and multiplications per sample."""

    length: int
    products: float


def plan_blocks(system: System, alive_counts: Sequence[int] | np.ndarray[Any, Any], features: int) -> Blocks:
    """Choose the block length with the fewest multiplications.

    Parameters
    ----------
    alive_counts : (step,)
        Number of rows alive at each step, in the order of the sweep; it never decreases.
    features
        Numbers per row that are passed to sinks at each step.
    """
    rows = np.asarray(alive_counts, dtype=np.float64)
    per_row = float(system.multiplications(features > 0))
    unblocked_cost = float(rows.sum()) * per_row
    cheapest = Blocks(0, unblocked_cost)
    if rows.size == 0 or rows[-1] <= system.rows:
        return cheapest
    for length in (n for n in LENGTHS if n < rows.size):
        block_starts = np.arange(0, rows.size, length)
        carried_rows = np.concatenate([[0.0], rows[block_starts[1:] - 1]])
        block_sizes = np.diff(np.append(block_starts, rows.size))
        entering_rows = float(rows.sum() - (carried_rows * block_sizes).sum())
        unit_rows = float(system.rows * block_sizes[carried_rows > 0].sum())
        product_cost = float((carried_rows * (features * block_sizes + system.rows)).sum()) * system.rows
        cost = (entering_rows + unit_rows) * per_row + product_cost
        if cost < min(cheapest.products, (1 - LEAST_SAVING) * unblocked_cost):
            cheapest = Blocks(length, cost)
    return cheapest


class BlockedSweep:
    """One reverse sweep in blocks, with gradients of the input and of the initial state."""

    def __init__(self, system: System, source: RowSource, taps: Taps, samples: slice, length: int) -> None:
        self.system, self.source, self.taps, self.samples = system, source, taps, samples
        self.work: Workspace = system.work
        self.length = length
        self.sample_count = len(range(*samples.indices(system.batch)))
        self.first_row = source.count
        self.carried_rows = self.work.empty(self.sample_count, 0, system.rows)
        self.cost = Cost()

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Sweep back through blocks of steps to the earliest step that a sink requests; return the cost."""
        system, requested_steps = self.system, self.taps.steps
        order = list(steps(system.time, system.order, reverse=True))
        remaining = None if requested_steps is None or self.taps.initial else len(requested_steps)
        for start in range(0, system.time, self.length):
            block = order[start : start + self.length]
            self._sweep_block(block, progress)
            if remaining is not None:
                remaining -= sum(self.taps.wants(t) for t in block)
                if remaining == 0:
                    break
        for state, sink in self.taps.initial.items():
            sink.take(-1, self.first_row, self.carried_rows[:, :, state_columns(system, state)])
        return self.cost

    def _sweep_block(self, steps: Sequence[int], progress: Callable[[], None] | None) -> None:
        """Sweep the rows that enter in a block, and the unit vectors of its final state.

        All rows that entered before are then multiplied by the swept unit vectors.
        """
        system, work, older_count = self.system, self.work, int(self.carried_rows.shape[1])
        unit_count = system.rows if older_count else 0
        lowest_row = self.source.first_row(steps[-1])
        own_count = self.first_row - lowest_row
        input_steps = [t for t in steps if self.taps.wants(t)] if self.taps.input is not None else []
        block_rows = _BlockRows(self.source, system, steps[0], lowest_row, self.first_row, unit_count)
        unit_rows = work.empty(self.sample_count, unit_count, len(input_steps), system.features)
        inner_taps = Taps()
        if self.taps.input is not None:
            positions = {t: i for i, t in enumerate(input_steps)}
            inner_taps = Taps(
                _BlockSink(self.taps.input, lowest_row, own_count, unit_rows, positions), steps=frozenset(input_steps)
            )
        sweep = ReverseSweep(system, block_rows, inner_taps, self.samples, Pruning(), steps)
        sweep_cost = sweep.run(progress)
        new_rows = work.empty(self.sample_count, own_count + older_count, system.rows)
        new_rows[:, :own_count] = sweep.initial_cotangents[:, :own_count]
        if older_count:
            self._pass_states(input_steps, unit_rows)
            work.matmul(self.carried_rows, sweep.initial_cotangents[:, own_count:], new_rows[:, own_count:])
            self.cost.flops += 2.0 * self.sample_count * older_count * system.rows * system.rows
            work.flush(new_rows[:, own_count:])
        buffers = (new_rows, self.carried_rows, unit_rows)
        self.cost.flops += sweep_cost.flops
        self.cost.buffer_bytes = max(
            self.cost.buffer_bytes,
            sweep_cost.buffer_bytes + sum(math.prod(array.shape) for array in buffers) * work.itemsize,
        )
        self.carried_rows, self.first_row = new_rows, lowest_row

    def _pass_states(self, input_steps: list[int], unit_rows: Array) -> None:
        """Pass rows of later blocks to the input's sink, several steps per matrix product, no wider than the state."""
        system, work, older_count = self.system, self.work, int(self.carried_rows.shape[1])
        steps_at_once = max(1, system.rows // max(1, system.features))
        for start in range(0, len(input_steps), steps_at_once):
            steps = input_steps[start : start + steps_at_once]
            width = len(steps) * system.features
            step_matrices = work.xp.reshape(
                unit_rows[:, :, start : start + len(steps)], (self.sample_count, system.rows, width)
            )
            products = work.empty(self.sample_count, older_count, width)
            work.matmul(self.carried_rows, step_matrices, products)
            self.cost.flops += 2.0 * self.sample_count * older_count * system.rows * width
            for i, t in enumerate(steps):
                values = products[:, :, i * system.features : (i + 1) * system.features]
                self.taps.input.take(t, self.first_row, values)  # type: ignore[union-attr]


@dataclass
class _BlockRows:
    """Row source of one block: rows that enter within it, then the unit vectors of its final state."""

    source: RowSource
    system: System
    entry_step: int
    lowest_row: int
    stop: int
    unit_count: int
    #: Only sources whose rows enter once are swept in blocks.
    enters_every_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.group = self.source.group
        self.own_count = self.stop - self.lowest_row
        self.count = self.own_count + self.unit_count

    def first_row(self, t: int) -> int:
        """Return the number of the first row that is non-zero at step t, counted from the block's lowest row."""
        return self.source.first_row(t) - self.lowest_row

    def parts(self, t: int, first_row: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return the cotangents of rows that enter at step t; at the block's end also the unit vectors of its state."""
        entering = min(stop, self.own_count)
        entering_rows = self.source.parts(t, first_row + self.lowest_row, entering + self.lowest_row, samples)
        if t != self.entry_step or not self.unit_count:
            return entering_rows
        work = self.system.work
        unit_vectors = work.eye(self.unit_count)
        rows_by_state = {}
        for state in range(len(self.system.state_sizes)):
            columns = state_columns(self.system, state)
            own_rows = entering_rows.get(state)
            size = columns.stop - columns.start
            rows = work.zeros(1 if own_rows is None else int(own_rows.shape[0]), stop - first_row, size)
            if own_rows is not None:
                rows[:, : entering - first_row] = own_rows
            rows[:, entering - first_row :] = unit_vectors[:, columns]
            rows_by_state[state] = rows
        return rows_by_state


@dataclass
class _BlockSink:
    """A sink that passes on a block's own rows, and stores rows of unit vectors (sample, unit, step, feature)."""

    sink: RowSink
    lowest_row: int
    own_count: int
    unit_rows: Array
    positions: Mapping[int, int]

    def take(self, t: int, first_row: int, values: Array) -> None:
        """Pass the block's own rows to the sink, and store the rows that started as unit vectors."""
        own_rows = self.own_count - first_row
        if own_rows:
            self.sink.take(t, first_row + self.lowest_row, values[:, :own_rows])
        if self.unit_rows.shape[1]:
            self.unit_rows[:, :, self.positions[t]] = values[:, own_rows:]

    def take_residue(self, t: int, values: Array) -> None:
        """Do nothing: blocked sweeps are not pruned."""
