"""Variables that a user's function refers to, by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any


def is_foreign(function: FunctionType, value: Any) -> bool:
    """Return whether a value is a function of another Python module than ``function``."""
    return isinstance(value, FunctionType) and value.__module__ != function.__module__


def function_namespaces(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the global variables, and those of enclosing functions, that a function refers to."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    scope = function.__globals__
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return {name: scope[name] for name in sorted(names) if name in scope}, closure


def namespaces(function: Any, part_type: type | tuple[type, ...]) -> Iterator[dict[str, Any]]:
    """Yield all variables that a function refers to, also through functions that it calls, and its object's own.

    Objects of ``part_type``, the framework's modules or layers, are not searched.
    """
    pending, seen = [function], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, MethodType):
            if not isinstance(value.__self__, part_type) and type(getattr(value.__self__, "__dict__", None)) is dict:
                yield vars(value.__self__)
            pending.append(value.__func__)
        elif isinstance(value, FunctionType):
            for namespace in function_namespaces(value):
                yield namespace
                called = (part for part in namespace.values() if isinstance(part, FunctionType))
                pending += [part for part in called if not is_foreign(value, part)]
        elif not isinstance(value, part_type):
            call = inspect.getattr_static(type(value), "__call__", None)
            pending += [MethodType(call, value)] if isinstance(call, FunctionType) else []
