"""The engines that differentiate: one file for each, shared by every framework that runs on it.

``tensors`` finds the engine of a tensor, and the engines that have run here, and loads none. Everything else is reached
through :func:`engine`, when a model that needs it exists.
"""

from __future__ import annotations

import importlib
from functools import cache

from .protocol import Engine, Keep, LinearisedProgram, Memo, Program, Tap, as_it_is

_ENGINES = {"torch": "TorchEngine", "jax": "JaxEngine", "tensorflow": "TensorFlowEngine"}

__all__ = ["Engine", "Keep", "LinearisedProgram", "Memo", "Program", "Tap", "as_it_is", "engine"]


@cache
def engine(name: str, keep: Keep = as_it_is) -> Engine:
    """The engine of that name: ``"torch"``, ``"jax"`` or ``"tensorflow"``.

    ``keep(old, new)`` carries over to a tensor what a framework attached to the one that it replaces.
    """
    found: Engine = getattr(importlib.import_module(f"{__name__}.{name}"), _ENGINES[name])(keep)
    return found
