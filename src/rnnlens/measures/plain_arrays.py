"""Decorator of the public measures: they count axes, and refuse arrays whose axes have names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import CallError, InputError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def of_plain_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a measure to refuse unknown keywords, and arrays with names of axes, which it would take by position."""
    parameters = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def with_check(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = next((name for name in kwargs if name not in parameters), None)
        if unknown is not None:
            hint = did_you_mean(unknown, parameters)
            raise CallError(f"rl.measures.{function.__name__} has no argument {unknown!r}.", hint=hint)
        values: list[Any] = [*args, *kwargs.values()]
        for value in values:
            if hasattr(value, "get_axis_num"):
                raise InputError(
                    f"rl.measures.{function.__name__} takes plain arrays, and counts their axes.",
                    got=f"{type(value).__name__} with the dimensions {', '.join(map(str, value.dims))}",
                    expected="an array without names, with its axes as the docstring has them",
                    hint='array.values; array.transpose(..., "lag").values has the lags last',
                )
        return function(*args, **kwargs)

    return with_check
