"""Finds the adapter of a model without importing any framework that the user has not imported already."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from typing import Any

from ..errors import ModelError, message
from .protocol import Adapter

#: module that must be loaded already -> (base class within it, adapter module). The first match wins, so a Keras
#: model that runs on torch (and is a torch module too) is a Keras model.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    ("keras", "layers.Layer", "rnnlens.adapters.keras"),
    ("torch", "nn.Module", "rnnlens.adapters.torch"),
)


def _resolve(module: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        module = getattr(module, part)
    return module


def adapter_for(model: Any) -> Adapter:
    """The adapter that owns ``model``.

    Third parties join through the entry-point group ``rnnlens.adapters``: an object with ``owns(model) -> bool`` and
    the methods of :class:`Adapter`.

    Raises
    ------
    ModelError
        If no adapter knows the type of ``model``.
    """
    for module_name, owner, adapter_module in _KNOWN:
        module = sys.modules.get(module_name)
        if module is not None and isinstance(model, _resolve(module, owner)):
            adapter: Adapter = importlib.import_module(adapter_module).adapter
            return adapter
    for entry in entry_points(group="rnnlens.adapters"):
        candidate: Any = entry.load()
        if candidate.owns(model):
            return candidate  # type: ignore[no-any-return]
    raise ModelError(
        message(
            "This is not a model that rnnlens knows.",
            got=f"{type(model).__module__}.{type(model).__qualname__}",
            expected="a Keras 3 model or layer, or a torch.nn.Module",
            hint="pass the model itself, not its path, its output or its weights",
        )
    )
