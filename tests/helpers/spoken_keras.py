"""The Keras package under test: Keras 3, or the package that ``RNNLENS_TESTED_KERAS`` names.

Tests that both have to pass are written for Keras 3; this module gives Keras 2 the same names.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

PACKAGE = os.environ.get("RNNLENS_TESTED_KERAS", "keras")
LEGACY = PACKAGE == "tf_keras"


class _Legacy:
    """``tf_keras`` with the names of Keras 3."""

    def __init__(self) -> None:
        import tensorflow as tf
        import tf_keras

        self._package = tf_keras
        self.Variable = tf.Variable
        self.ops = SimpleNamespace(
            sum=tf.reduce_sum, mean=tf.reduce_mean, square=tf.square, multiply=tf.multiply, sigmoid=tf.sigmoid,
            tanh=tf.tanh, matmul=tf.matmul, concatenate=tf.concat, zeros=tf.zeros, exp=tf.exp, abs=tf.abs,
            stop_gradient=tf.stop_gradient, ones_like=tf.ones_like,
            log=tf.math.log, relu=tf.nn.relu, split=tf.split, where=tf.where, stack=tf.stack, reshape=tf.reshape,
            softmax=tf.nn.softmax, expand_dims=tf.expand_dims, ones=tf.ones, transpose=tf.transpose,
            convert_to_tensor=tf.convert_to_tensor, convert_to_numpy=lambda t: np.array(t), cast=tf.cast,
        )  # fmt: skip
        self.tree = tf.nest
        self.DTypePolicy = tf_keras.mixed_precision.Policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)


keras: Any = _Legacy() if LEGACY else importlib.import_module("keras")


def engine() -> str:
    """Return the engine of the Keras under test."""
    return "tensorflow" if LEGACY else str(keras.backend.backend())


def gradient(function: Any, array: Any) -> Any:
    """Return the engine's gradient of a scalar function of one array."""
    if engine() == "jax":
        import jax

        return np.asarray(jax.grad(function)(array))
    if engine() == "torch":
        import torch

        tensor = torch.tensor(array, requires_grad=True)
        return torch.autograd.grad(function(tensor), tensor)[0].numpy()
    import tensorflow as tf

    tensor = tf.constant(array)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        value = function(tensor)
    return tape.gradient(value, tensor).numpy()


def keras_adapter() -> Any:
    """Return the rnnlens adapter of the Keras under test."""
    package = importlib.import_module("rnnlens.adapters.keras")
    return package.legacy if LEGACY else package.adapter


def path_of(variable: Any) -> str:
    """Return the path of a variable, such as ``"lstm/lstm_cell/kernel"``."""
    return variable.name.partition(":")[0] if LEGACY else variable.path


def states_of(model: Any) -> list[Any]:
    """Return the state variables of stateful layers."""
    if not LEGACY:
        return [v for v in model.variables if v.name == "rnn_state"]
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    return [v for layer in layers for v in keras.tree.flatten(getattr(layer, "states", [])) if v is not None]


@contextmanager
def restored_states(model: Any) -> Iterator[None]:
    """Restore the states of stateful Keras 2 layers after the block; Keras 3 has scopes for that."""
    states = [*states_of(model), *model.non_trainable_variables] if LEGACY else []
    before = [v.numpy() for v in states]
    yield
    for variable, value in zip(states, before, strict=True):
        variable.assign(value)


def floatx() -> str:
    """Return the default float dtype."""
    return keras.backend.floatx() if LEGACY else keras.config.floatx()


def set_floats(dtype: str) -> None:
    """Set the default float dtype."""
    if LEGACY:
        keras.backend.set_floatx(dtype)
        keras.mixed_precision.set_global_policy(dtype)
    else:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)  # Keras keeps the policy of the process's first layer
