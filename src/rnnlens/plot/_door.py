"""The door of every figure: its arguments by one table, and one clear error for what matplotlib refuses to draw."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..arguments import Check, anything, as_numbers, checked, listed, names, number, one_of, switch, text, whole
from ..errors import InputError, RnnlensError, message, shown

P = ParamSpec("P")
R = TypeVar("R")

#: More panels, lines or bins than these would be drawn for hours and seen by nobody.
_PANELS, _LINES, _BINS, _DELAYS = 1000, 100_000, 100_000, 1000


def _several(name: str, value: Any) -> tuple[str, ...]:
    """Names of dimensions, in order; the same one may come twice."""
    found = names(name, value)
    return (found,) if isinstance(found, str) else tuple(value) if isinstance(value, list | tuple) else found


def _words(name: str, value: Any) -> str:
    """Text, also an empty one."""
    if not isinstance(value, str):
        raise InputError(message(f"{name}= is text.", got=shown(value), expected="a string"))
    return value


def two_titles(name: str, value: Any) -> tuple[str, str]:
    """Two titles."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise InputError(message(f"{name}= is two titles.", got=shown(value), expected='such as ("before", "after")'))
    return (value[0], value[1])


def _delays(name: str, value: Any) -> Any:
    """Lags of a task: a number, or several."""
    alone = isinstance(value, int | float) or getattr(value, "ndim", None) == 0
    several = [value] if alone else listed(value, most=_DELAYS)
    found = np.empty(0) if several == [] else None if several is None else np.asarray(as_numbers(name, several))
    if found is None or found.ndim > 1 or found.dtype.kind not in "fiu" or not (found >= 0).all():
        raise InputError(message(f"{name}= are lags.", got=shown(value), expected="a few numbers from 0 on"))
    return found.astype(float)


#: What means the same in every figure that has it.
COMMON: dict[str, Check] = {
    "dims": _several,
    "x": text,
    "y": text,
    "panel": names,
    "overlay": text,
    "quantity": text,
    "layer": text,
    "names": two_titles,
    "samples": one_of("mean", "panels"),
    "shared": switch,
    "log": switch,
    "grad": switch,
    "absolute": switch,
    "as_computed": switch,
    "colorbar": switch,
    "limit": number(above=0),
    "delays": _delays,
    "losses": anything,
    "epsilon": number(above=0, below=1, what="is a share"),
    "confidence": number(least=0, below=1, what="is a share"),
    "bins": whole(least=1, most=_BINS),
    "clip_peaks": whole(least=0),
    "max_panels": whole(least=1, most=_PANELS),
    "max_rows": whole(least=1, most=_PANELS),
    "max_lines": whole(least=1, most=_LINES),
    "page": whole(least=0),
    "title": _words,
    "ax": anything,
    "figure": anything,
    "mask": anything,
}


def figure(**table: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a figure by :data:`COMMON` and ``table``; what is drawn has no check here.

    Raises
    ------
    InputError
        At the call, also where matplotlib cannot use the value of one of the keywords that are handed on to it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
        own = {name: check for name, check in {**COMMON, **table}.items() if name in options}

        @functools.wraps(function)
        def drawing(*args: P.args, **kwargs: P.kwargs) -> R:
            handed_on = {name: value for name, value in kwargs.items() if name not in parameters}
            try:
                return function(*args, **kwargs)
            except RnnlensError:
                raise
            except Exception as error:
                if not handed_on:
                    raise
                got = ", ".join(f"{name}={shown(value)}" for name, value in handed_on.items())
                what = f"matplotlib cannot draw plot.{function.__name__} like this: {error}"
                raise InputError(message(what, got=got, expected="values that matplotlib knows")) from error

        return checked(**own)(drawing)

    return decorate
