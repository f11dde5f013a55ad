"""``rl.keras.cuts``: planted cuts of Keras models, and the gradients of backpropagation by hand."""

from __future__ import annotations

import linecache

import keras
import keras.ops as knp
import numpy as np
import pytest
from keras import ops
from keras.ops import stop_gradient

import rnnlens as rl

pytestmark = pytest.mark.usefixtures("float64")

if keras.backend.backend() == "jax":
    from jax.lax import stop_gradient as stop_of_engine
elif keras.backend.backend() == "tensorflow":
    from tensorflow import stop_gradient as stop_of_engine
else:
    from keras.ops import stop_gradient as stop_of_engine

STEPS, UNITS, BATCHES = 6, 3, 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(BATCHES, 2, STEPS, 2)), RNG.normal(size=(BATCHES, 2, 1))


class Cut(keras.layers.Layer):
    """A tanh cell that stops the gradient of its state."""

    def __init__(self):
        super().__init__()
        self.state_size = self.output_size = UNITS

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], UNITS), name="kernel")
        self.recurrent = self.add_weight(shape=(UNITS, UNITS), name="recurrent", initializer="glorot_uniform")

    def call(self, x, states):
        kept = ops.stop_gradient(states[0])  # cut
        h = ops.tanh(x @ self.kernel + kept @ self.recurrent)
        return h, [h]


class CutByName(Cut):
    """The same, with a function that the program imported by its own name."""

    def __init__(self, stop):
        super().__init__()
        self.stop = stop

    def call(self, x, states):
        h = ops.tanh(x @ self.kernel + self.stop(states[0]) @ self.recurrent)
        return h, [h]


class Remembering(keras.layers.Layer):
    """A layer that keeps its last state in a variable of its own."""

    def __init__(self):
        super().__init__()
        self.rnn = keras.layers.SimpleRNN(UNITS, return_state=True)

    def build(self, shape):
        self.rnn.build(shape)
        self.kept = self.add_weight(shape=(2, UNITS), trainable=False, initializer="zeros", name="kept")

    def call(self, x):
        output, state = self.rnn(x, initial_state=[self.kept.value])
        self.kept.assign(state)  # cut
        return output

    def compute_output_shape(self, shape):
        return (shape[0], UNITS)


def model_of(*layers):
    model = keras.Sequential([keras.Input((STEPS, 2), batch_size=2), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def weights_of(model):
    return [keras.ops.convert_to_numpy(w) for w in model.trainable_variables]


def loss_by_hand(weights, cut_at):
    """Return the sum of the losses of all batches by NumPy, and its gradient by hand.

    ``cut_at(batch, step)``: whether the gradient by the state before this step is dropped.
    """
    kernel, recurrent, bias, head, offset = (
        weights if len(weights) == 5 else (*weights[:2], np.zeros(UNITS), *weights[2:])
    )
    steps, h = [], np.zeros((2, UNITS))
    grads = [np.zeros_like(w) for w in (kernel, recurrent, bias, head, offset)]
    for batch in range(BATCHES):
        for t in range(STEPS):
            before = h if t or len(weights) == 5 else np.zeros((2, UNITS))
            h = np.tanh(X[batch, :, t] @ kernel + before @ recurrent + bias)
            steps.append((batch, t, before, h))
    from_later = np.zeros((2, UNITS))
    for batch, t, before, h in reversed(steps):
        total = from_later
        if t == STEPS - 1:
            error = 2 * (h @ head + offset - Y[batch]) / Y[batch].size
            grads[3] += h.T @ error
            grads[4] += error.sum(0)
            total = total + error @ head.T
        z = total * (1 - h**2)
        grads[0] += X[batch, :, t].T @ z
        grads[1] += before.T @ z
        grads[2] += z.sum(0)
        is_own_start = t == 0 and len(weights) == 4
        from_later = np.zeros_like(z) if cut_at(batch, t) or is_own_start else z @ recurrent.T
    chosen = grads if len(weights) == 5 else [*grads[:2], *grads[3:]]
    return np.concatenate([g.reshape(-1) for g in chosen])


def assert_price(price, used, full):
    norms = np.linalg.norm(used), np.linalg.norm(full)
    assert price.norm_ratio == pytest.approx(norms[0] / norms[1], rel=1e-10)
    assert price.cosine == pytest.approx(used @ full / norms[0] / norms[1], rel=1e-10)


BATCH_LIST = [(X[i], Y[i]) for i in range(BATCHES)]


def test_a_cell_that_stops_the_gradient_has_its_line_and_its_price():
    model = model_of(keras.layers.RNN(Cut()))
    before = weights_of(model)
    found = rl.keras.cuts(model, BATCH_LIST)
    (cut,) = found.cuts
    assert (cut.operation, cut.count) == ("stop_gradient", BATCHES * STEPS)
    assert "# cut" in linecache.getline(cut.file, cut.line)
    full = loss_by_hand(before, lambda batch, t: False)
    assert_price(found.price, loss_by_hand(before, lambda batch, t: True), full)
    for window in (2, 4, 8):
        used = loss_by_hand(before, lambda batch, t, window=window: (batch * STEPS + t) % window == 0)
        assert_price(found.by_window[window], used, full)
    steps = [batch * STEPS + t for batch in range(BATCHES) for t in range(STEPS - 1)]
    assert (list(found.left_out), list(found.cut_off)) == ([], steps)
    assert all(np.array_equal(a, b) for a, b in zip(weights_of(model), before, strict=True))


def global_name(x):
    return stop_gradient(x)  # cut


def aliased_module(x):
    return knp.stop_gradient(x)  # cut


def name_of_the_engine(x):
    return stop_of_engine(x)  # cut


def closed_over():
    stop = stop_of_engine
    return lambda x: stop(x)  # cut


@pytest.mark.parametrize("kind", ["global name", "aliased module", "name of the engine", "closed over"])
def test_a_function_that_was_imported_by_name_is_found_by_its_line(kind):
    stop = {
        "global name": global_name,
        "aliased module": aliased_module,
        "name of the engine": name_of_the_engine,
        "closed over": closed_over(),
    }[kind]
    functions = stop_of_engine, stop_gradient
    model = model_of(keras.layers.RNN(CutByName(stop)))
    before = weights_of(model)
    found = rl.keras.cuts(model, BATCH_LIST)
    (cut,) = found.cuts
    assert cut.count == BATCHES * STEPS
    assert "# cut" in linecache.getline(cut.file, cut.line)
    full = loss_by_hand(before, lambda batch, t: False)
    assert_price(found.price, loss_by_hand(before, lambda batch, t: True), full)
    assert (stop_of_engine, stop_gradient) == functions


@pytest.mark.parametrize("layer", ["stateful", "of the user"])
def test_states_between_batches_are_cuts(layer):
    own = layer == "of the user"
    model = model_of(Remembering() if own else keras.layers.SimpleRNN(UNITS, stateful=True))
    before = weights_of(model)
    found = rl.keras.cuts(model, BATCH_LIST)
    (cut,) = found.cuts
    assert cut.count == BATCHES - 1
    if own:
        assert "# cut" in linecache.getline(cut.file, cut.line)
    else:
        assert (cut.line, cut.code) == (0, f"layer {model.layers[0].name!r} (stateful=True)")
        assert "state kept between batches, 2 times: layer" in str(found)
    full = loss_by_hand(before, lambda batch, t: False)
    assert_price(found.price, loss_by_hand(before, lambda batch, t: t == 0), full)
    assert not any(np.any(keras.ops.convert_to_numpy(v)) for v in states_of(model))


def states_of(model):
    layer = model.layers[0]
    return [layer.kept] if isinstance(layer, Remembering) else layer.states


def test_an_operation_of_the_graph_is_named_and_slices_and_masks_are_no_cuts():
    inputs = keras.Input((STEPS, 2))
    states = keras.layers.GRU(UNITS, return_sequences=True)(inputs[:, 1:])
    stopped = ops.stop_gradient(states[:, 1])
    masked = keras.layers.GRU(UNITS)(keras.layers.Masking()(inputs[:, 1:]))
    model = keras.Model(inputs, keras.layers.Dense(1)(stopped) + keras.layers.Dense(1)(masked))
    model.compile("sgd", "mse")
    x = X[0].copy()
    x[:, 3:] = 0
    found = rl.keras.cuts(model, [(x, Y[0])])
    (cut,) = found.cuts
    assert (cut.operation, cut.line, cut.count) == ("stop_gradient", 0, 1)
    assert "operation 'stop_gradient" in cut.code
    assert list(found.left_out) == [0, *range(3, STEPS)]
    assert "Input steps without a gradient, also without cuts: 0, 3-5" in str(found)


def test_a_model_without_cuts_says_so():
    found = rl.keras.cuts(model_of(keras.layers.LSTM(UNITS)), BATCH_LIST)
    assert found.cuts == []
    assert "No cut: the gradient of 3 backward passes" in str(found)


@pytest.mark.parametrize(("batches", "text"), [([], "no batch"), ([X[0]], "pair")])
def test_what_is_no_batch_is_refused(batches, text):
    with pytest.raises(rl.errors.InputError, match=text):
        rl.keras.cuts(model_of(keras.layers.LSTM(UNITS)), batches)
