"""TensorFlow-1 cells in TensorFlow's loops, and the same cells called step by step.

The step-by-step network is the oracle: it has no loop, so that every state is a tensor that TensorFlow can
differentiate. Both networks have the same variables, by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import rnnlens as rl

cell = tf.nn.rnn_cell
SAMPLES, STEPS, FEATURES = 4, 6, 3
LENGTHS = [6, 3, 1, 5]


class Leaky(cell.RNNCell):
    """A cell of a type unknown to rnnlens: masked recurrent weights, and three sub-steps in each step."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    state_size = property(lambda self: self.units)
    output_size = property(lambda self: self.units)

    def call(self, x: Any, h: Any) -> tuple[Any, Any]:
        kernel = tf.get_variable("kernel", [x.shape[-1], self.units], dtype=x.dtype)
        recurrent = tf.get_variable("recurrent", [self.units, self.units], dtype=x.dtype)
        allowed = tf.constant(np.tri(self.units), dtype=x.dtype)
        for _ in range(3):
            h = 0.8 * h + 0.2 * tf.tanh(tf.matmul(x, kernel) + tf.matmul(tf.nn.relu(h), recurrent * allowed))
        return 2 * h, h


#: By name: a constructor of the cell, and the rnnlens kind of each of its layers.
CELLS: Mapping[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "rnn": (lambda: cell.BasicRNNCell(4), ("simple_rnn",)),
    "rnn_relu": (lambda: cell.BasicRNNCell(4, activation=tf.nn.relu), ("simple_rnn",)),
    "gru": (lambda: cell.GRUCell(4), ("gru",)),
    "gru_softsign": (lambda: cell.GRUCell(4, activation=tf.nn.softsign), ("gru",)),
    "basic_lstm": (lambda: cell.BasicLSTMCell(4), ("lstm",)),
    "basic_lstm_joined": (lambda: cell.BasicLSTMCell(4, forget_bias=0.5, state_is_tuple=False), ("lstm",)),
    "lstm": (lambda: cell.LSTMCell(4, forget_bias=2.0, activation=tf.nn.elu), ("lstm",)),
    "lstm_projected": (lambda: cell.LSTMCell(4, num_proj=2), ("lstm",)),
    "lstm_peepholes": (lambda: cell.LSTMCell(4, use_peepholes=True, cell_clip=0.3), ("lstm_peephole",)),
    "lstm_all": (
        lambda: cell.LSTMCell(4, use_peepholes=True, num_proj=2, cell_clip=0.3, proj_clip=0.1),
        ("lstm_peephole",),
    ),
    "stack": (lambda: cell.MultiRNNCell([cell.GRUCell(4), cell.LSTMCell(3)]), ("gru", "lstm")),
    "stack_joined": (
        lambda: cell.MultiRNNCell([cell.BasicLSTMCell(n, state_is_tuple=False) for n in (4, 3)], state_is_tuple=False),
        ("lstm", "lstm"),
    ),
    "residual": (lambda: cell.ResidualWrapper(cell.GRUCell(FEATURES)), ("gru",)),
    "dropout_of_one": (
        lambda: cell.DropoutWrapper(
            cell.GRUCell(4), input_keep_prob=tf.placeholder_with_default(tf.constant(1.0, _dtype()), [])
        ),
        ("gru",),
    ),
    "device": (lambda: cell.DeviceWrapper(cell.GRUCell(4), "/cpu:0"), ("gru",)),
    "own": (lambda: Leaky(4), ("unknown",)),
}

_DTYPE = [tf.float64]


def _dtype() -> Any:
    return _DTYPE[0]


@dataclass
class UnrolledNetwork:
    """States (h, c, ...) by layer and step, before masking, and the loss."""

    loss: Any
    states: dict[str, list[list[Any]]]


def input_data(dtype: Any, time_major: bool = False) -> Any:
    """Return the input of both networks, (sample, time, feature) or time-major."""
    x = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES)).astype(dtype.as_numpy_dtype)
    return x.swapaxes(0, 1) if time_major else x


def weighted_sum(tensor: Any, seed: int) -> Any:
    """Return a sum that weights every number differently."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=[d or SAMPLES for d in tensor.shape.as_list()])
    return tf.reduce_sum(tensor * tf.constant(weights, tensor.dtype))


def loss_in_loops(names: Any, x: Any, lengths: Any, time_major: bool, bidirectional: bool) -> Any:
    """Return the loss of the named cells in TensorFlow's loops."""
    total = 0.0
    for name in names:
        make, _ = CELLS[name]
        with tf.variable_scope(name, initializer=tf.random_uniform_initializer(-0.7, 0.7, seed=3)):
            options: dict[str, Any] = {"dtype": x.dtype, "sequence_length": lengths, "time_major": time_major}
            if bidirectional:
                outputs, finals = tf.nn.bidirectional_dynamic_rnn(make(), make(), x, **options)
            else:
                outputs, finals = tf.nn.dynamic_rnn(make(), x, **options)
                outputs = [outputs]
        if time_major:
            outputs = [tf.transpose(y, [1, 0, 2]) for y in outputs]
        total += sum(weighted_sum(y, 1) for y in outputs)
        total += sum(weighted_sum(s, 2) for s in tf.nest.flatten(finals))
    return total


def unroll(names: Any, x: Any, lengths: Any, time_major: bool, bidirectional: bool) -> UnrolledNetwork:
    """Return the loss and the states of the named cells, called step by step."""
    total, states_by_layer = 0.0, {}
    x = tf.transpose(x, [1, 0, 2]) if time_major else x
    for name in names:
        make, kinds = CELLS[name]
        with tf.variable_scope(name):
            if not bidirectional:
                y, finals, states = _run("rnn", make(), x, lengths)
                total += weighted_sum(y, 1) + sum(weighted_sum(s, 2) for s in tf.nest.flatten(finals))
                states_by_layer |= _by_layer(f"{name}/rnn", kinds, states)
                continue
            with tf.variable_scope("bidirectional_rnn"):
                for direction in ("fw", "bw"):
                    inputs = x if direction == "fw" else _reverse_time(x, lengths)
                    y, finals, states = _run(direction, make(), inputs, lengths)
                    y = y if direction == "fw" else _reverse_time(y, lengths)
                    total += weighted_sum(y, 1) + sum(weighted_sum(s, 2) for s in tf.nest.flatten(finals))
                    states_by_layer |= _by_layer(f"{name}/bidirectional_rnn/{direction}", kinds, states)
    return UnrolledNetwork(total, states_by_layer)


def _reverse_time(x: Any, lengths: Any) -> Any:
    return tf.reverse(x, [1]) if lengths is None else tf.reverse_sequence(x, lengths, seq_axis=1, batch_axis=0)


def _run(scope: str, rnn_cell: Any, x: Any, lengths: Any) -> Any:
    """Return outputs (sample, time, unit), the final states, and the computed states of every step."""
    with tf.variable_scope(scope):
        state, outputs, states = rnn_cell.zero_state(SAMPLES, x.dtype), [], []
        for t in range(STEPS):
            y, new_state = rnn_cell(x[:, t], state)
            states.append([tensor for s in tf.nest.flatten(new_state) for tensor in _split_joined(s)])
            if lengths is not None:
                is_real = tf.expand_dims(t < lengths, 1)
                y = tf.where_v2(is_real, y, tf.zeros_like(y))
                new_state = tf.nest.map_structure(
                    lambda s, k, is_real=is_real: tf.where_v2(is_real, s, k), new_state, state
                )
            state = new_state
            outputs.append(y)
    return tf.stack(outputs, 1), state, states


def _split_joined(state: Any) -> list[Any]:
    """Return the parts of a state that concatenates several states."""
    if state.op.type != "ConcatV2":
        return [state]
    return [tensor for joined in state.op.inputs[:-1] for tensor in _split_joined(joined)]


def _by_layer(name: str, kinds: tuple[str, ...], states: list[list[Any]]) -> dict[str, list[list[Any]]]:
    """Return h of all steps, and c if there is one, by layer; TensorFlow orders c before h."""
    states_by_layer, offset = {}, 0
    for i, kind in enumerate(kinds):
        count = 2 if kind.startswith("lstm") else 1
        columns = [[step[offset + k] for step in states] for k in range(count)][::-1]
        states_by_layer[name if len(kinds) == 1 else f"{name}/cell_{i}"] = columns
        offset += count
    return states_by_layer


def network_with_reference(
    names: Any, *, lengths: bool, time_major: bool = False, both: bool = False, dtype: Any = tf.float64
) -> Any:
    """Return a network of these cells in loops with its input, and the reference loss, state gradients and states.

    Reference gradients and states are (sample, time, unit) by layer.
    """
    _DTYPE[0] = dtype
    x = input_data(dtype, time_major)
    graph, session = tf.get_default_graph(), tf.Session()
    x_ph = tf.placeholder(dtype, [None if n == SAMPLES else n for n in x.shape])
    lengths_ph = tf.placeholder(tf.int32, [None])
    labels = tf.placeholder(dtype, [None])
    loss = loss_in_loops(names, x_ph, lengths_ph if lengths else None, time_major, both) * tf.reduce_mean(labels)
    session.run(tf.global_variables_initializer())
    values = {v.op.name: session.run(v) for v in tf.global_variables()}
    feed_dict = {lengths_ph: LENGTHS} if lengths else {}
    net = rl.tf1.graph(session, inputs={"x": x_ph}, outputs={"loss": loss}, loss=loss, targets=labels, feed=feed_dict)
    assert net.graph is graph
    with tf.Graph().as_default(), tf.Session() as reference_session:
        reference = unroll(names, tf.constant(x), tf.constant(LENGTHS) if lengths else None, time_major, both)
        for variable in tf.global_variables():
            variable.load(values[variable.op.name], reference_session)
        grads = {
            name: [tf.stack(tf.gradients(reference.loss, column), 1) for column in columns]
            for name, columns in reference.states.items()
        }
        states = {name: [tf.stack(column, 1) for column in columns] for name, columns in reference.states.items()}
        value, reference_grads, reference_states = reference_session.run([reference.loss, grads, states])
    return net, x, float(value), reference_grads, reference_states
