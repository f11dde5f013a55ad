"""Fixtures for ``tf_keras`` on TensorFlow, without Keras 3: fixed seeds, and float64 on request."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["RNNLENS_TESTED_KERAS"] = "tf_keras"

import pytest
import tf_keras
from keras_float64 import float64

__all__ = ["float64"]


@pytest.fixture(autouse=True)
def seeds():
    """Set the random seeds, so that every test has the same weights."""
    tf_keras.utils.set_random_seed(0)
