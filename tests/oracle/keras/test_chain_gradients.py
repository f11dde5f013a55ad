"""Later traces of a Keras chain of layers do not differentiate the recurrences with the framework.

The gradients at the lower layer's output must equal the framework's own.
"""

import numpy as np
import pytest
from spoken_keras import keras

import rnnlens as rl
from rnnlens.verbs import chain

SAMPLES = 16
layers = keras.layers


def model_of(name):
    """Return a model of two recurrent layers and other layers by name; "penalty" also penalises the lower output."""
    masked, last = name == "masked", name == "last step"
    below = [layers.Embedding(9, 4, mask_zero=True)] if masked else [layers.Dense(4)] if name == "dense below" else []
    between = {"dense": [layers.Dense(5, activation="tanh"), layers.Dense(3)], "dropout": [layers.Dropout(0.5)]}
    between["norm"] = [layers.LayerNormalization()]
    first = layers.Bidirectional(layers.LSTM(3, return_sequences=True), name="lower")
    first = first if name == "bidirectional" else layers.LSTM(4, return_sequences=True, name="lower")
    if name == "penalty":
        first.activity_regularizer = keras.regularizers.L2(0.1)
    shape, dtype = ((7,), "int32") if masked else ((7, 3), None)
    upper = layers.GRU(4, return_sequences=not last, name="upper")
    stack = [keras.Input(shape, dtype=dtype), *below, first, *between.get(name, []), upper, layers.Dense(2)]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(stack)
    model.compile(loss="mse")
    return model


def data_of(name):
    rng = np.random.default_rng(0)
    y = rng.standard_normal((SAMPLES, 2) if name == "last step" else (SAMPLES, 7, 2)).astype("float32")
    if name == "masked":
        ids = rng.integers(1, 9, (SAMPLES, 7)) * (np.arange(7) < rng.integers(2, 8, (SAMPLES, 1)))
        return ids.astype("int32"), y
    return rng.standard_normal((SAMPLES, 7, 3)).astype("float32"), y


CHAINS = ("plain", "dense", "dropout", "dense below", "last step")
#: Models in which the gradients at all layers are captured.
OTHERS = ("masked", "norm", "bidirectional", "penalty")


@pytest.mark.product(on="jax", keep=("dense", "last step", "masked"))
@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
def test_later_traces_have_the_gradients_of_the_framework(name, topmost_flags):
    model, (x, y) = model_of(name), data_of(name)
    trace = [rl.trace(model, x, y) for _ in range(3)][-1]
    is_short = name in CHAINS and keras.backend.backend() != "torch"
    assert topmost_flags == [False, True, True] if is_short else not any(topmost_flags)
    assert trace.certificate.state == "passed"
    expected = rl.gradients(model, x, y, wrt="lower.output").values  # by the framework, without a sweep
    actual = trace["lower"].output_grad.values.reshape(expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    with rl.options(certify="always"):
        full_check = rl.trace(model, x, y)
    for node in full_check:
        for key, values in full_check[node].dataset.data_vars.items():
            np.testing.assert_array_equal(trace[node].dataset[key].values, values.values)


@pytest.mark.only_on("jax", "tensorflow")
def test_a_planted_fault_in_a_later_trace_is_found(monkeypatch, topmost_flags):
    model, (x, y) = model_of("dense"), data_of("dense")
    rl.trace(model, x, y)
    original = chain.pull_back
    monkeypatch.setattr(chain, "pull_back", lambda *args: 1.01 * original(*args))
    trace = rl.trace(model, x, y)
    assert topmost_flags == [False, True, False]  # partial check failed: all samples compared, all layers captured
    assert (trace.certificate.state, trace.certificate.samples) == ("passed", "")
