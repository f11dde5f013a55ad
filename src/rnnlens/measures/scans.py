"""Measures of whole-sequence layers (Mamba, delta rules): how long a state decays, and how much of it is in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..typing import Array


def decay_half_life(decay: Array) -> Array:
    """Compute the steps after which the diagonal part of the recurrence leaves half of a state.

    Parameters
    ----------
    decay : (sample, time, ...)
        ``trace["mixer"].decay``: a_t in (0, 1].

    Returns
    -------
    (...)
        log(1/2) over the mean of log a_t over samples and steps; infinite where a_t is 1 throughout. Steps with a_t = 0
        are resets, and are left out; 0 where there is no other step. The part of rank one of a delta rule is not
        included.

    References
    ----------
    Half-life of a geometric decay with rate exp(mean log a_t), as for the forget gate in Mahto et al. 2021,
    arXiv:2009.12727, eq. 3.
    """
    return half_life_of(*logarithms(np.asarray(decay)))


def logarithms(decay: Array) -> tuple[Array, Array]:
    """Return the sum of log a_t over samples and steps, and the number of its terms, of a decay (sample, time, ...)."""
    values = np.asarray(decay, dtype=np.float64)
    used = values > 0
    return np.log(np.where(used, values, 1.0)).sum(axis=(0, 1)), used.sum(axis=(0, 1))


def half_life_of(total: Array, count: Array) -> Array:
    """Compute the half-life in steps from a sum of log a_t and the number of its terms; 0 without any."""
    mean = np.asarray(total) / np.maximum(count, 1)
    found: Array = np.where(mean < 0, np.log(0.5) / np.where(mean < 0, mean, -1.0), np.inf)
    return np.where(np.asarray(count) > 0, found, 0.0)


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
    """
    arrays = [a for a in (decay, write, read, left, right) if a is not None]
    decay, write, read, *rank_one = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in arrays))

    def after(t: int, columns: Array) -> Array:
        """Return A_t times a matrix (..., state, state)."""
        carried = decay[t][..., None] * columns
        return carried - rank_one[0][t][..., None] * (rank_one[1][t][..., None, :] @ carried) if rank_one else carried

    def before(t: int, rows: Array) -> Array:
        """Return a matrix (..., state, state) times A_t."""
        rows = rows - (rows @ rank_one[0][t][..., None]) * rank_one[1][t][..., None, :] if rank_one else rows
        return rows * decay[t][..., None, :]

    unit = np.broadcast_to(np.eye(decay.shape[-1]), (*decay.shape[1:], decay.shape[-1]))
    wrote, reads, through = [], [], unit
    for t in range(step - 1, -1, -1):
        wrote.append((through @ write[t][..., None])[..., 0])
        through = before(t, through)
    through = unit
    for t in range(step, decay.shape[0]):
        through = after(t, through)
        reads.append((read[t][..., None, :] @ through)[..., 0, :])
    # The block is R W^T; its singular values are those of the product of the triangular factors, which are small.
    future, past = (np.linalg.qr(np.stack(rows, axis=-2), mode="r") for rows in (reads, wrote))
    values = np.linalg.svd(future @ np.swapaxes(past, -1, -2), compute_uv=False)
    return ((values > rtol * values[..., :1]) & (values > 0)).sum(axis=-1)


def decay_products(decay: Array, at: int, lags: Sequence[int]) -> Array:
    """Compute the share of the state of step ``at - lag`` that the decays leave at step ``at``, for each lag.

    decay : (sample, time, ...); returns (lag, sample, ...), the products of a_t over the steps between.
    """
    values = np.asarray(decay, dtype=np.float64)
    return np.stack([values[:, at - lag + 1 : at + 1].prod(axis=1) for lag in lags])
