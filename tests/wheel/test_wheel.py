"""What a user installs: a wheel that builds, holds everything that the code reads, and runs where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", place, ROOT)
    (made,) = place.glob("rnnlens-*.whl")
    return made


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """Python of an environment that has the wheel and what it asks for, and no framework."""
    place = tmp_path_factory.mktemp("clean")
    venv.create(place)
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    # Little of what is installed is imported: the rest need not be compiled.
    run(*pip, "install", "--quiet", "--no-compile", "--disable-pip-version-check", wheel)
    return python


def run(*command: object) -> str:
    """Its output; an error shows all that it said. Not in the checkout, whose code would be found first."""
    done = subprocess.run(
        [str(part) for part in command], cwd="/", env=isolated(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def isolated() -> dict[str, str]:
    """The environment without what points into a checkout."""
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
