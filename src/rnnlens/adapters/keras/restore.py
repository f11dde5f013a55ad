"""Borrow a user's model for a run: nothing is built in it, and all that the run changes is restored.

What a run changes are variables, random generators, the compiled loss, and the Python state of layers: attributes, and
every mutable object that they refer to, such as counters, lists, arrays, the user's objects and contents of closures.
Keras' own layers change only their attributes once they are built, so nothing behind these is recorded then.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from ...autodiff.tensors import global_random_states_restored
from ...errors import UnbuiltModelError
from ..shared.generators import undo_draws
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


#: Attributes of Keras' layers with containers that calls append to.
_BOOKKEEPING = frozenset(["_losses", "_loss_ids", "_callable_losses", "_updates", "_metrics"])
#: Packages whose objects are not recorded.
_FOREIGN_PACKAGES = frozenset(
    [
        *("keras", "tf_keras", "tensorflow", "torch", "jax", "jaxlib", "numpy", "optree", "h5py"),
        *("builtins", "threading", "_thread"),
    ]
)


#: Undo logs of the models that are borrowed, by the id of the model.
_open_logs: ContextVar[dict[int, _UndoLog]] = ContextVar("open_logs")


@contextmanager
def borrowed(model: Any, keras: Dialect, seed: int | None = None, *, regularised: bool | None = None) -> Iterator[None]:
    """Borrow a model or cell for a run: restore on exit all state that the run changes.

    Random generators are seeded with ``seed``, if it is given. With ``regularised`` the compiled loss is replaced
    within the block by one that changes no metric; penalties of weights have a gradient if it is True.

    Raises
    ------
    UnbuiltModelError
        From the run, if a layer would create its weights in it.
    """
    with (
        keras.model_state_restored(model, seed),
        _nothing_built(model, keras),
        _graphs_opened(model, keras),
        nullcontext() if regularised is None else keras.compiled_loss_unchanged(model, regularised),
        python_state_restored(_UndoLog(model, keras)),
    ):
        yield


@contextmanager
def python_state_restored(undo_log: _UndoLog) -> Iterator[None]:
    """Restore on exit the Python state that a log has recorded, and the process's random states."""
    open_logs = _open_logs.get({})
    token = _open_logs.set({**open_logs, undo_log.model_id: undo_log})
    with global_random_states_restored():
        try:
            yield
        finally:
            _open_logs.reset(token)
            undo_log.restore()


def open_log(model: Any) -> _UndoLog:
    """Return the undo log of a model that is borrowed."""
    return _open_logs.get()[id(model)]


@contextmanager
def _nothing_built(model: Any, keras: Dialect) -> Iterator[None]:
    """Raise UnbuiltModelError where a layer that is not built yet adds a weight within the block."""
    with overriding() as override:
        for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
            if not layer.built:
                override(layer, "add_weight", partial(_refuse_weight, layer))
        yield


@contextmanager
def _graphs_opened(model: Any, keras: Dialect) -> Iterator[None]:
    """Run methods decorated with ``tf.function`` as Python code within the block.

    Their graphs call no hook. Keras 3 runs such a method while it builds the model, and keeps a graph in which the
    weights are constants: there it stays what it is.
    """
    is_legacy = keras.name == "tf_keras" and isinstance(model, keras.Layer)
    with overriding() as override:
        for layer in model._flatten_layers() if is_legacy else ():
            bases = [base for base in type(layer).__mro__ if not keras.is_from_keras(base)]
            # A subclass overrides the methods of its bases.
            methods = {name: method for base in reversed(bases) for name, method in vars(base).items()}
            for name, method in methods.items():
                if hasattr(method, "python_function"):
                    override(layer, name, types.MethodType(keras.engine.inlined(method), layer))
        yield


def _refuse_weight(layer: Any, *arguments: Any, **options: Any) -> None:
    error = UnbuiltModelError(
        f"Layer {layer.name!r} is not built: {type(layer).__name__} creates its weights at its first call.",
        expected="a model that was called on a batch",
        hint="model(x)",
    )
    error._keras_call_info_injected = True  # type: ignore[attr-defined]  # Keras appends nothing to the message
    raise error


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

    def __init__(self, model: Any, keras: Dialect) -> None:
        self._keras, self.model_id = keras, id(model)
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no id is used twice
        self._undo_steps: list[Callable[[], object]] = []
        for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
            self.record_layer(layer)
        self.record_value(model)  # a cell that is not a layer

    def restore(self) -> None:
        """Undo all changes, the last recorded first."""
        for undo in reversed(self._undo_steps):
            undo()

    def record_layer(self, layer: Any) -> None:
        """Record the attributes of a layer, and the objects that they refer to unless Keras' own code fixes them."""
        if self._is_new(layer):
            self._undo_steps.append(undo_attributes(layer))
            for name in _BOOKKEEPING & vars(layer).keys():
                self.record_value(vars(layer)[name])
            is_own = self._keras.is_from_keras(type(layer)) and type(layer) is not self._keras.layers.Lambda
            is_fixed = is_own and layer.built  # building appends to lists, and locks what tracks the variables
            for value in list(vars(layer).values()):
                # Keras' own layers change only their attributes, but may contain a user's cell or function.
                if not is_fixed or _package(value) not in _FOREIGN_PACKAGES:
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
