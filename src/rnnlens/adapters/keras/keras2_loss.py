"""The loss of ``tf_keras`` models, computed beside the compiled one: calling that moves the metrics of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tf_keras.src.engine.compile_utils import LossesContainer

from ..threads import heard_here


class _Nothing:
    """Stands where the mean of the losses would be kept."""

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept."""


class Losses(LossesContainer):  # type: ignore[misc]  # tf_keras has no types
    """What ``compile`` makes of a loss, without its metrics."""

    def __init__(self, losses: Any, weights: Any = None, names: Any = None) -> None:
        super().__init__(losses, weights, names, total_loss_mean=_Nothing())

    def _create_metrics(self) -> None:
        self._per_output_metrics = [None] * len(self._losses)


@contextmanager
def undisturbed(model: Any, regularised: bool) -> Iterator[None]:
    """A loss beside the compiled one; penalties of weights have a gradient if ``regularised``."""
    own = vars(model)
    compiled = own.get("compiled_loss")
    if compiled is not None:
        own["compiled_loss"] = Losses(compiled._user_losses, compiled._user_loss_weights, compiled._output_names)
    layers = [] if regularised else list(model._flatten_layers())
    penalties = [(vars(layer), vars(layer)["_callable_losses"]) for layer in layers if layer._callable_losses]
    for books, losses in penalties:
        books["_callable_losses"] = [heard_here(_stopped(loss), _named(loss)) for loss in losses]
    try:
        yield
    finally:
        for books, losses in penalties:
            books["_callable_losses"] = losses
        if compiled is not None:
            own["compiled_loss"] = compiled


def _stopped(loss: Any) -> Any:
    def stopped() -> Any:
        value = loss()
        return None if value is None else tf.stop_gradient(value)

    return stopped


def _named(loss: Any) -> Any:
    """A function in the place of a ``functools.partial``, which has no name to be copied."""
    return lambda: loss()
