"""Holds a time Jacobian against one vector-Jacobian product of the plain run: u^T J, for random signs u."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from ... import data
from ...errors import CertificateError, TooLargeError
from ...results.certificate import Certificate
from ...results.checks import coarser
from ...typing import Array
from ...vocabulary import FEATURE, IN_FEATURE, IN_TIME, SAMPLE, TIME, UNIT
from ..certify import Bench, attempt, outputs_of, unsteady, wanted
from ..names import TensorName
from ..outside import Outside
from .claim import LINEAR, Claim, pushed_through, taken_from
from .ends import Ends
from .plan import Plan
from .request import Request

JACOBIAN = "plain jacobian"

_REDUCED = {"norm": "norms", "spectral": "largest singular values", "abs_mean": "mean magnitudes"}


def claim_of(request: Request, plan: Plan, jacobian: xr.DataArray) -> Claim | Certificate:
    """What there is to be certified of a finished Jacobian, while its network is open; or why nothing is."""
    options = request.options
    if options.out is not None:
        return Certificate("could not", why="it was written piece by piece, and is not read back")
    looked = (options.measure, options.across, options.sketch, options.reduce is None)
    if not wanted(request.model, "jacobian", request.batch, (request.of, request.wrt), *looked):
        return Certificate()
    why = _why_not(request, plan)
    if why:
        return Certificate("could not", request.adapter.engine, why=why)
    if plan.ends.measure in LINEAR:
        return taken_from(plan, jacobian)
    try:
        return pushed_through(plan, jacobian, options.memory, _computed_in(request, plan))
    except TooLargeError:
        return Certificate(
            "could not", request.adapter.engine, why="what it was reduced from would not fit into the memory"
        )


def _why_not(request: Request, plan: Plan) -> str:
    """Why the Jacobian asked for has nothing that a plain run gives; "" where it has."""
    if any(data.is_packed(leaf) for leaf in data.leaves_of(request.batch.x)):
        return "a packed input has its steps in another order than the result"
    for name, what in ((request.of, "output"), (request.wrt, "input")):
        if name.layer is not None or name.what != what:
            return f"{name.text} lies inside the model, where a plain run cannot be looked at"
    if request.options.rtol is not None:
        return "rtol= left out rows on purpose"
    if plan.dtype.kind != "f":
        return "it is not made of real numbers"
    return ""


def certify(request: Request, plan: Plan, claim: Claim | Certificate) -> Certificate:
    """Run the model plainly, and compare what arrives at its input."""
    if isinstance(claim, Certificate):
        return claim
    engine = request.adapter.engine
    outside = Outside(plan.network.layouts, plan.network.samples)
    pulled = partial(_cotangents, outside, request.of, claim)
    run, why = attempt(partial(request.adapter.plain, request.model, request.batch, pulled))
    if run is None:
        return Certificate("could not", engine, why=why)
    whole, dims = _arrived(outside, request.wrt, run.input_grads, request.batch.x)
    if not set(dims) <= {SAMPLE, TIME, FEATURE}:
        return Certificate("could not", engine, why=f"an input with axes {', '.join(dims)} is not compared")
    mine, theirs = claim.pulled, _asked(xr.DataArray(whole, dims=dims), claim.ends)
    bench = Bench(max(int(size) for size in (64, *plan.shape)), _computed_in(request, plan))
    bench.compare(JACOBIAN, "", [(mine, theirs.transpose(*mine.dims))], scale=claim.spread)
    certificate = Certificate.of(engine, [*bench.checks, *claim.checks], **_words(plan, claim))
    reason = unsteady(request.adapter, request.model, request.batch, run) if certificate.state == "failed" else ""
    return Certificate("could not", engine, why=reason) if reason else certificate


def _words(plan: Plan, claim: Claim) -> dict[str, tuple[str, ...]]:
    """What was compared, and what follows from it."""
    if not claim.probed:
        return {"certified": ("random combinations of its rows",)}
    before = "random combinations of the rows before they were reduced"
    return {"certified": (before,), "resting": (_REDUCED[str(plan.ends.measure)],)}


def _computed_in(request: Request, plan: Plan) -> str:
    """The coarsest dtype on the way: that of the result, of the model, or of a layer."""
    layers = (one.half.call.compute_dtype for one in plan.network.recurrences)
    kinds = [str(plan.dtype), request.provenance.get("dtype", ""), *layers]
    return functools.reduce(coarser, (kind or "" for kind in kinds))


def _cotangents(outside: Outside, of: TensorName, claim: Claim, outputs: Sequence[Array]) -> Sequence[Array | None]:
    """The cotangent as the model's outputs lie: zero but at the steps asked for."""
    whole, dims = outside.opened(of.port(), outputs[of.index])
    if not set(dims) <= {SAMPLE, TIME, UNIT}:
        raise CertificateError(f"an output with axes {', '.join(dims)} is not compared")
    opened = xr.DataArray(np.zeros_like(whole), dims=dims)
    _add_at(opened, claim.cotangent.astype(opened.dtype), claim.ends.out_times)
    found: list[Array | None] = [None] * len(outputs)
    found[of.index] = opened.values.reshape(outputs[of.index].shape)
    return found


def _add_at(opened: xr.DataArray, cotangent: xr.DataArray, times: Sequence[int] | None) -> None:
    """Put cotangents at the steps asked for."""
    moved = opened.transpose(*[d for d in (TIME, SAMPLE, UNIT) if d in opened.dims])
    lacking = [d for d in cotangent.dims if d not in moved.dims]
    placed = cotangent.isel(dict.fromkeys(lacking, 0)).transpose(*moved.dims).values
    values = np.zeros(moved.shape, dtype=moved.dtype)
    if times is None:
        values += placed
    else:
        np.add.at(values, np.asarray(times), placed)
    opened.values = xr.DataArray(values, dims=moved.dims).transpose(*opened.dims).values


def _arrived(
    outside: Outside, wrt: TensorName, gradients: Sequence[Array | None], x: Any
) -> tuple[Array, tuple[str, ...]]:
    """What came to the input that we differentiate by, and the names of its axes."""
    arrived = gradients[wrt.index]
    arrived = np.zeros_like(np.asarray(outputs_of(x)[wrt.index])) if arrived is None else arrived
    return outside.opened(wrt.port(), arrived)


def _asked(arrived: xr.DataArray, ends: Ends) -> xr.DataArray:
    """What of the gradient at the input the Jacobian shows, and as it shows it."""
    arrived = arrived if SAMPLE in arrived.dims else arrived.expand_dims(SAMPLE)
    if ends.in_times is not None:
        arrived = arrived.isel({TIME: np.asarray(ends.in_times)}).rename({TIME: IN_TIME})
    if ends.measure is not None:
        arrived = arrived.sum(FEATURE) if ends.measure == "sum" else arrived.mean(FEATURE)
    else:
        arrived = arrived.rename({FEATURE: IN_FEATURE})
    return arrived.mean(SAMPLE) if ends.average else arrived
