"""GPU behaviour, tested without a GPU: layers run without cuDNN, and their ``use_cudnn`` is restored."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras.src import backend

import rnnlens as rl
from rnnlens.adapters.keras.keras3 import dialect

X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
Y = np.zeros((2, 1), "float32")

VERBS = {
    "trace": lambda model: rl.trace(model, X, Y),
    "gradients": lambda model: rl.gradients(model, X, Y, wrt="input"),
    "weights": lambda model: rl.weights(model, X, Y),
    "jacobian": lambda model: rl.jacobian(model, X),
}


def network(*layers):
    model = keras.Sequential([keras.Input((5, 3)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(type(dialect.engine), "on_accelerator", True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("verb", VERBS)
def test_no_layer_runs_by_cudnn(verb, monkeypatch):
    """No verb uses cuDNN, except its reference run: JAX cannot differentiate cuDNN's LSTM for several cotangents."""

    def fused_kernel(*args, **kwargs):
        raise AssertionError("a fused kernel ran")

    for name in ("lstm", "gru"):
        monkeypatch.setattr(backend, name, fused_kernel)
    lstm, gru = keras.layers.LSTM(4, return_sequences=True), keras.layers.Bidirectional(keras.layers.GRU(4))
    model = network(lstm, gru)
    with rl.options(certify="never"):
        VERBS[verb](model)
    assert [layer.use_cudnn for layer in (lstm, gru.forward_layer, gru.backward_layer)] == ["auto"] * 3


@pytest.mark.only_on("jax")
@pytest.mark.usefixtures("gpu")
def test_a_layer_that_cudnn_turns_round_is_refused_by_name(monkeypatch):
    """Backward LSTMs on JAX with cuDNN are refused: Keras 3.15 returns their outputs in the order of the input."""
    monkeypatch.setattr(backend, "cudnn_ok", lambda *args, **kwargs: True)
    options = {"return_sequences": True, "go_backwards": True}
    with pytest.raises(rl.errors.UnsupportedError, match=r"'back'.*\n.*\n.*\n.*use_cudnn=False"):
        rl.trace(network(keras.layers.LSTM(4, name="back", **options)), X)
    for layer in (
        keras.layers.LSTM(4, use_cudnn=False, **options),
        keras.layers.LSTM(4, go_backwards=True),
        keras.layers.GRU(4, **options),
        keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True)),
    ):
        assert rl.trace(network(layer), X).certificate.state == "passed"
    masked = network(keras.layers.Masking(), keras.layers.LSTM(4, **options))
    assert rl.trace(masked, X).certificate.state == "passed"
