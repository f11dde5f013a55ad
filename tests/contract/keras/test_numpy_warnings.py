"""No verb shows NumPy's ``__array__`` warnings about Keras variables to its caller."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import rnnlens as rl

pytestmark = pytest.mark.one_engine("jax", "torch")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(3, 4, 2)).astype("float32"), RNG.normal(size=(3, 4, 1)).astype("float32")


class Cell(layers.Layer):
    state_size = output_size = 3

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.recurrent = self.add_weight(shape=(3, 3), name="recurrent")

    def call(self, x, states):
        state = keras.ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return state, [state]


def model_of(layer):
    model = keras.Sequential([keras.Input((4, 2)), layer, layers.Dense(1)])
    model.compile(loss="mse")
    return model


def custom_layer():
    return layers.RNN(Cell(), return_sequences=True, name="rnn")


def keras_layer():
    return layers.SimpleRNN(3, return_sequences=True, name="rnn")


VERBS = {
    "trace": lambda model: rl.trace(model, X, Y),
    "weights": lambda model: rl.weights(model, X, Y),
    "gradients": lambda model: rl.gradients(model, X, Y, wrt=["input", "weights"]),
    "jacobian": lambda model: rl.jacobian(model, X),
    "fixed_points": lambda model: rl.fixed_points(model, X, layer="rnn"),
    "lyapunov": lambda model: rl.lyapunov(model, X),
    "weight_norms": lambda model: rl.weight_norms(model),
    "diagnose": lambda model: rl.diagnose(model, X, Y),
}


@pytest.mark.product
@pytest.mark.parametrize("layer", [keras_layer, custom_layer])
def test_no_verb_warns_of_arrays(layer):
    model = model_of(layer())
    for name, verb in VERBS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            verb(model)
        assert not [str(warning.message) for warning in caught if "__array__" in str(warning.message)], name
