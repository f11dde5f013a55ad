"""Percentile bootstrap over samples for curves that are ratios of means. Efron 1979, Annals of Statistics 7(1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..typing import Array

RESAMPLES = 300


def resampling_weights(samples: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """How often each sample is drawn, over ``samples``: (resample, sample), rows sum to 1."""
    draws = np.random.default_rng(seed).multinomial(samples, np.full(samples, 1 / samples), size=resamples)
    weights: Array = draws / samples
    return weights


def resampled_variance(prediction: Array, weights: Array) -> Array:
    """Sum over units of the variance of a prediction (sample, unit) in each resample: (resample,)."""
    values = np.asarray(prediction, dtype=np.float64)
    values = values - values.mean(axis=0)
    variance: Array = np.maximum((weights @ values**2 - (weights @ values) ** 2).sum(axis=-1), 0.0)
    return variance


def interval(values: Sequence[float] | Array, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of resampled values; NaN where most are not finite."""
    array = np.asarray(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    if finite.size < len(array) / 2:
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    low, high = np.quantile(finite, [tail, 1 - tail])
    return float(low), float(high)


def bootstrap(
    statistic: Callable[[Array], float], samples: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of ``statistic(weights)``, a function of how much each sample counts (they sum to 1)."""
    return interval([statistic(row) for row in resampling_weights(samples, resamples=resamples, seed=seed)])
