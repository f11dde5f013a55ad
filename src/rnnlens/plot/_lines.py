"""Value axes of lines and points: how many have names, and from where to where."""

from __future__ import annotations

from typing import Any

from ._data import Numbers, finite_range

#: Lines that a legend names one by one; more are drawn alike, with their mean.
MOST_NAMED = 8
#: Decades below the largest norm at which the axis ends.
DEEPEST = 16


def limits_of(values: Numbers, *, log: bool) -> tuple[float, float]:
    """Value axis for the finite values with a margin of 5 %; around 0 for a constant."""
    found = finite_range(values) or (0.0, 0.0)
    low, high = min(found[0], 0.0) if log else found[0], max(found[1], 0.0) if log else found[1]
    room = abs(low) * 0.1 or 1.0 if low == high else 0.05 * (high - low)
    return low - room, high + room


def log_limits(ax: Any, values: Numbers, *, room: float) -> None:
    """Value axis for values that are finite and positive, ``DEEPEST`` decades at most, and ``room`` times the top."""
    if values.size:
        top = float(values.max())
        ax.set_ylim(max(float(values.min()), top * 10.0**-DEEPEST) / 2, top * room)
