"""Dynamics of a recurrence: spectra of step Jacobians and kernels, Lyapunov exponents, fixed points and cycles.

Fixed points satisfy F(s, x) = s for one step F. They are found by Levenberg-Marquardt on F(s) - s with the step's own
Jacobian, for all starts at once (Levenberg 1944; Marquardt 1963, doi:10.1137/0111030). On fixed and slow points of
recurrent networks see Sussillo, Barak 2013, doi:10.1162/NECO_a_00409.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..recurrence.arrays import on_cpu
from ..recurrence.cells import Cell
from ..recurrence.replay import Replay
from ..typing import Array, Namespace
from .transfer import step_jacobians


@dataclass(frozen=True)
class Lyapunov:
    """Finite-time Lyapunov spectrum.

    Attributes
    ----------
    exponents : (exponent,), descending
        Mean growth rate per step.
    stderr : (exponent,)
        Standard error: the larger of those over samples and over (at most) five blocks of time.
    kaplan_yorke
        Dimension of the attractor.
    """

    exponents: Array
    stderr: Array
    kaplan_yorke: float


def lyapunov_spectrum(run: Replay, *, count: int | None = None, burn_in: float = 0.1, seed: int = 0) -> Lyapunov:
    """Compute Lyapunov exponents by QR: Q_t R_t = A_t Q_(t-1), lambda_i = mean log |R_ii|.

    For steps with common eigenvectors, such as diagonal ones, they are the means of log |eigenvalue|.

    Parameters
    ----------
    count
        Number of exponents, the largest first; all by default.
    burn_in
        Share of the steps at the start that is left out, while Q converges.

    References
    ----------
    Benettin et al. 1980, doi:10.1007/BF02128236; for recurrent networks Vogt et al. 2022, arXiv:2006.14123, alg. 1.
    """
    time = run.input.shape[1]
    size = sum(int(s.shape[-1]) for s in run.states)
    count, skipped = size if count is None else min(count, size), round(burn_in * time)
    moduli = run.cell.linear_system(run).moduli()
    growth = (
        _growth_by_qr(run, count, seed)[skipped:]
        if moduli is None
        else _growth_from_moduli(run, moduli, count, skipped)
    )
    exponents = growth.mean(axis=(0, 1))
    # A loop over depth may have fewer steps than blocks.
    blocks = np.stack([block.mean(axis=(0, 1)) for block in np.array_split(growth, min(5, len(growth)))])
    stderr = np.maximum(_standard_error(growth.mean(axis=0)), _standard_error(blocks))
    order = np.argsort(-exponents)
    return Lyapunov(exponents[order], stderr[order], kaplan_yorke_dimension(exponents[order]))


def _standard_error(values: Array) -> Array:
    """Return the standard error of the mean over the first axis; zeros of one row alone."""
    return values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros(values.shape[1:])


def _growth_by_qr(run: Replay, count: int, seed: int) -> Array:
    """Return log |R_ii| of the QR factorisation at each step of the recurrence, (step, sample, exponent)."""
    samples, time = run.input.shape[:2]
    basis = np.random.default_rng(seed).normal(size=(samples, sum(int(s.shape[-1]) for s in run.states), count))
    q = np.linalg.qr(basis)[0]
    logs = np.empty((time, samples, count))
    for position, a in enumerate(step_jacobians(run)):
        q, r = np.linalg.qr(a @ q)
        diagonal = np.abs(np.diagonal(r, axis1=1, axis2=2))
        logs[position] = np.log(np.maximum(diagonal, 1e-300))
    return logs


def _growth_from_moduli(run: Replay, moduli: Array, count: int, skipped: int) -> Array:
    """Return log |eigenvalue| after ``skipped`` steps, (step, sample, exponent), where eigenvectors are common."""
    order = list(run.steps())[skipped:]
    logs = np.log(np.maximum(np.asarray(moduli, dtype=np.float64)[:, order], 1e-300))
    largest = np.argsort(-logs.mean(axis=1), axis=1)[:, None, :count]
    return np.take_along_axis(logs, largest, axis=2).swapaxes(0, 1)


def step_eigenvalues(run: Replay, steps: Sequence[int]) -> Array:
    """Compute the eigenvalues of A_t = ds_t/ds_(t-1): (sample, step, mode), complex, largest modulus first.

    Parameters
    ----------
    steps
        Indices of time steps, in chronological order.
    """
    order = list(run.steps())
    columns = {order.index(step): column for column, step in enumerate(steps)}
    eigenvalues: list[Array] = [np.empty(0)] * len(columns)
    for position, a in enumerate(step_jacobians(run)):
        if position in columns:
            values = np.linalg.eigvals(np.asarray(a, dtype=np.float64))
            largest = np.argsort(-np.abs(values), axis=1)
            eigenvalues[columns[position]] = np.take_along_axis(values, largest, axis=1)
    return np.stack(eigenvalues, axis=1)


def kaplan_yorke_dimension(exponents: Array) -> float:
    """Compute the Kaplan-Yorke dimension from Lyapunov exponents in descending order.

    It is j + (l_1 + ... + l_j) / |l_(j+1)|, with j the largest number of exponents whose sum is not negative.

    Kaplan, Yorke 1979, doi:10.1007/BFb0064319.
    """
    sums = np.cumsum(np.asarray(exponents, dtype=np.float64))
    if not np.isfinite(sums).all():
        return float("nan")
    if not len(sums) or sums[0] < 0:
        return 0.0
    j = int(np.flatnonzero(sums >= 0).max()) + 1
    return float(j) if j == len(sums) else j + float(sums[j - 1]) / abs(float(exponents[j]))


def effective_rank(matrix: Array) -> Array:
    """Compute e to the entropy of the normalised singular values of (..., n, m). Roy, Vetterli 2007, EUSIPCO.

    Examples
    --------
    >>> rl.measures.effective_rank(np.diag([1.0, 1.0, 0.0]))
    np.float64(2.0)
    """
    values = np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)
    total = values.sum(axis=-1, keepdims=True)
    share = values / np.where(total > 0, total, 1.0)
    return np.exp(-np.sum(np.where(share > 0, share * np.log(np.where(share > 0, share, 1.0)), 0.0), axis=-1))


#: Largest |F(s) - s|^2 / 2 of a fixed point in double and single precision, and of a slow point, in units of the
#: squared spread of the starts.
FIXED, FIXED_SINGLE, SLOW = 1e-18, 1e-12, 1e-6
#: Largest distance of an eigenvalue's modulus from 1 at a marginal point; of an eigenvalue from 1 on a curve. The first
#: is ten times the rounding of eigenvalues in float32.
MARGINAL, NEARLY_MARGINAL = 1e-5, 0.05
FEWEST_ON_A_CURVE = 5
#: Largest distance of points from a straight line, in units of the line's length.
STRAIGHT = 1e-2
#: Number of points in a gap of a line at which the speed is examined.
_IN_A_GAP = 3
_ROUNDS = 200


@dataclass(frozen=True)
class StepMap:
    """Step of a cell under a constant input: the map s to F(s) and its Jacobian dF/ds, with all states concatenated."""

    step: Callable[[Array], Array]
    jacobian: Callable[[Array], Array]
    size: int
    single: bool = False


def step_map(cell: Cell, x: Array, *, xp: Namespace | None = None) -> StepMap:
    """Return the map F of a cell at a constant input ``x`` (feature,).

    F is computed in float64, or in the framework's precision if the framework runs the cell. ``xp`` is the array
    namespace of such a cell; None for NumPy.
    """
    step, jacobian = cell.map_at(x, np if xp is None else xp)
    single = cell.by_framework and on_cpu(x).dtype != np.float64
    return StepMap(step, jacobian, sum(cell.state_sizes), single)


def iterate(map_: StepMap, period: int) -> StepMap:
    """Return the map that applies F ``period`` times; its fixed points are cycles of that length or a divisor."""

    def step(s: Array) -> Array:
        for _ in range(period):
            s = map_.step(s)
        return s

    def jacobian(s: Array) -> Array:
        jacobian_product = map_.jacobian(s)
        for _ in range(period - 1):
            s = map_.step(s)
            jacobian_product = map_.jacobian(s) @ jacobian_product
        return jacobian_product

    return map_ if period == 1 else StepMap(step, jacobian, map_.size, map_.single)


@dataclass(frozen=True)
class Points:
    """Fixed and slow points, each of them once.

    Attributes
    ----------
    states : (point, state)
    speed : (point,)
        |F(s) - s|^2 / 2.
    eigenvalues, eigenvectors : (point, mode), (point, state, mode), complex, largest modulus first
    fixed : (point,) of bool
        False for slow points: local minima of the speed that are not 0.
    starts : (point,)
        Number of starts that ended at this point.
    curve : (point,) of int
        Index in ``curves`` of the curve that the point lies on; -1 for none.
    curves
        ``"line"`` or ``"ring"`` for each curve of marginal points, ``"slow line"`` or ``"slow ring"`` for one of slow
        points.
    """

    states: Array
    speed: Array
    eigenvalues: Array
    eigenvectors: Array
    fixed: Array
    starts: Array
    curve: Array
    curves: tuple[str, ...] = ()

    @property
    def stable(self) -> Array:
        """Whether each point is stable, (point,) of bool.

        Stable points are fixed, have all eigenvalues inside the unit circle, and lie on no curve of fixed points.
        """
        return np.array([kind == "stable" for kind in self.kinds], dtype=bool)

    @property
    def kinds(self) -> list[str]:
        """Kind of each point: ``"stable"``, ``"saddle"``, ``"repeller"``, ``"marginal"`` or ``"slow"``."""
        return point_kinds(self.eigenvalues, self.fixed, self.curve, self.curves)


def find_points(map_: StepMap, starts: Array, *, tolerance: float = 1e-3) -> Points:
    """Find the fixed and slow points of a map from many starts.

    Parameters
    ----------
    starts : (start, state)
    tolerance
        Points nearer than this, times the spread of the starts and the square root of the number of states, count as
        one.
    """
    starts = np.asarray(starts, dtype=np.float64)
    scale = max(float(starts.std()), 1e-6)
    fixed = FIXED_SINGLE if map_.single else FIXED
    end_points, speed = _descend(map_, starts, fixed * scale**2)
    accepted = np.flatnonzero(np.isfinite(speed) & (speed <= SLOW * scale**2))
    order = accepted[np.argsort(speed[accepted], kind="stable")]
    distinct, start_counts = _group_points(end_points[order], tolerance * scale * np.sqrt(map_.size))
    states, speed = end_points[order][distinct], speed[order][distinct]
    jacobians = map_.jacobian(states) if len(states) else np.empty((0, map_.size, map_.size))
    values, vectors = np.linalg.eig(jacobians)
    by_size = np.argsort(-np.abs(values), axis=1, kind="stable")
    values = np.take_along_axis(values, by_size, axis=1)

    def is_slow_at(between: Array) -> bool:
        residual = map_.step(between) - between
        return bool((0.5 * np.sum(residual**2, axis=1) <= SLOW * scale**2).all())

    curve, names = marginal_curves(states, values, is_slow_at)
    # Weights in float32 keep a curve of fixed points up to their rounding only.
    rests = speed <= FIXED_SINGLE * scale**2
    curves = tuple(name if rests[curve == i].mean() > 0.5 else f"slow {name}" for i, name in enumerate(names))
    return Points(
        states,
        speed,
        values,
        np.take_along_axis(vectors, by_size[:, None, :], axis=2),
        speed <= fixed * scale**2,
        start_counts,
        curve,
        curves,
    )


def point_kinds(eigenvalues: Array, fixed: Array, curve: Array, curves: Sequence[str]) -> list[str]:
    """Classify points by the moduli of their eigenvalues (point, mode); return one word for each.

    A point is marginal if the modulus of an eigenvalue is 1 within :data:`MARGINAL` and none is larger, or if the point
    lies on a curve of fixed points. On a curve of slow points, as beside a saddle with an eigenvalue just above 1, each
    point is what it is by itself.
    """
    moduli = np.abs(eigenvalues)
    kinds = []
    for i, sizes in enumerate(moduli):
        inside, outside = sizes < 1 - MARGINAL, sizes > 1 + MARGINAL
        if curve[i] >= 0 and not curves[int(curve[i])].startswith("slow"):
            kind = "marginal"
        elif not fixed[i]:
            kind = "slow"
        elif outside.all():
            kind = "repeller"
        elif outside.any():
            kind = "saddle"
        else:
            kind = "stable" if inside.all() else "marginal"
        kinds.append(kind)
    return kinds


def marginal_curves(
    states: Array, eigenvalues: Array, is_slow_at: Callable[[Array], bool]
) -> tuple[Array, tuple[str, ...]]:
    """Find curves of marginal points: points close together, each with exactly one eigenvalue near 1.

    Points are joined by a minimum spanning tree (Prim 1957), which is cut where neighbours are far apart. Pieces of one
    straight line are joined if the points between them are slow, too. A curve is a ring if it is long and its two ends
    are near each other.

    Parameters
    ----------
    is_slow_at
        Function of states (point, state): whether all of them are slow.

    Returns
    -------
    curve : (point,) of int
        Index of the point's curve; -1 for a point on none.
    names
        ``"line"`` or ``"ring"`` for each curve (Seung 1996, doi:10.1073/pnas.93.23.13339).
    """
    # Imported here because the import takes time and few networks have marginal points.
    from scipy.sparse.csgraph import connected_components, minimum_spanning_tree, shortest_path

    curve = np.full(len(states), -1)
    if not len(states):
        return curve, ()
    near_one = np.abs(eigenvalues - 1) <= NEARLY_MARGINAL
    marginal = np.flatnonzero(near_one.sum(axis=1) == 1)
    if len(marginal) < FEWEST_ON_A_CURVE:
        return curve, ()
    distance = np.linalg.norm(states[marginal][:, None] - states[marginal][None], axis=2)
    tree = minimum_spanning_tree(distance)
    tree.data[tree.data > 20 * np.median(tree.data)] = 0
    tree.eliminate_zeros()
    count, component = connected_components(tree, directed=False)
    pieces = [np.flatnonzero(component == i) for i in range(count)]
    names: list[str] = []
    for members, is_joined in _join_lines(states[marginal], pieces, is_slow_at):
        if len(members) < FEWEST_ON_A_CURVE:
            continue
        curve[marginal[members]] = len(names)
        if is_joined:
            names.append("line")
            continue
        path_lengths = shortest_path(tree[members][:, members], directed=False)
        distances = distance[np.ix_(members, members)]
        end_pair = np.unravel_index(path_lengths.argmax(), path_lengths.shape)
        is_closed = path_lengths[end_pair] > 2 * distances.max() and distances[end_pair] < 0.5 * distances.max()
        names.append("ring" if is_closed else "line")
    return curve, tuple(names)


def _join_lines(
    points: Array, pieces: Sequence[Array], is_slow_at: Callable[[Array], bool]
) -> list[tuple[Array, bool]]:
    """Join pieces, as indices of points (point, state), that lie on one straight line; return each and whether joined.

    The longest pieces come first, and each takes in all others on its line.
    """
    remaining, results = sorted(pieces, key=len, reverse=True), []
    while remaining:
        members, is_joined = remaining.pop(0), False
        while len(members) >= FEWEST_ON_A_CURVE:
            piece = next((p for p in remaining if _continues_line(points[members], points[p], is_slow_at)), None)
            if piece is None:
                break
            remaining = [other for other in remaining if other is not piece]
            members, is_joined = np.concatenate([members, piece]), True
        results.append((members, is_joined))
    return results


def _continues_line(line: Array, piece: Array, is_slow_at: Callable[[Array], bool]) -> bool:
    """Return whether two sets of points (point, state) lie on one straight line, with slow points between them."""
    joint = np.concatenate([line, piece])
    centre = line.mean(axis=0)
    direction = np.linalg.svd(line - centre, full_matrices=False)[2][0]
    along = (joint - centre) @ direction
    across = np.linalg.norm(joint - centre - along[:, None] * direction, axis=1)
    if across.max() > STRAIGHT * np.ptp(along):
        return False
    distance = np.linalg.norm(line[:, None] - piece[None], axis=2)
    first, second = np.unravel_index(distance.argmin(), distance.shape)
    share = np.linspace(0, 1, _IN_A_GAP + 2)[1:-1, None]
    return is_slow_at((1 - share) * line[first] + share * piece[second])


def _descend(map_: StepMap, s: Array, target_speed: float) -> tuple[Array, Array]:
    """Minimise the speed of a map from every start by Levenberg-Marquardt; return end points and speeds."""
    s = s.copy()
    residual = map_.step(s) - s
    speed = 0.5 * np.sum(residual**2, axis=1)
    damping = np.full(len(s), 1e-2)
    eye = np.eye(map_.size)
    active = np.flatnonzero(speed > target_speed * 1e-6)
    for _ in range(_ROUNDS):
        if not active.size:
            break
        j = map_.jacobian(s[active]) - eye
        normal = j.transpose(0, 2, 1) @ j
        slope = (j.transpose(0, 2, 1) @ residual[active][:, :, None])[:, :, 0]
        regulariser = damping[active] * np.maximum(np.trace(normal, axis1=1, axis2=2) / map_.size, 1e-12)
        displacement = np.linalg.solve(normal + regulariser[:, None, None] * eye, -slope[:, :, None])[:, :, 0]
        trial = s[active] + displacement
        trial_residual = map_.step(trial) - trial
        trial_speed = 0.5 * np.sum(trial_residual**2, axis=1)
        is_better = trial_speed < speed[active]
        improved = active[is_better]
        is_stalled = is_better & (trial_speed > (1 - 1e-9) * speed[active])
        s[improved] = trial[is_better]
        residual[improved] = trial_residual[is_better]
        speed[improved] = trial_speed[is_better]
        damping[active] = np.where(is_better, np.maximum(damping[active] / 5, 1e-12), damping[active] * 4)
        is_done = (speed[active] <= target_speed * 1e-6) | (damping[active] > 1e8) | is_stalled
        active = active[~is_done]
    return s, speed


def _group_points(points: Array, radius: float) -> tuple[Array, Array]:
    """Group points that are closer than ``radius``; return the index of each group's first point, and its size."""
    first_members: list[int] = []
    counts: list[int] = []
    for i, point in enumerate(points):
        if first_members:
            distance = np.linalg.norm(points[first_members] - point, axis=1)
            nearest = int(distance.argmin())
            if distance[nearest] <= radius:
                counts[nearest] += 1
                continue
        first_members.append(i)
        counts.append(1)
    return np.array(first_members, dtype=int), np.array(counts, dtype=int)
