"""Typical mistakes with targets: the message says what to type, and this works."""

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.one_engine

X = np.random.default_rng(0).normal(size=(6, 10, 4)).astype("float32")
CLASSES = np.array([0, 1, 2, 0, 1, 2])
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]


def model(loss):
    layers = [keras.Input((10, 4)), keras.layers.LSTM(8), keras.layers.Dense(3, activation="softmax")]
    network = keras.Sequential(layers)
    network.compile("adam", loss)
    return network


@pytest.mark.parametrize(
    ("loss", "y", "hint", "mended"),
    [
        ("sparse_categorical_crossentropy", ONE_HOT, "numpy.argmax(y, -1)", np.argmax(ONE_HOT, -1)),
        (
            "categorical_crossentropy",
            CLASSES,
            "numpy.eye(3, dtype='float32')[numpy.asarray(y, int)]",
            np.eye(3, dtype="float32")[np.asarray(CLASSES, int)],
        ),
    ],
    ids=["one-hot for an index", "an index for one-hot"],
)
def test_classes_in_another_form_are_explained(loss, y, hint, mended):
    network = model(loss)
    with pytest.raises(rl.errors.RnnlensError) as caught:
        rl.trace(network, X, y)
    assert f"\n  try:      {hint} in place of y" in str(caught.value)
    assert np.isfinite(rl.trace(network, X, mended).loss)


def test_an_id_that_is_larger_than_the_embedding():
    ids = np.arange(60).reshape(6, 10) % 5
    layers = [keras.Input((10,), dtype="int32"), keras.layers.Embedding(4, 3), keras.layers.LSTM(8)]
    network = keras.Sequential(layers)
    with pytest.raises(rl.errors.UserCodeError, match="x has ids up to 4") as caught:
        rl.trace(network, ids)
    assert caught.value.hint.startswith("an embedding of 5 rows")
    assert "\x1b" not in str(caught.value)
    assert list(rl.trace(keras.Sequential([layers[0], keras.layers.Embedding(5, 3), layers[2]]), ids))


def test_a_misspelt_loss():
    with pytest.raises(rl.errors.InputError, match="Keras has no loss of that name") as caught:
        rl.trace(model("mse"), X, ONE_HOT, loss="mean_square_error")
    assert caught.value.hint.startswith("did you mean 'mean_squared_error'?")


def test_a_layer_in_place_of_its_name():
    network = model("mse")
    layer = network.layers[0]
    with pytest.raises(rl.errors.InputError, match="layers= names nothing") as caught:
        rl.trace(network, X, layers=layer)
    assert str(caught.value).endswith(f"\n  try:      layers='{layer.name}'")
    assert list(rl.trace(network, X, layers=layer.name)) == [layer.name]
