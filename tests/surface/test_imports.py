"""Imports of rnnlens within its source are at the top of a module and form no circle, by the source text."""

import ast
from functools import cache
from pathlib import Path

import pytest

import rnnlens

ROOT = Path(rnnlens.__file__).parent

#: Packages whose functions still import modules of rnnlens; no other package may. A package without these imports must
#: be removed from the set.
IMPORTS_IN_FUNCTIONS = {"cli"}

#: Packages with import circles, imports under TYPE_CHECKING included; the same rules hold.
IMPORT_CIRCLES = set()


@cache
def parse_modules(root=ROOT):
    """Return by dotted name the syntax tree of each module, and whether it is the ``__init__`` of a package."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        components = ("rnnlens", *path.relative_to(root).with_suffix("").parts)
        name = ".".join(components[:-1] if components[-1] == "__init__" else components)
        sources[name] = (ast.parse(path.read_text()), path.name == "__init__.py")
    return sources


def imported_modules(node, name, is_package, sources):
    """Return modules of rnnlens that an import in module ``name`` loads; a submodule rather than its package."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in sources}
    base = node.module or ""
    if node.level:
        parents = name.split(".") if is_package else name.split(".")[:-1]
        parents = parents[: len(parents) - node.level + 1]
        base = ".".join([*parents, *([base] if base else [])])
    imported = {f"{base}.{alias.name}" for alias in node.names} & sources.keys()
    if base in sources and len(imported) < len(node.names):
        imported.add(base)
    return imported


def import_nodes(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def function_imports(sources):
    """Return (module, line, imported module) of every import of rnnlens within a function."""
    imports = set()
    for name, (tree, is_package) in sources.items():
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        for node in {node for function in functions for node in import_nodes(function)}:
            imports |= {(name, node.lineno, target) for target in imported_modules(node, name, is_package, sources)}
    return imports


def import_circles(sources):
    """Return strongly connected components of several modules (Tarjan 1972, doi:10.1137/0201010), largest first."""
    edges = {
        name: {target for node in import_nodes(tree) for target in imported_modules(node, name, is_package, sources)}
        - {name}
        for name, (tree, is_package) in sources.items()
    }
    index, low, stack, components = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            components.append(sorted(stack[start:]))
            del stack[start:]

    for name in edges:
        if name not in index:
            visit(name)
    return sorted((component for component in components if len(component) > 1), key=len, reverse=True)


def package_of(module):
    """Return the package of a module, for adapters that of the framework: ``verbs``, ``adapters.keras``."""
    components = module.split(".")[1:]
    return ".".join(components[:2] if components[:1] == ["adapters"] else components[:1])


def test_no_function_imports_rnnlens():
    imports = function_imports(parse_modules())
    unexpected = sorted(entry for entry in imports if package_of(entry[0]) not in IMPORTS_IN_FUNCTIONS)
    assert not unexpected, f"move these imports to the top of the module: {unexpected}"
    assert {package_of(entry[0]) for entry in imports} == IMPORTS_IN_FUNCTIONS, (
        "clean: take it out of IMPORTS_IN_FUNCTIONS"
    )


def test_no_module_stands_in_an_import_circle():
    circles = import_circles(parse_modules())
    unexpected = [circle for circle in circles if not {package_of(name) for name in circle} <= IMPORT_CIRCLES]
    assert not unexpected, f"these modules import each other: {unexpected}"
    circular_packages = {package_of(name) for circle in circles for name in circle}
    assert circular_packages == IMPORT_CIRCLES, "clean: take it out of IMPORT_CIRCLES"


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
    sources = parse_modules(tmp_path)
    assert import_circles(sources) == [["rnnlens.a", "rnnlens.b"]]
    assert function_imports(sources) == ({("rnnlens.b", 2, "rnnlens.a")} if "def f" in b else set())
