"""Models that are one plain chain of well-known layers: known by their types, so that nothing has to be found out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
from keras.src.models.functional import Functional

from ..protocol import ChainLink
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
