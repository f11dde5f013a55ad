"""Cells are recognised by their equations in any notation; a step that differs in one term is not recognised."""

import pytest
import tensorflow.compat.v1 as tf

import rnnlens as rl

UNITS, FEATURES = 3, 2
sigmoid, tanh = tf.sigmoid, tf.tanh


def weight(name, *shape):
    return tf.get_variable(name, shape, tf.float64)


def affine(x, h, name, gates=1):
    """Return W x + U h + b (sample, gate * unit) for gates side by side, from two products."""
    kernel, recurrent = weight(f"{name}_w", FEATURES, gates * UNITS), weight(f"{name}_u", UNITS, gates * UNITS)
    return tf.matmul(x, kernel) + tf.matmul(h, recurrent) + weight(f"{name}_b", gates * UNITS)


def elman(x, h):
    return tanh(affine(x, h, "n"))


def elman_of_one_product(x, h):
    kernel, bias = weight("w", FEATURES + UNITS, UNITS), weight("b", 1, UNITS)
    return tanh(bias + tf.matmul(tf.concat([x, h], 1), kernel))


def gru(x, h, update=lambda u, h, n: u * h + (1 - u) * n):
    u, r = tf.split(sigmoid(affine(x, h, "gates", 2)), 2, 1)
    return update(u, h, tanh(affine(x, r * h, "n")))


def gru_as_a_difference(x, h):
    return gru(x, h, lambda u, h, n: n - u * (n - h))


def gru_as_negative_parts(x, h):
    return gru(x, h, lambda u, h, n: tf.add_n([u * h, n, -n * u]))


def gru_of_hard_sigmoids(x, h):
    u, r = (tf.clip_by_value(0.2 * affine(x, h, name) + 0.5, 0.0, 1.0) for name in "ur")
    return u * h + (1 - u) * tanh(affine(x, r * h, "n"))


def gru_with_the_update_the_other_way_round(x, h):
    return gru(x, h, lambda u, h, n: (1 - u) * h + u * n)


def gru_that_adds_a_little_of_the_state(x, h):
    return gru(x, h, lambda u, h, n: u * h + (1 - u) * n + 1e-3 * h)


def elman_times_a_number(x, h):
    return 0.999 * elman(x, h)


def lstm(x, h, c, output=lambda o, new, old: o * tanh(new), combine=lambda i, f, g, c: f * c + i * g):
    z = affine(x, h, "gates", 4)
    i, f, o = tf.split(sigmoid(z[:, : 3 * UNITS]), 3, 1)
    new = combine(i, f, tanh(z[:, -UNITS:]), c)
    return output(o, new, c), new


def lstm_of_a_sum(x, h, c):
    return lstm(x, h, c, combine=lambda i, f, g, c: tf.add_n([g * i, c * f]))


def lstm_that_puts_out_the_old_state(x, h, c):
    return lstm(x, h, c, output=lambda o, new, old: o * tanh(old))


def lstm_of_coupled_gates(x, h, c):
    return lstm(x, h, c, combine=lambda i, f, g, c: f * c + (1 - f) * g)


CELLS = {
    **dict.fromkeys((elman, elman_of_one_product), "simple_rnn"),
    **dict.fromkeys((gru, gru_as_a_difference, gru_as_negative_parts, gru_of_hard_sigmoids), "gru"),
    **dict.fromkeys((lstm, lstm_of_a_sum), "lstm"),
    **dict.fromkeys((gru_with_the_update_the_other_way_round, gru_that_adds_a_little_of_the_state), None),
    **dict.fromkeys((elman_times_a_number, lstm_that_puts_out_the_old_state, lstm_of_coupled_gates), None),
}


@pytest.mark.parametrize("step", CELLS, ids=lambda step: step.__name__)
def test_a_cell_is_known_by_its_equations(step):
    x = tf.placeholder(tf.float64, [None, 4, FEATURES], name="x")
    zero = tf.zeros([tf.shape(x)[0], UNITS], tf.float64)
    zero.set_shape([None, UNITS])
    state_count = 2 if step.__name__.startswith("lstm") else 1
    start = (zero, tf.identity(zero)) if state_count == 2 else zero
    with tf.variable_scope("cell", reuse=tf.AUTO_REUSE):
        states = tf.scan(
            lambda s, x: step(x, *s) if state_count == 2 else step(x, s), tf.transpose(x, [1, 0, 2]), initializer=start
        )
    output = states[0] if state_count == 2 else states
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        (row,) = rl.layers(rl.tf1.graph(session, inputs=x, outputs=output))
    assert (row.cell == CELLS[step]) if CELLS[step] else "unknown cell" in row.options
