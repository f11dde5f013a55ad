"""Every verb on every family of whole-sequence layers does what the table of docs/how-to/hugging-face.md states."""

from __future__ import annotations

import pytest
from scan_models import CASES, MODELS
from scan_verbs import PAGE, TABLE, table_head, table_row

TABLE_ROWS = TABLE.search(PAGE.read_text())[0].splitlines()[2:]


@pytest.mark.parametrize("name", CASES)
def test_the_table_says_what_the_verbs_do(name):
    assert table_row(name) in TABLE_ROWS, "python tests/helpers/scan_verbs.py"


def test_the_table_has_every_family_and_verb():
    assert TABLE_ROWS[:2] == table_head().splitlines()
    assert len(TABLE_ROWS) == 2 + len(MODELS)
