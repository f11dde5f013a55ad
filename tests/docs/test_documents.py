"""Python snippets in documents run; commands and links exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("*.md", "docs/**/*.md", "src/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
DOCUMENTS = sorted({path for place in PLACES for path in ROOT.glob(place)})
SNIPPETS = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
#: Labels that no block may have: the test below runs blocks labelled "python" only.
OTHER_NAMES_OF_PYTHON = {"py", "python3", "pycon", "ipython"}
#: Documents run elsewhere. TensorFlow's control flow is set once per process: the suite tf_graph-v1 runs
#: tensorflow-1.md, and -v2 with `make test-full`. start.md shows files, which test_site.py runs.
ELSEWHERE = {ROOT / "docs" / "tensorflow-1.md", ROOT / "docs" / "start.md"}

#: Page whose snippets train for a hundred epochs; `make gallery` draws its pictures.
GALLERY = ROOT / "docs" / "gallery.md"

by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@pytest.fixture
def fresh_keras():
    """Reset Keras' automatic layer names, as in a new process."""
    if keras := sys.modules.get("keras"):
        keras.utils.clear_session()


def run_snippets(document):
    for example in SNIPPETS.parse(document).examples():
        example.evaluate()


def instead_of_training(fit):
    """Return a substitute for ``fit``: one epoch if it has callbacks, else a random change of the weights.

    This avoids compiling and training each network of the gallery, whose result is seen only in its pictures.
    """
    random = np.random.default_rng(0)

    def substitute_fit(model, *data, callbacks=None, **options):
        if callbacks:
            fit(model, *data, callbacks=callbacks, **{**options, "epochs": 1})
        else:
            model.set_weights([w + random.normal(scale=0.05, size=w.shape) for w in model.get_weights()])

    return substitute_fit


# Lightning 2.6 uses a function of torch's pytrees that torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
# Lightning warns about the number of workers of a loader.
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.parametrize(
    "document",
    [d for d in DOCUMENTS if d not in ELSEWHERE and list(SNIPPETS.parse(d).examples())],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_python_snippets_run(document, fresh_keras, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if document == GALLERY:
        import keras

        monkeypatch.setattr(keras.Model, "fit", instead_of_training(keras.Model.fit))
    run_snippets(document)


@pytest.mark.full
def test_the_gallery_runs_with_all_its_trainings(fresh_keras, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(GALLERY)


@by_name
def test_links_inside_the_project_lead_somewhere(document):
    text = BLOCK.sub("", document.read_text())
    targets = ["".join(pair).split("#")[0] for pair in LINK.findall(text)]
    local = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    missing = [target for target in local if not (document.parent / target).exists()]
    assert missing == []


@by_name
def test_python_is_labelled_python(document):
    labels = {label for label, _ in BLOCK.findall(document.read_text())}
    assert not labels & OTHER_NAMES_OF_PYTHON


@by_name
def test_blocks_are_closed(document):
    fences = re.findall(r"^```(.*)$", document.read_text(), re.MULTILINE)
    assert fences[1::2] == [""] * (len(fences) - len(fences[1::2])), "a labelled fence within a block does not end it"


@by_name
def test_commands_exist(document):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(text for label, text in BLOCK.findall(document.read_text()) if label in {"bash", "sh", "console"})
    unknown = set(re.findall(r"^(?:\$ )?make ([\w-]+)", shell, re.MULTILINE)) - targets
    assert unknown == set()
    scripts = re.findall(r"python ((?:benchmarks|examples|docs|tests)/[\w/.-]+)", shell)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_documents_were_found():
    paths = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/LIMITATIONS.md"} <= paths


def test_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    index += (ROOT / "docs" / "reference.md").read_text().replace("#", ")")  # links to names on a page of a module
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []
