"""TensorFlow's operations under the names of Keras 3 and of the array-API standard; losses without metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest
from tf_keras.src.engine.compile_utils import LossesContainer

from ...autodiff.tensors import to_numpy
from ..shared import substitute_in_this_thread


class Ops:
    """Operations of TensorFlow under the names of ``keras.ops``."""

    cast, stack, stop_gradient, zeros, zeros_like = tf.cast, tf.stack, tf.stop_gradient, tf.zeros, tf.zeros_like
    sum, mean, sqrt, square = tf.reduce_sum, tf.reduce_mean, tf.sqrt, tf.square
    is_tensor, convert_to_numpy = tf.is_tensor, staticmethod(to_numpy)

    @staticmethod
    def convert_to_tensor(value: Any, dtype: Any = None) -> Any:
        """Convert ``value`` to a tensor and, if ``dtype`` is given, cast it."""
        tensor = tf.convert_to_tensor(value)
        return tensor if dtype is None else tf.cast(tensor, dtype)


class Tree:
    """Functions of ``tf.nest`` under the names of ``keras.tree``."""

    flatten, map_structure = tf.nest.flatten, tf.nest.map_structure
    pack_sequence_as, is_nested = tf.nest.pack_sequence_as, tf.nest.is_nested
    flatten_with_path = nest.flatten_with_tuple_paths


_RENAMED = {
    "concat": tf.concat,
    "permute_dims": tf.transpose,
    "astype": tf.cast,
    "asarray": tf.convert_to_tensor,
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "prod": tf.reduce_prod,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "expand_dims": tf.expand_dims,
    "stack": tf.stack,
    "where": tf.where,
    "reshape": tf.reshape,
    "matmul": tf.matmul,
    "zeros_like": tf.zeros_like,
    "ones_like": tf.ones_like,
    "concatenate": tf.concat,
    "split": tf.split,
    "flip": tf.reverse,
    "remainder": tf.math.floormod,
    "clip": tf.clip_by_value,
    "arctan": tf.atan,
    "arctanh": tf.atanh,
    "arcsinh": tf.asinh,
    "arccosh": tf.acosh,
    "log1p": tf.math.log1p,
    "expm1": tf.math.expm1,
    "einsum": tf.einsum,
    "squeeze": tf.squeeze,
}


class ArrayFunctions:
    """Namespace of TensorFlow's operations under the names of the array-API standard."""

    __name__ = "tensorflow"

    def __getattr__(self, name: str) -> Any:
        if name in _RENAMED:
            return _RENAMED[name]
        return getattr(tf.math, name) if hasattr(tf.math, name) else getattr(tf, name)


class _NoMean:
    """Metric that records nothing, in place of the mean of the losses."""

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class UntrackedLosses(LossesContainer):  # type: ignore[misc]  # tf_keras has no types
    """Compiled form of a loss without metrics, so that evaluating it changes none of the model's."""

    def __init__(self, losses: Any, weights: Any = None, names: Any = None) -> None:
        super().__init__(losses, weights, names, total_loss_mean=_NoMean())

    def _create_metrics(self) -> None:
        self._per_output_metrics = [None] * len(self._losses)


@contextmanager
def undisturbed(model: Any, regularised: bool) -> Iterator[None]:
    """Temporarily replace the compiled loss by a copy that updates no metric.

    Penalties of weights have a gradient only if ``regularised``.
    """
    own = vars(model)
    compiled = own.get("compiled_loss")
    if compiled is not None:
        own["compiled_loss"] = UntrackedLosses(
            compiled._user_losses, compiled._user_loss_weights, compiled._output_names
        )
    layers = [] if regularised else list(model._flatten_layers())
    penalties = [(vars(layer), vars(layer)["_callable_losses"]) for layer in layers if layer._callable_losses]
    for books, losses in penalties:
        books["_callable_losses"] = [substitute_in_this_thread(_stopped(loss), _named(loss)) for loss in losses]
    try:
        yield
    finally:
        for books, losses in penalties:
            books["_callable_losses"] = losses
        if compiled is not None:
            own["compiled_loss"] = compiled


def _stopped(loss: Any) -> Any:
    def stopped() -> Any:
        value = loss()
        return None if value is None else tf.stop_gradient(value)

    return stopped


def _named(loss: Any) -> Any:
    """Return a function that calls ``loss``; unlike a ``functools.partial`` it has a name."""
    return lambda: loss()
