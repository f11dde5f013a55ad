"""Moves one tensor of a model a little, for the length of a block: to see by experiment what depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..protocol import Port
from .dialect import Dialect, dialect_of
from .discover import base_name, places
from .weights import named_variables


@contextmanager
def nudged(model: Any, port: Port, size: float) -> Iterator[bool]:
    """Within the block, add ``size`` times the tensor's own spread, in a fixed random pattern; False: not possible.

    A weight is assigned and assigned back, bit by bit; an output is moved by a method of the layer's instance.
    """
    found = places(model)
    layers = {**found.plain, **{site.name: site.owner for site in found.sites}}
    layer = layers.get(base_name(str(port.layer), found)) if port.layer is not None else None
    own = port.kind != "weight" or (layer is not None and port.key in named_variables(layer))
    if layer is None or not own or port.kind not in ("weight", "output"):
        yield False
        return
    moved = _moved_weight if port.kind == "weight" else _moved_output
    with moved(layer, port.key, size):
        yield True


@contextmanager
def _moved_weight(layer: Any, key: str, size: float) -> Iterator[None]:
    variable = named_variables(layer)[key]
    before = dialect_of(variable).value_of(variable)
    try:
        variable.assign(before + _pattern(before.shape, before, size))
        yield
    finally:
        variable.assign(before)


@contextmanager
def _moved_output(layer: Any, key: str, size: float) -> Iterator[None]:
    del key
    keras, original, own = dialect_of(layer), layer.call, vars(layer)
    had = own.get("call")

    def call(*args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(lambda tensor: _moved(keras, tensor, size), original(*args, **kwargs))

    own["call"] = call
    try:
        yield
    finally:
        own.pop("call")
        if had is not None:
            own["call"] = had


def _moved(keras: Dialect, tensor: Any, size: float) -> Any:
    if not keras.is_float(tensor):
        return tensor
    shape = tuple(1 if n is None else n for n in tensor.shape)
    spread = keras.ops.sqrt(keras.ops.mean(keras.ops.square(keras.ops.stop_gradient(tensor))))
    pattern = keras.ops.convert_to_tensor(_pattern(shape, np.ones(1), size), dtype=tensor.dtype)
    moved = tensor + pattern * (spread + keras.ops.cast(spread == 0, tensor.dtype))
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        moved._keras_mask = mask
    return moved


def _pattern(shape: tuple[int, ...], like: np.ndarray[Any, Any], size: float) -> np.ndarray[Any, Any]:
    spread = float(np.sqrt(np.mean(np.square(like, dtype=np.float64)))) or 1.0
    return np.asarray(size * spread * np.random.default_rng(0).normal(size=shape)).astype(like.dtype)
