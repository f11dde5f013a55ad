"""Loading a model file runs no code from the same folder, unless the user names that code."""

import subprocess
import sys

import pytest

from .conftest import TORCH, environment

DECOY = "open('ran-{0}', 'w').close()\nraise ImportError('{0}')\n"


@pytest.fixture
def decoys(folder):
    for name in ("keras", "torch", "jax", "h5py"):
        (folder / f"{name}.py").write_text(DECOY.format(name))
    (folder / "model.keras").write_text("no model")
    return folder


def imported_decoys(folder):
    return sorted(path.name for path in folder.glob("ran-*"))


@pytest.mark.full
def test_a_model_file_runs_nothing_of_the_current_folder(command, decoys):
    completed = command("layers", "model.keras")
    assert imported_decoys(decoys) == []
    assert (completed.returncode, completed.stderr.splitlines()[-2]) == (2, "This model file cannot be loaded.")


def test_nor_does_it_as_a_module(decoys):
    arguments = [sys.executable, "-m", "rnnlens.cli", "layers", "model.keras"]
    completed = subprocess.run(arguments, cwd=decoys, env=environment(), capture_output=True, text=True, check=False)
    assert imported_decoys(decoys) == []
    assert completed.returncode == 2


def test_a_factory_of_the_current_folder_is_found_after_what_is_installed(command, decoys):
    (decoys / "own.py").write_text(TORCH)
    completed = command("layers", "own:make")
    assert (completed.returncode, imported_decoys(decoys)) == (0, []), completed.stderr


@pytest.mark.full
def test_what_the_user_imports_by_name_is_run(command, decoys):
    (decoys / "custom.py").write_text("open('ran-custom', 'w').close()")
    assert command("layers", "model.keras", "--import", "custom").returncode == 2
    assert imported_decoys(decoys) == ["ran-custom"]
