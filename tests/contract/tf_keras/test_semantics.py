"""Behaviour in which Keras 2 differs from Keras 3: results equal TensorFlow's and NumPy's, or are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import rnnlens as rl
from rnnlens import errors

pytestmark = pytest.mark.op_by_op

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 5, 2))
Y = RANDOM.normal(size=(3, 1))


@pytest.mark.usefixtures("float64")
def test_a_recorded_state_wins_over_a_given_one_as_soon_as_it_is_not_zero():
    inputs, start = keras.Input(batch_shape=(3, 5, 2)), keras.Input(batch_shape=(3, 4))
    layer = keras.layers.SimpleRNN(4, stateful=True, return_sequences=True, name="rnn")
    model = keras.Model([inputs, start], layer(inputs, initial_state=start))
    start_state = RANDOM.normal(size=(3, 4))
    first = rl.trace(model, [X, start_state])["rnn"]
    np.testing.assert_allclose(first.hidden, model([X, start_state]), rtol=1e-12)  # this call records a state
    recorded_state = layer.states[0].numpy()
    second = rl.trace(model, [X, start_state])["rnn"]
    np.testing.assert_array_equal(layer.states[0].numpy(), recorded_state)
    kernel, recurrent, bias = layer.get_weights()
    state, expected = recorded_state, []
    for t in range(5):
        state = np.tanh(X[:, t] @ kernel + state @ recurrent + bias)
        expected.append(state)
    np.testing.assert_allclose(second.hidden, np.stack(expected, 1), rtol=1e-12)
    assert abs(second.hidden - first.hidden).max() > 0.01


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_hard_sigmoid_is_that_of_keras_2(kind):
    layer = getattr(keras.layers, kind)(4, recurrent_activation="hard_sigmoid", return_sequences=True, name="rnn")
    model = keras.Sequential([keras.Input((5, 2)), layer])
    trace = rl.trace(model, 6 * X, loss=lambda y, p: tf.reduce_sum(p**2))
    assert trace.certificate.state == "passed"
    assert all(check.residual <= check.bound for check in trace.checks)
    gates = np.asarray(trace["rnn"].dataset.gates)
    preactivations = np.asarray(trace["rnn"].dataset.gate_preactivation)
    gate = 0  # the input gate of an LSTM, the update gate of a GRU
    np.testing.assert_allclose(gates[:, :, gate], np.clip(0.2 * preactivations[:, :, gate] + 0.5, 0, 1), rtol=1e-12)
    assert (np.abs(preactivations[:, :, gate]) > 2.5).any()


REFUSED = {
    "changed activation": lambda: changed_activation_model(),
    "constants": lambda: constants_model(),
    "own call": lambda: own_call_model(),
    "CuDNN": lambda: cudnn_model(),
}
MESSAGES = {
    "changed activation": "Layer 'rnn' cannot be traced: LSTM was built for tanh and sigmoid",
    "constants": "Layer 'rnn' cannot be traced: RNN hands constants to its cell.",
    "own call": "Layer 'rnn' cannot be traced: Doubled has a call of its own.",
    "CuDNN": "Layer 'rnn' cannot be traced: CuDNNLSTM is a cuDNN kernel, which runs on a GPU only.",
}


def changed_activation_model():
    layer = keras.layers.LSTM(3, name="rnn")
    layer.cell.activation = keras.activations.relu
    return keras.Sequential([keras.Input((5, 2)), layer])


class WithConstants(keras.layers.Layer):
    state_size = 2

    def call(self, x, states, constants=None):
        new = states[0] + tf.reduce_sum(x, -1, keepdims=True) + constants[0]
        return new, [new]


def constants_model():
    inputs, constant = keras.Input((5, 2)), keras.Input((2,))
    return keras.Model([inputs, constant], keras.layers.RNN(WithConstants(), name="rnn")(inputs, constants=constant))


class Doubled(keras.layers.GRU):
    def call(self, inputs, **kwargs):
        return super().call(2 * inputs, **kwargs)


def own_call_model():
    return keras.Sequential([keras.Input((5, 2)), Doubled(3, name="rnn")])


def cudnn_model():
    layer = tf.compat.v1.keras.layers.CuDNNLSTM(3, name="rnn")
    layer.build((None, 5, 2))
    model = keras.Sequential([layer])
    model.built = True
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(name):
    with pytest.raises(errors.UnsupportedError, match=MESSAGES[name]):
        rl.trace(REFUSED[name](), X, layers=["rnn"])


def test_ragged_input_is_refused_by_name():
    ragged = keras.layers.Lambda(lambda t: tf.RaggedTensor.from_tensor(t, lengths=[2, 1]))
    model = keras.Sequential([keras.Input((3, 1)), ragged, keras.layers.LSTM(2)])
    with pytest.raises(errors.UnsupportedError, match="its input is a RaggedTensor"):
        rl.trace(model, np.ones((2, 3, 1)))


def test_keras_3_is_not_loaded_for_a_model_of_keras_2():
    import sys

    model = keras.Sequential([keras.Input((5, 2)), keras.layers.GRU(2)])
    trace = rl.trace(model, X, loss=lambda y, p: tf.reduce_sum(p))
    assert not [name for name in sys.modules if name == "keras" or name.startswith("keras.")]
    assert "rnnlens.adapters.keras.keras3" not in sys.modules
    assert str(trace.provenance["framework"]).startswith("tf_keras 2.21")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("backwards", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ["LSTM", "SimpleRNN"])
def test_time_as_the_first_axis_changes_nothing_in_results(kind, backwards):
    """A ``time_major`` layer has the results of a batch-major layer with the same weights."""
    options = {"return_sequences": True, "go_backwards": backwards, "name": "rnn"}
    time_major_layer = getattr(keras.layers, kind)(3, time_major=True, **options)
    swap_axes = lambda: keras.layers.Lambda(lambda t: tf.transpose(t, [1, 0, 2]))  # noqa: E731
    model = keras.Sequential([keras.Input((5, 2)), swap_axes(), time_major_layer, swap_axes()])
    batch_major_model = keras.Sequential([keras.Input((5, 2)), getattr(keras.layers, kind)(3, **options)])
    batch_major_model.set_weights(model.get_weights())

    def loss(y_true, y_pred):
        return tf.reduce_sum(tf.constant(np.arange(45.0).reshape(3, 5, 3)) * y_pred)

    actual, expected = rl.trace(model, X, loss=loss)["rnn"], rl.trace(batch_major_model, X, loss=loss)["rnn"]
    for name in ("input", "hidden", "output_grad", "hidden_grad", "input_grad"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=1e-12, err_msg=name)
    by_input = rl.gradients(model, X, of="rnn.output", reduce="sum", wrt="rnn.input")
    np.testing.assert_allclose(
        by_input, rl.gradients(batch_major_model, X, of="rnn.output", reduce="sum", wrt="rnn.input")
    )


def test_a_version_that_nobody_tested_is_refused_by_name(monkeypatch):
    import importlib

    from rnnlens.adapters.keras import keras2

    monkeypatch.setattr(keras, "__version__", "2.15.0")
    with pytest.raises(errors.UnsupportedError, match=r"got: +tf_keras 2\.15\.0\n +expected: tf_keras 2\.21\.x"):
        importlib.reload(keras2)


def test_a_model_compiled_without_a_loss_says_so():
    """A model compiled without a loss, as with a custom ``train_step``, raises an error unless ``loss=`` is given."""
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.GRU(3), keras.layers.Dense(1)])
    model.compile("sgd")
    with pytest.raises(errors.ModelError, match="was compiled without a loss"):
        rl.trace(model, X, Y)
    assert rl.trace(model, X, Y, loss="mse").certificate.state == "passed"


def test_an_untrained_copy_has_the_loss_of_the_model(tmp_path):
    """A report's re-initialised copy has the model's loss, although Keras 2 clones a model without its ``compile``."""
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.LSTM(3, name="lstm"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    path = rl.report(model, X, Y, tmp_path / "r.html", baseline="init", diagnosis=False, jacobian=False)
    assert "re-initialised" in path.read_text("utf-8")


class Film(keras.Model):
    def __init__(self):
        super().__init__()
        self.convolution, self.flat = map(
            keras.layers.TimeDistributed, (keras.layers.Conv2D(3, 3), keras.layers.Flatten())
        )
        self.gru = keras.layers.GRU(3)

    def call(self, x):
        return self.gru(self.flat(self.convolution(x)))


def test_films_and_images_read_by_columns_have_their_steps():
    film, image = RANDOM.normal(size=(2, 4, 6, 5, 2)), RANDOM.normal(size=(2, 6, 8, 3))
    model = Film()
    model(film)
    nodes = [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    by_film = rl.gradients(model, film, of="output", reduce="sum", wrt="input")
    assert by_film.dims == ("sample", "time", "height", "width", "feature")
    assert rl.jacobian(model, film).sizes["in_time"] == 4
    assert nodes == [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    inputs = keras.Input((6, 8, 3))
    columns = keras.layers.Reshape((8, 18))(keras.layers.Permute((2, 1, 3))(inputs))
    model = keras.Model(inputs, keras.layers.GRU(3)(columns))
    by_image = rl.gradients(model, image, of="output", reduce="sum", wrt="input")
    assert by_image.dims == ("sample", "time", "axis_1", "feature")
    jacobian = rl.jacobian(model, image)
    assert jacobian.sizes["in_time"] == 8
    summed = jacobian.sum("out_unit").values.reshape(2, 8, 6, 3)
    with tf.GradientTape() as tape:
        tensor = tf.constant(image, "float32")
        tape.watch(tensor)
        value = tf.reduce_sum(model(tensor))
    expected = np.swapaxes(tape.gradient(value, tensor), 1, 2)
    np.testing.assert_allclose(by_image, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(summed, expected, rtol=1e-4, atol=1e-6)
