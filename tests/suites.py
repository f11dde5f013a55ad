"""Run every suite in its own process, as many at once as there are cores, and print a summary.

A deep-learning framework is chosen once per process, so the suites are: the checks of the code, the tests that need no
particular framework, the Keras contract once per engine, torch, and the documents. A suite that fails, a suite that
collects nothing and a test file that belongs to no suite all make the run fail.

    python tests/suites.py [--full] [SUITE ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from browsers import chromium  # noqa: E402

#: In CI, browser tests must run; elsewhere a missing browser is only reported.
IN_CI = bool(os.environ.get("CI"))
BIN = Path(sys.executable).parent
COUNTED_OUTCOMES = ("passed", "failed", "error", "errors", "skipped", "deselected", "xfailed", "xpassed")


@dataclass(frozen=True)
class Suite:
    """A suite: pytest on some paths, or commands run in turn, with additions to the environment."""

    name: str
    paths: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    needs_browser: bool = False
    only_full: bool = False


@dataclass(frozen=True)
class Outcome:
    suite: Suite
    code: int
    seconds: float
    cpu_seconds: float
    output: str

    @property
    def counts(self) -> Counter[str]:
        """Return the numbers of pytest's last line by outcome: passed, failed, skipped ..."""
        matches = re.findall(r"(\d+) (\w+)", self.closing_line)
        return Counter({category: int(number) for number, category in matches if category in COUNTED_OUTCOMES})

    @property
    def closing_line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip("= ") if lines else "printed nothing"


LINT = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy", "src/rnnlens"),
    ("lint-imports", "--no-cache"),
)

KERAS = (
    "tests/contract/keras",
    "tests/oracle/keras",
    "tests/oracle/held_models/keras",
    "tests/tracking/keras",
    "tests/under_fire/keras",
)


def keras_suite(engine: str) -> Suite:
    """Return the suite of Keras on one engine; `product` and `one_engine` choose its tests (tests/conftest.py)."""
    return Suite(f"keras-{engine}", KERAS, environment={"KERAS_BACKEND": engine})


GRAPHS = ("tests/contract/tf_graph", "tests/oracle/tf_graph")


def graph_suite(control_flow: str) -> Suite:
    """Return the suite of TensorFlow-1 graphs, whose loops are Enter and Exit operations (v1) or While (v2)."""
    return Suite(f"tf_graph-{control_flow}", GRAPHS, environment={"RNNLENS_CONTROL_FLOW": control_flow})


#: Tests of Keras 3 that Keras 2 also has to pass, by ``tests/helpers/spoken_keras.py``.
TF_KERAS = (
    *("option_product", "contract", "cells_and_losses", "left_as_found", "find_nonfinite", "models_without_input"),
    *("conv_lstm", "certificate_of_samples", "text"),
)

# The longest first, so that all cores finish at about the same time.
SUITES = (
    keras_suite("jax"),
    Suite(
        "torch",
        (
            "tests/contract/torch",
            "tests/oracle/torch",
            "tests/oracle/held_models/torch",
            "tests/tracking/torch",
            "tests/under_fire/torch",
        ),
    ),
    keras_suite("tensorflow"),
    graph_suite("v1"),
    Suite(
        "core",
        ("tests/unit", "tests/property", "tests/surface", "tests/third_framework"),
        environment={"KERAS_BACKEND": "jax"},
    ),
    keras_suite("torch"),
    Suite(
        "tf_keras",
        (
            *("tests/contract/tf_keras", "tests/oracle/tf_keras", "tests/tracking/tf_keras"),
            *(f"tests/contract/keras/test_{name}.py" for name in TF_KERAS),
            "tests/oracle/keras/test_registered_cells.py",
            "tests/oracle/keras/test_cell_loops.py",
            "tests/oracle/keras/test_programs.py",
            "tests/tracking/keras/test_failures.py",
        ),
        # KERAS_BACKEND chooses which cases of a product run, see tests/conftest.py.
        environment={"RNNLENS_TESTED_KERAS": "tf_keras", "TF_USE_LEGACY_KERAS": "1", "KERAS_BACKEND": "tensorflow"},
    ),
    Suite("docs", ("tests/docs",), environment={"KERAS_BACKEND": "jax"}),
    # Tests of files come first, without a framework: they fork, which JAX' threads do not survive. Commands come last.
    Suite("files", ("tests/under_fire/files", "tests/wheel", "tests/under_fire/cli")),
    graph_suite("v2"),
    # Data in Dask chunks; the cluster's workers run in their own processes.
    Suite("dask", ("tests/dask",), environment={"KERAS_BACKEND": "jax"}),
    Suite("report", ("tests/report",), environment={"KERAS_BACKEND": "torch"}, needs_browser=True),
    Suite("lint", commands=LINT),
    # Other packages' trainers and loggers: slow imports, and warnings of their own.
    Suite("tools", ("tests/tracking/tools",)),
    # The lowest versions that pyproject.toml allows, each Python version in its own environment.
    *(
        Suite(f"lowest-{version}", commands=(("python", "tests/lowest.py", "--python", version),), only_full=True)
        for version in ("3.11", "3.12", "3.13")
    ),
)


def commands_of(suite: Suite, full: bool) -> tuple[tuple[str, ...], ...]:
    """Return the suite's own commands, or pytest on its paths."""
    if suite.commands:
        return tuple((str(BIN / command[0]), *command[1:]) for command in suite.commands)
    selection = ("-m", "full or not full") if full else ()
    if suite.needs_browser and chromium() is None and not IN_CI:
        selection = ("-m", "not browser" if full else "not browser and not full")
    return ((sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection, *suite.paths),)


def environment_of(suite: Suite, jax_cache: str) -> dict[str, str]:
    """Return the environment of a suite; JAX stores compiled programs in the folder ``jax_cache``."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not occupy the other suite's core
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MPLBACKEND": "Agg",
        "RNNLENS_SKIP_IS_FAILURE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no test needs other plugins
        "PYTHONDONTWRITEBYTECODE": "",  # cache bytecode, so that modules are compiled only once
        # Many small programs are compiled and run once: XLA's optimisation costs more than it saves.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
        # The same small programs are compiled again by other tests and by processes that tests start.
        "JAX_COMPILATION_CACHE_DIR": jax_cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **suite.environment,
    }


def run(suite: Suite, full: bool) -> Outcome:
    """Run all commands of a suite, even after one has failed."""
    with TemporaryDirectory() as jax_cache:  # one per suite: JAX does not lock it
        return run_in(suite, full, environment_of(suite, jax_cache))


def run_in(suite: Suite, full: bool, environment: dict[str, str]) -> Outcome:
    """Run all commands of a suite in the given environment, even after one has failed."""
    start, code, cpu_seconds, output = time.perf_counter(), 0, 0.0, []
    for command in commands_of(suite, full):
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output.append(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        code = code or process.returncode
        cpu_seconds += usage.ru_utime + usage.ru_stime  # including its child processes
    return Outcome(suite, code, time.perf_counter() - start, cpu_seconds, "".join(output))


def orphan_files() -> list[str]:
    """Return the test files that no suite runs."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    suite_paths = tuple(f"{path}/" for suite in SUITES for path in suite.paths)
    return sorted(file for file in files if not file.startswith(suite_paths))


def main() -> int:
    """Run the chosen suites, print the output of failed ones and the totals, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="also the wide sweeps marked 'full'")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(suite.name for suite in SUITES))
    arguments = parser.parse_args()
    selected = [
        suite
        for suite in SUITES
        if suite.name in arguments.suites or not (arguments.suites or (suite.only_full and not arguments.full))
    ]
    if unknown := set(arguments.suites) - {suite.name for suite in SUITES}:
        parser.error(f"no suite named {', '.join(sorted(unknown))}")

    outcomes = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for future in as_completed([pool.submit(run, suite, arguments.full) for suite in selected]):
            outcome = future.result()
            outcomes.append(outcome)
            verdict = "FAILED" if outcome.code else "ok"
            if outcome.code:
                print(f"\n{'=' * 30} {outcome.suite.name} {'=' * 30}\n{outcome.output}")
            times = f"{outcome.seconds:5.0f} s{outcome.cpu_seconds:5.0f} s of processor"
            print(f"{outcome.suite.name:18}{verdict:8}{times}  {outcome.closing_line}", flush=True)
    return conclude(outcomes)


def conclude(outcomes: list[Outcome]) -> int:
    """Print the totals and the suites that could not be tested. Return the exit code."""
    if chromium() is None and not IN_CI:
        for outcome in outcomes:
            if outcome.suite.needs_browser:
                print(f"NOT TESTED: {outcome.suite.name} in a browser, for want of one: apt-get install chromium")
    orphans = orphan_files()
    for path in orphans:
        print(f"{path}: belongs to no suite of tests/suites.py")
    total = sum((outcome.counts for outcome in outcomes), Counter())
    broken = [outcome.suite.name for outcome in outcomes if outcome.code]
    if broken:
        print(f"\nfailed suites: {', '.join(broken)}")
    failed = total["failed"] + total["error"] + total["errors"]
    print(f"\n{total['passed']} passed, {max(failed, len(broken) + len(orphans))} failed, {total['skipped']} skipped")
    return 1 if broken or orphans else 0


if __name__ == "__main__":
    sys.exit(main())
