"""Restore the Python state of layers: attributes, and every mutable object that they refer to.

Examples are counters, lists, dicts, arrays, the user's objects, contents of closures and random generators. Keras' own
layers change only their attributes, so nothing behind these is recorded.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .dialect import Dialect

#: Packages whose objects are not recorded.
_FOREIGN = frozenset(
    [
        "keras",
        "tf_keras",
        "tensorflow",
        "torch",
        "jax",
        "jaxlib",
        "numpy",
        "builtins",
        "optree",
        "h5py",
        "threading",
        "_thread",
    ]
)
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()


@contextmanager
def unchanged(model: Any, keras: Dialect) -> Iterator[None]:
    """Restore on exit the Python state of ``model`` and its layers, and the random states of Python and NumPy."""
    memory = _UndoLog(keras)
    for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
        memory.layer(layer)
    memory.value(model)  # a cell that is not a layer
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        memory.restore()
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002


class _UndoLog:
    """Undo log of changed Python state: one entry for each object."""

    def __init__(self, keras: Dialect) -> None:
        self._keras = keras
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no id is used twice
        self._undo: list[Callable[[], None]] = []

    def restore(self) -> None:
        """Undo all changes, the last recorded first."""
        for undo in reversed(self._undo):
            undo()

    def layer(self, layer: Any) -> None:
        """Record a layer's attributes, and the objects that they refer to unless the layer is Keras' own."""
        if self._is_new(layer):
            self._attributes(layer)
            for books in self._keras.books(layer):
                self.value(books)
            is_users = not self._keras.is_own(type(layer)) or type(layer) is self._keras.layers.Lambda
            for value in list(vars(layer).values()):
                # Keras' own layers change only their attributes, but may contain a user's cell or function.
                if is_users or _package(value) not in _FOREIGN:
                    self.value(value)

    def value(self, value: Any) -> None:
        """Record an object that may change, and the objects that it refers to."""
        if value is None or isinstance(value, (str, bytes, bool, int, float, type, types.ModuleType)):
            return
        if not self._is_new(value):
            return
        inside = self._keras.inside(value)
        if inside is not None:
            self._wrapper(value)
            value = inside
        if isinstance(value, _CONTAINERS):
            self._undo.append(_back_in_place(value))
            self._all(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._all(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.value(value.__self__)
        elif isinstance(value, functools.partial):
            self._all([value.func, value.args, value.keywords])
        else:
            self._object(value)

    def _wrapper(self, value: Any) -> None:
        """Record the snapshot by which a tracking wrapper detects changes made outside of it."""
        if hasattr(value, "_last_wrapped_list_snapshot"):
            self._attributes(value)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _all(self, values: Any) -> None:
        for value in list(values):
            self.value(value)

    def _object(self, value: Any) -> None:
        if isinstance(value, self._keras.Layer):
            del self._seen[id(value)]
            self.layer(value)
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.RandomState):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits, state = value.bit_generator, value.bit_generator.state
            self._undo.append(lambda: setattr(bits, "state", state))
        elif self._keras.tracks(value) or (hasattr(value, "__dict__") and _package(value) not in _FOREIGN):
            self._attributes(value)
            self._all(vars(value).values())

    def _attributes(self, value: Any) -> None:
        now, before = vars(value), dict(vars(value))

        def undo() -> None:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)

        self._undo.append(undo)

    def _array(self, value: Any) -> None:
        if not value.flags.writeable:
            return
        before = value.copy()
        self._undo.append(lambda: None if not value.flags.writeable else np.copyto(value, before))
        if value.dtype == object:
            self._all(value.ravel())

    def _function(self, function: Any) -> None:
        if _package(function) in _FOREIGN:
            return
        for cell in function.__closure__ or ():
            content = getattr(cell, "cell_contents", _MISSING) if _is_filled(cell) else _MISSING
            if content is not _MISSING:
                self._undo.append(functools.partial(setattr, cell, "cell_contents", content))
                self.value(content)
        self._all(function.__defaults__ or ())
        self._all((function.__kwdefaults__ or {}).values())
        if vars(function):
            self._attributes(function)
            self._all(vars(function).values())


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _package(value: Any) -> str:
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return str(module).partition(".")[0]


def _back_in_place(container: Any) -> Callable[[], None]:
    """Return a function that restores a container's entries without Keras' tracking.

    It calls the methods of the built-in type, because the entries are tracked already.
    """
    if isinstance(container, list):
        items = list(container)
        return lambda: None if _same(container, items) else list.__setitem__(container, slice(None), items)
    if isinstance(container, dict):
        pairs = dict(container)
        kind: Any = type(container) if type(container).__module__ == "collections" else dict
        return lambda: (
            None
            if _same(container, pairs) and _same(container.values(), pairs.values())
            else (kind.clear(container), kind.update(container, pairs))[0]
        )
    if isinstance(container, set):
        members = set(container)
        return lambda: None if container == members else (set.clear(container), set.update(container, members))[0]
    entries = list(container)
    return lambda: None if _same(container, entries) else (container.clear(), container.extend(entries))[0]


def _same(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


@contextmanager
def as_found(model: Any, keras: Dialect, seed: int | None = None) -> Iterator[None]:
    """Restore on exit the variables, random generators, Python state of layers and Keras' process-wide state.

    ``model`` may also be a cell that is not a Keras layer.
    """
    with keras.as_found(model, seed), unchanged(model, keras):
        yield
