"""Variants of a model: one tensor perturbed, weights re-initialised, a chain of layers run in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...typing import Array
from ..protocol import ChainLink, Port
from ..shared import Pull
from .dialect import Dialect, dialect_of
from .discover import locate_layers
from .pullback import differentiate
from .restore import borrowed, overriding
from .weights import named_variables


@contextmanager
def perturbed_port(model: Any, port: Port, size: float) -> Iterator[bool]:
    """Temporarily perturb a weight or a layer's output by ``size`` times its own spread.

    The pattern is random and fixed. Yields False if the port cannot be perturbed.

    A weight is restored exactly on exit. An output is perturbed by overriding ``call`` on the layer.
    """
    layer = None if port.layer is None else locate_layers(model).holder(port.layer)
    variable = named_variables(layer).get(port.key) if port.kind == "weight" and layer is not None else None
    if layer is None or (variable is None and port.kind != "output"):
        yield False
        return
    keras = dialect_of(layer)
    if variable is not None:
        original_value = keras.value_of(variable)
        try:
            variable.assign(original_value + _pattern(original_value.shape, original_value, size))
            yield True
        finally:
            variable.assign(original_value)
        return
    original = layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(
            lambda tensor: _perturbed_tensor(keras, tensor, size), original(*args, **kwargs)
        )

    with overriding() as override:
        override(layer, "call", call)
        yield True


def _perturbed_tensor(keras: Dialect, tensor: Any, size: float) -> Any:
    if not keras.is_float(tensor):
        return tensor
    shape = tuple(1 if n is None else n for n in tensor.shape)
    spread = keras.ops.sqrt(keras.ops.mean(keras.ops.square(keras.ops.stop_gradient(tensor))))
    pattern = keras.ops.convert_to_tensor(_pattern(shape, np.ones(1), size), dtype=tensor.dtype)
    perturbed = tensor + pattern * (spread + keras.ops.cast(spread == 0, tensor.dtype))
    return keras.with_mask(tensor, perturbed)


def _pattern(shape: tuple[int, ...], reference: np.ndarray[Any, Any], size: float) -> np.ndarray[Any, Any]:
    spread = float(np.sqrt(np.mean(np.square(reference, dtype=np.float64)))) or 1.0
    return np.asarray(size * spread * np.random.default_rng(0).normal(size=shape)).astype(reference.dtype)


def reinitialised(model: Any, seed: int) -> Any:
    """Return a model of the same configuration with newly drawn weights, or raise UnsupportedError."""
    keras = dialect_of(model)
    is_graph: Any = isinstance(model, keras.Sequential) or hasattr(model, "_functional")
    is_graph = is_graph or getattr(model, "_is_graph_network", False) or getattr(model, "_operations", None)
    try:
        with keras.seeded(seed):
            twin = keras.models.clone_model(model) if is_graph else type(model).from_config(model.get_config())
            if not twin.built:
                twin.build_from_config(model.get_build_config())
        if [tuple(v.shape) for v in keras.weights(twin)] != [tuple(v.shape) for v in keras.weights(model)]:
            raise ValueError("its weights have other shapes")
        loss = keras.compiled_loss(model) if isinstance(model, keras.Model) else None
        if loss is not None and not keras.is_compiled(twin):  # cloning may have compiled it
            twin.compile(loss=keras.user_loss(model), loss_weights=loss._user_loss_weights)
    except Exception as error:
        raise UnsupportedError(
            f"Model {model.name!r} cannot be rebuilt from its configuration.",
            got=f"{type(error).__name__}: {error}",
            hint="pass a copy of the model from before training: baseline=that_model",
        ) from error
    return twin


_RECURRENT_LAYERS = ("LSTM", "GRU", "SimpleRNN")
#: Layers that return their input unchanged when not training.
_IDENTITY_LAYERS = ("Dropout", "SpatialDropout1D", "GaussianNoise", "Identity")


def chain(model: Any, *, training: bool) -> list[ChainLink] | None:
    """Return the layers of a model that is a plain chain of well-known layers, from input to output; else None.

    Returns None also for a subclass of a well-known layer, an overridden ``call``, a second input or mixed dtypes.
    """
    keras = dialect_of(model)
    layers = keras.layers_in_order(model)
    if layers is None:
        return None
    links = [_link(keras, layer, training) for layer in layers]
    return None if any(link is None for link in links) else [link for link in links if link is not None]


def subnetwork(model: Any, of: Port, wrt: Port) -> Callable[[Array], tuple[Array, Pull]] | None:
    """Return a function that runs and differentiates a chain of layers between two ports; None for any other model."""
    keras = dialect_of(model)
    layers = keras.layers_in_order(model)
    if layers is None:
        return None
    names = [layer.name for layer in layers]
    start = 0 if wrt == Port("input") else _layer_count_until(wrt, names)
    end = len(layers) if of == Port("output") else _layer_count_until(of, names)
    if start is None or end is None or start >= end:
        return None

    def run_layers(tensor: Any) -> Any:
        with keras.variables_substituted(model, None, keras.seed_tensors(model, None), {}, lambda key, tensor: tensor):
            for layer in layers[start:end]:
                tensor = layer(tensor)
        return tensor

    def run(array: Array) -> tuple[Array, Pull]:
        with borrowed(model, keras):
            value, pull = differentiate(run_layers, [array], keras)

        def pull_and_restore(cotangent: Array) -> list[Array]:
            with borrowed(model, keras):
                return pull(cotangent)

        return value, pull_and_restore

    return run


def _layer_count_until(port: Port, names: Sequence[str]) -> int | None:
    """Return how many layers of a chain compute ``port``, the output of one of them; None for other ports."""
    return names.index(port.layer) + 1 if port.kind == "output" and port.layer in names and not port.index else None


def _existing_classes(keras: Dialect, names: Sequence[str]) -> list[type]:
    return [getattr(keras.layers, name) for name in names if hasattr(keras.layers, name)]


def _link(keras: Dialect, layer: Any, training: bool) -> ChainLink | None:
    kind = type(layer)
    if (
        not isinstance(layer, keras.layers.Layer)
        or "call" in vars(layer)
        or layer.compute_dtype != layer.variable_dtype
    ):
        return None
    if kind in _existing_classes(keras, _RECURRENT_LAYERS):
        is_unsupported = layer.go_backwards or layer.return_state or keras.time_major(layer)
        return None if is_unsupported else ChainLink(layer.name, "recurrent")
    dense = layer.layer if kind is keras.layers.TimeDistributed else layer
    if type(dense) is keras.layers.Dense:
        return _dense(keras, dense, layer.name)
    if kind is keras.layers.Embedding:
        return ChainLink(layer.name, "table")
    if kind in _existing_classes(keras, _IDENTITY_LAYERS) and not training:
        return ChainLink(layer.name, "same")
    return None


def _dense(keras: Dialect, layer: Any, name: str) -> ChainLink | None:
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False) or "call" in vars(layer):
        return None
    activation = getattr(layer.activation, "__name__", "")
    if layer.activation is not getattr(keras.activations, activation, None):
        return None
    bias = None if layer.bias is None else keras.value_of(layer.bias)
    return ChainLink(name, "dense", keras.value_of(layer.kernel), bias, activation)
