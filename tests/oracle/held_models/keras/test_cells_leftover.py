"""Typical combinations of cells and layers against the engine's gradient of the unchanged model, in float64."""

import keras
import numpy as np
import pytest
from keras_plain import jacobian

import rnnlens as rl
from rnnlens.errors import UnsupportedError
from rnnlens.testing.keras_models import gradients

pytestmark = pytest.mark.usefixtures("float64")

L, ops = keras.layers, keras.ops
TIME, UNITS = 4, 3
X = np.random.default_rng(0).normal(size=(2, TIME, 2))


def total(y, out):
    return ops.sum(ops.sin(out) * (1.0 + ops.cast(ops.arange(out.shape[-1]), out.dtype)))


def close(actual, expected, rtol=1e-9):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def has_match(entries, expected, rtol=1e-8):
    """Return whether ``expected`` is one of the entries, or each of its two rows is (the biases of a GRU)."""

    def is_entry(array):
        return any(e.size == array.size and np.allclose(e.ravel(), array.ravel(), rtol, rtol / 1000) for e in entries)

    return is_entry(expected) or (expected.shape[0] == 2 and all(map(is_entry, expected)))


def compare_with_engine(model, x, layers, rtol=1e-9):
    """Compare loss, gradients with respect to the input and the weights of ``layers``, and the time Jacobian."""
    variables = [v for layer in layers for v in layer.trainable_variables]
    loss, (by_input,), by_weight = gradients(lambda t: total(None, model(t[0])), [x], variables)
    expected = dict(zip(map(id, variables), by_weight, strict=True))
    assert float(rl.trace(model, x, loss=total).loss) == pytest.approx(float(loss), rel=rtol / 10)
    close(rl.gradients(model, x, loss=total, wrt="input"), by_input, rtol)
    weights = rl.weights(model, x, loss=total)
    for layer in layers:
        layer_weights = weights[layer.name]
        entries = [np.asarray(layer_weights[name]) for name in layer_weights if name.endswith("_grad")]
        for variable in layer.trainable_variables:
            assert has_match(entries, expected[id(variable)], 10 * rtol), variable.path
    close(rl.jacobian(model, x), jacobian(model, x), rtol)


@keras.saving.register_keras_serializable()
class Cell(L.Layer):
    state_size, output_size = UNITS, UNITS

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], UNITS), name="kernel")
        self.recurrent = self.add_weight(shape=(UNITS, UNITS), name="recurrent")

    def call(self, x, states):
        h = ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return h * 2.0, [h]


KINDS = {"lstm": lambda **options: L.LSTM(UNITS, **options), "own": lambda **options: L.RNN(Cell(), **options)}


@pytest.mark.product
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_jacobian_by_the_output_of_the_layer(kind, sequences, bidirectional):
    layer = KINDS[kind](return_sequences=sequences, name=None if bidirectional else "rnn")
    layer = L.Bidirectional(layer, name="rnn") if bidirectional else layer
    inputs = keras.Input((TIME, 2))
    output = layer(inputs)
    top = L.Dense(2, activation="tanh")(output)
    model, below, above = keras.Model(inputs, top), keras.Model(inputs, output), keras.Model(output, top)
    expected = jacobian(above, ops.convert_to_numpy(below(X)))
    close(rl.jacobian(model, X, wrt="rnn.output"), expected)


class ScaledCell(Cell):
    scale = 1.0

    def call(self, x, states):
        h = ops.tanh(x @ self.kernel + states[0] @ self.recurrent) * self.scale
        return h, [h]


class SetsScale(keras.Model):
    """A model that sets an attribute of its cell in each forward pass."""

    def __init__(self, scale, leaves):
        super().__init__()
        self.scale, self.leaves = scale, leaves
        self.rnn, self.head = L.RNN(ScaledCell(), return_sequences=True, name="rnn"), L.Dense(2)

    def call(self, x):
        self.rnn.cell.scale = self.scale(x)
        out = self.head(self.rnn(x))
        if not self.leaves:
            self.rnn.cell.scale = 1.0
        return out


class ScaledLayer(L.RNN):
    """An RNN layer that sets an attribute of its cell in its own ``call``."""

    def call(self, sequences, initial_state=None, mask=None, training=False):
        self.cell.scale = 1.0 + ops.mean(sequences, axis=1)[:, :1]
        return super().call(sequences, initial_state, mask, training)


def model_set_by_call(variant):
    if variant == "layer":
        inputs = keras.Input((TIME, 2))
        return keras.Model(inputs, L.Dense(2)(ScaledLayer(ScaledCell(), return_sequences=True, name="rnn")(inputs)))
    scale = (lambda x: 0.5) if "number" in variant else (lambda x: 1.0 + ops.mean(x, axis=1)[:, :1])
    model = SetsScale(scale, leaves="left" in variant)
    model(X)
    return model


@pytest.mark.one_engine
@pytest.mark.parametrize("variant", ["number", "input", "input left", "layer"])
def test_a_cell_that_reads_what_call_sets(variant):
    model = model_set_by_call(variant)
    expected = gradients(lambda t: total(None, model(t[0])), [X], [])[1][0]
    close(rl.gradients(model, X, loss=total, wrt="input"), expected)
    for call in (lambda: rl.trace(model, X, loss=total), lambda: rl.jacobian(model, X)):
        with pytest.raises(UnsupportedError, match="called again with its recorded input and state"):
            call()


@pytest.mark.one_engine
def test_a_number_that_stays_set():
    model = model_set_by_call("number left")
    compare_with_engine(model, X, [model.rnn])


class NormCell(Cell):
    def __init__(self):
        super().__init__()
        self.norm = L.BatchNormalization()

    def build(self, shape):
        super().build(shape)
        self.norm.build((None, UNITS))

    def call(self, x, states, training=False):
        h = ops.tanh(self.norm(x @ self.kernel, training=training) + states[0] @ self.recurrent)
        return h, [h]


class Noisier(Cell):
    """A cell whose step depends on ``training``."""

    def call(self, x, states, training=False):
        h = ops.tanh(x @ self.kernel + states[0] @ self.recurrent) * (2.0 if training else 1.0)
        return h, [h]


@pytest.mark.one_engine
@pytest.mark.parametrize("kind", [NormCell, Noisier])
def test_a_cell_that_acts_otherwise_in_training(kind):
    x = np.random.default_rng(3).normal(size=(5, TIME, 2))  # five samples: batch normalisation of two gives 1 and -1
    inputs = keras.Input((TIME, 2))
    rnn = L.RNN(kind(), return_sequences=True, name="rnn")
    model = keras.Model(inputs, L.Dense(2)(rnn(inputs)))
    before = [np.array(ops.convert_to_numpy(v)) for v in model.variables]
    input_grad = rl.gradients(model, x, loss=total, wrt="input", training=True)
    close(input_grad, gradients(lambda t: total(None, model(t[0], training=True)), [x], [])[1][0])
    for call in (
        lambda: rl.trace(model, x, loss=total, training=True),
        lambda: rl.jacobian(model, x, training=True),
    ):
        with pytest.raises(UnsupportedError, match=r"mixes the samples|called again with its recorded"):
            call()
    close(rl.jacobian(model, x), jacobian(model, x))
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)


class TiedCell(Cell):
    """A cell that uses the recurrent matrix of another cell."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], UNITS), name="kernel")
        self.recurrent = self.matrix


@pytest.mark.one_engine
@pytest.mark.parametrize("kind", ["own", "known"])
def test_one_recurrent_matrix_in_two_layers(kind):
    lower = L.RNN(Cell(), return_sequences=True, name="lower")
    lower = lower if kind == "own" else L.SimpleRNN(UNITS, return_sequences=True, name="lower")
    inputs = keras.Input((TIME, 2))
    below = lower(inputs)
    matrix = lower.cell.recurrent if kind == "own" else lower.cell.recurrent_kernel
    upper = L.RNN(TiedCell(matrix), return_sequences=True, name="upper")
    model = keras.Model(inputs, L.Dense(2)(upper(below)))
    compare_with_engine(model, X, [lower, upper])


@pytest.mark.one_engine
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_held_to_half_precision(kind):
    policy = "mixed_bfloat16"
    options = {"return_sequences": True, "dtype": policy, "name": "rnn"}
    layer = L.RNN(Cell(dtype=policy), **options) if kind == "own" else KINDS[kind](**options)
    inputs = keras.Input((TIME, 2), dtype="float32")
    model, x = keras.Model(inputs, L.Dense(2, dtype="float32")(layer(inputs))), X.astype("float32")
    expected = gradients(lambda t: total(None, model(t[0])), [x], [])[1][0]
    rl.trace(model, x, loss=total)
    rl.weights(model, x, loss=total)
    close(rl.gradients(model, x, loss=total, wrt="input"), expected, 0.05)
    close(rl.jacobian(model, x), jacobian(model, x), 0.05)


@pytest.mark.product
@pytest.mark.parametrize("approximate", [None, True, False])
def test_gelu(approximate):
    def gelu_variant(values):
        return keras.activations.gelu(values, approximate=approximate)

    inputs = keras.Input((TIME, 2))
    rnn = L.GRU(UNITS, activation="gelu" if approximate is None else gelu_variant, return_sequences=True, name="rnn")
    # TensorFlow's gelu has single-precision constants in float64 too, and is 5e-9 off; rnnlens has exact ones.
    coarse = keras.backend.backend() == "tensorflow"
    compare_with_engine(
        keras.Model(inputs, L.Dense(2, activation="gelu")(rnn(inputs))), 3 * X, [rnn], 1e-7 if coarse else 1e-9
    )


def shared_in_nested_models():
    """Return a model with one LSTM shared by two nested models."""
    rnn = L.LSTM(UNITS, return_sequences=True, name="rnn")
    nested_models = []
    for name in ("left", "right"):
        inner = keras.Input((TIME, 2))
        nested_models.append(keras.Model(inner, L.Dense(2, activation="tanh")(rnn(inner)), name=name))
    inputs = keras.Input((TIME, 2))
    return keras.Model(inputs, nested_models[0](inputs) * nested_models[1](L.Dense(2)(inputs))), rnn


def attention_over_outputs():
    inputs = keras.Input((TIME, 2))
    rnn = L.LSTM(UNITS, return_sequences=True, name="rnn")
    states = rnn(inputs)
    return keras.Model(inputs, L.Dense(2)(L.Attention()([states, L.Dense(UNITS)(states)]))), rnn


def masks_through_time_distributed():
    inputs = keras.Input((TIME, 2))
    rnn = L.LSTM(UNITS, return_sequences=True, name="rnn")
    wider = L.TimeDistributed(L.Dense(3, activation="tanh"))(L.Masking()(inputs))
    return keras.Model(inputs, L.TimeDistributed(L.Dense(2))(rnn(wider))), rnn


def stateful_own_cell():
    inputs = keras.Input(batch_shape=(2, TIME, 2))
    rnn = L.RNN(Cell(), return_sequences=True, stateful=True, name="rnn")
    return keras.Model(inputs, L.Dense(2)(rnn(inputs))), rnn


MODELS = [shared_in_nested_models, attention_over_outputs, masks_through_time_distributed, stateful_own_cell]


@pytest.mark.one_engine
@pytest.mark.parametrize("make", MODELS)
def test_models_as_people_combine_them(make):
    model, rnn = make()
    x = X.copy()
    if make is masks_through_time_distributed:
        x[0, 2:] = 0
    if make is stateful_own_cell:
        start = np.random.default_rng(2).normal(size=(2, UNITS))
        rnn.states[0].assign(start)
    compare_with_engine(model, x, [rnn])
    if make is stateful_own_cell:
        np.testing.assert_array_equal(ops.convert_to_numpy(rnn.states[0]), start)
