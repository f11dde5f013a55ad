"""Each run follows the model as it is now, and its loss; graphs and copies of a model leave nothing behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
from keras_eager import eager_captures
from left_behind import graphs_left
from spoken_keras import LEGACY, keras, keras_adapter

from rnnlens.adapters.protocol import Batch, Taps

adapter = keras_adapter()
X = np.random.default_rng(0).normal(size=(2, 4, 3))
Y = np.random.default_rng(1).normal(size=(2, 2))


def scale_weights(model):
    model.set_weights([1.5 * w for w in model.get_weights()])


CHANGES = {
    "weights": scale_weights,
    "activation": lambda model: setattr(model.get_layer("lstm").cell, "activation", keras.activations.relu),
    "flag": lambda model: setattr(model.get_layer("lstm"), "go_backwards", True),
    "rate": lambda model: setattr(model.get_layer("drop"), "rate", 0.9),
    "dtype": lambda model: setattr(model.get_layer("head"), "dtype_policy", keras.DTypePolicy("float32")),
    "loss": lambda model: model.compile("adam", "mae"),
}


@pytest.mark.one_engine("tensorflow", "tf_keras")  # on JAX and torch: oracle/held_models/keras/test_traced_once.py
def test_a_compiled_run_follows_every_change_of_the_model():
    inputs = keras.Input(batch_shape=(2, 4, 3))
    x = keras.layers.Dropout(0.2, name="drop")(inputs)
    x = keras.layers.LSTM(3, return_sequences=True, name="lstm")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(x[:, -1]))
    model.compile("adam", "mse")

    def loss():
        return adapter.run(model, Batch(X, Y, training=True, seed=3), Taps.direct(weight_grads=True)).capture.loss

    before = loss()
    assert loss() == before
    for name, change in CHANGES.items():
        if LEGACY and name in ("activation", "dtype"):  # "activation" is refused (tests/contract/tf_keras)
            continue  # "dtype" cannot be set in Keras 2
        change(model)
        with eager_captures():
            expected = loss()
        assert loss() == pytest.approx(expected, rel=1e-12), name
        assert abs(expected - before) > 1e-10, name
        before = expected


def test_a_loss_whose_surroundings_change_is_run_again():
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.SimpleRNN(2)])
    scale = 1.0

    def loss(y_true, y_pred):
        return scale * keras.ops.sum(y_pred)

    first = adapter.run(model, Batch(X, loss=loss), Taps.direct(weight_grads=True)).capture
    scale = 3.0
    second = adapter.run(model, Batch(X, loss=loss), Taps.direct(weight_grads=True)).capture
    np.testing.assert_allclose(second.calls[0].output_grad, 3 * first.calls[0].output_grad, rtol=1e-9)


@pytest.mark.only_on("tensorflow")
def test_no_graph_outlives_its_model():
    """No graph outlives its model, though model and layer share an input gradient, which a TensorFlow tape may keep."""

    def run():
        model = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2), keras.layers.Dense(2)])
        _ = adapter.run(model, Batch(X, Y, loss="mse"), Taps.everything()).capture

    run()
    before = graphs_left()
    run()
    run()
    assert graphs_left() == before


def test_an_untrained_copy_is_that_of_its_seed_and_no_generator_advances():
    x = keras.Input((5, 2))
    hidden = keras.layers.GRU(3, dropout=0.1, name="gru")(x)
    model = keras.Model(x, keras.layers.Dense(1, name="head")(hidden))
    before = random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    first, repeated, other_seed = (adapter.reinitialised(model, seed).get_weights() for seed in (0, 0, 1))
    assert (random.getstate(), np.random.get_state()[2]) == before  # noqa: NPY002
    for weight, repeated_weight in zip(first, repeated, strict=True):
        np.testing.assert_array_equal(weight, repeated_weight)
    assert not np.array_equal(first[0], other_seed[0])
