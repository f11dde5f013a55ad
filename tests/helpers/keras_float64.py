"""Keras in float64 on every engine (by default JAX and torch round to float32), and a switch for certificates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from spoken_keras import LEGACY, engine, floatx, keras, set_floats

import rnnlens as rl


def enable_float64() -> None:
    """Enable float64 in this process; call it before the engine computes anything."""
    if engine() != "tensorflow":
        from keras.src.backend.common import dtypes

        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    if engine() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)


@contextmanager
def default_float(dtype: str) -> Iterator[None]:
    """Set Keras' default float dtype within the block, that of losses included."""
    before, policy = floatx(), None if LEGACY else keras.config.dtype_policy()
    set_floats(dtype)
    yield
    set_floats(before)
    if policy is not None:
        keras.config.set_dtype_policy(policy)


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in float64 with seeded weights, within the block."""
    with default_float("float64"):
        keras.utils.set_random_seed(1)
        yield


@pytest.fixture
def uncertified() -> Iterator[None]:
    """Disable certificates on engines that would compile the reference run; the test compares more numbers itself."""
    with rl.options(certify="auto" if engine() == "torch" else "never"):
        yield
