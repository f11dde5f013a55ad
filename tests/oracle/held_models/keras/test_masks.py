"""Padding in typical user models, against the engine's own gradient of the unchanged model.

Inputs are integers with ``Embedding(mask_zero=True)``, or floats with ``Masking``. Gradients of single inputs are
compared with central differences of the unchanged model's loss, in float64.
"""

import keras
import numpy as np
import pytest
from keras_plain import central_difference, to_float

import rnnlens as rl

pytestmark = [pytest.mark.one_engine, pytest.mark.usefixtures("float64", "uncertified")]

RNG = np.random.default_rng(0)
TIME, UNITS = 5, 3
IDS = np.array([[1, 2, 3, 4, 5], [3, 1, 2, 0, 0], [2, 0, 0, 0, 0]])
Y = RNG.normal(size=(3, TIME, 2))


def padded():
    """Return float inputs with padding of -9, as ``Masking(-9)`` expects it."""
    x = RNG.normal(size=(3, TIME, 2))
    x[IDS == 0] = -9.0
    return x


def total(y, out):
    return keras.ops.sum(keras.ops.sin(out))


class OwnOutput(keras.layers.Layer):
    """A cell whose output is none of its states."""

    state_size, output_size = UNITS, UNITS

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], UNITS), name="kernel")
        self.recurrent = self.add_weight(shape=(UNITS, UNITS), name="recurrent")

    def call(self, x, states):
        h = keras.ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return h * 2.0 + 1.0, [h]


LAYERS = {
    "lstm": lambda **o: keras.layers.LSTM(UNITS, name="rnn", **o),
    "gru": lambda **o: keras.layers.GRU(UNITS, name="rnn", **o),
    "own": lambda **o: keras.layers.RNN(OwnOutput(), name="rnn", **o),
}


@pytest.mark.product(keep=("lstm-True-True", "gru-False-False", "own-True-False"))
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_outputs_at_padding(kind, sequences, zero):
    layer = LAYERS[kind](return_sequences=sequences)
    layer.zero_output_for_mask = zero
    model = keras.Sequential([keras.Input((TIME, 2)), keras.layers.Masking(-9.0), layer])
    x = padded()
    trace, jacobian = rl.trace(model, x, loss=total)["rnn"], rl.jacobian(model, x, reduce="sum", wrt="input")
    indices = [(0, 1, 0), (1, 2, 1), (1, 0, 0), (2, 0, 1)]
    losses, sums = differences(model, x, indices)
    for index, loss, summed in zip(indices, losses, sums, strict=True):
        assert float(trace.input_grad[index]) == pytest.approx(loss, rel=1e-6, abs=1e-8)
        sample, step, feature = index
        input_sum = jacobian[sample].isel(in_time=step, in_feature=feature).sum()
        assert float(input_sum) == pytest.approx(summed, rel=1e-6, abs=1e-8)


def differences(model, x, indices):
    """Return the derivatives of the loss and of the output sum by the inputs at ``indices``, from one batched run."""
    perturbed = np.tile(x, (2 * len(indices), 1, 1, 1))
    for i, index in enumerate(indices):
        perturbed[(2 * i, *index)] += 1e-6
        perturbed[(2 * i + 1, *index)] -= 1e-6
    out = keras.ops.convert_to_numpy(model(perturbed.reshape(-1, *x.shape[1:]))).reshape(len(perturbed), -1)
    values = np.sin(out).sum(-1), out.sum(-1)
    return [(value[::2] - value[1::2]) / 2e-6 for value in values]


def embedded():
    inputs = keras.Input((TIME,), dtype="int64")
    h = keras.layers.Embedding(6, 2, mask_zero=True, name="table")(inputs)
    h = keras.layers.LSTM(UNITS, return_sequences=True, name="rnn")(keras.layers.Dropout(0.1)(h))
    return keras.Model(inputs, keras.layers.Dense(2)(h))


class Block(keras.Model):
    """A nested model that takes the mask and passes it on."""

    def __init__(self):
        super().__init__(name="inner")
        self.rnn, self.supports_masking = keras.layers.LSTM(UNITS, return_sequences=True, name="rnn"), True

    def call(self, x, mask=None):
        return self.rnn(x, mask=mask)

    def compute_mask(self, inputs, mask=None):
        return mask


def nested():
    inputs = keras.Input((TIME,), dtype="int64")
    h = Block()(keras.layers.Embedding(6, 2, mask_zero=True, name="table")(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(h))


@pytest.mark.one_engine
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("make", [embedded, nested])
def test_the_loss_keeps_the_mask(make, per_sample):
    """A compiled loss excludes padded steps, also when it is split by sample or computed from outputs."""
    model = make()
    model.compile(loss="mse")
    table = model.get_layer("table").embeddings
    wrt = ["output", "table/embeddings"]
    grads = rl.gradients(model, IDS, Y, wrt=wrt, per_sample=per_sample)
    before = np.array(keras.ops.convert_to_numpy(table))

    def loss(values):
        table.assign(values)
        return model.evaluate(IDS, Y, batch_size=3, verbose=0)

    for index in [(1, 0), (2, 1)]:
        expected = central_difference(loss, before, index)
        table.assign(before)
        table_grad = grads["table"]["embeddings"]
        table_grad = table_grad.sum("sample") if per_sample else table_grad
        assert float(table_grad[index]) == pytest.approx(expected, rel=1e-4, abs=1e-7)
    output_grad = grads["model"]["output"]
    assert float(abs(output_grad[0, 3]).max()) > 0
    assert float(abs(output_grad[1, 3]).max()) == 0


@pytest.mark.one_engine
@pytest.mark.parametrize("backward", ["gru", "no bias", "other units"])
def test_two_kinds_in_one_bidirectional_layer(backward):
    options = {"return_sequences": True, "go_backwards": True}
    backward_layer = {
        "gru": lambda: keras.layers.GRU(UNITS, **options),
        "no bias": lambda: keras.layers.LSTM(UNITS, use_bias=False, **options),
        "other units": lambda: keras.layers.LSTM(2, **options),
    }[backward]()
    bidirectional = keras.layers.Bidirectional(
        keras.layers.LSTM(UNITS, return_sequences=True), backward_layer=backward_layer, name="rnn"
    )
    model = keras.Sequential([keras.Input((TIME, 2)), bidirectional])
    x = RNG.normal(size=(3, TIME, 2))
    index = (1, 2, 1)
    expected = central_difference(lambda perturbed: to_float(total(None, model(perturbed))), x, index)
    assert float(rl.gradients(model, x, loss=total, wrt="input")[index]) == pytest.approx(expected, rel=1e-6)
    layer_grads = rl.gradients(model, x, loss=total)["rnn"]
    weight = bidirectional.backward_layer.cell.kernel
    before = np.array(keras.ops.convert_to_numpy(weight))

    def loss(values):
        weight.assign(values)
        return to_float(total(None, model(x)))

    expected = central_difference(loss, before, (0, 0))
    weight.assign(before)
    (name,) = [key for key in layer_grads if "forward" not in key and key.endswith(".kernel")]
    assert float(layer_grads[name][0, 0]) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_array_equal(rl.weights(model)["rnn"][name], before)
    with pytest.raises(rl.errors.UnsupportedError, match="different cells"):
        rl.trace(model, x, loss=total)
