"""Fixtures that run ``rnnlens`` in a new process, in a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rnnlens.cli import main

SOURCE = Path(__file__).resolve().parents[3] / "src"
#: The program of the installed command.
PROGRAM = "import sys; from rnnlens.cli import main; sys.exit(main())"
#: Enables Ctrl-C: a process started in the background ignores it, and its children inherit that.
HEAR_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def environment(**extra):
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "300", "NO_COLOR": "1", "KERAS_BACKEND": "jax"}
    return {**variables, **extra}


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(5, 4, 2)), y=rng.normal(size=(5, 1)))
    return tmp_path


@pytest.fixture
def command(folder):
    """Provide a function that runs ``rnnlens ...`` to its end and returns the completed process."""

    def run(*arguments, cwd=folder, timeout=60, **extra):
        return subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, *map(str, arguments)],
            cwd=cwd,
            env=environment(**extra),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    return run


@pytest.fixture
def in_process(folder, capsys, monkeypatch):
    """Provide a function that runs ``rnnlens ...`` in this process and returns its exit code and output."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, exit_info.value.code, output.out, output.err)

    yield run
    sys.modules.pop("own", None)


@pytest.fixture
def start(folder):
    """Provide a function that starts ``rnnlens ...`` and returns the process, which is killed after the test."""
    started = []

    def run(*arguments, **extra):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{HEAR_CTRL_C}; {PROGRAM}", *map(str, arguments)],
            cwd=folder,
            env=environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


TORCH = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.GRU(2, 3, batch_first=True)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.rnn(x.float())[0][:, -1])

def make():
    return Net()
"""


@pytest.fixture(scope="session")
def keras_model(tmp_path_factory):
    import keras

    lstm = keras.layers.LSTM(3, name="lstm")
    model = keras.Sequential([keras.Input((4, 2)), lstm, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    folder = tmp_path_factory.mktemp("model")
    model.save(folder / "good.keras")
    return folder / "good.keras"
