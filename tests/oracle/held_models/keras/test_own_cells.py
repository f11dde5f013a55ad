"""Gradients of states inside a user's own cells, taken at the operation that computes the state.

A hand-written LSTM must agree with ``keras.layers.LSTM``. Each other cell can add a small number to its state where the
state is computed; the central difference of the unchanged model's loss is then dL/ds_t.
"""

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.usefixtures("float64", "uncertified")

RNG = np.random.default_rng(0)
TIME, UNITS = 4, 3
X = RNG.normal(size=(2, TIME, 2))
STEP = 1e-6


def total(y, out):
    return keras.ops.sum(keras.ops.sin(out) * (1.0 + keras.ops.cast(keras.ops.arange(out.shape[-1]), out.dtype)))


class Cell(keras.layers.Layer):
    """Base of these cells: the weights of ``gates`` gates, and a perturbation of one state at one step."""

    gates, state_size, output_size = 1, (UNITS,), UNITS

    def __init__(self, **options):
        super().__init__(**options)
        self.perturbation = None  # (which state, step, sample, unit, size)
        self.step = 0

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.gates * UNITS), name="kernel")
        self.recurrent = self.add_weight(shape=(UNITS, self.gates * UNITS), name="recurrent")

    def gate_inputs(self, x, h):
        return keras.ops.split(x @ self.kernel + h @ self.recurrent, self.gates, axis=-1)

    def perturbed(self, state_index, state):
        if self.perturbation is None or self.perturbation[0] != state_index or self.perturbation[1] != self.step:
            return state
        bump = np.zeros(tuple(state.shape))
        bump[self.perturbation[2:4]] = self.perturbation[4]
        return state + keras.ops.convert_to_tensor(bump, dtype=state.dtype)


class LstmByHand(Cell):
    gates, state_size = 4, (UNITS, UNITS)

    def call(self, x, states):
        i, f, g, o = self.gate_inputs(x, states[0])
        i, f, o = keras.ops.sigmoid(i), keras.ops.sigmoid(f), keras.ops.sigmoid(o)
        c = self.perturbed(1, f * states[1] + i * keras.ops.tanh(g))
        h = self.perturbed(0, o * keras.ops.tanh(c))
        return h, [h, c]


class Gained(Cell):
    """A cell whose output is computed from the state but is not a state."""

    def call(self, x, states):
        h = self.perturbed(0, keras.ops.tanh(self.gate_inputs(x, states[0])[0]))
        return h * 2.0 + x[:, :1], [h]


class OutputFirst(Cell):
    """A cell whose state is computed from the output."""

    def call(self, x, states):
        y = keras.ops.tanh(self.gate_inputs(x, states[0])[0])
        h = self.perturbed(0, y * 0.5)
        return y, [h]


class PassedOn(Cell):
    """A cell with a second state that each step reads and none changes."""

    state_size = (UNITS, UNITS)

    def call(self, x, states):
        h = self.perturbed(0, keras.ops.tanh(self.gate_inputs(x, states[0])[0] + states[1]))
        return h, [h, states[1]]


class LayersInside(Cell):
    """A cell that contains layers, with a second state that the output depends on."""

    state_size, output_size = (UNITS, UNITS), 2

    def __init__(self, **options):
        super().__init__(**options)
        self.mix, self.read = keras.layers.Dense(UNITS, activation="tanh"), keras.layers.Dense(2)

    def build(self, shape):
        super().build(shape)
        self.mix.build((None, UNITS + shape[-1]))
        self.read.build((None, UNITS))

    def call(self, x, states):
        m = self.perturbed(1, 0.7 * states[1] + self.gate_inputs(x, states[0])[0])
        h = self.perturbed(0, self.mix(keras.ops.concatenate([m, x], axis=-1)))
        return self.read(h) * m[:, :2], [h, m]


CELLS = [LstmByHand, Gained, OutputFirst, PassedOn, LayersInside]


def loop_loss(cell, x, sequences):
    """Return the loss of a cell called in a Python loop."""
    states = [keras.ops.zeros((x.shape[0], UNITS)) for _ in cell.state_size]
    outputs = []
    for t in range(TIME):
        cell.step = t
        out, states = cell(keras.ops.convert_to_tensor(x[:, t]), states)
        outputs.append(out)
    return float(keras.ops.convert_to_numpy(total(None, keras.ops.stack(outputs, 1) if sequences else outputs[-1])))


@pytest.mark.one_engine
@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_every_state_where_it_is_computed(kind, sequences):
    cell = kind()
    model = keras.Sequential([keras.Input((TIME, 2)), keras.layers.RNN(cell, return_sequences=sequences, name="rnn")])
    trace = rl.trace(model, X, loss=total)["rnn"]
    assert loop_loss(cell, X, sequences) == pytest.approx(float(keras.ops.convert_to_numpy(total(None, model(X)))))
    for state_index in range(1 if kind is PassedOn else len(cell.state_size)):
        name = ["hidden_grad", "state_1_grad"][state_index]
        for step, sample, unit in [(TIME - 1, 0, 1), (0, 1, 2), (2, 1, 0)]:
            losses = []
            for size in (STEP, -STEP):
                cell.perturbation = (state_index, step, sample, unit, size)
                losses.append(loop_loss(cell, X, sequences))
            cell.perturbation = None
            expected = (losses[0] - losses[1]) / (2 * STEP)
            assert float(trace[name][sample, step, unit]) == pytest.approx(expected, rel=1e-6, abs=1e-8), (name, step)


@pytest.mark.one_engine
@pytest.mark.parametrize("sequences", [True, False])
def test_an_lstm_by_hand_is_the_lstm(sequences):
    cell, builtin = LstmByHand(), keras.layers.LSTM(UNITS, use_bias=False, return_sequences=sequences, name="rnn")
    inputs = keras.Input((TIME, 2))
    by_hand = keras.Model(inputs, keras.layers.RNN(cell, return_sequences=sequences, name="rnn")(inputs))
    reference = keras.Model(inputs, builtin(inputs))
    builtin.set_weights(cell.get_weights())
    actual, expected = rl.trace(by_hand, X, loss=total)["rnn"], rl.trace(reference, X, loss=total)["rnn"]
    np.testing.assert_allclose(actual["hidden_grad"], expected["hidden_grad"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(actual["state_1_grad"], expected["cell_grad"], rtol=1e-9, atol=1e-12)
    for of, wrt, builtin_wrt in (
        ("output", "state_1", "cell"),
        ("state_1", "hidden", "hidden"),
        ("state_1", "state_1", "cell"),
    ):
        builtin_of = of.replace("state_1", "cell")
        builtin_of = builtin_of if of == "output" else f"rnn.{builtin_of}"
        for mode in ("reverse", "forward"):
            j = rl.jacobian(by_hand, X, of=of if of == "output" else f"rnn.{of}", wrt=f"rnn.{wrt}", mode=mode)
            k = rl.jacobian(reference, X, of=builtin_of, wrt=f"rnn.{builtin_wrt}", mode=mode)
            np.testing.assert_allclose(j, k, rtol=1e-9, atol=1e-12)


@pytest.mark.one_engine
def test_stacked_cells_are_stacked_layers():
    """Stacked cells have the state gradients of stacked layers: the upper cell reads the lower's current state."""
    rnn = keras.layers.RNN([keras.layers.GRUCell(UNITS), keras.layers.SimpleRNNCell(UNITS)], name="rnn")
    inputs = keras.Input((TIME, 2))
    stacked_cells = keras.Model(inputs, rnn(inputs))
    lower = keras.layers.GRU(UNITS, return_sequences=True, name="lower")
    upper = keras.layers.SimpleRNN(UNITS, name="upper")
    stacked_layers = keras.Model(inputs, upper(lower(inputs)))
    stacked_layers.set_weights(stacked_cells.get_weights())
    actual, expected = rl.trace(stacked_cells, X, loss=total)["rnn"], rl.trace(stacked_layers, X, loss=total)
    np.testing.assert_allclose(actual["hidden_grad"], expected["lower"]["hidden_grad"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(actual["state_1_grad"], expected["upper"]["hidden_grad"], rtol=1e-9, atol=1e-12)


@pytest.mark.one_engine
def test_an_output_that_equals_the_state_by_chance():
    class Gate(Cell):
        def build(self, shape):
            super().build(shape)
            self.gain = self.add_weight(shape=(1,), initializer="zeros", name="gain")

        def call(self, x, states):
            h = keras.ops.tanh(self.gate_inputs(x, states[0])[0])
            return h + self.gain * x[:, :1], [h]

    cell = Gate()
    model = keras.Sequential([keras.Input((TIME, 2)), keras.layers.RNN(cell, return_sequences=True, name="rnn")])
    gain_grad = rl.weights(model, X, loss=total)["rnn"]["gain_grad"]
    losses = []
    for size in (STEP, -STEP):
        cell.gain.assign([size])
        losses.append(float(keras.ops.convert_to_numpy(total(None, model(X)))))
    assert float(gain_grad[0]) == pytest.approx((losses[0] - losses[1]) / (2 * STEP), rel=1e-6)
