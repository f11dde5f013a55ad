"""How the parts of a verb are written: functions of few parameters, and a folder that tells of each of its files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rnnlens

ROOT = Path(rnnlens.__file__).parent
PACKAGES = ("verbs/time_jacobian",)
MOST_PARAMETERS = 7


def functions(file: Path):
    """Name and number of parameters of each function written in a file, the object of a method left out."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield node.name, len([name for name in names if name not in ("self", "cls")])


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_have_few_parameters(package):
    counts = {(f.name, name): count for f in (ROOT / package).rglob("*.py") for name, count in functions(f)}
    assert len(counts) > 20
    assert {place: count for place, count in counts.items() if count > MOST_PARAMETERS} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_lists_every_file(package):
    folder = ROOT / package
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py"))
