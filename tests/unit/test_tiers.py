"""Tiers of tests: what each of them runs, which suites test a changed file, and the time limit of CI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

FOLDERS = {
    "unit/test_a.py": """
import pytest

@pytest.mark.parametrize("case", ["one", "two"])
def test_unit(case): pass
""",
    "oracle/test_b.py": """
import pytest

@pytest.mark.parametrize("case", ["one", "two"])
def test_oracle(case): pass

@pytest.mark.check
@pytest.mark.parametrize("case", ["one", "two"])
def test_verb(case): pass

@pytest.mark.product(keep=("two", "three"))
@pytest.mark.parametrize("case", ["one", "two", "three"])
def test_product(case): pass

@pytest.mark.full
def test_sweep(): pass

@pytest.mark.check
@pytest.mark.slow
def test_process(): pass
""",
}
MARKERS = "[pytest]\nmarkers =\n  check:\n  slow:\n  full:\n  product(keep):\n"
#: Names of the tests that each tier runs of a suite, by the cases that `make test` runs.
EXPECTED = {
    ("check", "all"): {"unit[one]", "verb[one]"},
    ("test", "one of each test"): {
        "unit[one]",
        "oracle[one]",
        "verb[one]",
        "product[two]",
        "product[three]",
        "process",
    },
    ("test", "one of each file"): {"unit[one]", "oracle[one]"},
    ("test", "all"): {
        *("unit[one]", "unit[two]", "oracle[one]", "oracle[two]", "verb[one]", "verb[two]", "process"),
        *("product[two]", "product[three]"),
    },
    ("rest", "one of each test"): {"unit[two]", "oracle[two]", "verb[two]", "product[one]", "sweep"},
}


@pytest.fixture(scope="module")
def suites():
    spec = importlib.util.spec_from_file_location("suites", TESTS / "suites.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["suites"] = module
    spec.loader.exec_module(module)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as main() sets it
    yield module
    signal.signal(signal.SIGINT, before)
    del sys.modules["suites"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Provide a folder with the conftest.py of all tests and two small files of tests."""
    root = tmp_path_factory.mktemp("tree")
    tests = root / "tests"
    for name, text in FOLDERS.items():
        (tests / name).parent.mkdir(parents=True)
        (tests / name).write_text(text)
    shutil.copy(TESTS.parent / "conftest.py", root)
    (root / "pytest.ini").write_text(MARKERS)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "torch"])
@pytest.mark.parametrize(("tier", "cases"), EXPECTED)
def test_tests_of_a_tier(suites, tree, tier, cases, engine):
    suite = suites.Suite("some", (".",), environment={"KERAS_BACKEND": engine}, cases=cases)
    (command,) = suites.commands_of(suite, tier)
    process = subprocess.run(
        [*command, "--collect-only", "--import-mode=importlib"],
        cwd=tree,
        env=suites.environment_of(suite, tier, ""),
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.partition("::test_")[2] for line in process.stdout.splitlines() if "::" in line}
    # The engine on which `product` runs all cases, where they are not limited.
    further = {"product[one]"} if (tier, cases, engine) == ("test", "all", "torch") else set()
    assert names == EXPECTED[tier, cases] | further


def test_no_suite_loses_a_test_in_the_full_tier(suites):
    for suite in suites.SUITES:
        environment = suites.environment_of(suite, "full", "")
        assert environment["RNNLENS_CASES"] == "all"
        assert suite.commands or "full or not full" in " ".join(suites.commands_of(suite, "full")[0])


EVERY_ADAPTER = ["jax", "torch", "keras-jax", "keras-tensorflow", "keras-torch"]
EVERY_ADAPTER += ["tf_keras", "tf_graph-v1", "tf_graph-v2"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("src/rnnlens/adapters/torch/record.py", ["torch", "tools"]),
        ("src/rnnlens/plot/maps.py", ["unit", "docs"]),
        ("tests/oracle/tf_keras/test_training_options.py", ["tf_keras"]),
        ("tests/contract/keras/test_contract.py", ["keras-jax", "keras-tensorflow", "keras-torch", "tf_keras"]),
        ("tests/helpers/report_pages.py", ["unit", "report"]),
        ("tests/helpers/specimens_torch.py", ["unit", *EVERY_ADAPTER]),
        ("tests/contract/every_adapter/test_planted_faults.py", EVERY_ADAPTER),
        ("docs/README.md", ["docs"]),
        ("LICENSE", []),
    ],
)
def test_suites_of_a_changed_file(suites, file, expected):
    assert sorted(suites.suites_of(file)) == sorted(expected)


def test_a_change_of_the_core_touches_every_suite(suites):
    assert suites.suites_of("src/rnnlens/recurrence/adjoint.py") == [s.name for s in suites.SUITES if not s.only_full]
    files = ["src/rnnlens/recurrence/adjoint.py", "src/rnnlens/cluster.py"]
    assert suites.touched_suites(files)[0].name == "dask"


def commit(root, name, hours_ago):
    date = f"{int(time.time()) - 3600 * hours_ago} +0000"
    (root / name).write_text(name)
    identity = {f"GIT_{role}_{field}": "a@b" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    environment = {**os.environ, **identity, "GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date}
    for command in (["add", "."], ["commit", "-q", "-m", name]):
        subprocess.run(["git", *command], cwd=root, env=environment, check=True)


def test_what_has_changed(suites, tmp_path, monkeypatch):
    monkeypatch.delenv("RNNLENS_BASE", raising=False)
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=tmp_path, check=True)
    for name, hours_ago in (("first", 60), ("landed", 30), ("begun", 3), ("done", 1)):
        commit(tmp_path, name, hours_ago)
    (tmp_path / "new").write_text("")
    assert suites.changed_files(tmp_path)[1] == ["begun", "done", "new"]
    monkeypatch.setenv("RNNLENS_BASE", "HEAD~1")
    assert suites.changed_files(tmp_path)[1] == ["done", "new"]
    monkeypatch.delenv("RNNLENS_BASE")
    subprocess.run(["git", "checkout", "-q", "-b", "branch"], cwd=tmp_path, check=True)
    commit(tmp_path, "mine", 0)
    assert suites.changed_files(tmp_path)[1] == ["mine", "new"]


def test_a_suite_runs_where_a_process_tells_no_time_of_its_children(suites, monkeypatch):
    monkeypatch.delattr(os, "wait4", raising=False)  # as on Windows
    program = "print('1 failed, 2 passed: é in 3s'); raise SystemExit(3)"
    outcome = suites.run(suites.Suite("failing", commands=(("python", "-c", program),)), "test")
    assert (outcome.code, outcome.failures, outcome.cpu_seconds) == (3, 1, 0.0)
    assert "é" in outcome.output


@pytest.mark.linux
def test_a_suite_is_cut_at_the_deadline(suites):
    sleeper = suites.Suite("sleeper", commands=(("python", "-c", "import time; time.sleep(600)"),))
    outcome = suites.run(sleeper, "rest", time.monotonic() + 1)
    assert outcome.is_cut
    assert outcome.code == 0
    assert suites.run(sleeper, "rest", time.monotonic() - 1) is None


@pytest.mark.linux
def test_a_failure_before_the_deadline_counts(suites):
    program = """
import time
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("1 failed, 2 passed in 3s")
    raise SystemExit(2)
"""
    failing = suites.Suite("failing", commands=(("python", "-c", program),))
    outcome = suites.run(failing, "rest", time.monotonic() + 1)
    assert outcome.is_cut
    assert outcome.code != 0
