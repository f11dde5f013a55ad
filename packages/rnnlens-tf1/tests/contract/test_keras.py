"""tf_keras models without eager mode: gradients equal complex-step derivatives in NumPy; models stay unchanged."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_keras as keras
from tf_keras import layers

import rnnlens as rl

#: Keras warns of it at every predict and evaluate in a graph.
pytestmark = pytest.mark.filterwarnings("ignore:`Model.state_updates`:UserWarning")

STEP = 1e-30
X = np.random.default_rng(0).normal(size=(3, 6, 4))


@pytest.fixture(autouse=True)
def float64(graph):
    """Set Keras to float64, and provide the session of the test's graph."""
    keras.backend.set_floatx("float64")
    session = tf.Session(graph=graph)
    tf.keras.backend.set_session(session)
    yield session
    keras.backend.set_floatx("float32")
    session.close()


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def build_model(rnn_layer, steps=6, features=4, loss="mse", outputs=2):
    """Return a compiled functional model whose variables have random values."""
    inputs = keras.Input((steps, features))
    model = keras.Model(inputs, layers.Dense(outputs, name="head")(rnn_layer(inputs)))
    model.compile("sgd", loss)
    random = np.random.default_rng(7)
    model.set_weights([0.5 * random.normal(size=w.shape) for w in model.get_weights()])
    return model


def rnn_states(w, x, bump=None):
    """Return the states (sample, step, unit) of a SimpleRNN; ``bump`` (step to array) is added to them."""
    h, states = np.zeros((len(x), w[1].shape[0]), x.dtype), []
    for t in range(x.shape[1]):
        h = np.tanh(x[:, t] @ w[0] + h @ w[1] + w[2])
        h = h if bump is None else h + bump.get(t, 0)
        states.append(h)
    return np.stack(states, 1)


def gru_states(w, x, bump=None, reset_after=True):
    """Return the states (sample, step, unit) of a GRU with Keras 2's gates: update, reset, candidate."""
    n, states = w[1].shape[0], []
    h = np.zeros((len(x), n), x.dtype)
    inner = w[2][0] if reset_after else w[2]
    for t in range(x.shape[1]):
        a = x[:, t] @ w[0] + inner
        if reset_after:
            b = h @ w[1] + w[2][1]
            z, r = sigmoid(a[:, :n] + b[:, :n]), sigmoid(a[:, n : 2 * n] + b[:, n : 2 * n])
            c = np.tanh(a[:, 2 * n :] + r * b[:, 2 * n :])
        else:
            z, r = (sigmoid(a[:, i * n : (i + 1) * n] + h @ w[1][:, i * n : (i + 1) * n]) for i in (0, 1))
            c = np.tanh(a[:, 2 * n :] + (r * h) @ w[1][:, 2 * n :])
        h = z * h + (1 - z) * c
        h = h if bump is None else h + bump.get(t, 0)
        states.append(h)
    return np.stack(states, 1)


def lstm_states(w, x, bump=None):
    """Return the states h (sample, step, unit) of an LSTM."""
    n, states = w[1].shape[0], []
    h = c = np.zeros((len(x), n), x.dtype)
    for t in range(x.shape[1]):
        i, f, g, o = np.split(x[:, t] @ w[0] + h @ w[1] + w[2], 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        h = h if bump is None else h + bump.get(t, 0)
        states.append(h)
    return np.stack(states, 1)


KINDS = {
    "rnn": (layers.SimpleRNN, rnn_states, {}),
    "gru": (layers.GRU, gru_states, {}),
    "gru, reset before": (layers.GRU, lambda *a: gru_states(*a, reset_after=False), {"reset_after": False}),
    "lstm": (layers.LSTM, lstm_states, {}),
}


def total_gradients(step, w, head, x, y, units, last):
    """Return dL/dh_t (sample, step, unit) of the mean squared error, by a complex step in each unit of each step."""
    grads = np.zeros((*x.shape[:2], units))
    for t in range(x.shape[1]):
        for k in range(units):
            bump = np.zeros((len(x), units), complex)
            bump[:, k] = 1j * STEP
            h = step(w, x.astype(complex), {t: bump})
            out = (h[:, -1] if last else h) @ head[0] + head[1]
            sample_losses = ((out - y) ** 2).reshape(len(x), -1).sum(1) / y.size
            grads[:, t, k] = sample_losses.imag / STEP
    return grads


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("recurrent", ["hard_sigmoid", None])
def test_a_cell_is_known_by_any_activation(recurrent, reset_after):
    layer = layers.GRU(
        5, activation="hard_sigmoid", recurrent_activation=recurrent, reset_after=reset_after, return_sequences=True
    )
    model = build_model(layer)
    trace = rl.trace(model, X, np.random.default_rng(1).normal(size=(3, 6, 2)))
    assert [row.cell for row in rl.layers(model)] == ["gru"]
    assert trace.certificate.state == "passed"
    kernel, bias = model.get_weights()[-2:]
    np.testing.assert_allclose(trace["gru"].hidden.values @ kernel + bias, model.predict(X), atol=1e-12)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_total_gradient_of_every_state(kind, last):
    layer, step, options = KINDS[kind]
    model = build_model(layer(5, return_sequences=not last, name="r", **options))
    y = np.random.default_rng(1).normal(size=(3, 2) if last else (3, 6, 2))
    trace = rl.trace(model, X, y)
    *w, kernel, bias = model.get_weights()
    truth = total_gradients(step, w, (kernel, bias), X, y, 5, last)
    np.testing.assert_allclose(trace["r"].hidden_grad.values, truth, atol=1e-13)
    assert trace["r"].output_grad.dims == (("sample", "unit") if last else ("sample", "time", "unit"))
    assert trace.certificate.state == "passed"
    assert trace.loss == pytest.approx(model.evaluate(X, y, verbose=0), rel=1e-12)


def test_two_directions_and_one_layer_above():
    """Gradients of a bidirectional GRU below a GRU (as in quick starts) equal each direction's complex step."""
    inputs = keras.Input((6, 4))
    bidirectional = layers.Bidirectional(layers.GRU(3, return_sequences=True), name="bi")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.GRU(2, name="top")(bidirectional)))
    model.compile("adam", "mse")
    w = model.get_weights()
    y = np.random.default_rng(1).normal(size=(3, 2))
    trace = rl.trace(model, X, y)

    def loss(bump, direction):
        forward = gru_states(w[0:3], X.astype(complex), bump if direction == "forward" else None)
        backward = {5 - t: b for t, b in bump.items()} if direction == "backward" else None
        backward = gru_states(w[3:6], X[:, ::-1].astype(complex), backward)[:, ::-1]
        out = gru_states(w[6:9], np.concatenate([forward, backward], 2))[:, -1] @ w[9] + w[10]
        return ((out - y) ** 2).sum(1) / y.size

    for direction in ("forward", "backward"):
        for t, unit in ((0, 0), (2, 1), (5, 2)):
            bump = np.zeros((3, 3), complex)
            bump[:, unit] = 1j * STEP
            truth = loss({t: bump}, direction).imag / STEP
            actual = trace["bi"].hidden_grad.sel(direction=direction, unit=unit).isel(time=t)
            np.testing.assert_allclose(actual, truth, atol=1e-14)
    assert [info.direction for info in rl.layers(model)] == ["bidirectional", "forward"]


def test_stateful_with_an_embedding_that_is_frozen():
    """A Jacobian by embeddings starts from the recorded state and keeps it; gradients by integer ids are refused."""
    ids = keras.Input(batch_shape=(3, 6), dtype="int32")
    embedded = layers.Embedding(9, 4, trainable=False, name="embedding")(ids)
    hidden = layers.SimpleRNN(5, stateful=True, return_sequences=True, name="r")(embedded)
    model = keras.Model(ids, hidden)
    data = np.random.default_rng(2).integers(0, 9, (3, 6))
    before = model.predict(data, batch_size=3)[:, -1]
    table, *w = model.get_weights()
    J = rl.jacobian(model, data, of="r.output", wrt="embedding.output")
    z, h = table[data], before
    truth = np.zeros((3, 6, 5, 6, 4))
    partial = np.zeros((3, 5, 6, 4))
    for t in range(6):
        new = np.tanh(z[:, t] @ w[0] + h @ w[1] + w[2])
        slope = (1 - new**2)[:, :, None, None]
        partial = slope * np.einsum("nhsf,hk->nksf", partial, w[1])
        partial[:, :, t] += slope[..., 0] * w[0].T[None]
        truth[:, t], h = partial, new
    np.testing.assert_allclose(J.values, truth, atol=1e-13)
    with pytest.raises(rl.errors.DisconnectedError, match="integer_input"):
        rl.gradients(model, data, of="r.output", reduce="mean", wrt="input")
    continued = model.predict(data, batch_size=3)  # continues from the state after predict, not after rnnlens
    np.testing.assert_allclose(continued[:, 0], np.tanh(z[:, 0] @ w[0] + before @ w[1] + w[2]), atol=1e-12)


def test_masked_steps_pass_the_state_on():
    inputs = keras.Input((6, 4))
    rnn_input = layers.Masking()(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.GRU(3, name="r")(rnn_input)))
    model.compile("sgd", "mse")
    *w, kernel, bias = model.get_weights()
    x = X.copy()
    x[0, 4:] = x[1, 2:] = 0
    y = np.random.default_rng(1).normal(size=(3, 2))
    trace = rl.trace(model, x, y)
    assert trace["r"].mask.values.sum(1).tolist() == [4, 2, 6]
    last_states = np.stack([gru_states(w, x[n : n + 1, :length])[0, -1] for n, length in enumerate((4, 2, 6))])
    np.testing.assert_allclose(trace["r"].hidden[:, -1], last_states, atol=1e-13)
    direct = 2 * (last_states @ kernel + bias - y) / y.size @ kernel.T
    np.testing.assert_allclose(trace["r"].output_grad, direct, atol=1e-13)
    assert trace.certificate.state == "passed"


def test_a_penalty_on_the_kernel_is_no_part_of_what_came_through_time():
    model = build_model(layers.LSTM(3, kernel_regularizer="l2", name="r"))
    y = np.random.default_rng(1).normal(size=(3, 2))
    trace = rl.trace(model, X, y)
    assert trace.certificate.state == "passed"
    kernel = model.get_weights()[0]
    penalised_grad = rl.gradients(model, X, y, wrt="r/kernel")
    unpenalised_model = build_model(layers.LSTM(3, name="r"))
    unpenalised_model.set_weights(model.get_weights())
    unpenalised_grad = rl.gradients(unpenalised_model, X, y, wrt="r/kernel")
    np.testing.assert_allclose(
        (penalised_grad - unpenalised_grad).values.reshape(kernel.shape), 0.02 * kernel, atol=1e-14
    )


def test_a_loss_that_was_not_compiled_and_weights_of_samples():
    model = build_model(layers.SimpleRNN(3, name="r"))
    y = np.random.default_rng(1).normal(size=(3, 2))
    weight = np.array([1.0, 0.0, 3.0])
    weighted_trace = rl.trace(model, X, y, sample_weight=weight)
    out = model.predict(X)
    assert weighted_trace.loss == pytest.approx((((out - y) ** 2).mean(1) * weight).mean())
    assert not weighted_trace["r"].hidden_grad[1].values.any()
    mae_trace = rl.trace(model, X, y, loss="mae")
    assert mae_trace.loss == pytest.approx(np.abs(out - y).mean())
    assert mae_trace.certificate.state == "passed"


@pytest.mark.parametrize(
    ("losses", "scales"),
    [
        ({"a": "mse", "b": "mse"}, {"a": 0.5, "b": 3.0}),
        (["mse", "mse"], [0.5, 3.0]),
        ("mse", None),
        ({"b": "mse"}, {"b": 2.0}),
    ],
    ids=["by name", "in order", "one for both", "of one alone"],
)
def test_samples_are_weighed_and_so_are_outputs(losses, scales):
    inputs = keras.Input((6, 4))
    hidden = layers.SimpleRNN(5, name="r")(inputs)
    model = keras.Model(inputs, [layers.Dense(2, name="a")(hidden), layers.Dense(1, name="b")(hidden)])
    model.compile("sgd", losses, loss_weights=scales)
    w, random = model.get_weights(), np.random.default_rng(1)
    factor = {"a": 0.5, "b": 3.0} if scales in ({"a": 0.5, "b": 3.0}, [0.5, 3.0]) else scales or {"a": 1.0, "b": 1.0}
    y = {name: random.normal(size=(3, 2 if name == "a" else 1)) for name in factor}
    weight = {name: random.uniform(size=3) for name in factor}
    heads = {"a": w[3:5], "b": w[5:7]}
    trace = rl.trace(model, X, list(y.values()), sample_weight=list(weight.values()))

    def loss(bump):
        h = rnn_states(w, X.astype(complex), bump)[:, -1]
        output_losses = {name: ((h @ heads[name][0] + heads[name][1] - y[name]) ** 2).mean(1) for name in y}
        return sum(factor[name] * weight[name] * output_losses[name] for name in y) / 3

    assert trace.loss == pytest.approx(loss(None).real.sum(), rel=1e-12)
    for t, unit in ((0, 1), (5, 4)):
        bump = np.zeros((3, 5), complex)
        bump[:, unit] = 1j * STEP
        np.testing.assert_allclose(trace["r"].hidden_grad[:, t, unit], loss({t: bump}).imag / STEP, atol=1e-14)
    assert trace.certificate.state == "passed"


def test_outputs_weighed_by_tensors_are_refused_where_samples_are_weighed():
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, layers.Dense(2)(layers.SimpleRNN(5)(inputs)))
    model.compile("sgd", "mse", loss_weights=[keras.backend.variable(2.0)])
    model.get_weights()
    y = np.random.default_rng(1).normal(size=(3, 2))
    with pytest.raises(rl.errors.UnsupportedError, match="loss_weights"):
        rl.trace(model, X, y, sample_weight=np.ones(3))


def test_dropout_acts_in_training_and_is_drawn_by_seed():
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, layers.Dropout(0.5)(layers.SimpleRNN(3, return_sequences=True, name="r")(inputs)))
    model.compile("sgd", "mse")
    model.predict(X)
    y = np.zeros((3, 6, 3))
    without_dropout = rl.trace(model, X, y)["r"].output_grad
    first, same_seed = (rl.trace(model, X, y, training=True, seed=1)["r"].output_grad for _ in range(2))
    other_seed = rl.trace(model, X, y, training=True, seed=2)["r"].output_grad
    np.testing.assert_array_equal(first, same_seed)
    assert not np.allclose(first, other_seed)
    assert without_dropout.values.all()
    assert not first.values.all()


def test_nothing_is_added_and_no_value_moves(graph):
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, layers.Dense(2)(layers.LSTM(3, name="r")(inputs)))
    model.compile("adam", "mse")
    y = np.random.default_rng(1).normal(size=(3, 2))
    model.train_on_batch(X, y)
    before, version = model.get_weights(), graph.version
    rl.trace(model, X, y)
    rl.gradients(model, X, y, wrt="weights")
    rl.weights(model, X, y)
    assert graph.version == version
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_model_without_values_says_how_to_get_them():
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, layers.GRU(3)(inputs))
    with pytest.raises(rl.errors.ModelError, match="no value in this session"):
        rl.trace(model, X)


class Minimal(layers.Layer):
    """Custom cell with h' = W x + U sin(h)."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = self.state_size = self.output_size = units

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], self.units))
        self.recurrent = self.add_weight(name="recurrent", shape=(self.units, self.units))
        self.built = True

    def call(self, x, states):
        h = tf.matmul(x, self.kernel) + tf.matmul(tf.sin(states[0]), self.recurrent)
        return h, [h]


def test_a_cell_of_ones_own_in_a_subclass_after_fit():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rnn = layers.RNN(Minimal(5), return_sequences=True, name="mine")
            self.head = layers.Dense(2)

        def call(self, x):
            return self.head(self.rnn(x))

    model, y = Model(), np.random.default_rng(1).normal(size=(3, 6, 2))
    model.compile("sgd", "mse")
    model.fit(X, y, verbose=0)
    trace = rl.trace(model, X, y)
    by_name = {v.name.split(":")[0].rpartition("/")[2]: i for i, v in enumerate(model.weights)}
    w = model.get_weights()
    kernel, recurrent = w[by_name["recurrent"] - 1], w[by_name["recurrent"]]
    head = w[-2:]

    def step(_, x, bump):
        h, states = np.zeros((3, 5), complex), []
        for t in range(6):
            h = x[:, t] @ kernel + np.sin(h) @ recurrent + bump.get(t, 0)
            states.append(h)
        return np.stack(states, 1)

    truth = total_gradients(step, None, head, X, y, 5, last=False)
    np.testing.assert_allclose(trace["mine"].hidden_grad.values, truth, atol=1e-13)


def test_steps_in_the_graph_below_a_loop():
    """Unrolled layers and loops are processed in the order in which they feed each other, with exact Jacobians."""
    inputs = keras.Input((6, 4))
    below = layers.SimpleRNN(3, return_sequences=True, unroll=True, name="below")(inputs)
    above = layers.SimpleRNN(2, return_sequences=True, name="above")(below)
    model = keras.Model(inputs, layers.SimpleRNN(2, unroll=True, name="last")(above))
    w = model.get_weights()
    assert list(rl.trace(model, X)) == ["below", "above", "last"]

    def last_state(x):
        return rnn_states(w[6:9], rnn_states(w[3:6], rnn_states(w[0:3], x)))[:, -1]

    truth = np.zeros((3, 2, 6, 4))
    for t in range(6):
        for k in range(4):
            perturbed = X.astype(complex)
            perturbed[:, t, k] += 1j * STEP
            truth[:, :, t, k] = last_state(perturbed).imag / STEP
    jacobian = rl.jacobian(model, X)
    assert jacobian.certificate.state == "passed"
    np.testing.assert_allclose(jacobian, truth, atol=1e-14)


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_direct_gradient_of_steps_in_the_graph_is_that_of_a_loop(sequences, backwards):
    options = {"return_sequences": sequences, "go_backwards": backwards, "name": "r"}
    unrolled_model, loop_model = (build_model(layers.LSTM(3, unroll=unroll, **options)) for unroll in (True, False))
    y = np.random.default_rng(1).normal(size=(3, 6, 2) if sequences else (3, 2))
    unrolled, looped = rl.trace(unrolled_model, X, y)["r"], rl.trace(loop_model, X, y)["r"]
    assert abs(looped.output_grad).max() > 0
    for name in ("output_grad", "hidden_grad", "cell_grad"):
        np.testing.assert_allclose(getattr(unrolled, name), getattr(looped, name), atol=1e-14, err_msg=name)


def test_layers_of_one_name_are_refused():
    class Twins(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = layers.GRU(3, return_sequences=True, name="rnn"), layers.LSTM(3, name="rnn")

        def call(self, x):
            return self.two(self.one(x))

    model = Twins()
    model.compile("sgd", "mse")
    model.train_on_batch(X, np.zeros((3, 3)))
    with pytest.raises(rl.errors.ModelError, match="Two different layers are called 'rnn'"):
        rl.trace(model, X, np.zeros((3, 3)))


def test_a_cell_in_a_layer_is_named_by_what_it_is():
    """An ``RNN`` layer with an LSTMCell is an LSTM: its states and gates have the labels of the cell."""
    layer = layers.RNN(layers.LSTMCell(3, dropout=0.3), return_sequences=True, name="r")
    model = build_model(layer)
    assert [(row.name, row.cell) for row in rl.layers(model)] == [("r", "lstm")]
    trace = rl.trace(model, X, np.zeros((3, 6, 2)))
    assert trace.certificate.state == "passed"
    assert list(trace["r"].gates.gate.values) == ["input", "forget", "candidate", "output"]
    weights = tf.keras.backend.get_session().run(layer.cell.weights)
    np.testing.assert_allclose(trace["r"].hidden, lstm_states(weights, X), atol=1e-13)


def stacked_states(w, x, bump):
    """Return the pair of states per step of a GRU and an Elman network above it; ``bump`` by (step, state number)."""
    first, second, states = np.zeros((len(x), 3), complex), np.zeros((len(x), 2), complex), []
    for t in range(x.shape[1]):
        first = _gru_step(w[:3], x[:, t], first) + bump.get((t, 0), 0)
        second = np.tanh(first @ w[3] + second @ w[4] + w[5]) + bump.get((t, 1), 0)
        states.append((first, second))
    return states


def _gru_step(w, x, h):
    n, a, b = h.shape[1], x @ w[0] + w[2][0], h @ w[1] + w[2][1]
    z, r = sigmoid(a[:, :n] + b[:, :n]), sigmoid(a[:, n : 2 * n] + b[:, n : 2 * n])
    return z * h + (1 - z) * np.tanh(a[:, 2 * n :] + r * b[:, 2 * n :])


def test_stacked_cells_are_one_recurrence():
    """As in eager mode, stacked cells are one layer with the states of all its cells and the layer's input."""
    cells = [layers.GRUCell(3), layers.SimpleRNNCell(2)]
    model = build_model(layers.RNN(cells, return_sequences=True, name="r"))
    y = np.random.default_rng(1).normal(size=(3, 6, 2))
    trace = rl.trace(model, X, y)
    assert trace.certificate.state == "passed"
    np.testing.assert_array_equal(trace["r"].input, X)
    *w, kernel, bias = model.get_weights()

    def loss(bump):
        out = np.stack([second for _, second in stacked_states(w, X.astype(complex), bump)], 1) @ kernel + bias
        return ((out - y) ** 2).reshape(3, -1).sum(1) / y.size

    for state, (name, units) in enumerate((("hidden", 3), ("state_1", 2))):
        truth = np.zeros((3, 6, units))
        for t in range(6):
            for k in range(units):
                bump = np.zeros((3, units), complex)
                bump[:, k] = 1j * STEP
                truth[:, t, k] = loss({(t, state): bump}).imag / STEP
        np.testing.assert_allclose(trace["r"][f"{name}_grad"], truth, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("rate", ["dropout", "recurrent_dropout"])
def test_stacked_cells_that_drop_states_are_refused_by_name(rate):
    model = build_model(layers.RNN([layers.LSTMCell(3), layers.GRUCell(2, **{rate: 0.3})], name="r"))
    with pytest.raises(rl.errors.UnsupportedError, match="Layer 'r' cannot be traced: its states are dropped"):
        rl.trace(model, X, np.zeros((3, 2)))


def test_stacked_cells_that_are_unrolled_are_refused_by_name():
    model = build_model(layers.RNN([layers.LSTMCell(3), layers.SimpleRNNCell(2)], unroll=True, name="r"))
    with pytest.raises(rl.errors.UnsupportedError, match="Layer 'r' cannot be traced: it stacks cells"):
        rl.trace(model, X, np.zeros((3, 2)))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.full), 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_dropped_in_training_are_seen_outside_of_it(kind, dropout):
    layer, step, options = KINDS[kind]
    rates = {"recurrent_dropout": 0.3, "dropout": dropout}
    model = build_model(layer(5, return_sequences=True, name="r", **rates, **options))
    y = np.random.default_rng(1).normal(size=(3, 6, 2))
    trace = rl.trace(model, X, y)
    *w, kernel, bias = model.get_weights()
    truth = total_gradients(step, w, (kernel, bias), X, y, 5, last=False)
    np.testing.assert_allclose(trace["r"].hidden_grad.values, truth, atol=1e-13)
    assert trace.certificate.state == "passed"
    with pytest.raises(rl.errors.UnsupportedError, match="cannot be looked into in training: its states are dropped"):
        rl.trace(model, X, y, training=True)


@pytest.mark.parametrize("training", [False, True])
def test_states_that_are_dropped_in_unrolled_steps_are_refused(training):
    """Unrolled recurrent dropout is refused, even outside of training: only loops show what is computed there."""
    model = build_model(layers.LSTM(3, recurrent_dropout=0.3, unroll=True, name="r"))
    with pytest.raises(rl.errors.UnsupportedError, match="Layer 'r' cannot be traced: its states are dropped"):
        rl.trace(model, X, np.zeros((3, 2)), training=training)


class Spare(keras.Model):
    """Model with two recurrent layers that are never called, and a third whose output is not used."""

    def __init__(self):
        super().__init__()
        self.one = layers.LSTM(5, name="one")
        self.never, self.both = layers.GRU(3, name="never"), layers.Bidirectional(layers.LSTM(3), name="both")
        self.unused, self.head = layers.GRU(3, name="unused", unroll=True), layers.Dense(2, name="head")

    def call(self, x):
        self.unused(x)
        return self.head(self.one(x))


def test_a_layer_that_nobody_calls_is_left_out_by_name():
    model, y = Spare(), np.random.default_rng(1).normal(size=(3, 2))
    model.compile("sgd", "mse")
    model.test_on_batch(X, y)
    trace = rl.trace(model, X, y)
    assert list(trace) == ["one"]
    assert trace.certificate.state == "passed"
    assert trace.notes == ["Left out, since outputs and loss do not depend on it: never, both, unused."]
    by_name = {v.name.removesuffix(":0").partition("/")[2]: model.get_weights()[i] for i, v in enumerate(model.weights)}
    w = [by_name[f"one/lstm_cell/{key}"] for key in ("kernel", "recurrent_kernel", "bias")]
    truth = total_gradients(lstm_states, w, [by_name["head/kernel"], by_name["head/bias"]], X, y, 5, last=True)
    np.testing.assert_allclose(trace["one"].hidden_grad, truth, atol=1e-13)
    assert {row.name for row in rl.layers(model)} == {"one", "never", "both", "unused"}
    with pytest.raises(rl.errors.LayerNotFoundError, match="never"):
        rl.trace(model, X, y, layers="never")


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_loss_on_the_returned_state_alone(kind, sequences):
    """The gradient arrives at the returned state only; the layer's output has none."""
    layer, step, _ = KINDS[kind]
    rnn_layer = layer(5, return_sequences=sequences, return_state=True, name="r")
    model = build_model(lambda inputs: rnn_layer(inputs)[1])
    y = np.random.default_rng(1).normal(size=(3, 2))
    trace = rl.trace(model, X, y)
    *w, kernel, bias = model.get_weights()
    states = step(w, X)
    direct = 2 * (states[:, -1] @ kernel + bias - y) / y.size @ kernel.T
    final = trace["r"].final_state_grad
    np.testing.assert_allclose(final.isel(state=0) if "state" in final.dims else final, direct, atol=1e-14)
    np.testing.assert_allclose(trace["r"].output, states if sequences else states[:, -1], atol=1e-13)
    assert trace["r"].output_grad.dims == (("sample", "time", "unit") if sequences else ("sample", "unit"))
    assert not trace["r"].output_grad.values.any()
    np.testing.assert_allclose(
        trace["r"].hidden_grad, total_gradients(step, w, (kernel, bias), X, y, 5, last=True), atol=1e-13
    )
    assert trace.certificate.state == "passed"


def fourth_power(y, out):
    """Return a custom loss: the mean fourth power of the error."""
    return tf.reduce_mean((y - out) ** 4, axis=-1)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_loss_of_ones_own_and_one_that_the_model_adds(compiled):
    inputs = keras.Input((6, 4))
    hidden = layers.GRU(3, return_sequences=True, name="r")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    model.add_loss(0.3 * tf.reduce_mean(hidden**2))
    model.compile("sgd", fourth_power if compiled else None)
    *w, kernel, bias = model.get_weights()
    y = np.random.default_rng(1).normal(size=(3, 6, 2))
    trace = rl.trace(model, X, y if compiled else None)
    assert trace.certificate.state == "passed"

    def loss(bump):
        h = gru_states(w, X.astype(complex), bump)
        penalty = 0.3 * (h**2).sum((1, 2)) / h.size
        return penalty + (compiled and ((y - h @ kernel - bias) ** 4).sum((1, 2)) / y.size)

    assert trace.loss == pytest.approx(loss({}).real.sum(), rel=1e-12)
    for t in range(6):
        for k in range(3):
            bump = np.zeros((3, 3), complex)
            bump[:, k] = 1j * STEP
            truth = loss({t: bump}).imag / STEP
            np.testing.assert_allclose(trace["r"].hidden_grad[:, t, k], truth, atol=1e-14)


@pytest.mark.full
def test_dropout_in_a_stack_of_two_directions_changes_nothing_outside_of_training():
    """Outside of training, a bidirectional stack with dropout has the names, order and values of one without."""

    def stack(rate):
        def build_layers(x):
            x = layers.Bidirectional(layers.LSTM(3, return_sequences=True, dropout=rate), name="one")(x)
            return layers.Bidirectional(layers.GRU(2, dropout=rate), name="two")(layers.Dropout(rate)(x))

        return build_model(build_layers)

    y = np.random.default_rng(1).normal(size=(3, 2))
    with_dropout, without_dropout = (rl.trace(stack(rate), X, y) for rate in (0.3, 0.0))
    assert with_dropout.certificate.state == without_dropout.certificate.state == "passed"
    assert list(with_dropout) == list(without_dropout) == ["one", "two"]
    for name in without_dropout:
        assert set(with_dropout[name]) == set(without_dropout[name])
        for quantity in without_dropout[name]:
            np.testing.assert_allclose(
                with_dropout[name][quantity], without_dropout[name][quantity], atol=1e-14, err_msg=quantity
            )
