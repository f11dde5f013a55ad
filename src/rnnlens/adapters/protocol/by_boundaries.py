"""A capture built from one pull-back, for frameworks that expose recurrent layers only at their boundaries.

It supports known cells that run forwards, once in each pass, without a mask. Other adapters override ``capture``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import LayerNotFoundError, ModelError, UnsupportedError, did_you_mean, message
from ...trees import leaves_of
from ...typing import Array
from .captured import Batch, Capture, CaptureRequest, NonRecurrentCall, RecurrentCall
from .facts import LayerWeights
from .ports import Port

if TYPE_CHECKING:
    from .adapter import Adapter

_LOSS = Port("loss")


def capture_by_boundaries(adapter: Adapter, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
    """Capture a model by one pull-back at the boundaries of its layers; implements :meth:`Adapter.capture`."""
    recurrent, others = _chosen(adapter, model, request)
    weights = adapter.weights(model)
    kernels = _ports_of(weights if request.boundaries else {name: weights[name] for name in recurrent})
    inputs = [Port("input", index=i) for i in range(len(leaves_of(batch.x)))]
    outputs = [Port("output", index=i) for i in range(max(1, len(adapter.facts(model).outputs)))]
    plain = {name: Port("output", name) for name in others}
    boundaries = [port for name in recurrent for port in _boundaries(name, weights[name])]
    run = _Run(adapter, model, batch, [*boundaries, *plain.values(), *inputs, *outputs, *kernels], request)
    told = Capture([_call(name, weights[name], run, request) for name in recurrent], loss=run.loss)
    told.plain = [NonRecurrentCall(name, run.values[port], run.grads.get(port)) for name, port in plain.items()]
    told.outputs = [run.values[port] for port in outputs] if len(outputs) > 1 else run.values[outputs[0]]
    if request.gradients and request.boundaries:
        told.input_grads = [run.grads[port] for port in inputs]
        places = {port: adapter.place(model, str(port.layer), None, port.key) for port in kernels}
        told.beside = {place.name: run.grads[port] for port, place in places.items() if place is not None}
        told.whole = frozenset(told.beside)
    return told


def _chosen(adapter: Adapter, model: Any, request: CaptureRequest) -> tuple[list[str], list[str]]:
    """Return the names of the requested recurrent layers, and of the requested other layers."""
    infos = {info.name: info for info in adapter.describe(model)}
    known = list(dict.fromkeys([*infos, *adapter.facts(model).submodules]))
    if request.layers is None and not infos:
        raise ModelError(
            message("There is no recurrent layer in this model.", hint=f"name a layer: {', '.join(known)}")
        )
    asked = list(infos if request.layers is None else dict.fromkeys(n.partition("#")[0] for n in request.layers))
    for name in asked:
        if name not in known:
            raise LayerNotFoundError(message(f"No layer is called {name!r}.", hint=did_you_mean(name, known)))
        if name in infos and (infos[name].direction != "forward" or infos[name].masked):
            raise UnsupportedError(
                message(
                    f"Layer {name!r} cannot be traced inside: the adapter of {adapter.name} gives its input and "
                    "output only.",
                    got="a mask, or a recurrence that runs backwards",
                    expected="one that runs forwards over every step",
                )
            )
    return [name for name in asked if name in infos], [name for name in asked if name not in infos]


def _ports_of(weights: Mapping[str, LayerWeights]) -> list[Port]:
    return [Port("weight", layer, key=key) for layer, own in weights.items() for key in own.values]


def _boundaries(name: str, weights: LayerWeights) -> list[Port]:
    """Return the ports of a recurrent layer: input, output and initial states."""
    states = range(len(weights.cells["forward"].states))
    return [Port("input", name), Port("output", name), *(Port("initial_state", name, i) for i in states)]


class _Run:
    """One pull-back of the model: port values and, with gradients, the loss gradients (zeros without a path)."""

    def __init__(
        self, adapter: Adapter, model: Any, batch: Batch, ports: Sequence[Port], request: CaptureRequest
    ) -> None:
        self.grads: dict[Port, Array] = {}
        of = [_LOSS] if request.gradients or request.loss else []
        with adapter.pullback(model, batch, of, ports) as back:
            self.values = dict(back.values)
            self.loss = float(back.values[_LOSS]) if of else None
            if request.gradients:
                found = back.vjp({_LOSS: np.ones(1)})
                zeros = {port: np.zeros(tuple(self.values[port].shape)) for port in ports if found[port] is None}
                self.grads = {port: zeros[port] if grad is None else grad[0] for port, grad in found.items()}


def _call(name: str, weights: LayerWeights, run: _Run, request: CaptureRequest) -> RecurrentCall:
    below, above, *initial = _boundaries(name, weights)
    asked = request.gradients and request.boundaries
    named = {key: run.grads[Port("weight", name, key=key)] for key in weights.values} if request.gradients else None
    return RecurrentCall(
        layer=name,
        direction="forward",
        cell=weights.cells["forward"],
        input=run.values[below],
        initial_state=tuple(run.values[port] for port in initial),
        output=run.values[above],
        output_grad=run.grads.get(above),
        weights_key=name,
        weight_grads=named if request.weight_grads else None,
        framework_input_grad=run.grads[below] if asked else None,
        framework_initial_state_grad=tuple(run.grads[port] for port in initial) if asked else None,
    )
