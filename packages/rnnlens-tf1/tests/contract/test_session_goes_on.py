"""Calls see a graph and a session as they are now, and training goes on; 200 of them do not increase memory."""

import gc
import importlib
import tracemalloc

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl

open_net = importlib.import_module("rnnlens_tf1.open_net")


@pytest.fixture
def small_net(graph):
    """Provide graph, session, net and (x, y, noise, train) of an RNN with a random operation and Adam."""
    x = tf.placeholder(tf.float64, [None, None, 3], name="x")
    y = tf.placeholder(tf.float64, [None, 2], name="y")
    noise = tf.random.uniform([], dtype=tf.float64, seed=5, name="noise")
    _out, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.BasicRNNCell(4), x, dtype=tf.float64)
    head = tf.layers.dense(state, 2, name="head")
    loss = tf.reduce_mean(tf.square(head - y))
    train = tf.train.AdamOptimizer(0.1).minimize(loss)
    sess = tf.Session()
    sess.run(tf.global_variables_initializer())
    yield graph, sess, rl.tf1.graph(sess, inputs=x, outputs=head, loss=loss, targets=y), (x, y, noise, train)
    sess.close()


DATA = np.random.default_rng(0).normal(size=(3, 5, 3)), np.random.default_rng(1).normal(size=(3, 2))


def run_every_verb(net):
    rl.layers(net)
    rl.trace(net, *DATA)
    rl.gradients(net, *DATA, wrt=["weights", "input", "rnn.hidden"])
    rl.jacobian(net, DATA[0], of="rnn.output", wrt="rnn.input")
    rl.weights(net, *DATA)


def test_a_finalised_graph_stays_so(small_net):
    graph, _, net, _ = small_net
    graph.finalize()
    run_every_verb(net)
    assert graph.finalized


def test_200_calls_take_no_more_memory(small_net):
    graph, _, net, _ = small_net

    def call():
        rl.trace(net, *DATA, quantities=["hidden_grad"])

    rl.trace(net, *DATA)
    with rl.options(certify="never"):  # these traces need fewer tensors, and so another copy of the graph
        for _ in range(3):
            call()
    copies = open_net._COPIES[graph]
    sizes = {key: (len(copy.graph.get_operations()), len(copy.built_tensors)) for key, copy in copies.items()}
    version = graph.version
    with rl.options(certify="never"):
        for _ in range(170):
            call()
        gc.collect()
        tracemalloc.start()
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(30):
            call()
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - first
        tracemalloc.stop()
    assert graph.version == version
    assert {key: (len(copy.graph.get_operations()), len(copy.built_tensors)) for key, copy in copies.items()} == sizes
    assert growth < 60_000  # 2 kB a call; one result is ten times larger


def test_training_and_noise_go_on_as_if_nobody_had_looked(small_net):
    _, sess, net, (x, y, noise, train) = small_net
    saved = sess.run(tf.global_variables())

    def train_five_steps(call_verbs):
        for variable, value in zip(tf.global_variables(), saved, strict=True):
            variable.load(value, sess)
        noise_values = []
        for _ in range(5):
            noise_values.append(sess.run([noise, train], {x: DATA[0], y: DATA[1]})[0])
            if call_verbs:
                run_every_verb(net)
        return noise_values, sess.run(tf.trainable_variables())

    with tf.Session() as fresh_session:  # a fresh session starts the random operation anew
        fresh_session.run(tf.global_variables_initializer())
        fresh_noise = [fresh_session.run(noise) for _ in range(10)]
    alone_noise, alone_weights = train_five_steps(call_verbs=False)
    watched_noise, watched_weights = train_five_steps(call_verbs=True)
    assert [*alone_noise, *watched_noise] == fresh_noise
    for expected, actual in zip(alone_weights, watched_weights, strict=True):
        np.testing.assert_array_equal(expected, actual)


def test_the_present_values_are_looked_at(small_net):
    _, sess, net, (x, y, _, train) = small_net
    first = rl.trace(net, *DATA).loss
    for _ in range(5):
        sess.run(train, {x: DATA[0], y: DATA[1]})
    assert rl.trace(net, *DATA).loss == pytest.approx(sess.run(net.loss, {x: DATA[0], y: DATA[1]}), rel=1e-14)
    assert rl.trace(net, *DATA).loss < first


def test_a_graph_that_grows_is_copied_again_and_the_old_copy_is_dropped(small_net):
    graph, _, net, _ = small_net
    rl.layers(net)
    with graph.as_default():
        tf.constant(1.0)
    rl.layers(net)
    assert {key[0] for key in open_net._COPIES[graph]} == {graph.version}


def test_after_an_exception_too(small_net):
    _, _, net, _ = small_net
    with pytest.raises(rl.errors.InputError, match="does not fit the graph"):
        rl.trace(net, DATA[0][:, :, :2], DATA[1])
    assert rl.trace(net, *DATA).certificate.state == "passed"
