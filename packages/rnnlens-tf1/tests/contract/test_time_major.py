"""Graphs fed with (time, sample, feature): results of every verb have named axes, in the usual order."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl

SAMPLES, STEPS, FEATURES = 3, 7, 4
X = np.random.default_rng(0).normal(size=(STEPS, SAMPLES, FEATURES))
Y = np.random.default_rng(1).normal(size=(SAMPLES, 2))


@pytest.fixture(params=["any number of steps", "a fixed number of steps"])
def net_and_gradients(request):
    """Provide a net, and TensorFlow's gradients of its loss and of each output unit by its input."""
    steps = None if request.param.startswith("any") else STEPS
    x, y = tf.placeholder(tf.float64, [steps, None, FEATURES]), tf.placeholder(tf.float64, [None, 2])
    outputs, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(5), x, dtype=tf.float64, time_major=True)
    head = tf.layers.dense(state, 2, name="head")
    loss = tf.reduce_mean(tf.square(head - y))
    truth = tf.gradients(loss, x)[0]
    rows = [tf.gradients(head[:, unit], x)[0] for unit in range(2)]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        net = rl.tf1.graph(session, inputs=x, outputs={"head": head, "steps": outputs}, loss=loss, targets=y)
        yield net, session.run(truth, {x: X, y: Y}), session.run(rows, {x: X})


def test_gradients(net_and_gradients):
    net, truth, _ = net_and_gradients
    by_input = rl.gradients(net, X, Y, wrt="input")
    assert by_input.dims == ("sample", "time", "feature")
    np.testing.assert_allclose(by_input.values, truth.swapaxes(0, 1), rtol=1e-10, atol=1e-14)
    assert rl.trace(net, X, Y).certificate.state == "passed"


def test_gradients_in_batches(net_and_gradients):
    net, _, _ = net_and_gradients
    one_batch = rl.gradients(net, X, of="output[head]", reduce="sum", wrt="input")
    in_batches = rl.gradients(net, X, of="output[head]", reduce="sum", wrt="input", batch_size=2)
    rounding = 1e-14 * np.abs(one_batch.values).max()  # of sums whose terms cancel
    np.testing.assert_allclose(in_batches.values, one_batch.values, rtol=1e-12, atol=rounding)


def test_time_jacobian(net_and_gradients):
    net, _, rows = net_and_gradients
    jacobian = rl.jacobian(net, X, of="output[head]", wrt="input")
    assert jacobian.attrs["certificate"].startswith("certified")
    for unit, row in enumerate(rows):
        actual = jacobian.isel(out_unit=unit).transpose("sample", "in_time", "in_feature")
        np.testing.assert_allclose(actual.values, row.swapaxes(0, 1), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("time_first", [False, True], ids=["fed with samples first", "fed with time first"])
def test_transpositions_on_the_way_to_the_loop(time_first):
    """The time axis is that of the fed array, even if the graph transposes it before the loop."""
    x, y = tf.placeholder(tf.float64, [None, None, FEATURES]), tf.placeholder(tf.float64, [None, 2])
    rnn_input = tf.layers.dense(tf.transpose(x, [1, 0, 2]), 6, tf.tanh, name="below")
    cell = tf.nn.rnn_cell.BasicRNNCell(5)
    _, state = tf.nn.dynamic_rnn(cell, rnn_input, dtype=tf.float64, time_major=not time_first)
    head = tf.layers.dense(state, 2, name="head")
    loss = tf.reduce_mean(tf.square(head - y))
    truth = tf.gradients(loss, x)[0]
    data = X if time_first else X.swapaxes(0, 1)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        net = rl.tf1.graph(session, inputs=x, outputs=head, loss=loss, targets=y)
        by_input = rl.gradients(net, data, Y, wrt="input")
        expected = session.run(truth, {x: data, y: Y})
    assert dict(by_input.sizes) == {"sample": SAMPLES, "time": STEPS, "feature": FEATURES}
    np.testing.assert_allclose(
        by_input.values, expected.swapaxes(0, 1) if time_first else expected, rtol=1e-10, atol=1e-14
    )
