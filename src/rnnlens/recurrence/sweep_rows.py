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

    def take(self, t: int, first_row: int, values: Array) -> None:
        """Receive values (sample, row, n) at step t; ``first_row`` is the number of the first of these rows."""

    def take_residue(self, t: int, values: Array) -> None:
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
    enters_every_step: ClassVar[bool]

    def first_row(self, t: int) -> int:
        """Return the number of the first row that is non-zero at step t; it never increases during the sweep."""

    def parts(self, t: int, first_row: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return cotangents for rows ``first_row ... stop - 1`` at step t: (sample or 1, row, size) by state."""


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
    enters_every_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.sequence = sorted(self.times, reverse=self.order == "backward")
        self.group = int(next(iter(self.blocks.values())).shape[2])
        self.count = self.group * len(self.sequence)
        sign = -1 if self.order == "backward" else 1
        self._signed_steps = [sign * t for t in self.sequence]
        self._sign = sign

    def first_row(self, t: int) -> int:
        """Return the number of the first row that enters at step t, or at a later step of the recurrence."""
        return self.group * bisect_left(self._signed_steps, self._sign * t)

    def parts(self, t: int, first_row: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return the cotangents of the rows that enter at step t, by state index; empty if none enters."""
        return {state: at_step(block, samples, t) for state, block in self.blocks.items()} if stop > first_row else {}


@dataclass
class Units:
    """Row source of all units of one state: unit vectors that enter at single steps.

    Only for systems whose units never meet (:class:`rnnlens.recurrence.linear.Pattern`). The rows are never stored one
    by one, only as sums by colour.

    Attributes
    ----------
    times
        The step of each group of ``size`` rows.
    entry_mask : (sample, time) of bool, or None
        False where no units enter; None if they enter everywhere.
    """

    times: Sequence[int]
    state: int
    size: int
    order: str = "forward"
    entry_mask: Array | None = None

    @property
    def sequence(self) -> list[int]:
        """Steps at which units enter, in the order of the recurrence."""
        return sorted(self.times, reverse=self.order == "backward")

    def colour_rows(self, work: Workspace, pattern: Pattern) -> PointRows:
        """Return one row per colour: the sum of the unit vectors of that colour."""
        block = work.asarray(pattern.colour == np.arange(pattern.count)[:, None])[None, None]
        if self.entry_mask is not None:
            block = block * work.asarray(self.entry_mask)[:, :, None, None]
        return PointRows(self.times, {self.state: block}, self.order)


@dataclass
class FieldRows:
    """Row source whose rows receive cotangents at every step: (sample, row, time, size) by state index.

    A row is alive from the first step of the sweep at which it has a non-zero value.
    """

    fields: Mapping[int, Array]
    order: str = "forward"
    enters_every_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arrays = list(self.fields.values())
        self.count, self.group = int(arrays[0].shape[1]), 1
        time = int(arrays[0].shape[2])
        is_alive = np.zeros((self.count, time), dtype=bool)
        for array in arrays:
            is_nonzero = (array != 0).any(-1).any(0)
            is_alive |= on_cpu(is_nonzero)
        if self.order == "backward":
            is_alive = is_alive[:, ::-1]
        last_position = np.where(is_alive.any(1), time - 1 - np.argmax(is_alive[:, ::-1], axis=1), -1)
        # The first row alive at position p of the recurrence; all rows behind it are swept too, alive or not.
        first_rows = np.full(time + 1, self.count)
        for row in range(self.count - 1, -1, -1):
            first_rows[: last_position[row] + 1] = row
        self._first_rows, self._time = first_rows, time

    def first_row(self, t: int) -> int:
        """Return the first row that is non-zero at step t or later in the order of the recurrence."""
        return int(self._first_rows[t if self.order == "forward" else self._time - 1 - t])

    def parts(self, t: int, first_row: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """Return the cotangents of rows ``first_row ... stop - 1`` at step t, by state index."""
        return {state: field[samples, first_row:stop, t] for state, field in self.fields.items()}


class Pruning:
    """Decides which rows of a sweep are dropped: none. ``probes_alive`` probe rows follow the last row alive."""

    probes = 0
    active = False
    probes_alive = 0
    group = 1
    dropped = 0

    def record_entry(self, rows: Array, width: int, first_row: int, stop: int) -> None:
        """Ignore that rows ``first_row ... stop - 1`` enter: no row is pruned."""

    def drop(self, rows: Array, width: int, start: int, stop: int) -> int:
        """Return the number after the last row to keep: ``stop`` unchanged, since no row is pruned."""
        return stop


class VanishedRowPruning(Pruning):
    """Pruning of the oldest groups of rows once their norms fell below ``rtol`` times their norms at entry.

    Parameters
    ----------
    rtol
        Relative norm below which a group counts as vanished.
    group
        Number of rows that are dropped together.
    interval
        Steps between two comparisons of norms.
    """

    def __init__(
        self, work: Workspace, rtol: float, group: int, *, probes: int = 8, interval: int = 8, seed: int = 0
    ) -> None:
        self.work, self.rtol, self.group, self.probes, self.interval = work, rtol, group, probes, interval
        self._calls = 0
        self._entry_norms: dict[int, Array] = {}
        self._random = np.random.default_rng(seed)

    def record_entry(self, rows: Array, width: int, first_row: int, stop: int) -> None:
        """Record the norm (sample,) of each group of rows when it enters the sweep."""
        norms = self._norms(rows[:, first_row:stop, :width])
        for i in range(norms.shape[1]):
            self._entry_norms[first_row // self.group + i] = norms[:, i]

    def drop(self, rows: Array, width: int, start: int, stop: int) -> int:
        """Every few calls, replace vanished rows among ``start ... stop - 1`` by random sums; return the new ``stop``.

        A row has vanished if its norm is at most ``rtol`` of that at its entry, as for all rows after it.
        """
        self._calls += 1
        if self._calls % self.interval or stop == start:
            return stop
        norms, new_stop = self._norms(rows[:, start:stop, :width]), stop
        for i in range(norms.shape[1] - 1, -1, -1):
            group = start // self.group + i
            if not bool((norms[:, i] <= self.rtol * self._entry_norms[group]).all()):
                break
            new_stop = group * self.group
        if new_stop < stop:
            self._fold_into_probes(rows, width, new_stop, stop)
        return new_stop

    def _norms(self, rows: Array) -> Array:
        grouped = self.work.xp.reshape(rows, (rows.shape[0], -1, self.group * rows.shape[2]))
        return self.work.xp.sqrt((grouped * grouped).sum(-1))

    def _fold_into_probes(self, rows: Array, width: int, new_stop: int, stop: int) -> None:
        dropped_rows = rows[:, new_stop:stop, :width]
        signs = self.work.asarray(self._random.choice([-1.0, 1.0], size=(self.probes, stop - new_stop)))
        probe_rows = self.work.xp.matmul(signs, dropped_rows)
        if self.active:
            probe_rows = probe_rows + rows[:, stop : stop + self.probes, :width]
        rows[:, new_stop : new_stop + self.probes, :width] = probe_rows
        self.active, self.probes_alive = True, self.probes
        self.dropped += stop - new_stop
