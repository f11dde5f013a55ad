"""Profiles of gradients and gates over time or lag, and their summaries over samples.

Each sample is divided by its own peak before the median over samples is computed, because a mean would depend on few
samples with large gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..typing import Array
from .transfer import theil_sen


@dataclass(frozen=True)
class Band:
    """Median and quartiles over samples, (lag,) each."""

    median: Array
    low: Array
    high: Array


def own_peak(norms: Array) -> Array:
    """Divide each row (sample, lag) by its largest value.

    Rows that are all 0 are left out, infinities become 0, and NaN stays.
    """
    norms = np.asarray(norms, dtype=np.float64)
    norms = np.where(np.isinf(norms), 0.0, norms)
    peak = np.nan_to_num(norms).max(axis=1, keepdims=True)
    return (norms / np.where(peak > 0, peak, 1.0))[peak[:, 0] > 0]


def share_of_peak(profiles: Array) -> Array:
    """Divide each row of a profile (record, time) by its largest positive value; NaN if there is none."""
    values = np.asarray(profiles, dtype=np.float64)
    finite = np.where(np.isfinite(values), values, np.nan)
    peak = np.fmax.reduce(np.where(finite > 0, finite, np.nan), axis=1, keepdims=True)
    return finite / peak


def band(norms: Array) -> Band:
    """Compute median and quartiles over samples of profiles (sample, lag), each divided by its own peak.

    NaN, such as past the end of a sample, is left out.
    """
    relative = own_peak(norms)
    relative = relative[:, np.isfinite(relative).any(axis=0)]
    if not len(relative):
        zeros = np.zeros(np.asarray(norms).shape[1])
        return Band(zeros, zeros, zeros)
    low, median, high = finite_quartiles(relative)
    return Band(median, low, high)


def attribution(gradient: Array, x: Array) -> Array:
    """Compute (|df/dx_t| sd(x_t))^2, summed over features: a derivative-based measure of sensitivity by step.

    Parameters
    ----------
    gradient, x : (sample, time, feature)
        Gradient of one projection of the prediction with respect to the input, and the input.

    Returns
    -------
    (sample, time)

    References
    ----------
    Sobol, Kucherenko 2009, doi:10.1016/j.matcom.2009.01.023: an upper bound of the total index up to a constant.
    """
    spread = np.asarray(x, dtype=np.float64).std(axis=0)
    return np.sum((np.asarray(gradient, dtype=np.float64) * spread) ** 2, axis=-1)


def input_sensitivity(gradient: Array, x: Array) -> Array:
    """Compute |df/dx_t| times the standard deviation of the input, by step: (sample, time, feature) to (sample, time).

    It is the square root of :func:`attribution`: the effect on the prediction of a change of usual size at that step. A
    feature that does not vary over samples at a step adds nothing, however large its gradient is.
    """
    return np.sqrt(attribution(gradient, x))


def attributed_memory(scores: Array, share: float = 0.95) -> int:
    """Count the last steps that have ``share`` of the attribution (sample, time); median over samples."""
    by_lag = np.asarray(scores)[:, ::-1]
    total = by_lag.sum(axis=1, keepdims=True)
    step_shares = by_lag[total[:, 0] > 0] / total[total[:, 0] > 0]
    if not len(step_shares):
        return 0
    step_counts = (np.cumsum(step_shares, axis=1) >= share).argmax(axis=1) + 1
    return int(np.median(step_counts))


def by_own_peak(values: Array) -> Array:
    """Divide each sample (first axis) by its largest finite magnitude; all NaN if that is 0.

    NaN marks samples without a gradient, which medians leave out.
    """
    values = np.asarray(values, dtype=np.float64)
    peak = sample_peaks(values).reshape(-1, *[1] * (values.ndim - 1))
    return values / np.where(peak > 0, peak, np.nan)


def shares_of_peak(values: Array) -> Array:
    """Divide each sample by its own peak as :func:`by_own_peak`; 0 stays 0 where all samples are 0."""
    values = np.asarray(values, dtype=np.float64)
    return by_own_peak(values) if sample_peaks(values).any() else np.where(values == 0, 0.0, np.nan)


def sample_peaks(values: Array) -> Array:
    """Return the largest finite magnitude of each sample, (sample, ...) to (sample,); 0 if there is none."""
    values = np.asarray(values, dtype=np.float64)
    flat = values.reshape(len(values), -1)
    return np.where(np.isfinite(flat), np.abs(flat), 0.0).max(axis=1, initial=0.0)


def rms_of_shapes(values: Array, where: Array | None = None) -> Array:
    """Compute the root mean square over samples, each divided by its own peak: (sample, ...) to (...), in [0, 1].

    Samples that are 0 everywhere are left out. A position that is not finite in one sample is not finite in the result.

    Parameters
    ----------
    where : of bool, optional
        Mask of the entries to use. A position without any is NaN.
    """
    values = np.asarray(values, dtype=np.float64)
    is_counted = (
        np.ones(values.shape, bool) if where is None else np.broadcast_to(np.asarray(where, bool), values.shape)
    )
    values = np.where(is_counted, values, 0.0)
    has_peak = sample_peaks(values) > 0
    if not has_peak.any():
        return np.where(is_counted.any(axis=0), 0.0, np.nan)
    squares = np.where(is_counted, by_own_peak(values) ** 2, 0.0)[has_peak].sum(axis=0)
    count = is_counted[has_peak].sum(axis=0)
    return np.sqrt(squares / np.where(count > 0, count, np.nan))


def peak_band(norms: Array, where: Array | None = None) -> Band:
    """Compute median and quartiles over samples of norms (sample, ...), each divided by its own peak.

    All positions are kept.

    Parameters
    ----------
    where : of bool, optional
        Mask of the entries to use. A position without any is NaN.
    """
    values = np.asarray(norms, dtype=np.float64)
    shapes = shares_of_peak(values if where is None else np.where(where, values, 0.0))
    low, median, high = finite_quartiles(shapes if where is None else np.where(where, shapes, np.nan))
    return Band(median, low, high)


def finite_median(values: Array) -> Array:
    """Compute the median of the finite values along the first axis; NaN where there is none."""
    return finite_quartiles(values)[1]


def finite_quartiles(values: Array) -> Array:
    """Compute lower quartile, median and upper quartile of finite values along the first axis: (n, ...) to (3, ...).

    They are interpolated linearly between order statistics; NaN where no value is finite.
    """
    values = np.asarray(values, dtype=np.float64)
    if not len(values):
        return np.full((3, *values.shape[1:]), np.nan)
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)  # NaN comes last
    last_rank = np.maximum(np.isfinite(ordered).sum(axis=0) - 1, 0)
    position = np.multiply.outer(np.array([0.25, 0.5, 0.75]), last_rank)
    lower_rank = position.astype(np.intp)
    low, high = (
        np.take_along_axis(ordered, rank, axis=0) for rank in (lower_rank, np.minimum(lower_rank + 1, last_rank))
    )
    quartile_values: Array = low + (high - low) * (position - lower_rank)
    return quartile_values


def quartiles(values: Array) -> tuple[float, float, float]:
    """Compute lower quartile, median and upper quartile of the finite values; NaN where there is none."""
    low, middle, high = finite_quartiles(np.ravel(values))
    return float(low), float(middle), float(high)


def typical_first(losses: Array) -> Array:
    """Return the order of samples from the one with the median loss outwards by rank.

    Samples without a finite loss come last.
    """
    losses = np.asarray(losses, dtype=np.float64)
    order = np.argsort(np.where(np.isfinite(losses), losses, np.inf), kind="stable")
    middle = (int(np.isfinite(losses).sum()) - 1) // 2
    return order[np.argsort(np.abs(np.arange(len(order)) - middle), kind="stable")]


def lorenz(values: Array) -> Array:
    """Compute the share of the sum that the smallest k of n values make up: (n,) to (n + 1,), from 0 to 1.

    This is the Lorenz curve (Lorenz 1905, doi:10.2307/2276207). Values must be non-negative; those that are not finite
    are left out.
    """
    values = np.asarray(values, dtype=np.float64)
    ordered = np.sort(values[np.isfinite(values)])
    cumulative = np.concatenate([[0.0], np.cumsum(ordered)])
    return cumulative / (cumulative[-1] or 1.0)


def carriers(values: Array, share: float = 0.5) -> float:
    """Compute the smallest share of the samples that make up ``share`` of the sum; NaN if the sum is 0."""
    curve = lorenz(values)
    if curve[-1] == 0:
        return float("nan")
    needed_count = int(np.argmax(1 - curve[::-1] >= share - 1e-12))
    return needed_count / (len(curve) - 1)


def far_out(values: Array) -> int | None:
    """Return the index of the one value farthest beyond the quartiles, or None if no value is far out.

    A value is far out if it is more than three interquartile ranges below the lower or above the upper quartile. The
    result is also None if fewer than four values are finite.

    References
    ----------
    Tukey 1977, Exploratory Data Analysis, section 2C ("far out").
    """
    values = np.asarray(values, dtype=np.float64)
    if np.isfinite(values).sum() < 4:
        return None
    low, _, high = quartiles(values)
    distance = np.maximum(low - values, values - high)
    distance = np.where(np.isfinite(distance), distance, -np.inf)
    return int(distance.argmax()) if distance.max() > 3 * (high - low) > 0 else None


def gradient_reach(norms: Array, share: float = 0.95) -> int:
    """Count the last steps that have ``share`` of the squared gradient (sample, lag), with lag 0 first.

    It is 0 where lag 0 alone has that share, or the gradient is 0: then nothing travels back. The result is the median
    over samples, each relative to its own sum, so that few samples with large gradients do not decide it. The rule is
    that of :func:`attributed_memory` (Sobol, Kucherenko 2009, doi:10.1016/j.matcom.2009.01.023).

    Examples
    --------
    >>> rl.measures.gradient_reach(np.array([[1.0, 1.0, 1.0, 0.0]]))  # lag 0 first
    3
    """
    squares = np.nan_to_num(np.asarray(norms, dtype=np.float64), posinf=0.0)
    peak = squares.max(axis=1, keepdims=True)
    relative = squares / np.where(peak > 0, peak, 1.0)
    count = attributed_memory((relative**2)[:, ::-1], share)
    return count if count > 1 else 0


def gradient_decay(norms: Array) -> float:
    """Compute the factor by which a gradient (sample, lag) changes with every step back; NaN if it is unknown.

    Lag 0 comes first. Each sample is divided by its own peak, and the median over samples is computed. The factor is e
    to the Theil-Sen slope of the logarithm of this median, from its peak on.
    """
    median = band(norms).median
    falling = median[int(np.argmax(median)) :] if median.size else median
    return float(np.exp(theil_sen(falling)))


def lag_shares(norms: Array, *, runs_back: bool = False) -> Array:
    """Accumulate the shares of a weight's gradient over lags: norms (time, gate) to (gate, lag), ending at 1.

    ``norms`` are the norms of each step's contribution to dL/dW, for each gate. Lag 0 is the last step of the
    recurrence, which with ``runs_back`` is the first in time. A gate whose gradient is 0 at all steps gives NaN.
    """
    norms = np.asarray(norms, dtype=np.float64)
    cumulative = np.cumsum(norms if runs_back else norms[::-1], axis=0)
    total = cumulative[-1]
    return (cumulative / np.where(total > 0, total, np.nan)).T


def input_totals(norms: Array) -> Array:
    """Sum norms over output steps: (..., out_time, in_time) to (..., in_time)."""
    return np.asarray(norms, dtype=np.float64).sum(axis=-2)


def kept_by_gates(forget: Array, mask: Array | None = None) -> Array:
    """Multiply the forget gates (sample, time, unit) from the first step on: dc_t/dc_0 along the cell state alone.

    The paths through the gates of later steps are left out. Steps where ``mask`` (sample, time) is False have the
    factor 1.
    """
    values = np.asarray(forget, dtype=np.float64)
    if mask is not None:
        values = np.where(np.asarray(mask, dtype=bool)[..., None], values, 1.0)
    return np.cumprod(values, axis=1)


def own_diagonal(jacobian: Array) -> Array:
    """Return the derivative of each unit's state by its own initial state: (..., unit, unit) to (..., unit)."""
    return np.diagonal(np.asarray(jacobian), axis1=-2, axis2=-1)
