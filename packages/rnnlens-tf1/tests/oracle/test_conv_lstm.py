"""Convolutional LSTMs in users' graphs: states, gates, total gradients, weight gradients and time Jacobians.

They equal TensorFlow's gradients of the same cell called step by step in another graph, and those of the Keras layer.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_keras as keras
from tf1_conv_cells import ConvLSTMCell, rnn_cell

import rnnlens as rl

SPACE = {1: [6], 2: [4, 3], 3: [3, 2, 4]}
NAMES = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
SAMPLES, STEPS, FEATURES, CHANNELS, LENGTHS = 2, 3, 2, 2, [3, 2]
GATES = {"input": 0, "candidate": 1, "forget": 2, "output": 3}


def cell_of(rank, **options):
    return ConvLSTMCell([*SPACE[rank], FEATURES], CHANNELS, [3] * rank, **options)


def make_data(rank):
    random = np.random.default_rng(0)
    return random.normal(size=(SAMPLES, STEPS, *SPACE[rank], FEATURES))


def make_initial_state(rank):
    return np.random.default_rng(5).normal(size=(2, SAMPLES, *SPACE[rank], CHANNELS))


def loss_of(outputs, final_state):
    weights = tf.constant(np.random.default_rng(1).normal(size=outputs.shape[1:].as_list()), outputs.dtype)
    return tf.reduce_sum(outputs * weights) + tf.reduce_sum(tf.square(final_state[0])) + tf.reduce_sum(final_state[1])


class ConvLSTMCase:
    """A network with a convolutional LSTM as users write it, and the same computed step by step in another graph."""

    def __init__(self, rank, loop, lengths=None, initial=False, norms=False, **options):
        self.x, self.rank = make_data(rank), rank
        x = tf.placeholder(tf.float64, [None, *self.x.shape[1:]])
        counts, states = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.float64, make_initial_state(rank).shape)
        start = rnn_cell.LSTMStateTuple(states[0], states[1]) if initial else None
        with tf.variable_scope("net", initializer=tf.random_uniform_initializer(-0.5, 0.5, seed=3)):
            outputs, final_state = LOOPS[loop](cell_of(rank, **options), x, counts if lengths else None, start)
        outputs.set_shape([None, STEPS, *SPACE[rank], outputs.shape[-1]])
        loss = loss_of(outputs, final_state)
        self.session = tf.Session()
        self.session.run(tf.global_variables_initializer())
        self.values = [self.session.run(v) for v in tf.global_variables()]
        feed = ({counts: lengths} if lengths else {}) | ({states: make_initial_state(rank)} if initial else {})
        self.net = rl.tf1.graph(self.session, inputs={"x": x}, outputs={"y": outputs}, loss=loss, feed=feed)
        self.layer = "net" if loop == "python" else "net/rnn"
        self._by_hand(lengths, initial, norms, options)

    def _by_hand(self, lengths, initial, norms, options):
        """Compute c and h after each step, and the gradients of the loss by these, the input and the variables."""
        with tf.Graph().as_default(), tf.Session() as session:
            x, outputs, step_states = tf.constant(self.x), [], []
            with tf.variable_scope("net"):
                cell = cell_of(self.rank, **options)
                state = (
                    rnn_cell.LSTMStateTuple(*tf.unstack(tf.constant(make_initial_state(self.rank))))
                    if initial
                    else None
                )
                state = cell.zero_state(SAMPLES, tf.float64) if state is None else state
                for t in range(STEPS):
                    output, new = cell(x[:, t], state)
                    step_states.append(new)
                    if lengths:
                        is_valid = tf.reshape(tf.constant(lengths) > t, [-1, *[1] * (self.rank + 1)])
                        output = tf.where_v2(is_valid, output, tf.zeros_like(output))
                        new = tf.nest.map_structure(
                            lambda n, o, is_valid=is_valid: tf.where_v2(is_valid, n, o), new, state
                        )
                    outputs.append(output)
                    state = new
            loss = loss_of(tf.stack(outputs, 1), state)
            for variable, value in zip(tf.global_variables(), self.values, strict=True):
                variable.load(value, session)
            state_grads = tf.gradients(loss, [s for step in step_states for s in step], unconnected_gradients="zero")
            self.c, self.h = (np.stack(session.run([step[i] for step in step_states]), 1) for i in range(2))
            self.c_grad, self.h_grad = (np.stack(session.run(state_grads[i::2]), 1) for i in range(2))
            self.x_grad = session.run(tf.gradients(loss, x)[0])
            self.weight_grads = session.run(tf.gradients(loss, tf.global_variables()))
            self.norms = np.zeros((SAMPLES, STEPS, STEPS))  # squared norms of dh/dx: (sample, step of h, step of x)
            for t, (_, h) in enumerate(step_states if norms else []):
                for total in tf.unstack(tf.reshape(tf.reduce_sum(h, 0), [-1])):
                    squares = np.square(session.run(tf.gradients(total, x)[0]))
                    self.norms[:, t] += squares.reshape(SAMPLES, STEPS, -1).sum(2)


def dynamic_loop(cell, x, lengths, initial):
    return tf.nn.dynamic_rnn(cell, x, lengths, initial, dtype=tf.float64)


def static_loop(cell, x, lengths, initial):
    outputs, final = tf.nn.static_rnn(cell, tf.unstack(x, axis=1), initial, dtype=tf.float64)
    return tf.stack(outputs, 1), final


def python_loop(cell, x, lengths, initial):
    state, outputs = initial or cell.zero_state(tf.shape(x)[0], tf.float64), []
    for t in range(STEPS):
        output, state = cell(x[:, t], state)
        outputs.append(output)
    return tf.stack(outputs, 1), state


LOOPS = {"dynamic": dynamic_loop, "static": static_loop, "python": python_loop}


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * max(1.0, np.abs(expected).max()))


CASES = [
    (2, "dynamic", {"lengths": LENGTHS, "initial": True}),
    (1, "dynamic", {}),
    (3, "dynamic", {"lengths": LENGTHS}),
    (2, "static", {"initial": True}),
    (1, "python", {"initial": True}),
    (3, "python", {}),
]


@pytest.mark.parametrize(("rank", "loop", "options"), CASES)
def test_states_gates_total_gradients_and_weights(rank, loop, options):
    case = ConvLSTMCase(rank, loop, **options)
    trace = rl.trace(case.net, case.x)
    assert trace.certificate.state == "passed", trace.certificate
    layer, is_valid = trace[case.layer], np.arange(STEPS) < np.array(options.get("lengths", [STEPS] * 2))[:, None]
    assert layer.hidden.dims == ("sample", "time", *NAMES[rank], "channel")
    assert layer.gates.dims == ("sample", "time", *NAMES[rank], "gate", "channel")
    truths = (("hidden", case.h), ("cell", case.c), ("hidden_grad", case.h_grad), ("cell_grad", case.c_grad))
    for name, truth in truths:
        assert_close(layer[name].values[is_valid], truth[is_valid])
    gates = {name: layer.gates.sel(gate=name).values for name in ("output",)}
    assert_close((gates["output"] * np.tanh(layer["cell"].values))[is_valid], case.h[is_valid])
    assert_close(layer.input_grad.values, case.x_grad)
    assert_close(rl.gradients(case.net, case.x, wrt="input").values, case.x_grad)
    assert_close(rl.gradients(case.net, case.x, wrt=f"{case.layer}.hidden").values[is_valid], case.h_grad[is_valid])
    weights = rl.weights(case.net, case.x)
    assert weights.certificate.state == "passed", weights.certificate
    window = tuple(f"kernel_{axis}" for axis in NAMES[rank])
    layer = weights[case.layer]
    assert layer.recurrent_kernel_grad.dims == (*window, "channel_in", "gate", "channel")
    kernel, bias = case.weight_grads
    for gate, number in GATES.items():
        columns = slice(number * CHANNELS, (number + 1) * CHANNELS)
        assert_close(layer.kernel_grad.sel(gate=gate), kernel[..., :FEATURES, columns])
        assert_close(layer.recurrent_kernel_grad.sel(gate=gate), kernel[..., FEATURES:, columns])
        assert_close(layer.bias_grad.sel(gate=gate), bias[columns])


@pytest.mark.parametrize(("rank", "loop"), [(2, "dynamic"), (1, "static")])
def test_time_jacobians_by_norms_over_places_and_channels(rank, loop):
    case = ConvLSTMCase(rank, loop, norms=True)
    norms = rl.jacobian(case.net, case.x, of=f"{case.layer}.hidden", wrt="input", measure="norm")
    assert norms.dims == ("sample", "out_time", "in_time")
    assert norms.certificate.state == "passed", norms.certificate
    assert_close(norms.values, np.sqrt(case.norms))


NATIVE = [
    (2, {"skip": True, "lengths": LENGTHS, "initial": False}),
    pytest.param(3, {"skip": True}, marks=pytest.mark.full),
    (1, {"bias": False, "initial": True}),
    (2, {"peepholes": True, "norms": True}),
]


@pytest.mark.parametrize(("rank", "options"), NATIVE)
def test_cells_that_differ_in_a_detail_have_states_and_no_gates(rank, options):
    """With a skip connection, a forget bias that is no variable, or peephole weights per pixel, there are no gates."""
    case = ConvLSTMCase(rank, "dynamic", **options)
    trace = rl.trace(case.net, case.x)
    assert trace.certificate.state == "passed", trace.certificate
    layer, is_valid = trace[case.layer], np.arange(STEPS) < np.array(options.get("lengths", [STEPS] * 2))[:, None]
    assert "gates" not in layer
    assert layer.hidden.dims == ("sample", "time", "channel", *NAMES[rank])
    channel = "state_1_channel" if "skip" in options else "channel"
    assert layer.state_1.dims == ("sample", "time", channel, *NAMES[rank])
    truths = (("hidden", case.c), ("hidden_grad", case.c_grad), ("state_1", case.h), ("state_1_grad", case.h_grad))
    for name, truth in truths:
        assert_close(layer[name].values[is_valid], np.moveaxis(truth, -1, 2)[is_valid])
    grads = rl.gradients(case.net, case.x, wrt=["input", "weights"])
    assert_close(grads["model"]["input"].values, case.x_grad)
    for variable, truth in zip(("kernel", "biases"), case.weight_grads, strict=False):
        assert_close(grads[case.layer][variable].values, truth)
    weights = rl.weights(case.net, case.x)
    assert weights.certificate.state == "passed", weights.certificate
    if "norms" in options:
        norms = rl.jacobian(case.net, case.x, of=f"{case.layer}.state_1", wrt="input", measure="norm")
        assert_close(norms.values, np.sqrt(case.norms))


def test_the_layer_of_keras_with_the_same_weights_has_the_same_results(graph):
    """Keras' ConvLSTM2D, in a separate graph without eager mode, and the user's cell have equal results."""
    case = ConvLSTMCase(2, "dynamic")
    kernel, bias = case.values
    order = [columns for gate in (0, 2, 1, 3) for columns in range(gate * CHANNELS, (gate + 1) * CHANNELS)]
    bias = bias + np.repeat([0.0, 0.0, 1.0, 0.0], CHANNELS)
    with tf.Graph().as_default() as keras_graph, tf.Session(graph=keras_graph) as session:
        keras.backend.set_floatx("float64")
        tf.keras.backend.set_session(session)
        try:
            inputs = keras.Input(case.x.shape[1:])
            layer = keras.layers.ConvLSTM2D(
                CHANNELS, 3, padding="same", recurrent_activation="sigmoid", return_sequences=True, name="net/rnn"
            )
            model = keras.Model(inputs, layer(inputs))
            model.compile("sgd", "mse")
            values = kernel[..., :FEATURES, order], kernel[..., FEATURES:, order], bias[order]
            model.set_weights(values)
            y = np.random.default_rng(2).normal(size=(SAMPLES, STEPS, *SPACE[2], CHANNELS))
            keras_trace = rl.trace(model, case.x, y)
            keras_jacobian = rl.jacobian(model, case.x, of="net/rnn.hidden", wrt="input", measure="norm")
            keras_weights = rl.weights(model, case.x, y)
        finally:
            keras.backend.set_floatx("float32")
    assert (
        keras_trace.certificate.state == keras_jacobian.certificate.state == keras_weights.certificate.state == "passed"
    )
    target = tf.placeholder(tf.float64, y.shape)
    output = graph.get_tensor_by_name(case.net.outputs["y"].name)
    net = rl.tf1.graph(
        case.session,
        inputs={"x": case.net.inputs["x"]},
        outputs={"y": output},
        targets=target,
        loss=tf.reduce_mean(tf.square(output - target)),
    )
    trace = rl.trace(net, case.x, y)
    assert set(trace["net/rnn"]) == set(keras_trace["net/rnn"])
    for name, array in trace["net/rnn"].items():
        assert array.dims == keras_trace["net/rnn"][name].dims
        assert_close(array.values, keras_trace["net/rnn"][name].values)
    jacobian = rl.jacobian(net, case.x, of="net/rnn.hidden", wrt="input", measure="norm")
    assert_close(jacobian.values, keras_jacobian.values)
    weights = rl.weights(net, case.x, y)["net/rnn"]
    for name in ("kernel_grad", "recurrent_kernel_grad", "bias_grad"):
        assert weights[name].dims == keras_weights["net/rnn"][name].dims
        assert_close(weights[name].values, keras_weights["net/rnn"][name].values)


@pytest.mark.parametrize("options", [{"strides": 2, "padding": "same"}, {"go_backwards": True, "rank": 1}, {"rank": 3}])
def test_layers_of_keras_without_eager_execution(options):
    rank = options.pop("rank", 2)
    with tf.Graph().as_default() as keras_graph, tf.Session(graph=keras_graph) as session:
        keras.backend.set_floatx("float64")
        tf.keras.backend.set_session(session)
        try:
            inputs = keras.Input((STEPS, *SPACE[rank], FEATURES))
            layer_class = getattr(keras.layers, f"ConvLSTM{rank}D")
            hidden = layer_class(CHANNELS, 2, name="conv", return_sequences=True, **options)(inputs)
            model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(hidden)))
            x, y = make_data(rank), np.random.default_rng(2).normal(size=(SAMPLES, 1))
            # Before any run: under control flow v2, a loop that is already in a session has no gradients.
            dx = tf.gradients(tf.reduce_mean(tf.square(model.output - y)), model.inputs[0])[0]
            model.compile("sgd", "mse")
            model.get_weights()
            trace = rl.trace(model, x, y)
            weights = rl.weights(model, x, y)
            input_grad = rl.gradients(model, x, y, wrt="input")
            truth = session.run(dx, {model.inputs[0]: x})
        finally:
            keras.backend.set_floatx("float32")
    assert trace.certificate.state == weights.certificate.state == input_grad.certificate.state == "passed"
    assert trace["conv"].gates.dims == ("sample", "time", *NAMES[rank], "gate", "channel")
    assert_close(input_grad.values, truth)


def test_steps_that_a_condition_skips_are_refused_by_name():
    x, counts = tf.placeholder(tf.float64, [None, STEPS, *SPACE[2], FEATURES]), tf.placeholder(tf.int32, [None])
    with tf.variable_scope("net"):
        steps = tf.unstack(x, axis=1)
        outputs, _ = tf.nn.static_rnn(cell_of(2), steps, dtype=tf.float64, sequence_length=counts)
    y, session = tf.stack(outputs, 1), tf.Session()
    session.run(tf.global_variables_initializer())
    net = rl.tf1.graph(session, inputs={"x": x}, outputs={"y": y}, loss=tf.reduce_sum(y), feed={counts: LENGTHS})
    with pytest.raises(rl.errors.UnsupportedError, match=r"(?s)passed by under a condition.*dynamic_rnn"):
        rl.trace(net, make_data(2))


UNROLLED = pytest.mark.parametrize(("loop", "options"), [("static", {"skip": True}), ("python", {"peepholes": True})])
NAMES_OF_UNROLLED = {"static": "net/rnn/conv_lstm_cell", "python": "net/conv_lstm_cell"}


@UNROLLED
def test_unrolled_cells_that_differ_in_a_detail_are_refused_by_name_and_the_error_names_dynamic_rnn(loop, options):
    case, name = ConvLSTMCase(1, loop, **options), NAMES_OF_UNROLLED[loop]
    with pytest.raises(rl.errors.UnsupportedError, match=rf"(?s)'{name}'.*static_rnn or Python loop.*dynamic_rnn"):
        rl.trace(case.net, case.x)
    assert_close(rl.gradients(case.net, case.x, wrt="input").values, case.x_grad)


@UNROLLED
def test_beside_another_recurrence_they_are_listed_and_left_out_by_name(loop, options):
    """Beside a GRU, unrolled unknown cells are left out, and the list of layers and the trace's notes name them."""
    x, name = tf.placeholder(tf.float64, [SAMPLES, STEPS, *SPACE[1], FEATURES]), NAMES_OF_UNROLLED[loop]
    with tf.variable_scope("net"):
        outputs, _ = LOOPS[loop](cell_of(1, **options), x, None, None)
        above, _ = tf.nn.dynamic_rnn(rnn_cell.GRUCell(3), tf.reduce_mean(outputs, 2), dtype=x.dtype, scope="above")
    session, loss = tf.Session(), tf.reduce_sum(above)
    gradients = tf.gradients(loss, [x, *tf.trainable_variables()[:2]])  # before the loop is run
    session.run(tf.global_variables_initializer())
    net = rl.tf1.graph(session, inputs={"x": x}, outputs={"y": above}, loss=loss)
    assert {row.name: row.options.get("left out") for row in rl.layers(net)} == {
        "net/above": None,
        name: f"The steps of '{name}' are unrolled, and their equations are unknown.",
    }
    trace = rl.trace(net, make_data(1))
    assert (list(trace), trace.certificate.state) == (["net/above"], "passed")
    assert f"Left out: The steps of '{name}' are unrolled, and their equations are unknown." in trace.notes
    with pytest.raises(rl.errors.UnsupportedError, match=rf"(?s)'{name}'.*dynamic_rnn"):
        rl.trace(net, make_data(1), layers=[name])
    grads = rl.gradients(net, make_data(1), wrt=["input", "weights"])
    truth = session.run(gradients, {x: make_data(1)})
    for array, expected in zip((grads["model"]["input"], *grads[name].values()), truth, strict=False):
        assert_close(array.values, expected)
