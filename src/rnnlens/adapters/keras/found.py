"""Leave a model as it was found, also after an exception or an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state

from .engines import Engine

__all__ = ["SEEDS", "as_found", "global_state"]

_UNINITIALIZED = "uninitialized_variables"
SEEDS = "global_seed_generator"


@contextmanager
def as_found(model: Any, engine: Engine, seed: int | None = None) -> Iterator[None]:
    """Attributes of every layer, recorded losses, random generators and Keras' process-wide state come back on exit.

    Variables need no care here: a run reads and writes them inside a ``keras.StatelessScope``.
    """
    layers = list(model._flatten_layers())
    attributes = [(vars(layer), dict(vars(layer))) for layer in layers]
    losses = [(layer._losses, list(layer._losses), layer._loss_ids, set(layer._loss_ids)) for layer in layers]
    pending = list(global_state.get_global_attribute(_UNINITIALIZED, []) or [])
    seeds = global_state.get_global_attribute(SEEDS)
    if seeds is None:
        # Keras would make one from Python's random numbers, and keep it.
        global_state.set_global_attribute(SEEDS, keras.random.SeedGenerator(0, name="rnnlens_seeds"))
    try:
        with engine.preserved(seed):
            yield
    finally:
        for now, before in attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for now_losses, before_losses, now_ids, before_ids in losses:
            now_losses[:] = before_losses
            now_ids.clear()
            now_ids.update(before_ids)
        global_state.set_global_attribute(_UNINITIALIZED, pending or None)
        global_state.set_global_attribute(SEEDS, seeds)
