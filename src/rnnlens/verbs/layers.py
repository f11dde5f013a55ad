"""``rl.layers``: what is recurrent in a model."""

from __future__ import annotations

from typing import Any

from ..adapters.registry import adapter_for
from ..arguments import anything, checked
from ..results.layers import LayerTable
from .turns import in_turn


@checked(model=anything)
@in_turn
def layers(model: Any) -> LayerTable:
    """List the recurrent layers of a model, without running it.

    Parameters
    ----------
    model
        A Keras model or layer, or a ``torch.nn.Module``.

    Returns
    -------
    LayerTable
        A sequence of :class:`~rnnlens.adapters.protocol.LayerInfo` that prints as a table.

    Raises
    ------
    ModelError
        If the model is of no known framework, or was not built yet.
    """
    return LayerTable(adapter_for(model).describe(model))
