"""The forward sweep: rows of tangents walk with the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .arrays import Array
from .linear import Step, System, state_columns, walk
from .pruning import Pruning
from .sweep_parts import BLOCK_BUDGET, FLUSH_EVERY, Cost, Sink, elements


@dataclass
class Entrances:
    """Where tangents enter: at the layer's input through ``blocks``, at its states, or at its initial state.

    Attributes
    ----------
    kind
        ``"input"``, ``"state"`` or ``"initial"``.
    times
        The steps at which they enter; ignored for ``"initial"``.
    blocks : (sample or 1, time or 1, row, feature) or None
        For ``"input"``: the change of the layer's input that each row stands for; None for unit vectors.
    state
        For ``"state"`` and ``"initial"``: which state. Unit vectors enter.
    """

    kind: str
    times: Sequence[int] = ()
    blocks: Array | None = None
    state: int = 0

    def group(self, system: System) -> int:
        """Rows that enter together."""
        if self.kind != "input":
            return system.state_sizes[self.state]
        return system.features if self.blocks is None else int(self.blocks.shape[2])

    def count(self, system: System) -> int:
        """All rows."""
        return self.group(system) * (1 if self.kind == "initial" else len(self.times))


class ForwardSweep:
    """Buffers and steps of one forward sweep. A row is [states]."""

    def __init__(
        self,
        system: System,
        entrances: Entrances,
        sinks: dict[int, Sink],
        steps: frozenset[int],
        samples: slice,
        pruning: Pruning,
    ) -> None:
        self.system, self.entrances, self.sinks, self.steps = system, entrances, sinks, steps
        self.samples, self.pruning, self.work = samples, pruning, system.work
        self.count = len(range(*samples.indices(system.batch)))
        self.group = entrances.group(system)
        self.start = self.stop = entrances.count(system)
        shape = (self.count, self.stop + pruning.probes, system.rows)
        self.old, self.new = self.work.empty(*shape), self.work.empty(*shape)
        self.cost = Cost(0.0, 2 * elements(self.old) * self.work.itemsize)
        # Looked up here once, not at every step.
        self.columns = {state: state_columns(system, state) for state in sinks}
        self.per_row = 2.0 * self.count * system.multiplications(False)

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """All steps, or up to the last one of interest."""
        remaining, entering = len(self.steps), frozenset(self.entrances.times)
        if self.entrances.kind == "initial":
            self._enter_state(None)
        for t, step in walk(self.system, self.samples, reverse=False, inputs=self._inputs, budget=BLOCK_BUDGET):
            if self.stop > self.start or self.pruning.active:
                self._step(step)
            if self.entrances.kind == "input" and t in entering:
                self._enter_input(t, step)
            elif self.entrances.kind == "state" and t in entering:
                self._enter_state(step)
            if t in self.steps:
                self._hand_out(t)
                remaining -= 1
            if remaining == 0:
                break
            self.stop = self.pruning.drop(self.old, self.system.rows, self.start, self.stop)
            if t % FLUSH_EVERY == 0:
                self.work.flush(self.old[:, self.start : self.stop + self.pruning.probes_alive])
            if progress is not None:
                progress()
        return self.cost

    @property
    def _inputs(self) -> bool:
        return self.entrances.kind == "input"

    def _step(self, step: Step) -> None:
        """One step on: [states before] to [states after]."""
        rows = slice(self.start, self.stop + self.pruning.probes_alive)
        step.push(self.old[:, rows], self.new[:, rows])
        self.cost.flops += (rows.stop - rows.start) * self.per_row
        self.old, self.new = self.new, self.old

    def _enter_input(self, t: int, step: Step) -> None:
        fresh = slice(self.start - self.group, self.start)
        block = self.entrances.blocks
        if block is not None:
            block = block[:, 0 if block.shape[1] == 1 else t]
            block = block if block.shape[0] == 1 else block[self.samples]
            self.cost.flops += 2.0 * self.count * self.group * self.system.features * self.system.rows
        step.inject(block, self.old[:, fresh])
        self._entered(fresh)

    def _enter_state(self, step: Step | None) -> None:
        """A unit change of a state as it is produced: one of c_t reaches h_t as well."""
        fresh, state = slice(self.start - self.group, self.start), self.entrances.state
        columns = state_columns(self.system, state)
        self.old[:, fresh] = 0
        self.old[:, fresh, columns] = self.work.eye(self.group)
        if step is not None:
            step.spread(self.old[:, fresh], state, columns)
        self._entered(fresh)

    def _entered(self, fresh: slice) -> None:
        self.start = fresh.start
        self.pruning.note(self.old, self.system.rows, fresh.start, fresh.stop)

    def _hand_out(self, t: int) -> None:
        for state, sink in self.sinks.items():
            columns = self.columns[state]
            sink.take(t, self.start, self.old[:, self.start : self.stop, columns])
            if self.pruning.probes_alive:
                sink.residue(t, self.old[:, self.stop : self.stop + self.pruning.probes_alive, columns])
