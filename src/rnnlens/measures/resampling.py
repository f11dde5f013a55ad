"""Percentile bootstrap over samples for ratios of means (Efron 1979, Annals of Statistics 7(1))."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..typing import Array

RESAMPLES = 300
#: Default number of dependent neighbours in a block.
BLOCK = 4


def resampling_weights(
    samples: int, *, order: Array | None = None, block: int = BLOCK, resamples: int = RESAMPLES, seed: int = 0
) -> Array:
    """Draw samples with replacement; return the share of each sample in each resample, (resample, sample).

    Parameters
    ----------
    order : (sample,) of int, optional
        Indices of samples in an order in which neighbours are dependent, also the last and the first: one has the
        prefix of the other, or they are overlapping windows. Circular blocks of neighbours are then drawn. None if
        samples are independent.
    block
        Number of samples in a block.

    References
    ----------
    Circular blocks: Politis, Romano 1992, in LePage, Billard (eds.), Exploring the limits of bootstrap, 263-270.
    """
    rng = np.random.default_rng(seed)
    if order is None or samples < 2 * block:
        return rng.multinomial(samples, np.full(samples, 1 / samples), size=resamples) / samples
    blocks = -(-samples // block)
    begun = rng.multinomial(blocks, np.full(samples, 1 / samples), size=resamples)
    covered = sum(np.roll(begun, shift, axis=1) for shift in range(block))
    weights = np.empty((resamples, samples))
    weights[:, np.asarray(order)] = covered / (blocks * block)
    return weights


def resampled_variance(prediction: Array, weights: Array) -> Array:
    """Compute the variance of a prediction (sample, unit), summed over units, in each resample: (resample,)."""
    values = np.asarray(prediction, dtype=np.float64)
    values = values - values.mean(axis=0)
    return np.maximum((weights @ values**2 - (weights @ values) ** 2).sum(axis=-1), 0.0)


def interval(values: Sequence[float] | Array, confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of resampled values; NaN if most of them are not finite."""
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
    """Compute the 95 % interval of ``statistic(weights)``, where the weights (sample,) sum to 1."""
    return interval([statistic(row) for row in resampling_weights(samples, resamples=resamples, seed=seed)])
