"""Memory in use, measured by exchange: how much a prediction changes when all older inputs are another sample's.

x^(k) is a sample's last k steps behind another sample's prefix, f the prediction at one output step. No gradient is
taken, since a latch that holds one bit for good has memory and a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..typing import Array

#: Share of the variance of the prediction below which older inputs count as not used.
USED = 0.05
#: Below this share of the mean square of a prediction its variance is rounding.
_CONSTANT = 1e-10


def donors(samples: int, *, lengths: Array | None = None, seed: int = 0) -> Array:
    """Draw for each sample another one that lends its prefix: a permutation without fixed points.

    Parameters
    ----------
    lengths : (sample,), optional
        Real steps of each sample. Where they differ, lenders are about as long as borrowers.

    Returns
    -------
    (sample,) of int
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(samples)
    if lengths is not None and len(set(np.asarray(lengths).tolist())) > 1:
        # Neighbours by length, in random order among equals.
        order = order[np.argsort(np.asarray(lengths)[order], kind="stable")]
    lender = np.empty(samples, dtype=np.int64)
    lender[order] = np.roll(order, 1)
    return lender


def cycle(lender: Array) -> Array:
    """Order the samples so that each borrows from the one before it, given the result of :func:`donors`: (sample,)."""
    lender = np.asarray(lender)
    order = [0]
    while len(order) < len(lender):
        order.append(int(lender[order[-1]]))
    return np.array(order)


def total_variance(prediction: Array) -> float:
    """Sum the variance over samples of a prediction (sample, unit) over units; 0 where it is rounding only."""
    prediction = np.asarray(prediction, dtype=np.float64)
    variance = float(prediction.var(axis=0).sum())
    return variance if variance > _CONSTANT * float(np.mean(prediction**2)) else 0.0


def squared_change(prediction: Array, swapped: Array) -> Array:
    """Compute |f(x^(k)) - f(x)|^2 of each sample from two predictions (sample, unit): (sample,)."""
    difference = np.asarray(swapped, dtype=np.float64) - np.asarray(prediction, dtype=np.float64)
    change: Array = np.sum(difference**2, axis=-1)
    return change


def use(prediction: Array, swapped: Array) -> float:
    """U(k) = E|f(x^(k)) - f(x)|^2 / (2 sum Var f): the total Sobol index of all inputs older than k, in [0, 1].

    Parameters
    ----------
    prediction, swapped : (sample, unit)
        f(x), and f of the same samples with another sample's prefix.

    Returns
    -------
    float
        NaN where the prediction does not vary.

    References
    ----------
    Jansen 1999, doi:10.1016/S0010-4655(98)00154-4, eq. 8; Homma, Saltelli 1996, doi:10.1016/0951-8320(96)00002-6.
    """
    variance = total_variance(prediction)
    return float(squared_change(prediction, swapped).mean()) / (2 * variance) if variance else float("nan")


def skill(loss: Array, constant_loss: Array) -> float:
    """1 - loss / loss of the best constant prediction, both (sample,): 1 is perfect, 0 has learned nothing."""
    constant = float(np.mean(constant_loss))
    return 1 - float(np.mean(loss)) / constant if constant > 0 else float("nan")


def score(target: Array, prediction: Array) -> Array:
    """Contribution of each sample to the covariance of target and prediction, summed over units: (sample,).

    Their mean is the covariance. For one-hot targets and probabilities it is the probability given to the right class,
    above what it is by chance: unlike the cross-entropy it is bounded.

    Parameters
    ----------
    target, prediction : (sample, unit)
    """
    target = np.asarray(target, dtype=np.float64)
    contributions: Array = np.sum((target - target.mean(axis=0)) * np.asarray(prediction, dtype=np.float64), axis=-1)
    return contributions


def benefit(target: Array, prediction: Array, swapped: Array) -> float:
    """B(k) = 1 - cov(y, f(x^(k))) / cov(y, f(x)): the share of the score that is lost with older inputs exchanged.

    0 where nothing is lost, 1 where everything is. NaN where prediction and target do not vary together.

    Parameters
    ----------
    target, prediction, swapped : (sample, unit)
        y, f(x), and f of the same samples with another sample's prefix.
    """
    gained = float(score(target, prediction).mean())
    return 1 - float(score(target, swapped).mean()) / gained if gained > 0 else float("nan")


def memory_length(curve: Mapping[int, float], steps: int, level: float = USED) -> int:
    """n: the smallest k from which on ``curve`` stays at or below ``level``; the last step alone is 1.

    Parameters
    ----------
    curve
        U(k) or B(k) at some k, 1 <= k < steps. At k = steps nothing is exchanged: it is 0 there.
    steps
        Length of the sequence. Returned where the curve is still above ``level`` at steps - 1: n is at least that.
    """
    above = [k for k, value in curve.items() if value > level]
    later = [k for k in curve if k > max(above, default=0)]
    return min(later, default=steps)


@dataclass(frozen=True)
class Probes:
    """Results of exchanging prefixes at some context lengths k.

    Attributes
    ----------
    change, score : by k, (sample,) each
        |f(x^(k)) - f(x)|^2, and :func:`score` of f(x^(k)).
    """

    steps: int
    change: dict[int, Array]
    score: dict[int, Array]


def search(probe: Callable[[int], tuple[Array, Array]], steps: int, scale: float, levels: tuple[float, ...]) -> Probes:
    """Find where U falls below each of ``levels`` with few probes: a doubling grid, then bisection.

    Parameters
    ----------
    probe
        Returns (change, score) of every sample for a context length k.
    scale
        2 sum Var f.
    """
    found: dict[int, tuple[Array, Array]] = {}

    def use_at(k: int) -> float:
        if k not in found:
            found[k] = probe(k)
        return float(found[k][0].mean()) / scale

    for k in _grid(steps):
        use_at(k)
    for level in levels:
        curve = {k: use_at(k) for k in sorted(found)}
        high = memory_length(curve, steps, level)
        low = max((k for k in curve if k < high), default=0)
        while high - low > 1 and high <= steps and low:
            middle = (low + high) // 2
            low, high = (middle, high) if use_at(middle) > level else (low, middle)
    ordered = sorted(found)
    return Probes(steps, {k: found[k][0] for k in ordered}, {k: found[k][1] for k in ordered})


def _grid(steps: int) -> list[int]:
    """Context lengths to begin with: 1, 2, 4, ... and steps - 1."""
    doubling = [2**i for i in range(steps.bit_length()) if 2**i < steps - 1]
    return [*doubling, steps - 1] if steps > 1 else []
