"""Models that are one plain chain of well-known layers: known by their types, so that nothing has to be found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import keras
from keras.src.models.functional import Functional

from ...typing import Array
from ..protocol import ChainLink, Port
from .engines import current
from .found import as_found
from .functional import Pull, differentiate
from .values import value_of

_RECURRENT = (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)
#: Layers that pass their input on unchanged when not training.
_IDLE = (keras.layers.Dropout, keras.layers.SpatialDropout1D, keras.layers.GaussianNoise, keras.layers.Identity)


def chain(model: Any, *, training: bool) -> list[ChainLink] | None:
    """The layers from input to output, or None if the model is anything but such a chain.

    Exact types only: a subclass, an overridden ``call``, a second input, a mixed dtype or any other layer means None.
    """
    layers = _in_order(model)
    if layers is None:
        return None
    links = [_link(layer, training) for layer in layers]
    return None if any(link is None for link in links) else [link for link in links if link is not None]


def between(model: Any, of: Port, wrt: Port) -> Callable[[Array], tuple[Array, Pull]] | None:
    """The layers of a chain from one output to another, called one after the other; None for any other model."""
    layers = _in_order(model)
    if layers is None:
        return None
    names = [layer.name for layer in layers]
    first = 0 if wrt == Port("input") else _after(wrt, names)
    last = len(layers) if of == Port("output") else _after(of, names)
    if first is None or last is None or first >= last:
        return None
    engine = current()

    def called(tensor: Any) -> Any:
        with keras.StatelessScope(collect_losses=True):
            for layer in layers[first:last]:
                tensor = layer(tensor)
        return tensor

    def run(array: Array) -> tuple[Array, Pull]:
        with as_found(model, engine):
            value, pull = differentiate(called, [array], engine)

        def pulled(cotangent: Array) -> list[Array]:
            with as_found(model, engine):
                return pull(cotangent)

        return value, pulled

    return run


def _after(port: Port, names: Sequence[str]) -> int | None:
    """The place behind the layer that a tensor comes out of."""
    return names.index(port.layer) + 1 if port.kind == "output" and port.layer in names and not port.index else None


def _in_order(model: Any) -> list[Any] | None:
    if type(model) not in (keras.Sequential, Functional, keras.Model) or "call" in vars(model):
        return None
    operations = getattr(model, "operations", None) or getattr(getattr(model, "_functional", None), "operations", None)
    if operations is None or len(model.inputs) != 1 or len(model.outputs) != 1:
        return None
    operations = list(operations)
    for first, second in pairwise(operations):
        node = _node(second, model)
        if node is None or len(node.input_tensors) != 1:
            return None
        if node.input_tensors[0]._keras_history.operation is not first:
            return None
    return [op for op in operations if type(op) is not keras.layers.InputLayer]


def _node(operation: Any, model: Any) -> Any:
    """The one call of an operation; None if it was called more than once."""
    nodes = operation._inbound_nodes
    return nodes[0] if len(nodes) == 1 else None


def _link(layer: Any, training: bool) -> ChainLink | None:
    kind = type(layer)
    if not isinstance(layer, keras.layers.Layer) or "call" in vars(layer):
        return None
    if layer.compute_dtype != layer.variable_dtype:
        return None
    if kind in _RECURRENT:
        return None if layer.go_backwards or layer.return_state else ChainLink(layer.name, "recurrent")
    if kind is keras.layers.TimeDistributed and type(layer.layer) is keras.layers.Dense:
        return _dense(layer.layer, layer.name)
    if kind is keras.layers.Dense:
        return _dense(layer, layer.name)
    if kind is keras.layers.Embedding:
        return ChainLink(layer.name, "table")
    if kind in _IDLE and not training:
        return ChainLink(layer.name, "same")
    return None


def _dense(layer: Any, name: str) -> ChainLink | None:
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False) or "call" in vars(layer):
        return None
    activation = getattr(layer.activation, "__name__", "")
    if layer.activation is not getattr(keras.activations, activation, None):
        return None
    kernel, bias = value_of(layer.kernel), None if layer.bias is None else value_of(layer.bias)
    return ChainLink(name, "dense", kernel, bias, activation)
