"""The reverse sweep: rows of cotangents walk against the recurrence, all of them through every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..typing import Array
from .inplace import Workspace
from .linear import Steps, System, state_columns, walk
from .pruning import Pruning
from .sources import Source
from .sweep_parts import BLOCK_BUDGET, FLUSH_EVERY, Cost, Sink, Taps, elements


class ReverseSweep:
    """Buffers and steps of one reverse sweep. A row is [dc | dh | dx] of a gated system, else [states | dx].

    ``steps``: a stretch of steps to go through to its end; None for all, or as many as are of interest.
    """

    def __init__(
        self,
        system: System,
        source: Source,
        taps: Taps,
        samples: slice,
        pruning: Pruning,
        steps: Sequence[int] | None = None,
    ) -> None:
        self.system, self.source, self.taps, self.samples, self.pruning = system, source, taps, samples, pruning
        self.work: Workspace = system.work
        self.steps = steps
        self.has_input = taps.input is not None
        self.width = system.rows + (system.features if self.has_input else 0)
        self.count = len(range(*samples.indices(system.batch)))
        shape = (self.count, source.count + pruning.probes, self.width)
        self.old, self.new = self.work.empty(*shape), self.work.empty(*shape)
        self.start = self.stop = source.count
        self.cost = Cost(0.0, 2 * elements(self.old) * self.work.itemsize)

    @property
    def left(self) -> Array:
        """Rows (sample, row, state number) as they are before the first step, in the order of the recurrence."""
        return self.old[:, self.start : self.stop, : self.system.rows]

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """All steps, or down to the last one of interest."""
        whole = self.taps.steps is None or self.taps.initial or self.steps is not None
        remaining = None if whole else len(self.taps.steps)  # type: ignore[arg-type]
        for t, block, at in walk(
            self.system, self.samples, reverse=True, inputs=self.has_input, budget=BLOCK_BUDGET, steps=self.steps
        ):
            lift = None if block.lift is None else block.lift[:, at][:, None, :]
            self._enter(t, lift)
            wanted = self.taps.wants(t)
            if self.stop > self.start or self.pruning.active:
                if wanted:
                    self._hand_out_states(t, block, at)
                keep = None if block.keep is None else block.keep[:, at][:, None, :]
                self._step(block.product[:, at], keep, wanted and self.has_input)
                if wanted and self.taps.input is not None:
                    self._give(self.taps.input, t, slice(self.system.rows, self.width))
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
            self._give(sink, -1, state_columns(self.system, state))
        return self.cost

    def _enter(self, t: int, lift: Array | None) -> None:
        """Let new rows in, add what the source has at this step, and bring dc to its total."""
        first = self.source.first(t)
        entering = slice(first, self.start)
        if first < self.start:
            self.old[:, entering, : self.system.rows] = 0
        stop = self.stop if self.source.lasting else self.start
        for state, part in self.source.parts(t, first, stop, self.samples).items():
            target = self.old[:, first:stop, state_columns(self.system, state)]
            target[...] = target + part
        self.start = first
        if lift is not None:
            rows = slice(self.start, self.stop + self.pruning.probes_alive)
            units = self.system.columns
            cell, hidden = self.old[:, rows, :units], self.old[:, rows, units : 2 * units]
            self.work.add_product(cell, hidden, lift)
        if first < entering.stop:
            self.pruning.note(self.old, self.system.rows, first, entering.stop)

    def _step(self, product: Array, keep: Array | None, with_input: bool) -> None:
        """One product: [rows] @ product = [states before | dx]."""
        system, rows = self.system, slice(self.start, self.stop + self.pruning.probes_alive)
        columns = system.columns + (system.features if with_input else 0)
        offset = system.rows - system.columns
        target = self.new[:, rows, offset : offset + columns]
        self.work.matmul(self.old[:, rows, : system.rows], product[:, :, :columns], target)
        if keep is not None:
            self.work.multiply(self.old[:, rows, :offset], keep, self.new[:, rows, :offset])
        self.cost.flops += 2.0 * self.count * (rows.stop - rows.start) * system.rows * columns
        self.old, self.new = self.new, self.old

    def _hand_out_states(self, t: int, block: Steps, at: int) -> None:
        for state, sink in self.taps.states.items():
            columns = state_columns(self.system, state)
            if block.produced is not None:
                self._give(sink, t, columns, produced=block.produced()[:, at, :, columns])
            else:
                self._give(sink, t, columns, None if block.path is None or state != 1 else block.path[:, at])

    def _give(
        self, sink: Sink, t: int, columns: slice, path: Array | None = None, produced: Array | None = None
    ) -> None:
        """Hand rows to a sink; ``path`` leads from h_t to c_t, whose total gradient includes that through h_t.

        ``produced`` leads from all that leaves the step to one state, where that is computed.
        """
        end = self.stop + self.pruning.probes_alive
        values = self.old[:, self.start : end, columns]
        if produced is not None:
            values = self.work.xp.matmul(self.old[:, self.start : end, : self.system.rows], produced)
        if path is not None:
            hidden = self.old[:, self.start : end, state_columns(self.system, 0)]
            values = values + self.work.xp.matmul(hidden, path)
        alive = self.stop - self.start
        sink.take(t, self.start, values[:, :alive])
        if end > self.stop:
            sink.residue(t, values[:, alive:])
