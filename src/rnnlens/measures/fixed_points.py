"""Points that one step of a recurrence maps onto themselves, F(s, x) = s, and what the dynamics do around them.

Levenberg-Marquardt on F(s) - s with the step's own Jacobian, all starts at once (Levenberg 1944; Marquardt 1963,
doi:10.1137/0111030). Fixed and slow points of recurrent networks: Sussillo, Barak 2013, doi:10.1162/NECO_a_00409.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..recurrence.cells import Cell
from ..typing import Array, Namespace

#: Largest |F(s) - s|^2 / 2 of a fixed point in double and single precision, and of a slow point, in units of the
#: squared spread of the starts.
FIXED, FIXED_SINGLE, SLOW = 1e-18, 1e-12, 1e-6
_ROUNDS = 200


@dataclass(frozen=True)
class StepMap:
    """One step of a cell under a constant input, states side by side: s to F(s), and dF/ds."""

    step: Callable[[Array], Array]
    jacobian: Callable[[Array], Array]
    size: int
    single: bool = False


def step_map(cell: Cell, x: Array, *, xp: Namespace | None = None) -> StepMap:
    """F of a cell at input ``x`` (feature,): in float64, or in what the framework computes where it runs the cell.

    ``xp``: the arrays that a cell of the framework wants.
    """
    step, jacobian = cell.map_at(x, np if xp is None else xp)
    single = cell.by_framework and np.asarray(x).dtype != np.float64
    return StepMap(step, jacobian, sum(cell.state_sizes), single)


def iterate(map_: StepMap, period: int) -> StepMap:
    """F applied ``period`` times: its fixed points are cycles of that length, and those of its divisors."""

    def step(s: Array) -> Array:
        for _ in range(period):
            s = map_.step(s)
        return s

    def jacobian(s: Array) -> Array:
        whole = map_.jacobian(s)
        for _ in range(period - 1):
            s = map_.step(s)
            whole = map_.jacobian(s) @ whole
        return whole

    return map_ if period == 1 else StepMap(step, jacobian, map_.size, map_.single)


@dataclass(frozen=True)
class Points:
    """Points that were found, each once.

    Attributes
    ----------
    states : (point, state)
    speed : (point,)
        |F(s) - s|^2 / 2.
    eigenvalues, eigenvectors : (point, mode), (point, state, mode), complex, largest modulus first
    fixed : (point,) of bool
        False for slow points: local minima of the speed that are not 0.
    starts : (point,)
        How many starts ended there.
    """

    states: Array
    speed: Array
    eigenvalues: Array
    eigenvectors: Array
    fixed: Array
    starts: Array

    @property
    def stable(self) -> Array:
        """(point,): fixed, and every eigenvalue within the unit circle."""
        result: Array = self.fixed & (np.abs(self.eigenvalues) < 1).all(axis=1)
        return result


def find_points(map_: StepMap, starts: Array, *, tolerance: float = 1e-3) -> Points:
    """Fixed and slow points from many starts.

    Parameters
    ----------
    starts : (start, state)
    tolerance
        Points nearer than this times the spread of the starts are one point.
    """
    starts = np.asarray(starts, dtype=np.float64)
    scale = max(float(starts.std()), 1e-6)
    fixed = FIXED_SINGLE if map_.single else FIXED
    ends, speed = _descend(map_, starts, fixed * scale**2)
    kept = np.flatnonzero(np.isfinite(speed) & (speed <= SLOW * scale**2))
    order = kept[np.argsort(speed[kept], kind="stable")]
    chosen, members = _distinct(ends[order], tolerance * scale * np.sqrt(map_.size))
    states, speed = ends[order][chosen], speed[order][chosen]
    if not len(states):
        nothing = np.empty((0, map_.size))
        return Points(
            nothing, speed, nothing.astype(complex), np.empty((0, map_.size, map_.size), complex), speed < 0, members
        )
    values, vectors = np.linalg.eig(map_.jacobian(states))
    by_size = np.argsort(-np.abs(values), axis=1, kind="stable")
    return Points(
        states,
        speed,
        np.take_along_axis(values, by_size, axis=1),
        np.take_along_axis(vectors, by_size[:, None, :], axis=2),
        speed <= fixed * scale**2,
        members,
    )


def _descend(map_: StepMap, s: Array, enough: float) -> tuple[Array, Array]:
    """Levenberg-Marquardt from every start, those that arrived left alone."""
    s = s.copy()
    residual = map_.step(s) - s
    speed = 0.5 * np.sum(residual**2, axis=1)
    damping = np.full(len(s), 1e-2)
    eye = np.eye(map_.size)
    active = np.flatnonzero(speed > enough * 1e-6)
    for _ in range(_ROUNDS):
        if not active.size:
            break
        j = map_.jacobian(s[active]) - eye
        normal = j.transpose(0, 2, 1) @ j
        slope = (j.transpose(0, 2, 1) @ residual[active][:, :, None])[:, :, 0]
        lift = damping[active] * np.maximum(np.trace(normal, axis1=1, axis2=2) / map_.size, 1e-12)
        move = np.linalg.solve(normal + lift[:, None, None] * eye, -slope[:, :, None])[:, :, 0]
        trial = s[active] + move
        new = map_.step(trial) - trial
        faster = 0.5 * np.sum(new**2, axis=1)
        better = faster < speed[active]
        took = active[better]
        stalled = better & (faster > (1 - 1e-9) * speed[active])
        s[took], residual[took], speed[took] = trial[better], new[better], faster[better]
        damping[active] = np.where(better, np.maximum(damping[active] / 5, 1e-12), damping[active] * 4)
        done = (speed[active] <= enough * 1e-6) | (damping[active] > 1e8) | stalled
        active = active[~done]
    return s, speed


def _distinct(points: Array, radius: float) -> tuple[Array, Array]:
    """The first of each group of near points, and how many are in the group."""
    chosen: list[int] = []
    counts: list[int] = []
    for i, point in enumerate(points):
        if chosen:
            distance = np.linalg.norm(points[chosen] - point, axis=1)
            nearest = int(distance.argmin())
            if distance[nearest] <= radius:
                counts[nearest] += 1
                continue
        chosen.append(i)
        counts.append(1)
    return np.array(chosen, dtype=int), np.array(counts, dtype=int)
