"""The public names and signatures are pinned: a change must be made here and in the changelog too."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import rnnlens as rl

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"

#: Functions with their parameters and defaults; modules with None.
PUBLIC = {
    "cells": None,
    "compare": "(models, x=None, y=None, *, load=None, client=None, scorecard=False, **keywords)",
    "diagnose": (
        "(model, x, y=None, *, baseline=None, step=-1, output=0, task=None, loss=None, optimizer=None, samples=512, "
        "seed=0, axes=None)"
    ),
    "episode_resets": "(model, x, starts, *, most=16)",
    "find_nonfinite": (
        "(model, x, y=None, *, loss=None, sample_weight=None, class_weight=None, training=False, initial_state=None, "
        "seed=0, axes=None)"
    ),
    "fixed_points": (
        "(model, x=None, *, layer=None, input='mean', direction=None, starts=None, period=1, most=512, noise=0.0, "
        "tolerance=0.001, seed=0, axes=None)"
    ),
    "lyapunov": "(model, x, *, layer=None, count=None, samples=16, seed=0, axes=None)",
    "step_eigenvalues": "(model, x, *, layer=None, steps=8, samples=16, axes=None)",
    "measures": None,
    "errors": None,
    "gradients": (
        "(model, x, y=None, *, of='loss', wrt='weights', at=None, reduce=None, per_sample=False, measure=None, "
        "across=None, clip=None, loss=None, sample_weight=None, class_weight=None, training=False, "
        "initial_state=None, seed=0, batch_size=None, combine=None, memory=None, axes=None)"
    ),
    "hidden_attention": "(model, x, layer=None, *, at=None, training=False, seed=0)",
    "jacobian": (
        "(model, x, *, of='output', wrt='input', at=None, reduce=None, measure=None, across=None, sketch=None, "
        "rtol=None, mode='auto', training=False, initial_state=None, seed=0, batch_size=None, memory=None, "
        "out=None, axes=None, frozen=False)"
    ),
    "keras": None,
    "layers": "(model, x=None)",
    "open": "(path, *, lazy=False, memory=None, skip_damaged=False)",
    "options": "(*, memory=None, progress=None, certify=None, compiled=None)",
    "plot": None,
    "report": (
        "(model, x=None, y=None, path='report.html', *, baseline=None, loss=None, layers=None, samples=64, "
        "diagnosis=True, jacobian=True, tokens=None, title=None, seed=0, axes=None)"
    ),
    "testing": None,
    "tf1": None,
    "torch": None,
    "jax": None,
    "lightning": None,
    "transformers": None,
    "trace": (
        "(model, x, y=None, *, layers=None, quantities=None, loss=None, sample_weight=None, class_weight=None, "
        "training=False, initial_state=None, seed=0, axes=None, at=None)"
    ),
    "verify": (
        "(function, recurrence, *, state=None, step=False, arguments=None, time_first=None, framework=None, "
        "dtype='float32', chunk=64, initial=False, sizes=None, seed=0)"
    ),
    "weight_norms": "(model, *, layers=None, over=None, ord=2, history=None, step=None)",
    "weights": (
        "(model, x=None, y=None, *, layers=None, by_time=False, measure=None, keep=None, loss=None, "
        "sample_weight=None, class_weight=None, training=False, seed=0)"
    ),
}
FUNCTIONS = sorted(name for name, signature in PUBLIC.items() if signature is not None)


def bare_signature(function) -> str:
    """Return the parameters and defaults of a function, without types."""
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_what_a_cell_of_ones_own_is_made_of():
    assert bare_signature(rl.cells.register) == "(layer, cell, *, weights=None, options=None)"
    assert bare_signature(rl.cells.Cell.step) == "(self, projected, before, scale, xp)"
    assert bare_signature(rl.cells.Cell.pull_back) == "(self, record, before, after, cotangent, scale, xp)"
    assert {"Cell", "Quantity", "Record", "by_name", "register", "sigmoid"} <= set(rl.cells.__all__)


def test_these_names_and_no_others():
    assert sorted(name for name in dir(rl) if name != "__version__") == sorted(PUBLIC)


def test_measures_list_no_submodules():
    assert dir(rl.measures) == sorted(rl.measures.__all__)


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
        heading.strip().lstrip("*")
        for line in section.splitlines()
        if line and not line.startswith(" ")
        for heading in line.partition(":")[0].split(",")
    }
    parameters = set(inspect.signature(function).parameters)
    assert parameters <= headings, f"undocumented: {sorted(parameters - headings)}"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rnnlens' has no attribute 'tarce'"):
        rl.tarce  # noqa: B018  the access is tested


def test_version_is_that_of_the_package():
    from importlib.metadata import version

    assert rl.__version__ == version("rnnlens")


def test_every_public_name_loads():
    assert [name for name in PUBLIC if getattr(rl, name, None) is None] == []
