"""float64 for every engine: on JAX and torch, Keras computes float64 in float32 unless it is told not to."""

import keras
from keras.src.backend.common import dtypes

dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"

if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)
