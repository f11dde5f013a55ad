"""Nodes folded into the samples inside a layer: the time Jacobian is that of the model's own samples."""

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.one_engine


class Fold(keras.layers.Layer):
    """An LSTM over each node of (sample, time, node, 1), and a dense layer: (sample, unit, node)."""

    def __init__(self):
        super().__init__()
        self.lstm, self.dense = keras.layers.LSTM(4), keras.layers.Dense(2)

    def build(self, shape):
        self.lstm.build((None, shape[1], 1))
        self.dense.build((None, 4))
        self.built = True

    def call(self, x):
        folded = keras.ops.reshape(keras.ops.transpose(x, (2, 0, 1, 3)), (-1, x.shape[1], 1))
        units = keras.ops.reshape(self.dense(self.lstm(folded)), (3, -1, 2))
        return keras.ops.transpose(units, (1, 2, 0))


def test_nodes_folded_into_the_samples():
    x_input = keras.Input((5, 3, 1))
    model = keras.Model(x_input, Fold()(x_input))
    x = np.random.default_rng(0).normal(size=(6, 5, 3, 1)).astype("float32")
    axes = {"input": ("sample", "time", "node", "feature")}  # the layer does not show which axis counts steps
    jacobian = rl.jacobian(model, x, axes=axes)
    assert jacobian.shape == (6, 2, 3, 5, 3)
    np.testing.assert_allclose(rl.jacobian(model, x).values.reshape(jacobian.shape), jacobian.values, atol=1e-6)
    assert jacobian.certificate.state == "passed"

    def output(values):
        return keras.ops.convert_to_numpy(model(values.astype("float32")))[0, 0, 0]

    step = 1e-2
    for time, node in ((0, 0), (4, 0), (4, 1)):
        change = np.zeros_like(x)
        change[0, time, node] = step
        difference = (output(x + change) - output(x - change)) / (2 * step)
        np.testing.assert_allclose(jacobian.values[0, 0, 0, time, node], difference, atol=2e-4)
    assert not jacobian.values[:, :, 0, :, 1:].any()
    norms = rl.jacobian(model, x, measure="norm", axes=axes)
    np.testing.assert_allclose(norms, np.sqrt((jacobian.values**2).sum((2, 4))), rtol=1e-4)


def test_a_diagnosis_names_why_states_of_folded_samples_are_not_exchanged():
    keras.utils.set_random_seed(0)
    x_input = keras.Input((7, 3, 1))
    model = keras.Model(x_input, Fold()(x_input))
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(72, 7, 3, 1)).astype("float32")
    diagnosis = rl.diagnose(model, x, keras.ops.convert_to_numpy(model(x)))
    why = "the layers run on another number of samples than the data have"
    assert diagnosis["model"].attrs["why_not_carried"] == why
    assert why in str(diagnosis)
