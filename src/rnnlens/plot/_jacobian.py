"""A time Jacobian as one number per pair of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from ..recurrence.measures import safe_norm
from ..vocabulary import DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from ._data import labelled, positions, require_dim

#: Dimensions of a plain array by its rank.
GUESS = {
    2: (OUT_TIME, IN_TIME),
    3: (SAMPLE, OUT_TIME, IN_TIME),
    5: (SAMPLE, OUT_TIME, OUT_UNIT, IN_TIME, IN_FEATURE),
}


def block_norms(data: Any, figure: str, dims: Sequence[str] | None) -> tuple[xr.DataArray, bool]:
    """One number per pair of steps, and whether it is a norm taken here, over output units and input features.

    A Jacobian of a layer that returns its last output only gets an ``out_time`` of one step: the last.
    """
    array = labelled(data, figure, dims=dims, guess=GUESS)
    require_dim(array, IN_TIME, figure, hint="pass what rl.jacobian(model, x) returned")
    kept = (SAMPLE, OUT_TIME, IN_TIME, DIRECTION)
    blocks = [d for d in array.dims if d not in kept]
    if blocks:
        axes = tuple(array.get_axis_num(d) for d in blocks)
        norms = safe_norm(array.values, axis=axes, xp=np)
        rest = [d for d in array.dims if d in kept]
        coords = {name: given for name, given in array.coords.items() if set(given.dims) <= set(rest)}
        attrs = {**array.attrs, "long_name": f"norm of the {array.attrs.get('long_name', 'time Jacobian')}"}
        array = xr.DataArray(np.asarray(norms), dims=rest, coords=coords, name=array.name, attrs=attrs)
    if OUT_TIME not in array.dims:
        array = array.expand_dims({OUT_TIME: [positions(array, IN_TIME)[-1]]}, axis=array.dims.index(IN_TIME))
    return array, bool(blocks)
