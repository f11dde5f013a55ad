"""Generated pages are up to date, and the scripts of the first page print the output that it shows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import rnnlens

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docs" / "start").glob("*.py"))
#: Scripts in frameworks that compile for longer than they train: run by `make test-full` only.
SLOW = ("recall_equinox", "recall_flax", "recall_jax", "recall_tensorflow")


def load_pages():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_has_a_section_for_every_public_module():
    assert {module for _, module in load_pages().SECTIONS if module} == {
        *rnnlens._SUBMODULES,
        "tf1",
    }  # tf1 joins by the entry point of rnnlens-tf1


def test_the_picture_of_the_live_page_moves_and_comes_to_rest():
    with Image.open(ROOT / "docs" / "live.gif") as picture:
        assert picture.n_frames > 20
        assert picture.info["loop"] == 2
        assert picture.info["duration"] > 0
    assert (ROOT / "docs" / "live.gif").stat().st_size < 1_000_000


def test_reference_is_that_of_the_code():
    pages = load_pages().reference_pages()
    assert {path: path.read_text() for path in pages if path.exists()} == pages, "run `make pages`"
    assert set((ROOT / "docs" / "reference").iterdir()) == set(pages) - {ROOT / "docs" / "reference.md"}
    assert max(map(len, pages.values())) < 30_000  # a page per verb, not one of all


def test_page_of_packages_is_the_table_of_test_world():
    assert (ROOT / "docs" / "works-with.md").read_text() == load_pages().works_with_page(), "run `make pages`"


def test_pages_show_the_files_that_they_name():
    for page in load_pages().PAGES:
        assert page.read_text() == load_pages().with_files(page.read_text()), "run `make pages`"


@pytest.mark.product(keep=("recall_pytorch",))
@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=pytest.mark.full) if path.stem in SLOW else path for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_scripts_run_and_print_what_the_pages_show(script, tmp_path):
    output = run_script(script, tmp_path)
    if script.stem.startswith("recall"):
        assert re.search(r"\blast 15 of 20 steps", output)  # the known answer
        assert (tmp_path / "gradient.png").stat().st_size > 10_000
    recorded = script.with_suffix(".txt")
    if recorded.exists():
        assert masked(output) == masked(recorded.read_text())


def run_script(script: Path, folder: Path) -> str:
    environment = {**os.environ, "KERAS_BACKEND": "torch", "COLUMNS": "120"}
    completed = subprocess.run(
        [sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def masked(text: str) -> str:
    """Replace all numbers, whose last digits depend on the machine."""
    text = re.sub(r"\d[\d.e+-]*", "#", text)
    # Which residual is the largest depends on rounding.
    return re.sub(r"(?<=\()[\w ]+(?=: largest residual)|(?<=worst # \()[\w ]+(?=\))", "a check", text)
