"""What the data would still have told: the test of the residual, put to an experiment."""

from __future__ import annotations

import numpy as np

from .. import data
from ..adapters.protocol import Batch, CaptureRequest
from ..measures.residual import Missed, missed_dependency
from ..results.schema import to_host
from ..typing import Array
from .experiment import Experiment

#: Samples that the test looks at.
MOST = 1024
#: Of the variance of y, and the largest p value: the rule of MISSED_DEPENDENCY.
EFFECT, P_VALUE = 0.02, 0.01


def measure_missed(experiment: Experiment) -> Missed | None:
    """Test the residual of the prediction on the inputs of every step; None without a target that varies."""
    target = experiment.target
    if target is None or not target.variance > 0 or not np.isfinite(experiment.prediction).all():
        return None
    x = _numbers(experiment)
    if x is None or not np.isfinite(x).all():
        return None
    kept = slice(0, MOST)
    residual = (target.values - experiment.prediction)[kept]
    return missed_dependency(residual, _aligned(x, experiment)[kept], target.variance, seed=experiment.seed)


def is_missed(missed: Missed | None) -> bool:
    """Whether the rule of MISSED_DEPENDENCY is met."""
    return missed is not None and missed.effect >= EFFECT and missed.p_value < P_VALUE


def _numbers(experiment: Experiment) -> Array | None:
    """(sample, time, feature): the first sequence of x; of ids, what the first recurrent layer is fed instead."""
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    if leaf.dtype.kind == "f":
        flat: Array = leaf.reshape(*leaf.shape[:2], -1)
        return flat
    request = CaptureRequest(gradients=False, weight_grads=False)
    calls = experiment.adapter.capture(experiment.model, Batch(experiment.given(experiment.samples.x)), request).calls
    fed = to_host(calls[0].input)
    return fed if fed.shape[1] == experiment.samples.steps else None


def _aligned(x: Array, experiment: Experiment) -> Array:
    """Steps up to the one that is looked at; samples of unequal length end together, zeros before them."""
    last, reach = experiment.last, experiment.reach
    if (last == reach).all():
        return x[:, :reach]
    position = np.arange(reach)[None, :] - (reach - last)[:, None]
    taken = np.take_along_axis(x, np.maximum(position, 0)[:, :, None], axis=1)
    return np.where(position[:, :, None] >= 0, taken, 0.0)
