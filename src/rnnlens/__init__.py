"""rnnlens shows what a recurrent network learns through time.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trace = rl.trace(model, x, y)  # doctest: +SKIP
>>> trace["lstm"].hidden_grad  # doctest: +SKIP

Importing rnnlens loads no deep-learning framework and no plotting library: public names are imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing little lets the command line handle Ctrl-C sooner
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

#: Public name -> module that defines it.
_DEFINING_MODULES = {
    "compare": "rnnlens.diagnosis.compare",
    "diagnose": "rnnlens.diagnosis",
    "fixed_points": "rnnlens.diagnosis.dynamics",
    "lyapunov": "rnnlens.diagnosis.dynamics",
    "step_eigenvalues": "rnnlens.diagnosis.dynamics",
    "layers": "rnnlens.verbs.weights",
    "trace": "rnnlens.verbs.trace",
    "jacobian": "rnnlens.verbs.jacobian",
    "gradients": "rnnlens.verbs.gradients",
    "weights": "rnnlens.verbs.weights",
    "weight_norms": "rnnlens.verbs.weights",
    "find_nonfinite": "rnnlens.verbs.find_nonfinite",
    "open": "rnnlens.results.opening",
    "options": "rnnlens.settings",
    "report": "rnnlens.reporting",
    "verify": "rnnlens.testing.scan_gradients",
}

#: Public name of a module -> its import path.
_SUBMODULES = {
    "cells": "rnnlens.recurrence.cells",
    "measures": "rnnlens.measures",
    "plot": "rnnlens.plot",
    "keras": "rnnlens.integrations.keras",
    "torch": "rnnlens.integrations.torch",
    "jax": "rnnlens.integrations.jax",
    "lightning": "rnnlens.integrations.lightning",
    "transformers": "rnnlens.integrations.transformers",
    "errors": "rnnlens.errors",
    "testing": "rnnlens.testing",
}

__all__ = ["__version__", *sorted({**_DEFINING_MODULES, **_SUBMODULES})]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _SUBMODULES:
        value: Any = importlib.import_module(_SUBMODULES[name])
    elif name in _DEFINING_MODULES:
        value = getattr(importlib.import_module(_DEFINING_MODULES[name]), name)
    else:
        value = None if name.startswith("_") else _registry().namespace(name)
        if value is None:
            raise AttributeError(f"module 'rnnlens' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_registry().namespaces()]


def _registry() -> Any:
    """Import and return the module ``rnnlens.adapters.registry``, which finds the adapter of a framework."""
    import importlib

    return importlib.import_module("rnnlens.adapters.registry")
