"""Plan of a gradient: for each tensor, ports of the framework or a sweep through a recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...adapters.protocol import CaptureRequest, Port
from ...layout import dims_of, direction_axis
from ...recurrence.trajectory import Adjoint
from ...results.schema import to_host
from ...typing import Array
from ..names import Catalogue, TensorName, uncalled
from ..recurrent_layers import ReplayedCall, ReplayedLayers
from ..weight_layout import sources
from .request import BatchGradients, GradientRequest


@dataclass(frozen=True)
class TensorPlace:
    """Access to one tensor: by a sweep, or at ports of the framework.

    Attributes
    ----------
    swept
        True if a sweep of rnnlens is needed, as the framework has no such tensor.
    free
        True for an input or output of the model or of a non-recurrent layer. It has the framework's own layout, in
        which samples may be on any axis.
    stepwise
        True for a state of a cell that the user's own loop calls. The framework has it at every step.
    at
        The ports that together are the tensor: one, or one per direction; empty if it is swept.
    below
        The ports from which the framework differentiates on, towards the inputs of the model.
    above
        The ports at which the gradients arrive that give the gradient of this tensor.
    """

    name: TensorName
    swept: bool
    free: bool
    stepwise: bool
    at: tuple[Port, ...]
    below: tuple[Port, ...]
    above: tuple[Port, ...]


@dataclass(frozen=True)
class GradientPlan:
    """Ports and sweeps that gradients on one batch need.

    Attributes
    ----------
    leaves
        The tensors of the target, where differentiation starts.
    wrt
        The tensors to differentiate by.
    outputs
        Ports of the model's outputs if the loss is split by sample there; else empty.
    """

    leaves: tuple[TensorPlace, ...]
    wrt: tuple[TensorPlace, ...]
    outputs: tuple[Port, ...] = ()

    @cached_property
    def starts(self) -> list[Port]:
        """Ports at which the framework's differentiation starts."""
        return list(dict.fromkeys([*(port for place in self.leaves for port in place.below), *self.outputs]))

    @cached_property
    def ends(self) -> list[Port]:
        """Ports at which the framework's differentiation ends."""
        return list(dict.fromkeys([*(port for place in self.wrt for port in place.above), *self.outputs]))

    @cached_property
    def weights(self) -> dict[TensorName, tuple[Port, ...]]:
        """Requested weights, each with the ports of the framework weights that it consists of."""
        return {place.name: place.above for place in self.wrt if place.name.what == "weight"}

    @cached_property
    def activations(self) -> tuple[TensorPlace, ...]:
        """Requested tensors that are not weights."""
        return tuple(place for place in self.wrt if place.name.what != "weight")

    @property
    def free(self) -> list[Port]:
        """Ports of tensors whose axes have to be determined."""
        places = [*self.leaves, *self.wrt]
        return [*(place.name.port() for place in places if place.free), *self.outputs]


def plan(request: GradientRequest, inside: ReplayedLayers) -> GradientPlan:
    """Return the plan for the tensors of a request on one batch whose recurrent layers were captured."""
    outputs: tuple[Port, ...] = ()
    if request.target.per_sample and request.leaves[0].what == "loss":
        outputs = tuple(Port("output", index=i) for i in range(max(1, len(request.known.outputs))))
    leaves = tuple(_place(name, request.known, inside) for name in request.leaves)
    return GradientPlan(leaves, tuple(_place(name, request.known, inside) for name in request.wrt), outputs)


def layers_inside(request: GradientRequest) -> list[str]:
    """Return the recurrent layers that a request needs captured."""
    names = [*request.leaves, *request.wrt]
    return [str(name.layer) for name in names if request.known.is_inside(name)]


def _place(name: TensorName, known: Catalogue, inside: ReplayedLayers) -> TensorPlace:
    stepwise = inside.is_stepwise(name)
    swept = known.is_inside(name) and not stepwise
    free = known.is_free(name)
    if name.what == "weight":
        found = sources(known.weights[str(name.layer)])[name.key]
        ports = tuple(Port("weight", name.layer, key=source.key) for source in found)
        return TensorPlace(name, swept, free, stepwise, ports, ports, ports)
    if swept:
        directions = inside.layer(name.layer)
        below = tuple(port for replayed in directions for port in replayed.below())
        return TensorPlace(
            name,
            swept,
            free,
            stepwise,
            (),
            below,
            tuple(port for replayed in directions for port in replayed.readers()),
        )
    at = _ports(name, known, stepwise)
    return TensorPlace(name, swept, free, stepwise, at, at, tuple(_total(port) for port in at))


def _ports(name: TensorName, known: Catalogue, stepwise: bool) -> tuple[Port, ...]:
    """Return the ports that together are one tensor of the framework: one, or one per direction."""
    info = known.recurrent.get(uncalled(name.layer))
    if name.what == "output" and info is not None and info.direction == "bidirectional":
        return (name.port("forward"), name.port("backward"))
    if stepwise:
        return (Port(name.what, name.layer, name.index),)  # type: ignore[arg-type]
    return (name.port(),)


def _total(port: Port) -> Port:
    """Return the port with the total gradient of a final state of a stepwise layer; other ports unchanged."""
    return port if port.kind != "final_state" else Port("state", port.layer, port.index, key="ending")


def captured(request: GradientRequest) -> BatchGradients | None:
    """Return gradients of the loss by recurrent outputs and states from one captured pass; None if more is needed."""
    if not fits(request):
        return None
    layers = tuple(dict.fromkeys(str(name.layer) for name in request.wrt))
    capture = request.adapter.capture(request.model, request.batch, CaptureRequest(layers, weight_grads=False))
    inside = ReplayedLayers.of(capture.calls)
    if any(name.what == "final_state" and inside.is_stepwise(name) for name in request.wrt):
        return None
    grads: dict[TensorName, Array | None] = {}
    swept: dict[str, list[tuple[ReplayedCall, Adjoint]]] = {}
    for name in request.wrt:
        directions = inside.layer(name.layer)
        if name.what == "output":
            grads[name] = side_by_side([to_host(replayed.call.output_grad)[None] for replayed in directions])
        else:
            sweeps = [replayed.sweep(replayed.call.state_grad or {}, replayed.arrived()) for replayed in directions]
            swept[str(name.layer)] = list(zip(directions, sweeps, strict=True))
            grads[name] = inside.gradient(name, sweeps)
    if any(grad is None or not np.any(grad) for grad in grads.values()):
        return None
    dims = {name: request.known.dims(name, grad) for name, grad in grads.items() if grad is not None}
    return BatchGradients(np.asarray(capture.loss), request.samples, grads, dims, swept)


def fits(request: GradientRequest) -> bool:
    """Return whether a request is the loss by outputs and states of recurrent layers only."""
    if request.target.text != "loss" or request.target.per_sample or request.scale != 1.0:
        return False
    known = request.known
    recurrent = all(uncalled(name.layer, known.recurrent) in known.recurrent for name in request.wrt)
    return recurrent and all(name.what == "output" or known.is_inside(name) for name in request.wrt)


def side_by_side(parts: Sequence[Array | None]) -> Array | None:
    """Stack the first cotangent of each direction; zeros for a missing one, None if all are missing."""
    arrays = [None if part is None else to_host(part)[0] for part in parts]
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(parts) == 1:
        return present[0]
    filled = [np.zeros_like(present[0]) if array is None else array for array in arrays]
    return np.stack(filled, axis=direction_axis(dims_of(filled[0].shape)))
