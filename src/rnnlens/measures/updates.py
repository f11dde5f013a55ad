"""Size of one step of training by that of the weights: the update ratio, and when it is far off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..typing import Array

#: Median change of the weight matrices by one step outside of which a network does not learn: the smallest by their
#: norm, the largest by the norm that they have at initialisation, since large steps make the weights themselves large.
SMALLEST_UPDATE, LARGEST_UPDATE = 1e-5, 0.3
#: Update ratio that networks usually learn with, for the learning rate that is advised.
USUAL_UPDATE = 1e-3


def update_ratio(before: Array, after: Array) -> float:
    """Return the norm of the change of a weight by the norm that it had, in float64; NaN for a weight of zeros."""
    size = float(np.linalg.norm(_in_double(before)))
    return update_norm(before, after) / size if size else float("nan")


def update_norm(before: Array, after: Array) -> float:
    """Return the Frobenius norm of the change of a weight, in float64."""
    return float(np.linalg.norm(_in_double(after) - _in_double(before)))


def _in_double(weight: Array) -> Array:
    return np.asarray(weight, dtype=np.complex128 if np.iscomplexobj(weight) else np.float64)


def initial_norm(shape: Sequence[int]) -> float:
    """Return the norm of a weight matrix of variance 2 / (rows + columns): Glorot, Bengio 2010, eq. 12."""
    return float(np.sqrt(2 * np.prod(shape, dtype=np.float64) / (shape[0] + shape[-1])))
