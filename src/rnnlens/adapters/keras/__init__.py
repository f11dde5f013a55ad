"""The Keras 3 adapter, on TensorFlow, JAX and torch.

``discover`` finds the recurrent layers, ``hooks`` listens to them, ``run`` runs the model once without leaving a trace,
``capture`` and ``pullback`` turn what was heard into the arrays of the contract, ``engines/`` holds what differs between
the three engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol import Batch, Capture, CaptureRequest, LayerInfo, LayerWeights, Port, Pullback
from . import discover
from .capture import capture


class KerasAdapter:
    """Implements :class:`rnnlens.adapters.protocol.Adapter` for ``keras.Model`` and ``keras.layers.Layer``."""

    name = "keras"

    def describe(self, model: Any) -> list[LayerInfo]:
        """Recurrent layers in the order of the graph, or of the attributes of a subclassed model."""
        return discover.describe(model)

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """One forward pass and, with a loss, one backward pass."""
        return capture(model, batch, request)


adapter = KerasAdapter()
