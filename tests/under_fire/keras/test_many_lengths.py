"""Each sequence length is compiled once; above the bound, the least recently used compiled function is dropped."""

import keras
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.autodiff import Memo

#: Compilations are counted only on JAX, where they are separate from tracing.
COMPILES = keras.backend.backend() == "jax"


@pytest.fixture
def compilations(monkeypatch):
    """Provide a function that returns the number of compilations since its last call."""
    count, executable = [], Memo.executable
    monkeypatch.setattr(
        Memo, "executable", lambda memo, trace, make: executable(memo, trace, lambda: [count.append(1), make()][1])
    )

    def count_since_last():
        total = len(count)
        count.clear()
        return total

    return count_since_last


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 1))
    return keras.Model(inputs, keras.layers.SimpleRNN(2, return_sequences=True, name="rnn")(inputs))


def cycle(model, lengths):
    for length in lengths:
        rl.trace(model, np.ones((1, length, 1), "float32"), quantities="hidden")


def test_many_lengths_compile_once_each(model, compilations):
    with rl.options(certify="never"):
        cycle(model, range(3, 13))
        assert compilations() == 10 * COMPILES
        cycle(model, range(3, 13))
        assert compilations() == 0


def test_the_bound_is_the_users_and_the_least_used_goes(model, compilations):
    with rl.options(certify="never", compiled=2):
        cycle(model, [3, 4, 3, 5])  # drops 4
        assert compilations() == 3 * COMPILES
        cycle(model, [3])
        assert compilations() == 0
        cycle(model, [4])
        assert compilations() == COMPILES
    with pytest.raises(rl.errors.InputError, match="compiled= must be a whole number"):
        rl.options(compiled=0)
