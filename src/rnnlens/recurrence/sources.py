"""Where a sweep's rows come from: cotangents that enter at single steps, or a field of them over all steps.

Rows are kept in the order in which the recurrence ran; a sweep meets the last of them first, so that the rows alive are
always a suffix, and what does not exist yet (the acausal half) is never computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .arrays import Array
from .inplace import Workspace
from .linear import Pattern


class Source(Protocol):
    """Rows of a sweep. ``group`` rows belong together (one target step); ``count`` is the number of all rows."""

    count: int
    group: int

    def first(self, t: int) -> int:
        """First row alive at step t; never grows in the direction of the sweep."""

    def parts(self, t: int, first: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """What enters at step t into rows ``first ... stop - 1``: by state, (sample or 1, row, size)."""

    @property
    def lasting(self) -> bool:
        """Whether rows receive something at every step, not at their first one only."""


@dataclass
class Points:
    """Rows that enter at one step each.

    Attributes
    ----------
    times
        The step of each group.
    blocks
        By state: (sample or 1, time or 1, group row, size): what enters at each time index, if a group is there.
    order
        ``"forward"``: sweeps go down in time; ``"backward"``: up. For tangents it is the other way round.
    """

    times: Sequence[int]
    blocks: Mapping[int, Array]
    order: str = "forward"

    def __post_init__(self) -> None:
        self.sequence = sorted(self.times, reverse=self.order == "backward")
        self.group = int(next(iter(self.blocks.values())).shape[2])
        self.count = self.group * len(self.sequence)
        sign = -1 if self.order == "backward" else 1
        self._ranks = [sign * t for t in self.sequence]
        self._sign = sign

    @property
    def lasting(self) -> bool:
        """Points enter once."""
        return False

    def first(self, t: int) -> int:
        """Groups at or after t, in the order of the recurrence."""
        return self.group * bisect_left(self._ranks, self._sign * t)

    def parts(self, t: int, first: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """The block of step t, if this is the step at which rows enter."""
        if stop == first:
            return {}
        found = {}
        for state, block in self.blocks.items():
            at = block if block.shape[0] == 1 else block[samples]
            found[state] = at[:, 0 if block.shape[1] == 1 else t]
        return found


@dataclass
class Units:
    """All units of one state, each in a row of its own, as unit vectors that enter at single steps.

    For systems in which they never meet (:class:`rnnlens.recurrence.linear.Pattern`): no row is ever written out.

    Attributes
    ----------
    times
        The step of each group of ``size`` rows.
    moves : (sample, time) of bool, or None
        Where a unit enters at all.
    """

    times: Sequence[int]
    state: int
    size: int
    order: str = "forward"
    moves: Array | None = None

    @property
    def sequence(self) -> list[int]:
        """The steps in the order in which the recurrence ran."""
        return sorted(self.times, reverse=self.order == "backward")

    def summed(self, work: Workspace, pattern: Pattern) -> Points:
        """One row for all units of a colour: their sum."""
        block = work.asarray(pattern.colour == np.arange(pattern.count)[:, None])[None, None]
        if self.moves is not None:
            block = block * work.asarray(self.moves)[:, :, None, None]
        return Points(self.times, {self.state: block}, self.order)


@dataclass
class Field:
    """Rows that receive something at every step: (sample, row, time, size) by state.

    A row is alive from the first step of the sweep at which it holds anything but zeros.
    """

    fields: Mapping[int, Array]
    order: str = "forward"

    def __post_init__(self) -> None:
        arrays = list(self.fields.values())
        self.count, self.group = int(arrays[0].shape[1]), 1
        time = int(arrays[0].shape[2])
        alive = np.zeros((self.count, time), dtype=bool)
        for array in arrays:
            moved = (array != 0).any(-1).any(0)
            alive |= np.asarray(moved.cpu() if hasattr(moved, "cpu") else moved)
        if self.order == "backward":
            alive = alive[:, ::-1]
        born = np.where(alive.any(1), time - 1 - np.argmax(alive[:, ::-1], axis=1), -1)
        # The first row that is alive at position p of the recurrence: rows behind it come along, alive or not.
        first = np.full(time + 1, self.count)
        for row in range(self.count - 1, -1, -1):
            first[: born[row] + 1] = row
        self._first, self._time = first, time

    @property
    def lasting(self) -> bool:
        """Fields enter everywhere."""
        return True

    def first(self, t: int) -> int:
        """First row that holds anything at t or after it in the order of the recurrence."""
        return int(self._first[t if self.order == "forward" else self._time - 1 - t])

    def parts(self, t: int, first: int, stop: int, samples: slice) -> Mapping[int, Array]:
        """What the field holds at step t."""
        return {state: field[samples, first:stop, t] for state, field in self.fields.items()}
