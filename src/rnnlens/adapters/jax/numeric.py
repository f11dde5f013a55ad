"""Runs a part of a program in NumPy in float64, with chosen variables overridden."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from .jaxprs import bind, closed, is_inexact, needed_equations

Values = dict[Var, Any]


def evaluate(
    program: ClosedJaxpr,
    known: Mapping[Var, Any],
    results: Iterable[Any],
    *,
    without: Collection[int] = (),
) -> list[Any]:
    """Return the values of ``results`` of a flat program, given those of the variables ``known``.

    Equations with an index in ``without`` return their operand, as an activation that is left out.
    """
    jaxpr = program.jaxpr
    values: Values = dict(zip(jaxpr.constvars, map(_wide, program.consts), strict=True)) | dict(known)
    results = list(results)

    def read(atom: Any) -> Any:
        return _wide(atom.val) if isinstance(atom, Literal) else values[atom]

    for index in sorted(needed_equations(jaxpr, [v for v in results if v not in values], stop=values)):
        equation = jaxpr.eqns[index]
        operands = [read(atom) for atom in equation.invars]
        outcomes = [operands[0]] if index in without else _run(equation, operands)
        values.update((v, a) for v, a in zip(equation.outvars, outcomes, strict=True) if v not in known)
    return [read(atom) for atom in results]


def _wide(value: Any) -> Any:
    """Convert an array to NumPy: floats to float64."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended):
        return value
    array = np.asarray(value)
    return array.astype(np.float64) if is_inexact(array) and not np.iscomplexobj(array) else array


def _run(equation: Any, operands: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in ("custom_jvp_call", "custom_vjp_call", "jit", "pjit", "closed_call"):
        inner = closed(params.get("call_jaxpr") or params.get("fun_jaxpr") or params["jaxpr"])
        known = dict(zip(inner.jaxpr.invars, operands, strict=True))
        return evaluate(inner, known, inner.jaxpr.outvars)
    rule = _RULES.get(name)
    if rule is not None:
        with np.errstate(all="ignore"):
            result = rule(params, *operands)
        return list(result) if isinstance(result, list) else [result]
    narrow = [
        a.astype(v.aval.dtype) if isinstance(a, np.ndarray) else a
        for a, v in zip(operands, equation.invars, strict=True)
    ]
    return list(map(_wide, bind(equation, narrow)))


def _dot(params: Any, a: Any, b: Any) -> Any:
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    letters = iter(range(64))
    axes_a, axes_b = [next(letters) for _ in a.shape], [next(letters) for _ in b.shape]
    for i, j in (*zip(contract_a, contract_b, strict=True), *zip(batch_a, batch_b, strict=True)):
        axes_b[j] = axes_a[i]
    free_a = [axes_a[i] for i in range(a.ndim) if i not in (*contract_a, *batch_a)]
    free_b = [axes_b[j] for j in range(b.ndim) if j not in (*contract_b, *batch_b)]
    return np.einsum(a, axes_a, b, axes_b, [*(axes_a[i] for i in batch_a), *free_a, *free_b], optimize=True)


def _broadcast(params: Any, a: Any) -> Any:
    shape, places = params["shape"], params["broadcast_dimensions"]
    opened = [1] * len(shape)
    for size, place in zip(np.shape(a), places, strict=True):
        opened[place] = size
    return np.broadcast_to(np.reshape(a, opened), shape)


def _convert(params: Any, a: Any) -> Any:
    """Convert to the dtype of the program, but to float64 instead of any other float."""
    dtype = np.dtype(params["new_dtype"])
    return a.astype(np.float64 if jax.numpy.issubdtype(dtype, np.floating) else dtype)


def _split(params: Any, a: Any) -> list[Any]:
    return np.split(a, np.cumsum(params["sizes"])[:-1], axis=params["axis"])


def _slice(params: Any, a: Any) -> Any:
    strides = params["strides"] or (1,) * a.ndim
    return a[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _sigmoid(a: Any) -> Any:
    return 0.5 * np.tanh(0.5 * a) + 0.5


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _params, *operands: function(*operands)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "tanh": np.tanh,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "sign": np.sign,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "stop_gradient": np.array,
    "copy": np.array,
    "copy_p": np.array,
    "reduce_precision": np.array,
    "optimization_barrier": np.array,
}
_RULES: Mapping[str, Callable[..., Any]] = {
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "split": _split,
    "slice": _slice,
    "reshape": lambda params, a: np.reshape(a, params["new_sizes"]),
    "transpose": lambda params, a: np.transpose(a, params["permutation"]),
    "concatenate": lambda params, *parts: np.concatenate(parts, axis=params["dimension"]),
    "squeeze": lambda params, a: np.squeeze(a, axis=tuple(params["dimensions"])),
    "rev": lambda params, a: np.flip(a, axis=tuple(params["dimensions"])),
    "integer_pow": lambda params, a: a ** params["y"],
    "reduce_sum": lambda params, a: np.sum(a, axis=tuple(params["axes"])),
    "reduce_max": lambda params, a: np.max(a, axis=tuple(params["axes"])),
    "select_n": lambda _params, which, *cases: np.choose(which.astype(int), cases),
    "logistic": _elementwise(_sigmoid),
    "square": _elementwise(np.square),
    **{name: _elementwise(function) for name, function in _FUNCTIONS.items()},
}
