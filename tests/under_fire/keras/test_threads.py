"""One model, many threads: every result is that of a call made alone, and the model is as it was found."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import rnnlens as rl

X = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
Y = np.zeros((4, 2), "float32")
#: Each call traces the model anew: where that takes long, it is made once beside the others.
TIMES = 2 if keras.backend.backend() == "torch" else 1


class Between(keras.layers.Layer):
    """Does something on its way, if it is told to."""

    def call(self, x):
        WAY.pop()() if WAY else None
        return x


WAY = []


def build(rnn=None):
    x = inputs = keras.Input((6, 3))
    rnn = rnn or keras.layers.SimpleRNN(5, return_sequences=True, name="rnn")
    x = keras.layers.Dropout(0.3, seed=1)(rnn(x))
    x = Between()(x)
    x = keras.layers.SimpleRNN(4, name="top", kernel_regularizer="l2")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="dense")(x))
    model.compile(loss="mse", optimizer="sgd")
    return model


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    return build()


def traced(model, **options):
    return rl.trace(model, X, Y, **options)["rnn"].hidden_grad.values


def on_threads(calls, workers=6):
    with ThreadPoolExecutor(workers) as pool:
        return [future.result(timeout=300) for future in [pool.submit(call) for call in calls]]


@pytest.mark.one_engine("tensorflow", "torch")
def test_one_model_and_one_that_shares_a_layer(model):
    other = build(model.get_layer("rnn"))
    calls = [
        lambda: traced(model),
        lambda: traced(model, training=True, seed=7),
        lambda: traced(other),
        lambda: rl.jacobian(model, X, of="rnn.hidden", measure="norm").values,
    ]
    alone = [call() for call in calls]
    for i, found in enumerate(on_threads(calls * TIMES)):
        np.testing.assert_array_equal(found, alone[i % 4])
    for layer in (*model._flatten_layers(), *other._flatten_layers()):
        assert not {"call", "inner_loop", "_get_regularization_losses"} & vars(layer).keys()


def test_the_users_own_forward_in_another_thread_is_neither_heard_nor_changed(model):
    """It runs while our methods are on the layers: in the middle of our own forward pass."""
    expected, seen = np.asarray(keras.ops.convert_to_numpy(model(X[:2]))), []

    def theirs():
        seen.append(keras.ops.convert_to_numpy(model(X[:2])))
        seen.append(float(sum(keras.ops.convert_to_numpy(loss) for loss in model.losses)))

    def on_the_way():
        thread = threading.Thread(target=theirs)
        thread.start()
        thread.join(60)

    def loss(y, output):
        return keras.ops.mean(keras.ops.square(y - output))

    penalty = float(sum(keras.ops.convert_to_numpy(loss) for loss in model.losses))
    WAY.append(on_the_way)
    found = rl.trace(model, X, Y, loss=loss, layers=["rnn", "dense"])
    alone = rl.trace(model, X, Y, loss=loss, layers=["rnn", "dense"])
    np.testing.assert_allclose(seen[0], expected, rtol=1e-6)
    assert seen[1] == pytest.approx(penalty)
    assert found.layers == alone.layers
    np.testing.assert_allclose(found["rnn"].hidden_grad, alone["rnn"].hidden_grad, rtol=1e-5, atol=1e-8)


@pytest.mark.op_by_op
def test_the_users_own_forward_passes_beside_our_calls(model):
    expected, stop, wrong = np.asarray(keras.ops.convert_to_numpy(model(X))), threading.Event(), []

    def theirs():
        while not stop.is_set():
            try:
                time.sleep(0.01)
                found = keras.ops.convert_to_numpy(model(X))
                if not np.allclose(found, expected, rtol=1e-5):
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)

    alone = traced(model)
    thread = threading.Thread(target=theirs)
    thread.start()
    try:
        results = [traced(model) for _ in range(3)]
    finally:
        stop.set()
        thread.join(60)
    assert not wrong
    for found in results:
        np.testing.assert_array_equal(found, alone)
