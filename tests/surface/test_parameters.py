"""Functions that are not public have at most seven parameters: related values are passed as one object.

Public functions are those in ``rnnlens`` and in its public modules, and the commands of the command line.
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

MOST_PARAMETERS = 7
SOURCE = Path(rl.__file__).parent
#: Modules whose functions take the place of another package's, and so have its parameters.
STAND_INS = ("rnnlens.adapters.torch.package_loops", "rnnlens.adapters.torch.triton_kernels")


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """Return the number of parameters that a caller passes, without ``self`` and ``cls``."""
    a = function.args
    names = [argument.arg for argument in (*a.posonlyargs, *a.args)]
    count = len(names) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)
    return count - (names[:1] in (["self"], ["cls"]))


def parameter_counts(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the qualified name and the number of parameters of every function below a node."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            name = f"{prefix}.{getattr(child, 'name', '<lambda>')}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield name, parameter_count(child)
        yield from parameter_counts(child, name)


def qualified_name(value: Any) -> tuple[str, str]:
    """Return the module and qualified name of a function, or of the constructor of a class."""
    function = inspect.unwrap(value)
    return function.__module__, f"{value.__qualname__}.__init__" if inspect.isclass(value) else function.__qualname__


def public_functions() -> set[tuple[str, str]]:
    values = [getattr(rl, name) for name in rl.__all__]
    modules = [value for value in values if isinstance(value, ModuleType)]
    values += [getattr(module, name) for module in modules for name in getattr(module, "__all__", ())]
    commands = [command.callback for command in app.registered_commands]
    return {
        qualified_name(value) for value in [*values, *commands] if inspect.isfunction(value) or inspect.isclass(value)
    }


PUBLIC = public_functions()


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_at_most_seven_parameters(path):
    components = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = ".".join(components[:-1] if components[-1] == "__init__" else components)
    counts = parameter_counts(ast.parse(path.read_text())) if module not in STAND_INS else ()
    assert not {name: count for name, count in counts if count > MOST_PARAMETERS and (module, name) not in PUBLIC}


def test_what_is_public_is_found():
    assert {
        ("rnnlens.verbs.gradients", "gradients"),
        ("rnnlens.plot.heatmap", "heatmap"),
        ("rnnlens.cli.app", "trace"),
        ("rnnlens.diagnosis.of_model", "diagnose"),
    } <= PUBLIC
