"""Run tests with the lowest versions that ``pyproject.toml`` allows, and a program with the newest Keras and JAX.

    python tests/lowest.py [--python 3.12]

uv resolves the dependencies with ``--resolution lowest-direct``, of versions that have a wheel for this Python, and
installs them into ``.venv-lowest-3.11`` with the newest pytest. Tests of saving and opening results and watched
trainings run there without any framework; every verb and a ``fit`` run with the lowest Keras on the lowest JAX and
TensorFlow, and above Python 3.11, for which JAX 0.10 is the last, also with the newest Keras and JAX.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
PROGRAM = ROOT / "tests" / "helpers" / "lowest_program.py"
#: Lowest versions of frameworks with which every verb works; docs/reliability.md states them.
FRAMEWORKS = ("keras==3.10.0", "jax==0.7.0")
#: The lowest TensorFlow, on Python 3.11 in its own environment: it needs NumPy 1, and JAX NumPy 2.
TENSORFLOW = ("keras==3.10.0", "tensorflow==2.16.1")
TEST_FILES = (
    "tests/unit/results/test_files.py",
    "tests/unit/results/test_kinds.py",
    "tests/unit/results/test_layers.py",
    "tests/unit/results/test_trace.py",
    "tests/unit/tracking/test_killed.py",
    "tests/unit/tracking/test_recorder.py",
    "tests/under_fire/files/test_runs.py",
)
#: Old packages cause deprecation warnings of the newer ones that they use.
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "default::DeprecationWarning")


def main() -> int:
    """Make the environment, run the tests and the program; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    arguments = parser.parse_args()
    interpreter = _interpreter(arguments.python)
    if interpreter is None:
        print(f"NOT TESTED: Python {arguments.python} is not installed")
        return 0
    folder = ROOT / f".venv-lowest-{arguments.python}"
    python = folder / "bin" / "python"
    with tempfile.TemporaryDirectory() as temporary_folder:
        versions = Path(temporary_folder) / "versions.txt"
        options = ("pip", "compile", "-q", "--no-annotate", "--only-binary", ":all:", "--resolution", "lowest-direct")
        _uv(*options, "--python-version", arguments.python, "pyproject.toml", "-o", str(versions))
        _uv("venv", "-q", "--clear", "-p", interpreter, str(folder))
        _uv("pip", "install", "-q", "-p", str(python), "-r", str(versions), "pytest>=9", "hypothesis>=6.150", "tqdm")
        print(" ".join(line for line in versions.read_text().splitlines() if "==" in line), flush=True)
        # Without XLA_FLAGS of tests/suites.py: XLA ends the process at a flag that its version does not have.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment["PYTHONPATH"] = str(ROOT / "src")
        pytest_run = subprocess.run(
            (python, "-m", "pytest", *PYTEST_OPTIONS, *TEST_FILES), cwd=ROOT, env=environment, check=False
        )
    _uv("pip", "install", "-q", "-p", str(python), *FRAMEWORKS)  # JAX needs a newer NumPy than rnnlens
    environment["KERAS_BACKEND"] = "jax"
    program_run = subprocess.run((python, PROGRAM), env=environment, check=False)
    if arguments.python != "3.11" and not program_run.returncode:
        _uv("pip", "install", "-q", "-p", str(python), "--upgrade", *(name.partition("==")[0] for name in FRAMEWORKS))
        program_run = subprocess.run((python, PROGRAM), env=environment, check=False)
    tensorflow_status = use_tensorflow(interpreter, environment) if arguments.python == "3.11" else 0
    return pytest_run.returncode or program_run.returncode or tensorflow_status


def use_tensorflow(interpreter: str, environment: dict[str, str]) -> int:
    """Run the program with the lowest Keras on the lowest TensorFlow; return its exit status."""
    folder = ROOT / ".venv-lowest-tensorflow"
    python = folder / "bin" / "python"
    _uv("venv", "-q", "--clear", "-p", interpreter, str(folder))
    _uv("pip", "install", "-q", "-p", str(python), "-r", "pyproject.toml", *TENSORFLOW)
    environment = {**environment, "KERAS_BACKEND": "tensorflow"}
    return subprocess.run((python, PROGRAM), env=environment, check=False).returncode


def _interpreter(version: str) -> str | None:
    """Return the path of a Python of that version that runs, from PATH or pyenv; None if there is none."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, pyenv)):
        if candidate and not subprocess.run((candidate, "-c", ""), capture_output=True, check=False).returncode:
            return candidate
    return None


def _uv(*arguments: str) -> None:
    subprocess.run((str(UV), *arguments), cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
