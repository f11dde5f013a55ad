"""Autodiff engines of torch, JAX and TensorFlow, shared by all frameworks that run on them.

The module ``tensors`` finds the engine of a tensor without importing any engine. The engines themselves are imported by
:func:`engine`, when a model needs one.
"""

from __future__ import annotations

import importlib
from functools import cache

from .interface import Engine, Keep, LinearisedProgram, Memo, Program, Tap, TargetProgram, as_it_is

_ENGINES = {"torch": "TorchEngine", "jax": "JaxEngine", "tensorflow": "TensorFlowEngine"}

__all__ = ["Engine", "Keep", "LinearisedProgram", "Memo", "Program", "Tap", "TargetProgram", "as_it_is", "engine"]


@cache
def engine(name: str, keep: Keep = as_it_is) -> Engine:
    """Return the engine ``"torch"``, ``"jax"`` or ``"tensorflow"``, importing it on the first call.

    ``keep(old, new)`` is called when the tensor ``new`` is substituted for ``old``. It returns ``new`` with the data
    that a framework attached to ``old``, such as a Keras mask.
    """
    found: Engine = getattr(importlib.import_module(f"{__name__}.{name}"), _ENGINES[name])(keep)
    return found
