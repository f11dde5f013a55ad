"""Programs as JAX prints them: traced, flattened so that no ``jit`` is left, sliced, and run by equation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Literal, Var

#: Equations that call a program of their own, and the parameter that holds it; they are inlined.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
#: Equations that recompute their program in the backward pass.
REMAT = ("checkpoint", "remat", "remat2")
#: Equations that only move or convert numbers: their results consist of the entries of their first operand.
MOVES = frozenset(
    [
        "convert_element_type",
        "transpose",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "slice",
        "split",
        "copy",
        "copy_p",
        "rev",
        "expand_dims",
        "reduce_precision",
        "stop_gradient",
        "sharding_constraint",
        "optimization_barrier",
        "pvary",
    ]
)
#: Packages whose lines do not name a user's loop.
_LIBRARIES = ("jax", "flax", "haiku", "equinox", "optax", "contextlib", "functools")


def closed(program: Any) -> ClosedJaxpr:
    """Return a jaxpr with its constants; a jaxpr without constants is closed over none."""
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, [])


def is_inexact(value: Any) -> bool:
    """Return whether an array, aval or shape has a float or complex dtype."""
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Run one equation on other operands than its own; return its results."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # a tuple before JAX 0.10
    results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def flatten(program: ClosedJaxpr, remats: list[Any] | None = None) -> ClosedJaxpr:
    """Return a program in which every ``jit`` and every remat around a loop is inlined.

    If ``remats`` collects their params, every remat is.
    Every variable of the result is defined once, so that it identifies a value.
    """
    equations: list[Any] = []
    constants: list[tuple[Var, Any]] = []

    def inline(jaxpr: Any, known: dict[Var, Any]) -> list[Any]:
        def atom(variable: Any) -> Any:
            return variable if isinstance(variable, Literal) else known[variable]

        for equation in jaxpr.eqns:
            name, operands = equation.primitive.name, [atom(v) for v in equation.invars]
            if name in _CALLS or (name in REMAT and (remats is not None or _has_loop(equation))):
                if name in REMAT and remats is not None:
                    remats.append(equation.params)
                inner = closed(equation.params[_CALLS.get(name, "jaxpr")])
                fresh = [Var(v.aval) for v in inner.jaxpr.constvars]
                constants.extend(zip(fresh, inner.consts, strict=True))
                results = inline(
                    inner.jaxpr,
                    dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*fresh, *operands], strict=True)),
                )
            else:
                results = [Var(v.aval) for v in equation.outvars]
                equations.append(equation.replace(invars=operands, outvars=results))
            known.update(zip(equation.outvars, results, strict=True))
        return [atom(v) for v in jaxpr.outvars]

    jaxpr = program.jaxpr
    constants.extend(zip(jaxpr.constvars, program.consts, strict=True))
    outputs = inline(jaxpr, {v: v for v in (*jaxpr.constvars, *jaxpr.invars)})
    flat = jaxpr.replace(constvars=[v for v, _ in constants], outvars=outputs, eqns=equations)
    return ClosedJaxpr(flat, [c for _, c in constants])


def _has_loop(equation: Any) -> bool:
    """Return whether a loop is anywhere within an equation."""
    inner = (e for program in inner_programs(equation) for e in program.jaxpr.eqns)
    return any(e.primitive.name in ("scan", "while") or _has_loop(e) for e in inner)


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Return the variables among operands or results: all but literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def needed_equations(jaxpr: Any, results: Iterable[Any], stop: Iterable[Var] = ()) -> set[int]:
    """Return the indices of the equations that ``results`` depend on, not followed below the variables ``stop``."""
    stops = set(stop)
    needed, indices = set(variables(results)) - stops, set()
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        equation = jaxpr.eqns[index]
        if needed & set(equation.outvars):
            indices.add(index)
            needed |= set(variables(equation.invars)) - stops
    return indices


def dependent(jaxpr: Any, sources: Iterable[Var]) -> set[Var]:
    """Return all variables that depend on any of ``sources``, these included."""
    reached = set(sources)
    for equation in jaxpr.eqns:
        if reached & set(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached


def line_of(equation: Any) -> str:
    """Return the user's file and line that called an equation, as ``train.py:17``; "" if it is not known."""
    traceback = equation.source_info.traceback
    library_files = tuple(
        os.path.dirname(path) if os.path.basename(path) == "__init__.py" else path
        for name in _LIBRARIES
        if (path := getattr(sys.modules.get(name), "__file__", None))
    )
    for frame in [] if traceback is None else traceback.frames:
        if not frame.file_name.startswith((*library_files, os.path.dirname(os.path.dirname(__file__)), "<frozen")):
            line = getattr(frame, "start_line", None) or getattr(frame, "line_num", 0)
            return f"{os.path.basename(frame.file_name)}:{line}"
    return ""


def inner_programs(equation: Any) -> list[ClosedJaxpr]:
    """Return the programs within the parameters of an equation."""
    return [closed(program) for program in core.jaxprs_in_params(equation.params)]


def traced(function: Callable[..., Any], shapes: Sequence[Any]) -> ClosedJaxpr:
    """Trace a function of arrays and flatten the program."""
    return flatten(jax.make_jaxpr(function)(*shapes))
