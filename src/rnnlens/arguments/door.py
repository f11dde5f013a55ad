"""The door of a public function: every argument passes its check, and what comes through is what the function wants."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import CallError, did_you_mean, message

P = ParamSpec("P")
R = TypeVar("R")

#: Takes the name of an argument and what was given for it; returns what the function works with, or raises InputError.
Check = Callable[[str, Any], Any]


#: What is an argument of another library's calls, and says itself here.
_ELSEWHERE = {
    "feed_dict": 'net = rl.tf1.graph(session, inputs={"x": placeholder}, outputs={"y": tensor}, loss=loss, '
    "targets=labels, feed={keep_prob: 1.0}) says once what is fed to what; then rl.trace(net, x, y)",
}


def checked(**table: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check every argument that a caller gives, by the table, before the function runs; defaults need no check.

    Parameters
    ----------
    **table
        A check for each parameter. What collects further keywords (``**line``) has none.

    Raises
    ------
    CallError
        At the call, for an argument that the function does not have, or a missing one.
    InputError
        At the call, for a value that its check refuses.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        unknown = table.keys() - signature.parameters.keys()
        assert not unknown, f"{function.__name__} has no {unknown}"

        @functools.wraps(function)
        def door(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = _bound(function, signature, args, kwargs)
            for name, value in bound.arguments.items():
                if name in table and value is not signature.parameters[name].default:
                    bound.arguments[name] = table[name](name, value)
            return function(*bound.args, **bound.kwargs)

        door.table = table  # type: ignore[attr-defined]
        return door

    return decorate


def _bound(
    function: Callable[..., Any], signature: inspect.Signature, args: Any, kwargs: Any
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD and n != "self"]
        strange = next((name for name in kwargs if name not in known), None)
        called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        what = f"{called} cannot be called like this: {error}."
        hint = f"{called}({', '.join(known)})" if strange is None else did_you_mean(strange, known)
        if strange in _ELSEWHERE and not hint.startswith("did you mean"):
            hint = _ELSEWHERE[strange]
        raise CallError(message(what, hint=hint)) from None
