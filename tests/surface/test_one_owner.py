"""One owner for each check: of frameworks, models and tensors adapters and engines; of our own files one helper."""

import re
from pathlib import Path

import pytest
import torch
from own_files import PACKAGE, package_path

import rnnlens
from rnnlens.adapters.protocol import Adapter

SOURCE = Path(rnnlens.__file__).parent
PACKAGES = ("verbs", "diagnosis", "measures", "plot", "results", "reporting", "cli")
#: The command line builds models: it chooses the engine for a file, and lists what a module defines.
MODEL_MAKERS = {"cli/models.py", "cli/demo.py"}

FRAMEWORK_CHECKS = {
    "which adapter it is": r"adapter\.name\b",
    "which module a type is from": r"\.__module__",
    "what is loaded": r"sys\.modules",
    "whether it is a tensor": r"hasattr\([^)]*\"(detach|new_tensor|expand|cpu|numpy)\"",
    "what a model carries": r"(get|has)attr\((\w+\.)*(model|optimizer|adapter),",
    "the framework itself": r"^\s*(import|from) (keras|torch|tensorflow|jax)\b",
}


def find_matches(pattern, text):
    return re.findall(pattern, text, re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_sniffs(package):
    files = [
        path for path in (SOURCE / package).rglob("*.py") if path.relative_to(SOURCE).as_posix() not in MODEL_MAKERS
    ]
    assert files
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in files}
    assert [
        (name, check)
        for name, text in texts.items()
        for check, pattern in FRAMEWORK_CHECKS.items()
        if find_matches(pattern, text)
    ] == []


@pytest.mark.parametrize(
    ("check", "line"),
    [
        ("which adapter it is", 'as_numpy=axes.adapter.name == "keras",'),
        ("which module a type is from", 'type(leaf).__module__.startswith("tensorflow")'),
        ("what is loaded", 'keras = sys.modules.get("keras")'),
        ("whether it is a tensor", 'if hasattr(reference, "detach"):'),
        ("what a model carries", 'optimizer = getattr(question.model, "optimizer", None)'),
        ("the framework itself", "    import torch"),
    ],
)
def test_the_search_finds_what_it_looks_for(check, line):
    assert find_matches(FRAMEWORK_CHECKS[check], f"x = 1\n{line}\n")


def test_no_file_is_found_by_the_name_of_a_folder():
    """Files of ours are found by the package's own folder: a clone may be called rnnlens, and hold all frameworks."""
    root = Path(__file__).resolve().parents[2]
    files = [path for folder in ("src", "packages", "tests", "benchmarks") for path in (root / folder).rglob("*.py")]
    name = re.compile(r"""["']/(rnnlens|tests|testing|src)/["']""")
    assert [path.relative_to(root).as_posix() for path in files if name.search(path.read_text())] == []
    assert package_path(f"{PACKAGE}verbs/trace.py") == "verbs/trace.py"
    assert package_path(torch.__file__) is package_path(__file__) is None
    assert name.search(f'if "/{rnnlens.__name__}/" in file')


def test_an_adapter_has_fifteen_methods():
    """What is asked of one verb alone, and needs no run, is a fact of the model."""
    methods = {name for owner in Adapter.__mro__[:-1] for name, value in vars(owner).items() if callable(value)}
    public = sorted(name for name in methods if not name.startswith("_"))
    assert len(public) == 15, public


def test_every_watch_serves_its_page_by_one_function():
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    callers = {name for name, text in texts.items() if find_matches(r"(?<!def )\bserve_run\(", text)}
    assert callers == {"tracking/live_page.py"}
    watches = {name for name, text in texts.items() if find_matches(r"^    serve = serve$", text)}
    assert watches == {"integrations/keras.py", "tracking/jax/watch.py", "tracking/torch/watch.py"}
