"""What there is to say of a cell, its class says: nobody looks at its type, and nobody else lists its parts."""

import re
from pathlib import Path

import pytest

from rnnlens.recurrence.cells import kinds

SOURCE = Path(__file__).resolve().parents[2] / "src" / "rnnlens"
#: Where cells are written, or written once more to check them.
THEIRS = ("recurrence/cells", "testing")
OUTSIDE = [p for p in sorted(SOURCE.rglob("*.py")) if not p.relative_to(SOURCE).as_posix().startswith(THEIRS)]
#: Names that the frameworks' own layers have for their parts are for their adapters to know.
OF_FRAMEWORKS = ("adapters/keras/weights.py", "adapters/keras/reference_run.py", "adapters/torch/weights.py")


def text(path):
    return path.read_text()


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_type_of_a_cell_is_looked_at(path):
    found = re.findall(
        r"is(?:instance|subclass)\([^()]*(?:\.cell|\bcell|\bCell|StepCell|LSTM\b|GRU\b)[^()]*\)", text(path)
    )
    of_torch = [one for one in found if "nn." in one or "keras." in one]
    assert [one for one in found if one not in of_torch] == []
    assert (
        re.findall(r"\bcell(?:\.kind)? == \"|\.cell\.kind ==|\bkind == \"(?:lstm|gru|simple_rnn)\"", text(path)) == []
    )


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_weights_are_listed(path):
    if path.relative_to(SOURCE).as_posix() in (*OF_FRAMEWORKS, "adapters/torch/reference_run.py", "vocabulary.py"):
        return
    listed = re.findall(r"[\[({][^\[\](){}]*\"recurrent_kernel\"[^\[\](){}]*\"bias\"[^\[\](){}]*[\])}]", text(path))
    assert listed == []


@pytest.mark.parametrize("kind", kinds())
def test_every_cell_says_what_it_is(kind):
    cell = kinds()[kind]
    assert cell.kind == kind
    assert cell.states[0] == "hidden"
    assert cell.keeping is None or cell.keeping in cell.gates
    source = Path(__import__(cell.__module__, fromlist=["_"]).__file__)
    assert source.parent.name == "cells"
    assert re.search(r"arXiv:\d{4}\.\d{5}|doi:|19\d\d", source.read_text())
    for name, parameter in cell.parameters.items():
        assert parameter.name == name
        assert parameter.long_name
        assert parameter.definition
