"""Each kind of planted fault in a network is named, and healthy networks have none (part of the benchmark)."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tested_adapter import ADAPTER, on_keras

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from nonfinite_faults import faults, healthy, kinds_of_fault, wrong

KINDS = [pytest.param(kind, id=kind.__name__, marks=on_keras(pytest.mark.product)) for kind in kinds_of_fault(ADAPTER)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_named(kind):
    assert not wrong(kind(np.random.default_rng([1, 2])))


def test_nets_that_are_well():
    assert [wrong(net) for net in healthy(ADAPTER, 8, seed=1)] == [""] * 8


@pytest.mark.full
def test_nineteen_of_twenty_of_two_hundred():
    assert sum(not wrong(fault) for fault in faults(ADAPTER, 200, seed=2)) >= 190
    assert not any(map(wrong, healthy(ADAPTER, 100, seed=2)))
