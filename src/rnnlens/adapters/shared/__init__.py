"""Code that the adapters of several frameworks share; it imports no framework.

The substitutes and hooks below act only in the thread that installed them: the user's model may run in other threads
during a call of rnnlens, and those forward passes remain unchanged.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...autodiff import Engine, Memo, Tap
from ...autodiff.tensors import dtype_name, engine_of, to_numpy
from ...errors import InputError, raised_by
from ...typing import Array


def substitute_in_this_thread(substitute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the substitute in the current thread and the original in every other."""
    thread_id = threading.get_ident()

    @functools.wraps(original)
    def substitute_or_original(*args: Any, **kwargs: Any) -> Any:
        return (substitute if threading.get_ident() == thread_id else original)(*args, **kwargs)

    return substitute_or_original


def hook_in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs only in the current thread and returns None in others."""
    return substitute_in_this_thread(hook, lambda *args, **kwargs: None)


#: Function from a cotangent of a value to one cotangent per argument.
Pull = Callable[[Array], list[Array]]


def differentiate(
    function: Callable[..., Any], tensors: Sequence[Any], engine: Engine, expected: str
) -> tuple[Array, Pull]:
    """Return the value of ``function(*tensors)``, and a function that pulls its cotangents back.

    ``expected`` describes the value of a valid function in the terms of the framework.

    Raises
    ------
    InputError
        If the function does not return one float tensor of this engine; from the pull-back, if the value does not
        depend on the arguments.
    """

    def program(arguments: Any, tap: Tap) -> tuple[dict[str, Any], Any]:
        with raised_by("Your function"):
            value = function(*(tap(str(i), tensor) for i, tensor in enumerate(arguments)))
        if engine_of(value) != engine.name or not dtype_name(value).startswith(("float", "bfloat")):
            raise InputError(
                "The function must return one tensor of floats, computed with the framework's operations.",
                got=f"{type(value).__name__}",
                expected=expected,
            )
        return {"value": value}, None

    with raised_by("Your function, differentiated,"):
        linearised = engine.linearise(program, list(tensors), Memo())

    def pull(cotangent: Array) -> list[Array]:
        with raised_by("The backward pass of your function"):
            by_index = linearised.vjp({"value": np.asarray(cotangent)[None]})
        gradients = [by_index[str(i)] for i in range(len(tensors))]
        if all(gradient is None for gradient in gradients):
            raise InputError(
                "The function's value does not depend on its tensors in a way that can be differentiated.",
                hint="use differentiable operations of the framework: no NumPy, no argmax, no conversion to int",
            )
        return [
            np.zeros_like(to_numpy(t)) if gradient is None else to_numpy(engine.to_array(gradient))[0]
            for gradient, t in zip(gradients, tensors, strict=True)
        ]

    return to_numpy(engine.to_array(linearised.targets["value"])), pull
