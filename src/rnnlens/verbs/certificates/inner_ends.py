"""A cotangent pulled by the framework between the two ends of a time Jacobian that lie inside the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from ...adapters.protocol import EndPort, Port, ReferenceRun
from ...errors import CertificateError
from ...results.checks import residual
from ...results.schema import to_host
from ...typing import Array
from ..recurrent_layers import ReplayedCall
from ..time_jacobian import JacobianEnd, JacobianRequest
from ..time_jacobian.plan import JacobianPlan

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
    if plan.network.order:
        return None
    for run in (partial(_by_layers_alone, bound), _by_reference_run, _by_pullback):
        with suppress(Exception):  # of the user's model, which cannot be run like that
            return run(request, plan, cotangent)
    return None


def _by_layers_alone(bound: float, request: JacobianRequest, plan: JacobianPlan, cotangent: _Cotangent) -> ReferenceRun:
    """Run the user's layers between the ends alone; raise unless with them the model's own output follows."""
    of, wrt, batch, adapter = request.of, request.wrt, request.batch, request.adapter
    stretch = adapter.subnetwork(request.model, of.port(), wrt.port())
    if stretch is None or plan.ends.wrt.port is None or batch.training or batch.initial_state:
        raise CertificateError("no chain of layers that can be run alone")
    value, pull = stretch(to_host(plan.network.around.values[plan.ends.wrt.port]))
    rest = adapter.subnetwork(request.model, Port("output"), of.port())
    end = value if rest is None else rest(value)[0]
    (whole,) = adapter.reference_run(request.model, batch, gradients=False).outputs
    if end.shape != whole.shape or residual(end, whole, scale=1.0) > bound:
        raise CertificateError("its layers, called one after the other, give another output than the model")
    return ReferenceRun([whole], input_grads=pull(np.asarray(cotangent(value))))


def _by_reference_run(request: JacobianRequest, plan: JacobianPlan, cotangent: _Cotangent) -> ReferenceRun:
    of, wrt = _end(plan, plan.ends.of), _end(plan, plan.ends.wrt, is_lower=True)
    return request.adapter.reference_between(request.model, request.batch, of, wrt, cotangent)


def _end(plan: JacobianPlan, end: JacobianEnd, *, is_lower: bool = False) -> EndPort:
    """Return an end as the adapter looks for it; raise if it is no single tensor per step."""
    name, inside = end.name, plan.network.inside
    calls = inside.layer(name.layer) if name.layer is not None and _is_recurrent(plan, end) else []
    if any(one.call.mask is not None for one in calls) or (len(calls) > 1 and name.what != "output"):
        raise CertificateError("states of masked steps, or of two directions")
    if calls and _is_within_layer(plan, end) and (is_lower or not _is_output(end, calls[0])):
        raise CertificateError("a state within a fused layer")
    states = len(calls[0].run.states) if calls else 0
    return EndPort(Port(name.what, name.layer, name.index), end.times, states, is_lower)  # type: ignore[arg-type]


def _is_recurrent(plan: JacobianPlan, end: JacobianEnd) -> bool:
    layer = end.name.layer
    return bool(end.within) or any(layer in (node, node.rpartition("#")[0]) for node in plan.network.inside.by_layer)


def _by_pullback(request: JacobianRequest, plan: JacobianPlan, cotangent: _Cotangent) -> ReferenceRun:
    if not plan.network.is_cut:
        raise CertificateError("the Jacobian was computed by this pull-back")
    of, wrt = _port(plan, plan.ends.of), _port(plan, plan.ends.wrt, is_lower=True)
    with request.adapter.pullback(request.model, request.batch, [of], [wrt]) as pullback:
        value = np.asarray(to_host(pullback.values[of]))
        found = pullback.vjp({of: cotangent(value)[None]})[wrt]
        start = np.asarray(to_host(pullback.values[wrt]))
    return ReferenceRun([], input_grads=[np.zeros_like(start) if found is None else np.asarray(to_host(found))[0]])


def _port(plan: JacobianPlan, end: JacobianEnd, *, is_lower: bool = False) -> Port:
    """Return the framework's port at an end; raise if it is a state within a fused layer."""
    name, inside = end.name, plan.network.inside
    port = Port(name.what, name.layer, name.index)  # type: ignore[arg-type]
    if name.what in ("input", "output"):
        return port
    one, *others = inside.layer(name.layer)
    if others or one.call.mask is not None:
        raise CertificateError("states of masked steps, or of two directions")
    if not _is_within_layer(plan, end):
        return port
    if is_lower or not _is_output(end, one):
        raise CertificateError("a state within a fused layer")
    return Port("output", name.layer)


def _is_within_layer(plan: JacobianPlan, end: JacobianEnd) -> bool:
    return end.name.what == "state" and not plan.network.inside.is_stepwise(end.name)


def _is_output(end: JacobianEnd, one: ReplayedCall) -> bool:
    """Return whether a state is what the layer returns at every step."""
    return end.name.index == one.run.output_state and one.call.returns_sequences
