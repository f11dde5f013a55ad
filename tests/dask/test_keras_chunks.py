"""Lazy results of Keras models, one process per engine: numbers, and no recompilation for the smaller last chunk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "helpers" / "chunked_keras.py"
BAR = 1e-6
#: Calls of the program; without them it makes all, each compiled for seconds.
QUICK = ("gradients by input", "jacobian")


@pytest.mark.parametrize(
    ("package", "engine", "calls"),
    [
        ("keras", "jax", QUICK),
        pytest.param("keras", "torch", (), marks=pytest.mark.full),  # the rest of this folder runs on torch
        pytest.param("keras", "jax", (), marks=pytest.mark.full),
        pytest.param("keras", "tensorflow", (), marks=pytest.mark.full),
        pytest.param("tf_keras", "tensorflow", (), marks=pytest.mark.full),
    ],
    ids=["two calls", "keras-torch", "keras-jax", "keras-tensorflow", "tf_keras"],
)
def test_equal_to_results_in_memory_and_compiled_once(package, engine, calls):
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if package == "tf_keras" else {}
    environment = {**os.environ, "KERAS_BACKEND": engine, "PYTHONWARNINGS": "ignore", **legacy}
    command = [sys.executable, str(PROGRAM), package, *calls]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout.splitlines()[-1])
    mismatches = {
        f"{call}: {name}": value for call, values in report["apart"].items() for name, value in values.items()
    }
    if calls:
        assert mismatches.keys() == {f"{call}: values" for call in calls}
    else:
        assert len(mismatches) > 40
        assert {"gradients by weights: value", "weights: loss", "trace: loss"} <= mismatches.keys()
    assert {name: value for name, value in mismatches.items() if not value <= BAR} == {}
    compiled = report["compiled"]
    assert {name: recompiled for name, (_, recompiled) in compiled.items()} == dict.fromkeys(compiled, 0)
    compiles = package == "keras" and engine != "torch"  # tf_keras runs eagerly
    assert (compiled["gradients by input"][0] > 0) == compiles
