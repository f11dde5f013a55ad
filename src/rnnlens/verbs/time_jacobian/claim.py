"""What a time Jacobian says of one vector-Jacobian product, u^T J for random signs u: to be held against another.

A Jacobian that is linear in its rows says it by itself. Of one that was measured by norms nothing linear is left: there
the same signs are pushed through the same plan once more, unmeasured, as one row for each output step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from ...results.checks import Check, rounding_bound
from ...vocabulary import IN_FEATURE, OUT_TIME, OUT_UNIT, SAMPLE, TIME, UNIT
from .ends import Ends
from .execute import numbers
from .plan import Plan, plan_for
from .tally import Tally

#: Measures after which a Jacobian is still linear in its rows.
LINEAR = (None, "sum", "mean")
#: Output steps at most at which a probe starts.
PROBED_STEPS = 64

MEASURE = "bound of the measure"


@dataclass(frozen=True)
class Claim:
    """One cotangent of the upper end, and what it becomes at the lower one.

    Attributes
    ----------
    ends
        What the numbers in ``pulled`` were made of.
    cotangent
        (sample, [time,] unit): of the output's own units, at the steps ``ends.out_times`` in their order.
    pulled
        What the Jacobian makes of it, by the names of its axes.
    spread
        The largest root of the sum of squares that went into one number of it: what rounding is relative to.
    probed
        Whether it was pushed through the plan, and not taken from the result.
    checks
        How a measured result agrees with it.
    """

    ends: Ends
    cotangent: xr.DataArray
    pulled: xr.DataArray
    spread: float
    probed: bool = False
    checks: tuple[Check, ...] = ()


@np.errstate(over="ignore", invalid="ignore")
def taken_from(plan: Plan, jacobian: xr.DataArray) -> Claim:
    """The claim of a Jacobian that is linear in its rows."""
    signs = _signs(plan)
    bare = jacobian.drop_vars(list(jacobian.coords))
    return Claim(plan.ends, _on_units(signs, plan.ends), _contracted(bare, signs), _spread(bare))


@np.errstate(over="ignore", invalid="ignore")
def pushed_through(plan: Plan, jacobian: xr.DataArray | None, memory: int, dtype: str) -> Claim:
    """The claim of a Jacobian that was measured: random signs go the way that its rows went; held against it if given.

    Raises
    ------
    TooLargeError
        If not even the steps below one output step fit into the memory.
    """
    chosen = _probed_steps(plan, memory)
    weights = _random_rows(plan, chosen)
    times = None if plan.ends.out_times is None else [plan.ends.out_times[i] for i in chosen]
    ends = replace(plan.ends, weights=weights, out_times=times, measure=None, sketch=None, average=False)
    modes = {part.mode for part in plan.parts}
    probe = plan_for(plan.network, ends, modes.pop() if len(modes) == 1 else "auto", None, memory, streamed=False)
    rows = xr.DataArray(numbers(probe, Tally()), dims=probe.dims)
    check = () if jacobian is None else _bound(plan, jacobian, rows, chosen, dtype)
    pulled = rows.isel({OUT_UNIT: 0})
    pulled = pulled.sum(OUT_TIME) if OUT_TIME in rows.dims else pulled
    cotangent = xr.DataArray(weights[:, :, 0].astype(plan.dtype), dims=(SAMPLE, TIME, UNIT))
    cotangent = cotangent.isel({TIME: 0 if times is None else times})
    return Claim(ends, cotangent, pulled, _spread(rows), True, check)


def _probed_steps(plan: Plan, memory: int) -> list[int]:
    """Places of output steps, among those asked for, at which a probe starts: as many as fit."""
    ends = plan.ends
    each = plan.network.samples * ends.in_count * ends.wrt.size * plan.dtype.itemsize
    count = max(1, min(ends.groups, PROBED_STEPS, memory // max(1, each)))
    return sorted({int(i) for i in np.linspace(ends.groups - 1, 0, count).round()})


def _random_rows(plan: Plan, chosen: list[int]) -> np.ndarray[Any, Any]:
    """One combination of the rows asked for, by random signs, at each chosen step: (sample, time, 1, unit)."""
    ends, samples = plan.ends, plan.network.samples
    rows = np.eye(ends.of.size) if ends.projection is None else ends.projection[0, 0]
    signs = 2.0 * np.random.default_rng(0).integers(0, 2, size=(samples, len(chosen), len(rows))) - 1.0
    weights = np.zeros((samples, ends.of.times or 1, 1, ends.of.size))
    at = [0] if ends.out_times is None else [ends.out_times[i] for i in chosen]
    weights[:, at, 0] = signs @ rows
    return weights


def _bound(plan: Plan, jacobian: xr.DataArray, rows: xr.DataArray, chosen: list[int], dtype: str) -> tuple[Check, ...]:
    """No combination of so many rows by signs is longer than the largest singular value times the root of their number.

    With a single row it is as long as the measured number itself.
    """
    ends = plan.ends
    if ends.sketch is not None or ends.measure is None:
        return ()
    count = ends.of.size if ends.projection is None else int(ends.projection.shape[2])
    found = jacobian.drop_vars(list(jacobian.coords))
    found = found.isel({OUT_TIME: chosen}) if OUT_TIME in found.dims else found
    along = [OUT_UNIT, IN_FEATURE]
    if ends.measure == "abs_mean":
        short, limit = abs(rows).mean(along), count * found
    else:
        short, limit = (rows**2).sum(along) ** 0.5, count**0.5 * found
    short = short.mean(SAMPLE) if ends.average else short
    excess = short - limit if count > 1 else abs(short - limit)
    scale = float(abs(limit).max()) or 1.0
    residual = max(float(excess.max()), 0.0) / scale
    return (Check(MEASURE, "", residual, rounding_bound(dtype, max((64, *plan.shape)))),)


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


def _spread(jacobian: xr.DataArray) -> float:
    squares = xr.dot(jacobian, jacobian, dim=[d for d in (OUT_TIME, OUT_UNIT) if d in jacobian.dims])
    return float(np.sqrt(squares.max()))
