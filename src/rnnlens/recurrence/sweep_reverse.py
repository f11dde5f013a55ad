"""The reverse sweep: rows of cotangents walk against the recurrence, all of them through every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .arrays import Array
from .inplace import Workspace
from .linear import Step, System, state_columns, walk
from .pruning import Pruning
from .sources import Source
from .sweep_parts import BLOCK_BUDGET, FLUSH_EVERY, Cost, Sink, Taps, elements


class ReverseSweep:
    """Buffers and steps of one reverse sweep. A row is [states | dx].

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
        self.has_input = self.needs_b = taps.input is not None
        self.width = system.rows + (system.features if self.has_input else 0)
        self.count = len(range(*samples.indices(system.batch)))
        shape = (self.count, source.count + pruning.probes, self.width)
        self.old, self.new = self.work.empty(*shape), self.work.empty(*shape)
        self.start = self.stop = source.count
        self.cost = Cost(0.0, 2 * elements(self.old) * self.work.itemsize)
        # Looked up here once, not at every step.
        self.columns = [state_columns(system, state) for state in range(len(system.state_sizes))]
        self.whole = slice(0, system.rows)
        self.per_row = {inputs: 2.0 * self.count * system.multiplications(inputs) for inputs in (False, self.has_input)}

    @property
    def left(self) -> Array:
        """Rows (sample, row, state number) as they are before the first step, in the order of the recurrence."""
        return self.old[:, self.start : self.stop, : self.system.rows]

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """All steps, or down to the last one of interest."""
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

    def _enter(self, t: int, step: Step) -> None:
        """Let new rows in, add what the source has at this step, and bring all to their totals."""
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
        """Rows alive, and the probes behind them."""
        return self.old[:, self.start : self.stop + self.pruning.probes_alive, columns]

    def _step(self, step: Step, with_input: bool) -> None:
        """One step back: [rows] to [states before | dx]."""
        stop = self.stop + self.pruning.probes_alive
        width = self.width if with_input else self.system.rows
        rows, target = self.old[:, self.start : stop, self.whole], self.new[:, self.start : stop, :width]
        step.pull(rows, target, inputs=with_input)
        self.cost.flops += (stop - self.start) * self.per_row[with_input]
        self.old, self.new = self.new, self.old

    def _hand_out(self, t: int, step: Step) -> None:
        """What is wanted of the rows before they go through the step."""
        for state, sink in self.taps.states.items():
            self._hand_state(sink, t, state, step)

    def _hand_state(self, sink: Sink, t: int, state: int, step: Step | None) -> None:
        """The rows at one state as a step produces it, or as it was initially."""
        rows, columns = self._alive(self.whole), self.columns[state]
        self._give(sink, t, rows[:, :, columns] if step is None else step.produced(rows, state, columns))

    def _give(self, sink: Sink, t: int, values: Array) -> None:
        """Hand rows to a sink, and what is left of pruned ones."""
        alive = self.stop - self.start
        sink.take(t, self.start, values[:, :alive])
        if int(values.shape[1]) > alive:
            sink.residue(t, values[:, alive:])
