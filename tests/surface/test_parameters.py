"""Behind the public functions nothing takes more than seven parameters: what belongs together travels in one object."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rnnlens as rl

MOST = 7
VERBS = Path(rl.__file__).parent / "verbs"


def parameters(function: ast.FunctionDef) -> int:
    """How many a caller has to do with: not the object of a method."""
    a = function.args
    names = [argument.arg for argument in (*a.posonlyargs, *a.args)]
    count = len(names) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)
    return count - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("path", sorted(VERBS.rglob("*.py")), ids=lambda path: path.relative_to(VERBS).as_posix())
def test_at_most_seven_parameters(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    public = path.parent == VERBS and hasattr(rl, path.stem) and path.stem
    many = {f.name: parameters(f) for f in functions if f.name != public and parameters(f) > MOST}
    assert not many
