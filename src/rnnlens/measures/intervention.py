"""Memory in use, measured by exchange: how much a prediction changes with all older inputs from another sample.

The sequence x^(k) is a sample's last k steps after another sample's earlier steps, and f is the prediction at one
output step. No gradient is used, because a latch that stores one bit has memory and a gradient of nearly zero.
Of distributions without a target the change is a divergence. Intervals are percentile bootstraps over samples (Efron
1979, Annals of Statistics 7(1)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from array_api_compat import array_namespace

from ..recurrence.measures import quantiles
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
    block_starts = rng.multinomial(blocks, np.full(samples, 1 / samples), size=resamples)
    coverage = sum(np.roll(block_starts, shift, axis=1) for shift in range(block))
    weights = np.empty((resamples, samples))
    weights[:, np.asarray(order)] = coverage / (blocks * block)
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


def bootstrap_interval(
    values: Array,
    *,
    axis: int = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Return the percentile bootstrap interval (low, high) of the mean along ``axis``, in arrays of the same library.

    One matrix product gives all resampled means. Efron 1979, "Bootstrap methods: another look at the jackknife", Annals
    of Statistics 7(1).
    """
    xp = array_namespace(values)
    values = xp.moveaxis(values, axis, 0)
    count, other_shape = values.shape[0], tuple(values.shape[1:])
    weights = resampling_weights(count, resamples=resamples, seed=seed)
    means = xp.matmul(xp.asarray(weights, dtype=values.dtype), xp.reshape(values, (count, -1)))
    tail = (1 - confidence) / 2
    low, high = quantiles(means, q=(tail, 1 - tail), axis=0)
    return xp.reshape(low, other_shape), xp.reshape(high, other_shape)


def bootstrap(
    statistic: Callable[[Array], float], samples: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Compute the 95 % interval of ``statistic(weights)``, where the weights (sample,) sum to 1."""
    return interval([statistic(row) for row in resampling_weights(samples, resamples=resamples, seed=seed)])


#: Share of the variance of the prediction up to which older inputs count as not used.
USED = 0.05
#: Use below which a search of a curve that does not grow with k leaves the rest of its grid out.
_NEGLIGIBLE = 1e-4
#: Share of the mean square of a prediction up to which its variance counts as rounding; so does a divergence in nats.
_CONSTANT = 1e-10
#: Largest number of logarithms for the divergences of all pairs of samples: a second or two.
_MOST_LOGARITHMS = 2**27


def donors(samples: int, *, lengths: Array | None = None, seed: int = 0) -> Array:
    """Draw for each sample another one whose older steps it gets: a permutation without fixed points.

    Parameters
    ----------
    lengths : (sample,), optional
        Real steps of each sample. If they differ, the samples of a pair have about the same length.

    Returns
    -------
    lender : (sample,) of int
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(samples)
    if lengths is not None and len(set(np.asarray(lengths).tolist())) > 1:
        # Sort by length, in random order among equals, so that neighbours have similar lengths.
        order = order[np.argsort(np.asarray(lengths)[order], kind="stable")]
    lender = np.empty(samples, dtype=np.int64)
    lender[order] = np.roll(order, 1)
    return lender


def cycle(lender: Array) -> Array:
    """Order the samples so that each gets its older steps from the next one, given the result of :func:`donors`."""
    lender = np.asarray(lender)
    order = [0]
    while len(order) < len(lender):
        order.append(int(lender[order[-1]]))
    return np.array(order)


def total_variance(prediction: Array) -> float:
    """Compute the variance over samples of a prediction (sample, unit), summed over units; 0 if it is rounding only."""
    prediction = np.asarray(prediction, dtype=np.float64)
    variance = float(prediction.var(axis=0).sum())
    return variance if variance > _CONSTANT * float(np.mean(prediction**2)) else 0.0


def squared_change(prediction: Array, swapped: Array) -> Array:
    """Compute |f(x^(k)) - f(x)|^2 for each sample, (sample,), from two predictions (sample, unit)."""
    difference = np.asarray(swapped, dtype=np.float64) - np.asarray(prediction, dtype=np.float64)
    return np.sum(difference**2, axis=-1)


def use(prediction: Array, swapped: Array) -> float:
    """Compute U(k) = E|f(x^(k)) - f(x)|^2 / (2 sum Var f): the total Sobol index of all inputs older than k steps.

    Parameters
    ----------
    prediction, swapped : (sample, unit)
        f(x), and f of the same samples with another sample's prefix.

    Returns
    -------
    float
        Between 0 and 1, up to sampling error; NaN if the prediction does not vary.

    References
    ----------
    Jansen 1999, doi:10.1016/S0010-4655(98)00154-4, eq. 8; Homma, Saltelli 1996, doi:10.1016/0951-8320(96)00002-6.
    """
    variance = total_variance(prediction)
    return float(squared_change(prediction, swapped).mean()) / (2 * variance) if variance else float("nan")


class SquaredDifference:
    """Squared change of a prediction (sample, unit), and what two independent samples differ by.

    U(k) is the mean change by exchanged older inputs, divided by what two independent samples differ by.
    """

    def __init__(self, prediction: Array) -> None:
        self.prediction = np.asarray(prediction, dtype=np.float64)

    def change(self, changed: Array) -> Array:
        """Compute the difference of each sample's prediction from a ``changed`` one: (sample,)."""
        return squared_change(self.prediction, changed)

    @cached_property
    def between_samples(self) -> float:
        """Mean difference of two independent samples; 0 if predictions differ by rounding only."""
        return 2 * total_variance(self.prediction)

    def resampled(self, weights: Array) -> Array:
        """Compute the mean difference of two independent samples in each resample: (resample,)."""
        return 2 * resampled_variance(self.prediction, weights)


def jensen_shannon(p: Array, q: Array) -> Array:
    """Compute the Jensen-Shannon divergence in nats of distributions (..., event): (...,).

    It is 0 for equal distributions and ln 2 for those without a common event.

    References
    ----------
    Lin 1991, doi:10.1109/18.61115, section IV.
    """
    middle = (p + q) / 2
    return np.maximum(_entropy(middle) - (_entropy(p) + _entropy(q)) / 2, 0.0)


def _entropy(p: Array) -> Array:
    return -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=-1)


class DistributionDifference(SquaredDifference):
    """Jensen-Shannon divergence of predicted distributions (sample, event), used as :class:`SquaredDifference`.

    The divergence is a squared distance in a Hilbert space. U(k) is therefore a total Sobol index here too: it lies
    between 0 and 1, and does not grow with k.

    References
    ----------
    Fuglede, Topsoe 2004, doi:10.1109/ISIT.2004.1365067.
    """

    def change(self, changed: Array) -> Array:
        """Compute the divergence of each sample's distribution from a ``changed`` one: (sample,)."""
        return jensen_shannon(self.prediction, np.asarray(changed, dtype=np.float64))

    @cached_property
    def between_samples(self) -> float:
        """Mean divergence of two independent samples; 0 if distributions differ by rounding only."""
        divergence = float(self._of_pairs.mean())
        return divergence if divergence > _CONSTANT else 0.0

    def resampled(self, weights: Array) -> Array:
        """Compute the mean divergence of two independent samples in each resample: (resample,)."""
        weights = weights[:, : len(self._of_pairs)]
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
        return np.sum((weights @ self._of_pairs) * weights, axis=1)

    @cached_property
    def _of_pairs(self) -> Array:
        """Divergence of each pair of samples (sample, sample): of the first ones if there are many events."""
        count = int(np.sqrt(_MOST_LOGARITHMS / self.prediction.shape[1]))
        p = self.prediction[: max(count, 2 * BLOCK)]
        divergence = np.zeros((len(p), len(p)))
        for i in range(len(p) - 1):
            divergence[i, i + 1 :] = jensen_shannon(p[i], p[i + 1 :])
        return divergence + divergence.T


def skill(loss: Array, constant_loss: Array) -> float:
    """Compute 1 - mean loss / mean loss of the best constant prediction, from losses (sample,).

    The result is 1 for perfect predictions and 0 for those no better than a constant. It is NaN if the constant
    prediction has no loss.
    """
    constant = float(np.mean(constant_loss))
    return 1 - float(np.mean(loss)) / constant if constant > 0 else float("nan")


def score(target: Array, prediction: Array) -> Array:
    """Compute each sample's contribution to the covariance of target and prediction, summed over units: (sample,).

    The mean over samples is the covariance. For one-hot targets and probabilities this is the mean probability of the
    right class, minus the mean for predictions of randomly chosen samples. It is bounded, unlike the cross-entropy.

    Parameters
    ----------
    target, prediction : (sample, unit)
    """
    target = np.asarray(target, dtype=np.float64)
    return np.sum((target - target.mean(axis=0)) * np.asarray(prediction, dtype=np.float64), axis=-1)


def benefit(target: Array, prediction: Array, swapped: Array) -> float:
    """Compute B(k) = 1 - cov(y, f(x^(k))) / cov(y, f(x)): the share of the score lost by exchanging older inputs.

    It is 0 if nothing is lost and 1 if everything is. It is NaN if the covariance of target and prediction is not
    positive.

    Parameters
    ----------
    target, prediction, swapped : (sample, unit)
        y, f(x), and f of the same samples with another sample's prefix.
    """
    gained = float(score(target, prediction).mean())
    return 1 - float(score(target, swapped).mean()) / gained if gained > 0 else float("nan")


def memory_length(curve: Mapping[int, float], steps: int, level: float = USED) -> int:
    """Return the memory in use n: the smallest k from which on ``curve`` stays at or below ``level``.

    Parameters
    ----------
    curve
        U(k) or B(k) at some k, 1 <= k < steps. At k = steps nothing is exchanged, so the curve is 0 there.
    steps
        Length of the sequence. It is returned if the curve is above ``level`` at the largest k: n is then at least
        ``steps``.
    """
    lags_above = [k for k, value in curve.items() if value > level]
    later_lags = [k for k in curve if k > max(lags_above, default=0)]
    return min(later_lags, default=steps)


@dataclass(frozen=True)
class Probes:
    """Results of exchanging prefixes at several context lengths k.

    Attributes
    ----------
    change, score : by k, (sample,) each
        Squared change |f(x^(k)) - f(x)|^2, and :func:`score` of f(x^(k)).
    """

    steps: int
    change: dict[int, Array]
    score: dict[int, Array]


def search(
    probe: Callable[[int], tuple[Array, Array]],
    steps: int,
    scale: float,
    levels: tuple[float, ...],
    *,
    decreasing: bool = False,
) -> Probes:
    """Find where U falls to each of ``levels`` with few probes: on a doubling grid, then by bisection.

    Parameters
    ----------
    probe
        Function that returns (change, score), (sample,) each, for a context length k.
    scale
        The denominator of U(k): what two independent samples differ by, 2 sum Var f for squares.
    decreasing
        Whether U(k) is known not to grow with k, as the total Sobol index of all inputs older than k. The grid then
        ends where U is negligible, with one more probe at the oldest step.
    """
    probe_results: dict[int, tuple[Array, Array]] = {}

    def use_at(k: int) -> float:
        if k not in probe_results:
            probe_results[k] = probe(k)
        return float(probe_results[k][0].mean()) / scale

    for k in (2**i for i in range(steps.bit_length()) if 2**i < steps - 1):
        if use_at(k) < _NEGLIGIBLE and decreasing:
            break
    if steps > 1:
        use_at(steps - 1)
    for level in levels:
        curve = {k: use_at(k) for k in sorted(probe_results)}
        high = memory_length(curve, steps, level)
        low = max((k for k in curve if k < high), default=0)
        while high - low > 1 and high <= steps and low:
            middle = (low + high) // 2
            low, high = (middle, high) if use_at(middle) > level else (low, middle)
    ordered = sorted(probe_results)
    return Probes(steps, {k: probe_results[k][0] for k in ordered}, {k: probe_results[k][1] for k in ordered})
