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
SCRIPTS = sorted((ROOT / "docs" / "start").glob("recall_*.py"))


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


def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_documents_every_public_name(site):
    page = (site / "reference.html").read_text()
    rooms = ["rnnlens", *re.findall(r"<!-- reference: (rnnlens\.[\w.]+) -->", (ROOT / "docs/reference.md").read_text())]
    paths = [path for room in rooms for path in hooks().paths_of(room)]
    assert len(paths) > 60
    assert [path for path in paths if f'id="{path}"' not in page] == []


def test_reference_has_a_section_for_every_public_room():
    page = (ROOT / "docs" / "reference.md").read_text()
    rooms = [name for name in rnnlens._ROOMS if f"<!-- reference: rnnlens.{name} -->" not in page]
    assert rooms == []


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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_first_script_gives_the_known_answer(script, tmp_path):
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "uses the last 15 of 20 steps" in done.stdout
    assert (tmp_path / "gradient.png").stat().st_size > 10_000
    if script.stem == "recall_pytorch":
        assert masked(done.stdout) == masked(printed_in_the_page())


def printed_in_the_page() -> str:
    text = (ROOT / "docs" / "start" / "recall_pytorch.txt").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if "--8<--" not in line)


def masked(text: str) -> str:
    """Words only: the last digits are the machine's."""
    return re.sub(r"\d[\d.e+-]*", "#", text)
