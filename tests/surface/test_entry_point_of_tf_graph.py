"""TensorFlow-1 graphs are a distribution of their own, joined by an entry point only: rnnlens is whole without it."""

import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rnnlens as rl

ROOT = Path(rl.__file__).parent
GRAPHS = ROOT.parents[1] / "packages" / "rnnlens-tf1"

PROGRAM_WITHOUT_TF1 = """
import sys
import rnnlens as rl

assert "tf1" not in dir(rl) and not hasattr(rl, "tf1")
for name in dir(rl):
    if name not in ("keras", "torch", "lightning", "transformers"):
        getattr(rl, name)
try:
    rl.layers(object())
except rl.errors.ModelError as error:
    assert "not a model" in str(error)
try:
    rl.tf1
except AttributeError as error:
    assert "pip install rnnlens-tf1" in str(error)
try:
    rl.trace(object(), feed_dict={})
except rl.errors.CallError as error:
    assert "of the package rnnlens-tf1" in str(error)
assert "tensorflow" not in sys.modules
"""


def test_it_joins_by_its_entry_point():
    (entry,) = entry_points(group="rnnlens.adapters", name="tf1")
    assert (entry.value, entry.dist.name) == ("rnnlens_tf1:adapter_of", "rnnlens-tf1")


def test_the_core_names_it_only_to_say_what_to_install():
    named_in = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "tf1" in path.read_text()]
    assert sorted(named_in) == ["__init__.py", "arguments/checks.py"]


def test_both_distributions_have_one_version():
    project, graphs = ((folder / "pyproject.toml").read_text() for folder in (GRAPHS.parents[1], GRAPHS))
    version = project.partition('\nversion = "')[2].partition('"')[0]
    assert f'\nversion = "{version}"' in graphs
    assert f'dependencies = ["rnnlens=={version}"]' in graphs


@pytest.mark.slow  # imports TensorFlow
def test_it_gives_its_public_module_a_name():
    assert rl.tf1.__name__ == "rnnlens_tf1.public"
    assert "tf1" in dir(rl)


@pytest.mark.slow
@pytest.mark.parametrize("is_installed", [False, True])
def test_nothing_else_changes_without_it(tmp_path, is_installed):
    shutil.copytree(ROOT, tmp_path / "rnnlens", ignore=shutil.ignore_patterns("__pycache__"))
    if is_installed:
        shutil.copytree(GRAPHS / "src" / "rnnlens_tf1", tmp_path / "rnnlens_tf1")
    metadata_folder = tmp_path / "rnnlens_tf1-0.1.0.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rnnlens-tf1\nVersion: 0.1.0\n")
    (metadata_folder / "entry_points.txt").write_text(
        "[rnnlens.adapters]\ntf1 = rnnlens_tf1:adapter_of\n" if is_installed else ""
    )
    command = [sys.executable, "-c", PROGRAM_WITHOUT_TF1]
    process = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (process.returncode == 0) != is_installed, process.stderr
