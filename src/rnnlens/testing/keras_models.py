"""Tiny Keras models for tests, one per way of building models, and gradients by the framework's own autodiff.

Each model is built, and small enough for the reference of ``rnnlens.testing.bptt``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: Creates a model with the package ``keras`` or ``tf_keras``, which it takes as its argument.
Make = Callable[[Any], Any]

LossOf = Callable[[list[Any]], Any]
Gradients = tuple[Any, list[Any], list[Any]]


def stacked(keras: Any) -> Any:
    """Return a model with an LSTM below a GRU that returns its last output only."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4, 2)),
            layers.LSTM(3, return_sequences=True, name="lower"),
            layers.GRU(2, name="upper"),
            layers.Dense(2),
        ]
    )


def bidirectional(keras: Any) -> Any:
    """Return a model with a masked bidirectional layer whose two directions are multiplied."""
    layers = keras.layers
    lstm = layers.LSTM(2, return_sequences=True)
    return keras.Sequential(
        [
            keras.Input((4, 2)),
            layers.Masking(),
            layers.Bidirectional(lstm, merge_mode="mul", name="bi"),
            layers.Dense(2),
        ]
    )


def shared(keras: Any) -> Any:
    """Return a model that calls one recurrent layer twice."""
    x = keras.Input((4, 2))
    layer = keras.layers.SimpleRNN(2, return_sequences=True, name="rnn")
    return keras.Model(x, keras.layers.Dense(2)(layer(layer(x))))


def nested(keras: Any) -> Any:
    """Return a model with a recurrent layer in a nested model."""
    inner = keras.Sequential([keras.Input((4, 2)), keras.layers.GRU(2, name="gru")], name="encoder")
    return keras.Sequential([keras.Input((4, 2)), inner, keras.layers.Dense(2)])


def encoder_decoder(keras: Any) -> Any:
    """Return an encoder-decoder: the encoder's final states start a decoder that runs backwards in time."""
    x = keras.Input((4, 2))
    _, h, c = keras.layers.LSTM(3, return_state=True, name="encoder")(x)
    y = keras.layers.LSTM(3, return_sequences=True, go_backwards=True, name="decoder")(x, initial_state=[h, c])
    return keras.Model(x, keras.layers.Dense(2)(y))


def subclassed(keras: Any) -> Any:
    """Return a model made by subclassing ``keras.Model``; it has no ``.output``."""

    class Subclassed(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.rnn = keras.layers.LSTM(2, return_sequences=True, name="rnn")
            self.head = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            """Map an input (sample, 4, 2) to an output (sample, 4, 2)."""
            return self.head(self.rnn(x))

    model = Subclassed()
    model(np.zeros((1, 4, 2), dtype="float32"))
    return model


MODELS: dict[str, Make] = {
    "stacked": stacked,
    "bidirectional": bidirectional,
    "shared": shared,
    "nested": nested,
    "encoder_decoder": encoder_decoder,
    "subclassed": subclassed,
}


def gradients(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    """Return a loss and its gradients with respect to a list of arrays and a list of Keras variables.

    Variables of ``tf_keras`` are TensorFlow variables. Values that its layers assign meanwhile are not restored.
    """
    if variables and type(variables[0]).__module__.startswith("tensorflow."):
        return _by_tape(loss_of, inputs, variables)
    import keras

    engine = keras.backend.backend()
    gradient_functions: dict[str, Callable[..., Gradients]] = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}
    return gradient_functions[engine](loss_of, inputs, variables)


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
    grads = tape.gradient(loss, [*tensors, *variables], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    grads = [tf.convert_to_tensor(g).numpy() for g in grads]
    return loss.numpy(), grads[: len(tensors)], grads[len(tensors) :]


def _jax(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    import jax
    import jax.numpy as jnp
    import keras

    def pure(tensors: list[Any], values: list[Any]) -> Any:
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return loss_of(tensors)

    arguments = [jnp.asarray(x) for x in inputs], [v.value for v in variables]
    with jax.disable_jit():  # compiling would take longer than running a tiny model
        loss, (by_input, by_variable) = jax.value_and_grad(pure, argnums=(0, 1))(*arguments)
    return np.asarray(loss), [np.asarray(g) for g in by_input], [np.asarray(g) for g in by_variable]


def _torch(loss_of: LossOf, inputs: Sequence[Any], variables: Sequence[Any]) -> Gradients:
    import keras
    import torch

    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    parameters = [v.value for v in variables]
    with keras.StatelessScope():
        loss = loss_of(tensors)
    grads = torch.autograd.grad(loss, [*tensors, *parameters], allow_unused=True)
    differentiated = [*tensors, *parameters]
    arrays = [np.zeros(p.shape) if g is None else g.numpy() for g, p in zip(grads, differentiated, strict=True)]
    return loss.detach().numpy(), arrays[: len(tensors)], arrays[len(tensors) :]
