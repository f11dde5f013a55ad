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
    "episode_resets": "rnnlens.diagnosis.episode_resets",
    "fixed_points": "rnnlens.diagnosis.dynamics",
    "lyapunov": "rnnlens.diagnosis.dynamics",
    "step_eigenvalues": "rnnlens.diagnosis.dynamics",
    "layers": "rnnlens.verbs.weights",
    "trace": "rnnlens.verbs.trace",
    "jacobian": "rnnlens.verbs.jacobian",
    "gradients": "rnnlens.verbs.gradients",
    "hidden_attention": "rnnlens.verbs.hidden_attention",
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

#: Name that users of other libraries may expect -> what to type instead.
_OTHER_NAMES = {
    # Figures are in rl.plot, which loads matplotlib: the commonest are named here.
    **{
        name: f"rl.plot.{name}"
        for name in ("curves", "gates", "gradient_flow", "heatmap", "histogram", "lag_profile", "trajectories")
    },
    "attention": "rl.hidden_attention(model, x), of layers of Mamba",
    "diagnosis": "rl.diagnose(model, x, y)",
    "features_0d": "rl.plot.points(trace[layer].output)",
    "features_1d": "rl.plot.curves(trace[layer].output)",
    "features_2d": "rl.plot.heatmap(trace[layer].output)",
    "features_hist": "rl.plot.histogram(trace[layer].output)",
    "get_gradients": "rl.trace(model, x, y), then trace[layer].hidden_grad",
    "get_outputs": "rl.trace(model, x), then trace[layer].output",
    "get_rnn_weights": "rl.weights(model), then weights[layer]",
    "get_weights": "rl.weights(model)",
    "hessian": "rl.jacobian(model, x); there are no second derivatives",
    "load": "rl.open(path)",
    "rnn_heatmap": "rl.plot.weights_heatmap(rl.weights(model)[layer])",
    "rnn_histogram": "rl.plot.weights_histogram(rl.weights(model)[layer])",
    "saliency": 'rl.gradients(model, x, y, wrt="input")',
    "save": "result.save(path), of any result",
    "tf1": "pip install rnnlens-tf1, from packages/rnnlens-tf1 of the repository",
    "watch": "rl.torch.watch(model, ...), or rl.keras.Watch(...) among the callbacks of fit",
}

__all__ = ["__version__", *sorted({**_DEFINING_MODULES, **_SUBMODULES})]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _SUBMODULES:
        value: Any = importlib.import_module(_SUBMODULES[name])
        if "__getattr__" not in vars(value):
            value.__getattr__ = lambda missing: _refuse_attribute(value, f"rl.{name}", missing)
    elif name in _DEFINING_MODULES:
        value = getattr(importlib.import_module(_DEFINING_MODULES[name]), name)
    else:
        value = None if name.startswith("_") else _registry().namespace(name)
        if value is None:
            raise AttributeError(_missing(name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_registry().namespaces()]


def _refuse_attribute(module: Any, path: str, name: str) -> Any:
    """Raise AttributeError for a name that a public module does not have, with the one to type."""
    import importlib

    if name.startswith("_"):  # asked for by tools
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    names = getattr(module, "__all__", None) or [known for known in vars(module) if not known.startswith("_")]
    errors = importlib.import_module("rnnlens.errors")
    raise AttributeError(errors.missing_attribute(f"module {module.__name__!r}", name, names, f"{path}."))


def _missing(name: str) -> str:
    """Return the message for a public name that does not exist; a name with underscores is asked for by tools."""
    import importlib

    if name.startswith("_"):
        return f"module 'rnnlens' has no attribute {name!r}"
    errors = importlib.import_module("rnnlens.errors")
    names = [public_name for public_name in __all__ if not public_name.startswith("_")]
    message: str = errors.missing_attribute("module 'rnnlens'", name, names, "rl.", _OTHER_NAMES.get(name.lower()))
    return message


def _registry() -> Any:
    """Import and return the module ``rnnlens.adapters.registry``, which finds the adapter of a framework."""
    import importlib

    return importlib.import_module("rnnlens.adapters.registry")
