"""Certificates of a trace of some layers or quantities: they pass like those of the whole trace."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import rnnlens as rl

pytestmark = pytest.mark.one_engine

LAYERS = [None, ["above"], ["both"], ["head"], ["both", "head"]]
QUANTITIES = [None, ["output_grad"], ["output"], ["hidden_grad"], ["gates"], ["input_grad", "gates"]]
X = np.random.default_rng(0).normal(size=(2, 4, 3))


def mean_square(y, predicted):
    return keras.ops.mean(keras.ops.square(keras.ops.cast(y, predicted.dtype) - predicted))


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 3), dtype="float64")
    gru_output = layers.Bidirectional(
        layers.GRU(3, return_sequences=True, dtype="float64"), name="both", dtype="float64"
    )(inputs)
    lstm_output = layers.LSTM(4, name="above", dtype="float64")(gru_output)
    return keras.Model(inputs, layers.Dense(2, name="head", dtype="float64")(lstm_output))


@pytest.mark.one_engine
@pytest.mark.parametrize("layer_names", LAYERS, ids=str)
def test_a_part_is_not_accused(model, layer_names):
    for quantities in QUANTITIES:
        if layer_names == ["head"] and quantities not in (None, ["output"], ["output_grad"]):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trace = rl.trace(model, X, np.ones((2, 2)), loss=mean_square, layers=layer_names, quantities=quantities)
        assert np.isfinite(trace.loss)
        assert trace.certificate.state == "passed", (quantities, trace.certificate.sentence)


ACTIVATIONS = ["hard_sigmoid", "leaky_relu", "gelu", "sparsemax"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_as_the_engine_computes_them(name):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 3), dtype="float64")
    lstm = layers.LSTM(3, activation=name, recurrent_activation=name, return_sequences=True, dtype="float64")
    model = keras.Model(inputs, lstm(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = rl.trace(model, X, np.ones((2, 4, 3)), loss=mean_square)
        jacobian = rl.jacobian(model, X)
    assert trace.certificate.state == "passed"
    perturbation = np.zeros_like(X)
    perturbation[:, 1, 2] = 1e-6
    above, below = (
        np.asarray(keras.ops.convert_to_numpy(model(x)), float) for x in (X + perturbation, X - perturbation)
    )
    slope = (above - below) / 2e-6
    np.testing.assert_allclose(jacobian.values[..., 1, 2], slope, atol=3e-6)
