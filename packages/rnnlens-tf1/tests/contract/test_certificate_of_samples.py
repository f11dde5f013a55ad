"""Certificates of a TensorFlow 1 graph: of a part of the samples after the first, and anew for a changed graph."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl

SAMPLES, STEPS, FEATURES = 32, 7, 4
X = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES))
Y = np.random.default_rng(1).normal(size=(SAMPLES, 2))


def trace_three_times(samples=None, centred=False):
    """Return the certificates of three traces of a GRU with a free or a fixed number of samples."""
    x, y = tf.placeholder(tf.float64, [samples, STEPS, FEATURES]), tf.placeholder(tf.float64, [samples, 2])
    rnn_input = x - tf.reduce_mean(x, axis=0, keepdims=True) if centred else x
    _, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(5), rnn_input, dtype=tf.float64)
    head = tf.layers.dense(state, 2, name="head")
    loss = tf.reduce_mean(tf.square(head - y))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        net = rl.tf1.graph(session, inputs=x, outputs={"head": head}, loss=loss, targets=y)
        return [rl.trace(net, X, Y).certificate for _ in range(3)]


def test_later_traces_compare_a_part_of_the_samples():
    first, *later = trace_three_times()
    assert (first.state, first.samples) == ("passed", "")
    assert [certificate.state for certificate in later] == ["passed", "passed"]
    assert all(certificate.samples.endswith(f"of {SAMPLES}") for certificate in later)
    assert all("reference weight gradients" in {check.name for check in certificate.checks} for certificate in later)


@pytest.mark.parametrize("options", [{"samples": SAMPLES}, {"centred": True}], ids=["fixed", "centred"])
def test_a_graph_that_cannot_be_cut_is_certified_with_all_samples(options):
    certificates = trace_three_times(**options)
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
