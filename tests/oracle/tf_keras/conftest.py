"""``tf_keras`` and TensorFlow without Keras 3; float64 for the files that ask for it."""

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
    """The same weights every time."""
    tf_keras.utils.set_random_seed(0)
