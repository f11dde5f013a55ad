"""Autodiff engines of torch, JAX and TensorFlow, shared by all frameworks that run on them.

The module ``tensors`` finds the engine of a tensor without importing any engine. The engines themselves are imported by
:func:`engine`, when a model needs one.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache

from .cuts import Cut, CutRecorder
from .interface import Engine, Keep, LinearisedProgram, Memo, Program, Tap, TargetProgram, as_it_is

_ENGINES = {"torch": "TorchEngine", "jax": "JaxEngine", "tensorflow": "TensorFlowEngine"}

__all__ = [
    "Cut",
    "CutRecorder",
    "Engine",
    "Keep",
    "LinearisedProgram",
    "Memo",
    "Program",
    "Tap",
    "TargetProgram",
    "as_it_is",
    "engine",
    "full_precision",
    "record_cuts",
    "without_fused_sums",
]


@cache
def engine(name: str, keep: Keep = as_it_is, on_host: bool = False) -> Engine:
    """Return the engine ``"torch"``, ``"jax"`` or ``"tensorflow"``, importing it on the first call.

    ``keep(old, new)`` is called when the tensor ``new`` is substituted for ``old``. It returns ``new`` with the data
    that a framework attached to ``old``, such as a Keras mask. ``on_host``: arrays are NumPy's on any device.
    """
    instance: Engine = getattr(importlib.import_module(f"{__name__}.{name}"), _ENGINES[name])(keep, on_host)
    return instance


def full_precision(name: str | None) -> AbstractContextManager[None]:
    """Compute float32 with all its digits within the block; do nothing for a name that is no engine of ours."""
    return engine(name).full_precision() if name in _ENGINES else nullcontext()


def without_fused_sums(name: str) -> AbstractContextManager[None] | None:
    """Return :meth:`Engine.without_fused_sums`; None for a name that is no engine of ours."""
    return engine(name).without_fused_sums() if name in _ENGINES else None


def record_cuts(name: str) -> AbstractContextManager[CutRecorder]:
    """Record the operations of programs within the block; none for a name that is no engine of ours."""
    return engine(name).record_cuts() if name in _ENGINES else nullcontext(CutRecorder())
