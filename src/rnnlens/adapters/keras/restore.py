"""Restore the Python state of layers: attributes, and every mutable object that they refer to.

Examples are counters, lists, dicts, arrays, the user's objects, contents of closures and random generators. Keras' own
layers change only their attributes, so nothing behind these is recorded.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ...autodiff.tensors import global_random_states_restored
from .dialect import Dialect

#: Types of containers whose contents are restored in place.
CONTAINERS = (list, dict, set, deque)


def undo_contents(container: Any) -> Callable[[], object]:
    """Return a function that restores the entries of a list, dict or set in place, if they were changed meanwhile.

    It calls the methods of the built-in type: a framework's subclass would track the entries a second time.
    """
    is_dict, container_type = isinstance(container, dict), type(container)
    if container_type.__module__ != "collections":
        container_type = next(container_type for container_type in CONTAINERS if isinstance(container, container_type))
    original_entries: Any = dict(container) if is_dict else list(container)
    add_entries: Any = container_type.update if hasattr(container_type, "update") else container_type.extend

    def undo() -> None:
        if not _has_same_items(container, original_entries) or (
            is_dict and not _has_same_items(container.values(), original_entries.values())
        ):
            container_type.clear(container)
            add_entries(container, original_entries)

    return undo


def _has_same_items(items: Any, original_items: Any) -> bool:
    return len(items) == len(original_items) and all(a is b for a, b in zip(items, original_items, strict=True))


def undo_attributes(value: Any) -> Callable[[], object]:
    """Return a function that restores the attributes of an object; unchanged attributes are not written."""
    attributes, original_attributes = vars(value), dict(vars(value))

    def undo() -> None:
        for name in attributes.keys() - original_attributes.keys():
            del attributes[name]
        attributes.update(
            {
                name: old
                for name, old in original_attributes.items()
                if name not in attributes or attributes[name] is not old
            }
        )

    return undo


def undo_draws(generator: Any) -> Callable[[], object] | None:
    """Return a function that restores the state of a random generator of Python, NumPy or torch.

    Returns None for other objects.
    """
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    torch_generator = getattr(sys.modules.get("torch"), "Generator", np.random.RandomState)
    if isinstance(generator, (np.random.RandomState, torch_generator)):
        return partial(generator.set_state, generator.get_state())
    return None


#: Attributes of Keras' layers with containers that calls append to.
_BOOKKEEPING = frozenset(["_losses", "_loss_ids", "_callable_losses", "_updates", "_metrics"])
#: Packages whose objects are not recorded.
_FOREIGN_PACKAGES = frozenset(
    [
        *("keras", "tf_keras", "tensorflow", "torch", "jax", "jaxlib", "numpy", "optree", "h5py"),
        *("builtins", "threading", "_thread"),
    ]
)


@contextmanager
def model_state_restored(model: Any, keras: Dialect, seed: int | None = None) -> Iterator[None]:
    """Restore on exit all state that a run of a model or cell changes: variables, random generators, Python state."""
    with keras.model_state_restored(model, seed), python_state_restored(model, keras):
        yield


@contextmanager
def python_state_restored(model: Any, keras: Dialect) -> Iterator[None]:
    """Restore on exit the Python state of ``model`` and its layers, and the process's random states."""
    undo_log = _UndoLog(keras)
    for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
        undo_log.record_layer(layer)
    undo_log.record_value(model)  # a cell that is not a layer
    with global_random_states_restored():
        try:
            yield
        finally:
            undo_log.restore()


@contextmanager
def overriding() -> Iterator[Callable[[Any, str, Any], None]]:
    """Yield a function ``(object, name, method)`` that overrides a method of an instance.

    Restore all methods on exit.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []

    def override(owner: Any, name: str, method: Any) -> None:
        members = vars(owner)
        saved.append((members, name, members.get(name)))
        members[name] = method

    try:
        yield override
    finally:
        for members, name, original in reversed(saved):
            if original is None:
                members.pop(name, None)
            else:
                members[name] = original


class _UndoLog:
    """Undo log of changed Python state: one entry for each object."""

    def __init__(self, keras: Dialect) -> None:
        self._keras = keras
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no id is used twice
        self._undo_steps: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Undo all changes, the last recorded first."""
        for undo in reversed(self._undo_steps):
            undo()

    def record_layer(self, layer: Any) -> None:
        """Record the attributes of a layer, and the objects that they refer to unless the layer is Keras' own."""
        if self._is_new(layer):
            self._undo_steps.append(undo_attributes(layer))
            for name in _BOOKKEEPING & vars(layer).keys():
                self.record_value(vars(layer)[name])
            is_user_layer = not self._keras.is_from_keras(type(layer)) or type(layer) is self._keras.layers.Lambda
            for value in list(vars(layer).values()):
                # Keras' own layers change only their attributes, but may contain a user's cell or function.
                if is_user_layer or _package(value) not in _FOREIGN_PACKAGES:
                    self.record_value(value)

    def record_value(self, value: Any) -> None:
        """Record the state of an object that a run may change, and of the objects that it refers to."""
        if value is None or isinstance(value, (str, bytes, bool, int, float, type, types.ModuleType)):
            return
        if not self._is_new(value):
            return
        unwrapped = self._keras.unwrapped(value)
        if unwrapped is not None:
            if hasattr(value, "_last_wrapped_list_snapshot"):  # by it a wrapper detects changes made outside of it
                self._undo_steps.append(undo_attributes(value))
            value = unwrapped
        if isinstance(value, CONTAINERS):
            self._undo_steps.append(undo_contents(value))
            self._record_all(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._record_all(value)
        elif isinstance(value, np.ndarray):
            self._record_array(value)
        elif isinstance(value, types.FunctionType):
            self._record_function(value)
        elif isinstance(value, types.MethodType):
            self.record_value(value.__self__)
        elif isinstance(value, functools.partial):
            self._record_all([value.func, value.args, value.keywords])
        elif isinstance(value, self._keras.Layer):
            del self._seen[id(value)]
            self.record_layer(value)
        else:
            self._record_object(value)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _record_all(self, values: Any) -> None:
        for value in list(values):
            self.record_value(value)

    def _record_object(self, value: Any) -> None:
        undo = undo_draws(value)
        if undo is not None:
            self._undo_steps.append(undo)
        elif self._keras.is_tracker(value) or (hasattr(value, "__dict__") and _package(value) not in _FOREIGN_PACKAGES):
            self._undo_steps.append(undo_attributes(value))
            self._record_all(vars(value).values())

    def _record_array(self, value: Any) -> None:
        if not value.flags.writeable:
            return
        original = value.copy()
        self._undo_steps.append(lambda: None if not value.flags.writeable else np.copyto(value, original))
        if value.dtype == object:
            self._record_all(value.ravel())

    def _record_function(self, function: Any) -> None:
        if _package(function) in _FOREIGN_PACKAGES:
            return
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # its variable has no value yet
                continue
            self._undo_steps.append(functools.partial(setattr, cell, "cell_contents", content))
            self.record_value(content)
        self._record_all([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        if vars(function):
            self._undo_steps.append(undo_attributes(function))
            self._record_all(vars(function).values())


def _package(value: Any) -> str:
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return str(module).partition(".")[0]
