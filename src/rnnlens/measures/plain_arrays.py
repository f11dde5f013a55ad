"""Decorator of the public measures: they count axes, and refuse arrays whose axes have names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..arguments import checked
from ..errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def of_plain_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a measure to refuse arrays with named dimensions, whose axes it would take by position."""

    @checked()
    @functools.wraps(function)
    def with_check(*args: P.args, **kwargs: P.kwargs) -> R:
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
