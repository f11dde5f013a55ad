"""Behind the public functions nothing takes more than seven parameters: what belongs together travels in one object.

Public is what a user calls: the names of rnnlens, those of the modules among them, the commands of the command line.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rnnlens as rl
from rnnlens.cli.app import app

MOST = 7
SOURCE = Path(rl.__file__).parent


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """How many a caller has to do with: not the object of a method."""
    a = function.args
    names = [argument.arg for argument in (*a.posonlyargs, *a.args)]
    count = len(names) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)
    return count - (names[:1] in (["self"], ["cls"]))


def functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """Every function below a node by its qualified name, and how many parameters it has."""
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            name = f"{within}.{getattr(child, 'name', '<lambda>')}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield name, parameters(child)
        yield from functions(child, name)


def place(value: Any) -> tuple[str, str]:
    """Module and qualified name of a function, or of the constructor of a class."""
    function = inspect.unwrap(value)
    return function.__module__, f"{value.__qualname__}.__init__" if inspect.isclass(value) else function.__qualname__


def public() -> set[tuple[str, str]]:
    named = [getattr(rl, name) for name in rl.__all__]
    rooms = [value for value in named if isinstance(value, ModuleType)]
    named += [getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())]
    commands = [command.callback for command in app.registered_commands]
    return {place(value) for value in [*named, *commands] if inspect.isfunction(value) or inspect.isclass(value)}


PUBLIC = public()


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_at_most_seven_parameters(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    found = functions(ast.parse(path.read_text()))
    assert not {name: count for name, count in found if count > MOST and (module, name) not in PUBLIC}


def test_what_is_public_is_found():
    assert {
        ("rnnlens.verbs.gradients", "gradients"),
        ("rnnlens.plot.heatmap", "heatmap"),
        ("rnnlens.cli.app", "trace"),
        ("rnnlens.diagnosis.of_model", "diagnose"),
    } <= PUBLIC
