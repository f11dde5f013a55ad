"""Imports of rnnlens in its source stand at the top of a module and in no circle: read from the text alone."""

import ast
from functools import cache
from pathlib import Path

import pytest

import rnnlens

ROOT = Path(rnnlens.__file__).parent

#: Packages in which functions still import modules of rnnlens. Every other package is clean and stays so: a package
#: that is listed without need has to be taken out.
IMPORTS_IN_FUNCTIONS = {"cli"}

#: Packages with import circles, those by imports under TYPE_CHECKING included; as above.
IMPORT_CIRCLES = set()


@cache
def modules(root=ROOT):
    """Source by dotted name, ``rnnlens.recurrence.cells`` of a package's ``__init__``."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = ("rnnlens", *path.relative_to(root).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (ast.parse(path.read_text()), path.name == "__init__.py")
    return found


def targets(node, name, is_package, known):
    """Modules of rnnlens that an import statement in the module ``name`` names; a submodule rather than its package."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in known}
    base = node.module or ""
    if node.level:
        parents = name.split(".") if is_package else name.split(".")[:-1]
        parents = parents[: len(parents) - node.level + 1]
        base = ".".join([*parents, *([base] if base else [])])
    found = {f"{base}.{alias.name}" for alias in node.names} & known.keys()
    if base in known and len(found) < len(node.names):
        found.add(base)
    return found


def imports(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_in_functions(known):
    """Module, line and what is imported there, of every import of rnnlens within a function."""
    found = set()
    for name, (tree, is_package) in known.items():
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        for node in {node for function in functions for node in imports(function)}:
            found |= {(name, node.lineno, target) for target in targets(node, name, is_package, known)}
    return found


def circles(known):
    """Strongly connected components of more than one module (Tarjan 1972, doi:10.1137/0201010), largest first."""
    edges = {
        name: {target for node in imports(tree) for target in targets(node, name, is_package, known)} - {name}
        for name, (tree, is_package) in known.items()
    }
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in edges:
        if name not in index:
            visit(name)
    return sorted((part for part in found if len(part) > 1), key=len, reverse=True)


def package(module):
    """The package that a module belongs to, of an adapter that of its framework: ``verbs``, ``adapters.keras``."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["adapters"] else parts[:1])


def test_no_function_imports_rnnlens():
    found = imports_in_functions(modules())
    new = sorted(hit for hit in found if package(hit[0]) not in IMPORTS_IN_FUNCTIONS)
    assert not new, f"move these imports to the top of the module: {new}"
    assert {package(hit[0]) for hit in found} == IMPORTS_IN_FUNCTIONS, "clean: take it out of IMPORTS_IN_FUNCTIONS"


def test_no_module_stands_in_an_import_circle():
    found = circles(modules())
    new = [circle for circle in found if not {package(name) for name in circle} <= IMPORT_CIRCLES]
    assert not new, f"these modules import each other: {new}"
    standing = {package(name) for circle in found for name in circle}
    assert standing == IMPORT_CIRCLES, "clean: take it out of IMPORT_CIRCLES"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("from .b import f", "def f():\n    from . import a"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import f", "import rnnlens.a"),
    ],
    ids=["within a function", "under TYPE_CHECKING"],
)
def test_a_planted_circle_is_found(tmp_path, a, b):
    for name, text in {"__init__": "", "a": a, "b": b}.items():
        (tmp_path / f"{name}.py").write_text(text)
    known = modules(tmp_path)
    assert circles(known) == [["rnnlens.a", "rnnlens.b"]]
    assert imports_in_functions(known) == ({("rnnlens.b", 2, "rnnlens.a")} if "def f" in b else set())
