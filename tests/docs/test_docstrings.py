"""Every example in a docstring runs and prints the output that it shows."""

from __future__ import annotations

import doctest
import importlib
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


def test_examples_exist():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [e for name in MODULES for test in finder.find(importlib.import_module(name)) for e in test.examples]
    assert len(examples) >= 5
