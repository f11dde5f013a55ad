"""Values of Keras' variables and tensors as NumPy arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ...typing import Array
from .engines import current


def value_of(tensor: Any) -> Array:
    """A copy of the value of a variable or tensor; halves become float32.

    By way of the engine: where Keras itself asks a variable for an array, NumPy warns of how Keras gives it.
    """
    array = current().to_array(keras.ops.convert_to_tensor(tensor))
    return np.array(array.cpu().numpy() if hasattr(array, "cpu") else array)
