"""Tiny Keras models, one per way in which people write them; each is built, and small enough for the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: Makes a model out of a Keras: the package ``keras``, or ``tf_keras``.
Make = Callable[[Any], Any]


def stacked(keras: Any) -> Any:
    """Two layers, the upper one returning its last output."""
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
    """A masked bidirectional layer whose halves are multiplied."""
    layers = keras.layers
    half = layers.LSTM(2, return_sequences=True)
    return keras.Sequential(
        [
            keras.Input((4, 2)),
            layers.Masking(),
            layers.Bidirectional(half, merge_mode="mul", name="bi"),
            layers.Dense(2),
        ]
    )


def shared(keras: Any) -> Any:
    """One layer called twice, in a nested model and out of it."""
    x = keras.Input((4, 2))
    layer = keras.layers.SimpleRNN(2, return_sequences=True, name="rnn")
    return keras.Model(x, keras.layers.Dense(2)(layer(layer(x))))


def nested(keras: Any) -> Any:
    """A recurrent layer inside a model inside a model."""
    inner = keras.Sequential([keras.Input((4, 2)), keras.layers.GRU(2, name="gru")], name="encoder")
    return keras.Sequential([keras.Input((4, 2)), inner, keras.layers.Dense(2)])


def encoder_decoder(keras: Any) -> Any:
    """The final states of one layer start the other, which runs backwards."""
    x = keras.Input((4, 2))
    _, h, c = keras.layers.LSTM(3, return_state=True, name="encoder")(x)
    y = keras.layers.LSTM(3, return_sequences=True, go_backwards=True, name="decoder")(x, initial_state=[h, c])
    return keras.Model(x, keras.layers.Dense(2)(y))


def subclassed(keras: Any) -> Any:
    """As many people write models: it has no ``.output``."""

    class Subclassed(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.rnn = keras.layers.LSTM(2, return_sequences=True, name="rnn")
            self.head = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            """(sample, 4, 2) to (sample, 4, 2)."""
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
