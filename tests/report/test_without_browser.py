"""Without a browser, `make test` names the tests that it left out; in CI it fails instead."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SUITES = Path(__file__).resolve().parents[1] / "suites.py"


@pytest.fixture
def suites(monkeypatch):
    """Return a function that imports tests/suites.py as on a machine without a browser, in CI or not."""
    monkeypatch.setattr("shutil.which", lambda name: None)

    def load_suites(ci):
        monkeypatch.setenv("CI", "1") if ci else monkeypatch.delenv("CI", raising=False)
        spec = importlib.util.spec_from_file_location("suites", SUITES)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(__import__("sys").modules, "suites", module)
        spec.loader.exec_module(module)
        return module

    return load_suites


def report_suite(module):
    return next(suite for suite in module.SUITES if suite.name == "report")


def test_it_is_said_by_name(suites, capsys):
    module = suites(ci=False)
    suite = report_suite(module)
    assert "not browser and (not full)" in module.commands_of(suite, "test")[0]
    assert "not browser and (full or not full)" in module.commands_of(suite, "full")[0]
    assert module.conclude([module.Outcome(suite, 0, 1.0, 1.0, "1 passed in 1s")]) == 0
    assert "NOT TESTED: report in a browser" in capsys.readouterr().out


def test_in_ci_the_tests_run_and_fail(suites, capsys):
    module = suites(ci=True)
    suite = report_suite(module)
    assert not any("not browser" in argument for argument in module.commands_of(suite, "test")[0])
    module.conclude([module.Outcome(suite, 1, 1.0, 1.0, "1 failed in 1s")])
    assert "NOT TESTED" not in capsys.readouterr().out
