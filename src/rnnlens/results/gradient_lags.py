"""Gradients of one direction of a traced layer by lag, and its reach: one definition, wherever a reach is shown.

A state's gradient at lag 0 enters at its step; at lag k it has travelled k steps back through the recurrence. Hidden
and cell states have different scales, so each is compared with its own gradient at lag 0. The memory of a layer is the
longest of its states.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr

from ..measures.profiles import gradient_decay, gradient_reach
from ..recurrence.measures import real_steps_first, safe_norm
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, QUANTITIES, SAMPLE, TIME, UNIT

_BY_LAG = "_lag_gradient"


def norms_by_lag(dataset: xr.Dataset, direction: str | None, mask: Array | None = None) -> dict[str, Array]:
    """Return the norm of each state's gradient by lag, (sample or probe, lag), NaN beyond the start.

    The keys are ``"hidden_grad"``, ``"cell_grad"``, or the gradients of other states. Where the loss reads the layer at
    several steps, the gradients of single output steps are used, which a trace has as coordinates
    (``hidden_lag_gradient``): the sum over all of them shows a gradient at every step, whatever the recurrence carries.
    Else lags count from the step where the gradient enters. The result is empty if neither is known.

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
    by_probe = {
        f"{str(name).removesuffix(_BY_LAG)}_grad": np.asarray(coordinate.values, dtype=np.float64)
        for name, coordinate in dataset.coords.items()
        if str(name).endswith(_BY_LAG)
    }
    if by_probe:  # NaN only: not known
        return {name: values for name, values in by_probe.items() if not np.isnan(values).all()}
    norms = {
        str(name): np.asarray(safe_norm(array.values, axis=-1), dtype=np.float64)
        for name, array in dataset.data_vars.items()
        if str(name).endswith("_grad")
        and array.dims == (SAMPLE, TIME, UNIT)
        and (str(name) in ("hidden_grad", "cell_grad") or str(name) not in QUANTITIES)
    }
    if not norms or _is_read_at_several_steps(dataset):
        return {}
    shape = next(iter(norms.values())).shape
    is_real = np.ones(shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    if (direction or dataset.attrs.get(DIRECTION)) != BACKWARD:
        norms = {name: values[:, ::-1] for name, values in norms.items()}
        is_real = is_real[:, ::-1]
    has_entered = np.logical_or.accumulate(np.any([values != 0 for values in norms.values()], axis=0), axis=1)
    counted = is_real & has_entered
    is_known = np.arange(shape[1])[None, :] < counted.sum(axis=1, keepdims=True)
    return {
        name: np.where(is_known, np.asarray(real_steps_first(values, counted)), np.nan)
        for name, values in norms.items()
    }


def _is_read_at_several_steps(dataset: xr.Dataset) -> bool:
    """Return whether the direct gradient of any sample is not 0 at several steps; False if it is not recorded."""
    direct = dataset.get("output_grad")
    if direct is None or direct.dims[:2] != (SAMPLE, TIME):
        return False
    is_read = np.asarray(direct.values).reshape(*direct.shape[:2], -1).any(axis=2)
    return bool((is_read.sum(axis=1) > 1).any())


def layer_reach(norms: Mapping[str, Array]) -> int:
    """Count the steps back that hold 95 % of the squared gradient, of the state where these are most."""
    return max(map(gradient_reach, norms.values()))


def layer_decay(norms: Mapping[str, Array]) -> float:
    """Compute the factor by which the gradient changes with every step back, of the state where it is largest."""
    decays = [decay for decay in map(gradient_decay, norms.values()) if not np.isnan(decay)]
    return max(decays, default=float("nan"))
