"""Every example in a docstring runs and prints the output that it shows."""

from __future__ import annotations

import doctest
import importlib
import inspect
import operator
import pkgutil

import pytest

import rnnlens

SUBMODULES = [module.name for module in pkgutil.walk_packages(rnnlens.__path__, "rnnlens.")]
MODULES = ["rnnlens", *(name for name in SUBMODULES if not name.endswith("__main__"))]  # __main__ runs on import
LENIENT_ABOUT_SPACE = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=LENIENT_ABOUT_SPACE)
    assert result.failed == 0


VERBS = [
    f"{namespace}.{name}".removeprefix("rnnlens.")
    for namespace in ("rnnlens", "torch", "keras", "jax")
    for name in (rnnlens if namespace == "rnnlens" else getattr(rnnlens, namespace)).__all__
    if not name.startswith("__")
]


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_an_example_that_runs(name):
    verb = operator.attrgetter(name)(rnnlens)
    if inspect.ismodule(verb):
        return
    examples = doctest.DocTestParser().get_examples(verb.__doc__)
    assert any(name.rpartition(".")[2] in e.source and doctest.SKIP not in e.options for e in examples)


def test_examples_exist():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [e for name in MODULES for test in finder.find(importlib.import_module(name)) for e in test.examples]
    assert len(examples) >= 5
