"""The search for the first non-finite number in Keras 3 and ``tf_keras`` models, also as a watch uses it."""

import logging

import numpy as np
import pytest
from spoken_keras import LEGACY, engine, keras

import rnnlens as rl

pytestmark = pytest.mark.op_by_op

L, ops = keras.layers, keras.ops


def data(samples=4, steps=12):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, steps, 3)).astype("f"), rng.normal(size=(samples, 1)).astype("f")


def build_net(*layers, steps=12, loss="mse"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((steps, 3)), *layers, L.Dense(1, name="head", dtype="float32")])
    model.compile(loss=loss)
    return model


@keras.saving.register_keras_serializable()
class Dividing(keras.layers.Layer):
    """A user's cell that divides by its input."""

    state_size = output_size = 3

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3), name="w")
        self.built = True

    def call(self, x, states, training=None):
        h = ops.tanh(x @ self.w + states[0]) + 0.1 / x[:, :1]
        return h, [h]


def test_none_in_a_healthy_net_and_the_model_is_left_as_it_was():
    x, y = data()
    model = build_net(L.Dense(4), L.Bidirectional(L.GRU(3)))
    before = [np.array(w) for w in model.weights]
    finding = rl.find_nonfinite(model, x, y)
    assert not finding
    assert finding.sentence == "none: all values are finite (data, weights, forward, loss, backward)"
    assert all(np.array_equal(old, np.array(new)) for old, new in zip(before, model.weights, strict=True))


def test_division_in_a_custom_cell():
    x, y = data()
    x[2, 7, 0] = 0.0
    finding = rl.find_nonfinite(build_net(L.RNN(Dividing(), name="mine")), x, y)
    assert (finding.phase, finding.layer, finding.sample, finding.step) == ("forward", "mine", 2, 7)
    assert "division by 0 in the cell, with input 0 at feature 0" in finding.fed_by


@pytest.mark.one_engine
def test_a_gate_that_half_precision_cannot_hold():
    """A float16 overflow is located by gate and unit: here only the forget gate of unit 2 overflows."""
    x, y = data()
    x[1, 5, 2] = 5e4
    lstm = L.LSTM(4, name="lstm", dtype="mixed_float16")
    model = build_net(lstm)
    kernel = np.full((3, 16), 0.01)
    kernel[:, 4 + 2] = 4.0
    lstm.cell.kernel.assign(kernel)
    finding = rl.find_nonfinite(model, x, y)
    assert (finding.layer, finding.gate, finding.unit, finding.sample, finding.step) == ("lstm", "forget", 2, 1, 5)
    assert finding.quantity == "gate_preactivation"
    assert "input 5e+04 at feature 2 times kernel 4" in finding.fed_by


@pytest.mark.one_engine
def test_the_adjoint_that_overflows_is_found_at_its_step():
    """An overflowing gradient is located at its step: it grows by 1000 per step back from 2e30 at the last step, 11.

    The RNN is linear, and its state is 0 throughout.
    """
    x, y = data()
    rnn = L.SimpleRNN(4, activation="linear", kernel_initializer="zeros", name="rnn", dtype="float32")
    model = build_net(rnn)
    rnn.cell.recurrent_kernel.assign(1000.0 * np.eye(4))
    model.get_layer("head").kernel.assign(2.0 * np.ones((4, 1)))
    finding = rl.find_nonfinite(model, x, y, loss=lambda y, p: ops.sum(p) * 1e30)
    assert (finding.phase, finding.layer, finding.step) == ("backward", "rnn", 8)  # 2e30, 2e33, 2e36, then 2e39
    assert "recurrent_kernel up to 1e+03" in finding.fed_by


def build_conv_lstm(*layers, return_sequences=False):
    """Return a model of a ConvLSTM2D (2 channels, height 5, width 4) whose kernels and biases are 0, and its data."""
    zeros = {"kernel_initializer": "zeros", "recurrent_initializer": "zeros", "unit_forget_bias": False}
    conv = L.ConvLSTM2D(2, 3, padding="same", return_sequences=return_sequences, **zeros, name="conv", dtype="float32")
    model = keras.Sequential([keras.Input((6, 5, 4, 1)), conv, *layers])
    model.compile(loss="mse")
    return model, conv.cell, np.random.default_rng(0).normal(size=(3, 6, 5, 4, 1)).astype("f")


def with_value(shape, position, value):
    array = np.zeros(shape, "f")
    array[position] = value
    return array


PLACE = {"sample": 1, "height": 3, "width": 1, "channel": 1}


@pytest.mark.one_engine
def test_the_place_in_a_convolutional_layer_that_overflows():
    """Only the forget gate (the second) of channel 1 reads the input, and 1e30 times 1e30 overflows."""
    model, cell, x = build_conv_lstm(L.Flatten(), L.Dense(1))
    cell.kernel.assign(with_value((3, 3, 1, 8), (1, 1, 0, 3), 1e30))
    x[1, 2, 3, 1, 0] = 1e30
    finding = rl.find_nonfinite(model, x, np.zeros((3, 1)))
    assert (finding.phase, finding.layer, finding.quantity) == ("forward", "conv", "gate_preactivation")
    assert (finding.gate, finding.origin.index) == ("forget", {**PLACE, "time": 2})
    assert "height 3, width 1, channel 1 (pre-activation inf)" in finding.sentence
    assert finding["conv"].magnitude.dims == ("time",)
    assert np.isinf(finding["conv"].magnitude[2])


@pytest.mark.one_engine
def test_the_place_in_a_convolutional_layer_whose_adjoint_overflows():
    """All states are 0, so that dL/dh_t grows by 1000 per step back: 4000 times the slopes 0.5 of the gates o and i."""
    model, cell, x = build_conv_lstm(L.Flatten(), L.Dense(1, name="head"))
    kernel = with_value((3, 3, 2, 8), (1, 1, 1, 5), 4000.0)  # the candidate, the third of the gates
    cell.recurrent_kernel.assign(kernel)
    model.get_layer("head").kernel.assign(with_value((40, 1), ((3 * 4 + 1) * 2 + 1, 0), 2.0))
    y = with_value((3, 1), (1, 0), 1e30)
    finding = rl.find_nonfinite(model, x, y, loss=lambda y, p: ops.sum(y * p))
    assert (finding.phase, finding.layer, finding.quantity) == ("backward", "conv", "hidden_grad")
    assert finding.origin.index == {**PLACE, "time": 2}  # 2e30 at step 5, 2e33, 2e36, then 2e39
    assert "recurrent_kernel up to 4e+03" in finding.fed_by


@pytest.mark.one_engine
@pytest.mark.parametrize("steps", [(), (6,)], ids=["last step", "all steps"])
def test_the_place_at_which_the_gradient_above_a_convolutional_layer_overflows(steps):
    model, _, x = build_conv_lstm(L.Dense(1, name="head"), return_sequences=bool(steps))
    model.get_layer("head").kernel.assign(with_value((2, 1), (1, 0), 1e10))
    y = with_value((3, *steps, 5, 4, 1), (1, *([4] if steps else []), 3, 1, 0), 1e30)
    finding = rl.find_nonfinite(model, x, y, loss=lambda y, p: ops.sum(y * p))
    assert (finding.phase, finding.layer, finding.quantity) == ("backward", "conv", "output_grad")
    assert finding.origin.index == {**PLACE, **({"time": 4} if steps else {})}
    assert finding.fed_by == "the backward pass of head"


def test_the_loss_and_the_sample_that_it_cannot_take():
    x, y = data()
    model = build_net(L.LSTM(3))
    model.get_layer("head").set_weights([np.zeros((3, 1)), np.zeros(1)])
    finding = rl.find_nonfinite(model, x, y, loss=lambda y, p: -ops.mean(ops.log(p)))
    assert (finding.phase, finding.sample, finding.unit) == ("loss", 0, 0)
    assert "log of 0 in the loss: output 0" in finding.fed_by


@pytest.mark.one_engine
def test_padding_that_reaches_nothing_is_noted_only():
    """NaN in steps that a cropping layer removes is only noted, since the recurrent layer does not read them."""
    x, y = data()
    x[0, 10:] = np.nan
    finding = rl.find_nonfinite(build_net(L.Cropping1D((0, 2)), L.LSTM(3)), x, y)
    assert not finding
    assert "which does not affect the output" in finding.notes[0]


@pytest.mark.only_on("jax")
def test_an_id_that_is_nan_and_is_cast_to_an_integer_is_noted_only():
    """A NaN id that Keras casts is only noted: JAX reads some row of the table; TensorFlow and torch raise an error."""
    ids, y = np.ones((4, 12), "f"), np.zeros((4, 1), "f")
    ids[1, 5] = np.nan
    model = keras.Sequential([keras.Input((12,)), L.Embedding(10, 3), L.LSTM(3), L.Dense(1)])
    model.compile(loss="mse")
    finding = rl.find_nonfinite(model, ids, y)
    assert not finding
    assert "sample 1" in finding.notes[0]
    assert "cast to an integer" in finding.notes[0]


@pytest.mark.one_engine
def test_saved_and_opened_again(tmp_path):
    x, y = data()
    x[1, 2, 0] = np.inf
    finding = rl.find_nonfinite(build_net(L.LSTM(3, name="lstm")), x, y)
    finding.save(tmp_path / "found.nc")
    opened = rl.open(tmp_path / "found.nc")
    assert opened.origin == finding.origin
    assert str(opened) == str(finding)


def test_a_watch_writes_the_batch_and_the_weights_that_it_met(tmp_path, caplog):
    """If batch 4 contains a NaN, the watch writes that batch and the weights before it, and the file restores both."""
    x, y = data(24)
    x[17, 5, 1] = np.nan
    model = build_net(L.LSTM(3, name="lstm"), L.Dropout(0.0 if LEGACY else 0.2))  # Keras 2 cannot repeat random numbers
    weights_before = []

    class RecordWeights(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4 and engine() != "jax":  # on JAX the model's weights are not current during fit
                weights_before.extend(np.array(w) for w in self.model.weights)

    watch = rl.keras.Watch(tmp_path / "a.zarr", every=0, on_nonfinite="report")
    with caplog.at_level(logging.WARNING, "rnnlens"):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[RecordWeights(), watch])
    incident = rl.open(tmp_path / "a.nonfinite.nc")
    assert incident.step == 5
    np.testing.assert_array_equal(incident.x, x[16:20])
    np.testing.assert_array_equal(incident.y, y[16:20])
    for written, original in zip(incident.weights.values(), weights_before, strict=False):
        np.testing.assert_array_equal(written, original)
    assert all(np.isfinite(w).all() for w in incident.weights.values())
    model.set_weights(list(incident.weights.values()))
    finding = rl.find_nonfinite(model, incident.x, incident.y)
    assert (finding.layer, finding.sample, finding.step) == ("input", 1, 5)
    assert "first at step 5 of sample 1: input, feature 1" in caplog.text


def test_a_finding_ends_fit(tmp_path):
    """A watch with ``stop_on`` ends ``fit`` when gradients explode: at epoch 12 the recurrent kernel becomes 100 I."""
    x, y = data(8)

    class SpoilWeights(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 12:
                cell = self.model.get_layer("rnn").cell
                cell.recurrent_kernel.assign(100.0 * np.eye(4))

    model = build_net(L.SimpleRNN(4, name="rnn", activation="linear"))
    watch = rl.keras.Watch(tmp_path / "a.zarr", probe=(x, y), every=1, stop_on="exploding")
    history = model.fit(x, y, epochs=40, verbose=0, callbacks=[SpoilWeights(), watch])
    run = rl.open(tmp_path / "a.zarr")
    assert 12 <= len(history.epoch) <= 16
    assert run.ended == "stopped"
    assert any("exploding since step" in note for note in run.notes)


@pytest.mark.one_engine
@pytest.mark.parametrize(("name", "value"), [("stop_on", "explodes"), ("on_nonfinite", "stop")])
def test_what_a_watch_cannot_be_told(name, value):
    with pytest.raises(rl.errors.InputError, match=name):
        rl.keras.Watch(None, every=1, **{name: value})


class Between(keras.Model):
    """A model that computes a logarithm outside any layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = L.GRU(3, name="first"), L.Dense(1, name="last")

    def call(self, x):
        return self.last(ops.log(ops.relu(self.first(x) * 0)))


@pytest.mark.one_engine
def test_an_operation_between_the_layers():
    x, y = data()
    model = Between()
    model(x)
    model.compile(loss="mse")
    finding = rl.find_nonfinite(model, x, y)
    assert (finding.phase, finding.layer, finding.quantity) == ("forward", "last", "input")
    assert "between layers, on first.output" in finding.fed_by


@pytest.mark.one_engine
def test_a_layer_that_is_refused_is_left_out_and_named():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 5, 3)).astype("f"), np.zeros((2, 1))
    layers = [L.TimeDistributed(L.LSTM(3, name="inner"), name="each"), L.GRU(3, name="gru"), L.Dense(1)]
    model = keras.Sequential([keras.Input((4, 5, 3)), *layers])
    model.compile(loss="mse")
    finding = rl.find_nonfinite(model, x, y)
    assert not finding
    assert finding.notes[0].startswith("Not looked into: Layer 'each/inner'")
    model.get_layer("each").layer.cell.bias.assign(np.full(12, np.inf))
    assert rl.find_nonfinite(model, x, y).phase == "weights"


@pytest.mark.one_engine("torch", "tf_keras")
def test_a_model_whose_only_layer_is_refused():
    """Data, weights, outputs and loss are looked into; the refused layer is named."""
    halves = L.LSTM(3), L.GRU(3, go_backwards=True)
    model = keras.Sequential([keras.Input((4, 2)), L.Bidirectional(halves[0], backward_layer=halves[1], name="both")])
    model.compile(loss="mse")
    x, y = np.random.default_rng(0).normal(size=(2, 4, 2)).astype("f"), np.zeros((2, 6), "f")
    finding = rl.find_nonfinite(model, x, y)
    assert not finding
    assert finding.notes[0].startswith("Not looked into: Layer 'both'")
    assert rl.find_nonfinite(model, x, y * np.nan).phase == "data"
    gradients = rl.weights(model, x, y)
    assert gradients.certificate.state == "passed"
