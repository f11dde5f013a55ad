"""Plan of a gradient: for each tensor, ports of the framework or a sweep through a recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...adapters.protocol import Port
from ..names import Catalogue, TensorName, uncalled_layer
from ..recurrent_layers import ReplayedLayers
from ..weight_layout import sources
from .request import BatchRequest


@dataclass(frozen=True)
class TensorAccess:
    """Access to one tensor: by a sweep, or at ports of the framework."""

    name: TensorName
    #: True if a sweep of rnnlens is needed, as the framework has no such tensor.
    is_swept: bool
    #: True for an input or output of the model or of a non-recurrent layer. It has the framework's own layout, in which
    #: samples may be on any axis.
    is_free: bool
    #: True for a state of a cell that the user's own loop calls. The framework has it at every step.
    stepwise: bool
    #: The ports that together are the tensor: one, or one per direction; empty if it is swept.
    ports: tuple[Port, ...]
    #: The ports from which the framework differentiates on, towards the inputs of the model.
    lower_ports: tuple[Port, ...]
    #: The ports at which the gradients arrive that give the gradient of this tensor.
    upper_ports: tuple[Port, ...]


@dataclass(frozen=True)
class GradientPlan:
    """Ports and sweeps that gradients on one batch need."""

    #: The tensors of the target, where differentiation starts.
    leaves: tuple[TensorAccess, ...]
    #: The tensors to differentiate by.
    wrt: tuple[TensorAccess, ...]
    #: Ports of the model's outputs if the loss is split by sample there; else empty.
    outputs: tuple[Port, ...] = ()

    @cached_property
    def starts(self) -> list[Port]:
        """Ports at which the framework's differentiation starts."""
        return list(dict.fromkeys([*(port for access in self.leaves for port in access.lower_ports), *self.outputs]))

    @cached_property
    def ends(self) -> list[Port]:
        """Ports at which the framework's differentiation ends."""
        return list(dict.fromkeys([*(port for access in self.wrt for port in access.upper_ports), *self.outputs]))

    @cached_property
    def weights(self) -> dict[TensorName, tuple[Port, ...]]:
        """Requested weights, each with the ports of the framework weights that it consists of."""
        return {access.name: access.upper_ports for access in self.wrt if access.name.kind == "weight"}

    @cached_property
    def activations(self) -> tuple[TensorAccess, ...]:
        """Requested tensors that are not weights."""
        return tuple(access for access in self.wrt if access.name.kind != "weight")

    @property
    def free_ports(self) -> list[Port]:
        """Ports of tensors in the framework's own layout, whose axes have to be determined."""
        accesses = [*self.leaves, *self.wrt]
        return [*(access.name.port() for access in accesses if access.is_free), *self.outputs]


def plan(request: BatchRequest, replayed_layers: ReplayedLayers) -> GradientPlan:
    """Find the ports or the sweep that differentiates each tensor of a request."""
    outputs: tuple[Port, ...] = ()
    if request.target.per_sample and request.leaves[0].kind == "loss":
        outputs = tuple(Port("output", index=i) for i in range(max(1, len(request.catalogue.outputs))))
    leaves = tuple(
        _at_output(name)
        if name in request.framework_states
        else _access_of_tensor(name, request.catalogue, replayed_layers)
        for name in request.leaves
    )
    return GradientPlan(
        leaves, tuple(_access_of_tensor(name, request.catalogue, replayed_layers) for name in request.wrt), outputs
    )


def layers_inside(request: BatchRequest) -> list[str]:
    """Return the recurrent layers that must be captured and replayed for a gradient request."""
    names = [*(name for name in request.leaves if name not in request.framework_states), *request.wrt]
    return [str(name.layer) for name in names if request.catalogue.is_inside(name)]


def _at_output(name: TensorName) -> TensorAccess:
    """Return the ``TensorAccess`` of a state that is read at its layer's output, since it equals that at every step."""
    ports = (Port("output", name.layer),)
    return TensorAccess(name, False, False, False, ports, ports, ports)


def _access_of_tensor(name: TensorName, catalogue: Catalogue, replayed_layers: ReplayedLayers) -> TensorAccess:
    stepwise = replayed_layers.is_stepwise(name)
    swept = catalogue.is_inside(name) and not stepwise
    common_fields = (name, swept, catalogue.is_free(name), stepwise)
    if name.kind == "weight":
        weight_sources = sources(catalogue.weights[str(name.layer)])[name.key]
        ports = tuple(Port("weight", name.layer, key=source.key) for source in weight_sources)
        return TensorAccess(*common_fields, ports, ports, ports)
    if swept:
        directions = replayed_layers.layer(name.layer)
        below = tuple(port for replayed in directions for port in replayed.lower_ports())
        above = tuple(port for replayed in directions for port in replayed.reader_ports())
        return TensorAccess(*common_fields, (), below, above)
    info = catalogue.recurrent.get(uncalled_layer(name.layer))
    if name.kind == "output" and info is not None and info.direction == "bidirectional":
        own_ports: tuple[Port, ...] = (name.port("forward"), name.port("backward"))
    else:
        own_ports = (Port(name.kind, name.layer, name.index) if stepwise else name.port(),)  # type: ignore[arg-type]
    # The total gradient of a final state of a stepwise layer arrives at a port of its own.
    above = tuple(
        Port("state", port.layer, port.index, key="ending") if port.kind == "final_state" else port
        for port in own_ports
    )
    return TensorAccess(*common_fields, own_ports, own_ports, above)
