"""Sweeps of many cotangents (or tangents) at once through a linear system: G[t, k] = C A_t ... A_{k+1} B_k.

The reverse sweep starts from the outputs and walks against the recurrence; the forward sweep starts from the inputs and
walks with it. Each step is one batched matrix product over the rows that are alive, into memory allocated once.
Reverse and forward accumulation: Griewank, Walther 2008, doi:10.1137/1.9780898717761, chapter 3; what is new here is
only the shape of the linearisation (see :mod:`rnnlens.recurrence.linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..typing import Array
from .inplace import Workspace
from .linear import System, state_columns, walk
from .pruning import NoPruning, Pruning
from .sources import Source

#: Bytes of product matrices held at a time.
BLOCK_BUDGET = 32 * 2**20

#: Steps between two looks for numbers that have become negligible.
FLUSH_EVERY = 4


class Sink(Protocol):
    """Takes the values that a sweep passes by."""

    def take(self, t: int, first: int, values: Array) -> None:
        """Values (sample, row, n) at step t; ``first`` is the number of the first of these rows."""

    def residue(self, t: int, values: Array) -> None:
        """What signed sums of pruned rows (sample, probe, n) are at step t."""


@dataclass
class Taps:
    """What a sweep hands out, each None where nobody wants it.

    ``input``: at the layer's input. ``states``: by state index, at the states after each step.
    ``initial``: by state index, at the initial state (t = -1). ``steps``: the steps of interest, None for all.
    """

    input: Sink | None = None
    states: dict[int, Sink] = field(default_factory=dict)
    initial: dict[int, Sink] = field(default_factory=dict)
    steps: frozenset[int] | None = None

    def wants(self, t: int) -> bool:
        """Whether step t is of interest."""
        return self.steps is None or t in self.steps


@dataclass
class Cost:
    """Floating-point operations done, and the bytes of the sweep's own buffers."""

    flops: float = 0.0
    buffer_bytes: int = 0


def reverse(
    system: System,
    source: Source,
    taps: Taps,
    *,
    samples: slice = slice(None),
    pruning: Pruning | None = None,
    progress: Callable[[], None] | None = None,
) -> Cost:
    """Pull rows of cotangents back through the recurrence.

    Parameters
    ----------
    source
        Cotangents of the states, as they enter.
    taps
        ``input`` receives dL/dx_t, ``states`` the total dL/ds_t (of c_t as it is produced), ``initial`` dL/ds_0.
    samples
        Which samples to sweep.
    """
    with system.work.quiet():
        return _Reverse(system, source, taps, samples, pruning or NoPruning()).run(progress)


class _Reverse:
    """Buffers and steps of one reverse sweep. A row is [dc | dh | dx] of a gated system, else [states | dx]."""

    def __init__(self, system: System, source: Source, taps: Taps, samples: slice, pruning: Pruning) -> None:
        self.system, self.source, self.taps, self.samples, self.pruning = system, source, taps, samples, pruning
        self.work: Workspace = system.work
        self.has_input = taps.input is not None
        self.width = system.rows + (system.features if self.has_input else 0)
        self.count = len(range(*samples.indices(system.batch)))
        shape = (self.count, source.count + pruning.probes, self.width)
        self.old, self.new = self.work.empty(*shape), self.work.empty(*shape)
        self.spare = self.work.empty(self.count, shape[1], system.columns) if system.gated else None
        self.start = self.stop = source.count
        pieces = [b for b in (self.old, self.new, self.spare) if b is not None]
        self.cost = Cost(0.0, sum(_elements(b) for b in pieces) * self.work.itemsize)

    def run(self, progress: Callable[[], None] | None) -> Cost:
        remaining = None if self.taps.steps is None or self.taps.initial else len(self.taps.steps)
        for t, block, at in walk(self.system, self.samples, reverse=True, inputs=self.has_input, budget=BLOCK_BUDGET):
            lift = None if block.lift is None else block.lift[:, at][:, None, :]
            self._enter(t, lift)
            wanted = self.taps.wants(t)
            if self.stop > self.start or self.pruning.active:
                if wanted:
                    self._hand_out_states(t, None if block.path is None else block.path[:, at])
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
            self.work.add_product(cell, hidden, lift, self.spare[:, rows])  # type: ignore[index]
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

    def _hand_out_states(self, t: int, path: Array | None) -> None:
        for state, sink in self.taps.states.items():
            self._give(sink, t, state_columns(self.system, state), path if state == 1 else None)

    def _give(self, sink: Sink, t: int, columns: slice, path: Array | None = None) -> None:
        """Hand rows to a sink; ``path`` leads from h_t to c_t, whose total gradient includes that through h_t."""
        end = self.stop + self.pruning.probes_alive
        values = self.old[:, self.start : end, columns]
        if path is not None:
            hidden = self.old[:, self.start : end, state_columns(self.system, 0)]
            values = values + self.work.xp.matmul(hidden, path)
        alive = self.stop - self.start
        sink.take(t, self.start, values[:, :alive])
        if end > self.stop:
            sink.residue(t, values[:, alive:])


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


def forward(
    system: System,
    entrances: Entrances,
    sinks: dict[int, Sink],
    steps: frozenset[int],
    *,
    samples: slice = slice(None),
    pruning: Pruning | None = None,
    progress: Callable[[], None] | None = None,
) -> Cost:
    """Push rows of tangents forward through the recurrence.

    Parameters
    ----------
    entrances
        Where rows enter. They are kept youngest first: a sink's row 0 belongs to the group that enters last.
    sinks
        By state: receive the change of the state after each of ``steps``.
    """
    with system.work.quiet():
        return _Forward(system, entrances, sinks, steps, samples, pruning or NoPruning()).run(progress)


class _Forward:
    """Buffers and steps of one forward sweep. A row is [dc | dh] of a gated system, else [states]."""

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
        self.spare = self.work.empty(self.count, shape[1], system.columns) if system.gated else None
        pieces = [b for b in (self.old, self.new, self.spare) if b is not None]
        self.cost = Cost(0.0, sum(_elements(b) for b in pieces) * self.work.itemsize)

    def run(self, progress: Callable[[], None] | None) -> Cost:
        remaining, entering = len(self.steps), frozenset(self.entrances.times)
        if self.entrances.kind == "initial":
            self._enter_state(None)
        for t, block, at in walk(self.system, self.samples, reverse=False, inputs=self._inputs, budget=BLOCK_BUDGET):
            product = block.product[:, at]
            keep = None if block.keep is None else block.keep[:, at][:, None, :]
            lift = None if block.lift is None else block.lift[:, at][:, None, :]
            if self.stop > self.start or self.pruning.active:
                self._step(product, keep, lift)
            if self.entrances.kind == "input" and t in entering:
                self._enter_input(t, product, lift)
            elif self.entrances.kind == "state" and t in entering:
                self._enter_state(lift, None if block.path is None else block.path[:, at])
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

    def _step(self, product: Array, keep: Array | None, lift: Array | None) -> None:
        """[states before] @ product^T = [states after]: for a gated system from h alone, c follows element-wise."""
        system, rows = self.system, slice(self.start, self.stop + self.pruning.probes_alive)
        offset = system.rows - system.columns
        transposed = _transposed(product[:, :, : system.columns])
        new, old = self.new[:, rows], self.old[:, rows]
        self.work.matmul(old[:, :, offset:], transposed, new)
        if keep is not None:
            spare = self.spare[:, rows]  # type: ignore[index]
            self.work.add_product(new[:, :, :offset], old[:, :, :offset], keep, spare)
            self.work.add_product(new[:, :, offset:], new[:, :, :offset], lift, spare)
        self.cost.flops += 2.0 * self.count * (rows.stop - rows.start) * system.rows * system.columns
        self.old, self.new = self.new, self.old

    def _enter_input(self, t: int, product: Array, lift: Array | None) -> None:
        system = self.system
        fresh = slice(self.start - self.group, self.start)
        into = _transposed(product[:, :, system.columns :])
        blocks = self.entrances.blocks
        if blocks is not None:
            at = blocks[:, 0 if blocks.shape[1] == 1 else t]
            into = self.work.xp.matmul(at if at.shape[0] == 1 else at[self.samples], into)
            self.cost.flops += 2.0 * self.count * self.group * system.features * system.rows
        self.old[:, fresh] = into
        if lift is not None:
            cell, hidden = self.old[:, fresh, : system.columns], self.old[:, fresh, system.columns :]
            self.work.add_product(hidden, cell, lift, self.spare[:, fresh])  # type: ignore[index]
        self._entered(fresh)

    def _enter_state(self, lift: Array | None, path: Array | None = None) -> None:
        """A unit change of a state as it is produced: one of c_t reaches h_t as well."""
        fresh = slice(self.start - self.group, self.start)
        columns = state_columns(self.system, self.entrances.state)
        self.old[:, fresh] = 0
        self.old[:, fresh, columns] = self.work.eye(self.group)
        if lift is not None and self.entrances.state == 1:
            units = self.system.columns
            self.old[:, fresh, units:] = self.work.eye(self.group) * lift
        elif path is not None and self.entrances.state == 1:
            self.old[:, fresh, state_columns(self.system, 0)] = _transposed(path)
        self._entered(fresh)

    def _entered(self, fresh: slice) -> None:
        self.start = fresh.start
        self.pruning.note(self.old, self.system.rows, fresh.start, fresh.stop)

    def _hand_out(self, t: int) -> None:
        for state, sink in self.sinks.items():
            columns = state_columns(self.system, state)
            sink.take(t, self.start, self.old[:, self.start : self.stop, columns])
            if self.pruning.probes_alive:
                sink.residue(t, self.old[:, self.stop : self.stop + self.pruning.probes_alive, columns])


def _transposed(product: Array) -> Array:
    return product.mT if hasattr(product, "mT") else product.swapaxes(-1, -2)


def _elements(array: Array) -> int:
    count = 1
    for n in array.shape:
        count *= int(n)
    return count


def reverse_flops(system: System, alive: int, with_input: bool) -> float:
    """Operations of a reverse sweep, where ``alive`` rows exist at its steps, all together."""
    columns = system.columns + (system.features if with_input else 0)
    return 2.0 * system.batch * alive * system.rows * columns


def forward_flops(system: System, alive: int, out_rows: int) -> float:
    """Operations of a forward sweep; each row alive is also multiplied into ``out_rows`` outputs (0: none)."""
    readout = out_rows * system.state_sizes[0]
    return 2.0 * system.batch * alive * (system.rows * system.columns + readout)
