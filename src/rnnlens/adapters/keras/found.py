"""Leave a model as it was found, also after an exception or an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state

from ...autodiff import Engine
from .remember import unchanged

__all__ = ["SEEDS", "as_found", "global_state"]

_UNINITIALIZED = "uninitialized_variables"
SEEDS = "global_seed_generator"


@contextmanager
def as_found(model: Any, engine: Engine, seed: int | None = None) -> Iterator[None]:
    """All that layers keep in Python, random generators and Keras' process-wide state come back on exit.

    Variables need no care here: a run reads and writes them inside a ``keras.StatelessScope``.
    """
    pending = list(global_state.get_global_attribute(_UNINITIALIZED, []) or [])
    seeds = global_state.get_global_attribute(SEEDS)
    if seeds is None:
        # Keras would make one from Python's random numbers, and keep it.
        global_state.set_global_attribute(SEEDS, keras.random.SeedGenerator(0, name="rnnlens_seeds"))
    try:
        with unchanged(model), engine.preserved(seed):
            yield
    finally:
        global_state.set_global_attribute(_UNINITIALIZED, pending or None)
        global_state.set_global_attribute(SEEDS, seeds)
