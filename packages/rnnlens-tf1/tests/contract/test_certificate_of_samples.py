"""Certificates of a TensorFlow 1 graph: of all samples where their number is fixed, and anew for a changed graph."""

import numpy as np
import tensorflow.compat.v1 as tf

import rnnlens as rl

SAMPLES, STEPS, FEATURES = 32, 7, 4
X = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES))
Y = np.random.default_rng(1).normal(size=(SAMPLES, 2))


def test_a_graph_of_a_fixed_number_of_samples_is_certified_with_all_of_them():
    x, y = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES]), tf.placeholder(tf.float64, [SAMPLES, 2])
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(5), x, dtype=tf.float64)
    head = tf.layers.dense(state, 2, name="head")
    loss = tf.reduce_mean(tf.square(head - y))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        net = rl.tf1.graph(session, inputs=x, outputs={"head": head}, loss=loss, targets=y)
        certificates = [rl.trace(net, X, Y).certificate for _ in range(3)]
    assert [(certificate.state, certificate.samples) for certificate in certificates] == [("passed", "")] * 3


def test_a_graph_that_was_extended_is_certified_anew():
    x = tf.placeholder(tf.float64, [None, STEPS, FEATURES])
    y, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(5), x, dtype=tf.float64)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        net = rl.tf1.graph(session, inputs=x, outputs=y)
        assert [rl.jacobian(net, X[:2]).certificate.earlier for _ in range(2)] == [False, True]
        _ = 2 * y
        certificate = rl.jacobian(net, X[:2]).certificate
        assert (certificate.state, certificate.earlier) == ("passed", False)
