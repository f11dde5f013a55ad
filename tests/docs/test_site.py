"""The site builds without a warning, documents every public name, and is found by what its readers search for."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lunr import lunr

import rnnlens

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docs" / "start").glob("*.py"))
#: The same task in frameworks that compile for longer than they train: with `make test-full`.
SLOW = ("recall_jax", "recall_tensorflow")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert re.findall(r"^.*WARNING +-.*$", built.stderr, re.MULTILINE) == []  # MkDocs' own form, not that of TensorFlow
    return place


@pytest.fixture(scope="module")
def index(site):
    """What the site's search looks through, but for the reference."""
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    pages = [entry for entry in entries if not entry["location"].startswith("reference")]
    return lunr(ref="location", fields=[{"field_name": "title", "boost": 1000}, "text"], documents=pages)


def pages():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_has_a_section_for_every_public_module():
    assert {room for _, room in pages().SECTIONS if room} == {*rnnlens._ROOMS, "tf1"}  # joined by its entry point


def test_reference_is_that_of_the_code(site):
    assert (ROOT / "docs" / "reference.md").read_text() == pages().reference_page(), "run `make pages`"
    page = (site / "reference.html").read_text()
    names = [f"rl.{name}" for name, _ in pages().documented(rnnlens)]
    assert [name for name in names if f">{name}<" not in page] == []


def test_pages_show_the_files_that_they_name():
    for page in pages().PAGES:
        assert page.read_text() == pages().with_files(page.read_text()), "run `make pages`"


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("vanishing gradient LSTM visualise Keras", "how-to/vanishing-gradients.html"),
        ("exploding gradients PyTorch", "how-to/vanishing-gradients.html"),
        ("gradient None GradientTape embedding", "how-to/gradient-is-none.html"),
        ("LSTM long term dependencies", "how-to/long-term-dependencies.html"),
        ("batch_jacobian memory", "how-to/which-input-step-matters.html"),
        ("which input step matters", "how-to/which-input-step-matters.html"),
        ("captum LSTM", "how-to/coming-from.html"),
        ("see_rnn get_gradients", "from-see-rnn.html"),
        ("backpropagation through time formula adjoint", "mathematics.html"),
    ],
)
def test_search_leads_to_the_page(index, words, page):
    best = [found["ref"].split("#")[0] for found in index.search(words)[:3]]
    assert page in best


def test_formulas_are_drawn_without_a_script(site):
    page = (site / "mathematics.html").read_text()
    assert page.count("<math") > 20
    assert "arithmatex" not in page


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert fetched == [], page


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=pytest.mark.full) if path.stem in SLOW else path for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_scripts_run_and_print_what_the_pages_show(script, tmp_path):
    printed = run_script(script, tmp_path)
    if script.stem.startswith("recall"):
        assert re.search(r"\blast 15 of 20 steps", printed)  # the known answer
        assert (tmp_path / "gradient.png").stat().st_size > 10_000
    recorded = script.with_suffix(".txt")
    if recorded.exists():
        assert masked(printed) == masked(recorded.read_text())


def run_script(script: Path, folder: Path) -> str:
    environment = {**os.environ, "KERAS_BACKEND": "torch", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def masked(text: str) -> str:
    """Replace numbers, whose last digits are the machine's."""
    return re.sub(r"\d[\d.e+-]*", "#", text)
