"""Experiments on a model and one batch: perturb a tensor and compare the target. Each runs once, when needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Capture, CaptureRequest, Port
from ...autodiff.tensors import dtype_name, like
from ...errors import LayerNotFoundError, RnnlensError
from ...layout import dims_of, direction_axis
from ...results.schema import to_host
from ...typing import Array
from ..axes import BatchAxes
from ..names import Catalogue, TensorName
from ..recurrent_layers import ReplayedLayers, outputs_of, runs
from ..weight_layout import sources
from .request import BatchTarget, GradientRequest
from .target import Target


def observed_value(request: GradientRequest, part: BatchTarget) -> Array:
    """Return the value of the target on one batch, from one captured forward pass."""
    batch, with_loss = part.batch, request.with_loss
    layers = tuple(dict.fromkeys(str(leaf.layer) for leaf in request.leaves if leaf.layer is not None))
    wanted = CaptureRequest(layers or _any_layer(request), gradients=with_loss, weight_grads=False)
    batch = batch if with_loss else batch.without_loss()
    capture = request.adapter.capture(request.model, batch, wanted)
    outside = BatchAxes(request.axes, request.axes.samples(batch))
    values = [_leaf(request, leaf, capture, outside) for leaf in request.leaves]
    return np.asarray(request.evaluate(part.target, outside, values)[0], dtype=np.float64)


def _any_layer(request: GradientRequest) -> tuple[str, ...] | None:
    """Return any layer to capture when only the model's output is needed; None for all recurrent layers."""
    known = request.known
    return None if known.recurrent else (*known.weights, *known.layers)[:1]


def _leaf(request: GradientRequest, leaf: TensorName, capture: Capture, outside: BatchAxes) -> xr.DataArray:
    value = _value(request, leaf, capture)
    if request.known.is_free(leaf):
        opened, names = outside.opened(leaf.port(), value)
        return xr.DataArray(opened, dims=names)
    return xr.DataArray(value, dims=request.known.dims(leaf, value))


def _value(request: GradientRequest, leaf: TensorName, capture: Capture) -> Array:
    if leaf.what == "loss":
        return np.asarray(capture.loss)
    if request.known.is_inside(leaf):
        return ReplayedLayers.of(capture.calls).value(leaf)
    if leaf.layer is None:
        return to_host(data.leaves_of(capture.outputs)[leaf.index])
    for call in capture.plain:
        if call.layer == leaf.layer:
            return to_host(call.output)
    replayed_calls = [to_host(call.output) for call in capture.calls if call.layer == leaf.layer]
    if not replayed_calls:
        raise LayerNotFoundError(f"Layer {leaf.layer!r} was not called in this forward pass.")
    return (
        replayed_calls[0]
        if len(replayed_calls) == 1
        else np.stack(replayed_calls, axis=direction_axis(dims_of(replayed_calls[0].shape)))
    )


#: Relative sizes of perturbations. The responses of a smooth target to the last two have about the same ratio.
MUCH, LITTLE, LESS = 1.0, 1e-2, 1e-3

Response = Literal["smoothly", "in jumps", "not", "unknown"]


class Experiments:
    """Perturbation experiments on a model, one batch and one target, with cached results."""

    def __init__(self, request: GradientRequest, part: BatchTarget) -> None:
        self.request, self.part = request, part
        self.batch, self.target = part.batch, part.target
        #: Masks of all batches of a data set by layer; None before they are read.
        self.masks_of_all: dict[str, Array] | None = None
        self._values: dict[str, Array] = {}
        self._answers: dict[tuple[str, Port], Response] = {}
        self._runs: dict[str, bool] = {}

    def response(
        self, name: TensorName, request: GradientRequest | None = None, target: Target | None = None
    ) -> Response:
        """Return how a target responds to perturbations of a tensor, or of its layer's output if it lies inside.

        ``request`` and ``target`` replace those of the experiments.
        """
        request, target = request or self.request, target or self.target
        port = port_to_perturb(name, request.known)
        key = (target.text, port)
        if key not in self._answers:
            self._answers[key] = self._experiment(port, request, target)
        return self._answers[key]

    def runs(self, layer: str) -> bool:
        """Return whether a layer is called in this forward pass."""
        if layer not in self._runs:
            self._runs[layer] = runs(self.request.adapter, self.request.model, self.batch, layer)
        return self._runs[layer]

    @cached_property
    def masks(self) -> dict[str, Array]:
        """Masks by node, of the recurrent layers that have one."""
        try:
            wanted = CaptureRequest(None, gradients=False, weight_grads=False)
            capture = self.request.adapter.capture(self.request.model, self.batch.without_loss(), wanted)
        except RnnlensError:
            return {}
        return {call.layer: to_host(call.mask) for call in capture.calls if call.mask is not None}

    @cached_property
    def dead_relus(self) -> Mapping[str, int]:
        """Relu layers whose outputs are all exactly 0, with the number of outputs."""
        relus = self.request.known.facts.having("relu")
        found = outputs_of(self.request.adapter, self.request.model, self.batch, relus) if relus else {}
        return {name: int(output.size) for name, output in found.items() if output.size and not output.any()}

    def _experiment(self, port: Port, request: GradientRequest, target: Target) -> Response:
        reduce = "sum" if target.per_sample and target.reduce is None else target.reduce
        part = BatchTarget(self.batch, replace(target, per_sample=False, reduce=reduce))
        if target.text not in self._values:
            self._values[target.text] = observed_value(request, part)
        moves = []
        for size in (MUCH, LITTLE, LESS):
            value = self._perturbed_value(port, size, request, part)
            if value is None:
                return "unknown"
            moves.append(float(np.abs(value - self._values[target.text]).max()))
        much, little, less = moves
        if not much and not little:
            return "not"
        return "smoothly" if less and LITTLE / LESS / 3 < little / less < 3 * LITTLE / LESS else "in jumps"

    def _perturbed_value(self, port: Port, size: float, request: GradientRequest, part: BatchTarget) -> Array | None:
        if port.kind == "input":
            moved = replace(part.batch, x=_moved_input(part.batch.x, port.index, size))
            return observed_value(request, replace(part, batch=moved))
        with request.adapter.perturbed_port(request.model, port, size) as possible:
            return observed_value(request, part) if possible else None


def port_to_perturb(name: TensorName, known: Catalogue) -> Port:
    """Return the port to perturb in an experiment on a tensor."""
    if name.what == "weight":
        return Port("weight", str(name.layer), key=sources(known.weights[str(name.layer)])[name.key][0].key)
    if name.layer is None:
        return Port("input", index=name.index)
    return Port("output", name.layer.partition("#")[0])


def _moved_input(x: Any, index: int, size: float) -> Any:
    """Perturb one input of the batch by a fixed random pattern of relative size ``size``; integers stay unchanged."""
    position = -1

    def move(leaf: Any) -> Any:
        nonlocal position
        position += 1
        if position != index or is_integer(leaf):
            return leaf
        array = to_host(leaf)
        spread = float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) or 1.0
        moved = array + (size * spread * np.random.default_rng(0).normal(size=array.shape)).astype(array.dtype)
        return like(moved, leaf)

    return data.map_leaves(move, x)


def is_integer(leaf: Any) -> bool:
    """Return whether an array has an integer or bool dtype, so that it has no gradient."""
    return not any(word in dtype_name(leaf) for word in ("float", "complex"))
