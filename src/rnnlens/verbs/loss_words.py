"""What can be said of a loss without calling it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def loss_reduction(model: Any, loss: Any = None) -> str | None:
    """How a loss makes one number out of those of all samples; None where it does not say.

    A loss object says so itself (``reduction``). One that Keras compiled, or knows by name, is averaged unless it is
    such an object.
    """
    given = loss if loss is not None else getattr(model, "loss", None)
    parts = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list | tuple) else [given]
    found = {_of_one(part, compiled=loss is None) for part in parts if part is not None}
    return found.pop() if len(found) == 1 else None


def with_reduction(provenance: Mapping[str, str], model: Any, loss: Any = None) -> Mapping[str, str]:
    """Where numbers come from, with ``loss_reduction`` where the loss says what it is."""
    reduction = loss_reduction(model, loss)
    return provenance if reduction is None else {**provenance, "loss_reduction": reduction}


def _of_one(loss: Any, *, compiled: bool) -> str | None:
    says = getattr(loss, "reduction", None)
    if says is not None:
        return str(says)
    return "sum_over_batch_size" if compiled or isinstance(loss, str) else None
