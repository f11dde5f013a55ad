"""Settings of every suite: one framework engine per process, no plot windows, skips fail, figures are closed."""

from __future__ import annotations

import gc
import os
import sys
import time
from contextlib import nullcontext
from itertools import combinations, count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

gc.set_threshold(100_000, 20, 100)

# No deadlines: tests take longer on a busy machine.
settings.register_profile("rnnlens", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rnnlens")

ROOT = Path(__file__).resolve().parent
#: Set by tests/suites.py: "one of each test" or "one of each file" is enough.
CASES = os.environ.get("RNNLENS_CASES", "all")
#: Folders of tests/ whose tests are all marked `check`.
CHECKED_FOLDERS = ("unit", "property", "surface")
#: Set by tests/suites.py: a missing framework must fail the tests, not skip them.
SKIP_IS_FAILURE = os.environ.get("RNNLENS_SKIP_IS_FAILURE") == "1"


def pytest_configure():
    """Switch TensorFlow's graph optimiser off before tests are collected; from here on helpers can be imported."""
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        import grappler

        grappler.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Mark as ``full`` the tests that another engine runs in the default run, and deselect those of other engines.

    Tests marked `product` run in all cases on one engine; the others run one case, or those in which they differ: the
    remaining cases would run the same code three times. `one_engine` marks tests of code that does not depend on the
    engine; Keras 2 counts as the engine ``tf_keras``. `only_on` marks tests of features that other engines lack,
    `linux` those of features that other systems lack.
    """
    deselected = [
        item
        for item in items
        if any(os.environ["KERAS_BACKEND"] not in mark.args for mark in item.iter_markers("only_on"))
        or (sys.platform != "linux" and item.get_closest_marker("linux"))
    ]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    tested_engine = os.environ.get("RNNLENS_TESTED_KERAS") or os.environ["KERAS_BACKEND"]
    for item in items:
        for mark in item.iter_markers("one_engine"):
            if tested_engine not in (mark.args or ("torch",)):
                item.add_marker("full")
    cases_of_test: dict[str, list[str]] = {}
    kept_cases: dict[str, tuple[str, ...]] = {}
    for item in items:
        for mark in item.iter_markers("product"):
            test, case = item.nodeid.partition("[")[0], item.callspec.id
            cases = cases_of_test.setdefault(test, [])
            keep = kept_cases.setdefault(test, mark.kwargs.get("keep") or (cases or [case])[0:1])
            cases.append(case)
            is_chosen_engine = os.environ["KERAS_BACKEND"] == mark.kwargs.get("on", "torch")
            if case not in keep and (CASES != "all" or not is_chosen_engine):
                item.add_marker("full")
    for item in redundant_cases(items):
        item.add_marker("full")
    for item in further_cases(items) if CASES != "all" else ():
        item.add_marker("full")
    for item in items:
        if item.path.relative_to(ROOT).parts[1] in CHECKED_FOLDERS:
            item.add_marker("check")
    unknown = [
        f"{test}[{case}]" for test, keep in kept_cases.items() for case in keep if case not in cases_of_test[test]
    ]
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"product(keep=) names no case: {', '.join(unknown)}")


def further_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return all but the first case of each test, or of each file, of those that are left.

    Of each test, `product` has chosen the cases itself. Of each file, tests of a feature of this engine alone are kept.
    """
    is_by_file = CASES == "one of each file"
    tested, further = set(), []
    for item in items:
        test = item.nodeid.partition("::" if is_by_file else "[")[0]
        if item.get_closest_marker("full") or item.get_closest_marker("only_on" if is_by_file else "product"):
            continue
        if test in tested:
            further.append(item)
        tested.add(test)
    return further


def redundant_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return redundant cases of tests marked `pairs`: the others cover every pair of values of two parameters."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    redundant: list[pytest.Item] = []
    for test, cases in tests.items():
        values = {case: [(name, id(value)) for name, value in case.callspec.params.items()] for case in cases}
        uncovered = {case: set(combinations(parameters, 2)) for case, parameters in values.items()}
        if len(values[cases[0]]) < 3:
            raise pytest.UsageError(f"{test}: `pairs` is for products of three parameters or more")
        while any(uncovered.values()):
            covered = uncovered.pop(max(uncovered, key=lambda case: len(uncovered[case])))
            uncovered = {case: pairs - covered for case, pairs in uncovered.items()}
        redundant += uncovered
    return redundant


def pytest_collection_finish():
    """Exempt all objects that exist after collection, millions of them in frameworks, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """On TensorFlow run oracle tests and those marked `op_by_op` eagerly, unless they are marked `compiled`."""
    marks = list(item.iter_markers("compiled"))
    is_compiled = any(not mark.args or item.callspec.id in mark.args for mark in marks)
    runs_eagerly = "oracle" in item.path.relative_to(ROOT).parts or item.get_closest_marker("op_by_op")
    if os.environ["KERAS_BACKEND"] != "tensorflow" or is_compiled or not runs_eagerly:
        context = nullcontext()
    else:
        from keras_eager import op_by_op

        context = op_by_op()
    with context:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call):
    report = yield
    if SKIP_IS_FAILURE and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("cuda"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which hides: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if SKIP_IS_FAILURE and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped while collecting, which hides: {report.longrepr}"
    return report


#: :func:`bounded_memory` checks the process after every so many tests, and after a test of so many seconds.
CHECK_INTERVAL, LONG_TEST = 20, 5.0
_test_count = count(1)


@pytest.fixture(autouse=True)
def bounded_memory():
    """Collect garbage when earlier tests left more than 3 GiB of memory, or a quarter of the process' memory maps.

    Linux grants 65,530 maps. Each program that JAX compiled takes dozens, the longest test 22,000; without maps left
    the next compilation ends the process.
    """
    start = time.monotonic()
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or (next(_test_count) % CHECK_INTERVAL and time.monotonic() - start < LONG_TEST):
        return
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > 3 * 2**30:
        gc.collect()
    jax = sys.modules.get("jax")
    if jax is not None and maps.read_bytes().count(b"\n") > 16_000:
        gc.collect()
        jax.clear_caches()


@pytest.fixture
def bfloat16_lstm():
    """Let torch run an LSTM in bfloat16 on every processor.

    oneDNN has no bfloat16 LSTM kernel for processors without AVX-512, so that torch raises an error there; torch's own
    kernel runs on all.
    """
    import torch

    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            torch.nn.LSTM(3, 6)(torch.zeros(2, 4, 3))
        except RuntimeError:
            has_kernel = False
        else:
            has_kernel = True
    was_enabled = torch._C._get_mkldnn_enabled()  # `torch.backends.mkldnn.flags` warns of a flag for Intel's GPUs
    torch._C._set_mkldnn_enabled(was_enabled and has_kernel)
    yield
    torch._C._set_mkldnn_enabled(was_enabled)


@pytest.fixture(autouse=True)
def close_figures():
    """Close all figures after each test."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture(autouse=True)
def validated_distributions():
    """Let torch's distributions check their arguments again: compiling a model with torch ends that for good.

    The library leaves it ended, for the user's next compilation: torch cannot compile those checks.
    """
    yield
    if distributions := sys.modules.get("torch.distributions"):
        distributions.Distribution.set_default_validate_args(True)


@pytest.fixture
def topmost_flags(monkeypatch: pytest.MonkeyPatch):
    """Provide a list that records whether each capture has gradients only at the last layer."""
    from rnnlens.verbs.chain import ChainGradients

    flags, original = [], ChainGradients.of.__func__

    def record_flag(cls, capture, x):
        flags.append(capture.topmost)
        return original(cls, capture, x)

    monkeypatch.setattr(ChainGradients, "of", classmethod(record_flag))
    return flags
