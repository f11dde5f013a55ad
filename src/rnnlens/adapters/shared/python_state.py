"""Undo functions for changes of Python state: attributes, contents of containers, and random generators."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

#: Types of containers whose contents are restored in place.
CONTAINERS = (list, dict, set, deque)


def undo_contents(container: Any) -> Callable[[], object]:
    """Return a function that restores the entries of a container in place, if they differ by then.

    It calls the methods of the built-in type: a framework's subclass would track the entries a second time.
    """
    if isinstance(container, dict):
        pairs = dict(container)
        kind: Any = type(container) if type(container).__module__ == "collections" else dict

        def undo() -> None:
            if not (_same(container, pairs) and _same(container.values(), pairs.values())):
                kind.clear(container)
                kind.update(container, pairs)

        return undo
    if isinstance(container, set):
        members = set(container)
        return lambda: None if container == members else (set.clear(container), set.update(container, members))
    entries = list(container)
    base: Any = list if isinstance(container, list) else deque
    return lambda: None if _same(container, entries) else (base.clear(container), base.extend(container, entries))


def _same(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def undo_attributes(value: Any) -> Callable[[], object]:
    """Return a function that restores the attributes of an object; an attribute that is unchanged is not touched."""
    now, before = vars(value), dict(vars(value))

    def undo() -> None:
        for name in now.keys() - before.keys():
            del now[name]
        now.update({name: old for name, old in before.items() if name not in now or now[name] is not old})

    return undo


def undo_draws(generator: Any) -> Callable[[], object] | None:
    """Return a function that restores the state of a random generator of Python, NumPy or torch; None for others."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    of_torch = getattr(sys.modules.get("torch"), "Generator", np.random.RandomState)
    if isinstance(generator, (np.random.RandomState, of_torch)):
        return partial(generator.set_state, generator.get_state())
    return None
