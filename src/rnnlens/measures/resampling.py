"""Percentile bootstrap over samples for curves that are ratios of means. Efron 1979, Annals of Statistics 7(1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..typing import Array

RESAMPLES = 300
#: Neighbours that are drawn together where samples share something with the next.
BLOCK = 4


def resampling_weights(samples: int, *, order: Array | None = None, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """How often each sample is drawn, over ``samples``: (resample, sample), rows sum to 1.

    Parameters
    ----------
    order : (sample,) of int, optional
        Samples of which each shares something with the next, the last with the first, such as the prefix that one lends
        to the other. Blocks of neighbours are drawn then, so that what they share is drawn with them.

    References
    ----------
    Circular blocks: Politis, Romano 1992, in LePage, Billard (eds.), Exploring the limits of bootstrap, 263-270.
    """
    rng = np.random.default_rng(seed)
    if order is None or samples < 2 * BLOCK:
        weights: Array = rng.multinomial(samples, np.full(samples, 1 / samples), size=resamples) / samples
        return weights
    blocks = -(-samples // BLOCK)
    begun = rng.multinomial(blocks, np.full(samples, 1 / samples), size=resamples)
    covered = sum(np.roll(begun, shift, axis=1) for shift in range(BLOCK))
    weights = np.empty((resamples, samples))
    weights[:, np.asarray(order)] = covered / (blocks * BLOCK)
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
