"""Two cells of one loop read each other's previous states: gradients and time Jacobians include all these paths."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl
from rnnlens_tf1 import open_net

cells = tf.nn.rnn_cell
SAMPLES, STEPS, FEATURES, UNITS = 2, 4, 2, 3
X = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES))


class Crossed(cells.RNNCell):
    """Two GRU cells; the lower one reads the upper one's output of the previous step."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper = cells.GRUCell(UNITS, name="lower"), cells.GRUCell(UNITS, name="upper")

    state_size = property(lambda self: (UNITS, UNITS))
    output_size = property(lambda self: UNITS)

    def call(self, x, state):
        below, above = state
        below, _ = self.lower(tf.concat([x, above], 1), below)
        above, _ = self.upper(below, above)
        return above, (below, above)


class Skewed(Crossed):
    """Two GRU cells; the upper one reads the lower one's output of the previous step."""

    def call(self, x, state):
        below, above = state
        new_below, _ = self.lower(x, below)
        above, _ = self.upper(below, above)
        return above, (new_below, above)


class OldOutput(Crossed):
    """Two GRU cells; a step's output includes the lower cell's previous state."""

    def call(self, x, state):
        below, above = state
        new_below, _ = self.lower(x, below)
        new_above, _ = self.upper(new_below, above)
        return new_above + below, (new_below, new_above)


def run_step_by_step(cell, x):
    state, outputs, states = cell.zero_state(SAMPLES, tf.float64), [], []
    for t in range(STEPS):
        output, state = cell(x[:, t], state)
        outputs.append(output)
        states.append(state)
    return tf.stack(outputs, 1), states


def loss_of(outputs):
    return tf.reduce_sum(tf.square(outputs) * tf.constant(np.arange(1.0, 1 + STEPS))[None, :, None])


def net_of(x, outputs):
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    return rl.tf1.graph(session, inputs={"x": x}, outputs={"y": outputs}, loss=loss_of(outputs))


def reference_results(make, values):
    """Return states, dL/ds, dL/dx, dh/dx and dh/d(first upper state) of the same cell called step by step."""
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.constant(X)
        with tf.variable_scope("net/rnn"):
            outputs, states = run_step_by_step(make(), x)
        for variable in tf.global_variables():
            variable.load(values[variable.op.name], session)
        loss = loss_of(outputs)
        columns, zero = [list(column) for column in zip(*states, strict=True)], "zero"
        by_state = [tf.gradients(loss, column, unconnected_gradients=zero) for column in columns]
        unit_sums = [[tf.reduce_sum(s[:, unit]) for s, _ in states] for unit in range(UNITS)]
        by_input = [[tf.gradients(unit_sum, x)[0] for unit_sum in column] for column in unit_sums]
        start = states[0][1]
        by_start = [[tf.gradients(n, start, unconnected_gradients=zero)[0] for n in column] for column in unit_sums]
        fetches = [[tf.stack(column, 1) for column in columns], [tf.stack(g, 1) for g in by_state]]
        return session.run([*fetches, tf.gradients(loss, x)[0], by_input, by_start])


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("make", [Crossed, Skewed, OldOutput])
def test_states_gradients_and_jacobians_of_a_loop(make):
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    with tf.variable_scope("net", initializer=tf.random_uniform_initializer(-1, 1, seed=3)):
        outputs, _ = tf.nn.dynamic_rnn(make(), x, dtype=tf.float64)
    net = net_of(x, outputs)
    values = {v.op.name: net.session.run(v) for v in tf.global_variables()}
    states, grads, by_x, by_input, by_start = reference_results(make, values)
    trace = rl.trace(net, X)
    assert trace.certificate.state == "passed", trace.certificate
    assert list(trace) == ["net/rnn"]
    for name, state, grad in zip(("hidden", "state_1"), states, grads, strict=True):
        assert_close(trace["net/rnn"][name], state)
        assert_close(trace["net/rnn"][f"{name}_grad"], grad)
    assert_close(rl.gradients(net, X, wrt="input"), by_x)
    jacobian = rl.jacobian(net, X, of="net/rnn.hidden", wrt="input")
    assert_close(jacobian.values, np.moveaxis(np.array(by_input), (0, 1, 2), (2, 1, 0)))
    cross_jacobian = rl.jacobian(net, X, of="net/rnn.hidden", wrt="net/rnn.state_1", at={"in_time": 0})
    assert_close(
        cross_jacobian.values.reshape(SAMPLES, STEPS, UNITS, UNITS),
        np.moveaxis(np.array(by_start), (0, 1, 2), (2, 1, 0)),
    )
    assert jacobian.certificate.state == cross_jacobian.certificate.state == "passed"


def test_cells_side_by_side_in_one_scope_are_named_by_their_own():
    """Two cells of one scope are two layers, not two calls of one layer with different weight gradients."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    with tf.variable_scope("net/rnn", initializer=tf.random_uniform_initializer(-1, 1, seed=3)):
        outputs, _ = run_step_by_step(Crossed(), x)
    net = net_of(x, outputs)
    values = {v.op.name: net.session.run(v) for v in tf.global_variables()}
    states, grads, *_ = reference_results(Crossed, values)
    trace = rl.trace(net, X)
    assert trace.certificate.state == "passed", trace.certificate
    assert list(trace) == ["net/rnn/crossed/lower", "net/rnn/crossed/upper"]
    for layer, state, grad in zip(trace.values(), states, grads, strict=True):
        assert_close(layer.hidden, state)
        assert_close(layer.hidden_grad, grad)


def test_a_copy_that_is_dropped_while_it_is_used_still_runs(monkeypatch):
    """A time Jacobian passes although the graph's copy is replaced midway, as happens after many calls."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    with tf.variable_scope("net", initializer=tf.random_uniform_initializer(-1, 1, seed=3)):
        net = net_of(x, run_step_by_step(Crossed(), x)[0])
    monkeypatch.setattr(open_net, "_MOST_BUILT", 0)
    upper = rl.layers(net)[-1].name
    assert rl.jacobian(net, X, of=f"{upper}.hidden", wrt="input").certificate.state == "passed"
