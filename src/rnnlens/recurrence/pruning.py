"""Dropping rows that have vanished, and knowing what that cost.

On a network whose gradients vanish, most rows of a long sweep carry nothing. A group of rows is dropped once, in every
sample, its norm fell to ``rtol`` times what it was when it entered. What is dropped is not forgotten: sums of the
dropped rows with random signs travel on in a few probe rows. Since E[s_i s_j] = 0 for i != j, the mean square of what
such a probe brings to an input is an unbiased estimate of the squared error there, summed over everything dropped
(Hutchinson 1990, doi:10.1080/03610919008812866).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .arrays import Array
from .inplace import Workspace


class Pruning(Protocol):
    """What a sweep asks about its rows."""

    probes: int
    active: bool
    group: int
    dropped: int

    @property
    def probes_alive(self) -> int:
        """Probe rows right behind the last row alive."""

    def note(self, rows: Array, width: int, first: int, stop: int) -> None:
        """Rows ``first ... stop - 1`` have entered."""

    def drop(self, rows: Array, width: int, start: int, stop: int) -> int:
        """The new end of the rows alive."""


class NoPruning:
    """Every row lives to the end."""

    probes = 0
    active = False
    probes_alive = 0
    group = 1
    dropped = 0

    def note(self, rows: Array, width: int, first: int, stop: int) -> None:
        """Nothing to remember."""

    def drop(self, rows: Array, width: int, start: int, stop: int) -> int:
        """Nothing to drop."""
        return stop


class Vanished:
    """Drops groups of rows at the old end once they, and all older ones, fell below ``rtol`` of their start.

    Parameters
    ----------
    rtol
        Relative norm below which a group counts as vanished.
    group
        Rows that live and die together.
    every
        Steps between two looks at the norms.
    """

    def __init__(
        self, work: Workspace, rtol: float, group: int, *, probes: int = 8, every: int = 8, seed: int = 0
    ) -> None:
        self.work, self.rtol, self.group, self.probes, self.every = work, rtol, group, probes, every
        self.active = False
        self.dropped = 0
        self._calls = 0
        self._start: dict[int, Array] = {}
        self._random = np.random.default_rng(seed)

    @property
    def probes_alive(self) -> int:
        """All of them as soon as something was dropped."""
        return self.probes if self.active else 0

    def note(self, rows: Array, width: int, first: int, stop: int) -> None:
        """Remember the norm (sample,) with which each group entered."""
        norms = self._norms(rows[:, first:stop, :width])
        for i in range(norms.shape[1]):
            self._start[first // self.group + i] = norms[:, i]

    def drop(self, rows: Array, width: int, start: int, stop: int) -> int:
        """Look at the norms now and then; fold vanished rows into the probes."""
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
        self.active = True
        self.dropped += stop - keep
