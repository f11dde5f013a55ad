"""Summary numbers and profiles of arrays: norms, means, saturation, half-life, horizon.

Pure functions on the array API: each returns arrays of the library of its argument.

NaN and infinite values are omitted only by functions that document it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace

from ..typing import Array, Namespace


@np.errstate(over="ignore")
def safe_norm(array: Array, *, axis: int | tuple[int, ...]) -> Array:
    """Return the Euclidean norm, scaled so that squares neither underflow nor overflow.

    Parameters
    ----------
    array : any real floating array
    axis : axes over which the norm is taken
    """
    xp = array_namespace(array)
    largest = xp.max(xp.abs(array), axis=axis, keepdims=True)
    usable = xp.isfinite(largest) & (largest > 0)
    scale = xp.where(usable, largest, xp.ones_like(largest))
    scaled = array / scale
    norm = xp.sqrt(xp.sum(scaled * scaled, axis=axis, keepdims=True)) * scale
    return xp.squeeze(norm, axis=axis)


def finite_mean(array: Array, *, axis: int | tuple[int, ...]) -> Array:
    """Return the mean over the finite values along ``axis``; NaN if there are none."""
    return masked_mean(array, array_namespace(array).isfinite(array), axis=axis)


def masked_mean(array: Array, where: Array, *, axis: int | tuple[int, ...]) -> Array:
    """Return the mean along ``axis`` over the positions where ``where`` is True; NaN if there are none.

    ``where`` must broadcast against ``array``. Non-finite values at these positions make the mean non-finite; values at
    other positions have no effect.
    """
    xp = array_namespace(array)
    is_counted = xp.broadcast_to(where, array.shape)
    count = xp.sum(xp.astype(is_counted, array.dtype), axis=axis)
    total = xp.sum(xp.where(is_counted, array, xp.zeros_like(array)), axis=axis)
    return xp.where(count > 0, total / xp.where(count > 0, count, xp.ones_like(count)), xp.full_like(total, math.nan))


def quantiles(array: Array, *, q: Sequence[float], axis: int) -> tuple[Array, ...]:
    """Return quantiles along ``axis``, one array per ``q``, interpolated linearly between order statistics.

    The result is NaN wherever a value along ``axis`` is NaN.
    """
    xp = array_namespace(array)
    ordered = xp.sort(array, axis=axis)
    has_nan = xp.any(xp.isnan(array), axis=axis)
    count = array.shape[axis]
    results = []
    for fraction in q:
        position = fraction * (count - 1)
        lower_rank = min(int(position), count - 1)
        upper_rank = min(lower_rank + 1, count - 1)
        low, high = (xp.take(ordered, xp.asarray([i]), axis=axis) for i in (lower_rank, upper_rank))
        value = xp.squeeze(low + (high - low) * (position - lower_rank), axis=axis)
        results.append(xp.where(has_nan, xp.full_like(value, math.nan), value))
    return tuple(results)


def saturation_share(
    gates: Array,
    *,
    axis: int | tuple[int, ...],
    low: float = 0.1,
    high: float = 0.9,
    where: Array | None = None,
) -> tuple[Array, Array]:
    """Return the shares of the values along ``axis`` that are below ``low``, and above ``high``.

    NaN values, and positions where ``where`` (broadcastable) is False, are omitted. A plot of low against high share
    per unit is found in Karpathy, Johnson, Li 2015, arXiv:1506.02078, fig. 4.
    """
    xp = array_namespace(gates)
    is_counted = ~xp.isnan(gates)
    if where is not None:
        is_counted = is_counted & where
    dtype = xp.float64 if gates.dtype == xp.float64 else xp.float32
    count = xp.astype(xp.count_nonzero(is_counted, axis=axis), dtype)
    divisor = xp.where(count > 0, count, xp.ones_like(count))
    shares = []
    for is_saturated in (gates < low, gates > high):
        share = xp.astype(xp.count_nonzero(is_saturated & is_counted, axis=axis), dtype) / divisor
        shares.append(xp.where(count > 0, share, xp.full_like(share, math.nan)))
    return shares[0], shares[1]


def _full_grid(norms: Array, out_times: Sequence[int], in_times: Sequence[int], xp: Namespace) -> Array:
    """Expand norms of selected times to a square array of all times up to the last; other entries are zero."""
    length = max(max(out_times), max(in_times)) + 1
    for axis, times in ((-2, out_times), (-1, in_times)):
        index_of = {time: i for i, time in enumerate(times)}
        index = xp.asarray([index_of.get(time, 0) for time in range(length)])
        is_present = xp.asarray([time in index_of for time in range(length)])
        is_present = is_present[:, None] if axis == -2 else is_present[None, :]
        selected = xp.take(norms, index, axis=norms.ndim + axis)
        norms = xp.where(is_present, selected, xp.zeros_like(selected))
    return norms


def _sum_along_diagonals(square: Array, xp: Namespace) -> Array:
    """Sum (..., T, T) along diagonals to (..., T): entry tau is the sum of square[t, t - tau] over t."""
    length = square.shape[-1]
    batch_shape = tuple(square.shape[:-2])
    flipped = xp.flip(square, axis=-1)  # column j is in_time T - 1 - j
    padded = xp.concat([flipped, xp.zeros_like(flipped)], axis=-1)
    flat = xp.reshape(padded, (*batch_shape, 2 * length * length))[..., :-length]
    # Row t is shifted right by t, to column T - 1 + lag.
    sheared = xp.reshape(flat, (*batch_shape, length, 2 * length - 1))
    return xp.sum(sheared[..., length - 1 :], axis=-2)


def lag_profile(
    norms: Array,
    *,
    out_times: Sequence[int] | None = None,
    in_times: Sequence[int] | None = None,
    where: Array | None = None,
) -> Array:
    """Return m(tau), the mean over t of the norm of the time Jacobian G[t, t - tau].

    Parameters
    ----------
    norms : (..., out_time, in_time)
        Norm of each block of the time Jacobian, >= 0.
    out_times, in_times
        Time steps of the two axes; by default all from 0 on. Times must not be negative.
    where : (..., out_time, in_time) of bool, optional
        True for pairs of two real steps. Norms at other pairs have no effect.

    Returns
    -------
    (..., lag), lag = 0, 1, ...; NaN at a lag without a pair of times. Negative lags (the backward direction of a
    bidirectional layer) are omitted.

    Examples
    --------
    >>> rl.measures.lag_profile(np.array([[1.0, 0.0], [0.5, 1.0]]))  # lag 0 and lag 1
    array([1. , 0.5])
    """
    xp = array_namespace(norms)
    out_times = range(norms.shape[-2]) if out_times is None else [int(t) for t in out_times]
    in_times = range(norms.shape[-1]) if in_times is None else [int(t) for t in in_times]
    counts = xp.ones(norms.shape[-2:], dtype=norms.dtype) if where is None else xp.astype(where, norms.dtype)
    norms = norms if where is None else xp.where(where, norms, xp.zeros_like(norms))
    norm_grid, count_grid = (_full_grid(values, out_times, in_times, xp) for values in (norms, counts))
    total, count = _sum_along_diagonals(norm_grid, xp), _sum_along_diagonals(count_grid, xp)
    mean = total / xp.where(count > 0, count, xp.ones_like(count))
    return xp.where(count > 0, mean, xp.full_like(mean, math.nan))


def real_steps_first(values: Array, where: Array) -> Array:
    """Move the steps of ``values`` (sample, step) where ``where`` is True to the front, and fill the rest with NaN.

    Column n is then the n-th real step after the first, regardless of padding before or between them.
    """
    xp = array_namespace(values)
    order = xp.argsort(xp.astype(~where, xp.int8), axis=1, stable=True)
    real_values = xp.take_along_axis(values, order, axis=1)
    count = xp.sum(xp.astype(where, xp.int64), axis=1, keepdims=True)
    return xp.where(xp.arange(values.shape[1])[None, :] < count, real_values, xp.full_like(real_values, math.nan))


def half_life(profile: Array, *, axis: int = -1, level: float = 0.5) -> Array:
    """Return the number of lags from the peak of ``profile`` until it first falls to ``level`` times the peak.

    Later rises are ignored. Between two lags the profile is interpolated exponentially, so that m(tau) = a**tau gives
    ln(level) / ln(a) exactly. The result is infinite if the profile never falls that low, and NaN if it is 0 everywhere
    or has no finite value.

    Parameters
    ----------
    profile : non-negative, lag along ``axis``

    Examples
    --------
    >>> rl.measures.half_life(0.5 ** (np.arange(20) / 3))  # falls to half within three lags
    array(3.)
    """
    xp, values = array_namespace(profile), _finite_values(profile, axis)
    profile = xp.moveaxis(profile, axis, -1)
    peak = xp.max(values, axis=-1, keepdims=True)
    peak_lag = xp.argmax(values, axis=-1, keepdims=True)
    lag = xp.arange(profile.shape[-1])
    has_fallen = (lag > peak_lag) & xp.isfinite(profile) & (profile <= level * peak)
    ever_falls = xp.any(has_fallen, axis=-1)
    first_lag = xp.argmax(xp.astype(has_fallen, xp.int64), axis=-1, keepdims=True)
    value_at = xp.sum(xp.where(lag == first_lag, values, xp.zeros_like(values)), axis=-1)
    value_before = xp.sum(xp.where(lag == first_lag - 1, values, xp.zeros_like(values)), axis=-1)
    peak, peak_lag, first_lag = peak[..., 0], peak_lag[..., 0], first_lag[..., 0]
    ones = xp.ones_like(value_at)
    usable = ever_falls & (value_at > 0) & (value_before > value_at)
    ratio = xp.log(xp.where(usable, value_before / xp.where(usable, level * peak, ones), ones))
    slope = xp.log(xp.where(usable, value_before / xp.where(usable, value_at, ones), ones * math.e))
    fraction = xp.where(usable, ratio / slope, ones)
    life = xp.astype(first_lag - peak_lag - 1, profile.dtype) + fraction
    life = xp.where(ever_falls, life, xp.full_like(life, math.inf))
    return xp.where(peak > 0, life, xp.full_like(life, math.nan))


def horizon(profile: Array, *, epsilon: float = 0.01, axis: int = -1) -> Array:
    """Return the largest lag at which ``profile`` is at least ``epsilon`` of its peak; -1 if it is 0 everywhere."""
    xp, values = array_namespace(profile), _finite_values(profile, axis)
    peak = xp.max(values, axis=-1, keepdims=True)
    is_above = (values >= epsilon * peak) & (peak > 0)
    lag = xp.arange(values.shape[-1])
    return xp.max(xp.where(is_above, lag, xp.full_like(lag, -1)), axis=-1)


def mean_lag(profile: Array, *, axis: int = -1) -> Array:
    """Return the mean lag weighted by ``profile``; lags without a finite value are omitted.

    Examples
    --------
    >>> rl.measures.mean_lag(np.array([0.0, 1.0, 1.0]))
    array(1.5)
    """
    xp, values = array_namespace(profile), _finite_values(profile, axis)
    lag = xp.astype(xp.arange(values.shape[-1]), values.dtype)
    total = xp.sum(values, axis=-1)
    mean = xp.sum(values * lag, axis=-1) / xp.where(total > 0, total, xp.ones_like(total))
    return xp.where(total > 0, mean, xp.full_like(mean, math.nan))


def covering_lag(profile: Array, *, share: float = 0.9, axis: int = -1) -> Array:
    """Return the smallest lag up to which ``share`` of the profile's sum lies; -1 if the profile is 0 everywhere.

    Examples
    --------
    >>> rl.measures.covering_lag(np.array([8.0, 1.0, 0.5, 0.5]), share=0.9)
    array(1)
    """
    xp, values = array_namespace(profile), _finite_values(profile, axis)
    cumulative = xp.cumulative_sum(values, axis=-1)
    total = cumulative[..., -1:]
    is_covered = cumulative >= share * total
    first_lag = xp.argmax(xp.astype(is_covered, xp.int64), axis=-1)
    return xp.where(total[..., 0] > 0, first_lag, xp.full_like(first_lag, -1))


def _finite_values(profile: Array, axis: int) -> Array:
    """Return a profile with its axis moved to the end, and zeros in place of values that are not finite."""
    xp = array_namespace(profile)
    lag_last = xp.moveaxis(profile, axis, -1)
    return xp.where(xp.isfinite(lag_last), lag_last, xp.zeros_like(lag_last))
