"""``rl.diagnose`` on Keras networks whose memory is known in closed form, on every engine."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.one_engine

STEPS, SAMPLES = 20, 256


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(SAMPLES, STEPS, 1)).astype("float32")


def shift_register(lag, *, masked=False, steps=STEPS):
    """Return a linear RNN with the last inputs in its units and an output equal to the input ``lag`` steps back."""
    units = lag + 2
    rnn = keras.layers.SimpleRNN(units, activation="linear", name="rnn")
    inputs = keras.Input((steps, 1))
    rnn_input = keras.layers.Masking(mask_value=0.0)(inputs) if masked else inputs
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(rnn(rnn_input)))
    kernel, recurrent = np.zeros((1, units)), np.diag(np.ones(units - 1), 1)
    kernel[0, 0] = 1
    rnn.set_weights([kernel, recurrent, np.zeros(units)])
    head = np.zeros((units, 1))
    head[lag] = 1
    model.get_layer("head").set_weights([head, np.zeros(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.product(keep=("6",))
@pytest.mark.parametrize("lag", [0, 6])
def test_memory_of_a_shift_register_is_exact(x, lag):
    model = shift_register(lag)
    before = [np.array(w) for w in model.get_weights()]
    d = rl.diagnose(model, x, x[:, STEPS - 1 - lag], baseline="init")
    assert float(d["model"].memory) == lag + 1
    assert "re-initialised: " in str(d)
    assert not {"MISSED_DEPENDENCY", "VANISHING", "NO_SKILL"} & set(d.codes)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.one_engine
def test_samples_of_unequal_length_count_from_their_own_end(x):
    lengths = np.random.default_rng(1).integers(8, STEPS + 1, SAMPLES)
    is_valid = np.arange(STEPS)[None] < lengths[:, None]
    x = np.where(is_valid[:, :, None], x, 0.0).astype("float32")
    y = x[np.arange(SAMPLES), lengths - 4]
    assert float(rl.diagnose(shift_register(3, masked=True), x, y)["model"].memory) == 4


@pytest.mark.one_engine
def test_what_is_missed_is_named(x):
    d = rl.diagnose(shift_register(2), x, 0.5 * x[:, -3] + 0.5 * x[:, -15])
    assert next(f for f in d.findings if f.code == "MISSED_DEPENDENCY").evidence["lag"] == 14
    assert "VANISHING" in d.codes


@pytest.mark.one_engine
def test_fixed_points_and_exponents(x):
    model = keras.Sequential([keras.Input((STEPS, 1)), keras.layers.SimpleRNN(1, name="rnn"), keras.layers.Dense(1)])
    model.get_layer("rnn").set_weights([np.full((1, 1), 0.3), np.full((1, 1), 2.0), np.zeros(1)])
    points = rl.fixed_points(model, x, input="zero")
    stable_states = points.states.values[points.stable.values][:, 0]
    np.testing.assert_allclose(np.sort(stable_states), [-0.957504024082275, 0.957504024082275], atol=1e-7)
    spectrum = rl.lyapunov(shift_register(3), x[:4])
    assert spectrum.exponent.size == 5


def test_fixed_points_of_a_cell_of_ones_own(x):
    class Spring(keras.layers.Layer):
        state_size = output_size = 2

        def call(self, inputs, states):
            h = states[0] + 0.5 * (1 - states[0]) + 0 * inputs
            return h, [h]

    model = keras.Sequential([keras.Input((STEPS, 1)), keras.layers.RNN(Spring(), name="rnn"), keras.layers.Dense(1)])
    points = rl.fixed_points(model, x[:8])
    np.testing.assert_allclose(points.states, [[1, 1]], atol=1e-5)
    np.testing.assert_allclose(points.eigenvalues, [[0.5, 0.5]], atol=1e-5)


@pytest.mark.parametrize(("rate", "code"), [(1e-7, "UPDATES_TOO_SMALL"), (50.0, "UPDATES_TOO_LARGE")])
def test_the_update_is_that_of_one_batch_of_training(x, rate, code):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((STEPS, 1)), keras.layers.GRU(6), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mse")
    y = x[:, -3]
    model.train_on_batch(x[:32], y[:32])
    before = [np.array(v) for v in (*model.get_weights(), *map(keras.ops.convert_to_numpy, model.optimizer.variables))]
    d = rl.diagnose(model, x, y)
    (evidence,) = [f.evidence for f in d.findings if f.code == code]
    after = [np.array(v) for v in (*model.get_weights(), *map(keras.ops.convert_to_numpy, model.optimizer.variables))]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    weights = {v.path: keras.ops.convert_to_numpy(v) for v in model.trainable_variables}
    model.train_on_batch(x[:32], y[:32])
    for variable in model.trainable_variables:
        if variable.path in evidence["by_weight"]:
            change = np.linalg.norm(keras.ops.convert_to_numpy(variable) - weights[variable.path])
            expected = change / np.linalg.norm(weights[variable.path])
            assert evidence["by_weight"][variable.path] == pytest.approx(expected, rel=2e-2)
