"""Memory by exchanged prefixes, against closed forms for linear predictions; resampling weights."""

import math

import array_api_strict
import numpy as np
import pytest
import torch

from rnnlens.measures import intervention
from rnnlens.measures.intervention import cycle, donors, resampling_weights, search


def linear_model(weights):
    """Return the model f(x) = sum_tau w_tau x_(T - tau) for x (sample, time, 1)."""
    return lambda x: x[:, ::-1, 0] @ np.asarray(weights)[: x.shape[1], None]


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(20_000, 30, 1))


def exchange_prefix(x, keep):
    donor_inputs = x[intervention.donors(len(x))]
    return np.concatenate([donor_inputs[:, : x.shape[1] - keep], x[:, x.shape[1] - keep :]], axis=1)


@pytest.mark.parametrize("decay", [0.5, 0.8, 0.95])
def test_use_is_the_share_of_the_variance_that_is_older(x, decay):
    weights = decay ** np.arange(30)
    f = linear_model(weights)
    energy = weights**2 / (weights**2).sum()
    for keep in (1, 3, 10, 29):
        assert intervention.use(f(x), f(exchange_prefix(x, keep))) == pytest.approx(energy[keep:].sum(), abs=0.02)


def test_no_sample_lends_to_itself_and_all_lend():
    for samples in (2, 3, 64):
        lenders = intervention.donors(samples, seed=3)
        assert sorted(lenders) == list(range(samples))
        assert (lenders != np.arange(samples)).all()


def test_lenders_are_about_as_long_as_borrowers():
    lengths = np.random.default_rng(1).integers(5, 50, 200)
    lenders = intervention.donors(200, lengths=lengths)
    assert np.median(np.abs(lengths[lenders] - lengths)) <= 1


@pytest.mark.parametrize(("curve", "n"), [({1: 1, 2: 1, 4: 0.01}, 4), ({1: 0.0, 2: 0.0}, 1), ({1: 1, 9: 0.5}, 10)])
def test_memory_is_the_first_context_that_suffices_for_good(curve, n):
    assert intervention.memory_length(curve, 10) == n


def test_a_dip_on_the_way_is_not_the_end():
    assert intervention.memory_length({1: 0.9, 2: 0.01, 4: 0.9, 8: 0.01}, 10) == 8


@pytest.mark.parametrize("decreasing", [False, True])
@pytest.mark.parametrize("need", [1, 2, 7, 23, 29, 30])
def test_the_search_finds_what_all_contexts_would(x, need, decreasing):
    weights = np.zeros(30)
    weights[need - 1] = 1
    f, samples, probed = linear_model(weights), x[:500], []

    def probe(keep):
        probed.append(keep)
        change = ((f(exchange_prefix(samples, keep)) - f(samples)) ** 2).sum(axis=1)
        return change, change

    variance = intervention.total_variance(f(samples))
    result = search(probe, 30, 2 * variance, (0.05, 0.01), decreasing=decreasing)
    curve = {k: c.mean() / (2 * variance) for k, c in result.change.items()}
    assert intervention.memory_length(curve, 30) == need
    assert len(probed) == len(set(probed)) <= 13
    # Once a decreasing curve is 0, only the oldest step is probed further.
    assert 29 in probed
    assert (16 in probed) == (need > 8 or not decreasing)


def test_skill_and_benefit_by_hand():
    assert intervention.skill(np.array([0.1, 0.3]), np.array([1.0, 1.0])) == pytest.approx(0.8)
    # y alternates; the prediction is 0.5 y, and 0.1 y with older inputs exchanged.
    y = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    assert intervention.benefit(y, 0.5 * y, 0.1 * y) == pytest.approx(0.8)
    assert intervention.benefit(y, 0.5 * y, np.ones((4, 1))) == pytest.approx(1.0)
    assert np.isnan(intervention.benefit(y, -y, y))


def test_a_prediction_that_does_not_vary_has_no_use():
    f = np.full((10, 2), 3.0) + 1e-9 * np.random.default_rng(0).normal(size=(10, 2))
    assert intervention.total_variance(f) == 0
    assert np.isnan(intervention.use(f, f + 1))


@pytest.mark.parametrize("samples", [5, 64, 127])
def test_weights_are_shares(samples):
    for order in (None, np.random.default_rng(0).permutation(samples)):
        weights = resampling_weights(samples, order=order)
        np.testing.assert_allclose(weights.sum(axis=1), 1)
        np.testing.assert_allclose(weights.mean(axis=0), 1 / samples, rtol=0.5)


def test_the_order_follows_who_lends_to_whom():
    lenders = donors(50, seed=3)
    order = cycle(lenders)
    assert sorted(order) == list(range(50))
    np.testing.assert_array_equal(lenders[order], np.roll(order, -1))


def test_what_neighbours_share_is_in_the_spread():
    """Resampling in blocks includes the covariance with the sample that lends the prefix: variance 4 / n, not 2 / n."""
    samples, repeats = 400, 30
    spreads = {"alone": [], "in blocks": []}
    for seed in range(repeats):
        lenders, contributions = donors(samples, seed=seed), np.random.default_rng(seed).normal(size=samples)
        change = contributions + contributions[lenders]
        for name, order in (("alone", None), ("in blocks", cycle(lenders))):
            spreads[name].append((resampling_weights(samples, order=order, seed=seed) @ change).var() * samples)
    assert np.mean(spreads["alone"]) == pytest.approx(2, rel=0.1)
    assert np.mean(spreads["in blocks"]) == pytest.approx(4 - 2 / 4, rel=0.1)


NAMESPACES = {"numpy": np.asarray, "torch": torch.as_tensor, "strict": array_api_strict.asarray}


@pytest.fixture(params=NAMESPACES)
def to_array(request):
    return NAMESPACES[request.param]


def test_bootstrap_interval_agrees_with_the_normal_approximation(to_array):
    values = np.random.default_rng(4).normal(3.0, 2.0, size=(400, 2))
    low, high = (
        np.from_dlpack(end) for end in intervention.bootstrap_interval(to_array(values), axis=0, resamples=4000)
    )
    half_width = 1.96 * values.std(axis=0) / math.sqrt(400)
    np.testing.assert_allclose(low, values.mean(axis=0) - half_width, atol=0.03)
    np.testing.assert_allclose(high, values.mean(axis=0) + half_width, atol=0.03)


def test_bootstrap_interval_is_the_same_each_time_and_leaves_the_global_generator_alone(to_array):
    values = to_array(np.arange(5.0)[:, None])
    before = np.random.get_state()[1].copy()  # noqa: NPY002  # must not change
    first, second = intervention.bootstrap_interval(values), intervention.bootstrap_interval(values)
    assert float(first[0][0]) == float(second[0][0])
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
