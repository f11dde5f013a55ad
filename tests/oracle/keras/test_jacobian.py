"""The time Jacobian of Keras models against the framework's own, in float64."""

import itertools
import tracemalloc

import keras
import numpy as np
import pytest
from keras import layers
from keras_plain import jacobian as framework_jacobian

import rnnlens as rl

pytestmark = pytest.mark.usefixtures("float64", "uncertified")

B, T, F, H = 2, 4, 2, 2
CELLS = {
    "lstm": (layers.LSTM, {}),
    "gru": (layers.GRU, {}),
    "gru_before": (layers.GRU, {"reset_after": False}),
    "simple_rnn": (layers.SimpleRNN, {}),
}


def make_data(masked=False):
    x = np.random.default_rng(0).normal(size=(B, T, F))
    if masked:
        x[0, [0, 2]] = 0
        x[1, 3] = 0
    return x


def perturb_weights(model):
    """Add random numbers to all weights of a model, so that biases and both directions affect the result."""
    rng = np.random.default_rng(2)
    model.set_weights([w + 0.5 * rng.normal(size=w.shape) for w in model.get_weights()])
    return model


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert np.isfinite(actual.values).all()
    assert np.abs(expected).max() > 1e-3
    assert np.abs(actual.values - expected).max() <= 1e-10 * np.abs(expected).max()


def branch_output(x, h, cell, direction, bias, stateful_start, sequences):
    """Return the output of one recurrent layer with one combination of options."""
    cls, options = CELLS[cell]
    name = f"{direction}_{'bias' if bias else 'nobias'}_{'given' if stateful_start else 'zeros'}"
    layer = cls(H, return_sequences=sequences, use_bias=bias, name=name, **options)
    if direction == "backward":
        layer = cls(H, return_sequences=sequences, use_bias=bias, name=name, go_backwards=True, **options)
    if direction == "both":
        layer = layers.Bidirectional(cls(H, return_sequences=sequences, use_bias=bias, **options), name=name)
    if not stateful_start:
        return layer(h)
    step_input = x[:, 1]
    count = (2 if direction == "both" else 1) * (2 if cell == "lstm" else 1)
    state = [layers.Dense(H, name=f"{name}_start{i}")(step_input) for i in range(count)]
    return layer(h, initial_state=state)


@pytest.mark.product
@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("cell", CELLS)
def test_every_combination_of_options_at_once(cell, masked, sequences):
    x = make_data(masked)
    inputs = keras.Input((T, F))
    h = layers.Masking()(inputs) if masked else inputs
    product = itertools.product(("forward", "backward", "both"), (True, False), (False, True))
    outputs = [branch_output(inputs, h, cell, *options, sequences) for options in product]
    model = perturb_weights(keras.Model(inputs, layers.Concatenate()(outputs)))
    # Three random mixtures of all units depend on each unit and take less time to differentiate.
    mixture = np.random.default_rng(3).normal(size=(3, model.output_shape[-1]))
    columns = keras.ops.convert_to_tensor(mixture.T)
    expected = framework_jacobian(lambda a: keras.ops.matmul(model(a), columns), x)
    assert_close(rl.jacobian(model, x, reduce=mixture), expected)


def make_rnn(cell, **options):
    cls, extra = CELLS[cell]
    return cls(H, name="rnn", **extra, **options)


def sequential(*stack):
    return perturb_weights(keras.Sequential([keras.Input((T, F)), *stack]))


@pytest.mark.product
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_states_of_a_layer_by_what_feeds_it_and_by_an_earlier_layer(cell):
    below = layers.LSTM(3, return_sequences=True, name="below")
    model = sequential(below, make_rnn(cell, return_sequences=True), layers.Dense(2))
    x = make_data()
    expected = framework_jacobian(lambda a: model.layers[1](model.layers[0](a)), x)
    assert_close(rl.jacobian(model, x, of="rnn.hidden"), expected)
    assert_close(rl.jacobian(model, x, of="rnn.output"), expected)
    assert_close(rl.jacobian(model, x, of="rnn.final_hidden"), expected[:, -1])
    y = keras.ops.convert_to_numpy(below(x))
    for wrt in ("below.output", "rnn.input"):  # two names of one tensor
        assert_close(rl.jacobian(model, x, of="rnn.hidden", wrt=wrt), framework_jacobian(model.layers[1], y))
    # The Jacobian with respect to a state includes the paths through later steps of the layer below.
    hidden = rl.jacobian(model, x, of="below.hidden", wrt="below.hidden").values
    direct = rl.jacobian(model, x, of="rnn.hidden", wrt="below.output").values
    total = np.einsum("btoku,bkuls->btols", direct, hidden)
    assert_close(rl.jacobian(model, x, of="rnn.hidden", wrt="below.hidden"), total)


@pytest.mark.one_engine
def test_chronological_states_of_a_layer_that_runs_backwards():
    model = sequential(make_rnn("lstm", return_sequences=True, go_backwards=True))
    x = make_data()
    expected = framework_jacobian(lambda a: model.layers[0](a), x)[:, ::-1]
    assert_close(rl.jacobian(model, x, of="rnn.hidden"), expected)
    assert_close(
        rl.jacobian(model, x, of="rnn.hidden", at={"out_time": [3, 0, 1], "in_time": [2, -1]}),
        expected[:, [3, 0, 1]][..., [2, 3], :],
    )
    assert_close(rl.jacobian(model, x), expected[:, ::-1])


@pytest.mark.one_engine
def test_both_directions_of_a_bidirectional_state():
    model = sequential(layers.Bidirectional(make_rnn("gru", return_sequences=True), name="both"))
    x = make_data()
    expected = framework_jacobian(lambda a: model.layers[0](a), x)
    states = rl.jacobian(model, x, of="both.hidden")
    assert states.dims == ("sample", "out_time", "direction", "out_unit", "in_time", "in_feature")
    assert_close(states.sel(direction="forward"), expected[:, :, :H])
    assert_close(states.sel(direction="backward"), expected[:, :, H:])
    assert_close(rl.jacobian(model, x, of="both.output"), expected)


class TwoStateCell(layers.Layer):
    """A cell with two states whose output is neither of them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.state_size, self.output_size = (2, 3), 2

    def build(self, shape):
        self.a = self.add_weight(shape=(shape[-1], 2), name="a", initializer="orthogonal")
        self.b = self.add_weight(shape=(2, 3), name="b", initializer="orthogonal")
        self.c = self.add_weight(shape=(3, 2), name="c", initializer="orthogonal")

    def call(self, x, states, training=False):
        p, q = states
        p = keras.ops.tanh(keras.ops.matmul(x, self.a) + 0.7 * p + keras.ops.matmul(q, self.c))
        q = keras.ops.sin(0.5 * q + keras.ops.matmul(p, self.b))
        return p * p + keras.ops.matmul(q, self.c), [p, q]


@pytest.mark.parametrize("masked", [False, True])
def test_a_custom_cell_whose_output_is_no_state(masked):
    mask = [layers.Masking()] if masked else []
    model = sequential(
        *mask, layers.RNN(TwoStateCell(), return_sequences=True, name="rnn"), layers.Dense(2, activation="tanh")
    )
    x = make_data(masked)
    assert_close(rl.jacobian(model, x), framework_jacobian(lambda a: model(a), x))


BODIES = {
    "residual_and_normalised": lambda h: layers.Add()(
        [h, layers.LayerNormalization(axis=-1)(layers.LSTM(F, return_sequences=True)(h))]
    ),
    "time_distributed_mlp": lambda h: layers.TimeDistributed(layers.Dense(3, activation="silu"))(
        layers.GRU(H, return_sequences=True)(layers.Dense(3, activation="tanh")(h))
    ),
    "convolution_below": lambda h: layers.SimpleRNN(H, return_sequences=True)(layers.Conv1D(3, 2, padding="causal")(h)),
    "convolution_above": lambda h: layers.Conv1D(3, 3, padding="same")(layers.LSTM(H, return_sequences=True)(h)),
    "pooled": lambda h: layers.GlobalAveragePooling1D()(layers.GRU(H, return_sequences=True)(h)),
    "flattened": lambda h: layers.Dense(2)(layers.Flatten()(layers.LSTM(H, return_sequences=True)(h))),
    "attention": lambda h: layers.Attention()([layers.GRU(F, return_sequences=True)(h)] * 2),
    "two_stacked_then_last": lambda h: layers.Dense(2)(layers.LSTM(H)(layers.GRU(3, return_sequences=True)(h))),
    "repeated": lambda h: layers.LSTM(H, return_sequences=True)(layers.RepeatVector(3)(layers.GRU(3)(h))),
}


@pytest.mark.compiled("residual_and_normalised")
@pytest.mark.product(keep=("residual_and_normalised", "convolution_below", "two_stacked_then_last"))
@pytest.mark.parametrize("body", BODIES)
def test_whole_models(body):
    inputs = keras.Input((T, F))
    model = perturb_weights(keras.Model(inputs, BODIES[body](inputs)))
    x = make_data()
    assert_close(rl.jacobian(model, x), framework_jacobian(lambda a: model(a), x))


@pytest.mark.product
@pytest.mark.parametrize("body", ["residual_and_normalised", "attention", "two_stacked_then_last"])
def test_whole_models_against_finite_differences(body):
    inputs = keras.Input((T, F))
    model = perturb_weights(keras.Model(inputs, BODIES[body](inputs)))
    x, eps = make_data(), 1e-6
    jacobian = rl.jacobian(model, x).values
    for k, f in itertools.product(range(T), range(F)):
        step = np.zeros_like(x)
        step[:, k, f] = eps
        up, down = (keras.ops.convert_to_numpy(keras.ops.stop_gradient(model(x + s * step))) for s in (1, -1))
        assert np.abs((up - down) / (2 * eps) - jacobian[..., k, f]).max() < 1e-7


def test_an_integer_input_is_told_to_ask_for_the_embedding():
    model = keras.Sequential([keras.Input((T,), dtype="int32"), layers.Embedding(5, F, name="table"), make_rnn("gru")])
    ids = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], dtype="int32")
    with pytest.raises(rl.errors.InputError) as error:
        rl.jacobian(model, ids)
    assert str(error.value) == (
        "Integers have no derivative.\n"
        "  got:      input of dtype int32\n"
        "  expected: floats\n"
        '  try:      wrt="table.output"'
    )
    vectors = keras.ops.convert_to_numpy(model.layers[0](ids))
    for wrt in ("table.output", "rnn.input"):
        assert_close(rl.jacobian(model, ids, wrt=wrt), framework_jacobian(lambda a: model.layers[1](a), vectors))


CHAINS = {
    "tagger": lambda: [layers.LSTM(H, return_sequences=True), layers.Dense(3, "softmax"), layers.Dense(2)],
    "classifier": lambda: [layers.Dense(3, "relu"), layers.GRU(H), layers.Dropout(0.5), layers.Dense(2, "tanh")],
    "stack": lambda: [layers.GRU(3, return_sequences=True), layers.TimeDistributed(layers.Dense(3)), layers.LSTM(H)],
    "nothing_above": lambda: [layers.SimpleRNN(H, return_sequences=True)],
}


@pytest.mark.product(keep=("tagger", "classifier"))
@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_known_by_its_types_is_not_asked_and_gives_the_same(chain, monkeypatch):
    model, x = sequential(*CHAINS[chain]()), make_data()
    expected = framework_jacobian(lambda a: model(a), x)
    with monkeypatch.context() as patch:
        patch.setattr("rnnlens.verbs.time_jacobian.network._pullback", lambda *a: pytest.fail("asked the framework"))
        assert_close(rl.jacobian(model, x), expected)
    monkeypatch.setattr("rnnlens.verbs.time_jacobian.network.known_chain", lambda *a: None)
    assert_close(rl.jacobian(model, x), expected)


class TwiceDense(layers.Dense):
    """A subclass of Dense whose call computes something else than Dense does."""

    def call(self, x, training=None):
        return 2 * super().call(x) + keras.ops.roll(x[..., :1], 1, axis=1)


def test_a_subclass_of_a_known_layer_is_not_taken_for_it():
    model, x = sequential(layers.LSTM(H, return_sequences=True), TwiceDense(2)), make_data()
    assert_close(rl.jacobian(model, x), framework_jacobian(lambda a: model(a), x))


def test_scores_of_a_vocabulary_are_pulled_by_rows_within_the_memory():
    """The blocks of a softmax over 400 tokens take 15 MB: with 4 MiB the framework pulls the rows asked for."""
    keras.utils.set_random_seed(0)
    x, tokens = np.random.default_rng(0).normal(size=(2, 6, 2)), 400
    head = layers.Dense(tokens, activation="softmax")
    model = keras.Sequential([keras.Input((6, 2)), layers.LSTM(3, return_sequences=True), head])
    truth = framework_jacobian(lambda x: model(x)[:, -1], x)
    norms = np.sqrt((truth**2).sum((1, 3)))
    last_step = {"at": {"out_time": [-1]}, "measure": "norm"}
    with rl.options(memory="4 MiB"):
        exact = rl.jacobian(model, x, **last_step)
        tracemalloc.start()
        sketch = rl.jacobian(model, x, sketch=32, **last_step)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    np.testing.assert_allclose(exact.values[:, 0], norms, rtol=1e-9)
    error = np.abs(sketch.norm_squared.values[:, 0] - norms**2)
    assert (error < 6 * sketch.norm_squared_stderr.values[:, 0]).all()
    assert peak < 2 * 6 * tokens**2 * 8
