"""What a time Jacobian says of one vector-Jacobian product, u^T J for random signs u: to be held against another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from ...vocabulary import OUT_TIME, OUT_UNIT, SAMPLE, TIME, UNIT
from .ends import Ends
from .plan import Plan


@dataclass(frozen=True)
class Claim:
    """One cotangent of the upper end, and what it becomes at the lower one.

    Attributes
    ----------
    cotangent
        (sample, [time,] unit): of the output's own units, at the steps ``out_times`` in their order.
    pulled
        What the Jacobian makes of it, by the names of its axes.
    spread
        The largest root of the sum of squares that went into one number of it: what rounding is relative to.
    """

    ends: Ends
    cotangent: xr.DataArray
    pulled: xr.DataArray
    spread: float


def claim_of(plan: Plan, jacobian: xr.DataArray) -> Claim:
    """Of a Jacobian that is linear in its rows."""
    signs = _signs(plan)
    bare = jacobian.drop_vars(list(jacobian.coords))
    squares = xr.dot(bare, bare, dim=[d for d in (OUT_TIME, OUT_UNIT) if d in bare.dims])
    return Claim(plan.ends, _on_units(signs, plan.ends), _contracted(bare, signs), float(np.sqrt(squares.max())))


def _signs(plan: Plan) -> xr.DataArray:
    """One random sign for every row of the Jacobian, the same for all samples where it is averaged over them."""
    ends, samples = plan.ends, plan.network.samples
    sizes = {SAMPLE: 1 if ends.average else samples}
    sizes |= {} if ends.out_times is None else {OUT_TIME: ends.groups}
    sizes |= {OUT_UNIT: ends.rows}
    signs = 2.0 * np.random.default_rng(0).integers(0, 2, size=tuple(sizes.values())) - 1.0
    if ends.average:
        signs, sizes = np.repeat(signs, samples, axis=0), {**sizes, SAMPLE: samples}
    return xr.DataArray(signs.astype(plan.dtype), dims=tuple(sizes))


def _on_units(signs: xr.DataArray, ends: Ends) -> xr.DataArray:
    """Cotangents of the output's units from those of the rows, which may be combinations of units."""
    renamed = signs.rename({OUT_UNIT: UNIT, **({OUT_TIME: TIME} if OUT_TIME in signs.dims else {})})
    if ends.weights is None:
        return renamed
    rows = xr.DataArray(np.asarray(ends.weights)[0, 0].astype(signs.dtype), dims=("row", UNIT))
    units: xr.DataArray = xr.dot(renamed.rename({UNIT: "row"}), rows, dim="row")
    return units


def _contracted(jacobian: xr.DataArray, signs: xr.DataArray) -> xr.DataArray:
    """u^T J by the names of the axes."""
    if SAMPLE not in jacobian.dims:
        signs = signs.isel({SAMPLE: 0})
    if OUT_UNIT not in jacobian.dims:
        signs = signs.isel({OUT_UNIT: 0})
    dims = [d for d in (OUT_TIME, OUT_UNIT) if d in jacobian.dims]
    combined: xr.DataArray = xr.dot(jacobian, signs, dim=dims)
    return combined
