"""A missing gradient has a reason, read from the graph, exactly where ``tf.gradients`` returns None."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl


def python_double(x):
    return 2 * x


def py_function_double(x):
    doubled = tf.py_function(python_double, [x], tf.float64)
    doubled.set_shape(x.shape)
    return doubled


def stop(x):
    return tf.stop_gradient(x)


def numpy_function_double(x):
    doubled = tf.numpy_function(python_double, [x], tf.float64)
    doubled.set_shape(x.shape)
    return doubled


def one_hot_of_argmax(x):
    return tf.one_hot(tf.argmax(x, -1), 3, dtype=tf.float64)


def cast_and_back(x):
    return tf.cast(tf.cast(x, tf.int32), tf.float64)


def round_off(x):
    return tf.round(x)


def compare_with_zero(x):
    return tf.where(x > 0, tf.ones_like(x), tf.zeros_like(x))


CASES = {
    "stop_gradient": stop,
    "py_func": numpy_function_double,
    "integers_on_the_way": one_hot_of_argmax,
    "non_differentiable": round_off,
}
MORE_CASES = {"integers_on_the_way": cast_and_back, "non_differentiable": compare_with_zero}


def net_of(transform):
    """Return a net whose recurrence reads ``transform`` of a linear map of x, and TensorFlow's d(out)/dx."""
    x = tf.placeholder(tf.float64, [None, 4, 3], name="x")
    h = tf.layers.dense(x, 3, name="below")
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(2), transform(h), dtype=tf.float64)
    out = tf.layers.dense(state, 2, name="head")
    # Before the session: under control flow v2, a loop that is already in one has no gradients.
    dx = tf.gradients(out, x)[0]
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    return rl.tf1.graph(sess, inputs=x, outputs=out), dx


DATA = np.random.default_rng(0).normal(size=(2, 4, 3))


@pytest.mark.parametrize(("code", "transform"), [*CASES.items(), *MORE_CASES.items()])
def test_a_reason_where_tensorflow_gives_none(code, transform):
    net, dx = net_of(transform)
    assert dx is None
    g = rl.gradients(net, DATA, of="output", reduce="sum", wrt=["input", "below/kernel", "rnn/kernel"])
    assert g.disconnected["input"].code == code
    assert g.disconnected["below/kernel"].code == code
    assert "rnn/kernel" not in g.disconnected
    assert g.disconnected["input"].remedy


@pytest.mark.parametrize("transform", [tf.identity, tf.nn.relu, py_function_double])
def test_no_reason_where_there_is_a_gradient(transform):
    net, dx = net_of(transform)
    assert dx is not None
    assert not rl.gradients(net, DATA, of="output", reduce="sum", wrt=["input"]).disconnected


def test_a_head_is_not_on_the_way_to_a_state():
    net, _ = net_of(tf.identity)
    g = rl.gradients(net, DATA, of="rnn.final_hidden", reduce="sum", wrt="weights")
    assert g.disconnected["head/kernel"].code == "not_on_path"
    assert "rnn.output" in g.disconnected["head/kernel"].sentence


def test_the_one_that_was_asked_for_raises(graph):
    net, _ = net_of(stop)
    with pytest.raises(rl.errors.DisconnectedError, match="stop_gradient") as caught:
        rl.gradients(net, DATA, of="output", reduce="sum", wrt="input")
    assert caught.value.reason.code == "stop_gradient"


def test_integer_ids_and_what_to_ask_for_instead(graph):
    ids = tf.placeholder(tf.int32, [None, 4], name="ids")
    table = tf.get_variable("embedding/table", [7, 3], tf.float64)
    embedded = tf.nn.embedding_lookup(table, ids)
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.BasicRNNCell(2), embedded, dtype=tf.float64)
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    net = rl.tf1.graph(sess, inputs={"ids": ids}, outputs={"state": state})
    data = np.array([[1, 2, 2, 6], [0, 1, 3, 3]])
    with pytest.raises(rl.errors.DisconnectedError, match="integer_input"):
        rl.gradients(net, data, of="output", reduce="sum", wrt="input")
    table_grad = rl.gradients(net, data, of="output", reduce="sum", wrt="embedding/table")
    assert not table_grad.values[[4, 5]].any()
    assert table_grad.values[[0, 1, 2, 3, 6]].any(axis=1).all()


def test_a_loop_without_back_propagation(v1):
    x = tf.placeholder(tf.float64, [None, 3], name="x")
    w = tf.get_variable("w", [3, 3], tf.float64)
    output = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x), back_prop=False)[1]
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    net = rl.tf1.graph(sess, inputs=x, outputs=output)
    g = rl.gradients(net, DATA[0], of="output", reduce="sum", wrt=["input"])
    assert tf.gradients(output, x)[0] is None
    assert g.disconnected["input"].code == ("no_back_prop" if v1 else "stop_gradient")


def test_a_value_that_goes_through_a_variable(graph):
    x = tf.placeholder(tf.float64, [2, 3], name="x")
    variable = tf.get_variable("kept", [2, 3], tf.float64, trainable=False)
    tf.assign(variable, 2 * x)
    out = tf.layers.dense(variable + 0.0, 2)
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    net = rl.tf1.graph(sess, inputs=x, outputs=out)
    g = rl.gradients(net, DATA[0][:2], of="output", reduce="sum", wrt=["input"])
    assert g.disconnected["input"].code == "through_state"
    assert "kept" in g.disconnected["input"].sentence


def test_statistics_that_the_phase_does_not_read(graph):
    x = tf.placeholder(tf.float64, [None, 3], name="x")
    out = tf.layers.batch_normalization(x, training=True, name="norm")
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    net = rl.tf1.graph(sess, inputs=x, outputs=out)
    g = rl.gradients(net, DATA[0], of="output", reduce="sum", wrt=["norm/gamma", "norm/beta"])
    assert not g.disconnected.get("norm/beta")
