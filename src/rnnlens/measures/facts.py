"""Facts about data, states and gates: counted, not judged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..typing import Array

#: Share of the spread of the median unit below which a unit counts as dead.
DEAD = 1e-4


def unit_spread(states: Array, mask: Array | None = None) -> Array:
    """Compute the standard deviation of each unit over samples and real steps: (sample, time, unit) to (unit,)."""
    values = np.asarray(states, dtype=np.float64)
    rows = values.reshape(-1, values.shape[-1]) if mask is None else values[np.asarray(mask, dtype=bool)]
    spread: Array = rows.std(axis=0) if len(rows) else np.zeros(values.shape[-1])
    return spread


def dead_units(states: Array, mask: Array | None = None) -> Array:
    """Find dead units, (unit,) of bool: their spread is at most 1e-4 of the median unit's.

    Where more than half of the units are dead the largest spread takes the place of the median.
    """
    spread = unit_spread(states, mask)
    reference = float(np.median(spread))
    if reference <= DEAD * float(spread.max(initial=0.0)):
        reference = float(spread.max(initial=0.0))
    dead: Array = spread <= DEAD * reference
    return dead


def gate_timescale(forget: Array, mask: Array | None = None) -> Array:
    """Compute the time constant of each unit in steps: -1 / ln f, f the geometric mean of its forget (update) gate.

    Parameters
    ----------
    forget : (sample, time, unit), in [0, 1]

    References
    ----------
    Tallec, Ollivier 2018, arXiv:1804.11188, section 2.
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
    """Find gates that are nearly always shut, or open: (sample, time, gate, unit) to two (gate, unit) of bool.

    Stuck: beyond ``margin`` at ``share`` of samples and steps. This is no fault: networks with such gates solve tasks.
    """
    values = np.asarray(gates)
    rows = values.reshape(-1, *values.shape[2:]) if mask is None else values[np.asarray(mask, dtype=bool)]
    return (rows < margin).mean(axis=0) >= share, (rows > 1 - margin).mean(axis=0) >= share


def constant_features(x: Array) -> Array:
    """Find input features that never vary over samples and steps: (sample, time, feature) to (feature,) of bool.

    Compared as max == min: in float32 a standard deviation is left with rounding.
    """
    values = np.asarray(x)
    constant: Array = values.max(axis=(0, 1)) == values.min(axis=(0, 1))
    return constant


def static_share(x: Array) -> float:
    """Compute the share of samples whose input (sample, time, feature) does not change over time."""
    values = np.asarray(x)
    return float((values.max(axis=1) == values.min(axis=1)).all(axis=1).mean())


def padding_share(x: Array, mask: Array | None = None) -> float:
    """Compute the share of padded steps: masked, or in a run of identical steps at the end or the beginning.

    A run counts where every sample but a twentieth has one; the mean over samples of its length over the length.
    """
    if mask is not None:
        return float(1 - np.asarray(mask, dtype=np.float64).mean())
    values = np.asarray(x)
    if values.shape[1] < 2:
        return 0.0
    return max(_run_share(values), _run_share(values[:, ::-1]))


def _run_share(x: Array) -> float:
    same = (x[:, 1:] == x[:, :-1]).all(axis=2)[:, ::-1]
    length = np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1))
    whole = same.all(axis=1)
    # A sample that never changes is static, not padded.
    counted = length[~whole]
    return float(counted.mean() / x.shape[1]) if counted.size > len(x) / 2 else 0.0


@dataclass(frozen=True)
class Census:
    """Counts of values of an array: all, NaN, infinite, subnormal."""

    count: int
    nan: int
    infinite: int
    underflow: int


def census(array: Array) -> Census:
    """Count NaN, infinities, and subnormal numbers: not 0, and below the smallest normal one of their dtype."""
    values = np.asarray(array)
    finite = np.isfinite(values)
    small = finite & (values != 0) & (np.abs(values) < np.finfo(values.dtype).tiny)
    return Census(values.size, int(np.isnan(values).sum()), int(np.isinf(values).sum()), int(small.sum()))
