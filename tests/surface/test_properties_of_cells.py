"""Properties of a cell are defined by its class: other code neither checks the type of a cell nor lists its weights."""

import re
from pathlib import Path

import pytest

from rnnlens.recurrence.cells import kinds

SOURCE = Path(__file__).resolve().parents[2] / "src" / "rnnlens"
#: Folders that define cells, or define them again to check them.
CELL_FOLDERS = ("recurrence/cells", "testing")
OTHER_FILES = [p for p in sorted(SOURCE.rglob("*.py")) if not p.relative_to(SOURCE).as_posix().startswith(CELL_FOLDERS)]
#: Adapters, which may list the weight names of their framework's layers.
FRAMEWORK_FILES = ("adapters/keras/weights.py", "adapters/keras/reference_run.py", "adapters/torch/weights.py")


def read_source(path):
    return path.read_text()


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_type_of_a_cell_is_looked_at(path):
    type_checks = re.findall(
        r"is(?:instance|subclass)\([^()]*(?:\.cell|\bcell|\bCell|StepCell|LSTM\b|GRU\b)[^()]*\)", read_source(path)
    )
    framework_checks = [check for check in type_checks if "nn." in check or "keras." in check]
    assert [check for check in type_checks if check not in framework_checks] == []
    assert (
        re.findall(r"\bcell(?:\.kind)? == \"|\.cell\.kind ==|\bkind == \"(?:lstm|gru|simple_rnn)\"", read_source(path))
        == []
    )


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_weights_are_listed(path):
    if path.relative_to(SOURCE).as_posix() in (*FRAMEWORK_FILES, "adapters/torch/reference_run.py", "vocabulary.py"):
        return
    weight_lists = re.findall(
        r"[\[({][^\[\](){}]*\"recurrent_kernel\"[^\[\](){}]*\"bias\"[^\[\](){}]*[\])}]", read_source(path)
    )
    assert weight_lists == []


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
