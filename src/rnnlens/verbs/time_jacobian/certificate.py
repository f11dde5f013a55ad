"""Holds a time Jacobian against one vector-Jacobian product of the plain run: u^T J, for random signs u."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Cotangents, Port, ReferenceRun
from ...errors import CertificateError, TooLargeError
from ...results.certificate import Certificate
from ...results.checks import coarser, epsilon, residual, rounding_bound
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import FEATURE, IN_FEATURE, IN_TIME, SAMPLE, TIME, UNIT
from ..certify import Comparisons, outputs_of, wanted
from ..names import TensorName
from ..outside import Outside
from ..reference_run import attempt, steadied
from .claim import LINEAR, Claim, pushed_through, taken_from
from .ends import Ends
from .execute import numbers
from .network import open_network
from .plan import Plan, make_plan
from .request import Request
from .tally import Tally

JACOBIAN = "plain jacobian"

#: The user's own layers from one tensor to another: from an array to a value and its pull-back.
Stretch = Callable[[Array], tuple[Array, Callable[[Array], list[Array | None]]]]

_MEASURED = {"norm": "norms", "spectral": "largest singular values", "abs_mean": "mean magnitudes"}


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
    try:
        return _claimed(request, plan, jacobian)
    except TooLargeError:
        return Certificate("could not", request.adapter.engine, why="what was measured would not fit into the memory")


def _why_not(request: Request, plan: Plan) -> str:
    """Why the Jacobian asked for has nothing that a plain run gives; "" where it has."""
    if any(data.is_packed(leaf) for leaf in data.leaves_of(request.batch.x)):
        return "a packed input has its steps in another order than the result"
    inner = next((name for name in (request.of, request.wrt) if _is_inside(name)), None)
    if inner is not None and not _can_run_by_itself(request):
        return f"{inner.text} lies inside the model, where a plain run cannot be looked at"
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
    if _is_inside(request.of) or _is_inside(request.wrt):
        run, why = _stretch_by_itself(request, plan, pulled)
    else:
        run, why = attempt(partial(request.adapter.reference_run, request.model, request.batch, pulled))
    if run is None:
        return Certificate("could not", engine, why=why)
    steps = claim.ends.in_times is not None
    arrived = _arrived(outside, request.wrt, run.input_grads, request.batch.x, steps=steps)
    if (TIME in arrived.dims) != steps:
        return Certificate("could not", engine, why="the steps of the input are not compared")
    held = partial(_held, request, plan, claim, _asked(arrived, claim.ends))
    certificate = held(claim.spread)
    if certificate.state != "failed":
        return certificate
    moved = _pulled(request, perturbed=True) - _pulled(request)
    certificate = held(max(claim.spread, float(abs(moved).max()) / epsilon(_computed_in(request, plan))))
    if certificate.state != "failed":
        return certificate
    return steadied(certificate, request.adapter, request.model, request.batch, run)


def _held(request: Request, plan: Plan, claim: Claim, theirs: xr.DataArray, scale: float) -> Certificate:
    """The claim beside what the framework has for it; ``scale`` is what rounding is relative to."""
    comparisons = Comparisons(max(int(size) for size in (64, *plan.shape)), _computed_in(request, plan))
    comparisons.compare(JACOBIAN, "", [(claim.pulled, theirs.transpose(*claim.pulled.dims))], scale=scale)
    return comparisons.certificate(request.adapter.engine, claim.checks, **_words(plan, claim))


def _pulled(request: Request, *, perturbed: bool = False) -> xr.DataArray:
    """What the Jacobian makes of random signs, anew; ``perturbed``: off by one rounding inside recurrent layers."""
    with open_network(request, perturbed=perturbed) as network:
        plan = make_plan(request.options, network)
        is_linear = plan.ends.measure in LINEAR
        jacobian = xr.DataArray(numbers(plan, Tally()), dims=plan.dims) if is_linear else None
        return _claimed(request, plan, jacobian).pulled


def _claimed(request: Request, plan: Plan, jacobian: xr.DataArray | None) -> Claim:
    if plan.ends.measure in LINEAR and jacobian is not None:
        return taken_from(plan, jacobian)
    return pushed_through(plan, jacobian, request.options.memory, _computed_in(request, plan))


def _is_inside(name: TensorName) -> bool:
    return name.layer is not None or name.what not in ("input", "output")


def _can_run_by_itself(request: Request) -> bool:
    """Whether what lies between the two ends can be run by itself, as the user's own layers."""
    of, wrt, batch = request.of, request.wrt, request.batch
    if {of.what, wrt.what} - {"input", "output"} or batch.training or batch.initial_state:
        return False
    return request.adapter.subnetwork(request.model, of.port(), wrt.port()) is not None


def _stretch_by_itself(request: Request, plan: Plan, cotangents: Cotangents) -> tuple[ReferenceRun | None, str]:
    """The layers between the two ends, run by themselves; or why they are not."""
    adapter, model = request.adapter, request.model
    whole, why = attempt(partial(adapter.reference_run, model, request.batch, gradients=False))
    if whole is None:
        return None, why
    stretch = adapter.subnetwork(model, request.of.port(), request.wrt.port())
    rest = adapter.subnetwork(model, Port("output"), request.of.port())
    assert stretch is not None
    assert plan.ends.wrt.port is not None
    start = to_host(plan.network.around.values[plan.ends.wrt.port])
    bound = rounding_bound(_computed_in(request, plan), max((64, *plan.shape)))
    return attempt(partial(_pulled_through, stretch, rest, start, whole, bound, cotangents))


def _pulled_through(
    stretch: Stretch, rest: Stretch | None, start: Array, whole: ReferenceRun, bound: float, cotangents: Cotangents
) -> ReferenceRun:
    """What arrives at the lower end of a stretch, if this and the rest of the model give what the model gives."""
    value, pull = stretch(start)
    end = value if rest is None else rest(value)[0]
    if end.shape != whole.outputs[0].shape or residual(end, whole.outputs[0], scale=1.0) > bound:
        raise CertificateError("its layers, called one after the other, do not give what the model gives")
    (cotangent,) = cotangents([value])
    return ReferenceRun(whole.outputs, input_grads=pull(np.asarray(cotangent)))


def _words(plan: Plan, claim: Claim) -> dict[str, tuple[str, ...]]:
    """What was compared, and what follows from it."""
    if not claim.probed:
        return {"certified": ("random combinations of its rows",)}
    before = "random combinations of the rows before they were measured"
    return {"certified": (before,), "resting": (_MEASURED[str(plan.ends.measure)],)}


def _computed_in(request: Request, plan: Plan) -> str:
    """The coarsest dtype on the way: that of the result, of the model, or of a layer."""
    layers = (one.half.call.compute_dtype for one in plan.network.recurrences)
    kinds = [str(plan.dtype), request.provenance.get("dtype", ""), *layers]
    return functools.reduce(coarser, (kind or "" for kind in kinds))


def _cotangents(outside: Outside, of: TensorName, claim: Claim, outputs: Sequence[Array]) -> Sequence[Array | None]:
    """The cotangent as the model's outputs lie: zero but at the steps asked for."""
    times = claim.ends.out_times
    opened = _opened(outside, of, np.zeros_like(outputs[of.index]), steps=times is not None)
    if (TIME in opened.dims) != (times is not None):
        raise CertificateError(f"an output with axes {', '.join(map(str, opened.dims))} is not compared")
    steps_first = _as_rows(opened, UNIT).transpose(*[d for d in (TIME, SAMPLE, UNIT) if d in (*opened.dims, UNIT)])
    lacking = [d for d in claim.cotangent.dims if d not in steps_first.dims]
    placed = claim.cotangent.isel(dict.fromkeys(lacking, 0)).transpose(*steps_first.dims)
    steps_first.values[slice(None) if times is None else times] = placed.values
    found: list[Array | None] = [None] * len(outputs)
    found[of.index] = _as_was(steps_first, opened).values.reshape(outputs[of.index].shape)
    return found


def _opened(outside: Outside, name: TensorName, array: Array, *, steps: bool) -> xr.DataArray:
    """By the names of its axes; where samples come first by rule and steps are looked at, these come second."""
    whole, dims = outside.opened(name.port(), array)
    if steps and TIME not in dims and outside.axes.samples_first and len(dims) > 2:
        dims = (dims[0], TIME, *dims[2:])
    return xr.DataArray(whole, dims=dims)


def _as_rows(opened: xr.DataArray, last: str) -> xr.DataArray:
    """(sample, [time,] last): all axes but those of samples and steps as one."""
    lead = [d for d in (SAMPLE, TIME) if d in opened.dims]
    moved = opened.transpose(*lead, ...)
    return xr.DataArray(moved.values.reshape(*(moved.sizes[d] for d in lead), -1), dims=(*lead, last))


def _as_was(rows: xr.DataArray, opened: xr.DataArray) -> xr.DataArray:
    """The inverse of :func:`_as_rows`."""
    lead = [d for d in (SAMPLE, TIME) if d in opened.dims]
    moved = opened.transpose(*lead, ...)
    return moved.copy(data=rows.transpose(*lead, UNIT).values.reshape(moved.shape)).transpose(*opened.dims)


def _arrived(
    outside: Outside, wrt: TensorName, gradients: Sequence[Array | None], x: Any, *, steps: bool
) -> xr.DataArray:
    """What came to the input that we differentiate by, (sample, [time,] feature)."""
    arrived = gradients[wrt.index]
    arrived = np.zeros_like(np.asarray(outputs_of(x)[wrt.index])) if arrived is None else arrived
    return _as_rows(_opened(outside, wrt, arrived, steps=steps), FEATURE)


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
