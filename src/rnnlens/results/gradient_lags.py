"""Gradient of one direction of a traced layer by lag: the profile behind its reach, wherever a reach is shown."""

from __future__ import annotations

import numpy as np
import xarray as xr

from ..recurrence.measures import real_steps_first, safe_norm
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, QUANTITIES, SAMPLE, TIME, UNIT


def norms_by_lag(dataset: xr.Dataset, direction: str | None, mask: Array | None = None) -> Array | None:
    """Return the norm over all states of the total gradient by lag, (sample or probe, lag), NaN beyond the start.

    Where the loss reads the layer at several steps, the gradients of single output steps are used, which a trace has as
    ``lag_gradient``: the sum over all of them shows a gradient at every step, whatever the recurrence carries. Else the
    lag counts from the last real step (in the backward direction the first).

    Parameters
    ----------
    dataset
        A traced layer, of a bidirectional one either direction or both.
    direction
        ``"forward"`` or ``"backward"``; None for a layer that has one, which its attribute names.
    mask : (sample, time) of bool, optional
    """
    if direction is not None and DIRECTION in dataset.dims:
        dataset = dataset.sel({DIRECTION: direction})
    if "lag_gradient" in dataset.coords:
        return np.asarray(dataset["lag_gradient"].values, dtype=np.float64)
    gradients = [
        array
        for name, array in dataset.data_vars.items()
        if str(name).endswith("_grad")
        and array.dims == (SAMPLE, TIME, UNIT)
        and (str(name) in ("hidden_grad", "cell_grad") or str(name) not in QUANTITIES)
    ]
    if not gradients:
        return None
    values = np.concatenate([array.values for array in gradients], axis=-1)
    norms = np.asarray(safe_norm(values, axis=-1), dtype=np.float64)
    is_real = np.ones(norms.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    if (direction or dataset.attrs.get(DIRECTION)) != BACKWARD:
        norms, is_real = norms[:, ::-1], is_real[:, ::-1]
    by_lag = np.asarray(real_steps_first(norms, is_real))
    return np.where(np.arange(by_lag.shape[1])[None, :] < is_real.sum(axis=1, keepdims=True), by_lag, np.nan)
