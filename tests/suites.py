"""Run suites of tests, each in its own process, as many at once as there are cores, and print a summary.

A deep-learning framework is chosen once per process, so the suites are: the checks of the code, the tests that need no
particular framework, the Keras contract once per engine, torch, and the documents. A suite that fails, a suite that
collects nothing and a test file that belongs to no suite all make the run fail. There are three tiers, each of which
contains the one before; tests/README.md says how a test chooses its tier.

    python tests/suites.py --check      # `make check`: lint, and the tests marked `check`
    python tests/suites.py              # `make test`: one case of each test, or of each file on further engines
    python tests/suites.py --full       # `make test-full`: everything
    python tests/suites.py --changed    # as without an option, then everything of the suites that test what
                                        # has changed, for as many minutes as --minutes allows
    python tests/suites.py torch docs   # these suites only, with any of the options above
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from browsers import chromium  # noqa: E402
from changes import changed_files  # noqa: E402

#: In CI, browser tests must run; elsewhere a missing browser is only reported.
IN_CI = bool(os.environ.get("CI"))
BIN = Path(sys.executable).parent
#: Exit code of pytest without a test; a timer takes no infinite number of seconds.
NO_TESTS, MOST_SECONDS = 5, 1e6
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
    cases: str = "one of each test"  # that `make test` runs; of suites whose code another one tests, "one of each file"


@dataclass(frozen=True)
class Outcome:
    suite: Suite
    code: int
    seconds: float
    cpu_seconds: float
    output: str
    is_cut: bool = False  # ended by the time limit

    @property
    def counts(self) -> Counter[str]:
        """Return the numbers of pytest's last line by outcome: passed, failed, skipped ..."""
        matches = re.findall(r"(\d+) (\w+)", self.closing_line)
        return Counter({category: int(number) for number, category in matches if category in COUNTED_OUTCOMES})

    @property
    def failures(self) -> int:
        return self.counts["failed"] + self.counts["error"] + self.counts["errors"]

    @property
    def closing_line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip("= ") if lines else "printed nothing"


LINT = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy", "src/rnnlens", "packages/rnnlens-tf1/src/rnnlens_tf1"),
    ("lint-imports", "--no-cache"),
)

#: Tests that every adapter has to pass, with the models that ``tests/helpers/tested_adapter.py`` finds.
EVERY_ADAPTER = "tests/contract/every_adapter"

KERAS = (
    EVERY_ADAPTER,
    "tests/contract/keras",
    "tests/oracle/keras",
    "tests/oracle/held_models/keras",
    "tests/tracking/keras",
    "tests/under_fire/keras",
)


def keras_suite(engine: str) -> Suite:
    """Return the suite of Keras on one engine; `product` and `one_engine` choose its tests (conftest.py)."""
    cases = "one of each test" if engine == "torch" else "one of each file"
    environment = {"KERAS_BACKEND": engine, "RNNLENS_ADAPTER": "keras"}
    return Suite(f"keras-{engine}", KERAS, environment=environment, cases=cases)


#: The distribution rnnlens-tf1, with its own source and tests.
TF1 = "packages/rnnlens-tf1"
TEST_FOLDERS = ("tests", f"{TF1}/tests")
GRAPHS = (EVERY_ADAPTER, f"{TF1}/tests/contract", f"{TF1}/tests/oracle")


def graph_suite(control_flow: str) -> Suite:
    """Return the suite of TensorFlow-1 graphs, whose loops are Enter and Exit operations (v1) or While (v2)."""
    environment = {"RNNLENS_CONTROL_FLOW": control_flow, "RNNLENS_ADAPTER": "tf1"}
    return Suite(f"tf_graph-{control_flow}", GRAPHS, environment=environment, cases="one of each file")


#: Tests of Keras 3 that Keras 2 also has to pass, by ``tests/helpers/spoken_keras.py``.
TF_KERAS = (
    *("option_product", "contract", "cells_and_losses", "changed_models", "find_nonfinite", "models_without_input"),
    *("conv_lstm", "cross_entropies", "text", "generators", "left_out_inputs"),
)

#: Tests in random order: no test depends on what another one leaves behind.
RANDOMLY = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "randomly", "--randomly-dont-reset-seed")
RANDOM_PATHS = (
    *("tests/unit/recurrence", "tests/unit/measures", "tests/unit/diagnosis", "tests/unit/results", EVERY_ADAPTER),
    *("tests/contract/torch", "tests/oracle/torch/test_gradients_semantics.py", "tests/oracle/torch/test_jacobian.py"),
)
#: Folders of tests/unit: measures and the numerics of recurrences, and the others.
NUMERIC = ("diagnosis", "measures", "recurrence")
OTHERS = ("cli", "plot", "results", "tracking")


def relative(path: Path) -> str:
    """Return a path relative to the root of the project, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


# The longest first, so that all cores finish at about the same time.
SUITES = (
    keras_suite("jax"),
    Suite(
        "torch",
        (
            EVERY_ADAPTER,
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
        "jax",
        (EVERY_ADAPTER, "tests/contract/jax", "tests/oracle/jax", "tests/tracking/jax"),
        environment={"RNNLENS_ADAPTER": "jax"},
    ),
    Suite(
        "core",
        (*(f"tests/unit/{folder}" for folder in NUMERIC), "tests/property", "tests/surface", "tests/third_framework"),
        environment={"KERAS_BACKEND": "jax"},
        cases="all",
    ),
    # Figures, files, the command line, records.
    Suite(
        "unit",
        (
            *(f"tests/unit/{folder}" for folder in OTHERS),
            *map(relative, sorted((ROOT / "tests/unit").glob("test_*.py"))),
        ),
        environment={"KERAS_BACKEND": "jax"},
    ),
    keras_suite("torch"),
    Suite(
        "tf_keras",
        (
            *(EVERY_ADAPTER, "tests/contract/tf_keras", "tests/oracle/tf_keras", "tests/tracking/tf_keras"),
            *(f"tests/contract/keras/test_{name}.py" for name in TF_KERAS),
            "tests/oracle/keras/test_registered_cells.py",
            "tests/oracle/keras/test_cell_loops.py",
            "tests/oracle/keras/test_layers_per_step.py",
            "tests/oracle/keras/test_programs.py",
            "tests/oracle/held_models/keras/test_order_of_calls.py",
            "tests/tracking/keras/test_failures.py",
        ),
        # KERAS_BACKEND chooses which cases of a product run, see conftest.py.
        environment={
            "RNNLENS_ADAPTER": "tf_keras",
            "RNNLENS_TESTED_KERAS": "tf_keras",
            "TF_USE_LEGACY_KERAS": "1",
            "KERAS_BACKEND": "tensorflow",
        },
        cases="one of each file",
    ),
    Suite("docs", ("tests/docs",), environment={"KERAS_BACKEND": "jax"}),
    # Tests of files come first, without a framework: they fork, which JAX' threads do not survive. Commands come last.
    Suite("files", ("tests/under_fire/files", "tests/wheel", "tests/under_fire/cli")),
    graph_suite("v2"),
    # Data in Dask chunks; the cluster's workers run in their own processes.
    Suite("dask", ("tests/dask",), environment={"KERAS_BACKEND": "jax"}, cases="one of each file"),
    Suite("report", ("tests/report",), environment={"KERAS_BACKEND": "torch"}, needs_browser=True),
    Suite("lint", commands=LINT),
    # Other packages' trainers and loggers: slow imports, and warnings of their own.
    Suite("tools", ("tests/tracking/tools",)),
    # Another order in each run; the seed is printed.
    Suite("random-order", commands=((*RANDOMLY, *RANDOM_PATHS),), environment={"KERAS_BACKEND": "jax"}, only_full=True),
    # The lowest versions that pyproject.toml allows, each Python version in its own environment.
    *(
        Suite(f"lowest-{version}", commands=(("python", "tests/lowest.py", "--python", version),), only_full=True)
        for version in ("3.11", "3.12", "3.13")
    ),
)


#: Suites with tests marked `check`.
CHECK = ("unit", "torch", "core", "lint")
EVERY_SUITE = tuple(suite.name for suite in SUITES if not suite.only_full)
KERAS_SUITES = ("keras-torch", "keras-jax", "keras-tensorflow", "tf_keras")
GRAPH_SUITES = ("tf_graph-v1", "tf_graph-v2")
#: Suites that test a part of the source. Every suite tests the rest of it; a folder of tests is tested by its suites.
SUITES_OF = {
    "src/rnnlens": EVERY_SUITE,
    "src/rnnlens/adapters/jax": ("jax",),
    "src/rnnlens/adapters/keras": KERAS_SUITES,
    "src/rnnlens/adapters/torch": ("torch", "tools"),
    "src/rnnlens/autodiff/torch.py": ("torch", "keras-torch"),
    "src/rnnlens/autodiff/jax.py": ("keras-jax", "jax"),
    "src/rnnlens/autodiff/tensorflow.py": ("keras-tensorflow", *GRAPH_SUITES),
    TF1: (*GRAPH_SUITES, "files"),
    "src/rnnlens/cli": ("unit", "files"),
    "src/rnnlens/cluster.py": ("dask",),
    "src/rnnlens/plot": ("unit", "docs"),
    "src/rnnlens/reporting": ("report",),
    "src/rnnlens/results/disk": ("unit", "files", "dask"),
    "src/rnnlens/tracking": ("unit", "torch", "keras-torch", "tools", "files"),
    "src/rnnlens/tracking/jax": ("jax",),
    "src/rnnlens/verbs/chunked": ("dask",),
    "src/rnnlens/measures": ("core", "torch", "docs"),
    **dict.fromkeys(("tests/lowest.py", "constraints.txt"), ("lowest-3.11", "lowest-3.12", "lowest-3.13")),
    **dict.fromkeys(("docs", "examples", "README.md", "CONTRIBUTING.md", "mkdocs.yml"), ("docs",)),
    **dict.fromkeys(("pyproject.toml", "conftest.py", "tests/suites.py"), EVERY_SUITE),
}


def suites_of(file: str) -> list[str]:
    """Return the names of the suites that test a changed file."""
    path = Path(file)
    if path.parent.name == "helpers":
        names = re.compile(rf"\b({'|'.join(helpers_that_use(path.stem))})\b")
        return [suite.name for suite in SUITES if any(names.search(test.read_text()) for test in files_of(suite))]
    testing = [suite.name for suite in SUITES if any(path.is_relative_to(folder) for folder in suite.paths)]
    covering = max((part for part in SUITES_OF if path.is_relative_to(part)), key=len, default=None)
    return testing or list(SUITES_OF.get(covering, ()))


def helpers_that_use(name: str) -> set[str]:
    """Return the names of the helpers that name a helper, directly or through others, itself included."""
    texts = {
        file.stem: file.read_text() for folder in TEST_FOLDERS for file in (ROOT / folder / "helpers").glob("*.py")
    }
    names, found = {name}, {name}
    while found:
        pattern = re.compile(rf"\b({'|'.join(found)})\b")
        found = {other for other, text in texts.items() if pattern.search(text)} - names
        names |= found
    return names


def files_of(suite: Suite) -> list[Path]:
    """Return the Python files of a suite."""
    paths = [ROOT / path for path in suite.paths]
    return [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]


def touched_suites(files: Iterable[str]) -> list[Suite]:
    """Return the suites that test the changed files, those with the most changed files first."""
    counts = Counter(name for file in files for name in suites_of(file))
    by_name = {suite.name: suite for suite in SUITES}
    return [by_name[name] for name, _ in counts.most_common()]


#: Choice of tests by pytest's option ``-m``. ``rest`` is what ``test`` leaves out of ``full``.
SELECTIONS = {
    "check": "check and not slow and not full",
    "test": "not full",
    "full": "full or not full",
    "rest": "full",
}


def commands_of(suite: Suite, tier: str) -> tuple[tuple[str, ...], ...]:
    """Return the suite's own commands, or pytest on its paths."""
    if suite.commands:
        return tuple((str(BIN / command[0]), *command[1:]) for command in suite.commands)
    selection = SELECTIONS[tier]
    if suite.needs_browser and chromium() is None and not IN_CI:
        selection = f"not browser and ({selection})"
    return ((sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", selection, *suite.paths),)


def cases_of(suite: Suite, tier: str) -> str:
    """Return how many cases of a suite a tier runs; `rest` is what `make test` leaves out."""
    return {"check": "one of each test", "full": "all"}.get(tier, suite.cases)


def environment_of(suite: Suite, tier: str, jax_cache: str) -> dict[str, str]:
    """Return the environment of a suite; JAX stores compiled programs in the folder ``jax_cache``."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not occupy the other suite's core
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MPLBACKEND": "Agg",
        "RNNLENS_SKIP_IS_FAILURE": "1",
        # How many tests are enough, see conftest.py.
        "RNNLENS_CASES": cases_of(suite, tier),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no test needs other plugins
        "PYTHONUTF8": "1",  # on Windows, text is of another encoding otherwise
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


def run(suite: Suite, tier: str, deadline: float = float("inf")) -> Outcome | None:
    """Run all commands of a suite, even after one has failed; return None if the deadline has passed before."""
    if time.monotonic() > deadline:
        return None
    with TemporaryDirectory() as jax_cache:  # one per suite: JAX does not lock it
        return run_in(suite, tier, environment_of(suite, tier, jax_cache), deadline)


def run_in(suite: Suite, tier: str, environment: dict[str, str], deadline: float) -> Outcome:
    """Run all commands of a suite in the given environment, until the deadline, even after one has failed."""
    start, code, cpu_seconds, output, is_cut = time.perf_counter(), 0, 0.0, [], False
    for command in commands_of(suite, tier):
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        seconds_left = min(deadline - time.monotonic(), MOST_SECONDS)
        timers = Timer(seconds_left, process.send_signal, [signal.SIGINT]), Timer(seconds_left + 60, process.kill)
        for timer in timers:
            timer.start()
        with process.stdout as stream:
            output.append(stream.read())
        cpu_seconds += wait_for(process)
        for timer in timers:
            timer.cancel()
        is_cut = is_cut or time.monotonic() > deadline
        code = code or process.returncode
    outcome = Outcome(suite, code, time.perf_counter() - start, cpu_seconds, "".join(output), is_cut)
    if outcome.code == NO_TESTS and tier == "rest" and not outcome.failures:
        return replace(outcome, code=0)  # the suite has no test that `make test` leaves out
    return replace(outcome, code=0) if outcome.is_cut and not outcome.failures else outcome


def wait_for(process: subprocess.Popen) -> float:
    """Wait until a process ends; return its seconds of processor, child processes included, or 0 on Windows."""
    if not hasattr(os, "wait4"):  # Windows tells no process of its children's time
        process.wait()
        return 0.0
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def orphan_files() -> list[str]:
    """Return the test files that no suite runs."""
    tested = {file for suite in SUITES for file in files_of(suite)}
    files = (path for folder in TEST_FOLDERS for path in (ROOT / folder).rglob("test_*.py"))
    return sorted(relative(path) for path in files if path not in tested)


def main() -> int:
    """Run the chosen suites, print the output of failed ones and the totals, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [suite.name for suite in SUITES]
    tiers = parser.add_mutually_exclusive_group()
    for name in ("check", "full", "changed"):
        tiers.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--minutes", type=float, default=60, help="limit of --changed, from the start of the run")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(names))
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(names):
        parser.error(f"no suite named {', '.join(sorted(unknown))}")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell lets background jobs, and all they start, ignore it
    deadline = time.monotonic() + 60 * arguments.minutes
    tier = "check" if arguments.check else "full" if arguments.full else "test"
    chosen = [suite for suite in SUITES if suite.name in arguments.suites or not arguments.suites]
    selected = [
        suite
        for suite in chosen
        if (suite.name in CHECK if arguments.check else arguments.suites or arguments.full or not suite.only_full)
    ]
    outcomes, left_out = run_all(selected, tier), []
    if arguments.changed:
        base, files = changed_files(ROOT)
        touched = [
            suite for suite in touched_suites(files) if suite in chosen and not (suite.commands and suite in selected)
        ]
        listed = ", ".join(suite.name for suite in touched)
        print(f"\n{len(files)} files have changed since {base}; what is left of: {listed or 'no suite'}")
        more = run_all(touched, "rest", deadline)
        outcomes += more
        complete = {outcome.suite.name for outcome in more if not outcome.is_cut}
        left_out = [suite.name for suite in touched if suite.name not in complete]
    if left_out:
        print(f"\nLEFT OUT after {arguments.minutes:g} minutes, wholly or in part: {', '.join(left_out)}")
    return conclude(outcomes)


def run_all(suites: Sequence[Suite], tier: str, deadline: float = float("inf")) -> list[Outcome]:
    """Run suites at the same time, print a line for each and the output of failed ones, and return what was run."""
    outcomes = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for future in as_completed([pool.submit(run, suite, tier, deadline) for suite in suites]):
            outcome = future.result()
            if outcome is None:
                continue
            outcomes.append(outcome)
            verdict = "FAILED" if outcome.code else "cut" if outcome.is_cut else "ok"
            if outcome.code:
                print(f"\n{'=' * 30} {outcome.suite.name} {'=' * 30}\n{outcome.output}")
            times = f"{outcome.seconds:5.0f} s{outcome.cpu_seconds:5.0f} s of processor"
            print(f"{outcome.suite.name:18}{verdict:8}{times}  {outcome.closing_line}", flush=True)
    return outcomes


def conclude(outcomes: list[Outcome]) -> int:
    """Print the totals and the suites that could not be tested. Return the exit code."""
    if chromium() is None and not IN_CI:
        for name in dict.fromkeys(outcome.suite.name for outcome in outcomes if outcome.suite.needs_browser):
            print(f"NOT TESTED: {name} in a browser, for want of one: apt-get install chromium")
    orphans = orphan_files()
    for path in orphans:
        print(f"{path}: belongs to no suite of tests/suites.py")
    total = sum((outcome.counts for outcome in outcomes), Counter())
    broken = [outcome.suite.name for outcome in outcomes if outcome.code]
    if broken:
        print(f"\nfailed suites: {', '.join(broken)}")
    failed = sum(outcome.failures for outcome in outcomes)
    cpu_seconds = sum(outcome.cpu_seconds for outcome in outcomes)
    print(f"\n{cpu_seconds:.0f} s of processor")
    print(f"{total['passed']} passed, {max(failed, len(broken) + len(orphans))} failed, {total['skipped']} skipped")
    return 1 if broken or orphans else 0


if __name__ == "__main__":
    sys.exit(main())
