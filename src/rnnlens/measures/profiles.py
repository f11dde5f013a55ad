"""Profiles over lag: each sample by its own peak, then median and band, since few samples carry most of a mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..typing import Array


@dataclass(frozen=True)
class Band:
    """Median and quartiles over samples: (lag,) each."""

    median: Array
    low: Array
    high: Array


def own_peak(norms: Array) -> Array:
    """Each row (sample, lag) divided by its largest value; rows that are 0 throughout are left out, NaN stays."""
    norms = np.asarray(norms, dtype=np.float64)
    norms = np.where(np.isinf(norms), 0.0, norms)
    peak = np.nan_to_num(norms).max(axis=1, keepdims=True)
    kept: Array = (norms / np.where(peak > 0, peak, 1.0))[peak[:, 0] > 0]
    return kept


def share_of_peak(profiles: Array) -> Array:
    """Each record of a profile, (record, time), divided by its own largest value; NaN where it has none above 0."""
    values = np.asarray(profiles, dtype=np.float64)
    finite = np.where(np.isfinite(values), values, np.nan)
    peak = np.fmax.reduce(np.where(finite > 0, finite, np.nan), axis=1, keepdims=True)
    shares: Array = finite / peak
    return shares


def band(norms: Array) -> Band:
    """Median and quartiles over samples of profiles (sample, lag), each by its own peak; NaN where a sample ended."""
    relative = own_peak(norms)
    relative = relative[:, np.isfinite(relative).any(axis=0)]
    if not len(relative):
        nothing = np.zeros(np.asarray(norms).shape[1])
        return Band(nothing, nothing, nothing)
    low, median, high = np.nanquantile(relative, [0.25, 0.5, 0.75], axis=0)
    return Band(median, low, high)


def attribution(gradient: Array, x: Array) -> Array:
    """(|df/dx_t| sd(x_t))^2 summed over features, by step: the derivative-based measure of sensitivity.

    Parameters
    ----------
    gradient, x : (sample, time, feature)
        Of one projection of the prediction by the input, and the input.

    Returns
    -------
    (sample, time)

    References
    ----------
    Sobol, Kucherenko 2009, doi:10.1016/j.matcom.2009.01.023: an upper bound of the total index up to a constant.
    """
    spread = np.asarray(x, dtype=np.float64).std(axis=0)
    scores: Array = np.sum((np.asarray(gradient, dtype=np.float64) * spread) ** 2, axis=-1)
    return scores


def input_sensitivity(gradient: Array, x: Array) -> Array:
    """|df/dx_t| times the input's standard deviation, by step: (sample, time, feature) to (sample, time).

    The root of :func:`attribution`: what a change of usual size at that step does. A feature that never varies over
    samples at a step does nothing, however large its gradient.
    """
    found: Array = np.sqrt(attribution(gradient, x))
    return found


def attributed_memory(scores: Array, share: float = 0.95) -> int:
    """Steps back from the last that hold ``share`` of the attribution (sample, time): median over samples."""
    by_lag = np.asarray(scores)[:, ::-1]
    total = by_lag.sum(axis=1, keepdims=True)
    kept = by_lag[total[:, 0] > 0] / total[total[:, 0] > 0]
    if not len(kept):
        return 0
    first = (np.cumsum(kept, axis=1) >= share).argmax(axis=1) + 1
    return int(np.median(first))
