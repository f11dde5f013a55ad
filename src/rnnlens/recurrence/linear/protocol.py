"""The interface of linear systems and of their steps, which sweeps call, and the walk through the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ..arrays import Array, Workspace
from ..parallel import still_wanted


class LinearStep(Protocol):
    """One step of some samples: ds_t = A ds_{t-1} + B dx_t.

    ``rows`` are (sample, row, state): the states side by side, as :func:`state_columns` finds them. Going back a row is
    a cotangent, going on a tangent. ``out`` is written to, and must not overlap the arrays that are read. Masked
    steps have A = I and B = 0.
    """

    def arrive(self, rows: Array, fresh: int) -> None:
        """Bring cotangents that came to the states after the step to their totals, in place.

        A change of c_t of an LSTM also moves the h_t of its own step, so that what came to h_t belongs to c_t too.
        Only the first ``fresh`` rows received anything at this step from outside.
        """

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Pull rows back: rows @ A and, with ``inputs``, rows @ B, of rows that went through :meth:`arrive`.

        out : (sample, row, state), with ``inputs`` (sample, row, state + feature)
        """

    def push(self, rows: Array, out: Array) -> None:
        """Push tangents of the states before on: rows @ A^T; out : (sample, row, state)."""

    def inject(self, block: Array | None, out: Array) -> None:
        """Write the tangents of the states for changes of the input: block @ B^T; out : (sample, row, state).

        block : (sample or 1, row, feature), or None for the unit vectors of the input
        """

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Carry tangents of one state, as it is produced, to what else the step computes from it; in place.

        ``columns`` is where the state lies. On entry all other columns are zero.
        """

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """Return cotangents (sample, row, size) of one state as produced, of rows that :meth:`arrive` made total."""

    def after(self, earlier: Any) -> LinearStep:
        """Compose two steps, of the states alone: A = A_self A_earlier. ``earlier`` has the same structure."""

    def input_matrix(self) -> Array:
        """Return B : (sample, state, feature), of the states as they leave the step."""


class LinearSteps(Protocol):
    """Consecutive steps, chronological."""

    def __getitem__(self, at: int, /) -> LinearStep:
        """Return a step by its position, from 0."""


@dataclass(frozen=True)
class Pattern:
    """Which unit cotangents of a state never meet on their way back, however many steps they go.

    Units of one colour reach different columns, so that one row stands for all of them: their sum.
    Curtis, Powell, Reid 1974, "On the estimation of sparse Jacobian matrices", doi:10.1093/imamat/13.1.117.

    Attributes
    ----------
    colour : (unit,)
        From 0, of each unit of the state.
    reach : (unit, column)
        Columns of a row that the cotangent of a unit can reach, ascending. Two units reach the same ones, or none of
        the other's; as many units reach each.
    """

    colour: np.ndarray[Any, Any]
    reach: np.ndarray[Any, Any]

    @property
    def count(self) -> int:
        """Number of colours."""
        return int(self.colour.max()) + 1

    @property
    def entries(self) -> int:
        """Number of entries that all units together can reach."""
        return int(self.reach.size)

    def cells(self) -> Pattern:
        """Return a pattern with one unit for all that reach the same columns, all of one colour."""
        _, first = np.unique(self.reach[:, 0], return_index=True)
        return Pattern(np.zeros(first.size, dtype=int), self.reach[first])


class System(Protocol):
    """One recurrent call, linearised on demand.

    Attributes
    ----------
    state_sizes
        Numbers of each state. ``layout``: the states' numbers in the order in which they lie in a row.
    rows
        All numbers of the state: the length of a row.
    columns
        Numbers of the state of which one step back computes the rest of a row element by element: of h of a gated one.
    scratch
        Numbers per row that a step needs besides the rows themselves and what it writes to.
    """

    work: Workspace
    batch: int
    time: int
    features: int
    order: Literal["forward", "backward"]
    state_sizes: tuple[int, ...]
    rows: int
    columns: int

    @property
    def layout(self) -> tuple[int, ...]:
        """Numbers of the states in the order in which they lie in a row."""

    @property
    def scratch(self) -> int:
        """Numbers per row that a step needs besides the rows and its result."""

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> LinearSteps:
        """Linearise steps ``first ... stop - 1`` (chronological) of some samples; without B where not ``inputs``."""

    def multiplications(self, inputs: bool) -> int:
        """Return the multiplications of one row at one step of one sample; with ``inputs`` also those by B."""

    def numbers(self, inputs: bool) -> int:
        """Return how many numbers one step of one sample holds."""

    def pattern(self, state: int) -> Pattern | None:
        """Return which units of a state never meet in a reverse sweep; None where they do."""

    def moduli(self) -> Array | None:
        """Return |eigenvalue| of A_t (sample, time, state) where all A_t have the same eigenvectors; else None.

        How fast products of such steps grow then follows without any product.
        """


def state_columns(system: System, state: int) -> slice:
    """Return the columns of a state in a row of a sweep: gated rows are [c | h], all others [states in their order]."""
    start = 0
    for other in system.layout:
        if other == state:
            break
        start += system.state_sizes[other]
    return slice(start, start + system.state_sizes[state])


def walk(
    system: System, samples: slice, *, reverse: bool, inputs: bool, budget: int, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, LinearStep]]:
    """Yield linear steps in the order of the recurrence (or the opposite order), each with its time index.

    They are built in blocks as long as ``budget`` bytes allow: with few calls, but never all of them at once.
    ``steps``: only these, a stretch without gaps in either order.
    """
    count = len(range(*samples.indices(system.batch)))
    per_step = max(1, count * system.numbers(inputs) * system.work.itemsize)
    length = max(1, min(system.time, budget // per_step))
    chronological = (system.order == "forward") != reverse
    first, end = (0, system.time) if steps is None else (min(steps), max(steps) + 1)
    starts = range(first, end, length)
    for start in starts if chronological else reversed(starts):
        stop = min(start + length, end)
        block = system.build(start, stop, samples, inputs=inputs)
        inner = range(start, stop) if chronological else range(stop - 1, start - 1, -1)
        for t in inner:
            still_wanted()
            yield t, block[t - start]
