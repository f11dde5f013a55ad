"""How long a cell state lives: what its forget gates keep, against what really arrives."""

from __future__ import annotations

import numpy as np

from ..typing import Array


def kept_by_gates(forget: Array, mask: Array | None = None) -> Array:
    """Product of the forget gates from the first step on: (sample, time, unit) to the same, dc_t/dc_0 without detours.

    What a change of c_0 becomes if it reaches the gates of no later step. Steps that ``mask`` (sample, time) leaves out
    keep everything.
    """
    values = np.asarray(forget, dtype=np.float64)
    if mask is not None:
        values = np.where(np.asarray(mask, dtype=bool)[..., None], values, 1.0)
    kept: Array = np.cumprod(values, axis=1)
    return kept


def own_diagonal(jacobian: Array) -> Array:
    """d(state of a unit)/d(the same unit's initial state): (..., unit, unit) to (..., unit)."""
    found: Array = np.diagonal(np.asarray(jacobian), axis1=-2, axis2=-1)
    return found
