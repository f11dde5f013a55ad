"""Python state of a model (counters, lists, last values, random numbers) is restored after each call.

An engine may call a model several times for one result; each call must start from the restored state.
"""

import random

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.compiled

X = np.random.default_rng(0).normal(size=(3, 5, 2)).astype("float32")
Y = np.ones((3, 4), "float32")


class Notes:
    def __init__(self):
        self.count, self.seen = 0, {"lengths": []}


class CountingCell(keras.layers.Layer):
    """A cell with the Python state that users add to debug a cell."""

    state_size, output_size = 4, 4

    def __init__(self, raises=False):
        super().__init__()
        self.calls, self.sizes, self.notes, self.last, self.raises = 4, [1, 2], Notes(), None, raises
        self.array, self.rng = np.zeros(2), np.random.default_rng(3)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.recurrent = self.add_weight(shape=(4, 4), name="recurrent")

    def call(self, x, states):
        self.calls += 1
        self.sizes.append(self.calls)
        self.notes.count += 1
        self.notes.seen["lengths"].append(x.shape)
        self.array += 1
        self.last = x
        self.rng.normal()
        if self.raises:
            raise ValueError("the cell's own error")
        h = keras.ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return h, [h]


def python_state(cell):
    notes = cell.notes
    return (
        *(cell.calls, list(cell.sizes), notes.count, list(notes.seen["lengths"]), cell.array.tolist(), id(cell.last)),
        str(cell.rng.bit_generator.state),
    )


@pytest.mark.product(keep=("trace", "jacobian"))
@pytest.mark.parametrize("verb", ["trace", "gradients", "jacobian", "weights"])
def test_a_cell_is_left_as_found(verb):
    cell = CountingCell()
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.RNN(cell, name="rnn")])
    before = python_state(cell)
    if verb == "trace":
        rl.trace(model, X, Y, loss="mse")
    elif verb == "gradients":
        rl.gradients(model, X, Y, loss="mse", wrt=["input", "rnn.hidden"])
    elif verb == "jacobian":
        rl.jacobian(model, X)
    else:
        rl.weights(model, X, Y, loss="mse")
    assert python_state(cell) == before


@pytest.mark.product
@pytest.mark.parametrize("verb", [rl.trace, rl.gradients])
def test_also_after_an_exception(verb):
    cell = CountingCell()
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.RNN(cell, name="rnn")])
    cell.raises = True
    before = python_state(cell)
    with pytest.raises(Exception, match="the cell's own error"):
        verb(model, X, Y, loss="mse")
    assert python_state(cell) == before


class Counting(keras.Model):
    """A model whose output depends on the number of its calls."""

    def __init__(self):
        super().__init__()
        self.lstm, self.calls = keras.layers.LSTM(4, name="lstm"), 0

    def call(self, x):
        self.calls += 1
        return self.lstm(x) * float(self.calls)


@pytest.mark.one_engine("jax", "torch")
def test_a_counter_counts_the_run_once():
    model = Counting()
    model(X)
    before = model.calls
    expected = np.full((3, 4), before + 1.0)  # factor in the next run of the model
    for _ in range(2):
        trace = rl.trace(model, X, Y, loss=lambda y, out: keras.ops.sum(out))
        output_grad = rl.gradients(model, X, Y, loss=lambda y, out: keras.ops.sum(out), wrt="lstm.output")
        assert model.calls == before
        np.testing.assert_array_equal(trace["lstm"].output_grad, expected)
        np.testing.assert_array_equal(output_grad, expected)
    assert trace.loss == pytest.approx(float(keras.ops.convert_to_numpy(keras.ops.sum(model(X)))), rel=1e-5)


@pytest.mark.one_engine("jax", "torch")
def test_what_python_draws_is_drawn_anew_and_put_back():
    scale = keras.layers.Lambda(lambda x: x * random.choice([1.0, 10.0, 100.0, 1000.0]))
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.LSTM(4, name="lstm"), scale])
    factors = set()
    for seed in range(6):
        random.seed(seed)
        expected = random.choice([1.0, 10.0, 100.0, 1000.0])
        random.seed(seed)
        trace = rl.trace(model, X, Y, loss=lambda y, out: keras.ops.sum(out))
        assert random.choice([1.0, 10.0, 100.0, 1000.0]) == expected
        np.testing.assert_array_equal(trace["lstm"].output_grad, np.full((3, 4), expected))
        factors.add(expected)
    assert len(factors) > 1


@pytest.mark.one_engine("jax", "torch")
def test_what_a_closure_counts():
    count, counts = 0, []

    def counting(x):
        nonlocal count
        count += 1
        counts.append(count)
        return x

    model = keras.Sequential([keras.Input((5, 2)), keras.layers.LSTM(4), keras.layers.Lambda(counting)])
    before = count, list(counts)
    rl.trace(model, X, Y, loss="mse")
    rl.jacobian(model, X)
    assert (count, counts) == before
