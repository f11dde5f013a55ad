"""TensorFlow's operations under the names that Keras 3, and the array-API standard, have for them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest

from ...autodiff.tensors import to_numpy


class Ops:
    """What the adapter takes from ``keras.ops``."""

    cast, stack, stop_gradient, zeros = tf.cast, tf.stack, tf.stop_gradient, tf.zeros
    sum, mean, sqrt, square = tf.reduce_sum, tf.reduce_mean, tf.sqrt, tf.square
    is_tensor, convert_to_numpy = tf.is_tensor, staticmethod(to_numpy)

    @staticmethod
    def convert_to_tensor(value: Any, dtype: Any = None) -> Any:
        """A tensor of that dtype, also of one that has another."""
        tensor = tf.convert_to_tensor(value)
        return tensor if dtype is None else tf.cast(tensor, dtype)


class Tree:
    """What the adapter takes from ``keras.tree``."""

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
    """TensorFlow's operations under the names of the array-API standard."""

    __name__ = "tensorflow"

    def __getattr__(self, name: str) -> Any:
        if name in _RENAMED:
            return _RENAMED[name]
        return getattr(tf.math, name) if hasattr(tf.math, name) else getattr(tf, name)
