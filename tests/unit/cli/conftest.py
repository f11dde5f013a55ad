"""The command line in this process, on files in a folder of its own."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest

from rnnlens.cli import main


@dataclass
class CommandResult:
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in; what the command line adds to the path is taken off again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 4, 2)).astype("float32"), rng.normal(size=(5, 1)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    return tmp_path


@pytest.fixture
def rnnlens(folder, capsys):
    """Run ``rnnlens ...``; code and output of it."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return CommandResult(exit_info.value.code, output.out, output.err)

    return run


@pytest.fixture
def module(folder, request):
    """Write a module for this test; a name of its own, since modules stay loaded."""

    def write(code):
        name = f"own_{abs(hash(request.node.nodeid))}"
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    return write


TORCH = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.GRU(2, 3, num_layers=2, batch_first=True)
            self.head = torch.nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    def make():
        return Net()

    def needs(units):
        return Net()

    model = Net()
    number = 3

    def squared(output, target):
        return ((output - target) ** 2).mean()
"""
