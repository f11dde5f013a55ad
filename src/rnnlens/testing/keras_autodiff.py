"""The framework's own autodiff, written as its users write it: what the adapter is checked against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LossOf = Callable[[list[Any]], Any]
Gradients = tuple[Any, list[Any], list[Any]]


def gradients(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    """Loss and its gradients with respect to a list of arrays and a list of Keras variables.

    Variables of ``tf_keras`` are TensorFlow's own; what its layers assign meanwhile is the caller's to put back.
    """
    if variables and type(variables[0]).__module__.startswith("tensorflow."):
        return _by_tape(loss_of, inputs, variables)
    import keras

    engine = keras.backend.backend()
    of_engine: dict[str, Callable[..., Gradients]] = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}
    return of_engine[engine](loss_of, inputs, variables)


def _tensorflow(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    import keras

    with keras.StatelessScope():
        return _by_tape(loss_of, inputs, [v.value for v in variables])


def _by_tape(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    import tensorflow as tf

    tensors = [tf.convert_to_tensor(x) for x in inputs]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = loss_of(tensors)
    found = tape.gradient(loss, [*tensors, *variables], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    found = [tf.convert_to_tensor(g).numpy() for g in found]
    return loss.numpy(), found[: len(tensors)], found[len(tensors) :]


def _jax(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    import jax
    import jax.numpy as jnp
    import keras

    def pure(tensors: list[Any], values: list[Any]) -> Any:
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return loss_of(tensors)

    arguments = [jnp.asarray(x) for x in inputs], [v.value for v in variables]
    with jax.disable_jit():  # a tiny model has run before it would have been compiled
        loss, (by_input, by_variable) = jax.value_and_grad(pure, argnums=(0, 1))(*arguments)
    return np.asarray(loss), [np.asarray(g) for g in by_input], [np.asarray(g) for g in by_variable]


def _torch(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    import keras
    import torch

    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    parameters = [v.value for v in variables]
    with keras.StatelessScope():
        loss = loss_of(tensors)
    found = torch.autograd.grad(loss, [*tensors, *parameters], allow_unused=True)
    wanted = [*tensors, *parameters]
    arrays = [np.zeros(p.shape) if g is None else g.numpy() for g, p in zip(found, wanted, strict=True)]
    return loss.detach().numpy(), arrays[: len(tensors)], arrays[len(tensors) :]
