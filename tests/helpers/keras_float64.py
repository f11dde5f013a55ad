"""Keras in float64 on every engine (on JAX and torch it rounds to float32 unless told not to), and no run twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from spoken_keras import LEGACY, engine, floatx, keras, set_floats

import rnnlens as rl


def lift() -> None:
    """Let this process compute in float64; to be called before the engine computes anything."""
    if engine() != "tensorflow":
        from keras.src.backend.common import dtypes

        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    if engine() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)


@contextmanager
def floats(dtype: str) -> Iterator[None]:
    """The floating type of everything that Keras makes, losses too."""
    before, policy = floatx(), None if LEGACY else keras.config.dtype_policy()
    set_floats(dtype)
    yield
    set_floats(before)
    if policy is not None:
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
    with rl.options(certify="auto" if engine() == "torch" else "never"):
        yield
