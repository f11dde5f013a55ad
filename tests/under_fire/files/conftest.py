"""Helpers and fixtures: small results, and processes that save them and can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

INFO = {"name": "lstm", "kind": "LSTM", "cell": "lstm", "units": 8, "direction": "forward"}

#: Start of every process's code: ``made(value, steps)`` returns a trace in which every number is ``value``.
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


def make_trace(value, steps=50, layers=3):
    """Return a trace in which every number is ``value``."""
    arrays = {"hidden": np.full((4, steps, 8), float(value)), "gates": np.full((4, steps, 4, 8), float(value))}
    names = [f"lstm{i}" for i in range(layers)]
    return Trace({name: layer_dataset(arrays, info={**INFO, "name": name}) for name in names}, loss=float(value))


def values(trace):
    """Return the sorted distinct numbers of a trace of :func:`make_trace`."""
    return sorted({float(v) for name in trace for q in ("hidden", "gates") for v in np.unique(trace[name][q])})


@dataclass
class CompletedProcess:
    """Result of an ended process; ``returncode`` is its exit code, or minus the signal that ended it."""

    returncode: int
    stdout: str
    stderr: str


class ForkedProcess:
    """Code in a fork of this process, which has imported all modules and runs no other threads.

    Its interface is a part of ``subprocess.Popen``'s; a fork saves two seconds for a new interpreter and its imports.
    """

    def __init__(self, code: str, folder: Path) -> None:
        (out, child_out), (err, child_err) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(PREAMBLE + textwrap.dedent(code), folder, child_out, child_err)
        os.close(child_out)
        os.close(child_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the code of a test", timeout)
            time.sleep(0.002)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


def _run(code: str, folder: Path, out: int, err: int) -> None:
    """Run code in the child process and exit, without returning to pytest."""
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(folder)
        exec(compile(code, "<the code of a test>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture
def start(tmp_path):
    """Provide a function that starts code in a new process, which is killed after the test."""
    started = []

    def run(code):
        started.append(ForkedProcess(code, tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.close()


@pytest.fixture
def python(start):
    """Provide a function that runs code in a new process to its end; its output must fit into a pipe's buffer."""

    def run(code, timeout=120):
        process = start(code)
        code = process.wait(timeout)
        return CompletedProcess(code, process.stdout.read(), process.stderr.read())

    return run
