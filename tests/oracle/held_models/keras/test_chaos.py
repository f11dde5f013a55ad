"""Chaotic networks amplify rounding differences between kernels: the certificate states that it cannot decide."""

import keras
import numpy as np
import pytest
from planted_cells import plant_scaled_gradient

import rnnlens as rl

pytestmark = [pytest.mark.one_engine("jax", "torch"), pytest.mark.compiled]  # compiled runs round differently


def network(gain):
    keras.utils.set_random_seed(0)
    recurrent = keras.initializers.RandomNormal(stddev=gain / 32**0.5)
    layers = [keras.layers.SimpleRNN(32, recurrent_initializer=recurrent, name="rnn"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((100, 3)), *layers])
    model.compile(loss="mse")
    x = np.random.default_rng(0).normal(size=(4, 100, 3)).astype("float32")
    return model, x, x.mean((1, 2))[:, None]


def test_it_is_told_from_a_fault():
    """A chaotic layer that returns one step gives "could not", not "failed": its replay takes another trajectory."""
    with pytest.warns(rl.errors.SelfCheckWarning, match="the sum over time"):
        certificate = rl.weights(*network(3.0)).certificate
    assert certificate.state == "could not"
    assert "the model is chaotic" in certificate.why
    assert rl.weights(*network(0.9)).certificate.state == "passed"


def test_a_fault_of_a_steady_network_stays_one(monkeypatch):
    plant_scaled_gradient(monkeypatch, 1 + 1e-3)
    with pytest.warns(rl.errors.SelfCheckWarning):
        assert rl.weights(*network(0.9)).certificate.state == "failed"
