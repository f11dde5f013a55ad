"""Recording of a model by the tensors at the ports of its layers: for frameworks without hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import LayerNotFoundError, ModelError, UnsupportedError, did_you_mean
from ...typing import Array, leaves_of
from .adapter import Adapter
from .data import Batch, Port
from .facts import LayerWeights
from .run import Capture, NonRecurrentCall, Outputs, RecurrentCall, Run, Taps

_LOSS = Port("loss")


class RunByPorts(Run):
    """Run of a model whose adapter knows the tensors at ports; outputs and calls of layers are read off these.

    A subclass defines :meth:`tensors`, :meth:`Run.pull` for the ports of its taps, and :meth:`Run.reference`. Only
    known cells that run forwards, once in each pass, without a mask, can be recorded.
    """

    def __init__(self, adapter: Adapter, model: Any, batch: Batch, taps: Taps) -> None:
        self.adapter, self.model, self.batch, self.taps = adapter, model, batch, taps

    @abstractmethod
    def tensors(self) -> Mapping[Port, Array]:
        """Run the model, cut at the ports ``taps.cut``, and return the values at all its ports."""

    @cached_property
    def values(self) -> Mapping[Port, Array]:  # type: ignore[override]
        """Values at the ports of the taps."""
        tensors, ports = self.tensors(), (*self.taps.of, *self.taps.wrt)
        if absent := [port for port in ports if port not in tensors]:
            raise LayerNotFoundError(f"This model has no {absent[0]}.")
        return {port: tensors[port] for port in ports}

    @cached_property
    def capture(self) -> Capture:  # type: ignore[override]
        """Calls of the layers of the taps, with gradients as these say."""
        return _capture_by_ports(self.adapter, self.model, self.batch, self.taps)

    @cached_property
    def outputs(self) -> Outputs:  # type: ignore[override]
        """Outputs of the model."""
        ports = _output_ports(self.adapter, self.model)
        with self.adapter.run(self.model, self.batch, Taps.ports((), ports)) as run:
            leaves = [run.values[port] for port in ports]
        return Outputs(leaves, leaves if len(leaves) > 1 else leaves[0])

    @property
    def returned(self) -> Any:
        """Outputs of the model; a list of several."""
        return self.outputs.tree


def _output_ports(adapter: Adapter, model: Any) -> list[Port]:
    return [Port("output", index=i) for i in range(max(1, len(adapter.facts(model).outputs)))]


def _capture_by_ports(adapter: Adapter, model: Any, batch: Batch, taps: Taps) -> Capture:
    """Record calls of layers by one run whose loss is pulled back to the ports of these layers."""
    recurrent_layers, other_layers = _requested_layers(adapter, model, taps)
    weights = adapter.weights(model)
    weight_owners = weights if taps.boundaries else recurrent_layers
    weight_ports = [Port("weight", name, key=key) for name in weight_owners for key in weights[name].values]
    input_ports = [Port("input", index=i) for i in range(len(leaves_of(batch.x)))]
    output_ports, facts = _output_ports(adapter, model), adapter.facts(model, batch)
    other_ports = {name: Port("output", name) for name in other_layers}
    boundary_ports = [port for name in recurrent_layers for port in _boundary_ports(name, weights[name])]
    ports = [*boundary_ports, *other_ports.values(), *input_ports, *output_ports, *weight_ports]
    loss_ports = [_LOSS] if taps.needs_loss else []
    with adapter.run(model, batch, Taps.ports(loss_ports, ports)) as run:
        values, grads = dict(run.values), dict[Port, Array]()
        loss_gradients = run.pull({_LOSS: np.ones(1)}) if taps.gradients else {}
        for port, grad in loss_gradients.items():  # zeros without a path
            grads[port] = np.zeros(tuple(values[port].shape)) if grad is None else grad[0]
    capture = Capture([_recurrent_call(name, weights[name], values, grads, taps) for name in recurrent_layers])
    capture.loss = float(values[_LOSS]) if loss_ports else None
    capture.other_calls = [NonRecurrentCall(name, values[port], grads.get(port)) for name, port in other_ports.items()]
    capture.outputs = [values[port] for port in output_ports] if len(output_ports) > 1 else values[output_ports[0]]
    if taps.boundaries:
        capture.input_grads = [grads[port] for port in input_ports]
        locations = {port: facts.weight_location(str(port.layer), None, port.key) for port in weight_ports}
        capture.outside_weight_grads = {
            location.name: grads[port] for port, location in locations.items() if location is not None
        }
        capture.full_gradient_names = frozenset(capture.outside_weight_grads)
    return capture


def _requested_layers(adapter: Adapter, model: Any, taps: Taps) -> tuple[list[str], list[str]]:
    """Return the names of the requested recurrent layers, and of the requested other layers."""
    infos = {info.name: info for info in adapter.describe(model)}
    layer_names = list(dict.fromkeys([*infos, *adapter.facts(model).submodules]))
    if taps.layers is None and not infos:
        raise ModelError("There is no recurrent layer in this model.", hint=f"name a layer: {', '.join(layer_names)}")
    requested = list(infos if taps.layers is None else dict.fromkeys(n.partition("#")[0] for n in taps.layers))
    for name in requested:
        if name not in layer_names:
            raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, layer_names))
        if name in infos and (infos[name].direction != "forward" or infos[name].masked):
            raise UnsupportedError(
                f"Layer {name!r} cannot be traced inside: the adapter of {adapter.name} gives its input and "
                "output only.",
                got="a mask, or a recurrence that runs backwards",
                expected="one that runs forwards over every step",
            )
    return [name for name in requested if name in infos], [name for name in requested if name not in infos]


def _boundary_ports(name: str, weights: LayerWeights) -> list[Port]:
    """Return the ports of a recurrent layer: input, output and initial states."""
    states = range(len(weights.cells["forward"].states))
    return [Port("input", name), Port("output", name), *(Port("initial_state", name, i) for i in states)]


def _recurrent_call(
    name: str, weights: LayerWeights, values: Mapping[Port, Array], grads: Mapping[Port, Array], taps: Taps
) -> RecurrentCall:
    input_port, output_port, *initial_ports = _boundary_ports(name, weights)
    weight_grads = {key: grads[Port("weight", name, key=key)] for key in weights.values} if taps.gradients else None
    return RecurrentCall(
        layer=name,
        direction="forward",
        cell=weights.cells["forward"],
        input=values[input_port],
        initial_state=tuple(values[port] for port in initial_ports),
        output=values[output_port],
        output_grad=grads.get(output_port),
        weights_key=name,
        weight_grads=weight_grads if taps.weight_grads else None,
        framework_input_grad=grads[input_port] if taps.boundaries else None,
        framework_initial_state_grad=tuple(grads[port] for port in initial_ports) if taps.boundaries else None,
    )
