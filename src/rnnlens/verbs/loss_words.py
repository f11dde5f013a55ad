"""What can be said of a loss without calling it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..adapters.protocol import Adapter


def with_reduction(provenance: Mapping[str, str], adapter: Adapter, model: Any, loss: Any = None) -> Mapping[str, str]:
    """Where numbers come from, with ``loss_reduction`` where the loss says what it is."""
    reduction = adapter.reduction(model, loss)
    return provenance if reduction is None else {**provenance, "loss_reduction": reduction}
