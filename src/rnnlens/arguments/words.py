"""Checks of numbers, switches, names and paths: each takes the name of an argument and what was given for it."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from ..errors import FileError, InputError, RnnlensError, did_you_mean, message, shown
from ..settings import parse_memory
from .door import Check

#: More names or steps than any model or sequence has: an endless iterator is not read further.
MOST = 1_000_000
#: The longest name of a file that common file systems take.
_LONGEST_NAME = 255


def anything(name: str, value: Any) -> Any:
    """No check here: the function looks at it itself, first of all."""
    return value


def switch(name: str, value: Any) -> bool:
    """True or False, also NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(message(f"{name}= is a switch.", got=shown(value), expected="True or False"))
    return bool(value)


def one_of(*words: str) -> Check:
    """One of a few words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise InputError(message(f"{name}= is not understood.", got=shown(value), hint=did_you_mean(value, words)))
        return str(value)

    return check


def whole(*, least: int | None = None, most: int | None = None) -> Check:
    """A whole number; True and False are none."""

    def check(name: str, value: Any) -> int:
        try:
            number = None if isinstance(value, bool | np.bool_) else operator.index(value)
        except Exception:
            number = None
        if number is None or (least is not None and number < least) or (most is not None and number > most):
            bounds = [f"{name} >= {least}"] * (least is not None) + [f"{name} <= {most}"] * (most is not None)
            expected = ", ".join(["a whole number", *bounds])
            raise InputError(message(f"{name}= is a whole number.", got=shown(value), expected=expected))
        return number

    return check


def number(
    *, least: float = -math.inf, below: float = math.inf, above: float | None = None, what: str = "is a number"
) -> Check:
    """A finite real number, ``least <= number < below`` (or ``above < number``)."""
    low = f"{least:g} <= " if math.isfinite(least) else "" if above is None else f"{above:g} < "
    words = f"{low}{{name}}" + (f" < {below:g}" if math.isfinite(below) else "")

    def check(name: str, value: Any) -> float:
        real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        try:
            found = float(value) if real else math.nan
        except OverflowError:
            found = math.nan
        if not math.isfinite(found) or not least <= found < below or (above is not None and found <= above):
            expected = "a finite number" if words == "{name}" else words.format(name=name)
            raise InputError(message(f"{name}= {what}.", got=shown(value), expected=expected))
        return found

    return check


def as_name(value: Any) -> Any:
    """The name of a tensor of a graph, for that tensor itself; anything else as it is."""
    named = getattr(value, "name", None)
    return named if isinstance(named, str) and getattr(value, "op", None) is not None else value


def text(name: str, value: Any) -> str:
    """A word that is not empty, or a tensor of a graph, which has one."""
    value = as_name(value)
    if not isinstance(value, str) or not value.strip():
        raise InputError(message(f"{name}= is a name.", got=shown(value), expected="a string"))
    return str(value)


def names(name: str, value: Any) -> str | tuple[str, ...]:
    """One name, or several: each once, in the order given; an iterator is read here, once."""
    value = as_name(value)
    if isinstance(value, str):
        return text(name, value)
    found = listed(value)
    found = None if found is None else list(map(as_name, found))
    if not found or not all(isinstance(one, str) and one.strip() for one in found):
        got = "no names" if found is not None and not found else shown(value)
        raise InputError(message(f"{name}= names nothing.", got=got, expected="a name, or a list of names"))
    return tuple(dict.fromkeys(map(str, found)))


def listed(value: Any, most: int = MOST) -> list[Any] | None:
    """What an iterable holds; None for what is no list of things, or endless."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    try:
        found = list(islice(value, most + 1))
    except Exception:
        return None
    return found if len(found) <= most else None


def memory(name: str, value: Any) -> int:
    """An amount of memory in bytes, or in words."""
    return parse_memory(value)


#: Frameworks take 32 bits.
seed = whole(least=0, most=2**32 - 1)


def seed_or_none(name: str, value: Any) -> int | None:
    """A seed, or None: the random generators go on from where they are."""
    return None if value is None else seed(name, value)


def kept_steps(name: str, value: Any) -> int | slice | list[int]:
    """Time steps: one, several, or a slice."""
    whole_number = whole()
    if isinstance(value, slice):
        for part in (value.start, value.stop, value.step):
            if part is not None:
                whole_number(name, part)
        if value.step is not None and operator.index(value.step) == 0:
            raise InputError(message(f"{name}= is a slice that never moves on.", got=shown(value)))
        return value
    found = value.tolist() if hasattr(value, "tolist") and np.ndim(value) <= 1 else value
    if isinstance(found, int):
        return int(whole_number(name, found))
    steps = listed(found)
    if not steps or any(isinstance(one, bool | np.bool_) or not hasattr(one, "__index__") for one in steps):
        got = "no steps" if steps is not None and not steps else shown(value)
        raise InputError(message(f"{name}= names no steps.", got=got, expected="an int, a list of int, a slice"))
    return [int(whole_number(name, one)) for one in steps]


def path(name: str, value: Any) -> str:
    """The name of a file, as text."""
    try:
        found = os.fspath(value)
    except Exception:
        found = None
    if not isinstance(found, str) or not found.strip() or "\0" in found:
        raise InputError(message(f"{name}= is the path of a file.", got=shown(value), expected="a string or a Path"))
    if max(map(len, map(os.fsencode, found.split(os.sep)))) > _LONGEST_NAME:
        expected = f"no part longer than {_LONGEST_NAME} letters"
        raise FileError(message(f"{name}= is too long for a file's name.", got=shown(value), expected=expected))
    return found


def loss(name: str, value: Any) -> Any:
    """A function, what can be called, or the name of a loss; or several of them by output."""
    if isinstance(value, Mapping | list | tuple) and value:
        for part in value.values() if isinstance(value, Mapping) else value:
            if part is not None:
                _one_loss(name, part)
        return value
    return _one_loss(name, value)


def _one_loss(name: str, value: Any) -> Any:
    value = as_name(value)
    if isinstance(value, type):
        raise InputError(
            message(
                f"{name}= is a class: a loss was not made from it yet.",
                got=value.__name__,
                expected="an object of it, or a function",
                hint=f"{name}={value.__name__}()",
            )
        )
    if isinstance(value, str) and value.strip():
        return str(value)
    if isinstance(value, str) or not callable(value):
        expected = "a function of the target and the output, in the framework's order, or the name of a loss"
        raise InputError(message(f"{name}= cannot be called.", got=shown(value), expected=expected))
    return value


def class_weights(name: str, value: Any) -> dict[int, float]:
    """A weight per class: ``{0: 1.0, 1: 5.0}``."""
    if not isinstance(value, Mapping) or not value:
        expected = "a dict from class to weight, such as {0: 1.0, 1: 5.0}"
        raise InputError(message(f"{name}= gives no class a weight.", got=shown(value), expected=expected))
    label, weight = whole(least=0), number(least=0)
    return {label(f"{name} (a class)", key): weight(f"{name}[{key!r}]", one) for key, one in value.items()}


def axes_by_name(name: str, value: Any) -> dict[str, Any]:
    """Something for each of some dimensions: ``{"time": 10, "unit": [0, 1]}``."""
    if not isinstance(value, Mapping) or not all(isinstance(dim, str) for dim in value):
        expected = 'a dict by dimension, such as {"time": 10, "unit": [0, 1]}'
        raise InputError(message(f"{name}= selects by dimension.", got=shown(value), expected=expected))
    return dict(value)


def either(*checks: Check, expected: str, what: str = "is not understood") -> Check:
    """What passes one of several checks; the first that it passes decides."""

    def check(name: str, value: Any) -> Any:
        for one in checks:
            try:
                return one(name, value)
            except RnnlensError:
                continue
        raise InputError(message(f"{name}= {what}.", got=shown(value), expected=expected))

    return check


def called(name: str, value: Any) -> Any:
    """A function, or anything else that can be called and is not a class."""
    if not callable(value) or isinstance(value, type):
        raise InputError(message(f"{name}= cannot be called.", got=shown(value), expected="a function"))
    return value
