"""Fixtures that run the command line in this process, in a temporary folder with data."""

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
    """Change to a temporary folder that holds data.npz and is on the Python path; restore ``sys.path`` afterwards."""
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
    """Return a function that runs ``rnnlens ...`` and returns its exit code and output."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return CommandResult(exit_info.value.code, output.out, output.err)

    return run


@pytest.fixture
def module(folder, request):
    """Return a function that writes a module and returns its name, unique to this test since modules stay imported."""

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
