"""Persistence of states: transfer of cotangents through a recurrence, and decay in whole-sequence layers (Mamba).

State transfer is the share of a cotangent on the final state that is left tau steps earlier, for any loss. States are
measured in units of their spread, so that a unit that varies by 1e-3 has the same weight as one that varies by 1.
Cotangents are pulled back through the recurrence, several at once; no matrix A_t is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..errors import UnsupportedError
from ..recurrence.arrays import on_cpu
from ..recurrence.replay import Replay
from ..typing import Array

#: Share of the lags whose growth is left out, while random cotangents turn into the leading direction.
BURN_IN = 0.1
_BLOCKS = 5
_DIRECTIONS, _ROWS = 8, 512
_TINY = 1e-290


@dataclass(frozen=True)
class Transfer:
    """Sizes of random cotangents on the final state, pulled back step by step.

    Attributes
    ----------
    log_ratio : (lag, sample)
        Natural logarithm of |cotangent at lag tau| / |cotangent at lag 0|, mean over directions; 0 at lag 0. It is
        minus infinity where nothing is left. It is NaN before the first step of a sample that ends earlier than others,
        and from a state on that is not finite.
    """

    log_ratio: Array

    @property
    def kappa(self) -> Array:
        """State transfer (lag,): median over samples of |cotangent at this lag| / |cotangent at lag 0|.

        It is NaN at lags that no sample reaches.
        """
        medians: Array = np.full(len(self.log_ratio), np.nan)
        medians[self._is_reached] = np.nanmedian(np.exp(self.log_ratio[self._is_reached]), axis=1)
        return medians

    def quartiles(self) -> tuple[Array, Array]:
        """Return lower and upper quartile over samples of |cotangent at a lag| / |cotangent at lag 0|, (lag,) each."""
        bounds = np.full((2, len(self.log_ratio)), np.nan)
        bounds[:, self._is_reached] = np.nanquantile(np.exp(self.log_ratio[self._is_reached]), [0.25, 0.75], axis=1)
        return bounds[0], bounds[1]

    @property
    def _is_reached(self) -> Array:
        """Whether any sample has a finite cotangent at each lag, (lag,) of bool."""
        return ~np.isnan(self.log_ratio).all(axis=1)

    @property
    def growth(self) -> float:
        """Largest growth of the cotangent on its way back, in decades: log10 of the largest kappa, at least 0."""
        return float(np.log10(np.nanmax(self.kappa)))

    def leading_exponent(self) -> tuple[float, float]:
        """Return the leading exponent lambda_1, the mean growth rate per step, and its standard error.

        The standard error is the larger of those over samples and over blocks of time. Both numbers are NaN if there
        are too few steps; the exponent is minus infinity if nothing is left. See Oseledets 1968, and for products of
        step Jacobians Vogt et al. 2022, arXiv:2006.14123, section 2. Products of transposed matrices grow at the same
        rate.
        """
        reached_lags = (~np.isnan(self.log_ratio)).sum(axis=0)
        count = int(np.median(reached_lags))  # lags that at least half of the samples reach
        logs = self.log_ratio[:count, reached_lags >= count]
        logs = logs[max(1, round(BURN_IN * len(logs))) :]
        if len(logs) < 2 * _BLOCKS or not np.isfinite(logs).all():
            return (float("-inf") if np.isneginf(logs).any() else float("nan")), float("nan")
        rates = (logs[-1] - logs[0]) / (len(logs) - 1)
        block_ends = np.linspace(0, len(logs) - 1, _BLOCKS + 1).round().astype(int)
        blocks = np.array([np.mean((logs[b] - logs[a]) / (b - a)) for a, b in pairwise(block_ends)])
        error = max(
            rates.std(ddof=1) / np.sqrt(rates.size) if rates.size > 1 else 0.0, blocks.std(ddof=1) / _BLOCKS**0.5
        )
        return float(rates.mean()), float(error)


def state_spread(run: Replay) -> list[Array]:
    """Compute the standard deviation of each unit of each state over samples and steps.

    It is at least 1e-3 of the median unit's.

    Samples and steps whose state is not finite are left out.
    """
    spreads = []
    for state in run.states:
        values = on_cpu(state).astype(np.float64).reshape(-1, state.shape[-1])
        finite_rows = values[np.isfinite(values).all(axis=1)]
        spread = finite_rows.std(axis=0) if len(finite_rows) else np.ones(values.shape[1])
        spreads.append(np.maximum(spread, 1e-3 * (float(np.median(spread)) or 1.0)))
    return spreads


def state_transfer(
    run: Replay, *, directions: int | None = None, lags: int | None = None, ends: Array | None = None, seed: int = 0
) -> Transfer:
    """Pull random cotangents on the final state back through a recurrent layer.

    Parameters
    ----------
    run
        Replay of one direction of one call, in NumPy.
    directions
        Number of random cotangents per sample. The default is 8, and fewer for large states, whose norms vary less.
    lags
        Number of steps to go back; to the first step by default.
    ends : (sample,) of int, optional
        Time step after which each sample's state is taken; the last of the recurrence by default.
    """
    if run.reset is None:
        refuse_changed_states(run)
    order, first_positions = list(run.steps(reverse=True)), np.zeros(int(run.input.shape[0]), dtype=int)
    if ends is not None:
        first_positions = np.array([order.index(int(end)) for end in ends])
        order, first_positions = order[first_positions.min() :], first_positions - first_positions.min()
    order = order[: None if lags is None else lags + int(first_positions.max())]
    spreads = state_spread(run)
    directions = directions or max(1, min(_DIRECTIONS, _ROWS // sum(len(s) for s in spreads)))
    rng = np.random.default_rng(seed)
    samples, dtype = int(run.input.shape[0]), on_cpu(run.states[0][:1, :1]).dtype
    shapes = [(samples, directions, s.shape[-1]) for s in run.states]
    unit_rows = _normalise([rng.normal(size=shape) for shape in shapes])
    rows = [(z / s).astype(dtype) for z, s in zip(unit_rows, spreads, strict=True)]
    total = np.zeros((samples, directions))
    logs = [total.mean(axis=1)]
    for position, t in enumerate(order):
        pulled_rows = run.cell.pull_rows(run, t, rows)
        if run.reset is not None:
            pulled_rows = [
                np.where(on_cpu(run.reset[:, t])[:, None, None], 0.0, part).astype(dtype) for part in pulled_rows
            ]
        is_moving = first_positions <= position
        if run.mask is not None:
            is_moving = is_moving & on_cpu(run.mask[:, t])
        rows = (
            pulled_rows
            if is_moving.all()
            else [np.where(is_moving[:, None, None], a, b) for a, b in zip(pulled_rows, rows, strict=True)]
        )
        norms = np.sqrt(
            sum(np.sum((r * s) ** 2, axis=-1, dtype=np.float64) for r, s in zip(rows, spreads, strict=True))
        )
        is_nonzero = ~(norms <= _TINY)  # NaN counts as alive: it is not zero
        total = np.where(is_nonzero, total + np.log(np.where(is_nonzero, norms, 1.0)), -np.inf)
        rows = [(r / np.where(is_nonzero, norms, 1.0)[..., None]).astype(dtype) for r in rows]
        logs.append(total.mean(axis=1))
    return Transfer(_align_ends(np.stack(logs), first_positions))


def _align_ends(logs: Array, first_positions: Array) -> Array:
    """Reorder values by steps back from the last step of each sample: (lag, sample), NaN beyond the first step."""
    if not first_positions.any():
        return logs
    shifted = np.arange(len(logs))[:, None] + first_positions[None, :]
    aligned = np.take_along_axis(logs, np.minimum(shifted, len(logs) - 1), axis=0)
    return np.where(shifted < len(logs), aligned, np.nan)


def _normalise(arrays: Sequence[Array]) -> list[Array]:
    norms = np.sqrt(sum(np.sum(p**2, axis=-1) for p in arrays))
    return [p / norms[..., None] for p in arrays]


def step_jacobians(run: Replay) -> Iterator[Array]:
    """Yield A_t = ds_t/ds_(t-1) of every step, (sample, state, state), in the order of the recurrence.

    All states of a cell are concatenated.

    Raises
    ------
    UnsupportedError
        If the model's code changes the states between the steps.
    """
    if run.reset is None:
        refuse_changed_states(run)
    sizes = [int(s.shape[-1]) for s in run.states]
    samples, dtype = int(run.input.shape[0]), on_cpu(run.states[0][:1, :1]).dtype
    identity = np.broadcast_to(np.eye(sum(sizes), dtype=dtype), (samples, sum(sizes), sum(sizes)))
    rows = [np.ascontiguousarray(part) for part in np.split(identity, np.cumsum(sizes)[:-1], axis=2)]
    for t in run.steps():
        a = np.concatenate(run.cell.pull_rows(run, t, rows), axis=2)
        a = a if run.reset is None else np.where(on_cpu(run.reset[:, t])[:, None, None], 0.0, a).astype(dtype)
        yield a if run.mask is None else np.where(on_cpu(run.mask[:, t])[:, None, None], a, identity)


def steps_are_incomplete(run: Replay) -> bool:
    """Return whether the model changes states between steps by more than resets, which a replay does not know."""
    return run.start_states is not None and run.reset is None


def refuse_changed_states(run: Replay) -> None:
    """Raise ``UnsupportedError`` if the model changes states between steps, which step Jacobians leave out."""
    if run.start_states is not None:
        raise UnsupportedError(
            "The model's code changes the state between the steps of this loop; that change is part of each step.",
            got="a state that is scaled, mixed or reset before the next step",
            expected="a loop that passes the state on as the cell returned it",
            hint="move the change into the cell's forward; rl.gradients and rl.jacobian include it as it is",
        )


def theil_sen(profile: Array) -> float:
    """Compute the Theil-Sen slope of ln(profile) over its index: the median slope of all pairs of points.

    It is the decay per step, negative for fading profiles (Sen 1968, doi:10.1080/01621459.1968.10480934). Points that
    are not finite and positive are left out. More than 400 points are thinned evenly. The result is NaN for fewer than
    two.
    """
    profile = np.asarray(profile, dtype=np.float64)
    indices = np.flatnonzero(np.isfinite(profile) & (profile > 0))
    if indices.size < 2:
        return float("nan")
    indices = indices[np.linspace(0, indices.size - 1, min(indices.size, 400)).round().astype(int)]
    logs = np.log(profile[indices])
    # Equal to scipy.stats.theilslopes, whose import takes half a second of the first trace.
    first, second = np.triu_indices(indices.size, k=1)
    return float(np.median((logs[second] - logs[first]) / (indices[second] - indices[first])))


def decay_half_life(decay: Array) -> Array:
    """Compute the steps after which the diagonal part of the recurrence leaves half of a state.

    Parameters
    ----------
    decay : (sample, time, ...)
        ``trace["mixer"].decay``: a_t, of modulus at most 1.

    Returns
    -------
    (...)
        log(1/2) over the mean of log |a_t| over samples and steps; infinite where |a_t| is 1 throughout. Steps with
        a_t = 0 are resets, and are left out; 0 where there is no other step. The part of rank one of a delta rule is
        not included.

    References
    ----------
    Half-life of a geometric decay with rate exp(mean log a_t), as for the forget gate in Mahto et al. 2021,
    arXiv:2009.12727, eq. 3.

    Examples
    --------
    >>> rl.measures.decay_half_life(np.full((2, 10, 3), 0.5))  # (sample, time, unit)
    array([1., 1., 1.])
    """
    return half_life_from_sums(*log_decay_sums(np.asarray(decay)))


def log_decay_sums(decay: Array) -> tuple[Array, Array]:
    """Return the sum of log |a_t| over samples and steps, and the number of its terms; decay (sample, time, ...)."""
    values = np.abs(np.asarray(decay)).astype(np.float64)
    is_positive = values > 0
    return np.log(np.where(is_positive, values, 1.0)).sum(axis=(0, 1)), is_positive.sum(axis=(0, 1))


def half_life_from_sums(total: Array, count: Array) -> Array:
    """Compute the half-life in steps from a sum of log |a_t| and the number of its terms; 0 without any."""
    mean = np.asarray(total) / np.maximum(count, 1)
    half_lives: Array = np.where(mean < 0, np.log(0.5) / np.where(mean < 0, mean, -1.0), np.inf)
    return np.where(np.asarray(count) > 0, half_lives, 0.0)


def effective_state_size(
    decay: Array,
    write: Array,
    read: Array,
    step: int,
    *,
    left: Array | None = None,
    right: Array | None = None,
    rtol: float = 1e-3,
) -> Array:
    """Count the directions of a state through which inputs before a step reach outputs from that step on.

    The block of the input-output map from the past (steps < ``step``) to the future is the product of what the past
    wrote into the state and what the future reads out of it; its rank is at most the number of states.

    Parameters
    ----------
    decay, write : (time, ..., state)
        a_t, and the direction that step t writes. A scale of each step's write changes weights, not directions.
    read : (time, ..., state)
        C_t.
    step
        First step of the future, from 1 to time - 1.
    left, right : (time, ..., state), optional
        Vectors of the part of rank one of a delta rule: A_t = (I - left_t right_t^T) diag(a_t).
    rtol
        Singular values below this share of the largest do not count.

    Returns
    -------
    (...)
        Number of singular values of the block above ``rtol``; 0 where the block is zero.

    References
    ----------
    Effective state-size: Parnichkun et al. 2025, arXiv:2504.19561, section 3.

    Examples
    --------
    >>> decay, read = np.ones((4, 2)), np.array([[1.0, 0.0]] * 4)  # the second state is never read
    >>> rl.measures.effective_state_size(decay, np.ones((4, 2)), read, step=2)
    np.int64(1)
    """
    arrays = [np.asarray(a) for a in (decay, write, read, left, right) if a is not None]
    decay, write, read, *rank_one = np.broadcast_arrays(*(a.astype(np.result_type(a, np.float64)) for a in arrays))

    def multiply_left(t: int, columns: Array) -> Array:
        """Multiply a matrix (..., state, state) by A_t from the left."""
        carried = decay[t][..., None] * columns
        return carried - rank_one[0][t][..., None] * (rank_one[1][t][..., None, :] @ carried) if rank_one else carried

    def multiply_right(t: int, rows: Array) -> Array:
        """Multiply a matrix (..., state, state) by A_t from the right."""
        rows = rows - (rows @ rank_one[0][t][..., None]) * rank_one[1][t][..., None, :] if rank_one else rows
        return rows * decay[t][..., None, :]

    identity = np.broadcast_to(np.eye(decay.shape[-1]), (*decay.shape[1:], decay.shape[-1]))
    write_directions, read_directions, propagated = [], [], identity
    for t in range(step - 1, -1, -1):
        write_directions.append((propagated @ write[t][..., None])[..., 0])
        propagated = multiply_right(t, propagated)
    propagated = identity
    for t in range(step, decay.shape[0]):
        propagated = multiply_left(t, propagated)
        read_directions.append((read[t][..., None, :] @ propagated)[..., 0, :])
    # The block is R W^T; its singular values are those of the product of the triangular factors, which are small.
    future, past = (np.linalg.qr(np.stack(rows, axis=-2), mode="r") for rows in (read_directions, write_directions))
    values = np.linalg.svd(future @ np.swapaxes(past, -1, -2), compute_uv=False)
    return ((values > rtol * values[..., :1]) & (values > 0)).sum(axis=-1)
