"""Random generators that a user's model holds: each run leaves them as they were."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

#: Packages whose objects hold no generator of the user.
_ARRAY_PACKAGES = frozenset(["jax", "jaxlib", "numpy", "builtins"])


def undo_draws(generator: Any) -> Callable[[], object] | None:
    """Return a function that restores the state of a random generator of Python, NumPy, torch or TensorFlow.

    Returns None for other objects.
    """
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    torch_generator = getattr(sys.modules.get("torch"), "Generator", np.random.RandomState)
    if isinstance(generator, (np.random.RandomState, torch_generator)):
        return partial(generator.set_state, generator.get_state())
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(generator, tensorflow.random.Generator):
        value = generator.state.read_value()

        def assign_state() -> None:
            with tensorflow.init_scope():  # also where a graph is traced, whose run draws later
                generator.state.assign(value)

        return assign_state
    return None


@contextmanager
def held_generators_restored(source: Any) -> Iterator[None]:
    """Restore on exit the random generators that a model or function holds.

    These are in its attributes, containers and closures, and in those of the objects that they hold.
    """
    with ExitStack() as stack:
        for undo in filter(None, map(undo_draws, _held_objects(source))):
            stack.callback(undo)
        yield


def _held_objects(source: Any) -> Iterator[Any]:
    """Yield the objects that an object holds, itself included, each once."""
    seen: dict[int, Any] = {}
    pending = [source]
    while pending:
        value = pending.pop()
        if id(value) not in seen and not isinstance(value, (type, types.ModuleType)):
            seen[id(value)] = value
            yield value
            pending += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        defaults = [value.__defaults__, value.__kwdefaults__, getattr(value, "__wrapped__", None)]
        return [*defaults, *(cell.cell_contents for cell in value.__closure__ or () if _has_value(cell))]
    if type(value).__module__.partition(".")[0] in _ARRAY_PACKAGES:
        return [getattr(value, "__wrapped__", None)]  # of a function under jax.jit
    slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
    return [
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in slots if name[:2] != "__"),
    ]


def _has_value(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has no value yet
        return False
