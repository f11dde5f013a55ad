"""Python loops over a Keras cell are traced as one recurrence, with the gradients of the engine's own autodiff.

Each model can add offsets to the hidden states of its cell: the gradient with respect to an offset is the total
gradient of that state.
"""

from __future__ import annotations

import numpy as np
import pytest
from spoken_keras import LEGACY, engine, gradient, keras

import rnnlens as rl

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.op_by_op]

L = keras.layers
STEPS, UNITS = 5, 4
ops = keras.ops


def zeros(x, units=UNITS):
    return ops.zeros((x.shape[0], units), dtype=x.dtype)


class OwnCell(L.Layer):
    """A cell h' = tanh(W x + U h) whose output is [h', h' * h']."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = self.state_size = units
        self.output_size = 2 * units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.recurrent = self.add_weight(shape=(self.units, self.units), name="recurrent")
        self.built = True

    def call(self, x, states):
        h = ops.tanh(ops.matmul(x, self.kernel) + ops.matmul(states[0], self.recurrent))
        return ops.concatenate([h, h * h], -1), [h]


class Loop(keras.Model):
    """A Python loop over one cell; subclasses change what happens between the steps."""

    def __init__(self, cell=None, **options):
        super().__init__(**options)
        self.cell, self.head = cell or L.LSTMCell(UNITS, name="cell"), L.Dense(2, name="head")

    def states(self, x):
        sizes = self.cell.state_size
        return [zeros(x) for _ in (sizes if isinstance(sizes, (list, tuple)) else [sizes])]

    def step(self, x, states, offsets, t):
        output, new = self.cell(x, states)
        if offsets is None:
            return output, new
        hidden = new[0] + offsets[:, t]
        output = ops.concatenate([hidden, hidden * hidden], -1) if isinstance(self.cell, OwnCell) else hidden
        return output, [hidden, *new[1:]]

    def call(self, x, offsets=None):
        states, outputs = self.states(x), []
        for t in range(x.shape[1]):
            output, states = self.step(x[:, t], states, offsets, t)
            outputs.append(output)
        return self.head(outputs[-1] + outputs[1]) + sum(states)[:, :2]


class Masked(Loop):
    """A loop with a mask: a sample keeps its states where its first feature is at most -0.5."""

    def call(self, x, offsets=None):
        states = self.states(x)
        for t in range(x.shape[1]):
            output, new = self.step(x[:, t], states, offsets, t)
            states = [ops.where(x[:, t, :1] > -0.5, a, b) for a, b in zip(new, states, strict=True)]
        return self.head(output + states[0])


class FeedbackLoop(Loop):
    """A loop in which each prediction is part of the next step's input."""

    def call(self, x, offsets=None):
        states, step_input, predictions = self.states(x), x[:, 0], []
        for t in range(STEPS):
            output, states = self.step(step_input, states, offsets, t)
            predictions.append(self.head(output))
            step_input = ops.concatenate([predictions[-1], x[:, t, 2:]], -1)
        return ops.stack(predictions, 1)


class Attention(Loop):
    """A GRU encoder, and a loop over a decoder cell that attends to the encoder's outputs."""

    def __init__(self, cell=None):
        super().__init__(cell, name="translator")
        self.encoder = L.GRU(UNITS, return_sequences=True, return_state=True, name="encoder")
        self.query = L.Dense(UNITS, name="query")

    def call(self, x, offsets=None):
        memory, state = self.encoder(x)
        states, predictions = [state, *self.states(x)[1:]], []
        for t in range(STEPS):
            scores = ops.sum(ops.expand_dims(self.query(states[0]), 1) * memory, -1)
            context = ops.sum(ops.expand_dims(ops.softmax(scores), -1) * memory, 1)
            output, states = self.step(ops.concatenate([context, x[:, t]], -1), states, offsets, t)
            predictions.append(self.head(output))
        return ops.stack(predictions, 1)


def gru_cell():
    return L.GRUCell(UNITS, name="cell")


MODELS = {
    "LSTM": Loop,
    "GRU": lambda: Loop(gru_cell()),
    "simple": lambda: Loop(L.SimpleRNNCell(UNITS, name="cell")),
    "own cell": lambda: Loop(OwnCell(UNITS, name="cell")),
    "masked LSTM": Masked,
    "masked GRU": lambda: Masked(gru_cell()),
    "fed back": FeedbackLoop,
    "attention": Attention,
    "attention GRU": lambda: Attention(gru_cell()),
}


def make_model_and_data(name):
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, STEPS, 3))
    y = rng.normal(size=(3, *np.shape(model(x[:1]))[1:]))
    model.compile("sgd", "mse")
    return model, x, y


def loss(model, x, y, offsets=None):
    return ops.mean((model.call(x, offsets) - ops.convert_to_tensor(y)) ** 2)


@pytest.mark.product(keep=("masked GRU",) if engine() == "jax" else ("masked GRU", "attention"))
@pytest.mark.parametrize("name", MODELS)
def test_a_loop_over_a_cell_is_one_recurrence(name):
    model, x, y = make_model_and_data(name)
    expected = gradient(lambda offsets: loss(model, ops.convert_to_tensor(x), y, offsets), np.zeros((3, STEPS, UNITS)))
    trace = rl.trace(model, x, y)
    assert trace.certificate.state == "passed", trace.certificate
    assert "cell" in rl.layers(model).names
    assert rl.layers(model, x).names == tuple(trace)
    cell_trace = trace["cell"]
    if name != "own cell":
        assert cell_trace.gates.sizes["time"] == STEPS
    np.testing.assert_allclose(cell_trace.hidden_grad, expected, rtol=1e-9, atol=1e-13)
    total = rl.gradients(model, x, y, of="loss", wrt="cell.hidden")
    assert total.certificate.state == "passed", total.certificate
    np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-13)
    by_input = rl.gradients(model, x, y, of="loss", wrt="cell.input")
    assert by_input.sizes["time"] == STEPS
    weights = rl.weights(model, x, y)
    assert weights.certificate.state == "passed", weights.certificate
    weight_grads = rl.gradients(model, x, y, of="loss", wrt="weights")
    assert weight_grads.certificate.state == "passed", weight_grads.certificate


@pytest.mark.product(keep=("masked GRU",))
@pytest.mark.parametrize("name", ["LSTM", "masked GRU", "attention"])
def test_time_jacobians_through_a_loop_are_those_of_the_whole_model(name):
    model, x, _ = make_model_and_data(name)
    jacobian = rl.jacobian(model, x, of="output", wrt="input")
    assert jacobian.certificate.state == "passed", jacobian.certificate
    state_jacobian = rl.jacobian(model, x, of="output", wrt="cell.hidden")
    entry = (0,) * (len(np.shape(model(x[:1]))) - 1)

    def sum_of_entry(offsets):
        return ops.sum(model.call(ops.convert_to_tensor(x), offsets)[(slice(None), *entry)])

    np.testing.assert_allclose(
        np.asarray(state_jacobian)[(slice(None), *entry)],
        gradient(sum_of_entry, np.zeros((3, STEPS, UNITS))),
        rtol=1e-9,
        atol=1e-13,
    )


def output_by_equations(model, x, offsets):
    """Return the output of a Loop over an LSTMCell by its equations, with numbers added to the cell states."""
    h = c = zeros(x)
    outputs, cell = [], model.cell
    for t in range(STEPS):
        z = ops.matmul(x[:, t], cell.kernel) + ops.matmul(h, cell.recurrent_kernel) + cell.bias
        i, f, g, o = ops.split(z, 4, axis=1)
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g) + offsets[:, t]
        h = ops.sigmoid(o) * ops.tanh(c)
        outputs.append(h)
    return model.head(outputs[-1] + outputs[1]) + (h + c)[:, :2]


@pytest.mark.parametrize("implementation", [1, 2])
def test_gradients_by_cell_states_include_the_hidden_state_of_the_same_step(implementation):
    model = Loop(L.LSTMCell(UNITS, name="cell", implementation=implementation))
    rng = np.random.default_rng(0)
    x, y, zero_offsets = rng.normal(size=(3, STEPS, 3)), rng.normal(size=(3, 2)), np.zeros((3, STEPS, UNITS))
    model(ops.convert_to_tensor(x))
    model.compile("sgd", "mse")
    expected = gradient(
        lambda offsets: ops.sum(output_by_equations(model, ops.convert_to_tensor(x), offsets)[:, 0]), zero_offsets
    )
    assert np.all(expected[:, -1])
    actual = rl.jacobian(model, x, wrt="cell.cell")
    np.testing.assert_allclose(np.asarray(actual)[:, 0], expected, rtol=1e-9, atol=1e-13)
    actual = rl.gradients(model, x, of="output", at={"unit": 0}, reduce="sum", wrt="cell.cell")
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-13)
    expected = gradient(
        lambda offsets: ops.mean(
            (output_by_equations(model, ops.convert_to_tensor(x), offsets) - ops.convert_to_tensor(y)) ** 2
        ),
        zero_offsets,
    )
    for options in ({}, {"per_sample": True}):
        actual = rl.gradients(model, x, y, wrt="cell.cell", **options)
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-13)


def test_paths_within_a_step_of_a_cell_of_ones_own_are_refused_by_name():
    model, x, y = make_model_and_data("own cell")
    assert rl.gradients(model, x, y, wrt="cell.hidden").certificate.state == "passed"
    with pytest.raises(rl.errors.UnsupportedError, match="may compute its output or another state from this one"):
        rl.jacobian(model, x, wrt="cell.hidden")


class Forecaster(keras.Model):
    """Autoregressive forecaster of TensorFlow's time series tutorial: an RNN layer, then a loop over the same cell."""

    def __init__(self, steps=3):
        super().__init__()
        self.steps = steps
        self.lstm_cell = L.LSTMCell(UNITS, name="lstm_cell")
        self.lstm_rnn = L.RNN(self.lstm_cell, return_state=True, name="lstm_rnn")
        self.dense = L.Dense(3, name="dense")

    def call(self, x, training=None):
        output, *state = self.lstm_rnn(x)
        predictions = [self.dense(output)]
        for _ in range(1, self.steps):
            output, state = self.lstm_cell(predictions[-1], states=state, training=training)
            predictions.append(self.dense(output))
        return ops.stack(predictions, 1)


def test_a_cell_in_a_layer_and_in_a_loop_has_one_entry_per_variable():
    model, rng = Forecaster(), np.random.default_rng(0)
    x, y = rng.normal(size=(3, STEPS, 3)), rng.normal(size=(3, 3, 3))
    model(x)
    model.compile("sgd", "mse")
    trace = rl.trace(model, x, y)
    assert trace.certificate.state == "passed", trace.certificate
    assert trace["lstm_rnn"].hidden.sizes["time"] == STEPS
    assert trace["lstm_cell"].hidden.sizes["time"] == 2
    np.testing.assert_allclose(  # the state that the loop starts from is the layer's last
        trace["lstm_cell"].initial_state_grad.values[:, 0],
        trace["lstm_rnn"].final_state_grad.values[:, 0],
        rtol=1e-9,
        atol=1e-13,
    )
    for state in ("lstm_rnn.hidden", "lstm_cell.hidden"):  # each sweep computes its own part of the cell's dL/dW
        total = rl.gradients(model, x, y, of="loss", wrt=state)
        assert total.certificate.state == "passed", total.certificate
        assert state not in total.certificate.resting
        np.testing.assert_allclose(total, trace[state.partition(".")[0]].hidden_grad, rtol=1e-9, atol=1e-13)
    grads = rl.gradients(model, x, y, of="loss", wrt="weights")
    assert sum(len(layer) for layer in grads.values()) == len(model.trainable_variables)
    weights = rl.weights(model, x, y)
    assert weights.certificate.state == "passed", weights.certificate
    assert set(weights) == {"lstm_rnn", "dense"}
    clipped = rl.gradients(model, x, y, of="loss", wrt="weights", clip={"global_clipnorm": 1e-3})
    values = [grad.values for layer in clipped.clipped.values() for grad in layer.values()]
    np.testing.assert_allclose(np.sqrt(sum(float((value**2).sum()) for value in values)), 1e-3, rtol=1e-6)


class TwoSequences(Loop):
    """One cell over two sequences, each from zero states."""

    def call(self, x, offsets=None):
        last_outputs = []
        for sequence in (x, 2 * x):
            states = self.states(x)
            for t in range(STEPS):
                output, states = self.cell(sequence[:, t], states)
            last_outputs.append(output)
        return self.head(last_outputs[0] * last_outputs[1])


def test_each_sequence_is_a_recurrence_of_its_own():
    model, rng = TwoSequences(), np.random.default_rng(0)
    x, y = rng.normal(size=(3, STEPS, 3)), rng.normal(size=(3, 2))
    model(x)
    model.compile("sgd", "mse")
    trace = rl.trace(model, x, y)
    assert sorted(trace) == ["cell#0", "cell#1"]
    assert trace.certificate.state == "passed", trace.certificate
    first, _ = model.cell(ops.convert_to_tensor(x)[:, 0], model.states(x))
    np.testing.assert_allclose(trace["cell#0"].hidden[:, 0], ops.convert_to_numpy(first), rtol=1e-9)


def test_a_loop_that_the_engine_compiles_is_run_eagerly_or_refused_by_name():
    class Compiled(Loop):
        def call(self, x):
            if engine() == "jax":
                import jax

                states = jax.lax.scan(lambda s, x_t: (self.cell(x_t, s)[1], None), self.states(x), x.swapaxes(0, 1))
                return self.head(states[0][0])
            import tensorflow as tf

            states = tf.while_loop(
                lambda t, *s: t < STEPS, lambda t, *s: (t + 1, *self.cell(x[:, t], list(s))[1]), (0, *self.states(x))
            )
            return self.head(states[1])

    if engine() == "torch":  # Keras on torch has no compiled loop
        return
    model, x = Compiled(), np.zeros((2, STEPS, 3))
    model.cell.build((None, 3))
    model(x)
    model.compile("sgd", "mse")
    if engine() == "tensorflow":  # run eagerly, tf.while_loop is a Python loop
        assert rl.trace(model, x, np.zeros((2, 2)))["cell"].hidden.sizes["time"] == STEPS
        return
    with pytest.raises(rl.errors.UnsupportedError, match="called in a loop that the framework compiles"):
        rl.trace(model, x, np.zeros((2, 2)))


class StepByStep(keras.Model):
    """A layer called on one step at a time; ``change`` is applied to the states before each step."""

    def __init__(self, layer, change=lambda states, done: states, masked=False):
        super().__init__()
        self.rnn, self.change, self.masked = layer, change, masked
        self.head = L.Dense(2, name="head")

    def call(self, inputs, offsets=None):
        x, done = inputs[..., :3], inputs[..., 3:]
        sizes = self.rnn.cell.state_size
        count = len(sizes) if isinstance(sizes, (list, tuple)) else 1
        states, outputs = [ops.zeros((x.shape[0], UNITS), dtype=x.dtype)] * count, []
        for t in range(STEPS):
            states = self.change(states, done[:, t])
            options = {"mask": done[:, t] < 0.5} if self.masked else {}
            output, *new = self.rnn(x[:, t : t + 1], initial_state=states, **options)
            if offsets is not None:
                hidden = new[0] + offsets[:, t]
                output = (
                    hidden if not isinstance(self.rnn.cell, OwnCell) else ops.concatenate([hidden, hidden * hidden], -1)
                )
                new = [hidden, *new[1:]]
            states = new
            outputs.append(self.head(output))
        return ops.stack(outputs, 1)


def reset_to_zero(states, done):
    return [state * (1 - done) for state in states]


def scale_and_shift(states, done):
    return [0.9 * state + 0.1 for state in states]


def reset_to_half(states, done):
    return [ops.where(done > 0.5, ops.ones_like(state) / 2, state) for state in states]


def gru_layer():
    return L.GRU(UNITS, return_state=True, name="rnn")


def lstm_layer():
    return L.LSTM(UNITS, return_state=True, name="rnn")


STEPPED = {
    "GRU reset": lambda: StepByStep(gru_layer(), reset_to_zero),
    "GRU mixed": lambda: StepByStep(gru_layer(), scale_and_shift),
    "LSTM mixed": lambda: StepByStep(lstm_layer(), scale_and_shift),
    "LSTM kept": lambda: StepByStep(lstm_layer(), reset_to_half),
}
if not LEGACY:
    STEPPED |= {
        "own cell": lambda: StepByStep(L.RNN(OwnCell(UNITS, name="own"), return_state=True, name="rnn")),
        "own cell reset": lambda: StepByStep(
            L.RNN(OwnCell(UNITS, name="own"), return_state=True, name="rnn"), reset_to_zero
        ),
    }
#: In tf_keras, masked calls of a layer are not joined into one recurrence: each call is a node.
MASKED = ("GRU", "LSTM") if LEGACY else ("GRU", "LSTM", "own cell")


def compile_with_data(model):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, STEPS, 4))
    x[..., 3] = rng.random((3, STEPS)) < 0.4
    y = rng.normal(size=(3, STEPS, 2))
    model(ops.convert_to_tensor(x))
    model.compile("sgd", "mse")
    return model, x, y


@pytest.mark.product(keep=("GRU reset",))
@pytest.mark.parametrize("name", STEPPED)
def test_states_that_the_code_changes_are_one_recurrence(name):
    model, x, y = compile_with_data(STEPPED[name]())
    trace = rl.trace(model, x, y)
    assert list(trace) == ["rnn"]
    assert trace.certificate.state == "passed", trace.certificate
    expected = gradient(lambda offsets: loss(model, ops.convert_to_tensor(x), y, offsets), np.zeros((3, STEPS, UNITS)))
    np.testing.assert_allclose(trace["rnn"].hidden_grad, expected, rtol=1e-9, atol=1e-13)
    total = rl.gradients(model, x, y, wrt="rnn.hidden")
    assert total.certificate.state == "passed", total.certificate
    np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-13)
    weights = rl.weights(model, x, y)
    assert weights.certificate.state == "passed", weights.certificate
    by_input = rl.gradients(model, x, y)
    assert by_input.certificate.state == "passed", by_input.certificate


@pytest.mark.product(keep=("GRU mixed",))
@pytest.mark.parametrize("name", [name for name in STEPPED if "own" not in name])
def test_time_jacobians_through_changed_states(name):
    model, x, _ = compile_with_data(STEPPED[name]())
    jacobian = rl.jacobian(model, x)
    assert jacobian.certificate.state == "passed", jacobian.certificate
    expected = gradient(lambda inputs: ops.sum(model.call(inputs)[:, -1, 0]), x)
    np.testing.assert_allclose(jacobian[:, -1, 0], expected, rtol=1e-9, atol=1e-13)
    state_jacobian, zero_offsets = rl.jacobian(model, x, wrt="rnn.hidden"), np.zeros((3, STEPS, UNITS))
    expected = gradient(lambda offsets: ops.sum(model.call(ops.convert_to_tensor(x), offsets)[:, -1, 0]), zero_offsets)
    np.testing.assert_allclose(state_jacobian[:, -1, 0], expected, rtol=1e-9, atol=1e-13)


@pytest.mark.product(keep=MASKED[1:2])
# On JAX, Keras cannot mask a cell whose output has another size than its state.
@pytest.mark.parametrize("name", [name for name in MASKED if (name, engine()) != ("own cell", "jax")])
def test_a_mask_for_each_step_keeps_the_states_of_masked_samples(name):
    layer = {"GRU": gru_layer, "LSTM": lstm_layer}.get(
        name, lambda: L.RNN(OwnCell(UNITS, name="own"), return_state=True, name="rnn")
    )
    model, x, y = compile_with_data(StepByStep(layer(), masked=True))
    trace = rl.trace(model, x, y)
    assert trace.certificate.state == "passed", trace.certificate
    if LEGACY:
        assert list(trace) == [f"rnn#{t}" for t in range(STEPS)]
        return
    assert list(trace) == ["rnn"]
    hidden, previous = trace["rnn"].hidden, trace["rnn"].previous_hidden
    is_masked = x[:, :-1, 3] > 0.5
    np.testing.assert_allclose(previous[:, 1:].values[is_masked], previous[:, :-1].values[is_masked])
    np.testing.assert_allclose(previous[:, 1:].values[~is_masked], hidden[:, :-1].values[~is_masked])
    assert rl.weights(model, x, y).certificate.state == "passed"


class SeparateCalls(keras.Model):
    """A GRU called on one step at a time, each time from zero states."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = gru_layer(), L.Dense(2)

    def call(self, x):
        return self.head(ops.stack([self.rnn(x[:, t : t + 1])[0] for t in range(3)], 1))


def test_calls_that_do_not_continue_each_other_stay_apart():
    model, rng = SeparateCalls(), np.random.default_rng(0)
    x, y = rng.normal(size=(3, STEPS, 3)), rng.normal(size=(3, 3, 2))
    model(ops.convert_to_tensor(x))
    model.compile("sgd", "mse")
    trace = rl.trace(model, x, y)
    assert list(trace) == ["rnn#0", "rnn#1", "rnn#2"]
    assert trace.certificate.state == "passed", trace.certificate
    if engine() == "torch":
        assert rl.jacobian(model, x, of="rnn#1.output").certificate.state in ("passed", "could not")
