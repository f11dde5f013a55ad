"""Capture with cells of unknown equations, dropout, losses of training, non-recurrent layers and half precision."""

from __future__ import annotations

import numpy as np
import pytest
from keras_eager import eager_captures
from spoken_keras import LEGACY, keras, keras_adapter

import rnnlens as rl
from rnnlens import errors
from rnnlens.adapters.protocol import Batch, Port, Taps
from rnnlens.adapters.registry import adapter_for
from rnnlens.recurrence.replay import Replay
from rnnlens.testing.adapter_contract import reference_of

adapter = keras_adapter()
X = np.random.default_rng(0).normal(size=(3, 4, 2))
Y = np.random.default_rng(1).normal(size=(3, 2))


@pytest.fixture(autouse=True)
def eager_mode():
    with eager_captures():
        yield


@keras.saving.register_keras_serializable("rnnlens_tests")
class Minimal(keras.layers.Layer):
    """A minimal gated unit whose output is not its state."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = self.state_size = units
        self.output_size = units + 1

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1] + self.units, self.units), name="w")
        self.v = self.add_weight(shape=(self.units, self.units + 1), name="v")
        self.built = True

    def call(self, x, states):
        h = states[0]
        f = keras.ops.sigmoid(keras.ops.matmul(keras.ops.concatenate([x, h], axis=-1), self.w))
        new = f * h + (1 - f) * keras.ops.tanh(keras.ops.sum(x, axis=-1, keepdims=True) - h)
        return keras.ops.matmul(new, self.v), [new]


class Louder(keras.layers.LSTMCell):
    def call(self, inputs, states, training=False):
        return super().call(2 * inputs, states, training=training)


def patched_cell():
    """Return a GRU cell with ``call`` overridden on the instance: its equations are unknown."""
    cell = keras.layers.GRUCell(3)
    original = cell.call
    cell.call = lambda inputs, states, training=False: original(inputs * inputs, states, training=training)
    return cell


CELLS = {
    "patched": patched_cell,
    "custom": lambda: Minimal(3),
    "subclass": lambda: Louder(3),
    "activation": lambda: keras.layers.SimpleRNNCell(3, activation=lambda z: keras.ops.tanh(z) * 0.5),
    "stacked": lambda: keras.layers.StackedRNNCells([keras.layers.LSTMCell(2), keras.layers.GRUCell(3)]),
}


def rnn_model(cell, **options):
    layer = keras.layers.RNN(cell, return_sequences=True, name="rnn", **options)
    return keras.Sequential([keras.Input((4, 2)), layer])


def squared_sum(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_pred))


@pytest.mark.product(keep=("custom", "stacked"))
@pytest.mark.parametrize("name", CELLS)
def test_step_cells_chain_to_the_frameworks_gradients(name):
    """Backpropagation by the cell's own vjp or Jacobians gives the framework's weight and input gradients."""
    model = rnn_model(CELLS[name]())
    (call,) = adapter.run(model, Batch(X, loss=squared_sum), Taps.direct(weight_grads=True)).capture.calls
    assert call.cell.by_framework
    cell, states = call.cell, [call.initial_state]
    for t in range(4):
        output, new = cell.advance(X[:, t], states[-1])
        np.testing.assert_allclose(output, call.output[:, t], rtol=1e-10, atol=1e-12)
        states.append(new)
    with adapter.run(model, Batch(X, loss=squared_sum), Taps.ports([Port("loss")], [Port("input")])) as pullback:
        input_grad = pullback.pull({Port("loss"): np.ones(1)})[Port("input")][0]
    weight_grads = dict.fromkeys(call.weight_grads, 0.0)
    state_cotangents = [np.zeros_like(s) for s in states[-1]]
    for t in reversed(range(4)):
        direct = call.output_grad[:, t]
        for key, grad in cell.weight_vjp(X[:, t], states[t], direct, state_cotangents).items():
            weight_grads[key] = weight_grads[key] + grad
        state_jacobian, x_jacobian = cell.jacobian(X[:, t], states[t])
        cotangent = np.concatenate([*state_cotangents, direct], axis=-1)
        pulled = np.einsum("nij,ni->nj", state_jacobian, cotangent), np.einsum("nij,ni->nj", x_jacobian, cotangent)
        x_grad, state_cotangents = cell.vjp(X[:, t], states[t], direct, state_cotangents)
        np.testing.assert_allclose(x_grad, input_grad[:, t], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(pulled[1], x_grad, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(pulled[0], np.concatenate(state_cotangents, axis=-1), rtol=1e-9, atol=1e-12)
    for key, grad in weight_grads.items():
        np.testing.assert_allclose(grad, call.weight_grads[key], rtol=1e-9, atol=1e-12)


@pytest.mark.product(keep=("LSTM-1", "GRU-2"))
@pytest.mark.parametrize("implementation", [1, 2])
@pytest.mark.parametrize("kind", ["SimpleRNN", "LSTM", "GRU"])
def test_dropout_multipliers_replay(kind, implementation):
    options = {} if kind == "SimpleRNN" else {"implementation": implementation}
    rate = 0.4 if implementation == 1 else 0.0
    layer = getattr(keras.layers, kind)(3, dropout=0.4, recurrent_dropout=rate, return_sequences=True, **options)
    model = keras.Sequential([keras.Input((4, 2)), layer])
    (call,) = adapter.run(
        model, Batch(X, loss=squared_sum, training=True, seed=5), Taps.direct(weight_grads=True)
    ).capture.calls
    (repeated,) = adapter.run(
        model, Batch(X, loss=squared_sum, training=True, seed=5), Taps.direct(weight_grads=True)
    ).capture.calls
    (other_seed,) = adapter.run(
        model, Batch(X, loss=squared_sum, training=True, seed=6), Taps.direct(weight_grads=True)
    ).capture.calls
    np.testing.assert_array_equal(call.output, repeated.output)
    assert np.abs(call.output - other_seed.output).max() > 0
    if LEGACY and rate == 0 and kind != "SimpleRNN":  # dropout is applied to the input before the fused kernel
        assert call.input_scale is None
        assert ((call.input == 0) | np.isclose(call.input, X / 0.6)).all()
        assert (call.input == 0).any(axis=(0, 2)).tolist() != (call.input == 0).all(axis=(0, 2)).tolist()
        np.testing.assert_allclose(call.output, reference_of(call).states[0], rtol=1e-9, atol=1e-12)
        return
    gates = {"SimpleRNN": None, "LSTM": 4, "GRU": 3}[kind] if implementation == 1 else None
    assert call.input_scale.shape == ((3, 2) if gates is None else (gates, 3, 2))
    assert (call.state_scale is None) == (rate == 0)
    if gates is None and rate == 0:
        call.input = call.input * call.input_scale[:, None]
        np.testing.assert_allclose(call.output, reference_of(call).states[0], rtol=1e-9, atol=1e-12)


@pytest.mark.one_engine("torch", "tf_keras")
def test_dropout_inside_an_unknown_cell_is_refused():
    model = rnn_model(keras.layers.StackedRNNCells([keras.layers.LSTMCell(2, dropout=0.5)]))
    with pytest.raises(errors.UnsupportedError) as caught:
        _ = adapter.run(model, Batch(X, loss=squared_sum, training=True), Taps.direct(weight_grads=True)).capture
    assert str(caught.value) == (
        "Layer 'rnn': dropout inside the cell StackedRNNCells cannot be replayed.\n"
        "  try:      training=False, or dropout between the layers instead of inside the cell"
    )


def regularised_model():
    layer = keras.layers.LSTM(2, kernel_regularizer="l2", activity_regularizer="l1", name="lstm")
    model = keras.Sequential([keras.Input((4, 2)), layer])
    model.compile("sgd", "mse")
    return model


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize("weights", [{}, {"sample_weight": np.array([1.0, 2.0, 0.0])}], ids=["plain", "weighted"])
def test_the_compiled_loss_is_that_of_training(weights):
    model = regularised_model()
    capture = adapter.run(model, Batch(X, Y, **weights), Taps.direct(weight_grads=True)).capture
    assert capture.loss == pytest.approx(model.evaluate(X, Y, verbose=0, **weights), rel=1e-6)


@pytest.mark.one_engine("torch", "tf_keras")
def test_losses_by_name_object_and_function_are_one():
    model = regularised_model()
    losses = ["mse", keras.losses.MeanSquaredError(), keras.losses.mean_squared_error]
    losses.append(lambda y, p: keras.ops.mean(keras.ops.square(y - p)))
    captures = [
        adapter.run(model, Batch(X, Y, loss=loss), Taps.direct(weight_grads=True)).capture for loss in [None, *losses]
    ]
    for capture in captures[1:]:
        assert capture.loss == pytest.approx(captures[0].loss, rel=1e-6)
        np.testing.assert_allclose(capture.calls[0].output_grad, captures[0].calls[0].output_grad, rtol=1e-6)


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize(
    ("compiled_loss", "loss", "expected"),
    [
        ("mse", None, "sum_over_batch_size"),
        (lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1), None, "sum_over_batch_size"),
        (keras.losses.MeanSquaredError(reduction="sum"), None, "sum"),
        ({"head": keras.losses.MeanSquaredError(reduction="sum")}, None, "sum"),
        ("mse", keras.losses.MeanSquaredError(reduction="sum"), "sum"),
        ("mse", "mae", "sum_over_batch_size"),
        ("mse", lambda y, p: keras.ops.mean((y - p) ** 2), None),
    ],
)
def test_how_a_loss_is_reduced_is_known_as_far_as_it_says(compiled_loss, loss, expected):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs))
    model.compile(loss=compiled_loss)
    assert adapter_for(model).facts(model).reduction(loss) == expected


@pytest.mark.one_engine("torch", "tf_keras")
def test_weight_gradients_are_without_the_weight_regulariser():
    model = regularised_model()
    grads = adapter.run(model, Batch(X, Y), Taps.direct(weight_grads=True)).capture.calls[0].weight_grads
    port = Port("weight", "lstm", key="kernel")
    with adapter.run(model, Batch(X, Y), Taps.ports([Port("loss")], [port])) as pullback:
        penalised_grad = pullback.pull({Port("loss"): np.ones(1)})[port][0]
    kernel = adapter.weights(model)["lstm"].values["kernel"]
    np.testing.assert_allclose(penalised_grad - grads["kernel"], 2 * 0.01 * kernel, rtol=1e-6, atol=1e-9)


@pytest.mark.one_engine("torch", "tf_keras")
def test_layers_that_are_not_recurrent():
    layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(5, 2, mask_zero=True, name="embedding")]
    model = keras.Sequential([*layers, keras.layers.SimpleRNN(2, name="rnn"), keras.layers.Dense(2, name="head")])
    ids = np.array([[1, 2, 0, 0], [3, 4, 1, 0]])
    request = Taps.direct(("head", "embedding", "rnn"), weight_grads=True)
    capture = adapter.run(model, Batch(ids, loss=squared_sum), request).capture
    shapes = {call.layer: (call.output.shape, call.output_grad.shape) for call in capture.other_calls}
    assert shapes == {"embedding": ((2, 4, 2), (2, 4, 2)), "head": ((2, 2), (2, 2))}
    np.testing.assert_array_equal(capture.calls[0].mask, ids != 0)
    reference = reference_of(capture.calls[0])
    np.testing.assert_allclose(capture.other_calls[0].output_grad, reference.input_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.product
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_comes_out_as_float32_with_a_note(policy):
    layer = keras.layers.LSTM(2, dtype=policy, return_sequences=True)
    model = keras.Sequential([keras.Input((4, 2)), layer])
    capture = adapter.run(model, Batch(X.astype("float32"), loss=squared_sum), Taps.direct(weight_grads=True)).capture
    (call,) = capture.calls
    arrays = [call.input, call.output, call.output_grad, call.cell.kernel, *call.weight_grads.values()]
    assert {str(a.dtype) for a in arrays} <= {"float32", "float64"}
    assert str(call.output.dtype) == "float32"
    assert capture.notes == [f"Computed in {policy[6:]}, shown as float32, without the loss scale."]
    np.testing.assert_allclose(call.output, reference_of(call).states[0], atol=0.02)


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize("count", [2, 4])
def test_given_initial_states_reach_each_direction(count):
    """Initial states are given for both directions (forward first), or for one direction and used for both."""
    layer = keras.layers.Bidirectional(keras.layers.LSTM(2, return_sequences=True), name="bi")
    model = keras.Sequential([keras.Input((4, 2)), layer])
    initial_states = [np.random.default_rng(i).normal(size=(3, 2)) for i in range(count)]
    calls = adapter.run(
        model, Batch(X, loss=squared_sum, initial_state={"bi": initial_states}), Taps.direct(weight_grads=True)
    ).capture.calls
    for call, expected in zip(calls, (initial_states[:2], initial_states[-2:]), strict=True):
        np.testing.assert_array_equal(call.initial_state, expected)
        assert Replay.from_call(call).residual < 1e-12


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_mask_in_a_list_is_that_mask(kind):
    """A layer called with ``mask=[mask]`` is captured with that mask."""
    x, mask = keras.Input((4, 2)), keras.Input((4,), dtype="bool")
    model = keras.Model([x, mask], getattr(keras.layers, kind)(3, return_sequences=True)(x, mask=[mask]))
    mask_values = np.array([[1, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=bool)
    (call,) = adapter.run(
        model, Batch([X, mask_values], loss=squared_sum), Taps.direct(weight_grads=True)
    ).capture.calls
    np.testing.assert_array_equal(call.mask, mask_values)
    assert Replay.from_call(call).residual < 1e-12


class Loop(keras.layers.Layer):
    """A layer that calls a GRU cell in its own loop."""

    def __init__(self, **options):
        super().__init__(**options)
        self.cell = keras.layers.GRUCell(3, bias_initializer="random_normal", name="cell")

    def call(self, x):
        state = keras.ops.concatenate([0 * x[:, 0, :1]] * 3, axis=-1)
        for t in range(4):
            state, _ = self.cell(x[:, t], [state])
        return state


@pytest.mark.one_engine("torch", "tf_keras")
def test_the_two_biases_of_a_cell_in_a_loop_by_hand_are_two_weights():
    """The two biases of a GRU cell are two weights, each compared with its row of the reference run's variable."""
    model = keras.Sequential([keras.Input((4, 2)), Loop(name="loop"), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    gradients = rl.gradients(model, X, Y, wrt="weights")
    assert gradients["loop/cell"].bias.shape == gradients["loop/cell"].recurrent_bias.shape == (3, 3)
    assert gradients.certificate.state == "passed"


@pytest.mark.product(keep=("lstm gru-True-False", "simple simple-False-True"))
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kinds", ["lstm gru", "gru lstm", "simple simple"])
def test_stacked_cells_with_a_mask_are_traced_as_keras_runs_them(kinds, backwards, sequences):
    """Stacked cells with a mask are traced as each engine runs them.

    At masked steps, also before the first valid one, Keras returns a state, the last output or zeros, by engine.
    """
    classes = {"lstm": keras.layers.LSTMCell, "gru": keras.layers.GRUCell, "simple": keras.layers.SimpleRNNCell}
    layer = keras.layers.RNN(
        [classes[kind](2) for kind in kinds.split()], go_backwards=backwards, return_sequences=sequences
    )
    pooling = [keras.layers.GlobalAveragePooling1D()] if sequences else []
    model = keras.Sequential([keras.Input((4, 2)), keras.layers.Masking(0.0), layer, *pooling, keras.layers.Dense(2)])
    model.compile(loss="mse")
    x = X.copy()
    x[0, 2:] = x[1, :2] = 0
    trace = rl.trace(model, x, Y)
    assert trace.certificate.state == "passed"
    assert "initial_state_grad" in trace.certificate.certified
