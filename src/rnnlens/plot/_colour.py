"""Colour maps and scales: a diverging map with white at 0, and a grey for missing values.

Blue and orange can be told apart with protanopia, deuteranopia and tritanopia. The maps are not registered with
matplotlib, and rcParams are not changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, SymLogNorm

from ._data import Numbers

#: Colour of NaN and infinite values. Neither map contains this grey.
MISSING = "#7a7a7a"

#: Colours of lines: Okabe and Ito 2008, "Color Universal Design", without its yellow.
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f5fa8")

_BLUE_WHITE_ORANGE = ("#08306b", "#1f6fb4", "#8fc1e3", "#ffffff", "#fdb978", "#dd6b10", "#7f2704")


def _map(name: str, colours: tuple[str, ...]) -> Colormap:
    made = LinearSegmentedColormap.from_list(name, colours, N=257)  # odd: one entry is exactly the middle
    return made.with_extremes(bad=MISSING)


DIVERGING = _map("rnnlens.diverging", _BLUE_WHITE_ORANGE)
#: For values >= 0: the upper half of the diverging map, so that white is 0 here as well.
POSITIVE = _map("rnnlens.positive", _BLUE_WHITE_ORANGE[3:])

#: Decades of a logarithmic scale below the largest magnitude; smaller values are drawn like 0.
DECADES = 4


def line_colours(count: int) -> list[Any]:
    """Return colours for ``count`` lines that a legend names."""
    return [CYCLE[i % len(CYCLE)] for i in range(count)]


def linear_below(limit: float) -> float:
    """Return the value below which a logarithmic scale is linear; never 0."""
    return max(limit * 10.0**-DECADES, float(np.finfo(float).tiny))


def around_zero(limit: float, *, log: bool = False) -> Normalize:
    """Return a symmetric colour scale from -limit to limit, with 0 white."""
    limit = limit if limit > 0 and math.isfinite(limit) else 1.0
    if log:
        return SymLogNorm(linthresh=linear_below(limit), linscale=0.5, vmin=-limit, vmax=limit, base=10)
    return Normalize(-limit, limit)


def from_zero(values: Numbers, limit: float, *, log: bool = False) -> Normalize:
    """Return a colour scale for values >= 0; a logarithmic one is linear below the smallest value."""
    limit = limit if limit > 0 and math.isfinite(limit) else 1.0
    if not log:
        return Normalize(0, limit)
    with np.errstate(invalid="ignore"):
        positive = values[(values > 0) & np.isfinite(values)]
    lowest = min(float(positive.min()), limit / 10) if positive.size else limit / 10
    return SymLogNorm(linthresh=max(lowest, linear_below(limit)), linscale=0.3, vmin=0, vmax=limit, base=10)
