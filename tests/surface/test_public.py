"""The public surface, pinned: a name or a signature that changes must change here and in the changelog too."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rnnlens as rl

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"

#: Functions with their parameters and defaults; rooms (modules) with None.
PUBLIC = {
    "errors": None,
    "gradients": (
        "(model, x, y=None, *, of='loss', wrt='weights', at=None, reduce=None, per_sample=False, loss=None, "
        "sample_weight=None, class_weight=None, training=False, initial_state=None, seed=None, batch_size=None, "
        "combine=None, across=None, clip=None, memory=None)"
    ),
    "jacobian": "",
    "layers": "(model)",
    "open": "(path, *, lazy=False)",
    "options": "(*, memory=None, progress=None)",
    "plot": None,
    "testing": None,
    "torch": None,
    "trace": (
        "(model, x, y=None, *, loss=None, layers=None, quantities=None, sample_weight=None, class_weight=None, "
        "training=False, initial_state=None, seed=None)"
    ),
    "weight_norms": "(model, *, layers=None, over=None, ord=2, history=None, step=None)",
    "weights": (
        "(model, x=None, y=None, *, layers=None, by_time=False, loss=None, sample_weight=None, class_weight=None, "
        "training=False, seed=None)"
    ),
}
FUNCTIONS = sorted(name for name, signature in PUBLIC.items() if signature is not None)


def bare_signature(function) -> str:
    """Parameters and defaults, without types."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def in_a_fresh_process(code: str) -> list[str]:
    """Run code that prints a JSON list."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_these_names_and_no_others():
    assert sorted(name for name in dir(rl) if name != "__version__") == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_changelog_mentions(name):
    assert f"- `{name}`:" in CHANGELOG.read_text()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    assert bare_signature(getattr(rl, name)) == PUBLIC[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name):
    function = getattr(rl, name)
    section = inspect.getdoc(function).partition("Parameters\n")[2]
    headings = {
        word.strip().lstrip("*")
        for line in section.splitlines()
        if line and not line.startswith(" ")
        for word in line.partition(":")[0].split(",")
    }
    parameters = set(inspect.signature(function).parameters)
    assert parameters <= headings, f"undocumented: {sorted(parameters - headings)}"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rnnlens' has no attribute 'tarce'"):
        rl.tarce  # noqa: B018  the access is what is tested


def test_version_is_that_of_the_package():
    from importlib.metadata import version

    assert rl.__version__ == version("rnnlens")


def test_importing_loads_no_framework_and_no_figures():
    heavy = ["keras", "tensorflow", "torch", "jax", "matplotlib", "sklearn"]
    code = f"import rnnlens, sys, json; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    assert in_a_fresh_process(code) == []


def test_building_and_printing_a_result_loads_no_framework_and_no_figures():
    code = """
import json, sys
import numpy as np
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace
hidden = np.zeros((2, 3, 4))
info = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "units": 4, "direction": "forward"}
trace = Trace({"lstm": layer_dataset({"hidden": hidden}, info=info)})
repr(trace), repr(trace["lstm"].hidden), trace._repr_html_()
print(json.dumps([m for m in ["keras", "tensorflow", "torch", "jax", "matplotlib"] if m in sys.modules]))
"""
    assert in_a_fresh_process(code) == []


def test_every_public_name_loads():
    assert [name for name in PUBLIC if getattr(rl, name, None) is None] == []
