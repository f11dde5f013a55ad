"""Which results of a JAX function depend on which of its arguments, read from its program text (jaxpr)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
