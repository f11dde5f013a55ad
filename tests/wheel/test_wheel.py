"""The wheel builds, contains every file that the code reads, and runs with its declared dependencies alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
#: uv builds and installs in a tenth of the time that pip takes.
UV = Path(sys.executable).parent / "uv"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", place, ROOT)
    (made,) = place.glob("rnnlens-*.whl")
    return made


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """Return the Python of an environment that has the wheel and its dependencies, and no framework."""
    place = tmp_path_factory.mktemp("clean")
    python = place / "bin" / "python"
    run(UV, "venv", "--quiet", "--clear", "--python", sys.executable, place)
    run(UV, "pip", "install", "--quiet", "--python", python, wheel)
    return python


def run(*command: object) -> str:
    """Run a command outside the checkout, whose code would be found first, and return its output."""
    done = subprocess.run(
        [str(part) for part in command], cwd="/", env=isolated(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def isolated() -> dict[str, str]:
    """Return the environment without the variables that point into a checkout."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def test_wheel_holds_every_file_of_the_package(wheel):
    there = set(zipfile.ZipFile(wheel).namelist())
    ours = [path for path in (SOURCE / "rnnlens").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(ours) > 200
    assert [path for path in ours if path.relative_to(SOURCE).as_posix() not in there] == []


def test_installs_and_runs_without_any_framework(clean):
    assert run(clean.parent / "rnnlens", "--version").startswith("rnnlens 0.1.0")
    program = (
        "import sys, numpy as np, rnnlens as rl\n"
        "frameworks = {'keras', 'tensorflow', 'torch', 'jax'}\n"
        "assert 'site-packages' in rl.__file__\n"
        "axes = rl.plot.heatmap(np.random.default_rng(0).normal(size=(4, 20, 3)))\n"
        "print(len(rl.measures.lag_profile(np.ones((1, 5, 5)))), sorted(frameworks & set(sys.modules)))\n"
    )
    assert run(clean, "-W", "error", "-c", program).strip().endswith("[]")
