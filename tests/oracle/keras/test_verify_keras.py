"""``rl.verify`` of Keras layers: a wrong gradient is caught on every backend, a right one is not accused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import rnnlens as rl

pytestmark = pytest.mark.one_engine


class Truncated(keras.layers.Layer):
    """s_t = sigmoid(gate(x_t)) s_{t-1} + value(x_t), with a state that is detached before step 4 if ``wrong``."""

    def __init__(self, wrong):
        super().__init__()
        self.gate, self.value, self.wrong = keras.layers.Dense(4, bias_initializer="ones"), keras.layers.Dense(4), wrong

    def call(self, x):
        gates, values = ops.sigmoid(self.gate(x)), self.value(x)
        state, states = ops.zeros_like(values[:, 0]), []
        for t in range(x.shape[1]):
            if self.wrong and t == 4:
                state = ops.stop_gradient(state)
            state = gates[:, t] * state + values[:, t]
            states.append(state)
        return ops.stack(states, 1)


def example():
    return np.random.default_rng(0).normal(size=(2, 6, 3)).astype("float32")


def built(layer, x):
    layer(x)
    return layer


def test_a_truncated_gradient_is_caught_and_the_right_one_is_not_accused():
    keras.utils.set_random_seed(0)
    x = example()
    verification = rl.verify(built(Truncated(True), x), x, chunk=4)
    assert "truncated before step 4" in verification.cause, str(verification)
    assert any(tensor.name == "gradient of input" for tensor in verification.wrong)
    right = rl.verify(built(Truncated(False), x), x, chunk=4)
    assert right.ok, str(right)


def test_a_layer_of_keras_and_a_cell_are_right():
    keras.utils.set_random_seed(0)
    x, state = example()[:, :4], np.zeros((2, 4), "float32")
    layer = built(keras.layers.GRU(4, return_sequences=True, return_state=True), x)
    before = [np.asarray(ops.convert_to_numpy(weight)).copy() for weight in layer.weights]
    verification = rl.verify(layer, x, state=state, chunk=4)
    assert verification.ok, str(verification)
    assert "gradient of initial state" in verification.compared
    cell = rl.verify(layer.cell, x, state=[state], step=True, chunk=4)
    assert cell.ok, str(cell)
    after = [np.asarray(ops.convert_to_numpy(weight)) for weight in layer.weights]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
