"""Small results, and processes that save them and may be ended in any way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

SOURCE = Path(__file__).resolve().parents[3] / "src"
INFO = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "units": 8, "direction": "forward"}

#: What every process begins with: ``made(value, steps)`` is a trace that holds nothing but ``value``.
PREAMBLE = """
import json, os, resource, signal, sys, time
import numpy as np
import rnnlens as rl
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

INFO = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "units": 8, "direction": "forward"}

def made(value, steps=50, layers=3):
    arrays = {"hidden": np.full((4, steps, 8), float(value)), "gates": np.full((4, steps, 4, 8), float(value))}
    names = [f"lstm{i}" for i in range(layers)]
    return Trace({name: layer_dataset(arrays, info={**INFO, "name": name}) for name in names}, loss=float(value))

def values(trace):
    return sorted({float(v) for name in trace for q in ("hidden", "gates") for v in np.unique(trace[name][q])})
"""


def made(value, steps=50, layers=3):
    """A trace that holds nothing but ``value``."""
    arrays = {"hidden": np.full((4, steps, 8), float(value)), "gates": np.full((4, steps, 4, 8), float(value))}
    names = [f"lstm{i}" for i in range(layers)]
    return Trace({name: layer_dataset(arrays, info={**INFO, "name": name}) for name in names}, loss=float(value))


def values(trace):
    """All numbers that occur in a trace made by :func:`made`."""
    return sorted({float(v) for name in trace for q in ("hidden", "gates") for v in np.unique(trace[name][q])})


def script(code):
    return [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)]


def environment():
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


@pytest.fixture
def python(tmp_path):
    """Run code in a process of its own, to its end."""

    def run(code, timeout=120):
        return subprocess.run(
            script(code), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture
def start(tmp_path):
    """Start code in a process of its own, which does not outlive the test."""
    started = []

    def run(code):
        process = subprocess.Popen(
            script(code), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
