"""Everything here computes in float64, on the engine that KERAS_BACKEND names."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
from keras_float64 import floats, lift
from spoken_keras import keras

lift()


@pytest.fixture(scope="module", autouse=True)
def float64():
    """float64 unless a layer says otherwise."""
    with floats("float64"):
        yield


@pytest.fixture(autouse=True)
def seeds():
    """The same weights every time."""
    keras.utils.set_random_seed(0)
