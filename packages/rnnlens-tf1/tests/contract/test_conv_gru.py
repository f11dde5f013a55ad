"""Results for a user's graph (Conv1D, batch normalisation, GRU, sequences of several lengths) equal NumPy's."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf1_conv_gru_by_hand as by_hand
from tf1_conv_gru import Graph

import rnnlens as rl

STEPS, LENGTHS = 9, (9, 4, 9, 1, 6)
RNN = "lstm_model/rnn"


@pytest.fixture
def net_and_data(graph):
    """Provide net, x, y, initial state and weights of a graph that was finalised after its variables were set."""
    g = Graph()
    random = np.random.default_rng(0)
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    for variable in tf.global_variables():
        values = random.normal(size=variable.shape.as_list()) * 0.5
        variable.load(np.abs(values) + 0.5 if "variance" in variable.name else values, sess)
    graph.finalize()
    x = random.normal(size=(5, STEPS, 6)) * (np.arange(STEPS)[None, :, None] < np.array(LENGTHS)[:, None, None])
    y, h0 = random.normal(size=(5, STEPS, 2)), random.normal(size=(5, 8))
    net = rl.tf1.graph(
        sess,
        inputs={"inputs": [g.inputs_train, g.inputs_devel]},
        targets=[g.labels_train, g.labels_devel],
        outputs={"output": g.output, "new_state": g.new_state},
        loss=g.loss,
        feed={g.phase: False, g.dropout: 0.0, g.initial_state: h0},
    )
    variables = tf.global_variables()
    weights = dict(zip([v.op.name for v in variables], sess.run(variables), strict=True))
    yield net, x, y, h0, weights
    sess.close()


def assert_close(actual, expected, bound=1e-12):
    assert np.shape(actual) == np.shape(expected)
    assert np.abs(np.asarray(actual) - expected).max() <= bound * max(1.0, np.abs(expected).max())


def test_trace_gives_the_total_gradient_of_every_state(net_and_data):
    net, x, y, h0, w = net_and_data
    trace = rl.trace(net, x, y)
    truth = by_hand.hidden_grad(w, x, h0, y)
    is_valid = np.arange(STEPS)[None] < np.array(LENGTHS)[:, None]
    states = by_hand.forward(w, x, h0, y)[1]
    assert_close(trace[RNN].hidden.values, states)
    assert_close(trace[RNN].hidden_grad.values[is_valid], truth[is_valid])
    assert trace.loss == pytest.approx(by_hand.forward(w, x, h0, y)[2].sum(), rel=1e-13)
    assert trace.certificate.state == "passed"


def test_new_state_by_every_weight_before_it(net_and_data):
    net, x, _, h0, w = net_and_data
    g = rl.gradients(net, x, of=f"{RNN}.final_hidden", reduce="sum", wrt="weights")
    random = np.random.default_rng(3)

    def new_state(values):
        return by_hand.forward(values, x, h0)[1][:, -1].sum()

    for name in ("conv1d/kernel", "conv1d/bias", "batch_normalization/gamma", "batch_normalization/beta"):
        path = f"layer_cell/{name}"
        direction = random.normal(size=w[path].shape)
        assert_close(np.sum(g[path].values * direction), by_hand.derivative(new_state, w, path, direction))
    assert {"output/dense/kernel", "output/dense/bias"} <= set(g.disconnected)


def test_weights_of_the_cell_by_gate(net_and_data):
    """Weight gradients by gate are blocks of TensorFlow's kernels (columns: reset, update; rows: input, state)."""
    net, x, y, h0, w = net_and_data
    g = rl.gradients(net, x, y, wrt=f"{RNN}.weights")
    cell, random = f"{RNN}/gru_cell/", np.random.default_rng(4)

    def loss(values):
        return by_hand.forward(values, x, h0, y)[2].sum()

    for name, rows in (("kernel", slice(0, 16)), ("recurrent_kernel", slice(16, 24))):
        grad = g[f"{RNN}/{name}"]
        for gate, variable, columns in (
            ("update", "gates", slice(8, 16)),
            ("reset", "gates", slice(0, 8)),
            ("candidate", "candidate", slice(0, 8)),
        ):
            path = f"{cell}{variable}/kernel"
            direction = np.zeros_like(w[path])
            direction[rows, columns] = random.normal(size=direction[rows, columns].shape)
            actual = (grad.sel(gate=gate).values * direction[rows, columns]).sum()
            assert_close(actual, by_hand.derivative(loss, w, path, direction))


def test_the_input_that_a_cond_chooses_is_one_input(net_and_data):
    net, x, y, h0, w = net_and_data
    g = rl.gradients(net, x, y, wrt="input")
    is_valid = np.abs(x).sum(2) > 0
    direction = np.random.default_rng(5).normal(size=x.shape) * is_valid[:, :, None]
    truth = np.imag(by_hand.forward(w, x + 1j * by_hand.STEP * direction, h0, y)[2].sum()) / by_hand.STEP
    assert_close((g.values * direction).sum(), truth)
    assert g.certificate.state == "passed"


def test_time_jacobian_of_the_recurrence(net_and_data):
    net, x, _, h0, w = net_and_data
    J = rl.jacobian(net, x, of=f"{RNN}.output", wrt=f"{RNN}.input")
    trace = rl.trace(net, x)
    z = trace[RNN].input.values
    in_time, unit = 3, 2

    def output(values):
        return outputs_by_hand(w, values, h0)

    bump = np.zeros(z.shape, complex)
    bump[:, in_time, unit] = 1j * by_hand.STEP
    truth = output(z + bump).imag / by_hand.STEP
    is_valid = np.arange(STEPS)[None] < np.array(LENGTHS)[:, None]  # at padding the state is carried over
    assert_close(J.sel(in_time=in_time).values[..., unit][is_valid], truth[is_valid])


def outputs_by_hand(w, z, h0):
    """Return the outputs (sample, step, unit) of the GRU, computed from its input z."""
    cell, h, outputs = f"{RNN}/gru_cell/", h0.astype(complex), np.zeros((*z.shape[:2], 8), complex)
    for t in range(z.shape[1]):
        r, u = np.split(
            by_hand.sigmoid(np.concatenate([z[:, t], h], 1) @ w[cell + "gates/kernel"] + w[cell + "gates/bias"]), 2, 1
        )
        preactivation = np.concatenate([z[:, t], r * h], 1) @ w[cell + "candidate/kernel"] + w[cell + "candidate/bias"]
        is_valid = (t < np.array(LENGTHS))[:, None]
        h = np.where(is_valid, u * h + (1 - u) * np.tanh(preactivation), h)
        outputs[:, t] = np.where(is_valid, h, 0)
    return outputs
