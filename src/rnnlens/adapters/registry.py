"""The registry: finds the adapter of a model without importing a framework that the user has not imported."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import ModelError, message
from .protocol import Adapter

#: (module that must be loaded already, base class within it, import path of the adapter). The first match counts, so a
#: Keras model that runs on torch (and is a torch module too) is a Keras model.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    ("keras", "layers.Layer", "rnnlens.adapters.keras:adapter"),
    ("tf_keras.src.engine.base_layer_v1", "Layer", "rnnlens.adapters.tf_graph:keras"),
    ("tf_keras", "layers.Layer", "rnnlens.adapters.keras:legacy"),
    ("torch", "nn.Module", "rnnlens.adapters.torch:adapter"),
    ("rnnlens.adapters.tf_graph.public", "TimeMajorNet", "rnnlens.adapters.tf_graph:time_major"),
    ("rnnlens.adapters.tf_graph.public", "Net", "rnnlens.adapters.tf_graph:adapter"),
    ("tensorflow", "compat.v1.Session", "rnnlens.adapters.tf_graph:adapter"),
)

#: Entry-point group in which other packages register their adapters.
GROUP = "rnnlens.adapters"

#: Cache of adapters from other packages that were used before; reading entry points is slow.
_joined: list[Adapter] = []


def adapter_for(model: Any) -> Adapter:
    """Return the adapter that owns ``model``.

    Other packages register through the entry-point group ``rnnlens.adapters``: an object with the methods of
    :class:`Adapter`.

    Raises
    ------
    ModelError
        If no adapter knows the type of ``model``.
    """
    adapter = adapter_of(model)
    if adapter is None:
        raise ModelError(
            message(
                "This is not a model of a supported framework.",
                got=f"{type(model).__module__}.{type(model).__qualname__}",
                expected="a model or layer of Keras 3 or tf_keras, a torch.nn.Module, or a net of rl.tf1.graph",
                hint="pass the model itself, not its path, its output or its weights",
            )
        )
    return adapter


def adapter_of(model: Any) -> Adapter | None:
    """Return the adapter that owns ``model``, or None if no adapter knows its type."""
    for module_name, owner, where in _KNOWN:
        base = _within(sys.modules.get(module_name), owner)
        if base is not None and isinstance(model, base):
            home, _, name = where.partition(":")
            adapter: Adapter = getattr(importlib.import_module(home), name)
            return adapter
    return next((other for other in _joined if other.owns(model)), None) or _newly_joined(model)


def _newly_joined(model: Any) -> Adapter | None:
    for entry in entry_points(group=GROUP):
        other = _loaded(entry)
        if other not in _joined and other.owns(model):
            _joined.append(other)
            return other
    return None


def _loaded(entry: EntryPoint) -> Adapter:
    try:
        adapter: Adapter = entry.load()
    except Exception as error:
        raise ModelError(
            message(
                f"The adapter {entry.name!r} of another package cannot be loaded.",
                got=f"{entry.value}: {type(error).__name__}: {error}",
                hint="mend or remove that package",
            )
        ) from error
    return adapter


def _within(module: Any, dotted: str) -> Any:
    """Return a class by its dotted path in a module; None if the module or a part of the path is not loaded yet."""
    for part in dotted.split("."):
        module = getattr(module, part, None)
    return module
