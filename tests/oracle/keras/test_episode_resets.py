"""Whether a Keras policy is reset where an episode begins, one step too early, too late, or not at all."""

import keras
import numpy as np
import pytest

import rnnlens as rl

SAMPLES, STEPS = 4, 10
STARTS = np.zeros((SAMPLES, STEPS), dtype="float32")
STARTS[:, 5] = 1


class Policy(keras.Model):
    """A GRU cell in a loop, whose state is kept where ``starts`` are 0."""

    def __init__(self, mode):
        super().__init__()
        self.cell, self.logits, self.mode = keras.layers.GRUCell(6), keras.layers.Dense(2), mode

    def call(self, inputs):
        x, starts = inputs
        h, outputs = keras.ops.zeros((SAMPLES, 6)), []
        for t in range(STEPS):
            keep = 1 - starts[:, t : t + 1]
            h = h * keep if self.mode == "before" else h
            _, (h,) = self.cell(x[:, t], [h])
            outputs.append(self.logits(h))
            h = h * keep if self.mode == "after" else h
        return keras.ops.stack(outputs, axis=1)


@pytest.mark.parametrize(
    ("mode", "shift", "verdict"),
    [("before", 0, "aligned"), ("before", -1, "early"), ("after", 0, "late"), ("", 0, "missing")],
)
def test_three_places_of_a_reset_and_none(mode, shift, verdict):
    keras.utils.set_random_seed(0)
    policy = Policy(mode)
    flags = keras.ops.convert_to_tensor(np.roll(STARTS, shift, axis=1))
    x = np.random.default_rng(0).normal(size=(SAMPLES, STEPS, 3)).astype("float32")
    result = rl.episode_resets(lambda x: policy([keras.ops.convert_to_tensor(x), flags]), x, STARTS)
    assert result.verdict == verdict
    assert result.borders["step"].values.tolist() == [5] * SAMPLES
