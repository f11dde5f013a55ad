"""Sentences of findings on Keras models are true: their numbers are computed again, by the layer itself and NumPy."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from keras import layers

import rnnlens as rl

CELLS = {"lstm": lambda: layers.LSTM(6, name="rnn"), "gru": lambda: layers.GRU(6, name="rnn")}


def model_of(cell):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((12, 3)), CELLS[cell](), layers.Dense(1)])


def data():
    x = np.random.default_rng(0).normal(size=(160, 12, 3)).astype("float32")
    return x, x[:, -3, :1].copy()


def said(model, x, y, code):
    """Return the numbers in the sentence of a finding."""
    (text,) = (f.sentence for f in rl.diagnose(model, x, y, loss="mse").findings if f.code == code)
    return [float(n) for n in re.findall(r"\d+\.?\d*", text)]


def states(model, x):
    """Return the states (sample, time, unit) after each step, by one call of the layer for each number of steps."""
    layer = layers.deserialize(keras.saving.serialize_keras_object(model.get_layer("rnn")))
    layer.return_state = True
    layer(x[:1])
    layer.set_weights(model.get_layer("rnn").get_weights())
    by_step = [
        np.concatenate([keras.ops.convert_to_numpy(s) for s in layer(x[:, : t + 1])[1:]], -1) for t in range(x.shape[1])
    ]
    return np.stack(by_step, 1)


def states_without_recurrence(cell, z):
    """Return the states (sample, time, 1) in float64 of a cell whose gates all have the pre-activation ``z``.

    JAX sets subnormal numbers to 0; here they keep their size.
    """
    gate, h, c, by_step = 1 / (1 + np.exp(-z)), 0.0, 0.0, []
    for t in range(z.shape[1]):
        if cell == "gru":
            h = gate[:, t] * h + (1 - gate[:, t]) * np.tanh(z[:, t])
        else:
            c = gate[:, t] * (c + np.tanh(z[:, t]))
            h = gate[:, t] * np.tanh(c)
        by_step.append([h] if cell == "gru" else [h, c])
    return np.moveaxis(by_step, 0, -1)


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_counted_is_as_the_sentences_say(cell):
    x, y = data()
    x[..., 1] = 0.5
    x[:157, 1:] = x[:157, :1]
    x[:, :, 2] *= 1e-36
    x[:, :, 0] = 0
    model = model_of(cell)
    layer = model.get_layer("rnn")
    kernel, *others = layer.get_weights()
    layer.set_weights([np.float32([[0.0], [0.0], [0.05]]) + 0 * kernel, *(0 * weight for weight in others)])
    numbers = np.abs(states_without_recurrence(cell, 0.05 * x[:32, :, 2].astype("float64")))
    share = 100 * np.mean((numbers >= np.finfo("float32").smallest_subnormal) & (numbers < np.finfo("float32").tiny))
    assert said(model, x, y, "UNDERFLOW")[0] == pytest.approx(share, abs=0.51)
    assert said(model, x, y, "CONSTANT_INPUT") == [2, 3]
    assert said(model, x, y, "STATIC_INPUT") == [pytest.approx(100 * 157 / 160, abs=0.51)]


@pytest.mark.parametrize("cell", CELLS)
def test_as_many_states_are_not_finite_as_the_sentence_says(cell):
    x, y = data()
    x[3, 7, 0] = np.nan
    model = model_of(cell)
    numbers = states(model, x[:32])
    assert said(model, x, y, "NONFINITE") == [np.isnan(numbers).sum(), numbers.size, np.isinf(numbers).sum()]
