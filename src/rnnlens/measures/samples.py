"""From samples to one picture of a network: each by its own peak, so that a few hard samples do not speak for all."""

from __future__ import annotations

import numpy as np

from ..typing import Array
from .profiles import Band


def by_own_peak(values: Array) -> Array:
    """Each sample (first axis) divided by its largest finite magnitude; NaN throughout where that is 0.

    A sample without a gradient has no shape, and must not pull a median towards 0.
    """
    values = np.asarray(values, dtype=np.float64)
    peak = sample_peaks(values).reshape(-1, *[1] * (values.ndim - 1))
    shape: Array = values / np.where(peak > 0, peak, np.nan)
    return shape


def sample_peaks(values: Array) -> Array:
    """Largest finite magnitude of each sample: (sample, ...) to (sample,); 0 where there is none."""
    values = np.asarray(values, dtype=np.float64)
    flat = values.reshape(len(values), -1)
    peaks: Array = np.where(np.isfinite(flat), np.abs(flat), 0.0).max(axis=1, initial=0.0)
    return peaks


def rms_of_shapes(values: Array, where: Array | None = None) -> Array:
    """Root of the mean square over samples, each by its own peak: (sample, ...) to (...), in [0, 1].

    Samples that are 0 throughout count in no mean. What is not finite in one sample is NaN in the result.

    Parameters
    ----------
    where : of bool, optional
        What counts; what stands elsewhere does not matter. A place where nothing counts is NaN.
    """
    values = np.asarray(values, dtype=np.float64)
    counted = np.ones(values.shape, bool) if where is None else np.broadcast_to(np.asarray(where, bool), values.shape)
    values = np.where(counted, values, 0.0)
    kept = sample_peaks(values) > 0
    if not kept.any():
        return np.where(counted.any(axis=0), 0.0, np.nan)
    squares = np.where(counted, by_own_peak(values) ** 2, 0.0)[kept].sum(axis=0)
    count = counted[kept].sum(axis=0)
    found: Array = np.sqrt(squares / np.where(count > 0, count, np.nan))
    return found


def peak_band(norms: Array, where: Array | None = None) -> Band:
    """Median and quartiles over samples of (sample, ...) norms, each sample by its own peak; places are kept.

    Parameters
    ----------
    where : of bool, optional
        What counts; what stands elsewhere does not matter. A place where nothing counts is NaN.
    """
    values = np.asarray(norms, dtype=np.float64)
    shapes = by_own_peak(values if where is None else np.where(where, values, 0.0))
    shapes = np.where(np.isinf(shapes), np.nan, shapes)
    shapes = shapes if where is None else np.where(where, shapes, np.nan)
    found = np.full((3, *shapes.shape[1:]), np.nan)
    some = np.isfinite(shapes).any(axis=0)
    if some.any():
        found[:, some] = np.nanquantile(shapes[:, some], [0.25, 0.5, 0.75], axis=0)
    return Band(found[1], found[0], found[2])


def finite_median(values: Array) -> Array:
    """Median over the first axis of what is finite; NaN where there is nothing."""
    values = np.asarray(values, dtype=np.float64)
    finite = np.where(np.isfinite(values), values, np.nan)
    some = np.isfinite(finite).any(axis=0)
    found: Array = np.full(values.shape[1:], np.nan)
    found[some] = np.nanmedian(finite[:, some], axis=0)
    return found


def spread_of(values: Array) -> tuple[Array, Array]:
    """Lower and upper quartile over the first axis of what is finite; NaN where there is nothing."""
    values = np.asarray(values, dtype=np.float64)
    finite = np.where(np.isfinite(values), values, np.nan)
    some = np.isfinite(finite).any(axis=0)
    found = np.full((2, *values.shape[1:]), np.nan)
    found[:, some] = np.nanquantile(finite[:, some], [0.25, 0.75], axis=0)
    return found[0], found[1]


def quartiles(values: Array) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile of the finite values; NaN where there is none."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return (float("nan"),) * 3
    low, middle, high = np.quantile(finite, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def typical_first(losses: Array) -> Array:
    """Positions of the samples, the one whose loss is the median first, then by distance from it in rank.

    A sample without a finite loss comes last.
    """
    losses = np.asarray(losses, dtype=np.float64)
    order = np.argsort(np.where(np.isfinite(losses), losses, np.inf), kind="stable")
    middle = (int(np.isfinite(losses).sum()) - 1) // 2
    found: Array = order[np.argsort(np.abs(np.arange(len(order)) - middle), kind="stable")]
    return found


def lorenz(values: Array) -> Array:
    """Share of the whole that the smallest k of n values make up: (n,) to (n + 1,), from 0 to 1.

    Lorenz 1905, doi:10.2307/2276207. Values are non-negative; those that are not finite are left out.
    """
    values = np.asarray(values, dtype=np.float64)
    ordered = np.sort(values[np.isfinite(values)])
    reached = np.concatenate([[0.0], np.cumsum(ordered)])
    share: Array = reached / (reached[-1] or 1.0)
    return share


def carriers(values: Array, share: float = 0.5) -> float:
    """Smallest share of the samples that together make up ``share`` of the whole; NaN where the whole is 0."""
    curve = lorenz(values)
    if curve[-1] == 0:
        return float("nan")
    needed = int(np.argmax(1 - curve[::-1] >= share - 1e-12))
    return needed / (len(curve) - 1)


def far_out(values: Array) -> int | None:
    """Position of the value farthest from the quartiles, where it is more than three times their distance away.

    None where no value is, or fewer than four are finite.

    References
    ----------
    Tukey 1977, Exploratory Data Analysis, section 2C ("far out").
    """
    values = np.asarray(values, dtype=np.float64)
    if np.isfinite(values).sum() < 4:
        return None
    low, _, high = quartiles(values)
    beyond = np.maximum(low - values, values - high)
    beyond = np.where(np.isfinite(beyond), beyond, -np.inf)
    return int(beyond.argmax()) if beyond.max() > 3 * (high - low) > 0 else None
