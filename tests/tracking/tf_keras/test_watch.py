"""The Keras watch records ``fit`` of tf_keras; layers with dropout are refused because masks cannot be drawn again."""

import numpy as np
import pytest
import tf_keras

import rnnlens as rl
from rnnlens.errors import UnsupportedError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 6, 3)).astype("float32")
Y = RANDOM.normal(size=(32, 1)).astype("float32")
RATE = 0.5


class Kernels(tf_keras.callbacks.Callback):
    """A callback that keeps the first layer's kernel after every step."""

    def __init__(self):
        super().__init__()
        self.after = []

    def on_train_batch_end(self, batch, logs=None):
        self.after.append(self.model.get_weights()[0])


class Shifted(tf_keras.__internal__.layers.BaseRandomLayer):
    """A layer that adds a random shift in training, as augmentation layers do."""

    def call(self, x, training=None):
        return x + self._random_generator.random_uniform((1,)) if training else x


def fit(dropout, *callbacks):
    tf_keras.utils.set_random_seed(1)
    lstm = tf_keras.layers.LSTM(5, dropout=dropout, name="lstm")
    model = tf_keras.Sequential([tf_keras.Input((6, 3)), lstm, tf_keras.layers.Dense(1)])
    model.compile(tf_keras.optimizers.SGD(RATE), "mse")
    kernels = Kernels()
    kernels.before = model.get_weights()[0]
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[*callbacks, kernels]).history
    return kernels, history


def test_a_probe_changes_nothing(tmp_path):
    unwatched, unwatched_history = fit(0.3)
    watched, watched_history = fit(0.3, rl.keras.Watch(tmp_path / "a.zarr", probe=(X[:8], Y[:8]), every=3))
    np.testing.assert_array_equal(unwatched.after, watched.after)
    assert watched_history == unwatched_history
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [0, 3, 6]


@pytest.mark.op_by_op
def test_the_gradients_are_those_that_the_optimizer_took():
    gradients = []
    watch = rl.keras.Watch(batches=1, on_batch=lambda batch: gradients.append(batch.gradients["lstm/kernel"].values))
    kernels, _ = fit(0.0, watch)
    before = kernels.before
    assert len(gradients) == 8
    for gradient, after in zip(gradients, kernels.after, strict=True):
        assert np.abs(gradient).max() > 1e-3
        np.testing.assert_allclose(gradient.reshape(before.shape), (before - after) / RATE, rtol=0, atol=1e-6)
        before = after


def test_masks_that_cannot_be_drawn_again_are_refused():
    with pytest.raises(UnsupportedError, match="Layer 'lstm' draws random numbers in training"):
        fit(0.3, rl.keras.Watch(batches=1))


def test_so_is_a_layer_that_draws_without_a_rate():
    model = tf_keras.Sequential([tf_keras.Input((6, 3)), Shifted(), tf_keras.layers.LSTM(2), tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="Layer 'shifted' draws random numbers in training"):
        model.fit(X, Y, verbose=0, callbacks=[rl.keras.Watch(batches=1)])


def test_a_record_of_a_short_batch_traces_no_graph(tmp_path, monkeypatch):
    """Recording a step of an 8-sample batch traces no TensorFlow graph, which would take seconds per record."""
    from rnnlens.autodiff import tensorflow

    traced = []
    graph = tensorflow._graph_function
    monkeypatch.setattr(tensorflow, "_graph_function", lambda *args: traced.append(args) or graph(*args))
    fit(0.0, rl.keras.Watch(tmp_path / "a.zarr", every=1))
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == list(range(1, 9))
    assert not traced
