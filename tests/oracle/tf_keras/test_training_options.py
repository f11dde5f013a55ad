"""Training losses, clipping, dropout, and common cells and models: results equal those of tf_keras and NumPy."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import rnnlens as rl

L = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 5, 3)).astype("float32")
Y = RANDOM.normal(size=(6, 2)).astype("float32")


def check_passed(result):
    assert result.certificate.state == "passed", result.certificate
    return result


def test_several_outputs_their_weights_and_metrics_that_stay_as_they_were():
    inputs = keras.Input((5, 3))
    hidden = L.LSTM(4, return_sequences=True, kernel_regularizer="l2", activity_regularizer="l1", name="lstm")(inputs)
    model = keras.Model(inputs, [L.Dense(2, name="a")(L.GRU(3, name="gru")(hidden)), L.Dense(1, name="b")(hidden)])
    model.add_loss(tf.reduce_mean(hidden))
    model.compile("adam", {"a": "mse", "b": "mae"}, loss_weights={"a": 0.3, "b": 2.0}, metrics={"a": "mae"})
    y = {"a": Y, "b": RANDOM.normal(size=(6, 5, 1)).astype("float32")}
    expected = model.evaluate(X, y, verbose=0)[0]
    before = [v.numpy() for metric in model.metrics for v in metric.variables]
    trace = check_passed(rl.trace(model, X, y))
    assert float(trace.loss) == pytest.approx(expected, rel=1e-5)
    after = [v.numpy() for metric in model.metrics for v in metric.variables]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("weights", ["sample_weight", "class_weight"])
def test_weights_of_samples_and_of_classes(weights):
    model = keras.Sequential([keras.Input((5, 3)), L.GRU(4, name="gru"), L.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.legacy.SGD(0.0), "sparse_categorical_crossentropy")
    y = np.array([0, 1, 2, 2, 1, 0])
    weight_values = {"sample_weight": RANDOM.random(6), "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}[weights]
    fitted_loss = model.fit(X, y, batch_size=6, verbose=0, **{weights: weight_values}).history["loss"][0]
    assert float(check_passed(rl.trace(model, X, y, **{weights: weight_values})).loss) == pytest.approx(
        fitted_loss, rel=1e-5
    )


@pytest.mark.parametrize("optimizer", ["legacy", "new"])
def test_clipping_as_the_optimizer_does_it(optimizer):
    """Clipped gradients equal the change of the weights in one step of SGD at a learning rate of 1."""
    optimizer_class = keras.optimizers.legacy.SGD if optimizer == "legacy" else keras.optimizers.SGD
    model = keras.Sequential([keras.Input((5, 3)), L.GRU(4, name="gru"), L.Dense(2, name="head")])
    model.compile(optimizer_class(1.0, clipnorm=0.01), "mse")
    clipped = rl.gradients(model, X, Y, wrt="weights", clip="optimizer").clipped
    before = model.get_layer("head").kernel.numpy()
    model.train_on_batch(X, Y)
    np.testing.assert_allclose(clipped["head/kernel"], before - model.get_layer("head").kernel.numpy(), atol=1e-6)
    assert np.linalg.norm(clipped["head/kernel"]) == pytest.approx(0.01, rel=1e-4)


class Batches(keras.utils.Sequence):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return X[2 * i : 2 * i + 2], Y[2 * i : 2 * i + 2]


def test_a_sequence_of_keras_2_is_a_data_set():
    model = keras.Sequential([keras.Input((5, 3)), L.SimpleRNN(4, name="rnn"), L.Dense(2)])
    model.compile("sgd", "mse")
    grads = rl.gradients(model, Batches(), wrt="weights")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.mean_squared_error(Y, model(X)))
    np.testing.assert_allclose(grads["rnn"].kernel[:, 0], tape.gradient(loss, model.layers[0].cell.kernel), rtol=1e-4)


CELLS = {
    "stacked": lambda: [L.LSTMCell(2), L.GRUCell(3)],
    "residual": lambda: tf.nn.RNNCellResidualWrapper(L.LSTMCell(3)),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_cells_as_people_write_them(name):
    model = keras.Sequential([keras.Input((5, 3)), L.RNN(CELLS[name](), name="rnn"), L.Dense(2)])
    model.compile("sgd", "mse")
    check_passed(rl.trace(model, X, Y))


def test_half_precision_is_shown_as_float32():
    lstm = L.LSTM(4, dtype="mixed_bfloat16", return_sequences=True, name="lstm")
    model = keras.Sequential([keras.Input((5, 3)), lstm, L.GRU(2, dtype="float32")])
    trace = check_passed(rl.trace(model, X, Y, loss="mse"))
    assert trace["lstm"].hidden_grad.dtype in ("float32", "float64")
    np.testing.assert_allclose(trace["lstm"].hidden, np.array(tf.cast(lstm(X), "float32")), atol=0.01)


@pytest.mark.parametrize("steps", [64, pytest.param(0, marks=pytest.mark.full)], ids=["op by op", "traced"])
def test_dropout_in_training_is_that_of_the_model_run_plainly(steps, monkeypatch):
    """Traces with dropout per gate, in the fused kernel and between layers are certified and repeat with the seed."""
    monkeypatch.setattr(importlib.import_module("rnnlens.adapters.keras.keras2"), "_MAX_EAGER_STEPS", steps)
    lstm = L.LSTM(4, dropout=0.3, recurrent_dropout=0.2, return_sequences=True, name="lstm")
    layers = [lstm, L.Dropout(0.5), L.GRU(3, dropout=0.4, name="gru"), L.GaussianNoise(0.1), L.Dense(2)]
    model = keras.Sequential([keras.Input((5, 3)), *layers])
    model.compile("sgd", "mse")
    tf.random.set_seed(5)
    expected = tf.random.normal((2,)).numpy()
    tf.random.set_seed(5)
    first, same_seed, other_seed = (
        check_passed(rl.trace(model, X, Y, training=True, seed=seed)).loss for seed in (3, 3, 4)
    )
    assert first == same_seed != other_seed
    np.testing.assert_array_equal(tf.random.normal((2,)), expected)  # the user's random stream is unchanged


class Subclassed(keras.Model):
    """Model of a bidirectional LSTM and a GRU whose ``call`` has no ``training`` argument."""

    def __init__(self):
        super().__init__()
        self.bi = L.Bidirectional(L.LSTM(3, return_sequences=True), merge_mode="ave", name="bi")
        self.rnn = L.GRU(2, name="gru")
        self.drop = L.Dropout(0.5)
        self.head = L.Dense(2, name="head")

    def call(self, x):
        return self.head(self.drop(self.rnn(self.bi(x))))


@pytest.mark.parametrize("eagerly", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_subclassed_model_through_every_verb(eagerly):
    model = Subclassed()
    model.compile("adam", "mse", run_eagerly=eagerly)
    model.fit(X, Y, verbose=0)
    assert [row.name for row in rl.layers(model)] == ["bi", "gru"]
    check_passed(rl.trace(model, X, Y))
    check_passed(rl.gradients(model, X, Y, wrt=["input", "weights"]))
    check_passed(rl.weights(model, X, Y))
    with tf.GradientTape() as tape:
        inputs = tf.constant(X)
        tape.watch(inputs)
        y = model(inputs)
    np.testing.assert_allclose(rl.jacobian(model, X), tape.batch_jacobian(y, inputs), rtol=1e-4, atol=1e-7)


def test_see_rnns_quick_start_network():
    """Direct gradients equal a tape's on the split model, total ones those of tapped float64 states (both 1e-5)."""
    inputs = keras.Input(batch_shape=(8, 20, 4))
    hidden = L.LSTM(7, return_sequences=True, name="lstm")(inputs)
    model = keras.Model(inputs, L.Dense(4, name="head")(L.LSTM(5, name="last")(hidden)))
    model.compile("adam", "mse")
    x, y = RANDOM.normal(size=(8, 20, 4)).astype("float32"), RANDOM.normal(size=(8, 4)).astype("float32")
    model.train_on_batch(x, y)
    trace = check_passed(rl.trace(model, x, y))["lstm"]

    value = keras.Model(model.inputs, hidden)(x)
    with tf.GradientTape() as tape:
        tape.watch(value)
        loss = tf.reduce_mean((model.get_layer("head")(model.get_layer("last")(value)) - y) ** 2)
    direct = tape.gradient(loss, value).numpy()
    np.testing.assert_allclose(trace.output_grad, direct, atol=1e-5 * np.abs(direct).max())

    weights = [tf.constant(w, tf.float64) for w in model.get_weights()]
    taps = tf.zeros((20, 8, 7), tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(taps)
        states = lstm_states(tf.constant(x, tf.float64), *weights[:3], taps)
        last = lstm_states(tf.stack(states, 1), *weights[3:6])[-1]
        loss = tf.reduce_mean((last @ weights[6] + weights[7] - y) ** 2)
    total = tf.transpose(tape.gradient(loss, taps), [1, 0, 2]).numpy()
    np.testing.assert_allclose(trace.hidden_grad, total, atol=1e-5 * np.abs(total).max())


def lstm_states(x, kernel, recurrent, bias, taps=None):
    """Return the list of states h (sample, unit) of an LSTM by its equations; ``taps`` (zeros) are added to them."""
    h = c = tf.zeros((x.shape[0], recurrent.shape[0]), tf.float64)
    states = []
    for t in range(x.shape[1]):
        i, f, g, o = tf.split(x[:, t] @ kernel + h @ recurrent + bias, 4, axis=-1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        h = tf.sigmoid(o) * tf.tanh(c) + (0.0 if taps is None else taps[t])
        states.append(h)
    return states
