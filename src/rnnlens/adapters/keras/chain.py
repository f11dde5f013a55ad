"""Models that are one plain chain of well-known layers: known by their types, so that nothing has to be found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...typing import Array
from ..protocol import ChainLink, Port
from .dialect import Dialect, dialect_of
from .found import as_found
from .functional import Pull, differentiate

_RECURRENT = ("LSTM", "GRU", "SimpleRNN")
#: Layers that pass their input on unchanged when not training.
_IDLE = ("Dropout", "SpatialDropout1D", "GaussianNoise", "Identity")


def chain(model: Any, *, training: bool) -> list[ChainLink] | None:
    """The layers from input to output, or None if the model is anything but such a chain.

    Exact types only: a subclass, an overridden ``call``, a second input, a mixed dtype or any other layer means None.
    """
    keras = dialect_of(model)
    layers = keras.in_order(model)
    if layers is None:
        return None
    links = [_link(keras, layer, training) for layer in layers]
    return None if any(link is None for link in links) else [link for link in links if link is not None]


def between(model: Any, of: Port, wrt: Port) -> Callable[[Array], tuple[Array, Pull]] | None:
    """The layers of a chain from one output to another, called one after the other; None for any other model."""
    keras = dialect_of(model)
    layers = keras.in_order(model)
    if layers is None:
        return None
    names = [layer.name for layer in layers]
    first = 0 if wrt == Port("input") else _after(wrt, names)
    last = len(layers) if of == Port("output") else _after(of, names)
    if first is None or last is None or first >= last:
        return None

    def called(tensor: Any) -> Any:
        with keras.running(model, None, keras.seeds(model, None), {}, lambda key, tensor: tensor):
            for layer in layers[first:last]:
                tensor = layer(tensor)
        return tensor

    def run(array: Array) -> tuple[Array, Pull]:
        with as_found(model, keras):
            value, pull = differentiate(called, [array], keras)

        def pulled(cotangent: Array) -> list[Array]:
            with as_found(model, keras):
                return pull(cotangent)

        return value, pulled

    return run


def _after(port: Port, names: Sequence[str]) -> int | None:
    """The place behind the layer that a tensor comes out of."""
    return names.index(port.layer) + 1 if port.kind == "output" and port.layer in names and not port.index else None


def _among(keras: Dialect, names: Sequence[str]) -> list[type]:
    return [getattr(keras.layers, name) for name in names if hasattr(keras.layers, name)]


def _link(keras: Dialect, layer: Any, training: bool) -> ChainLink | None:
    kind = type(layer)
    if not isinstance(layer, keras.layers.Layer) or "call" in vars(layer):
        return None
    if layer.compute_dtype != layer.variable_dtype:
        return None
    if kind in _among(keras, _RECURRENT):
        odd = layer.go_backwards or layer.return_state or keras.time_major(layer)
        return None if odd else ChainLink(layer.name, "recurrent")
    if kind is keras.layers.TimeDistributed and type(layer.layer) is keras.layers.Dense:
        return _dense(keras, layer.layer, layer.name)
    if kind is keras.layers.Dense:
        return _dense(keras, layer, layer.name)
    if kind is keras.layers.Embedding:
        return ChainLink(layer.name, "table")
    if kind in _among(keras, _IDLE) and not training:
        return ChainLink(layer.name, "same")
    return None


def _dense(keras: Dialect, layer: Any, name: str) -> ChainLink | None:
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False) or "call" in vars(layer):
        return None
    activation = getattr(layer.activation, "__name__", "")
    if layer.activation is not getattr(keras.activations, activation, None):
        return None
    kernel, bias = keras.value_of(layer.kernel), None if layer.bias is None else keras.value_of(layer.bias)
    return ChainLink(name, "dense", kernel, bias, activation)
