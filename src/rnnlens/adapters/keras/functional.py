"""A user's function of tensors, differentiated by itself: it runs on the engine's own tensors, outside of any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...autodiff import Memo
from ...errors import InputError, message, raised_by
from ...typing import Array
from .dialect import Dialect

#: Takes a cotangent of the function's value back to one cotangent per argument.
Pull = Callable[[Array], list[Array]]


def differentiate(function: Callable[..., Any], arrays: Sequence[Array], keras: Dialect) -> tuple[Array, Pull]:
    """Value of ``function(*tensors)``, and its pull-back.

    Raises
    ------
    InputError
        If the function does not return a tensor of floats of this engine that depends on what it was given.
    """
    engine = keras.engine
    tensors = [keras.ops.convert_to_tensor(np.asarray(a)) for a in arrays]

    def program(arguments: Any, tap: Callable[[str, Any], Any]) -> tuple[dict[str, Any], Any]:
        with raised_by("Your function"):
            value = function(*(tap(str(i), tensor) for i, tensor in enumerate(arguments)))
        if not keras.ops.is_tensor(value) or not keras.is_float(value):
            raise InputError(
                message(
                    "The function must return one tensor of floats, made with the framework's own operations.",
                    got=f"{type(value).__name__}",
                    expected=f"a tensor of {engine.name}, such as {keras.says_mean}",
                )
            )
        return {"value": value}, None

    with raised_by("Your function, differentiated,"):
        linear = engine.linearise(program, tensors, Memo())
    value = engine.to_array(linear.targets["value"])

    def pull(cotangent: Array) -> list[Array]:
        found = linear.vjp({"value": np.asarray(cotangent)[None]})
        parts = [found[str(i)] for i in range(len(tensors))]
        if all(part is None for part in parts):
            raise InputError(
                message(
                    "The function's value does not depend on its tensors in a way that can be differentiated.",
                    hint="use the framework's own differentiable operations: no NumPy, no argmax, no conversion to int",
                )
            )
        return [
            np.zeros_like(a) if p is None else np.asarray(engine.to_array(p))[0]
            for p, a in zip(parts, arrays, strict=True)
        ]

    return np.asarray(value), pull
