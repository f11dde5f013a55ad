"""Tests that every adapter has to pass, with the models that ``tests/helpers/tested_adapter.py`` finds."""

import pytest
from tested_adapter import ADAPTER, specimens

#: Faults are planted in networks of these; see benchmarks/_faults_*.py.
collect_ignore = [] if ADAPTER in ("torch", "keras") else ["test_planted_faults.py"]


@pytest.fixture(autouse=True)
def surroundings():
    with specimens.surroundings():
        yield
