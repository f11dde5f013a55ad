"""A model as it was before training, as far as that can be made: a copy with fresh weights."""

from __future__ import annotations

from typing import Any

from ..adapters.registry import adapter_for
from ..errors import UnsupportedError, message


def untrained(model: Any, seed: int) -> Any:
    """A copy of the model with fresh weights.

    Raises
    ------
    UnsupportedError
        If the model cannot be built anew: then the model before training has to be passed.
    """
    adapter = adapter_for(model)
    fresh = getattr(adapter, "untrained", None)
    if fresh is None:
        raise UnsupportedError(
            message(
                'baseline="init" needs an adapter that can build a model anew.',
                got=adapter.name,
                hint="pass a copy of the model from before training: baseline=that_model",
            )
        )
    return fresh(model, seed)
