"""Keras in float64 on every engine (on JAX and torch it rounds to float32 unless told not to), and no run twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import pytest
from keras.src.backend.common import dtypes

import rnnlens as rl


def lift() -> None:
    """Let this process compute in float64; to be called before the engine computes anything."""
    if keras.backend.backend() != "tensorflow":
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)


@contextmanager
def floats(dtype: str) -> Iterator[None]:
    """The floating type of everything that Keras makes, losses too."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)  # Keras keeps the policy that the first layer of the process was given
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def float64() -> Iterator[None]:
    """float64, and the same weights every time."""
    with floats("float64"):
        keras.utils.set_random_seed(1)
        yield


@pytest.fixture
def uncertified() -> Iterator[None]:
    """No certificate where its run would be compiled too: for numbers that a test holds against more than it does."""
    with rl.options(certify="auto" if keras.backend.backend() == "torch" else "never"):
        yield
