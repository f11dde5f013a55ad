"""Fixtures of the contract tests on Keras: float64 and fixed seeds, on the engine in KERAS_BACKEND."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
from keras_float64 import default_float, enable_float64
from spoken_keras import keras

enable_float64()


@pytest.fixture(scope="module", autouse=True)
def float64():
    """Set Keras' default float dtype to float64."""
    with default_float("float64"):
        yield


@pytest.fixture(autouse=True)
def seeds():
    """Set the random seed of Keras, so that all tests have the same weights."""
    keras.utils.set_random_seed(0)
