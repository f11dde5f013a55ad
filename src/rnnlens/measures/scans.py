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
        are resets, and are left out. The part of rank one of a delta rule is not included.

    References
    ----------
    Half-life of a geometric decay with rate exp(mean log a_t), as for the forget gate in Mahto et al. 2021,
    arXiv:2009.12727, eq. 3.
    """
    values = np.asarray(decay, dtype=np.float64)
    used = values > 0
    logs = np.log(np.where(used, values, 1.0)).sum(axis=(0, 1)) / np.maximum(used.sum(axis=(0, 1)), 1)
    with np.errstate(divide="ignore"):
        found: Array = np.where(logs < 0, np.log(0.5) / np.where(logs < 0, logs, -1.0), np.inf)
    return found


def effective_state_size(decay: Array, write: Array, read: Array, step: int, *, rtol: float = 1e-3) -> Array:
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
    rtol
        Singular values below this share of the largest do not count.

    Returns
    -------
    (...)
        Number of singular values of the block above ``rtol``.

    References
    ----------
    Effective state-size: Parnichkun et al. 2025, arXiv:2504.19561, section 3.
    """
    decay, write, read = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (decay, write, read)))
    wrote, carried = [], np.ones(decay.shape[1:])
    for t in range(step - 1, -1, -1):
        wrote.append(carried * write[t])
        carried = carried * decay[t]
    reads, carried = [], np.ones(decay.shape[1:])
    for t in range(step, decay.shape[0]):
        carried = carried * decay[t]
        reads.append(read[t] * carried)
    block = np.stack(reads, axis=-2) @ np.moveaxis(np.stack(wrote, axis=-2), -1, -2)
    values = np.linalg.svd(block, compute_uv=False)
    return (values > rtol * values[..., :1]).sum(axis=-1)


def decay_products(decay: Array, at: int, lags: Sequence[int]) -> Array:
    """Compute the share of the state of step ``at - lag`` that the decays leave at step ``at``, for each lag.

    decay : (sample, time, ...); returns (lag, sample, ...), the products of a_t over the steps between.
    """
    values = np.asarray(decay, dtype=np.float64)
    return np.stack([values[:, at - lag + 1 : at + 1].prod(axis=1) for lag in lags])
