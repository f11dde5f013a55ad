"""How far back a gradient comes from: reach, decay per step, and the lags that a weight's gradient is made of."""

from __future__ import annotations

import numpy as np

from ..typing import Array
from .profiles import attributed_memory, band
from .transfer import theil_sen


def gradient_reach(norms: Array, share: float = 0.95) -> int:
    """Steps back from the last that hold ``share`` of the squared gradient: (sample, lag) to a count, lag 0 first.

    Median over samples, each by its own sum: neither a spike at the last step nor a few hard samples decide it. The
    same rule as the memory that gradients attribute (Sobol, Kucherenko 2009, doi:10.1016/j.matcom.2009.01.023).
    """
    squares = np.nan_to_num(np.asarray(norms, dtype=np.float64), posinf=0.0)
    peak = squares.max(axis=1, keepdims=True)
    relative = squares / np.where(peak > 0, peak, 1.0)
    return attributed_memory((relative**2)[:, ::-1], share)


def gradient_decay(norms: Array) -> float:
    """Factor by which the gradient changes with every step back: (sample, lag), lag 0 first; NaN where there is none.

    exp of the Theil-Sen slope of the median over samples, each by its own peak, from that median's peak on.
    """
    median = band(norms).median
    falling = median[int(np.argmax(median)) :] if median.size else median
    return float(np.exp(theil_sen(falling)))


def lag_shares(norms: Array, *, runs_back: bool = False) -> Array:
    """Cumulative share of a weight's gradient by lag: norms (time, gate) to (gate, lag), ending at 1.

    The norm at a step is that of what this step adds to dL/dW, gate by gate. Lag 0 is the last step of the layer: the
    first in time, where it ``runs_back``. A gate whose gradient is 0 throughout is NaN.
    """
    norms = np.asarray(norms, dtype=np.float64)
    reached = np.cumsum(norms if runs_back else norms[::-1], axis=0)
    total = reached[-1]
    shares: Array = (reached / np.where(total > 0, total, np.nan)).T
    return shares


def input_totals(norms: Array) -> Array:
    """What each input step moves in all outputs together: (..., out_time, in_time) to (..., in_time), their sum."""
    totals: Array = np.asarray(norms, dtype=np.float64).sum(axis=-2)
    return totals
