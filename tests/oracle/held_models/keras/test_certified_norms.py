"""Certificates of a time Jacobian that was computed as norms, on every engine."""

import keras
import numpy as np
import pytest
from keras import layers

import rnnlens as rl
from rnnlens.verbs.time_jacobian.segments import Segment

X = np.random.default_rng(0).normal(size=(3, 5, 2)).astype("float32")


def chain():
    return keras.Sequential([keras.Input((5, 2)), layers.LSTM(4, return_sequences=True), layers.Dense(3, "tanh")])


def graph():
    inputs = keras.Input((5, 2))
    hidden = layers.Bidirectional(layers.GRU(3, return_sequences=True))(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.LayerNormalization()(hidden)) + inputs)


def single_step():
    """Return a model with one time step and an input without a time axis."""
    return keras.Sequential([keras.Input((10,)), layers.Reshape((1, 10)), layers.GRU(4), layers.Dense(2)])


def frames():
    """Return a model with an image at each step as input and as output."""
    inputs = keras.Input((5, 2, 2, 1))
    hidden = layers.GRU(4, return_sequences=True)(layers.TimeDistributed(layers.Flatten())(inputs))
    return keras.Model(inputs, layers.Reshape((5, 2, 2))(layers.Dense(4, "tanh")(hidden)))


FRAMES = np.random.default_rng(1).normal(size=(3, 5, 2, 2, 1)).astype("float32")
MODELS = {
    "chain": (chain, X),
    "graph": (graph, X),
    "gradients by step": (single_step, X.reshape(3, 10)),
    "frames": (frames, FRAMES),
}
MEASURES = {
    "norm": {"measure": "norm"},
    "magnitudes": {"measure": "abs_mean", "across": "mean"},
    "sketch": {"sketch": 3},
}


def certified_jacobian(model, **options):
    keras.utils.set_random_seed(0)
    make, x = MODELS[model]
    with rl.options(certify="always"):
        return rl.jacobian(make(), x, **options)


@pytest.mark.compiled("chain-norm")
@pytest.mark.product(keep=("chain-norm", "graph-magnitudes"))
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("chain", "norm"),
        ("graph", "magnitudes"),
        ("gradients by step", "magnitudes"),
        ("gradients by step", "sketch"),
        ("frames", "norm"),
    ],
)
def test_it_passes(model, options):
    jacobian = certified_jacobian(model, **MEASURES[options])
    assert jacobian.attrs["certificate"].startswith("certified against")
    assert "before they were measured" in jacobian.attrs["certificate"]


@pytest.mark.product(keep=("frames",))
@pytest.mark.parametrize("model", ["chain", "graph", "frames"])
def test_a_planted_fault_is_named(model, monkeypatch):
    for name in ("apply", "at_every_step"):
        original = getattr(Segment, name)
        monkeypatch.setattr(Segment, name, lambda *args, original=original: original(*args) * 1.01)
    with pytest.warns(rl.errors.SelfCheckWarning, match="differ from the reference run of the model"):
        jacobian = certified_jacobian(model, measure="norm")
    assert jacobian.attrs["certificate"].startswith("NOT certified")
