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


def test_a_layer_in_place_of_its_name():
    network = model("mse")
    layer = network.layers[0]
    with pytest.raises(rl.errors.InputError, match="layers= names nothing") as caught:
        rl.trace(network, X, layers=layer)
    assert str(caught.value).endswith(f"\n  try:      layers='{layer.name}'")
    assert list(rl.trace(network, X, layers=layer.name)) == [layer.name]
