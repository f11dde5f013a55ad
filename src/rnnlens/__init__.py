"""rnnlens shows what a recurrent network learns through time.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trace = rl.trace(model, x, y)  # doctest: +SKIP
>>> trace["lstm"].hidden_grad  # doctest: +SKIP

Importing rnnlens loads no deep-learning framework and no plotting library: names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: public name -> module that holds it; a module of the same name is returned itself.
_HOME = {
    "layers": "rnnlens.trace",
    "trace": "rnnlens.trace",
    "jacobian": "rnnlens.jacobian",
    "gradients": "rnnlens.gradients",
    "weights": "rnnlens.weights",
    "weight_norms": "rnnlens.weights",
    "open": "rnnlens.results.files",
    "options": "rnnlens.options",
    "plot": "rnnlens.plot",
    "torch": "rnnlens.adapters.torch.public",
    "errors": "rnnlens.errors",
    "testing": "rnnlens.testing",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rnnlens' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    value = getattr(module, name, module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
