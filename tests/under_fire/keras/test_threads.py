"""One model used by many threads: each result equals that of a single call, and the model is unchanged."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import rnnlens as rl

X = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
Y = np.zeros((4, 2), "float32")
#: Repetitions of each call; only one where tracing, which each call repeats, takes long.
TIMES = 2 if keras.backend.backend() == "torch" else 1


class Between(keras.layers.Layer):
    """A layer that removes and calls the last of CALLBACKS, if there is one."""

    def call(self, x):
        CALLBACKS.pop()() if CALLBACKS else None
        return x


CALLBACKS = []


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


def hidden_grad_of(model, **options):
    return rl.trace(model, X, Y, **options)["rnn"].hidden_grad.values


def call_on_threads(calls, workers=6):
    with ThreadPoolExecutor(workers) as pool:
        return [future.result(timeout=300) for future in [pool.submit(call) for call in calls]]


@pytest.mark.one_engine
def test_one_model_and_one_that_shares_a_layer(model):
    sharing_model = build(model.get_layer("rnn"))
    calls = [
        lambda: hidden_grad_of(model),
        lambda: hidden_grad_of(model, training=True, seed=7),
        lambda: hidden_grad_of(sharing_model),
        lambda: rl.jacobian(model, X, of="rnn.hidden", measure="norm").values,
    ]
    expected = [call() for call in calls]
    for i, actual in enumerate(call_on_threads(calls * TIMES)):
        np.testing.assert_array_equal(actual, expected[i % 4])
    for layer in (*model._flatten_layers(), *sharing_model._flatten_layers()):
        assert not {"call", "inner_loop", "_get_regularization_losses"} & vars(layer).keys()


def test_the_users_own_forward_in_another_thread_is_neither_heard_nor_changed(model):
    """A forward pass in another thread, during a capture that replaced the layers' methods, gives its usual result."""
    expected, thread_results = np.asarray(keras.ops.convert_to_numpy(model(X[:2]))), []

    def run_forward():
        thread_results.append(keras.ops.convert_to_numpy(model(X[:2])))
        thread_results.append(float(sum(keras.ops.convert_to_numpy(loss) for loss in model.losses)))

    def start_thread():
        thread = threading.Thread(target=run_forward)
        thread.start()
        thread.join(60)

    def loss(y, output):
        return keras.ops.mean(keras.ops.square(y - output))

    penalty = float(sum(keras.ops.convert_to_numpy(loss) for loss in model.losses))
    CALLBACKS.append(start_thread)
    trace = rl.trace(model, X, Y, loss=loss, layers=["rnn", "dense"])
    reference = rl.trace(model, X, Y, loss=loss, layers=["rnn", "dense"])
    np.testing.assert_allclose(thread_results[0], expected, rtol=1e-6)
    assert thread_results[1] == pytest.approx(penalty)
    assert trace.layers == reference.layers
    np.testing.assert_allclose(trace["rnn"].hidden_grad, reference["rnn"].hidden_grad, rtol=1e-5, atol=1e-8)


@pytest.mark.op_by_op
def test_the_users_own_forward_passes_beside_our_calls(model):
    expected, stop, failures = np.asarray(keras.ops.convert_to_numpy(model(X))), threading.Event(), []

    def run_forward_passes():
        while not stop.is_set():
            try:
                time.sleep(0.01)
                output = keras.ops.convert_to_numpy(model(X))
                if not np.allclose(output, expected, rtol=1e-5):
                    failures.append(output)
            except Exception as error:
                failures.append(error)

    reference = hidden_grad_of(model)
    thread = threading.Thread(target=run_forward_passes)
    thread.start()
    try:
        results = [hidden_grad_of(model) for _ in range(3)]
    finally:
        stop.set()
        thread.join(60)
    assert not failures
    for hidden_grad in results:
        np.testing.assert_array_equal(hidden_grad, reference)
