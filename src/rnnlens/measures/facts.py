"""Facts about data, states and gates, without a judgement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..typing import Array

#: Share of the median unit's spread up to which a unit counts as dead.
DEAD = 1e-4


def unit_spread(states: Array, mask: Array | None = None) -> Array:
    """Compute the standard deviation of each unit over samples and real steps: (sample, time, unit) to (unit,)."""
    values = np.asarray(states, dtype=np.float64)
    rows = values.reshape(-1, values.shape[-1]) if mask is None else values[np.asarray(mask, dtype=bool)]
    return rows.std(axis=0) if len(rows) else np.zeros(values.shape[-1])


def dead_units(states: Array, mask: Array | None = None) -> Array:
    """Find dead units, (unit,) of bool: their spread is at most 1e-4 of the median unit's.

    If more than half of the units are dead, the largest spread is used instead of the median.
    """
    spread = unit_spread(states, mask)
    reference = float(np.median(spread))
    if reference <= DEAD * float(spread.max(initial=0.0)):
        reference = float(spread.max(initial=0.0))
    return spread <= DEAD * reference


def gate_timescale(forget: Array, mask: Array | None = None) -> Array:
    """Compute the time constant -1 / ln f of each unit in steps, (unit,).

    Here f is the geometric mean of the forget (or update) gate of the unit.

    Parameters
    ----------
    forget : (sample, time, unit), in [0, 1]

    References
    ----------
    Tallec, Ollivier 2018, arXiv:1804.11188, section 2.

    Examples
    --------
    >>> rl.measures.gate_timescale(np.full((2, 10, 1), np.exp(-1 / 8)))
    array([8.])
    """
    values = np.asarray(forget, dtype=np.float64)
    rows = values.reshape(-1, values.shape[-1]) if mask is None else values[np.asarray(mask, dtype=bool)]
    with np.errstate(divide="ignore"):
        rate = -np.log(rows).mean(axis=0)
        scale: Array = 1.0 / rate
    return scale


def stuck_gates(
    gates: Array, mask: Array | None = None, *, margin: float = 0.02, share: float = 0.99
) -> tuple[Array, Array]:
    """Find gates that are nearly always shut, and nearly always open: two arrays (gate, unit) of bool.

    ``gates`` is (sample, time, gate, unit), without proposals for the new state, such as an LSTM's candidate. Shut
    means below ``margin``, and open above 1 - ``margin``, at a share of at least ``share`` of all samples and steps.
    This is no fault: networks with such gates solve tasks.
    """
    values = np.asarray(gates)
    rows = values.reshape(-1, *values.shape[2:]) if mask is None else values[np.asarray(mask, dtype=bool)]
    return (rows < margin).mean(axis=0) >= share, (rows > 1 - margin).mean(axis=0) >= share


def constant_features(x: Array) -> Array:
    """Find input features that never vary over samples and steps: (sample, time, feature) to (feature,) of bool.

    The test is max == min, because a standard deviation in float32 is not exactly 0.
    """
    values = np.asarray(x)
    return values.max(axis=(0, 1)) == values.min(axis=(0, 1))


def static_share(x: Array) -> float:
    """Compute the share of samples whose input (sample, time, feature) does not change over time."""
    values = np.asarray(x)
    return float((values.max(axis=1) == values.min(axis=1)).all(axis=1).mean())


def padding_share(x: Array, mask: Array | None = None) -> float:
    """Compute the share of padded steps: masked, or in a run of identical steps at the end or the beginning.

    With a mask only masked steps count. Otherwise the share is the mean length of the run over samples, divided by the
    number of steps. Samples that never change are left out; if they are half of the samples or more, the share is 0.
    """
    if mask is not None:
        return float(1 - np.asarray(mask, dtype=np.float64).mean())
    values = np.asarray(x)
    if values.shape[1] < 2:
        return 0.0
    return max(_run_share(values), _run_share(values[:, ::-1]))


def _run_share(x: Array) -> float:
    repeats_next = (x[:, 1:] == x[:, :-1]).all(axis=2)[:, ::-1]
    run_length = np.where(repeats_next.all(axis=1), repeats_next.shape[1], repeats_next.argmin(axis=1))
    is_static = repeats_next.all(axis=1)
    # A sample that never changes is static, not padded.
    padded_lengths = run_length[~is_static]
    return float(padded_lengths.mean() / x.shape[1]) if padded_lengths.size > len(x) / 2 else 0.0


@dataclass(frozen=True)
class Census:
    """Counts of values of an array: all, NaN, infinite, subnormal."""

    count: int
    nan: int
    infinite: int
    underflow: int


def census(array: Array) -> Census:
    """Count NaN, infinite and subnormal numbers.

    Subnormal are non-zero numbers below the smallest normal one of their dtype.
    """
    values = np.asarray(array)
    finite = np.isfinite(values)
    is_subnormal = finite & (values != 0) & (np.abs(values) < np.finfo(values.dtype).tiny)
    return Census(values.size, int(np.isnan(values).sum()), int(np.isinf(values).sum()), int(is_subnormal.sum()))
