"""Graphs in the style of 2016 to 2018: cells are recognised and gradients equal TensorFlow's, or they are refused."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl
from rnnlens.errors import UnsupportedError
from rnnlens_tf1.graph_copy import export_definition, import_definition, seed_definition

cell = tf.nn.rnn_cell
SAMPLES, STEPS, FEATURES, UNITS = 3, 5, 3, 4


def lstm_with_a_variable_per_gate(x):
    """Return the states of an LSTM in a Python loop: twelve variables, and the input sliced once per gate."""
    h = c = tf.zeros([SAMPLES, UNITS], x.dtype)
    shapes = {"W": [FEATURES, UNITS], "U": [UNITS, UNITS], "b": [UNITS]}
    w = {k + g: tf.get_variable(k + g, shape, x.dtype) for k, shape in shapes.items() for g in "ifoc"}
    states = []
    for t in range(STEPS):
        a = {g: tf.matmul(x[:, t], w["W" + g]) + tf.matmul(h, w["U" + g]) + w["b" + g] for g in "ifoc"}
        c = tf.sigmoid(a["f"]) * c + tf.sigmoid(a["i"]) * tf.tanh(a["c"])
        h = tf.sigmoid(a["o"]) * tf.tanh(c)
        states.append(h)
    return states


def char_rnn(x):
    """Return the states of an unrolled Elman network whose bias has shape (1, unit)."""
    w = tf.get_variable("Wxh", [FEATURES, UNITS], x.dtype)
    u, b = tf.get_variable("Whh", [UNITS, UNITS], x.dtype), tf.get_variable("bh", [1, UNITS], x.dtype)
    h, states = tf.zeros([SAMPLES, UNITS], x.dtype), []
    for step in tf.unstack(x, axis=1):
        h = tf.tanh(tf.matmul(step, w) + tf.matmul(h, u) + b)
        states.append(h)
    return states


def penn_treebank(x):
    """Return the upper states of the PTB tutorial's loop: variables are created at the first step, then reused."""
    stack = cell.MultiRNNCell([cell.BasicLSTMCell(UNITS, forget_bias=0.0) for _ in range(2)])
    state, states = stack.zero_state(SAMPLES, x.dtype), []
    with tf.variable_scope("RNN"):
        for t in range(STEPS):
            if t > 0:
                tf.get_variable_scope().reuse_variables()
            output, state = stack(x[:, t, :], state)
            states.append(output)
    return states


def static(x):
    """Return the outputs of a GRU in ``static_rnn`` whose initial state is a dense layer of the input's mean."""
    start = tf.layers.dense(tf.reduce_mean(x, 1), UNITS)
    return tf.nn.static_rnn(cell.GRUCell(UNITS), tf.unstack(x, axis=1), initial_state=start)[0]


UNROLLED = {
    lstm_with_a_variable_per_gate: ("m", "lstm"),
    char_rnn: ("m", "simple_rnn"),
    penn_treebank: ("m/RNN/multi_rnn_cell/cell_1", "lstm"),
    static: ("m/rnn", "gru"),
}


def build_model(model, seed=0):
    """Build a model in the default graph; return x, states, stacked states and loss."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    with tf.variable_scope("m", initializer=tf.random_uniform_initializer(-0.8, 0.8, seed=seed)):
        states = model(x)
    outputs = tf.stack(states, 1) if isinstance(states, list) else states
    weights = np.random.default_rng(1).normal(size=[d or 1 for d in outputs.shape.as_list()])
    return x, states, outputs, tf.reduce_sum(outputs * weights)


def net_of(x, outputs, loss):
    session, labels = tf.Session(), tf.placeholder(tf.float64, [None])
    with tf.get_default_graph().as_default():
        total = loss * tf.reduce_mean(labels)
    session.run(tf.global_variables_initializer())
    return rl.tf1.graph(session, inputs={"x": x}, outputs={"y": outputs}, loss=total, targets=labels)


DATA = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES))
ONES = np.ones(SAMPLES)


@pytest.mark.parametrize("model", UNROLLED, ids=lambda model: model.__name__)
def test_unrolled(model):
    """Total gradients of unrolled cells equal ``tf.gradients`` of the loss by the user's own state tensors."""
    x, states, outputs, loss = build_model(model)
    net = net_of(x, outputs, loss)
    name, kind = UNROLLED[model]
    trace = rl.trace(net, DATA, ONES)
    assert {row.name: row.cell for row in rl.layers(net)}[name] == kind
    assert trace.certificate.state == "passed"
    assert not any("Left out" in note for note in trace.notes)
    truth = net.session.run(tf.stack(tf.gradients(loss, states), 1), {x: DATA})
    assert np.abs(trace[name].hidden_grad.values - truth).max() < 1e-12


def scan_of_an_lstm(x):
    """Return the states of an LSTM in ``tf.scan`` with state (h, c) and all gates in one product."""
    w = tf.get_variable("W", [FEATURES, 4 * UNITS], x.dtype)
    u = tf.get_variable("U", [UNITS, 4 * UNITS], x.dtype)

    def step(state, x):
        h, c = state
        i, f, g, o = tf.split(tf.matmul(x, w) + tf.matmul(h, u), 4, 1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c

    zero = tf.zeros([SAMPLES, UNITS], x.dtype)
    return tf.transpose(tf.scan(step, tf.transpose(x, [1, 0, 2]), initializer=(zero, zero))[0], [1, 0, 2])


def encoder_and_decoder(x):
    """Return the outputs of a decoder that starts from the last state of an encoder."""
    _, thought = tf.nn.dynamic_rnn(cell.GRUCell(UNITS), x, dtype=x.dtype, scope="encoder")
    return tf.nn.dynamic_rnn(cell.GRUCell(UNITS), x[:, :-1], initial_state=thought, scope="decoder")[0]


class Either(cell.RNNCell):
    """Cell with tanh in training and ReLU otherwise, chosen by a ``tf.cond``."""

    state_size = output_size = UNITS

    def call(self, x, h):
        z = tf.layers.dense(tf.concat([x, h], 1), UNITS)
        new = tf.cond(tf.placeholder_with_default(True, []), lambda: tf.tanh(z), lambda: tf.nn.relu(z))
        return new, new


LOOPS = {
    scan_of_an_lstm: {"m/scan": "lstm"},
    encoder_and_decoder: {"m/encoder": "gru", "m/decoder": "gru"},
}


@pytest.mark.parametrize("model", LOOPS, ids=lambda model: model.__name__)
def test_loops(model):
    """Input gradients of loops equal finite differences of the loss in the user's own session."""
    x, _, outputs, loss = build_model(model)
    net = net_of(x, outputs, loss)
    assert {row.name: row.cell for row in rl.layers(net)} == LOOPS[model]
    trace = rl.trace(net, DATA, ONES)
    assert trace.certificate.state == "passed"
    first_layer = next(iter(LOOPS[model]))
    grad, eps = trace[first_layer].input_grad.values, 1e-6
    if model is encoder_and_decoder:
        grad = grad + np.pad(trace["m/decoder"].input_grad.values, [(0, 0), (0, 1), (0, 0)])
    for index in [(0, 0, 0), (1, 2, 1), (2, 4, 2)]:
        inputs = [DATA.copy(), DATA.copy()]
        inputs[0][index] += eps
        inputs[1][index] -= eps
        up, down = (net.session.run(loss, {x: m}) for m in inputs)
        assert grad[index] == pytest.approx((up - down) / (2 * eps), rel=1e-6, abs=1e-8)


def test_dropout_is_drawn_once_and_replayed():
    """With random input and output masks, total gradients equal a backward pass by hand over the recorded states."""
    dropout_cell = cell.DropoutWrapper(cell.BasicRNNCell(UNITS), input_keep_prob=0.6, output_keep_prob=0.5)
    x, _, outputs, _ = build_model(lambda x: tf.nn.dynamic_rnn(dropout_cell, x, dtype=x.dtype)[0])
    net = net_of(x, outputs, tf.reduce_sum(outputs))
    trace = rl.trace(net, DATA, ONES)
    layer = trace["m/rnn"]
    assert trace.certificate.state == "passed"  # the reference run draws the same masks, step by step
    kernel, _ = net.session.run(tf.global_variables())
    recurrent, h = kernel[FEATURES:], layer.hidden.values
    assert set(np.unique(layer.output_grad.values)) == {0.0, 2.0}
    zeroed = layer.input.values == 0
    assert 0 < zeroed.sum() < zeroed.size
    assert np.allclose(layer.input.values[~zeroed], DATA[~zeroed] / 0.6)
    total = np.zeros_like(h)
    for t in reversed(range(STEPS)):
        total[:, t] = layer.output_grad.values[:, t]
        if t + 1 < STEPS:
            total[:, t] += (total[:, t + 1] * (1 - h[:, t + 1] ** 2)) @ recurrent.T
    assert np.abs(layer.hidden_grad.values - total).max() < 1e-12


def test_where_numbers_are_drawn_a_copy_runs_one_step_at_a_time(graph):
    """Copied loops with random ops run one step at a time; in parallel, a later step may draw its numbers first."""
    dropout_cell = cell.DropoutWrapper(cell.BasicRNNCell(UNITS), input_keep_prob=0.6)
    build_model(lambda x: tf.nn.dynamic_rnn(dropout_cell, x, dtype=x.dtype)[0])
    assert parallel_iterations(graph) == {32}
    copy = import_definition(seed_definition(export_definition(graph), 0))
    with copy.as_default():  # include the gradient's loop
        loop_outputs = [
            op.outputs[0] for op in copy.get_operations() if op.type in ("TensorArrayGatherV3", "TensorListStack")
        ]
        assert tf.gradients(loop_outputs[-1], copy.get_operation_by_name("Placeholder").outputs)[0] is not None
    assert parallel_iterations(copy) == {1}


def parallel_iterations(graph):
    """Return the set of ``parallel_iterations`` of all loops in the graph."""
    loops = [op.node_def for op in graph.get_operations() if op.type in ("Enter", "While", "StatelessWhile")]
    return {node.attr["parallel_iterations"].i for node in loops}


def scan_states(step, x):
    """Return all states (sample, step, unit) of ``tf.scan``."""
    start = tf.zeros([SAMPLES, UNITS], x.dtype)
    return tf.transpose(tf.scan(step, tf.transpose(x, [1, 0, 2]), initializer=start), [1, 0, 2])


def while_loop_states(step, x):
    """Return all states (sample, step, unit) of a while loop that reads and writes TensorArrays."""
    inputs = tf.TensorArray(x.dtype, STEPS).unstack(tf.transpose(x, [1, 0, 2]))
    outputs, start = tf.TensorArray(x.dtype, STEPS), tf.zeros([SAMPLES, UNITS], x.dtype)

    def body(t, h, outputs):
        h = step(h, inputs.read(t))
        h.set_shape([SAMPLES, UNITS])
        return t + 1, h, outputs.write(t, h)

    _, _, outputs = tf.while_loop(lambda t, *_: t < STEPS, body, (0, start, outputs))
    return tf.transpose(tf.ensure_shape(outputs.stack(), [STEPS, SAMPLES, UNITS]), [1, 0, 2])


@pytest.mark.parametrize(
    ("loop", "reads_in_step"), [(scan_states, False), (while_loop_states, False), (scan_states, True)]
)
def test_a_variable_that_a_step_reads_twice_has_the_sum_of_both_gradients(loop, reads_in_step):
    """If a step reads a variable twice, its gradient is the sum over both reads, not that of the last read only."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    with tf.variable_scope("m", initializer=tf.random_uniform_initializer(-0.8, 0.8, seed=0), use_resource=True):
        w, u = tf.get_variable("w", [FEATURES, UNITS], x.dtype), tf.get_variable("u", [UNITS, UNITS], x.dtype)
        shared_reads = [u.read_value(), u.read_value()]

        def step(h, x_t):
            first, second = [u.read_value(), u.read_value()] if reads_in_step else shared_reads
            return tf.tanh(tf.matmul(x_t, w) + tf.sin(tf.matmul(h, first)) + tf.matmul(h * h, second))

        outputs = loop(step, x)
    loss = tf.reduce_sum(outputs * np.random.default_rng(1).normal(size=(SAMPLES, STEPS, UNITS)))
    by_loss, by_state = (tf.gradients(target, [w, u]) for target in (loss, tf.reduce_sum(outputs[:, 3])))
    net = net_of(x, outputs, loss)
    (row,) = rl.layers(net)
    assert "unknown cell" in row.options
    by_loss, by_state = net.session.run([by_loss, by_state], {x: DATA})
    target = {"of": f"{row.name}.hidden", "at": {"time": 3}, "reduce": "sum"}
    sweep_grads = rl.gradients(net, DATA, wrt=[f"{row.name}/w", f"{row.name}/u"], **target)  # swept over the steps
    weight_grads, weights = rl.gradients(net, DATA, ONES, wrt="weights"), rl.weights(net, DATA, ONES)
    for name, of_loss, of_state in zip("wu", by_loss, by_state, strict=True):
        for array, truth in (
            (sweep_grads[row.name][name], of_state),
            (weight_grads[row.name][name], of_loss),
            (weights[row.name][f"{name}_grad"], of_loss),
        ):
            np.testing.assert_allclose(array.values, truth, rtol=0, atol=1e-12)
    assert rl.trace(net, DATA, ONES).certificate.state == weights.certificate.state == "passed"


class Attention(cell.RNNCell):
    """Cell that attends to all steps of the input at every step."""

    state_size = output_size = UNITS

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def call(self, x, h):
        score = tf.reduce_sum(self.memory * tf.layers.dense(h, FEATURES)[:, None], 2)
        context = tf.reduce_sum(self.memory * tf.nn.softmax(score)[:, :, None], 1)
        new = tf.layers.dense(tf.concat([x, h, context], 1), UNITS, tf.tanh)
        return new, new


class Inner(cell.RNNCell):
    """Cell that solves an equation by a while loop inside its step."""

    state_size = output_size = UNITS

    def call(self, x, h):
        z = tf.layers.dense(x, UNITS)
        _, h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h + 0.1 * (tf.tanh(z) - h)), (0, h))
        return h, h


REFUSED = {
    "attention": (lambda x: tf.nn.dynamic_rnn(Attention(x), x, dtype=x.dtype)[0], "an axis of samples"),
    "inner_loop": (lambda x: tf.nn.dynamic_rnn(Inner(), x, dtype=x.dtype)[0], "a loop within its body"),
    "static_lengths": (
        lambda x: tf.stack(
            tf.nn.static_rnn(
                cell.GRUCell(UNITS), tf.unstack(x, axis=1), dtype=x.dtype, sequence_length=tf.constant([5, 2, 3])
            )[0],
            1,
        ),
        "passed by under a condition",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    model, message = REFUSED[name]
    x, _, outputs, loss = build_model(model)
    net = net_of(x, outputs, loss)
    with pytest.raises(UnsupportedError, match=message) as refusal:
        rl.trace(net, DATA, ONES)
    assert "try:" in str(refusal.value)


def test_a_condition_within_the_step():
    """A cell with a ``tf.cond`` in its step is traced, under control flow v1 and v2."""
    x, _, outputs, loss = build_model(lambda x: tf.nn.dynamic_rnn(Either(), x, dtype=x.dtype)[0])
    assert rl.trace(net_of(x, outputs, loss), DATA, ONES).certificate.state == "passed"
