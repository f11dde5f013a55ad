"""Everything here computes in float64, on the engine that KERAS_BACKEND names."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest

if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)

if keras.backend.backend() != "tensorflow":
    from keras.src.backend.common import dtypes

    # Outside TensorFlow Keras rounds the results of some operations on float64 (matmul, tanh) to float32.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


@pytest.fixture(scope="module", autouse=True)
def float64():
    """float64 unless a layer says otherwise."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)


@pytest.fixture(autouse=True)
def seeds():
    """The same weights every time."""
    keras.utils.set_random_seed(0)
