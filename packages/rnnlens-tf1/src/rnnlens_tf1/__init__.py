"""Adapters of TensorFlow-1 graphs, joined by the entry point ``tf1``: this module imports no TensorFlow by itself."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from rnnlens.adapters.protocol import Adapter

#: Module that must be loaded already, class within it, and the object of ``adapter.py`` that serves its instances.
_OWNED = (
    ("rnnlens_tf1.public", "TimeMajorNet", "time_major"),
    ("rnnlens_tf1.public", "Net", "adapter"),
    ("tf_keras.src.engine.base_layer_v1", "Layer", "keras"),
    ("tensorflow.python.client.session", "Session", "adapter"),
)


def adapter_of(model: Any) -> Adapter | None:
    """Return the adapter of a net, of a session, or of a tf_keras model that builds a graph; None for other models."""
    for module, class_name, adapter_name in _OWNED:
        model_class = getattr(sys.modules.get(module), class_name, None)
        if model_class is not None and isinstance(model, model_class):
            adapter: Adapter = getattr(import_module(f"{__name__}.adapter"), adapter_name)
            return adapter
    return None
