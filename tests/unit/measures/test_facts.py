"""Facts about data, states and gates, each counted by hand."""

import numpy as np
import pytest

from rnnlens.measures import facts, profiles


def test_dead_units_are_those_that_do_not_move():
    states = np.random.default_rng(0).normal(size=(20, 10, 6))
    states[:, :, [1, 4]] = 0.3
    assert np.flatnonzero(facts.dead_units(states)).tolist() == [1, 4]
    states[:, :, :5] = 0
    assert np.flatnonzero(facts.dead_units(states)).tolist() == [0, 1, 2, 3, 4]


def test_masked_steps_do_not_count():
    states = np.random.default_rng(0).normal(size=(20, 10, 2))
    mask = np.ones((20, 10), bool)
    mask[:, 5:] = False
    states[:, :5, 0] = 0.5
    assert not facts.dead_units(states).any()
    assert facts.dead_units(states, mask).tolist() == [True, False]


def test_time_constant_of_a_gate_that_stands_still():
    forget = np.full((4, 9, 2), np.exp(-1 / np.array([5.0, 50.0])))
    np.testing.assert_allclose(facts.gate_timescale(forget), [5, 50])


def test_stuck_gates():
    gates = np.full((10, 10, 2, 3), 0.5)
    gates[:, :, 0, 1], gates[:, :, 1, 2] = 0.001, 0.999
    shut, opened = facts.stuck_gates(gates)
    assert np.argwhere(shut).tolist() == [[0, 1]]
    assert np.argwhere(opened).tolist() == [[1, 2]]


def test_constant_and_static_input():
    x = np.random.default_rng(0).normal(size=(30, 12, 3)).astype("float32")
    x[:, :, 1] = np.float32(0.1)
    assert facts.constant_features(x).tolist() == [False, True, False]
    assert facts.static_share(x) == 0
    x[:6] = x[:6, :1]
    assert facts.static_share(x) == pytest.approx(0.2)


@pytest.mark.parametrize("behind", [True, False])
def test_padding_is_a_run_of_the_same_step_at_one_end(behind):
    x = np.random.default_rng(0).normal(size=(30, 10, 2))
    x[:, 4:] = 0
    x = x if behind else x[:, ::-1]
    assert facts.padding_share(x) == pytest.approx(0.5, abs=0.11)
    assert facts.padding_share(np.random.default_rng(0).normal(size=(30, 10, 2))) == 0


def test_padding_that_is_masked_is_counted():
    mask = np.ones((4, 10), bool)
    mask[:, 7:] = False
    assert facts.padding_share(np.zeros((4, 10, 1)), mask) == pytest.approx(0.3)


def test_census():
    values = np.array([1, np.nan, np.inf, -np.inf, 0, 1e-40], dtype="float32")
    counts = facts.census(values)
    assert (counts.nan, counts.infinite, counts.underflow, counts.count) == (1, 2, 1, 6)


def test_attribution_holds_where_the_input_varies():
    gradient = np.ones((50, 8, 1))
    x = np.zeros((50, 8, 1))
    x[:, 5] = np.random.default_rng(0).normal(size=(50, 1))
    scores = profiles.attribution(gradient, x)
    assert np.flatnonzero(scores.sum(axis=0)).tolist() == [5]
    assert profiles.attributed_memory(scores) == 3


def test_band_takes_each_sample_by_its_own_peak():
    norms = np.outer([1e-6, 1.0, 1e6], 0.5 ** np.arange(5))
    band = profiles.band(norms)
    for curve in (band.low, band.median, band.high):
        np.testing.assert_allclose(curve, 0.5 ** np.arange(5))
