"""Rows of a sweep: their sources, their sinks, the cost of a sweep, and pruning of vanished rows.

Rows are ordered by their step in the recurrence. A reverse sweep reaches the last rows first, so that the rows alive
are always a suffix, and the acausal half of a Jacobian, which is zero, is never computed.

If gradients vanish, most rows of a long sweep are negligible. A group of rows is dropped once its norm has fallen to
``rtol`` times its norm at entry in every sample. Sums of the dropped rows with random signs s_i are swept on as a few
probe rows. Since E[s_i s_j] = 0 for i != j, the mean square of a probe's value at an input is an unbiased estimate of
the squared error there, summed over all dropped rows (Hutchinson 1990, doi:10.1080/03610919008812866).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from ..typing import Array
from .arrays import Workspace, at_step, on_cpu
from .linear import Pattern

#: Bytes of product matrices in memory at a time.
BLOCK_BUDGET = 32 * 2**20

#: Steps between two searches for negligible numbers.
FLUSH_EVERY = 4


class RowSink(Protocol):
    """Interface of a receiver of a sweep's values."""

    def take(self, t: int, first: int, values: Array) -> None:
        """Receive values (sample, row, n) at step t; ``first`` is the number of the first of these rows."""

    def residue(self, t: int, values: Array) -> None:
        """Receive sums (sample, probe, n), with random signs, of the pruned rows at step t."""


@dataclass
class Taps:
    """Sinks of a sweep by quantity; None for quantities that are not requested.

    ``input``: sink of gradients of the layer's input. ``states``: sinks by state index for the states after each step.
    ``initial``: sinks by state index for the initial states (t = -1). ``steps``: steps of interest, None for all.
    """

    input: RowSink | None = None
    states: dict[int, RowSink] = field(default_factory=dict)
    initial: dict[int, RowSink] = field(default_factory=dict)
    steps: frozenset[int] | None = None

    def wants(self, t: int) -> bool:
        """Return whether step t is of interest."""
        return self.steps is None or t in self.steps


@dataclass
class Cost:
    """Cost of a sweep: floating-point operations, and the bytes of its buffers."""

    flops: float = 0.0
    buffer_bytes: int = 0


class RowSource(Protocol):
    """Interface of the rows of a sweep.

    ``group`` rows belong to one target step; ``count`` is the number of all rows.
    """

    count: int
    group: int
    #: Whether rows receive cotangents at every step rather than only at the first.
    lasting: ClassVar[bool]

    def first(self, t: int) -> int:
        """Return the number of the first row that is non-zero at step t; it never increases during the sweep."""

    def parts(self, t: int, first: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return cotangents that rows ``first ... stop - 1`` receive at step t: (sample or 1, row, size) by state."""


@dataclass
class PointRows:
    """Row source whose rows enter at a single step each.

    Attributes
    ----------
    times
        The step of each group.
    blocks
        By state index the rows (sample or 1, time or 1, group row, size) that enter at each time index in ``times``.
    order
        Direction of the recurrence. Sweeps of cotangents run against it; for sweeps of tangents give the opposite.
    """

    times: Sequence[int]
    blocks: Mapping[int, Array]
    order: str = "forward"
    lasting: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.sequence = sorted(self.times, reverse=self.order == "backward")
        self.group = int(next(iter(self.blocks.values())).shape[2])
        self.count = self.group * len(self.sequence)
        sign = -1 if self.order == "backward" else 1
        self._ranks = [sign * t for t in self.sequence]
        self._sign = sign

    def first(self, t: int) -> int:
        """Return the number of the first row that enters at step t, or at a later step of the recurrence."""
        return self.group * bisect_left(self._ranks, self._sign * t)

    def parts(self, t: int, first: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return the cotangents of the rows that enter at step t, by state index; empty if none enters."""
        return {state: at_step(block, samples, t) for state, block in self.blocks.items()} if stop > first else {}


@dataclass
class Units:
    """Row source of all units of one state: unit vectors that enter at single steps.

    Only for systems whose units never meet (:class:`rnnlens.recurrence.linear.Pattern`). The rows are never stored one
    by one, only as sums by colour.

    Attributes
    ----------
    times
        The step of each group of ``size`` rows.
    moves : (sample, time) of bool, or None
        False where no units enter; None if they enter everywhere.
    """

    times: Sequence[int]
    state: int
    size: int
    order: str = "forward"
    moves: Array | None = None

    @property
    def sequence(self) -> list[int]:
        """Steps at which units enter, in the order of the recurrence."""
        return sorted(self.times, reverse=self.order == "backward")

    def summed(self, work: Workspace, pattern: Pattern) -> PointRows:
        """Return one row per colour: the sum of the unit vectors of that colour."""
        block = work.asarray(pattern.colour == np.arange(pattern.count)[:, None])[None, None]
        if self.moves is not None:
            block = block * work.asarray(self.moves)[:, :, None, None]
        return PointRows(self.times, {self.state: block}, self.order)


@dataclass
class FieldRows:
    """Row source whose rows receive cotangents at every step: (sample, row, time, size) by state index.

    A row is alive from the first step of the sweep at which it has a non-zero value.
    """

    fields: Mapping[int, Array]
    order: str = "forward"
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arrays = list(self.fields.values())
        self.count, self.group = int(arrays[0].shape[1]), 1
        time = int(arrays[0].shape[2])
        alive = np.zeros((self.count, time), dtype=bool)
        for array in arrays:
            moved = (array != 0).any(-1).any(0)
            alive |= on_cpu(moved)
        if self.order == "backward":
            alive = alive[:, ::-1]
        born = np.where(alive.any(1), time - 1 - np.argmax(alive[:, ::-1], axis=1), -1)
        # The first row alive at position p of the recurrence; all rows behind it are swept too, alive or not.
        first = np.full(time + 1, self.count)
        for row in range(self.count - 1, -1, -1):
            first[: born[row] + 1] = row
        self._first, self._time = first, time

    def first(self, t: int) -> int:
        """Return the first row that is non-zero at step t or later in the order of the recurrence."""
        return int(self._first[t if self.order == "forward" else self._time - 1 - t])

    def parts(self, t: int, first: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return the cotangents of rows ``first ... stop - 1`` at step t, by state index."""
        return {state: field[samples, first:stop, t] for state, field in self.fields.items()}


class Pruning:
    """Decides which rows of a sweep are dropped: none. ``probes_alive`` probe rows follow the last row alive."""

    probes = 0
    active = False
    probes_alive = 0
    group = 1
    dropped = 0

    def note(self, rows: Array, width: int, first: int, stop: int) -> None:
        """Ignore that rows ``first ... stop - 1`` enter: no row is pruned."""

    def drop(self, rows: Array, width: int, start: int, stop: int) -> int:
        """Return the number after the last row to keep: ``stop`` unchanged, since no row is pruned."""
        return stop


class Vanished(Pruning):
    """Pruning of the oldest groups of rows once their norms fell below ``rtol`` times their norms at entry.

    Parameters
    ----------
    rtol
        Relative norm below which a group counts as vanished.
    group
        Number of rows that are dropped together.
    every
        Steps between two comparisons of norms.
    """

    def __init__(
        self, work: Workspace, rtol: float, group: int, *, probes: int = 8, every: int = 8, seed: int = 0
    ) -> None:
        self.work, self.rtol, self.group, self.probes, self.every = work, rtol, group, probes, every
        self._calls = 0
        self._start: dict[int, Array] = {}
        self._random = np.random.default_rng(seed)

    def note(self, rows: Array, width: int, first: int, stop: int) -> None:
        """Record the norm (sample,) of each group of rows when it enters the sweep."""
        norms = self._norms(rows[:, first:stop, :width])
        for i in range(norms.shape[1]):
            self._start[first // self.group + i] = norms[:, i]

    def drop(self, rows: Array, width: int, start: int, stop: int) -> int:
        """Every few calls, replace vanished rows among ``start ... stop - 1`` by random sums; return the new ``stop``.

        A row has vanished if its norm is at most ``rtol`` of that at its entry, as for all rows after it.
        """
        self._calls += 1
        if self._calls % self.every or stop == start:
            return stop
        norms, keep = self._norms(rows[:, start:stop, :width]), stop
        for i in range(norms.shape[1] - 1, -1, -1):
            group = start // self.group + i
            if not bool((norms[:, i] <= self.rtol * self._start[group]).all()):
                break
            keep = group * self.group
        if keep < stop:
            self._fold(rows, width, keep, stop)
        return keep

    def _norms(self, rows: Array) -> Array:
        grouped = self.work.xp.reshape(rows, (rows.shape[0], -1, self.group * rows.shape[2]))
        return self.work.xp.sqrt((grouped * grouped).sum(-1))

    def _fold(self, rows: Array, width: int, keep: int, stop: int) -> None:
        gone = rows[:, keep:stop, :width]
        signs = self.work.asarray(self._random.choice([-1.0, 1.0], size=(self.probes, stop - keep)))
        folded = self.work.xp.matmul(signs, gone)
        if self.active:
            folded = folded + rows[:, stop : stop + self.probes, :width]
        rows[:, keep : keep + self.probes, :width] = folded
        self.active, self.probes_alive = True, self.probes
        self.dropped += stop - keep
