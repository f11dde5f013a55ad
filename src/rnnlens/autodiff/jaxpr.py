"""What is done with a JAX function's program text (jaxpr): to read in it what depends on what, to run it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core


def linked_outputs(function: Callable[[Any], Mapping[str, Any]], template: Any, names: set[str]) -> set[str]:
    """Keys of ``function(template)`` that depend on the entries ``names`` of its dictionary argument.

    Meant for pull backs, in which JAX leaves out whatever has no path: what remains is linked.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(template)
    leaves = jax.tree_util.tree_flatten_with_path(template)[0]
    marked = [path[0].key in names for path, _ in leaves]
    reached = _reach(closed.jaxpr, marked)
    keys = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(shape)[0]]
    return {key for key, hit in zip(keys, reached, strict=True) if hit}


def with_outputs_moved(closed: Any, arguments: Sequence[Any], moves: Mapping[int, Any]) -> list[Any]:
    """Results of a program in which some results, by index, are moved where they are computed.

    What the program computes from them moves along. A result that is one of its arguments is moved at the end only.
    """
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = {}
    by_variable: dict[Any, list[Any]] = {}
    for index, move in moves.items():
        if not isinstance(jaxpr.outvars[index], core.Literal):
            by_variable.setdefault(jaxpr.outvars[index], []).append(move)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        given = [read(v) for v in equation.invars]
        here = {i: sum(by_variable.pop(v)) for i, v in enumerate(equation.outvars) if v in by_variable}
        if here and equation.primitive.name in ("jit", "pjit"):
            results = with_outputs_moved(equation.params["jaxpr"], given, here)
        else:
            bound = equation.primitive.get_bind_params(equation.params)
            functions, options = bound if isinstance(bound, tuple) else ((), bound)  # a tuple before JAX 0.10
            answer = equation.primitive.bind(*functions, *given, **options)
            results = list(answer) if equation.primitive.multiple_results else [answer]
            results = [r + here[i] if i in here else r for i, r in enumerate(results)]
        values.update(zip(equation.outvars, results, strict=True))
    return [
        read(v) + moves[i] if i in moves and (isinstance(v, core.Literal) or v in by_variable) else read(v)
        for i, v in enumerate(jaxpr.outvars)
    ]


def _reach(jaxpr: Any, marked: list[bool]) -> list[bool]:
    hit = dict(zip(jaxpr.invars, marked, strict=True))
    for equation in jaxpr.eqns:
        incoming = [not isinstance(v, core.Literal) and hit.get(v, False) for v in equation.invars]
        hit.update(zip(equation.outvars, _through(equation, incoming), strict=True))
    return [not isinstance(v, core.Literal) and hit.get(v, False) for v in jaxpr.outvars]


def _through(equation: Any, incoming: list[bool]) -> list[bool]:
    """What one operation passes on: exactly for calls and loops, everything to everything otherwise."""
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    count = len(equation.outvars)
    if inner is None or len(inner.invars) != len(incoming) or len(inner.outvars) != count:
        return [any(incoming)] * count
    if equation.primitive.name != "scan":
        return _reach(inner, incoming)
    constants, carried = equation.params["num_consts"], equation.params["num_carry"]
    while True:
        outgoing = _reach(inner, incoming)
        carry = [a or b for a, b in zip(incoming[constants : constants + carried], outgoing[:carried], strict=True)]
        if carry == incoming[constants : constants + carried]:
            return outgoing
        incoming = [*incoming[:constants], *carry, *incoming[constants + carried :]]
