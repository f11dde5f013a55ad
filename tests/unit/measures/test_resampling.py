"""Resampling weights against the variance of a mean in closed form."""

import numpy as np
import pytest

from rnnlens.measures.intervention import cycle, donors
from rnnlens.measures.resampling import resampling_weights


@pytest.mark.parametrize("samples", [5, 64, 127])
def test_weights_are_shares(samples):
    for order in (None, np.random.default_rng(0).permutation(samples)):
        weights = resampling_weights(samples, order=order)
        np.testing.assert_allclose(weights.sum(axis=1), 1)
        np.testing.assert_allclose(weights.mean(axis=0), 1 / samples, rtol=0.5)


def test_the_order_follows_who_lends_to_whom():
    lender = donors(50, seed=3)
    order = cycle(lender)
    assert sorted(order) == list(range(50))
    np.testing.assert_array_equal(lender[order], np.roll(order, -1))


def test_what_neighbours_share_is_in_the_spread():
    """Each sample's change is the sum of two parts, its own and its lender's: the mean of n has variance 4 / n."""
    samples, repeats = 400, 30
    spreads = {"alone": [], "in blocks": []}
    for seed in range(repeats):
        lender, parts = donors(samples, seed=seed), np.random.default_rng(seed).normal(size=samples)
        change = parts + parts[lender]
        for name, order in (("alone", None), ("in blocks", cycle(lender))):
            spreads[name].append((resampling_weights(samples, order=order, seed=seed) @ change).var() * samples)
    assert np.mean(spreads["alone"]) == pytest.approx(2, rel=0.1)
    assert np.mean(spreads["in blocks"]) == pytest.approx(4 - 2 / 4, rel=0.1)
