"""The engine that Keras runs on in this process; masks go along wherever it puts one tensor in the place of another."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from ...autodiff import Engine, engine


def current() -> Engine:
    """The engine that Keras runs on in this process."""
    return engine(keras.backend.backend(), with_mask)


def with_mask(old: Any, new: Any) -> Any:
    """The new tensor, with the mask that Keras attached to the old one."""
    mask = get_keras_mask(old)
    if mask is not None:
        set_keras_mask(new, mask)
    return new
