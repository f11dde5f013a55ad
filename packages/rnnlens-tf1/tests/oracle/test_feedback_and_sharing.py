"""Recurrences beyond one chain of steps: outputs fed back, one cell in several loops, loops in branches."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl

cells = tf.nn.rnn_cell
SAMPLES, STEPS, FEATURES, UNITS = 3, 5, 4, 3
DRAW = np.random.default_rng(0).normal


def net_of(x, outputs, loss, **options):
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    return rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss, **options)


def build_decoder(make):
    """Build a cell fed with a dense layer of its last output; return x, flat states per step, outputs and loss."""
    x = tf.placeholder(tf.float64, [SAMPLES, FEATURES])
    with tf.variable_scope("m"):
        cell, step_input, states, outputs = make(), x, [], []
        state = cell.zero_state(SAMPLES, tf.float64)
        for t in range(STEPS):
            output, state = cell(step_input, state)
            step_input = tf.layers.dense(output, FEATURES, name="head", reuse=t > 0)
            states.append(tf.nest.flatten(state))
            outputs.append(step_input)
    outputs = tf.stack(outputs, 1)
    return x, states, outputs, tf.reduce_sum(outputs**2)


DECODERS = {
    "gru": (lambda: cells.GRUCell(UNITS), [("m", ["hidden"])]),
    "lstm": (lambda: cells.LSTMCell(UNITS), [("m", ["cell", "hidden"])]),
    "stack": (
        lambda: cells.MultiRNNCell([cells.BasicLSTMCell(UNITS), cells.GRUCell(UNITS)]),
        [("m/multi_rnn_cell/cell_0", ["cell", "hidden"]), ("m/multi_rnn_cell/cell_1", ["hidden"])],
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_outputs_that_are_fed_back(name):
    """Total gradients of a cell with feedback equal ``tf.gradients`` of the loss by the user's own state tensors."""
    make, layers = DECODERS[name]
    x, states, outputs, loss = build_decoder(make)
    columns = list(zip(*states, strict=True))
    gradients = [tf.stack(tf.gradients(loss, column), 1) for column in columns]
    net, data = net_of(x, outputs, loss), DRAW(size=(SAMPLES, FEATURES))
    trace = rl.trace(net, data)
    assert trace.certificate.state == "passed"
    total_grads = [trace[layer][f"{quantity}_grad"].values for layer, quantities in layers for quantity in quantities]
    for actual, expected in zip(total_grads, net.session.run(gradients, {x: data}), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-13)


def test_a_time_jacobian_through_what_is_fed_back():
    x, states, outputs, loss = build_decoder(DECODERS["gru"][0])
    hidden = [state[0] for state in states]
    rows = [[tf.gradients(outputs[:, t, 1], h, unconnected_gradients="zero")[0] for h in hidden] for t in range(STEPS)]
    net, data = net_of(x, outputs, loss), DRAW(size=(SAMPLES, FEATURES))
    jacobian = rl.jacobian(net, data, of="output", wrt="m.hidden").isel(out_unit=1)
    truth = net.session.run(tf.stack([tf.stack(row, 1) for row in rows], 1), {x: data})
    np.testing.assert_allclose(jacobian.transpose("sample", "out_time", ...).values, truth, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("read_steps", "projection"),
    [
        ([-1], None),
        ([0, 1, 2], 2),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (([-1], 2), ([1, -1], None), ([1, -1], 2), ([0, 1, 2], None))
        ),
    ],
)
def test_a_cell_state_that_the_head_reads(read_steps, projection):
    """Jacobians and gradients are exact if the head reads cell states of some steps besides the last hidden state."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    with tf.variable_scope("m"):
        cell, states = cells.LSTMCell(UNITS, num_proj=projection), []
        state = cell.zero_state(SAMPLES, tf.float64)
        for t in range(STEPS):
            _, state = cell(x[:, t], state)
            states.append(state)
    y = tf.layers.dense(tf.concat([*(states[t].c for t in read_steps), state.h], 1), 2)
    net, data = net_of({"x": x}, y, None), DRAW(size=(SAMPLES, STEPS, FEATURES))
    sources = {"input": None, "m.hidden": [s.h for s in states], "m.cell": [s.c for s in states]}
    for wrt, tensors in sources.items():
        jacobian = rl.jacobian(net, data, wrt=wrt)
        unit_grads = [
            tf.stack(tf.gradients(y[:, k], tensors), 1) if tensors else tf.gradients(y[:, k], x)[0] for k in range(2)
        ]
        truth = net.session.run(tf.stack(unit_grads, 1), {x: data})
        np.testing.assert_allclose(jacobian.transpose("sample", "out_unit", ...).values, truth, rtol=1e-10, atol=1e-13)
        summed_grad = rl.gradients(net, data, of="output", wrt=wrt, reduce="sum")
        np.testing.assert_allclose(summed_grad.values, truth.sum(1), rtol=1e-10, atol=1e-13)
        assert {jacobian.certificate.state, summed_grad.certificate.state} == {"passed"}


@pytest.mark.parametrize("projection", [None, 2])
def test_only_the_last_cell_state_is_read(projection):
    """The last step counts if only its cell state is read: its output is in the graph, but no loss depends on it."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    with tf.variable_scope("m"):
        cell, states = cells.LSTMCell(UNITS, num_proj=projection), []
        state = cell.zero_state(SAMPLES, tf.float64)
        for t in range(STEPS):
            _, state = cell(x[:, t], state)
            states.append(state)
    loss = tf.reduce_sum(state.c**2)
    by_cell, by_hidden = (tf.gradients(loss, column) for column in ([s.c for s in states], [s.h for s in states[:-1]]))
    net, data = net_of(x, state.c, loss), DRAW(size=(SAMPLES, STEPS, FEATURES))
    trace = rl.trace(net, data)
    assert trace.certificate.state == "passed"
    session, hidden_grad = net.session, trace["m"]["hidden_grad"].values
    np.testing.assert_array_equal(trace["m"]["hidden"][:, -1].values, session.run(state.h, {x: data}))
    np.testing.assert_allclose(
        trace["m"]["cell_grad"].values, session.run(tf.stack(by_cell, 1), {x: data}), rtol=1e-10, atol=1e-13
    )
    np.testing.assert_allclose(
        hidden_grad[:, :-1], session.run(tf.stack(by_hidden, 1), {x: data}), rtol=1e-10, atol=1e-13
    )
    assert not hidden_grad[:, -1].any()
    input_grad, truth = rl.gradients(net, data, wrt="input"), session.run(tf.gradients(loss, x), {x: data})
    np.testing.assert_allclose(input_grad.values, truth[0], rtol=1e-10, atol=1e-13)


def test_feedback_of_a_state_that_is_no_output_is_refused():
    x = tf.placeholder(tf.float64, [SAMPLES, UNITS])
    cell, step_input = cells.BasicLSTMCell(UNITS), x
    state = cell.zero_state(SAMPLES, tf.float64)
    for _ in range(STEPS):
        _, state = cell(step_input, state)
        step_input = tf.tanh(state.c)
    net = net_of(x, step_input, tf.reduce_sum(step_input))
    with pytest.raises(rl.errors.UnsupportedError, match="a state that is not their output"):
        rl.trace(net, DRAW(size=(SAMPLES, UNITS)))


def test_both_inputs_of_a_siamese_network_are_calls_of_one_layer():
    x, z = (tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES], name=name) for name in "xz")
    encodings = []
    for i, sequence in enumerate((x, z)):
        with tf.variable_scope("encoder", reuse=i > 0):
            encodings.append(tf.nn.dynamic_rnn(cells.BasicLSTMCell(UNITS), sequence, dtype=tf.float64)[1].h)
    outputs = encodings[0] - encodings[1]
    loss = tf.reduce_sum(outputs**2)
    variables = tf.trainable_variables()
    gradients = tf.gradients(loss, variables)
    clipped, _ = tf.clip_by_global_norm(gradients, 0.5)
    net = net_of({"x": x, "z": z}, outputs, loss)
    data = {"x": DRAW(size=(SAMPLES, STEPS, FEATURES)), "z": DRAW(size=(SAMPLES, STEPS, FEATURES))}
    assert [(row.name, row.options["calls"]) for row in rl.layers(net)] == [("encoder/rnn", 2)]
    assert list(rl.trace(net, data)) == ["encoder/rnn#0", "encoder/rnn#1"]
    truth, clipped_truth = net.session.run([gradients, clipped], {x: data["x"], z: data["z"]})
    by_weight = rl.gradients(net, data, wrt="weights")
    assert len(gradient_arrays(by_weight)) == 3
    assert global_norm(by_weight) == pytest.approx(np.sqrt(sum((g**2).sum() for g in truth)), rel=1e-12)
    by_step = rl.gradients(net, data, wrt="weights", clip={"global_clipnorm": 0.5})
    assert global_norm(by_step.clipped) == pytest.approx(np.sqrt(sum((g**2).sum() for g in clipped_truth)), rel=1e-12)
    bias = truth[1].reshape(4, UNITS)[[0, 2, 1, 3]]  # TensorFlow's order is input, candidate, forget, output
    np.testing.assert_allclose(by_weight["encoder/rnn/bias"].values, bias, rtol=1e-10, atol=1e-13)
    assert rl.weights(net, data).certificate.state == "passed"


def gradient_arrays(gradients):
    return [gradients[layer][key].values for layer in gradients for key in gradients[layer]]


def global_norm(gradients):
    return np.sqrt(sum(float((values**2).sum()) for values in gradient_arrays(gradients)))


def test_truncated_backpropagation_runs_one_cell_in_several_loops():
    x = tf.placeholder(tf.float64, [SAMPLES, 8, FEATURES])
    cell, state, outputs = cells.GRUCell(UNITS), None, []
    for i in range(4):
        with tf.variable_scope("rnn", reuse=i > 0):
            start = {"dtype": tf.float64} if state is None else {"initial_state": state}
            output, state = tf.nn.dynamic_rnn(cell, x[:, 2 * i : 2 * i + 2], **start)
            state = tf.stop_gradient(state)
            outputs.append(output)
    outputs = tf.concat(outputs, 1)
    loss = tf.reduce_sum(outputs**2)
    truth = tf.gradients(loss, tf.trainable_variables())
    net, data = net_of(x, outputs, loss), DRAW(size=(SAMPLES, 8, FEATURES))
    by_weight = rl.gradients(net, data, wrt="weights")
    assert len(gradient_arrays(by_weight)) == 3
    expected = net.session.run(truth, {x: data})
    assert global_norm(by_weight) == pytest.approx(np.sqrt(sum((g**2).sum() for g in expected)), rel=1e-12)
    assert rl.trace(net, data).certificate.state == "passed"


def test_a_loop_in_a_branch_is_refused_by_name():
    x, switch = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES]), tf.placeholder(tf.bool, [])

    def encode():
        return tf.nn.dynamic_rnn(cells.GRUCell(UNITS), x, dtype=tf.float64)[1]

    outputs = tf.cond(switch, encode, lambda: tf.zeros([SAMPLES, UNITS], tf.float64))
    loss = tf.reduce_sum(outputs**2)
    truth = tf.gradients(loss, x)[0]
    net, data = net_of(x, outputs, loss, feed={switch: True}), DRAW(size=(SAMPLES, STEPS, FEATURES))
    with pytest.raises(rl.errors.UnsupportedError, match=r"one branch of a tf\.cond"):
        rl.trace(net, data)
    by_input = rl.gradients(net, data, wrt="input")
    np.testing.assert_allclose(by_input.values, net.session.run(truth, {x: data, switch: True}), rtol=1e-12)
