"""TensorFlow's own differentiation of our copy, and of functions of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import InputError, UnsupportedError, message, raised_by, shown
from ...typing import Array


def gradients(
    graph: Any, ys: Sequence[Any], xs: Sequence[Any], given: Sequence[Any] | None = None, stop: Sequence[Any] = ()
) -> list[Any]:
    """``tf.gradients`` in our copy: a dense tensor for each of ``xs``, None where no path leads.

    Raises
    ------
    UnsupportedError
        If an operation on the way has no gradient in TensorFlow.
    """
    usable = [i for i, x in enumerate(xs) if x.dtype.base_dtype.is_floating or x.dtype == tf.resource]
    found: list[Any] = [None] * len(xs)
    sources = [xs[i] for i in usable]
    if not sources or not any(y.dtype.base_dtype.is_floating for y in ys):
        return found
    with graph.as_default():
        try:
            made = tf.gradients(list(ys), sources, grad_ys=given, stop_gradients=list(stop) or None)
        except LookupError as error:
            raise UnsupportedError(
                message(
                    "An operation on the way has no gradient in TensorFlow.",
                    got=str(error).removesuffix("."),
                    hint="tf.stop_gradient around it, or another operation for the same",
                )
            ) from error
        for i, gradient in zip(usable, made, strict=True):
            found[i] = _dense(gradient)
    return found


def _dense(gradient: Any) -> Any:
    """Rows of a table that were looked up, each added where it belongs."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(gradient.dense_shape, tf.int64)[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)


def differentiate(
    function: Callable[..., Any], arrays: Sequence[Array]
) -> tuple[Array, Callable[[Array], list[Array]]]:
    """A function of tensors, built and run in a graph of its own; see :meth:`Adapter.differentiate`."""
    graph = tf.Graph()
    with graph.as_default(), tf.Session(graph=graph) as session:
        tensors = [tf.constant(array) for array in arrays]
        with raised_by("the function that was given"):
            value = function(*tensors)
        if not isinstance(value, tf.Tensor) or value.graph is not graph:
            expected = "a tensor, made of its arguments by TensorFlow"
            raise InputError(message("The function returned no tensor.", got=shown(value), expected=expected))
        result = np.asarray(session.run(value))

    def pull(cotangent: Array) -> list[Array]:
        with graph.as_default(), tf.Session(graph=graph) as session:
            given = tf.constant(np.asarray(cotangent, dtype=value.dtype.as_numpy_dtype))
            found = gradients(graph, [value], tensors, [given])
            made = session.run([t * 0 if g is None else g for t, g in zip(tensors, found, strict=True)])
        return [np.asarray(one) for one in made]

    return result, pull
