"""Sweeps of many cotangents or tangents at once through a linear system: G[t, k] = C A_t ... A_{k+1} B_k.

The reverse sweep pulls cotangents from the outputs back against the recurrence; the forward sweep pushes tangents from
the inputs along the recurrence. Each step is one batched matrix product over the rows that are alive, written to memory
that is allocated once. If more rows are alive than the state has numbers, the reverse sweep proceeds in blocks. Reverse
and forward accumulation: Griewank, Walther 2008, doi:10.1137/1.9780898717761, chapter 3; the linearisation
(:mod:`rnnlens.recurrence.linear`) and the blocks (:mod:`rnnlens.recurrence.sweep_reverse`) are rnnlens' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..typing import Array
from .arrays import at_step
from .linear import LinearStep, System, state_columns, walk
from .sweep_reverse import BlockedSweep, ReverseSweep, plan_blocks
from .sweep_rows import BLOCK_BUDGET, FLUSH_EVERY, Cost, Pruning, RowSink, RowSource, Taps, Units, elements
from .sweep_units import UnitSweep
from .trajectory import steps

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
        with system.work.quiet():
            return UnitSweep(system, source, taps, samples, pruning or Pruning()).run(progress)
    length = 0
    if not taps.states and pruning is None and not source.lasting:
        order = list(steps(system.time, system.order, reverse=True))
        wanted = [i for i, t in enumerate(order) if taps.wants(t)]
        stop = system.time if taps.initial or not wanted else wanted[-1] + 1
        alive = [source.count - source.first(t) for t in order[:stop]]
        length = plan_blocks(system, alive, system.features if wanted and taps.input is not None else 0).length
    with system.work.quiet():
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
    with system.work.quiet():
        return ForwardSweep(system, entrances, sinks, steps, samples, pruning or Pruning()).run(progress)


def reverse_flops(system: System, alive: Sequence[int] | np.ndarray[Any, Any], with_input: bool) -> float:
    """Return the FLOPs of a reverse sweep with ``alive`` rows (step,), in blocks only if ``with_input``."""
    if with_input:
        return 2.0 * system.batch * plan_blocks(system, alive, system.features).products
    return 2.0 * system.batch * float(np.sum(alive)) * system.multiplications(False)


def unit_flops(system: System, state: int, alive: Sequence[int] | np.ndarray[Any, Any], features: int) -> float:
    """Return the FLOPs of a sweep of all units, ``alive`` groups (step,); ``features`` are 1 if reduced immediately."""
    pattern = system.pattern(state)
    assert pattern is not None
    per_group = pattern.count * system.multiplications(False) + pattern.entries * features
    return 2.0 * system.batch * float(np.sum(alive)) * per_group


def forward_flops(system: System, alive: int, out_rows: int) -> float:
    """Return the FLOPs of a forward sweep of ``alive`` pairs of row and step, each read out into ``out_rows``."""
    readout = out_rows * system.state_sizes[0]
    return 2.0 * system.batch * alive * (system.multiplications(False) + readout)


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
        """Return the number of rows that enter at one step."""
        if self.kind != "input":
            return system.state_sizes[self.state]
        return system.features if self.blocks is None else int(self.blocks.shape[2])

    def count(self, system: System) -> int:
        """Return the total number of rows."""
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
        self.count = len(range(*samples.indices(system.batch)))
        self.group = entrances.group(system)
        self.start = self.stop = entrances.count(system)
        shape = (self.count, self.stop + pruning.probes, system.rows)
        self.old, self.new = self.work.empty(*shape), self.work.empty(*shape)
        self.cost = Cost(0.0, 2 * elements(self.old) * self.work.itemsize)
        # Attribute lookups outside the loop over steps.
        self.columns = {state: state_columns(system, state) for state in sinks}
        self.per_row = 2.0 * self.count * system.multiplications(False)

    def run(self, progress: Callable[[], None] | None) -> Cost:
        """Walk through all steps, or up to the last step of interest."""
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

    def _step(self, step: LinearStep) -> None:
        """Push all rows forward by one step: from the states before it to the states after it."""
        rows = slice(self.start, self.stop + self.pruning.probes_alive)
        step.push(self.old[:, rows], self.new[:, rows])
        self.cost.flops += (rows.stop - rows.start) * self.per_row
        self.old, self.new = self.new, self.old

    def _enter_input(self, t: int, step: LinearStep) -> None:
        fresh = slice(self.start - self.group, self.start)
        block = self.entrances.blocks
        if block is not None:
            block = at_step(block, self.samples, t)
            self.cost.flops += 2.0 * self.count * self.group * self.system.features * self.system.rows
        step.inject(block, self.old[:, fresh])
        self._entered(fresh)

    def _enter_state(self, step: LinearStep | None) -> None:
        """Add unit tangents of a state as the step produces it, such as c_t of an LSTM, which also changes h_t."""
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
