"""A cell that draws noise: every verb restores all random generators, and a probe leaves the training bit-identical."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
from spoken_keras import LEGACY, engine, keras

import rnnlens as rl

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(4, 3, 2)), rng.normal(size=(4, 2))

SOURCES = {
    "Python": lambda cell, shape: random.random(),
    "NumPy": lambda cell, shape: float(np.random.rand()),  # noqa: NPY002
}
if not LEGACY:
    SOURCES |= {
        "Keras": lambda cell, shape: keras.random.normal(shape),
        "SeedGenerator": lambda cell, shape: keras.random.normal(shape, seed=cell.seeds),
    }
if engine() == "torch":
    import torch

    SOURCES["torch"] = lambda cell, shape: torch.randn(shape, device="cpu")
if engine() == "tensorflow":
    import tensorflow as tf

    SOURCES |= {
        "operation": lambda cell, shape: tf.random.normal(shape, dtype="float64"),
        "Generator": lambda cell, shape: cell.generator.normal(shape, dtype="float64"),
        "global Generator": lambda cell, shape: tf.random.get_global_generator().normal(shape, dtype="float64"),
    }


class NoisyCell(keras.layers.SimpleRNNCell):
    """A cell that adds noise of one source to its state."""

    def __init__(self, source):
        super().__init__(3)
        self.source, self.fail = source, False
        if not LEGACY:
            self.seeds = keras.random.SeedGenerator(3)
        if engine() == "tensorflow":
            self.generator = tf.random.Generator.from_seed(5)

    def call(self, inputs, states, training=False):
        output, _ = super().call(inputs, states, training=training)
        noisy = output + 0.1 * keras.ops.cast(SOURCES[self.source](self, (4, 3)), "float64")
        if self.fail:
            raise ZeroDivisionError
        return noisy, [noisy]


def network(source, eager=True):
    keras.utils.set_random_seed(1)
    if engine() == "tensorflow":
        tf.random.set_global_generator(tf.random.Generator.from_seed(7))
    model = keras.Sequential(
        [keras.Input((3, 2)), keras.layers.RNN(NoisyCell(source), name="rnn"), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse", run_eagerly=eager)
    return model


def draws(model):
    """Draw once more from every source."""
    cell = model.get_layer("rnn").cell
    return [
        np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(d(cell, (4, 3))))) for d in SOURCES.values()
    ]


def fail(y_true, y_pred):
    raise ZeroDivisionError


VERBS = {
    "trace": lambda model, loss: rl.trace(model, X, Y, loss=loss),
    "gradients": lambda model, loss: rl.gradients(model, X, Y, loss=loss, wrt="input"),
    "gradients of outputs": lambda model, loss: rl.gradients(model, X, of="output", wrt="input", reduce="sum"),
    "weights": lambda model, loss: rl.weights(model, X, Y, loss=loss),
    "jacobian": lambda model, loss: rl.jacobian(model, X),
    "find_nonfinite": lambda model, loss: rl.find_nonfinite(model, X, Y, loss=loss),
    "diagnose": lambda model, loss: rl.diagnose(model, X, Y, loss=loss),
    "layers": lambda model, loss: rl.layers(model, X),
    "fixed_points": lambda model, loss: rl.fixed_points(model, X),
    "lyapunov": lambda model, loss: rl.lyapunov(model, X),
    "step_eigenvalues": lambda model, loss: rl.step_eigenvalues(model, X),
}


@pytest.mark.product(keep=("Generator-trace", "operation-jacobian") if engine() == "tensorflow" else ())
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_verb_restores_every_generator(source, verb):
    untouched = draws(network(source))
    for loss, is_failing in (("mse", False), (fail, False), ("mse", True)):
        model = network(source)
        model.get_layer("rnn").cell.fail = is_failing
        with suppress(rl.errors.UnsupportedError, ZeroDivisionError):  # what a cell that draws cannot have, and ours
            VERBS[verb](model, loss)
        for draw, expected in zip(draws(model), untouched, strict=True):
            np.testing.assert_array_equal(draw, expected)


@pytest.mark.product(keep=("global Generator-eager", "operation-eager") if engine() == "tensorflow" else ())
@pytest.mark.filterwarnings("ignore::rnnlens.errors.TrackingWarning")  # the probe cannot be traced
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_probe_leaves_the_training_bit_identical(source, mode):
    trained = []
    for callbacks in ([], [rl.keras.Watch(probe=(X, Y), every=1, loggers=Discarded())]):
        model = network(source, eager=mode == "eager")
        model.fit(X, Y, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        trained.append(model.get_weights())
    for weight, expected in zip(*trained, strict=True):
        np.testing.assert_array_equal(weight, expected)


class Discarded:
    """A logger that keeps nothing."""

    def write(self, record):
        pass

    def close(self, reason):
        pass
