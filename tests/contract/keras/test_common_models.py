"""All verbs on typical user models: each gives a result, its certificate passes, and the model is unchanged."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.op_by_op

L = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 5, 3))
Y = X.sum((1, 2))[:, None]


def compile_model(model, loss="mse"):
    model.compile("sgd", loss)
    return model


def sequential_model(*layers):
    return compile_model(keras.Sequential([keras.Input((5, 3)), *layers, L.Dense(1)]))


def normalised_model():
    layer = L.Normalization()
    layer.adapt(X)
    return sequential_model(layer, L.LSTM(4, name="rnn"))


@keras.saving.register_keras_serializable("rnnlens_tests")
class Counter(L.Layer):
    """A layer that counts its calls in an integer variable."""

    def build(self, shape):
        del shape
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1)
        return x


class TrainedStart(L.SimpleRNNCell):
    """A SimpleRNN cell with a trained initial state."""

    def build(self, shape):
        super().build(shape)
        self.start = self.add_weight(shape=(1, self.units), name="start", initializer="normal")

    def get_initial_state(self, batch_size=None):
        return [keras.ops.repeat(self.start, batch_size, axis=0)]


class PlainCell:
    """A cell that is not a Keras layer, and that counts its calls in Python."""

    state_size = output_size = 4
    compute_dtype = "float64"

    def __init__(self):
        self.count, self.calls = 0, []

    def call(self, x, states, training=False):
        del training
        self.count += 1
        self.calls.append(self.count)
        state = keras.ops.tanh(x[:, :1] + 0.5 * states[0])
        return state, [state]

    __call__ = call


def half_precision_model():
    rnn = L.LSTM(4, return_sequences=True, name="rnn")
    model = keras.Sequential([keras.Input((5, 3)), rnn, L.Dense(3, dtype="mixed_float16"), L.GRU(3), L.Dense(1)])
    return compile_model(model)


MODELS = {
    "Normalization": normalised_model,
    "counter": lambda: sequential_model(Counter(), L.GRU(4, name="rnn")),
    "trained start": lambda: sequential_model(L.RNN(TrainedStart(4), name="rnn")),
    "one layer in half precision": half_precision_model,
    "cell that is no layer": lambda: sequential_model(L.RNN(PlainCell(), name="rnn")),
}


@pytest.mark.product(keep=("trained start",))
@pytest.mark.parametrize("case", MODELS)
def test_every_verb_passes_its_certificate(case):
    model = MODELS[case]()
    results = [
        rl.trace(model, X, Y),
        rl.gradients(model, X, Y, of="loss", wrt=["input", "weights"]),
        rl.gradients(model, X, Y, of="loss", wrt="rnn.hidden"),
        rl.jacobian(model, X, of="output", wrt="input"),
        rl.weights(model, X, Y),
    ]
    assert [result.certificate.state for result in results] == ["passed"] * 5


@pytest.mark.one_engine
def test_weights_of_eight_bits():
    model = sequential_model(L.LSTM(4, name="rnn"))
    with pytest.warns(UserWarning, match="quantize"):
        model.quantize("int8")
    assert rl.weights(model, X, Y).certificate.state == "passed"
    assert rl.gradients(model, X, Y, of="loss", wrt="input").certificate.state == "passed"


@pytest.mark.one_engine
def test_a_counter_and_a_list_of_a_cell_are_restored():
    model = sequential_model(L.RNN(PlainCell(), name="rnn"))
    cell = model.layers[0].cell
    count, calls = cell.count, list(cell.calls)
    rl.trace(model, X, Y)
    rl.jacobian(model, X, of="rnn.hidden", wrt="input")
    assert (cell.count, cell.calls) == (count, calls)


@pytest.mark.one_engine
@pytest.mark.parametrize("order", ["ba", "ab"])
def test_inputs_by_name_in_any_order(order):
    inputs = {name: keras.Input((5, size), name=name) for name, size in (("b", 3), ("a", 2))}
    hidden = L.LSTM(4, name="rnn")(L.Concatenate()([inputs["b"], inputs["a"]]))
    model = compile_model(keras.Model([inputs["b"], inputs["a"]], L.Dense(1)(hidden)))
    data = {name: X[..., : 3 if name == "b" else 2] for name in order}
    for name in order:
        jacobian = rl.jacobian(model, data, of="output", wrt=f"input[{name}]")
        assert jacobian.certificate.state == "passed"
        gradient = rl.gradients(model, data, of="output", at={"unit": 0}, reduce="sum", wrt=f"input[{name}]")
        np.testing.assert_allclose(jacobian.values.reshape(gradient.shape), gradient, rtol=1e-9, atol=1e-12)
    assert rl.trace(model, data, Y).certificate.state == "passed"


@pytest.mark.compiled
def test_the_gradient_of_a_recorded_state_is_certified():
    model = compile_model(
        keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), L.LSTM(4, stateful=True, name="rnn"), L.Dense(1)])
    )
    model.predict(X, batch_size=4, verbose=0)
    trace = rl.trace(model, X, Y)
    assert trace.certificate.state == "passed"
    assert np.abs(trace["rnn"].dataset.initial_state_grad).max() > 0


@pytest.mark.compiled
@pytest.mark.only_on("tensorflow")
def test_a_loss_whose_loop_tensorflow_cannot_differentiate_from_outside():
    model = keras.Sequential([keras.Input((5, 3)), L.GRU(4, return_sequences=True, name="rnn"), L.Dense(4)])
    compile_model(model, keras.losses.CTC())
    labels = RANDOM.integers(1, 4, (4, 2))
    gradient = rl.gradients(model, X, labels, of="loss", wrt="input")
    assert gradient.certificate.state == "passed"
    perturbation = 1e-2 * np.asarray(gradient) / np.linalg.norm(gradient)  # CTC is computed in float32
    losses = [float(model.compute_loss(None, labels, model(X + sign * perturbation))) for sign in (1, -1)]
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * perturbation), (losses[0] - losses[1]) / 2, rtol=1e-2)


class Scores(L.Layer):
    """The negative log-probability of a label sequence by CTC, and twice that."""

    def call(self, logits):
        import tensorflow as tf

        logits = tf.cast(logits, tf.float32)  # as CTC is computed
        length, ones = logits.shape[1], tf.ones_like(logits[:, 0, 0], tf.int32)
        labels = tf.stack([ones, 2 * ones], axis=1)
        score = tf.nn.ctc_loss(labels, logits, 2 * ones, length * ones, logits_time_major=False, blank_index=3)
        return tf.stack([score, 2 * score], axis=1)


@pytest.mark.compiled
@pytest.mark.only_on("tensorflow")
@pytest.mark.full
def test_rows_of_a_jacobian_through_such_a_loop():
    import tensorflow as tf

    model = keras.Sequential([keras.Input((5, 3)), L.GRU(4, return_sequences=True), L.Dense(4), Scores()])
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = model(x)[:, 0]
    expected = tape.gradient(score, x)
    jacobian = rl.jacobian(model, X, of="output", wrt="input")
    assert jacobian.certificate.state == "passed"
    for unit, factor in enumerate((1, 2)):
        np.testing.assert_allclose(jacobian.sel(out_unit=unit), factor * expected, rtol=1e-4, atol=1e-6)


class Loop(keras.Model):
    """A model that calls a cell in its own loop."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = L.LSTMCell(4, name="cell"), L.Dense(1, name="head")

    def call(self, x):
        states = [keras.ops.zeros((x.shape[0], 4), dtype=x.dtype)] * 2
        for t in range(x.shape[1]):
            output, states = self.cell(x[:, t], states)
        return self.head(output)


@pytest.mark.one_engine
def test_a_cell_in_the_models_own_loop_has_the_numbers_of_a_layer():
    model = compile_model(Loop())
    model(X)
    layer = keras.Sequential([keras.Input((5, 3)), L.LSTM(4, name="rnn"), L.Dense(1)])
    layer.set_weights(model.get_weights())
    expected = rl.trace(compile_model(layer), X, Y)["rnn"]
    traced = rl.trace(model, X, Y)["cell"]
    for name in ("hidden", "cell", "gates", "hidden_grad", "cell_grad", "gate_grad", "input_grad"):
        np.testing.assert_allclose(traced[name], expected[name], rtol=1e-4, atol=1e-7)


def test_the_jacobian_of_probabilities_is_certified():
    model = keras.Sequential([keras.Input((5, 3)), L.GRU(4, name="rnn"), L.Dense(3, "softmax")])
    assert rl.jacobian(model, X, measure="norm").certificate.state == "passed"


@keras.saving.register_keras_serializable("rnnlens_tests")
class Small(L.Layer):
    """A layer that adds a loss of its input."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.parametrize("layer", [Small(), L.ActivityRegularization(l2=0.1)], ids=["add_loss", "activity"])
def test_weight_gradients_by_sample_refuse_losses_that_layers_add(layer):
    model = sequential_model(L.GRU(4, name="rnn"), layer)
    with pytest.raises(rl.errors.UnsupportedError, match="cannot be divided among samples"):
        rl.gradients(model, X, Y, wrt="rnn/kernel", per_sample=True)
    shares = rl.gradients(model, X, Y, wrt="rnn.hidden", per_sample=True)
    np.testing.assert_allclose(shares, rl.gradients(model, X, Y, wrt="rnn.hidden"))
