"""Every example in a docstring runs and prints the output that it shows."""

from __future__ import annotations

import doctest
import importlib
import inspect
import operator
import pkgutil

import matplotlib as mpl
import numpy as np
import pytest
from tests.unit.plot.runs import make_run

import rnnlens

SUBMODULES = [module.name for module in pkgutil.walk_packages(rnnlens.__path__, "rnnlens.")]
MODULES = ["rnnlens", *(name for name in SUBMODULES if not name.endswith("__main__"))]  # __main__ runs on import
LENIENT_ABOUT_SPACE = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.fixture(scope="module")
def results():
    """Return what examples of figures draw: traces of two LSTMs of four units, a Mamba, and a followed training."""
    import torch
    from torch.nn.functional import mse_loss
    from transformers import MambaConfig, MambaModel

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(2, 4, batch_first=True), torch.nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    model, other, x = Net(), Net(), torch.randn(64, 8, 2)
    y = x[:, -3, :1]
    mamba = MambaModel(MambaConfig(vocab_size=9, hidden_size=4, state_size=2, num_hidden_layers=1)).eval()
    traces = [rnnlens.trace(net, x[:2], y[:2], loss=mse_loss) for net in (other, model)]
    nets = {"model": model, "other": other, "mamba": mamba, "mse_loss": mse_loss}
    data = {"x": x, "y": y, "ids": torch.randint(9, (1, 6)), "run": make_run()}
    return nets | data | {"before": traces[0], "trace": traces[1]}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    shared = {"np": np, "rl": rnnlens} if "measures" in name or name.startswith("rnnlens.plot.") else {}
    if name.startswith("rnnlens.plot."):
        shared |= request.getfixturevalue("results")
    settings = dict(mpl.rcParams)
    result = doctest.testmod(importlib.import_module(name), optionflags=LENIENT_ABOUT_SPACE, extraglobs=shared)
    assert result.failed == 0
    assert dict(mpl.rcParams) == settings


VERBS = [
    f"{namespace}.{name}".removeprefix("rnnlens.")
    for namespace in ("rnnlens", "torch", "keras", "jax", "plot", "measures")
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
