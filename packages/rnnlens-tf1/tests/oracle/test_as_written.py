"""Common models, all in one graph: every state and total gradient equals that of the same models unrolled by hand.

Unrolled by hand, every state is a tensor, so that TensorFlow computes its total gradient.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tf1_cells import weighted_sum

import rnnlens as rl

cell = tf.nn.rnn_cell
SAMPLES, STEPS, FEATURES, UNITS = 3, 5, 3, 4
LENGTHS = [5, 3, 1]
DATA = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES))


class LayerRunner:
    """Runner of cells in TensorFlow's loops or, ``by_hand``, step by step; then it keeps the states by layer."""

    def __init__(self, by_hand):
        self.by_hand, self.states = by_hand, {}

    def rnn(self, name, make_cell, x, lengths=None, initial=None, scope="rnn"):
        rnn_cell = make_cell()
        if not self.by_hand:
            dtype = x.dtype if initial is None else None
            return tf.nn.dynamic_rnn(rnn_cell, x, lengths, initial, dtype=dtype, scope=scope)
        with tf.variable_scope(scope):
            state = rnn_cell.zero_state(SAMPLES, x.dtype) if initial is None else initial
            outputs, states = [], []
            for t in range(x.shape[1]):
                output, new = rnn_cell(x[:, t], state)
                states.append(tf.nest.flatten(new))
                if lengths is not None:
                    is_valid = tf.expand_dims(t < lengths, 1)
                    output = tf.where_v2(is_valid, output, tf.zeros_like(output))
                    new = tf.nest.map_structure(lambda n, o, is_valid=is_valid: tf.where_v2(is_valid, n, o), new, state)
                state = new
                outputs.append(output)
            self.states[name] = states, lengths is not None
            return tf.stack(outputs, 1), state

    def loop(self, name, x, count, read_step):
        """Return the outputs of an Elman network in a while loop that reads its input by ``read_step``."""
        shapes = {"W": [FEATURES, UNITS], "V": [UNITS, UNITS], "b": [UNITS]}
        w = {key: tf.get_variable(key, shape, x.dtype) for key, shape in shapes.items()}

        def step(x_t, h):
            return tf.tanh(tf.matmul(x_t, w["W"]) + tf.matmul(h, w["V"]) + w["b"])

        zero = tf.zeros([SAMPLES, UNITS], x.dtype)
        if self.by_hand:
            states = [zero]
            for t in range(count):
                states.append(step(x[:, t], states[-1]))
            self.states[name] = [[h] for h in states[1:]], False
            return tf.stack(states[1:], 1)

        def body(t, h, outputs):
            h = step(read_step(t), h)
            return t + 1, h, outputs.write(t, h)

        loop_vars = (0, zero, tf.TensorArray(x.dtype, count))
        outputs = tf.transpose(tf.while_loop(lambda t, *_: t < count, body, loop_vars)[2].stack(), [1, 0, 2])
        outputs.set_shape([SAMPLES, count, UNITS])
        return outputs


def tensor_array(run, x, lengths):
    steps = tf.TensorArray(x.dtype, STEPS).unstack(tf.transpose(x, [1, 0, 2]))
    return weighted_sum(run.loop("tensor_array", x, STEPS, steps.read), 1)


def index(run, x, lengths):
    return weighted_sum(run.loop("index", x, STEPS, lambda t: x[:, t]), 1)


def index_of_some(run, x, lengths):
    """Return the loss of a loop that ends two steps before its input, which it reads by ``tf.gather``."""
    return weighted_sum(run.loop("index_of_some", x, STEPS - 2, lambda t: tf.gather(x, t, axis=1)), 1)


def stacked_dropout(run, x, lengths):
    keep = tf.placeholder_with_default(tf.constant(1.0, x.dtype), [])

    def make():
        return cell.MultiRNNCell([cell.DropoutWrapper(cell.LSTMCell(UNITS), output_keep_prob=keep) for _ in range(2)])

    outputs, state = run.rnn("stacked_dropout/rnn", make, x, lengths)
    return weighted_sum(outputs, 1) + weighted_sum(state[1].h, 2)


def attention_after(run, x, lengths):
    outputs, _ = run.rnn("attention_after/rnn", lambda: cell.GRUCell(UNITS), x, lengths)
    score = tf.reduce_sum(tf.tanh(tf.layers.dense(outputs, UNITS)), 2)
    return weighted_sum(tf.reduce_sum(outputs * tf.nn.softmax(score)[:, :, None], 1), 1)


def shared_by_two(run, x, lengths):
    """Return the loss of one encoder for two inputs: one set of variables, two loops."""
    final_states = []
    for sequence in (x, 0.5 * x[:, ::-1]):
        with tf.variable_scope("encoder", reuse=bool(final_states)):
            final_states.append(
                run.rnn(
                    f"shared_by_two/encoder/rnn#{len(final_states)}",
                    lambda: cell.BasicLSTMCell(UNITS),
                    sequence,
                    lengths,
                )[1].h
            )
    return weighted_sum(tf.abs(final_states[0] - final_states[1]), 1)


def scopes_of_one_name(run, x, lengths):
    with tf.variable_scope("block"):
        below, _ = run.rnn("scopes_of_one_name/block/rnn", lambda: cell.GRUCell(UNITS), x)
    with tf.variable_scope("block_1"), tf.name_scope("block"):
        above, _ = run.rnn("scopes_of_one_name/block_1/block/rnn", lambda: cell.GRUCell(UNITS), below)
    return tf.reduce_sum(above**2)


def masked_mean(run, x, lengths):
    outputs, _ = run.rnn("masked_mean/rnn", lambda: cell.LSTMCell(UNITS), x, lengths)
    error = tf.square(tf.layers.dense(outputs, 1)[..., 0] - 0.3)
    mask = tf.sequence_mask(lengths, STEPS, dtype=x.dtype)
    return tf.reduce_sum(error * mask) / tf.reduce_sum(mask)


def last_relevant(run, x, lengths):
    outputs, _ = run.rnn("last_relevant/rnn", lambda: cell.LSTMCell(UNITS, num_proj=2), x, lengths)
    return weighted_sum(tf.gather_nd(outputs, tf.stack([tf.range(SAMPLES), lengths - 1], 1)), 1)


def encoder_decoder(run, x, lengths):
    _, thought = run.rnn("encoder_decoder/e", lambda: cell.LSTMCell(UNITS), x, lengths, scope="e")
    outputs, _ = run.rnn("encoder_decoder/d", lambda: cell.LSTMCell(UNITS), x[:, :-1], initial=thought, scope="d")
    return weighted_sum(tf.nn.softmax(tf.layers.dense(outputs, 3)), 1)


def chosen_by_a_condition(run, x, lengths):
    training = tf.placeholder_with_default(True, [])
    inputs = tf.cond(training, lambda: 2.0 * x, lambda: x)
    outputs, _ = run.rnn("chosen_by_a_condition/rnn", lambda: cell.GRUCell(UNITS), inputs, lengths)
    return weighted_sum(tf.cond(training, lambda: outputs[:, 0], lambda: outputs[:, 1]), 1)


def carries_its_state_over(run, x, lengths):
    """Return the loss of a GRU that starts from a variable and stores its last state there for the next batch.

    The variable is a resource: TensorFlow differentiates a reference variable with its value after the assignment.
    """
    initializer = tf.random_normal_initializer(seed=3)
    saved_state = tf.get_variable("held", [SAMPLES, UNITS], x.dtype, initializer, trainable=False, use_resource=True)
    start = tf.identity(saved_state)
    outputs, state = run.rnn("carries_its_state_over/rnn", lambda: cell.GRUCell(UNITS), x, initial=start)
    with tf.control_dependencies([tf.assign(saved_state, state)]):
        return weighted_sum(tf.identity(outputs), 1)


def looked_up(run, x, lengths):
    ids = tf.cast(tf.floor(3 * tf.abs(x[..., 0])), tf.int32) % 7
    rows = tf.nn.embedding_lookup(tf.get_variable("table", [7, FEATURES], x.dtype), ids)
    return weighted_sum(run.rnn("looked_up/rnn", lambda: cell.LSTMCell(UNITS, use_peepholes=True), rows, lengths)[0], 1)


def residual_layers(run, x, lengths):
    below, _ = run.rnn("residual_layers/a", lambda: cell.LSTMCell(FEATURES), x, lengths, scope="a")
    above, _ = run.rnn("residual_layers/b", lambda: cell.LSTMCell(FEATURES), x + below, lengths, scope="b")
    return weighted_sum(below + above, 1)


MODELS = (
    *(tensor_array, index, index_of_some, stacked_dropout, attention_after, shared_by_two, scopes_of_one_name),
    *(masked_mean, last_relevant, encoder_decoder, chosen_by_a_condition, carries_its_state_over, looked_up),
    residual_layers,
)
#: A loop, dropout, lengths, a decoder and a look-up: the others run the same code in other arrangements.
QUICK = tensor_array, stacked_dropout, masked_mean, encoder_decoder, looked_up


def build_models(models, by_hand):
    """Return the summed loss of the models, x, lengths, and (only ``by_hand``) the states by layer."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    lengths, run = tf.placeholder(tf.int32, [None]), LayerRunner(by_hand)
    losses = []
    for model in models:
        uniform = tf.random_uniform_initializer(-0.9, 0.9, seed=len(losses))
        with tf.variable_scope(model.__name__, initializer=uniform):
            losses.append(model(run, x, lengths))
    return tf.add_n(losses), x, lengths, run.states


def states_by_hand(models, values):
    """Return by layer TensorFlow's states and total gradients (sample, time, unit), and whether it has lengths."""
    with tf.Graph().as_default(), tf.Session() as session:
        loss, x, lengths, layers = build_models(models, by_hand=True)
        for variable in tf.global_variables():
            variable.load(values[variable.op.name], session)
        fetches = {}
        for name, (steps, masked) in layers.items():
            columns = list(map(list, zip(*steps, strict=True)))
            grads = [tf.gradients(loss, column, unconnected_gradients="zero") for column in columns]
            fetches[name] = [tf.stack(c, 1) for c in columns], [tf.stack(g, 1) for g in grads], tf.constant(masked)
        return session.run(fetches, {x: DATA, lengths: LENGTHS})


@pytest.mark.parametrize("models", [QUICK, pytest.param(MODELS, marks=pytest.mark.full)], ids=["five", "all"])
def test_every_state_of_every_model(models):
    loss, x, lengths, _ = build_models(models, by_hand=False)
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    values = {variable.op.name: session.run(variable) for variable in tf.global_variables()}
    net = rl.tf1.graph(session, inputs={"x": x}, outputs={"loss": loss}, loss=loss, feed={lengths: LENGTHS})
    trace = rl.trace(net, DATA)
    assert trace.certificate.state == "passed"
    for variable in tf.global_variables():
        np.testing.assert_array_equal(session.run(variable), values[variable.op.name])
    for name, (states, grads, masked) in states_by_hand(models, values).items():
        nodes = sorted(node for node in trace if node == name or node.startswith(f"{name}/cell_"))
        names = ("cell", "hidden") if len(states) > len(nodes) else ("hidden",)
        assert len(states) == len(nodes) * len(names), name
        is_valid = np.arange(states[0].shape[1]) < (np.array(LENGTHS)[:, None] if masked else STEPS)
        is_valid = np.broadcast_to(is_valid, states[0].shape[:2])
        traced_states = [trace[node][quantity] for node in nodes for quantity in names]
        traced_grads = [trace[node][f"{quantity}_grad"] for node in nodes for quantity in names]
        for actual, expected in zip([*traced_states, *traced_grads], [*states, *grads], strict=True):
            np.testing.assert_allclose(
                actual.values[is_valid], expected[is_valid], rtol=1e-10, atol=1e-12, err_msg=name
            )


def test_a_loop_that_ends_before_what_it_reads_is_refused():
    """A loop that stops before its TensorArray ends is refused, since the last steps are unknown."""
    x = tf.placeholder(tf.float64, [SAMPLES, STEPS, FEATURES])
    steps = tf.TensorArray(x.dtype, STEPS).unstack(tf.transpose(x, [1, 0, 2]))
    loss = tf.reduce_sum(LayerRunner(by_hand=False).loop("", x, STEPS - 2, steps.read))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(rl.errors.UnsupportedError, match="does not run through all steps"):
            rl.trace(rl.tf1.graph(session, inputs=x, outputs=loss, loss=loss), DATA)


def test_a_penalty_in_the_loss_does_not_accuse_gradients_of_states():
    """State gradients pass their certificate despite an L2 penalty, which reaches the kernel outside the loop."""
    x = tf.placeholder(tf.float64, [3, 5, 2], name="x")
    outputs, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(4), x, dtype=tf.float64)
    loss = tf.reduce_sum(outputs**2) + 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    net = rl.tf1.graph(session, inputs=x, outputs=outputs, loss=loss)
    data = np.random.default_rng(0).normal(size=(3, 5, 2))
    assert rl.gradients(net, data, wrt="rnn.hidden").certificate.state == "passed"
    assert rl.gradients(net, data, wrt=["rnn.hidden", "input"]).certificate.state == "passed"


def test_the_jacobian_of_a_residual_stack_that_runs_backward():
    """The Jacobian of a backward residual stack is exact: the upper cell and the output both read the lower cell."""
    x = tf.placeholder(tf.float64, [2, 5, 3], name="x")

    def make():
        return cell.MultiRNNCell([cell.BasicLSTMCell(3), cell.ResidualWrapper(cell.BasicLSTMCell(3))])

    (_, backward), _ = tf.nn.bidirectional_dynamic_rnn(make(), make(), x, dtype=tf.float64)
    rows = tf.stack([tf.gradients(backward[:, t, u], x)[0] for t in range(5) for u in range(3)], axis=1)
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    data = np.random.default_rng(0).normal(size=(2, 5, 3))
    jacobian = rl.jacobian(rl.tf1.graph(session, inputs=x, outputs=backward), data)
    expected = session.run(rows, {x: data}).reshape(2, 5, 3, 5, 3)
    np.testing.assert_allclose(jacobian, expected, rtol=1e-9, atol=1e-12)
    assert jacobian.certificate.state == "passed"
