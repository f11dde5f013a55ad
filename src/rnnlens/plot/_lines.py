"""Value axes of lines and points: how many have names, and from where to where."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ._data import Numbers, finite_range, largest_magnitude
from ._marks import log_ticks
from ._panels import log_around_zero

#: Lines that a legend names one by one; more are drawn alike, with their mean.
MOST_NAMED = 8
#: Decades below the largest norm at which the axis ends.
DEEPEST = 12


def limits_of(values: Numbers, *, log: bool) -> tuple[float, float]:
    """Value axis for the finite values with a margin of 5 %; around 0 for a constant."""
    found = finite_range(values) or (0.0, 0.0)
    low, high = min(found[0], 0.0) if log else found[0], max(found[1], 0.0) if log else found[1]
    room = abs(low) * 0.1 or 1.0 if low == high else 0.05 * (high - low)
    return low - room, high + room


def is_positive(values: Numbers) -> bool:
    """Whether no finite value is negative and some is not 0: such a quantity gets a true logarithmic axis."""
    found = finite_range(values)
    return found is not None and found[0] >= 0 and found[1] > 0


def log_scale(ax: Any, values: Numbers) -> None:
    """Logarithmic value axis: a true one for what is never negative, else a symmetric one that is linear around 0."""
    if not is_positive(values):
        log_around_zero(ax, largest_magnitude(values))
        ax.set_ylim(*limits_of(values, log=True))
        return
    log_limits(ax, values, room=2)
    ax.set_yscale("log")
    log_ticks(ax)


def log_limits(ax: Any, values: Numbers, *, room: float) -> None:
    """Value axis for the values that are finite and positive, ``DEEPEST`` decades at most, ``room`` times the top.

    Where something lies deeper, 0 among it, the axis ends at a power of ten, so that what is below can be named.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return
    top, low = float(positive.max()), float(positive.min())
    floor = max(top * 10.0**-DEEPEST, float(np.finfo(float).tiny))
    if low < floor or (values == 0).any():
        ax.set_ylim(10.0 ** math.floor(math.log10(max(low, floor)) - 0.01), top * room)
    else:
        ax.set_ylim(low / 2, top * room)
    if ax.get_yscale() == "log":
        log_ticks(ax)
