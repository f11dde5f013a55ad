"""After any other verbs, a verb returns the numbers, axes, notes and certificate that it returns on a fresh copy."""

from dataclasses import replace

import numpy as np
import pytest
from order_of_calls import Calls
from spoken_keras import keras

pytestmark = pytest.mark.one_engine("torch", "tf_keras")

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 5, 3))
X[0, 3:] = X[2, 1:] = 0


class Fold(L.Layer):
    """A GRU over the series of each feature by itself, and a dense layer at every step: (sample, time, unit)."""

    def __init__(self, name):
        super().__init__(name=name)
        self.rnn, self.dense = L.GRU(4, return_sequences=True, name="rnn"), L.Dense(2, name="head")

    def build(self, shape):
        self.rnn.build((None, shape[1], 1))
        self.dense.build((None, shape[1], 4))
        self.built = True

    def call(self, x):
        folded = keras.ops.reshape(keras.ops.transpose(x, (0, 2, 1)), (-1, 5, 1))
        return keras.ops.sum(keras.ops.reshape(self.dense(self.rnn(folded)), (-1, 3, 5, 2)), axis=1)


def both_directions():
    rnn = L.GRU(4, return_sequences=True)
    return [L.Bidirectional(rnn, name="rnn"), L.Dense(2, name="head")]


KINDS = {
    "chain": lambda: [L.LSTM(4, return_sequences=True, name="rnn"), L.Dense(2, name="head")],
    "last step": lambda: [L.GRU(4, name="rnn"), L.Dense(2, name="head")],
    "both directions": both_directions,
    "masked": lambda: [
        L.Masking(name="mask"),
        L.SimpleRNN(4, return_sequences=True, name="rnn"),
        L.Dense(2, name="head"),
    ],
    "folded": lambda: [Fold(name="fold")],
}


@pytest.fixture(params=KINDS)
def calls(request, float64):
    def build():
        inner = KINDS[request.param]()
        return keras.Sequential([keras.Input((5, 3)), *inner])

    weights = build().get_weights()

    def copy_model():
        model = build()
        model.set_weights(weights)
        return model

    y = np.roll(np.array(copy_model().predict_on_batch(X)), 1, 0)
    layer = "fold/rnn" if request.param == "folded" else "rnn"
    return Calls(copy_model, X, y, "mse", layer)


@pytest.mark.product(keep=("chain",))
def test_drawn_pairs_and_triples(calls):
    quick = replace(calls, left_out=("diagnose",))
    quick.check([*quick.drawn(4), *quick.drawn(1, 3), ("gradients by input", "jacobian")])
    replace(quick, certify="auto").check([*quick.drawn(1, seed=2), ("jacobian", "jacobian")])


@pytest.mark.parametrize("calls", ["last step"], indirect=True)
def test_each_verb_after_itself(calls):
    quick = replace(calls, left_out=("diagnose",), certify="first")
    quick.check([(verb, verb) for verb in quick.verbs])


@pytest.mark.full
@pytest.mark.parametrize("certify", ["always", "auto", "first"])
def test_each_verb_after_each(calls, certify):
    calls.check_each_after_each(certify)
