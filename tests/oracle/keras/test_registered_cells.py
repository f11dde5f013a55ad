"""A custom cell with registered equations, in Keras 3 and ``tf_keras``, against autodiff of a hand-written loop."""

import numpy as np
import pytest
from spoken_keras import floatx, keras, set_floats

import rnnlens as rl
from rnnlens.testing import keras_models

pytestmark = pytest.mark.one_engine("torch", "tf_keras")

ops = keras.ops
UNITS, STEPS = 3, 5
X = np.random.default_rng(0).normal(size=(2, STEPS, 2))
MASK = np.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 0]])[:, :, None]
GATES = ("forget", "candidate", "output")


@keras.saving.register_keras_serializable()
class Coupled(keras.layers.Layer):
    """An LSTM cell with coupled input and forget gate; h_t depends on c_t of the same step."""

    def __init__(self, units, penalty=None, **options):
        super().__init__(**options)
        self.units, self.state_size, self.output_size = units, [units, units], units
        self.penalty = keras.regularizers.get(penalty)

    def build(self, shape):
        size = (shape[-1], 3 * self.units)
        self.w = self.add_weight(shape=size, initializer="glorot_uniform", name="w", regularizer=self.penalty)
        self.u = self.add_weight(shape=(self.units, 3 * self.units), initializer="orthogonal", name="u")
        self.b = self.add_weight(shape=(3 * self.units,), initializer="random_normal", name="b")

    def call(self, x, states, taps=0.0):
        h, c = states
        f, n, o = ops.split(ops.matmul(x, self.w) + ops.matmul(h, self.u) + self.b + taps, 3, axis=-1)
        c = ops.sigmoid(f) * c + (1 - ops.sigmoid(f)) * ops.tanh(n)
        h = ops.sigmoid(o) * ops.tanh(c)
        return h, [h, c]

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class CoupledEquations(rl.cells.Cell):
    kind = "coupled_input_forget"
    gates = GATES
    states = ("hidden", "cell")
    parameters = rl.cells.by_name(rl.cells.KERNEL, rl.cells.RECURRENT_KERNEL, rl.cells.BIAS)

    def step(self, projected, before, scale, xp):
        h, c = before
        z = [self.gate(projected + h @ self.recurrent_kernel, name) for name in self.gates]
        f, n, o = rl.cells.sigmoid(z[0], xp), xp.tanh(z[1]), rl.cells.sigmoid(z[2], xp)
        c = f * c + (1 - f) * n
        return self.record(z, [f, n, o], xp), (o * xp.tanh(c), c)


rl.cells.register(Coupled, CoupledEquations, weights={"kernel": "w", "recurrent_kernel": "u", "bias": "b"})


@pytest.fixture(autouse=True)
def in_float64():
    before = floatx()
    set_floats("float64")
    yield
    set_floats(before)


def build(layer, masked=False):
    keras.utils.set_random_seed(0)
    masking = [keras.layers.Masking(dtype="float64")] if masked else []
    model = keras.Sequential([keras.Input((STEPS, 2), dtype="float64"), *masking, layer])
    return model, X * MASK if masked else X


def loss(y_true, y_pred):
    return ops.sum(ops.square(y_pred)) + ops.sum(y_pred)


def loss_by_hand(cell, x, taps, offsets, mask):
    """Return the loss of a loop over the cell, with ``taps`` added to pre-activations and ``offsets`` to states."""
    h = c = ops.zeros((len(X), UNITS), dtype="float64")
    for t in range(STEPS):
        new_hidden, (_, new_cell) = cell.call(x[:, t], [h, c], taps[:, t])
        h, c = ops.where(mask[:, t], new_hidden, h) + offsets[:, t], ops.where(mask[:, t], new_cell, c)
    return loss(None, h)


@pytest.mark.compiled
def test_a_registered_cell_is_traced_as_one_of_ours():
    model, x = build(keras.layers.RNN(Coupled(UNITS, dtype="float64"), name="rnn", dtype="float64"), masked=True)
    cell = model.layers[-1].cell
    mask = MASK.astype(bool)
    taps, offsets = np.zeros((2, STEPS, 3 * UNITS)), np.zeros((2, STEPS, UNITS))

    def loss_of(tensors):
        return loss_by_hand(cell, *tensors, mask)

    _, (dx, dz, dh), expected_grads = keras_models.gradients(loss_of, [x, taps, offsets], [cell.w, cell.u, cell.b])
    trace = rl.trace(model, x, loss=loss)
    rnn_trace = trace["rnn"]
    assert list(rnn_trace.gates.gate.values) == list(GATES)
    np.testing.assert_allclose(rnn_trace.gate_grad.values.reshape(dz.shape), dz, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rnn_trace.hidden_grad, dh, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rnn_trace.input_grad, dx, rtol=1e-9, atol=1e-12)
    assert trace.certificate.state == "passed"
    names = ("kernel", "recurrent_kernel", "bias")
    weights_by_time = rl.weights(model, x, loss=loss, by_time=True)["rnn"]
    weight_grads = rl.gradients(model, x, loss=loss, wrt=[f"rnn/{name}" for name in names])["rnn"]
    for name, expected in zip(names, expected_grads, strict=True):
        grad_by_time = weights_by_time[f"{name}_grad"]
        assert grad_by_time.sizes["gate"] == 3
        np.testing.assert_allclose(
            grad_by_time.sum("time").values.reshape(expected.shape), expected, rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(weight_grads[name].values.reshape(expected.shape), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.one_engine
def test_both_directions_and_the_time_jacobian():
    layer = keras.layers.RNN(Coupled(UNITS, dtype="float64"), dtype="float64")
    model, x = build(keras.layers.Bidirectional(layer, name="both", dtype="float64"))
    (row,) = rl.layers(model)
    assert (row.cell, row.units, row.direction) == ("coupled_input_forget", UNITS, "bidirectional")
    assert rl.trace(model, x, loss=loss).certificate.state == "passed"
    grads = rl.gradients(model, x, loss=loss, wrt=["both/kernel", "both.cell"])
    assert grads["both"]["kernel"].dims == ("direction", "feature", "gate", "unit")
    jacobian = rl.jacobian(model, x)
    rng, eps = np.random.default_rng(1), 1e-6
    tangent = rng.normal(size=x.shape)
    outputs = [ops.convert_to_numpy(model(x + sign * eps * tangent)) for sign in (1, -1)]
    jvp = np.einsum("souf,suf->so", jacobian.transpose("sample", "out_unit", "in_time", "in_feature").values, tangent)
    np.testing.assert_allclose(jvp, (outputs[0] - outputs[1]) / (2 * eps), rtol=1e-6, atol=1e-8)


class Wrong(CoupledEquations):
    kind = "coupled_wrong"

    def step(self, projected, before, scale, xp):
        record, (h, c) = super().step(projected, before, scale, xp)
        return record, (0.9 * h, c)


@pytest.mark.one_engine
@pytest.mark.parametrize("sequences", [False, True])
def test_other_equations_are_refused(sequences):
    model, x = build(keras.layers.RNN(Coupled(UNITS), name="rnn", return_sequences=sequences))
    weights = {"kernel": "w", "recurrent_kernel": "u", "bias": "b"}
    rl.cells.register(Coupled, Wrong, weights=weights)
    try:
        with pytest.raises(rl.errors.UnsupportedError, match="equations of Wrong differ from Coupled in 'rnn'"):
            rl.trace(model, x, loss=loss)
    finally:
        rl.cells.register(Coupled, CoupledEquations, weights=weights)


@pytest.mark.one_engine
def test_a_regularizer_of_a_registered_cell_is_refused():
    model, x = build(keras.layers.RNN(Coupled(UNITS, penalty="l2"), name="rnn"))
    with pytest.raises(rl.errors.UnsupportedError, match="'w' of its registered cell has a regularizer"):
        rl.weights(model, x, loss=loss)
