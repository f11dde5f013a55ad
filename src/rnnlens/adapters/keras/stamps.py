"""Fingerprints that tell whether a compiled run still fits: of layers, of losses, of tensors."""

from __future__ import annotations

import types
import weakref
from typing import Any

import keras

_PLAIN = (bool, int, float, str, type(None))
#: Written by Keras while a layer runs or a model trains; says nothing about what it computes.
_VOLATILE = frozenset(
    [
        "_called",
        "_losses_override",
        "_dropout_mask",
        "_recurrent_dropout_mask",
        "train_function",
        "test_function",
        "predict_function",
        "stop_training",
        "stop_evaluating",
        "stop_predicting",
        "history",
        "optimizer",
        "_jax_state_synced",
        "_loss_tracker",
        "_compile_metrics",
        "_compile_loss",
    ]
)


class _Same:
    """Equal only to a stamp of the very same object; does not keep it alive."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._ref: Any = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._id == other._id and self._ref() is not None


def stamp(value: Any) -> Any:
    """A hashable fingerprint: plain values by value, functions with what they close over, the rest by identity."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, types.MethodType):
        return (_Same(value.__self__), stamp(value.__func__))
    if isinstance(value, types.FunctionType):
        return (_Same(value.__code__), *map(_shallow, _surroundings(value)))
    if isinstance(value, (list, tuple)):
        return tuple(stamp(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, stamp(item)) for key, item in value.items())
    return _Same(value)


def stamp_of_layers(model: Any) -> Any:
    """What the layers of a model are set to: rates, flags, activation functions, trainability, dtype."""
    return tuple(_stamp_of_layer(layer) for layer in model._flatten_layers())


def stamp_of_tensors(tree: Any) -> Any:
    """Structure, shapes and dtypes."""
    paths = keras.tree.flatten_with_path(tree)
    return tuple((path, None if t is None else (tuple(t.shape), str(t.dtype))) for path, t in paths)


def _stamp_of_layer(layer: Any) -> Any:
    settings = tuple(
        (name, _shallow(value))
        for name, value in vars(layer).items()
        if name not in _VOLATILE and (isinstance(value, _PLAIN) or callable(value))
    )
    return (_Same(layer), layer.dtype_policy.name, settings)


def _shallow(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else _Same(value)


def _surroundings(function: Any) -> list[Any]:
    """What a function reads from outside: cells, defaults, and the globals it names."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            cells.append(None)
    outer = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *outer]
