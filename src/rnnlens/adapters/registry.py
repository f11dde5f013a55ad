"""The registry: finds the adapter of a model without importing a framework that the user has not imported."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from os import PathLike
from typing import Any

from ..arguments.checks import GRAPHS_HINT
from ..errors import ModelError, UnsupportedError, short_repr
from .protocol import Adapter

#: (module that must be loaded already, base class within it, import path of the adapter). The first match counts, so a
#: Keras model that runs on torch (and is a torch module too) is a Keras model.
_KNOWN_ADAPTERS: tuple[tuple[str, str, str], ...] = (
    ("keras", "layers.Layer", "rnnlens.adapters.keras:adapter"),
    ("tf_keras", "layers.Layer", "rnnlens.adapters.keras:legacy"),
    ("torch", "nn.Module", "rnnlens.adapters.torch:adapter"),
    ("flax.nnx", "Module", "rnnlens.adapters.jax:adapter"),
    ("equinox", "Module", "rnnlens.adapters.jax:adapter"),
    ("rnnlens.adapters.jax.models", "JaxModel", "rnnlens.adapters.jax:adapter"),
    ("rnnlens.adapters.jax.bound", "BoundModel", "rnnlens.adapters.jax:adapter"),
)

#: Lowest tested versions of what the adapters use; each counts only if it is loaded.
_LOWEST_VERSIONS = {"keras": (3, 10), "tf_keras": (2, 16), "torch": (2, 4), "jax": (0, 7)}

#: Entry-point group through which adapters join that are not in the table.
GROUP = "rnnlens.adapters"

#: Cache of the entries that served a model before, an adapter or a function each; reading entry points is slow.
_used_entries: list[Any] = []
#: Base classes of models whose framework has a supported version.
_supported_bases: set[type] = set()


def adapter_for(model: Any) -> Adapter:
    """Return the adapter that owns ``model``.

    Adapters that are not in the table join by the entry-point group ``rnnlens.adapters``. An entry is an object with
    the methods of :class:`Adapter`, or a function that returns the adapter of a model, or None, and so imports its
    framework only for a model of it.

    Raises
    ------
    ModelError
        If no adapter knows the type of ``model``.
    """
    adapter = adapter_of(model)
    if adapter is None:
        raise ModelError(
            "This is not a model of a supported framework.",
            got=_description(model),
            expected="a model or layer of Keras 3 or tf_keras, a torch.nn.Module, or a model of JAX",
            hint=_hint_for(model),
        )
    return adapter


def _hint_for(model: Any) -> str:
    """Return what to pass instead of an object that is no model."""
    if isinstance(model, type):
        return f"an instance of it: model = {model.__name__}(...)"
    is_of_jax = any(
        cls.__module__.partition(".")[0] in ("flax", "haiku", "jax", "jaxlib") for cls in type(model).__mro__
    )
    if any(cls.__module__.startswith("flax.linen") for cls in type(model).__mro__):
        return "rl.jax.model(module, params), with params = module.init(jax.random.key(0), x)"
    if is_of_jax or inspect.isfunction(model) or inspect.ismethod(model):
        return "rl.jax.model(apply, params), for a function of JAX, a Linen module or a Haiku transform"
    if isinstance(model, str | PathLike):
        return (
            "load it first: torch.load(path, weights_only=False), keras.saving.load_model(path); rl.open reads results"
        )
    if type(model).__module__.startswith("tensorflow."):
        return GRAPHS_HINT
    if type(model).__name__ == "TrainingRun":
        return "run.findings are those of a followed training; else pass the model itself"
    if isinstance(model, Mapping) and _has_arrays_of_jax(model):
        return "rl.jax.model(module, params): a module or apply function first, and then its parameters"
    if isinstance(model, Mapping):
        return "model.load_state_dict(weights), and then model in place of the weights"
    return "pass the model itself, not its output or its weights"


def _has_arrays_of_jax(tree: Any, around: frozenset[int] = frozenset()) -> bool:
    """Return whether a nested dict holds arrays of JAX; ``around``: ids of the dicts around it, which it may hold."""
    if isinstance(tree, Mapping):
        around |= {id(tree)}
        return any(_has_arrays_of_jax(value, around) for value in tree.values() if id(value) not in around)
    return type(tree).__module__.partition(".")[0] in ("jax", "jaxlib")


def _description(model: Any) -> str:
    """Return what an object is that is no model."""
    if isinstance(model, type):
        return f"the class {model.__name__}"
    if isinstance(model, str | PathLike):
        return short_repr(model)
    return f"{type(model).__module__}.{type(model).__qualname__}"


def adapter_of(model: Any) -> Adapter | None:
    """Return the adapter that owns ``model``, or None if no adapter knows its type."""
    for module_name, base_path, location in _KNOWN_ADAPTERS:
        # None if the module or a part of the path is not loaded yet.
        module = sys.modules.get(module_name)
        base: Any = reduce(lambda part, name: getattr(part, name, None), base_path.split("."), module)
        if base is not None and isinstance(model, base):
            if base not in _supported_bases:
                refuse_old(module_name)
                _supported_bases.add(base)
            adapter_module, _, name = location.partition(":")
            adapter: Adapter = getattr(importlib.import_module(adapter_module), name)
            if adapter.owns(model):
                return adapter
    used_adapters = (_adapter_of_entry(entry, model) for entry in _used_entries)
    return next(filter(None, used_adapters), None) or _find_new_adapter(model)


def refuse_old(package: str) -> None:
    """Raise UnsupportedError if a framework, or JAX that Keras runs on, is older than the lowest supported version."""
    is_of_jax = package.startswith(("flax.", "equinox", "rnnlens."))
    runs_on_jax = is_of_jax or (package == "keras" and sys.modules["keras"].backend.backend() == "jax")
    engine = "jax" if runs_on_jax else package
    for name in {package, engine} & _LOWEST_VERSIONS.keys():
        version_text = str(getattr(sys.modules.get(name), "__version__", ""))
        version = tuple(int(digits) for digits in re.findall(r"\d+", version_text)[:2])
        if version and version < _LOWEST_VERSIONS[name]:
            lowest_version = ".".join(map(str, _LOWEST_VERSIONS[name]))
            problem = f"This version of {name} is too old for rnnlens."
            hint = f'pip install "{name}>={lowest_version}"'
            raise UnsupportedError(problem, got=version_text, expected=f"{lowest_version} or newer", hint=hint)


def namespace(name: str) -> Any:
    """Return the module ``public`` of a third-party adapter with the entry point ``name``; None if it has none."""
    module_names = [f"{entry.module}.public" for entry in entry_points(group=GROUP, name=name)]
    return next(
        (importlib.import_module(module_name) for module_name in module_names if _module_exists(module_name)), None
    )


def namespaces() -> list[str]:
    """Return the names of the third-party adapters that have a module ``public``."""
    return [entry.name for entry in entry_points(group=GROUP) if _module_exists(f"{entry.module}.public")]


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the adapter is a module of its own, or cannot be loaded
        return False


def _adapter_of_entry(entry: Any, model: Any) -> Adapter | None:
    if hasattr(entry, "owns"):
        return entry if entry.owns(model) else None
    adapter: Adapter | None = entry(model)
    return adapter


def _find_new_adapter(model: Any) -> Adapter | None:
    for entry in entry_points(group=GROUP):
        loaded_entry = _load_entry(entry)
        adapter = None if loaded_entry in _used_entries else _adapter_of_entry(loaded_entry, model)
        if adapter is not None:
            _used_entries.append(loaded_entry)
            return adapter
    return None


def _load_entry(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise ModelError(
            f"The adapter {entry.name!r} of another package cannot be loaded.",
            got=f"{entry.value}: {type(error).__name__}: {error}",
            hint="mend or remove that package",
        ) from error
