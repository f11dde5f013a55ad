"""Compare every verb with `tf.gradients` on random TensorFlow-1 graphs in the style of 2017 programs.

    RNNLENS_CONTROL_FLOW=v1 python benchmarks/fuzz_tf1.py --count 60     # or v2

Models are drawn by their number; `fuzz_torch.py` explains how outcomes are counted. The reference is `tf.gradients` in
the user's own graph and session, in float64.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import _fuzz
import numpy as np
import tensorflow.compat.v1 as tf

import rnnlens as rl

STEPS, SAMPLES, FEATURES = 6, 4, 3
cells = tf.nn.rnn_cell


class LeakyCell(cells.RNNCell):
    """A leaky cell, h' = (1 - a) h + a tanh(W x + U h) with a = 0.3."""

    def __init__(self, units):
        super().__init__()
        self._units = units

    state_size = output_size = property(lambda self: self._units)

    def build(self, shape):
        self.w = self.add_variable("w", [int(shape[-1]), self._units], tf.float64)
        self.u = self.add_variable("u", [self._units, self._units], tf.float64)
        self.built = True

    def call(self, x, h):
        h = 0.7 * h + 0.3 * tf.tanh(tf.matmul(x, self.w) + tf.matmul(h, self.u))
        return h, h


class OwnGRU(cells.RNNCell):
    """A user-written GRU: input and recurrent kernels in a variable scope of its own, and no recurrent bias."""

    def __init__(self, units):
        super().__init__()
        self._units = units

    state_size = output_size = property(lambda self: self._units)

    def __call__(self, x, h, scope=None):
        with tf.variable_scope(scope or "own_gru", reuse=tf.AUTO_REUSE):
            n = self._units
            w = tf.get_variable("w", [x.shape[1], 3 * n], tf.float64)
            u = tf.get_variable("u", [n, 2 * n], tf.float64)
            v = tf.get_variable("v", [n, n], tf.float64)
            b = tf.get_variable("b", [3 * n], tf.float64, tf.random_normal_initializer())
            by_x = tf.split(tf.matmul(x, w) + b, 3, axis=1)
            by_h = tf.split(tf.matmul(h, u), 2, axis=1)
            z, r = tf.sigmoid(by_x[0] + by_h[0]), tf.sigmoid(by_x[1] + by_h[1])
            h = z * h + (1 - z) * tf.tanh(by_x[2] + tf.matmul(r * h, v))
            return h, h


KINDS = {
    "GRUCell": cells.GRUCell,
    "LSTMCell": cells.LSTMCell,
    "BasicLSTMCell": cells.BasicLSTMCell,
    "peepholes": lambda n: cells.LSTMCell(n, use_peepholes=True, cell_clip=3.0),
    "projection": lambda n: cells.LSTMCell(n + 2, num_proj=n),
    "BasicRNNCell": cells.BasicRNNCell,
    "relu": lambda n: cells.BasicRNNCell(n, activation=tf.nn.relu),
    "leaky": LeakyCell,
    "own GRU": OwnGRU,
}


def draw_cell(choose, i, keep):
    """Return a constructor of one random cell with its wrapper."""
    kind, units = choose(f"{i} kind", list(KINDS)), choose(f"{i} units", [FEATURES, 5])
    wrapper = choose(f"{i} wrapper", ["none", "none", "dropout", "all dropouts", "residual", "stack", "device"])

    def make():
        cell = KINDS[kind](units)
        if wrapper == "dropout":
            return cells.DropoutWrapper(cell, input_keep_prob=keep, output_keep_prob=keep)
        if wrapper == "all dropouts":
            return cells.DropoutWrapper(cell, keep, keep, keep)
        if wrapper == "stack":
            return cells.MultiRNNCell([cell, KINDS[kind](units)])
        if wrapper == "residual":
            return cells.MultiRNNCell([cell, cells.ResidualWrapper(KINDS[kind](units))])
        return cells.DeviceWrapper(cell, "/cpu:0") if wrapper == "device" else cell

    return make


def run_cell(choose, i, make, z, lengths):
    """Return the outputs (sample, time, unit) of one recurrence, and its last states."""
    runner = choose(
        f"{i} way", ["dynamic", "dynamic", "dynamic", "both ways", "time major", "static", "loop", "raw_rnn"]
    )
    used_lengths = lengths if choose(f"{i} lengths", [False, False, True]) else None
    with tf.variable_scope(f"rec_{i}"):
        if runner == "both ways":
            directions, states = tf.nn.bidirectional_dynamic_rnn(make(), make(), z, used_lengths, dtype=tf.float64)
            return tf.concat(directions, -1), states
        if runner == "time major":
            time_major = tf.transpose(z, [1, 0, 2])
            outputs, state = tf.nn.dynamic_rnn(make(), time_major, used_lengths, dtype=tf.float64, time_major=True)
            return tf.transpose(outputs, [1, 0, 2]), state
        if runner == "static":
            outputs, state = tf.nn.static_rnn(make(), tf.unstack(z, STEPS, axis=1), dtype=tf.float64)
            return tf.stack(outputs, axis=1), state
        if runner == "loop":
            cell, outputs = make(), []
            state = cell.zero_state(SAMPLES, tf.float64)
            for t in range(STEPS):
                output, state = cell(z[:, t], state)
                outputs.append(output)
            return tf.stack(outputs, axis=1), state
        if runner == "raw_rnn":
            return run_raw_rnn(make(), z)
        return tf.nn.dynamic_rnn(make(), z, used_lengths, dtype=tf.float64)


def run_raw_rnn(cell, z):
    """Run a cell in `tf.nn.raw_rnn`, as attention decoders did."""
    array = tf.TensorArray(tf.float64, STEPS).unstack(tf.transpose(z, [1, 0, 2]))

    def step(time, output, state, loop_state):
        next_state = cell.zero_state(SAMPLES, tf.float64) if output is None else state
        finished = time >= tf.fill([SAMPLES], STEPS)
        width = int(z.shape[2])
        step_input = tf.cond(
            tf.reduce_all(finished), lambda: tf.zeros([SAMPLES, width], tf.float64), lambda: array.read(time)
        )
        step_input.set_shape([SAMPLES, width])
        return finished, step_input, next_state, output, None

    outputs, state, _ = tf.nn.raw_rnn(cell, step)
    return tf.transpose(outputs.stack(), [1, 0, 2]), state


def draw_model(number, seed):
    """Build a random model in the default graph; return its net, data, targets, expected values and choices."""
    draw = random.Random(f"{seed} {number}")
    choices: dict[str, Any] = {}

    def choose(name, options):
        choices[name] = draw.choice(options)
        return choices[name]

    tf.set_random_seed(number)
    rng = np.random.default_rng(number)
    keep = tf.placeholder_with_default(tf.constant(1.0, tf.float64), [], name="keep")
    lengths = tf.constant([6, 4, 5, 6])
    kind = choose("input", ["numbers", "numbers", "numbers", "ids", "fixed"])
    if kind == "ids":
        x = tf.placeholder(tf.int32, [SAMPLES, STEPS], name="x")
        z = tf.nn.embedding_lookup(tf.get_variable("table", [11, FEATURES], tf.float64), x)
        data = rng.integers(0, 11, (SAMPLES, STEPS))
    else:
        x = tf.placeholder(tf.float64, [SAMPLES if kind == "fixed" else None, STEPS, FEATURES], name="x")
        z = tf.ensure_shape(x, [SAMPLES, STEPS, FEATURES])
        data = rng.normal(size=(SAMPLES, STEPS, FEATURES))
    count = choose("parts", [1, 1, 2])
    for i in range(count):
        z, state = run_cell(choose, i, draw_cell(choose, i, keep), z, lengths)
        extra = choose(f"{i} extra", ["none", "none", "relu", "dense", "dropout"])
        if extra == "relu":
            z = tf.nn.relu(z)
        elif extra == "dense":
            z = tf.layers.dense(z, 4, name=f"dense_{i}")
        elif extra == "dropout":
            z = tf.nn.dropout(z, keep_prob=keep)
    pool = choose("pool", ["last", "mean", "all", "state", "attention"])
    if pool == "state":
        z = tf.concat(tf.nest.flatten(state), -1)
    elif pool == "attention":
        scores = tf.nn.softmax(tf.layers.dense(z, 1, name="scores"), axis=1)
        z = tf.reduce_sum(scores * z, axis=1)
    elif pool != "all":
        z = z[:, -1] if pool == "last" else tf.reduce_mean(z, axis=1)
    output = tf.layers.dense(z, 2, name="head")
    target = tf.placeholder(tf.float64, output.shape, name="target")
    loss = tf.reduce_mean((output - target) ** 2)
    if choose("penalty", [False, False, True]):
        loss += 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
    variables = tf.trainable_variables()
    grads = tf.gradients(loss, [*([] if kind == "ids" else [x]), *variables])
    tensors = {"loss": loss, "x": None if kind == "ids" else grads[0], "weights": grads[kind != "ids" :]}
    if kind != "ids":
        flat = tf.reshape(output, [SAMPLES, -1])
        tensors["rows"] = [tf.gradients(flat[:, k], x)[0] for k in range(int(flat.shape[1]))]
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    net = rl.tf1.graph(session, inputs={"x": x}, outputs={"y": output}, loss=loss, targets=target, feed={keep: 1.0})
    targets = rng.normal(size=tuple(map(int, output.shape)))
    feed = {x: data, target: targets}
    expected = {name: session.run(t, feed) for name, t in tensors.items() if t is not None and name != "weights"}
    dense = [tf.convert_to_tensor(g) for g in tensors["weights"] if g is not None]
    expected["weights"] = sum(float((g**2).sum()) for g in session.run(dense, feed))
    return net, data, targets, expected, choices


def assert_close(label, actual, expected):
    """Compare two arrays within 1e-8."""
    _fuzz.assert_close(label, actual, expected, 1e-8)


def check_trace(net, x, y, expected):
    trace = rl.trace(net, x, y)
    assert_close("trace: loss", trace.loss, expected["loss"])
    return trace.certificate


def check_gradients(net, x, y, expected):
    if "x" in expected:
        assert_close("gradients: input", rl.gradients(net, x, y, wrt="input"), expected["x"])
    result = rl.gradients(net, x, y, wrt="weights")
    assert_close("gradients: norm of all weights", _fuzz.sum_of_squares(result), expected["weights"])
    return result.certificate


def check_states(net, x, y, expected):
    """Return the certificate of the first layer's total state gradient; it compares the resulting weight gradients."""
    layers = [row for row in rl.layers(net) if "left out" not in row.options]  # without unrolled unknown cells
    return rl.gradients(net, x, y, wrt=f"{layers[0].name}.hidden").certificate if layers else None


def check_jacobian(net, x, y, expected):
    if "rows" not in expected:
        return None
    computed = rl.jacobian(net, x)
    rows = np.stack(expected["rows"], axis=1)
    assert_close("jacobian", np.asarray(computed).reshape(rows.shape), rows)
    return computed.certificate


CHECKS = {"trace": check_trace, "gradients": check_gradients, "states": check_states, "jacobian": check_jacobian}


def main() -> int:
    """Draw the models; print a table and every model that is not right."""
    arguments = _fuzz.make_parser(__doc__, 60).parse_args()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # each graph runs only once or twice
    if os.environ.get("RNNLENS_CONTROL_FLOW", "v1") == "v1":
        tf.disable_v2_behavior()
    else:
        tf.disable_eager_execution()
    table = _fuzz.Table(CHECKS, arguments.only is not None)
    for number in _fuzz.model_numbers(arguments):
        with tf.Graph().as_default():
            try:
                net, x, y, expected, choices = draw_model(number, arguments.seed)
            except (ValueError, TypeError) as error:
                print(f"{number} not a model of TensorFlow: {type(error).__name__}: {str(error)[:150]}")
                continue
            variables = {v.op.name: v for v in tf.global_variables()}
            for name, check in CHECKS.items():
                run = functools.partial(check, net, x, y, expected)
                weights = functools.partial(net.session.run, variables)
                table.add(number, name, *_fuzz.run_check(run, weights), choices)
            net.session.close()
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
