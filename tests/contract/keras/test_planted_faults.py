"""Each kind of planted fault in a Keras network is named, and healthy networks have none (part of the benchmark)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import _faults_keras as planted
from nonfinite_faults import faults, healthy, wrong


@pytest.mark.product
@pytest.mark.parametrize("kind", planted.FAULTS, ids=lambda kind: kind.__name__)
def test_it_is_named(kind):
    assert not wrong(kind(np.random.default_rng([1, 2])))


@pytest.mark.one_engine
def test_nets_that_are_well():
    assert [wrong(net) for net in healthy("keras", 4, seed=1)] == [""] * 4


@pytest.mark.full
def test_nineteen_of_twenty_of_two_hundred():
    assert sum(not wrong(fault) for fault in faults("keras", 200, seed=2)) >= 190
    assert not any(map(wrong, healthy("keras", 100, seed=2)))
