"""The adapter of TensorFlow-1 graphs is registered by an entry point only: it can be removed with no other change."""

import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rnnlens as rl

ROOT = Path(rl.__file__).parent

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
assert "tensorflow" not in sys.modules
"""


def test_the_entry_point_is_the_only_place_that_names_the_folder():
    assert [entry.value for entry in entry_points(group="rnnlens.adapters", name="tf1")] == [
        "rnnlens.adapters.tf_graph:adapter_of"
    ]
    other_files = [path for path in ROOT.rglob("*.py") if "tf_graph" not in path.relative_to(ROOT).parts]
    assert [path.name for path in other_files if "tf_graph" in path.read_text()] == []


def test_it_gives_its_public_module_a_name():
    assert rl.tf1.__name__ == "rnnlens.adapters.tf_graph.public"
    assert "tf1" in dir(rl)


@pytest.mark.slow
@pytest.mark.parametrize("is_removed", [True, False])
def test_nothing_else_changes_when_folder_and_entry_point_are_removed(tmp_path, is_removed):
    shutil.copytree(
        ROOT, tmp_path / "rnnlens", ignore=shutil.ignore_patterns("__pycache__", *["tf_graph"] * is_removed)
    )
    metadata_folder = tmp_path / "rnnlens-0.1.0.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rnnlens\nVersion: 0.1.0\n")
    (metadata_folder / "entry_points.txt").write_text(
        "" if is_removed else "[rnnlens.adapters]\ntf1 = rnnlens.adapters.tf_graph:adapter_of\n"
    )
    command = [sys.executable, "-c", PROGRAM_WITHOUT_TF1]
    process = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (process.returncode == 0) == is_removed, process.stderr
