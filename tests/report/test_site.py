"""The built site has no warning and every public name, and its search finds the words that users type."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from lunr import lunr

import rnnlens


@pytest.fixture(scope="module")
def index(site):
    """Return the search index of the site without the reference."""
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    pages = [entry for entry in entries if not entry["location"].startswith("reference")]
    return lunr(ref="location", fields=[{"field_name": "title", "boost": 1000}, "text"], documents=pages)


def test_the_reference_has_every_public_name(site):
    page = (site / "reference.html").read_text()
    members = {name: getattr(rnnlens, name) for name in rnnlens.__all__}
    names = [f"rl.{name}" for name, member in members.items() if inspect.isclass(member) or inspect.isroutine(member)]
    assert len(names) > 10
    assert [name for name in names if f">{name}<" not in page] == []
    verbs = [name.removeprefix("rl.") for name in names if inspect.isroutine(members[name.removeprefix("rl.")])]
    assert [verb for verb in verbs if f"rl.{verb}(" not in (site / "reference" / f"{verb}.html").read_text()] == []


@pytest.mark.parametrize(
    ("query", "page"),
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
def test_search_leads_to_the_page(index, query, page):
    best = [hit["ref"].split("#")[0] for hit in index.search(query)[:3]]
    assert page in best


def test_the_search_has_a_name_on_the_page_for_a_missing_one_too(site):
    assert 'role="dialog" aria-label="Search"' in (site / "404.html").read_text()


def test_formulas_are_drawn_without_a_script(site):
    page = (site / "mathematics.html").read_text()
    assert page.count("<math") > 20
    assert "arithmatex" not in page


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert fetched == [], page
