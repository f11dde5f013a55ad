"""Reference computations: the user's model, run and differentiated by its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np


@contextmanager
def without_jit() -> Iterator[None]:
    """Disable compilation within the block: JAX would compile the loop of a recurrent layer anew at every call."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    with jax.disable_jit():
        yield


def to_float(value: Any) -> float:
    """Return a tensor of one element as a float."""
    return float(keras.ops.convert_to_numpy(value))


def central_difference(
    function: Callable[[Any], float], array: Any, index: tuple[int, ...], step: float = 1e-6
) -> float:
    """Return d function / d array[index] by central differences."""
    values = []
    for size in (step, -step):
        shifted = np.array(array)
        shifted[index] += size
        with without_jit():
            values.append(function(shifted))
    return (values[0] - values[1]) / (2 * step)


def jacobian(function: Callable[[Any], Any], x: Any) -> Any:
    """Return the Jacobian of each sample, (sample, *out, *in), of a function that does not mix samples."""
    with keras.StatelessScope():  # keeps a stateful layer from continuing at the state of the previous row
        return {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[keras.backend.backend()](function, x)


def _tensorflow(function, x):
    import tensorflow as tf

    x = tf.constant(x)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = function(x)
        rows = tf.unstack(tf.reshape(y, (y.shape[0], -1)), axis=1)
        totals = [tf.reduce_sum(row) for row in rows]
    grads = [tape.gradient(t, x, unconnected_gradients=tf.UnconnectedGradients.ZERO).numpy() for t in totals]
    return np.stack(grads, axis=1).reshape((*y.shape, *x.shape[1:]))


def _jax(function, x):
    import jax
    import jax.numpy as jnp

    def run_stateless(a):
        with keras.StatelessScope():  # otherwise a stateful layer would keep the traced state
            return function(a)

    shape = jax.eval_shape(run_stateless, jnp.asarray(x)).shape
    grads = jax.jit(jax.jacrev(lambda a: run_stateless(a).sum(0)))(jnp.asarray(x))
    axis = len(shape) - 1
    return np.moveaxis(np.asarray(grads), axis, 0)


def _torch(function, x):
    import torch

    x = torch.tensor(x, requires_grad=True)
    y = function(x)
    rows = y.reshape(y.shape[0], -1).sum(0)
    grads = [torch.autograd.grad(row, x, retain_graph=True, allow_unused=True)[0] for row in rows]
    grads = [torch.zeros_like(x) if g is None else g for g in grads]
    return torch.stack(grads, 1).reshape(*y.shape, *x.shape[1:]).numpy()
