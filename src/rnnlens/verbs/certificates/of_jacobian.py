"""Certificates of time Jacobians: u^T J for random u, compared with one vector-Jacobian product.

If the Jacobian is linear in its rows, u^T J is computed from the result. If it was reduced to norms, the same u is
swept through the same plan once more, without the norm, as one row for each output step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import EndPort, Port, ReferenceRun, Taps
from ...errors import CertificateError, RnnlensError, TooLargeError
from ...recurrence.replay import Replay
from ...recurrence.rounding import perturbed_replay, plain_replay
from ...results.checks import Certificate, Check, coarser_dtype, epsilon, residual, rounding_bound
from ...results.schema import to_host
from ...typing import Array, arrays_of
from ...vocabulary import FEATURE, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE, TIME, UNIT
from ..axes import BatchAxes
from ..names import TensorName, read
from ..time_jacobian.execute import numbers
from ..time_jacobian.network import open_network
from ..time_jacobian.plan import JacobianPlan, WorkCount, make_plan, plan_for
from ..time_jacobian.request import JacobianEnd, JacobianEnds, JacobianOptions, JacobianRequest, integer_dtype
from .compare import OWN_STATES, Comparisons, attempt, compare_in_turn, could_not_compare, random_factors, untouched

#: Values of ``measure`` for which the result is linear in the rows of the Jacobian.
LINEAR = (None, "sum", "mean")
#: Largest number of output steps at which probes start.
PROBED_STEPS = 64

MEASURE = "bound of the measure"


@dataclass(frozen=True)
class JacobianClaim:
    """A cotangent at the Jacobian's output end, and its product with the Jacobian at the input end."""

    #: The Jacobian: the user's, or d output / d input through its recurrences if its ends lie inside the model.
    request: JacobianRequest
    plan: JacobianPlan
    #: The ends that ``pulled`` was computed for.
    ends: JacobianEnds
    #: (sample, [time,] unit): of the output's own units, at the steps ``ends.out_times`` in their order.
    cotangent: xr.DataArray
    #: Product of cotangent and Jacobian, with named axes.
    pulled: xr.DataArray
    #: The largest root of the sum of squares of the terms of one entry; the scale of rounding.
    spread: float
    #: True if the cotangent was swept through the plan, False if multiplied with the result.
    probed: bool = False
    #: Comparison of a result reduced to norms with the product.
    checks: tuple[Check, ...] = ()
    #: Run of the user's model in which the cotangent was pulled between two ends inside it; None if there is none yet.
    run: ReferenceRun | None = None


@np.errstate(over="ignore", invalid="ignore")
def sweep_factors(request: JacobianRequest, plan: JacobianPlan, jacobian: xr.DataArray | None) -> JacobianClaim:
    """Sweep random factors through the plan of a measured Jacobian; check the measured values against them if given."""
    memory = request.options.memory
    bytes_per_row = plan.network.samples * plan.ends.in_count * plan.ends.wrt.size * plan.dtype.itemsize
    count = max(1, min(plan.ends.groups, PROBED_STEPS, memory // max(1, bytes_per_row)))
    positions = sorted({int(i) for i in np.linspace(plan.ends.groups - 1, 0, count).round()})
    times = None if plan.ends.out_times is None else [plan.ends.out_times[i] for i in positions]
    # A random combination of the requested rows at each chosen step: (sample, time, 1, unit).
    requested = None if plan.ends.projection is None else plan.ends.projection[0, 0]
    sizes = plan.network.samples, len(positions), plan.ends.of.size if requested is None else len(requested)
    factors = random_factors(sizes)
    weights = np.zeros((plan.network.samples, plan.ends.of.times or 1, 1, plan.ends.of.size))
    weights[:, times or [0], 0] = factors if requested is None else factors @ requested
    ordered_weights = weights[np.argsort(plan.network.sample_order)] if plan.network.sample_order else weights
    ends = replace(plan.ends, weights=ordered_weights, out_times=times, measure=None, sketch=None, average=False)
    modes = {part.mode for part in plan.parts}
    probe = plan_for(plan.network, ends, modes.pop() if len(modes) == 1 else "auto", None, memory, streamed=False)
    rows = xr.DataArray(numbers(probe, WorkCount()), dims=probe.dims)
    checks = () if jacobian is None else _check_measure(plan, jacobian, rows, positions, _coarsest_dtype(request, plan))
    pulled = rows.isel({OUT_UNIT: 0})
    pulled = pulled.sum(OUT_TIME) if OUT_TIME in rows.dims else pulled
    cotangent = xr.DataArray(weights[:, :, 0].astype(plan.dtype), dims=(SAMPLE, TIME, UNIT))
    cotangent = cotangent.isel({TIME: 0 if times is None else times})
    return JacobianClaim(request, plan, ends, cotangent, pulled, _spread(rows), True, checks)


def _check_measure(
    plan: JacobianPlan, jacobian: xr.DataArray, rows: xr.DataArray, positions: list[int], dtype: str
) -> tuple[Check, ...]:
    """Return the check that no row u^T J, with factors up to 1, exceeds sqrt(rows) times the measured norm."""
    ends = plan.ends
    if ends.sketch is not None or ends.measure is None:
        return ()
    count = ends.of.size if ends.projection is None else int(ends.projection.shape[2])
    measured = jacobian.drop_vars(list(jacobian.coords))
    measured = measured.isel({OUT_TIME: positions}) if OUT_TIME in measured.dims else measured
    row_dims = [OUT_UNIT, IN_FEATURE]
    if ends.measure == "abs_mean":
        row_norms, limit = abs(rows).mean(row_dims), count * measured
    else:
        row_norms, limit = (rows**2).sum(row_dims) ** 0.5, count**0.5 * measured
    row_norms = row_norms.mean(SAMPLE) if ends.average else row_norms
    excess = row_norms - limit if count > 1 else abs(row_norms - limit)
    scale = float(abs(limit).max()) or 1.0
    residual = max(float(excess.max()), 0.0) / scale
    return (Check(MEASURE, "", residual, rounding_bound(dtype, max((64, *plan.shape)))),)


def _factors(plan: JacobianPlan) -> xr.DataArray:
    """Draw one random factor for every row; all samples share it if the Jacobian is averaged over them."""
    ends, samples = plan.ends, plan.network.samples
    sizes = {SAMPLE: 1 if ends.average else samples}
    sizes |= {} if ends.out_times is None else {OUT_TIME: ends.groups}
    sizes |= {OUT_UNIT: ends.rows}
    factors = random_factors(tuple(sizes.values()))
    if ends.average:
        factors, sizes = np.repeat(factors, samples, axis=0), {**sizes, SAMPLE: samples}
    return xr.DataArray(factors.astype(plan.dtype), dims=tuple(sizes))


def _factors_of_units(factors: xr.DataArray, ends: JacobianEnds) -> xr.DataArray:
    """Convert factors of the Jacobian's rows to cotangents of the output units; a row may combine several units."""
    renamed = factors.rename({OUT_UNIT: UNIT, **({OUT_TIME: TIME} if OUT_TIME in factors.dims else {})})
    if ends.weights is None:
        return renamed
    rows = xr.DataArray(np.asarray(ends.weights)[0, 0].astype(factors.dtype), dims=("row", UNIT))
    units: xr.DataArray = xr.dot(renamed.rename({UNIT: "row"}), rows, dim="row")
    return units


def _spread(jacobian: xr.DataArray) -> float:
    squares = xr.dot(jacobian, jacobian, dim=[d for d in (OUT_TIME, OUT_UNIT) if d in jacobian.dims])
    return float(np.sqrt(squares.max()))


JACOBIAN = "reference jacobian"

_MEASURED = {"norm": "norms", "spectral": "largest singular values", "abs_mean": "mean magnitudes"}


def claim_of(request: JacobianRequest, plan: JacobianPlan, jacobian: xr.DataArray) -> JacobianClaim | Certificate:
    """Return what a reference run has to confirm of a finished time Jacobian.

    If it cannot be confirmed that way, return a certificate "could not" with the reason instead.
    """
    reasons = {
        "it was written to disk in chunks, which are not read back": request.options.out is not None,
        "a packed input orders its steps differently from the result": any(
            data.is_packed(leaf) for leaf in data.leaves_of(request.batch.x)
        ),
        "the model by itself does not hold its coefficients constant": request.batch.frozen,
        "rtol= pruned rows": request.options.rtol is not None,
        OWN_STATES: bool(request.batch.initial_state),
        "it is not made of real numbers": plan.dtype.kind != "f",
    }
    for reason, applies in reasons.items():
        if applies:
            return could_not_compare(request, reason)
    try:
        if not (_is_inside_model(request.of) or _is_inside_model(request.wrt)):
            return _compute_claim(request, plan, jacobian)
        if len(plan.ends.of.within) < 2 and len(plan.ends.wrt.within) < 2:
            claim = _compute_claim(request, plan, jacobian)
            bound = rounding_bound(_coarsest_dtype(request, plan), max((64, *plan.shape)))
            run = pull_between(request, plan, partial(_place_cotangent, claim), bound)
            if run is not None:
                return replace(claim, run=run)
        return _claim_through_model(request, plan)
    except TooLargeError:
        return could_not_compare(request, "the compared rows are larger than the memory limit")


def _claim_through_model(request: JacobianRequest, plan: JacobianPlan) -> JacobianClaim | Certificate:
    """Return the claim on an output by an input of the model, through all recurrences between two inner ends.

    A reference run has no tensor for inner ends. The claim sweeps the same recurrences and segments in the same order,
    from the model's output to its input. The result is a certificate "could not" if no such path exists.
    """
    needed_layers = {replayed.call.layer for replayed in (*plan.ends.of.within, *plan.ends.wrt.within)}
    if plan.network.is_cut:
        needed_layers |= {plan.network.recurrences[number].call.layer for number in plan.network.path.recurrences}
    options = JacobianOptions(request.options.memory)
    for of, wrt in product(read("output", request.catalogue), read("input", request.catalogue)):
        whole_request = replace(request, of=of, wrt=wrt, options=options)
        try:
            if integer_dtype(wrt, request.batch) is not None:
                continue
            with open_network(whole_request, plan.network.replayed_layers) as network:
                on_path = network.path.recurrences if network.is_cut else range(len(network.recurrences))
                whole_plan = make_plan(options, network)
                if needed_layers <= {network.recurrences[number].call.layer for number in on_path}:
                    return sweep_factors(whole_request, whole_plan, None)
        except TooLargeError:
            raise
        except RnnlensError:
            continue
    inner_name = next(name for name in (request.of, request.wrt) if _is_inside_model(name))
    return could_not_compare(
        request, f"{inner_name.text} lies inside the model, and no floating input and output enclose its recurrences"
    )


def certify(request: JacobianRequest, claim: JacobianClaim | Certificate) -> Certificate:
    """Certify a time Jacobian: compare u^T J of random u with what the framework pulls back to the model's input.

    ``claim`` is that product, as rnnlens computed it, or a finished certificate.
    """
    if isinstance(claim, Certificate):
        return claim
    certificate = _compare_claim(claim)
    if claim.request is request or not certificate.checks:
        return certificate
    through = f"d {claim.request.of.text} / d {claim.request.wrt.text} through the same recurrences"
    return replace(certificate, certified=(through,), resting=(f"d {request.of.text} / d {request.wrt.text}",))


def _compare_claim(claim: JacobianClaim) -> Certificate:
    request, plan = claim.request, claim.plan
    dtype, most_steps = _coarsest_dtype(request, plan), max((64, *plan.shape))
    certificate_names: dict[str, tuple[str, ...]] = {"certified": ("random combinations of its rows",)}
    if claim.probed and plan.ends.measure is not None:
        probed_text = "random combinations of the rows before they were measured"
        certificate_names = {"certified": (probed_text,), "resting": (_MEASURED[plan.ends.measure],)}

    def compare(run: ReferenceRun, scale: float = claim.spread) -> Certificate:
        has_steps = claim.ends.in_times is not None
        input_gradient = _input_gradient(claim, run.input_grads, steps=has_steps)
        if (TIME in input_gradient.dims) != has_steps:
            return could_not_compare(request, "the steps of the input are not compared")
        reference = _select_requested(input_gradient, claim.ends).transpose(*claim.pulled.dims)
        comparisons = Comparisons(most_steps, dtype)
        comparisons.compare(JACOBIAN, "", [(claim.pulled, reference)], scale=scale)
        return comparisons.certificate(request.adapter.engine, claim.checks, **certificate_names)

    def compare_perturbed(run: ReferenceRun) -> Certificate | None:
        product = _recomputed_product(request, plain_replay)
        change = _recomputed_product(request, perturbed_replay) - product
        certificate = compare(run, max(claim.spread, float(abs(change).max()) / epsilon(dtype)))
        # Of a model that draws random numbers the change is no rounding.
        is_random = certificate.state == "could not" and not _recomputed_product(request, plain_replay).equals(product)
        return None if is_random else certificate

    return compare_in_turn(request, partial(_reference_attempt, claim), [compare, compare_perturbed], steps=most_steps)


def _reference_attempt(claim: JacobianClaim) -> tuple[ReferenceRun | None, str]:
    """Pull the claim's cotangent back through the user's model by its framework.

    Return that reference run and "", or None and the reason for its failure.
    """
    request = claim.request
    if claim.run is not None:
        return claim.run, ""

    def cotangents(outputs: Sequence[Array]) -> list[Array | None]:
        """Return the claim's cotangent at its own output, None at the others."""
        return [_place_cotangent(claim, value) if i == request.of.index else None for i, value in enumerate(outputs)]

    return attempt(lambda: untouched(request, request.batch).reference(cotangents))


def _recomputed_product(request: JacobianRequest, replay_of: Callable[[Replay], Replay]) -> xr.DataArray:
    """Recompute the product of random factors and the Jacobian, from other replays of the recurrent layers."""
    with open_network(request, replay_of=replay_of) as network:
        plan = make_plan(request.options, network)
        is_linear = plan.ends.measure in LINEAR
        jacobian = xr.DataArray(numbers(plan, WorkCount()), dims=plan.dims) if is_linear else None
        return _compute_claim(request, plan, jacobian).pulled


@np.errstate(over="ignore", invalid="ignore")
def _compute_claim(request: JacobianRequest, plan: JacobianPlan, jacobian: xr.DataArray | None) -> JacobianClaim:
    """Compute u^T J for random factors u: from the finished Jacobian if it is linear in its rows, else by a sweep."""
    if plan.ends.measure not in LINEAR or jacobian is None:
        return sweep_factors(request, plan, jacobian)
    factors, bare_jacobian = _factors(plan), jacobian.drop_vars(list(jacobian.coords))
    cotangent = _factors_of_units(factors, plan.ends)
    if SAMPLE not in bare_jacobian.dims:
        factors = factors.isel({SAMPLE: 0})
    if OUT_UNIT not in bare_jacobian.dims:
        factors = factors.isel({OUT_UNIT: 0})
    dims = [d for d in (OUT_TIME, OUT_UNIT) if d in bare_jacobian.dims]
    return JacobianClaim(
        request, plan, plan.ends, cotangent, xr.dot(bare_jacobian, factors, dim=dims), _spread(bare_jacobian)
    )


def _is_inside_model(name: TensorName) -> bool:
    return name.layer is not None or name.kind not in ("input", "output")


def _coarsest_dtype(request: JacobianRequest, plan: JacobianPlan) -> str:
    """Return the coarsest dtype among those of the result, of the model and of its layers."""
    layer_dtypes = (replayed.call.compute_dtype for replayed in plan.network.recurrences)
    submodule_dtypes = (part.dtype for part in request.facts.submodules.values())
    dtypes = [str(plan.dtype), request.provenance().get("dtype", ""), *layer_dtypes, *submodule_dtypes]
    return functools.reduce(coarser_dtype, (kind or "" for kind in dtypes))


def _place_cotangent(claim: JacobianClaim, value: Array) -> Array:
    """Put the claim's cotangent into the layout of the upper end's tensor, zero at steps that were not requested."""
    times = claim.ends.out_times
    named_array = _named_axes(claim, claim.request.of, np.zeros_like(value), steps=times is not None)
    if (TIME in named_array.dims) != (times is not None):
        raise CertificateError(f"an output with axes {', '.join(map(str, named_array.dims))} is not compared")
    rows_by_step = _as_rows(named_array, UNIT).transpose(
        *[d for d in (TIME, SAMPLE, UNIT) if d in (*named_array.dims, UNIT)]
    )
    missing_dims = [d for d in claim.cotangent.dims if d not in rows_by_step.dims]
    placed = claim.cotangent.isel(dict.fromkeys(missing_dims, 0)).transpose(*rows_by_step.dims)
    rows_by_step.values[slice(None) if times is None else times] = placed.values
    leading_dims = [d for d in (SAMPLE, TIME) if d in named_array.dims]
    leading_array = named_array.transpose(*leading_dims, ...)
    rows = rows_by_step.transpose(*leading_dims, UNIT).values.reshape(leading_array.shape)
    cotangent: Array = leading_array.copy(data=rows).transpose(*named_array.dims).values.reshape(value.shape)
    return cotangent


def _named_axes(claim: JacobianClaim, name: TensorName, array: Array, *, steps: bool) -> xr.DataArray:
    """Return an array with named axes; by convention the second axis is time if time is needed."""
    if not claim.request.catalogue.is_free(name):  # of a recurrent layer: samples first, then steps
        leading_dims = (SAMPLE, TIME) if steps else (SAMPLE,)
        return xr.DataArray(array.reshape((*array.shape[: len(leading_dims)], -1)), dims=(*leading_dims, UNIT))
    batch_axes = BatchAxes(claim.plan.network.layouts, claim.plan.network.samples)
    split_array, dims = batch_axes.split_folded(name.port(), array)
    if steps and TIME not in dims and batch_axes.axes.samples_first and len(dims) == 3:
        dims = (dims[0], TIME, *dims[2:])
    return xr.DataArray(split_array, dims=dims)


def _as_rows(named_array: xr.DataArray, last_dim: str) -> xr.DataArray:
    """Reshape to (sample, [time,] last): all axes except samples and steps become one."""
    leading_dims = [d for d in (SAMPLE, TIME) if d in named_array.dims]
    leading_array = named_array.transpose(*leading_dims, ...)
    return xr.DataArray(
        leading_array.values.reshape(*(leading_array.sizes[d] for d in leading_dims), -1),
        dims=(*leading_dims, last_dim),
    )


def _input_gradient(claim: JacobianClaim, gradients: Sequence[Array | None], *, steps: bool) -> xr.DataArray:
    """Return the reference run's gradient at the lower end, (sample, [time,] feature); zeros where no path leads."""
    wrt = claim.request.wrt
    gradient = gradients[0 if claim.run is not None else wrt.index]
    gradient = np.zeros_like(np.asarray(arrays_of(claim.request.batch.x)[wrt.index])) if gradient is None else gradient
    return _as_rows(_named_axes(claim, wrt, gradient, steps=steps), FEATURE)


def _select_requested(gradient: xr.DataArray, ends: JacobianEnds) -> xr.DataArray:
    """Select steps of the gradient at the lower end, and reduce features and samples, as the Jacobian does."""
    gradient = gradient if SAMPLE in gradient.dims else gradient.expand_dims(SAMPLE)
    if ends.in_times is not None:
        gradient = gradient.isel({TIME: np.asarray(ends.in_times)}).rename({TIME: IN_TIME})
    if ends.measure is not None:
        gradient = gradient.sum(FEATURE) if ends.measure == "sum" else gradient.mean(FEATURE)
    else:
        gradient = gradient.rename({FEATURE: IN_FEATURE})
    return gradient.mean(SAMPLE) if ends.average else gradient


#: Function from the value of the upper end to its cotangent.
_Cotangent = Callable[[Array], Array]


def pull_between(
    request: JacobianRequest, plan: JacobianPlan, cotangent: _Cotangent, bound: float
) -> ReferenceRun | None:
    """Pull a cotangent from the upper end to the lower one in a run of the user's model, without any replay or sweep.

    First by the layers of a chain, run alone; then by the adapter's reference run, which finds the ends by itself; then
    by its pull-back without cuts, unless the Jacobian was computed by that. None if the framework has no tensor at an
    end, as for states in a fused layer.
    """
    if plan.network.sample_order:
        return None
    for run in (partial(_pull_by_layers_alone, bound), _pull_by_reference_run, _pull_by_pullback):
        with suppress(Exception):  # of the user's model, which cannot be run like that
            return run(request, plan, cotangent)
    return None


def _pull_by_layers_alone(
    bound: float, request: JacobianRequest, plan: JacobianPlan, cotangent: _Cotangent
) -> ReferenceRun:
    """Run the user's layers between the ends alone; raise unless with them the model's own output follows."""
    of, wrt, batch = request.of, request.wrt, request.batch
    subnetwork = request.facts.subnetwork(of.port(), wrt.port())
    if subnetwork is None or plan.ends.wrt.port is None or batch.training or batch.initial_state:
        raise CertificateError("no chain of layers that can be run alone")
    value, pull = subnetwork(to_host(plan.network.segment_graph.values[plan.ends.wrt.port]))
    upper_network = request.facts.subnetwork(Port("output"), of.port())
    output = value if upper_network is None else upper_network(value)[0]
    (model_output,) = untouched(request, batch, gradients=False).reference().outputs
    if output.shape != model_output.shape or residual(output, model_output, scale=1.0) > bound:
        raise CertificateError("its layers, called one after the other, give another output than the model")
    return ReferenceRun([model_output], input_grads=pull(np.asarray(cotangent(value))))


def _pull_by_reference_run(request: JacobianRequest, plan: JacobianPlan, cotangent: _Cotangent) -> ReferenceRun:
    of, wrt = _end_port(plan, plan.ends.of), _end_port(plan, plan.ends.wrt, is_lower=True)
    return untouched(request, request.batch).between(of, wrt, cotangent)


def _end_port(plan: JacobianPlan, end: JacobianEnd, *, is_lower: bool = False) -> EndPort:
    """Convert an end of a Jacobian to the ``EndPort`` that an adapter finds; raise if it is no tensor per step."""
    name, replayed_layers = end.name, plan.network.replayed_layers
    is_recurrent = bool(end.within) or any(name.layer in (n, n.rpartition("#")[0]) for n in replayed_layers.by_layer)
    calls = replayed_layers.layer(name.layer) if name.layer is not None and is_recurrent else []
    if any(replayed.call.mask is not None for replayed in calls) or (len(calls) > 1 and name.kind != "output"):
        raise CertificateError("states of masked steps, or of two directions")
    if calls and _is_within_layer(plan, end):
        # A state that the layer returns at every step is its output.
        is_output = name.index == calls[0].run.output_state and calls[0].call.returns_sequences
        if is_lower or not is_output:
            raise CertificateError("a state within a fused layer")
    states = len(calls[0].run.states) if calls else 0
    return EndPort(Port(name.kind, name.layer, name.index), end.times, states, is_lower)  # type: ignore[arg-type]


def _pull_by_pullback(request: JacobianRequest, plan: JacobianPlan, cotangent: _Cotangent) -> ReferenceRun:
    if not plan.network.is_cut:
        raise CertificateError("the Jacobian was computed by this pull-back")
    of, wrt = _framework_port(plan, plan.ends.of), _framework_port(plan, plan.ends.wrt, is_lower=True)
    with request.adapter.run(request.model, request.batch, Taps.ports([of], [wrt])) as run:
        value = np.asarray(to_host(run.values[of]))
        gradient = run.pull({of: cotangent(value)[None]})[wrt]
        lower_value = np.asarray(to_host(run.values[wrt]))
    return ReferenceRun(
        [], input_grads=[np.zeros_like(lower_value) if gradient is None else np.asarray(to_host(gradient))[0]]
    )


def _framework_port(plan: JacobianPlan, end: JacobianEnd, *, is_lower: bool = False) -> Port:
    """Return the framework's port at an end; raise if it is a state within a fused layer."""
    if end.name.kind in ("input", "output"):
        return end.name.port()
    port = _end_port(plan, end, is_lower=is_lower).port
    return Port("output", end.name.layer) if _is_within_layer(plan, end) else port


def _is_within_layer(plan: JacobianPlan, end: JacobianEnd) -> bool:
    return end.name.kind == "state" and not plan.network.replayed_layers.is_stepwise(end.name)
