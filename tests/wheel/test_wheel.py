"""The wheel builds from the sdist, contains every file of the package, and runs with only its declared dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
#: uv builds and installs in a tenth of the time that pip takes.
UV = Path(sys.executable).parent / "uv"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return the wheel of `make release`, in the folder RNNLENS_DIST, or a new one, built from a new sdist."""
    folder = ROOT / os.environ["RNNLENS_DIST"] if "RNNLENS_DIST" in os.environ else tmp_path_factory.mktemp("wheel")
    if "RNNLENS_DIST" not in os.environ:
        run(UV, "build", "--quiet", "--all-packages", "--out-dir", folder, ROOT)
    (path,) = folder.glob("rnnlens-*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_python(wheel, tmp_path_factory) -> Path:
    """Return the Python of a new environment with the wheel and its dependencies, and without a framework."""
    folder = tmp_path_factory.mktemp("clean")
    python = folder / "bin" / "python"
    run(UV, "venv", "--quiet", "--clear", "--python", sys.executable, folder)
    run(UV, "pip", "install", "--quiet", "--python", python, wheel)
    return python


def run(*command: object) -> str:
    """Run a command outside the checkout, so that the installed code is imported, and return its output."""
    completed = subprocess.run(
        [str(argument) for argument in command], cwd="/", env=isolated(), capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def isolated() -> dict[str, str]:
    """Return the environment variables without PYTHONPATH and VIRTUAL_ENV, which may point into a checkout."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def test_wheel_holds_every_file_of_the_package(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    source_files = [
        path for path in (SOURCE / "rnnlens").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert len(source_files) > 200
    assert [path for path in source_files if path.relative_to(SOURCE).as_posix() not in packed] == []


def test_sdist_holds_what_the_project_is_built_and_tested_from(wheel):
    (sdist,) = wheel.parent.glob("rnnlens-*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    listed = ("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "src", "packages", "tests")
    tracked = [name for name in run(*listed).splitlines() if (ROOT / name).exists()]
    assert len(tracked) > 500
    assert sorted({"Makefile", "conftest.py", "pyproject.toml", "constraints.txt", *tracked} - packed) == []


def test_the_wheel_of_tensorflow_1_graphs_holds_its_package_and_joins_by_its_entry_point(wheel):
    (graphs,) = wheel.parent.glob("rnnlens_tf1-*.whl")
    archive, source = zipfile.ZipFile(graphs), ROOT / "packages" / "rnnlens-tf1" / "src"
    files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 25
    assert [path for path in files if path.relative_to(source).as_posix() not in archive.namelist()] == []
    texts = {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist() if "dist-info" in name}
    assert "[rnnlens.adapters]\ntf1 = rnnlens_tf1:adapter_of" in texts["entry_points.txt"]
    assert "Requires-Dist: rnnlens==0.1.0" in texts["METADATA"]


def test_installs_and_runs_without_any_framework(wheel_python):
    assert run(wheel_python.parent / "rnnlens", "--version").startswith("rnnlens 0.1.0")
    program = (
        "import sys, numpy as np, rnnlens as rl\n"
        "frameworks = {'keras', 'tensorflow', 'torch', 'jax'}\n"
        "assert 'site-packages' in rl.__file__\n"
        "axes = rl.plot.heatmap(np.random.default_rng(0).normal(size=(4, 20, 3)))\n"
        "print(len(rl.measures.lag_profile(np.ones((1, 5, 5)))), sorted(frameworks & set(sys.modules)))\n"
    )
    assert run(wheel_python, "-W", "error", "-c", program).strip().endswith("[]")
