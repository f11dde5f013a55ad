"""After any other verbs, a verb returns the numbers, axes, notes and certificate that it returns on a new network."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from order_of_calls import Calls

import rnnlens as rl

cell = tf.nn.rnn_cell
X = np.random.default_rng(0).normal(size=(4, 5, 3))
Y = np.random.default_rng(1).normal(size=(4, 5, 2))

#: The cell, whether time is the first axis, and the length of each sample.
KINDS = {
    "chain": (lambda: cell.LSTMCell(4), False, None),
    "masked": (lambda: cell.BasicRNNCell(4), False, [5, 3, 4, 1]),
}


def build(make_cell, is_time_first, lengths):
    """Return a network in a graph of its own; its weights are the same in each."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float64, [5, None, 3] if is_time_first else [None, 5, 3])
        y = tf.placeholder(tf.float64, [5, None, 2] if is_time_first else [None, 5, 2])
        with tf.variable_scope("net", initializer=tf.random_uniform_initializer(-0.7, 0.7, seed=3)):
            units, _ = tf.nn.dynamic_rnn(make_cell(), x, lengths, dtype=x.dtype, time_major=is_time_first)
            output = tf.tensordot(units, tf.get_variable("head", [4, 2], x.dtype), 1)
        loss, session = tf.reduce_mean((output - y) ** 2), tf.Session()
        session.run(tf.global_variables_initializer())
        return rl.tf1.graph(session, inputs={"x": x}, outputs={"output": output}, loss=loss, targets=y)


@pytest.fixture(params=KINDS)
def calls(request):
    _, is_time_first, _ = KINDS[request.param]
    x, y = (a.swapaxes(0, 1) if is_time_first else a for a in (X, Y))
    # Both need the loss of some samples or of several batches, and that of a graph is of one batch.
    left_out = ("gradients of samples", "gradients in batches")
    return Calls(lambda: build(*KINDS[request.param]), x, y, None, "net/rnn", left_out)


def test_drawn_pairs(calls):
    quick = replace(calls, left_out=(*calls.left_out, "diagnose"))
    quick.check([*quick.drawn(2), ("gradients by input", "jacobian")])
    replace(quick, certify="auto").check([("jacobian", "jacobian")])


@pytest.mark.full
@pytest.mark.parametrize("certify", ["always", "auto"])
def test_each_verb_after_each(calls, certify):
    calls.check_each_after_each(certify)
