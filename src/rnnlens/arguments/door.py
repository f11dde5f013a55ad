"""The decorator ``checked``, which checks and converts each argument of a public function before it runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import CallError, did_you_mean, message

P = ParamSpec("P")
R = TypeVar("R")

#: ``check(name, value)`` returns the value, converted where needed, or raises InputError.
Check = Callable[[str, Any], Any]


#: Arguments of other libraries that users may expect, each with a hint what to use instead.
_ELSEWHERE = {
    "feed_dict": 'net = rl.tf1.graph(session, inputs={"x": placeholder}, outputs={"y": tensor}, loss=loss, '
    "targets=labels, feed={keep_prob: 1.0}) declares inputs, outputs and loss once; then rl.trace(net, x, y)",
}


def anything(name: str, value: Any) -> Any:
    """Return any value unchanged, for an argument that the function checks itself."""
    return value


def checked(**table: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that a table of checks validates and converts its arguments; defaults are not checked.

    Parameters
    ----------
    **table
        A check for each parameter, except one that collects further keywords (``**line``).

    Raises
    ------
    CallError
        At the call, for an unknown argument or a missing one.
    InputError
        At the call, for a value that does not pass its check.
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
