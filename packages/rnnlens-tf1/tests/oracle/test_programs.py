"""Ten programs in TensorFlow 1 style: results of every verb equal `tf.gradients` of the untouched graph."""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_keras as keras

import rnnlens as rl

cells = tf.nn.rnn_cell
SAMPLES, STEPS, FEATURES, UNITS, WORDS = 2, 4, 3, 3, 7


@dataclass
class Program:
    """Tensors of a program: inputs, output (the loss is its mean square), and other feeds.

    ``states``: tensors of the user's graph with a layer's state at every step, by name. Gradients by these are compared
    besides those by float inputs; with integer inputs, instead of them.
    """

    inputs: dict[str, Any]
    output: Any
    layers: list[str]
    feed: dict[Any, Any] = field(default_factory=dict)
    states: dict[str, list[Any]] = field(default_factory=dict)


def float_input(name="x", steps=STEPS):
    return tf.placeholder(tf.float64, [SAMPLES, steps, FEATURES], name=name)


def id_input():
    return tf.placeholder(tf.int32, [SAMPLES, STEPS], name="ids")


def embed_words(word_ids):
    return tf.nn.embedding_lookup(tf.get_variable("embedding", [WORDS, FEATURES], tf.float64), word_ids)


def penn_treebank():
    """Build the PTB tutorial's language model: two LSTMs with dropout, unrolled by a Python loop, and a softmax."""
    word_ids, keep = id_input(), tf.placeholder_with_default(tf.constant(1.0, tf.float64), [])
    stack = cells.MultiRNNCell(
        [cells.DropoutWrapper(cells.BasicLSTMCell(UNITS, forget_bias=0.0), output_keep_prob=keep) for _ in range(2)]
    )
    inputs, state = tf.nn.dropout(embed_words(word_ids), keep_prob=keep), stack.zero_state(SAMPLES, tf.float64)
    outputs, states = [], []
    with tf.variable_scope("RNN"):
        for t in range(STEPS):
            if t > 0:
                tf.get_variable_scope().reuse_variables()
            output, state = stack(inputs[:, t, :], state)
            outputs.append(output)
            states.append(state[0].h)
    output = tf.reshape(tf.concat(outputs, 1), [-1, UNITS])
    logits = tf.nn.xw_plus_b(
        output, tf.get_variable("w", [UNITS, WORDS], tf.float64), tf.get_variable("b", [WORDS], tf.float64)
    )
    below, above = (f"RNN/multi_rnn_cell/cell_{i}" for i in range(2))
    logits = tf.reshape(logits, [SAMPLES, STEPS, WORDS])
    return Program({"ids": word_ids}, logits, [below, above], {keep: 1.0}, {f"{below}.hidden": states})


def classifier():
    """Build a classifier: sequences of several lengths, a dropout wrapper, the last valid output, a dense layer."""
    x, keep, lengths = float_input(), tf.placeholder(tf.float64, []), tf.constant([4, 2])
    cell = cells.DropoutWrapper(cells.GRUCell(UNITS), input_keep_prob=keep, output_keep_prob=keep)
    outputs, _ = tf.nn.dynamic_rnn(cell, x, sequence_length=lengths, dtype=tf.float64, scope="encoder")
    last = tf.gather_nd(outputs, tf.stack([tf.range(SAMPLES), lengths - 1], axis=1))
    return Program({"x": x}, tf.layers.dense(last, 2), ["encoder"], {keep: 1.0})


def both_directions():
    x = float_input()
    cell = [cells.LSTMCell(UNITS) for _ in range(2)]
    outputs, _ = tf.nn.bidirectional_dynamic_rnn(*cell, x, sequence_length=tf.constant([4, 3]), dtype=tf.float64)
    return Program({"x": x}, tf.layers.dense(tf.concat(outputs, 2), 2), ["bidirectional_rnn"])


def translation():
    """Build an encoder, and a decoder in a Python loop that attends to it and is fed its own previous output."""
    x = float_input()
    memory, state = tf.nn.dynamic_rnn(cells.GRUCell(UNITS), x, dtype=tf.float64, scope="encoder")
    keys, step_input, outputs = tf.layers.dense(memory, UNITS, use_bias=False, name="keys"), tf.zeros_like(x[:, 0]), []
    with tf.variable_scope("decoder"):
        cell = cells.GRUCell(UNITS)
        for t in range(3):
            query = tf.layers.dense(state, UNITS, use_bias=False, name="query", reuse=t > 0)
            v = tf.get_variable("v", [UNITS], tf.float64) if t == 0 else v  # noqa: F821
            weights = tf.nn.softmax(tf.reduce_sum(v * tf.tanh(keys + query[:, None]), 2))
            context = tf.reduce_sum(weights[:, :, None] * memory, 1)
            output, state = cell(tf.concat([step_input, context], 1), state)
            step_input = tf.layers.dense(output, FEATURES, name="said", reuse=t > 0)
            outputs.append(step_input)
    return Program({"x": x}, tf.stack(outputs, 1), ["encoder", "decoder"])


def residual_stack():
    x = float_input()
    layers = [cells.LSTMCell(UNITS), *(cells.ResidualWrapper(cells.LSTMCell(UNITS)) for _ in range(2))]
    outputs, _ = tf.nn.dynamic_rnn(cells.MultiRNNCell(layers), x, dtype=tf.float64)
    return Program({"x": x}, tf.layers.dense(outputs, 2), [f"rnn/cell_{i}" for i in range(3)])


def sampling():
    """Build a character model that is primed, then fed the character with the highest score."""
    x, cell, states = float_input(), cells.BasicRNNCell(UNITS), []
    state = cell.zero_state(SAMPLES, tf.float64)
    letters = tf.get_variable("letters", [FEATURES, FEATURES], tf.float64)
    with tf.variable_scope("chars"):
        for t in range(STEPS + 2):
            step_input = x[:, t] if t < STEPS else tf.nn.embedding_lookup(letters, tf.argmax(scores, 1))  # noqa: F821
            output, state = cell(step_input, state)
            states.append(state)
            scores = tf.layers.dense(output, FEATURES, name="scores", reuse=t > 0)
    return Program({"x": x}, scores, ["chars"], states={"chars.hidden": states})


def scanned():
    """Build a custom recurrence in `tf.scan`, time axis first."""
    x = float_input()
    w = tf.get_variable("w", [FEATURES, UNITS], tf.float64)
    u = tf.get_variable("u", [UNITS, UNITS], tf.float64)
    states = tf.scan(
        lambda h, z: 0.9 * h + 0.1 * tf.sin(tf.matmul(z, w) + tf.matmul(h, u)),
        tf.transpose(x, [1, 0, 2]),
        initializer=tf.zeros([SAMPLES, UNITS], tf.float64),
    )
    return Program({"x": x}, tf.transpose(states, [1, 0, 2]), ["scan"])


def while_loop():
    """Build a custom recurrence in `tf.while_loop`, with a TensorArray for its outputs."""
    x = float_input()
    w = tf.get_variable("w", [FEATURES + UNITS, UNITS], tf.float64)
    array = tf.TensorArray(tf.float64, STEPS).unstack(tf.transpose(x, [1, 0, 2]))

    def step(t, h, outputs):
        h = tf.tanh(tf.matmul(tf.concat([array.read(t), h], 1), w))
        return t + 1, h, outputs.write(t, h)

    start = (tf.constant(0), tf.zeros([SAMPLES, UNITS], tf.float64), tf.TensorArray(tf.float64, STEPS))
    _, last, outputs = tf.while_loop(lambda t, *_: t < STEPS, step, start)
    return Program({"x": x}, tf.concat([last, outputs.stack()[1]], 1), ["while"])


def siamese():
    """Build one encoder with shared variables for two inputs, and the distance of its final states."""
    x, z, final_states = float_input("x"), float_input("z", 3), []
    for sequence in (x, z):
        with tf.variable_scope("encoder", reuse=tf.AUTO_REUSE):
            final_states.append(tf.nn.dynamic_rnn(cells.LSTMCell(UNITS), sequence, dtype=tf.float64)[1].h)
    return Program({"x": x, "z": z}, tf.abs(final_states[0] - final_states[1]), ["encoder/rnn"])


def keras_layers():
    """Build Keras layers that are called on placeholders, without a Keras model."""
    x = float_input()
    hidden = keras.layers.LSTM(UNITS, return_sequences=True, dtype="float64")(x)
    last = keras.layers.GRU(UNITS, dtype="float64")(hidden)
    return Program({"x": x}, keras.layers.Dense(2, dtype="float64")(last), ["lstm", "gru"])


PROGRAMS = {
    f.__name__: f
    for f in (
        *(penn_treebank, classifier, both_directions, translation, residual_stack),
        *(sampling, scanned, while_loop, siamese, keras_layers),
    )
}


@dataclass
class BuiltProgram:
    """A program in a session: its net, its data, and the results of `tf.gradients` for the user's own tensors."""

    program: Program
    net: Any
    data: Any
    truth: dict[str, Any]


@functools.cache
def build_case(name):
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        program = PROGRAMS[name]()
        y, float_inputs = program.output, {n: t for n, t in program.inputs.items() if t.dtype.is_floating}
        loss = tf.reduce_mean(y**2)
        flat, variables = tf.reshape(y, [SAMPLES, -1]), tf.trainable_variables()
        sources = {n: [t] for n, t in float_inputs.items()} | program.states
        size = int(flat.shape[1])
        fetches = {"loss": loss, "weights": [tf.convert_to_tensor(g) for g in tf.gradients(loss, variables)]}
        fetches |= {("grad", n): _gradient(loss, ts) for n, ts in sources.items()}
        fetches |= {
            ("rows", n): tf.stack([_gradient(flat[:, k], ts) for k in range(size)], 1) for n, ts in sources.items()
        }
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        net = rl.tf1.graph(session, inputs=program.inputs, outputs={"y": y}, loss=loss, feed=program.feed)
        draw = np.random.default_rng(0)
        shapes = {n: t.shape.as_list() for n, t in program.inputs.items()}
        data = {n: draw.normal(size=s) if n in float_inputs else draw.integers(0, WORDS, s) for n, s in shapes.items()}
        truth = session.run(fetches, {program.inputs[n]: data[n] for n in data} | program.feed)
    return BuiltProgram(program, net, data if len(data) > 1 else next(iter(data.values())), truth)


def _gradient(target, tensors):
    gradients = tf.gradients(target, tensors, unconnected_gradients="zero")
    return gradients[0] if len(gradients) == 1 else tf.stack(gradients, 1)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def wrt_names_of(case):
    """Return the names of the tensors to differentiate by: as passed to ``wrt``, mapped to their keys in ``truth``."""
    wrt_names = {n: n for n in case.program.states}
    floats = [n for n, t in case.program.inputs.items() if t.dtype.is_floating]
    return wrt_names | {(f"input[{n}]" if len(floats) > 1 else "input"): n for n in floats}


@pytest.mark.parametrize("name", PROGRAMS)
def test_trace(name):
    case = build_case(name)
    trace = rl.trace(case.net, case.data)
    assert trace.certificate.state == "passed"
    assert_close(trace.loss, case.truth["loss"])
    for wrt, n in wrt_names_of(case).items():
        if n in case.program.states:
            layer, _, state = wrt.rpartition(".")
            assert_close(trace[layer][f"{state}_grad"].values, case.truth["grad", n])


@pytest.mark.parametrize("name", PROGRAMS)
def test_layers(name):
    case = build_case(name)
    assert [layer.name for layer in rl.layers(case.net)] == case.program.layers


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name):
    case = build_case(name)
    for wrt, n in wrt_names_of(case).items():
        grads = rl.gradients(case.net, case.data, wrt=wrt)
        assert_close(grads.values, case.truth["grad", n])
        assert grads.certificate.state == "passed"
    grads = rl.gradients(case.net, case.data, wrt="weights")
    weight_grads = [gradient.values for layer in grads for gradient in grads[layer].dataset.values()]
    assert_close(sum((g**2).sum() for g in weight_grads), sum((g**2).sum() for g in case.truth["weights"]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_jacobian(name):
    case = build_case(name)
    for wrt, n in wrt_names_of(case).items():
        jacobian = rl.jacobian(case.net, case.data, of="output", wrt=wrt)
        truth = case.truth["rows", n]
        out_dims = [d for d in jacobian.dims if d.startswith("out_")]
        in_dims = [d for d in jacobian.dims if d not in ("sample", *out_dims)]
        assert_close(jacobian.transpose("sample", *out_dims, *in_dims).values.reshape(truth.shape), truth)
        assert jacobian.certificate.state == (
            "passed" if n not in case.program.states or name == "sampling" else "could not"
        )
