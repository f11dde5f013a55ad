"""Measures against closed forms, on NumPy, torch and the strict array-API namespace."""

import math

import array_api_strict
import numpy as np
import pytest
import torch

from rnnlens.recurrence import measures


def to_torch(values):
    return torch.as_tensor(values)


NAMESPACES = {"numpy": np.asarray, "torch": to_torch, "strict": array_api_strict.asarray}


@pytest.fixture(params=NAMESPACES)
def make(request):
    return NAMESPACES[request.param]


def back(array):
    return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)


def test_norm_of_a_vanishing_gradient_does_not_underflow(make):
    tiny = make(np.full((2, 4), 1e-30, dtype=np.float32))
    np.testing.assert_allclose(back(measures.safe_norm(tiny, axis=1)), 2e-30, rtol=1e-6)


def test_norm_of_a_huge_gradient_does_not_overflow(make):
    huge = make(np.full((2, 4), 1e30, dtype=np.float32))
    np.testing.assert_allclose(back(measures.safe_norm(huge, axis=1)), 2e30, rtol=1e-6)


def test_norm_over_several_axes_is_the_frobenius_norm(make):
    values = np.random.default_rng(0).normal(size=(3, 4, 5))
    np.testing.assert_allclose(
        back(measures.safe_norm(make(values), axis=(1, 2))), np.linalg.norm(values.reshape(3, -1), axis=1), rtol=1e-14
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norm_does_not_hide_what_is_not_finite(make, bad):
    values = np.array([[1.0, bad], [3.0, 4.0]])
    norm = back(measures.safe_norm(make(values), axis=1))
    assert not np.isfinite(norm[0])
    assert norm[1] == 5.0


def test_finite_mean_leaves_out_nan_and_infinity(make):
    values = make(np.array([[1.0, math.nan, math.nan], [3.0, 5.0, math.inf]]))
    np.testing.assert_array_equal(back(measures.finite_mean(values, axis=0)), [2.0, 5.0, math.nan])


def test_masked_mean_obeys_the_mask_and_keeps_nan(make):
    values = np.array([[1.0, 9.0, math.nan, math.nan], [3.0, 5.0, 1.0, 7.0]])
    where = np.array([[True, False, True, False], [True, True, True, False]])
    np.testing.assert_array_equal(
        back(measures.masked_mean(make(values), make(where), axis=0)), [2.0, 5.0, math.nan, math.nan]
    )


@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_quantile_is_numpys(make, q):
    values = np.random.default_rng(1).normal(size=(7, 3))
    (found,) = measures.quantiles(make(values), q=(q,), axis=0)
    np.testing.assert_allclose(back(found), np.quantile(values, q, axis=0), rtol=1e-14)


def test_quantile_of_nan_is_nan(make):
    (found,) = measures.quantiles(make(np.array([[1.0, math.nan], [2.0, 0.0]])), q=(0.5,), axis=0)
    np.testing.assert_array_equal(back(found), [1.5, math.nan])


def test_saturation_share_counts_strictly_beyond(make):
    gates = make(np.array([[0.05, 0.1], [0.95, 0.9], [0.5, 0.99], [math.nan, 0.0]]))
    low, high = measures.saturation_share(gates, axis=0)
    np.testing.assert_allclose(back(low), [1 / 3, 1 / 4])
    np.testing.assert_allclose(back(high), [1 / 3, 1 / 4])


def test_saturation_share_leaves_out_masked_steps(make):
    gates = make(np.array([[0.0, 0.5], [1.0, 1.0]]))
    low, high = measures.saturation_share(gates, axis=0, where=make(np.array([[True, False], [False, False]])))
    np.testing.assert_allclose(back(low), [1.0, math.nan])
    np.testing.assert_allclose(back(high), [0.0, math.nan])


def causal(length, decay):
    lag = np.arange(length)[:, None] - np.arange(length)
    return np.where(lag >= 0, decay ** np.maximum(lag, 0).astype(float), 0.0)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_lag_profile_of_a_geometric_jacobian_is_geometric(make, length):
    found = back(measures.lag_profile(make(causal(length, 0.8)[None])))
    np.testing.assert_allclose(found, 0.8 ** np.arange(length)[None], rtol=1e-14)


def test_lag_profile_is_the_mean_of_each_diagonal(make):
    norms = np.abs(np.random.default_rng(2).normal(size=(3, 6, 6)))
    expected = np.stack([np.diagonal(norms, -lag, 1, 2).mean(axis=1) for lag in range(6)], axis=1)
    np.testing.assert_allclose(back(measures.lag_profile(make(norms))), expected, rtol=1e-14)


def test_lag_profile_of_selected_times_uses_only_pairs_that_were_given(make):
    norms = np.abs(np.random.default_rng(3).normal(size=(8, 8)))
    out, inn = [7, 2], [0, 5]
    found = back(measures.lag_profile(make(norms[np.ix_(out, inn)]), out_times=out, in_times=inn))
    expected = np.full(8, math.nan)
    expected[7], expected[2] = norms[7, 0], (norms[7, 5] + norms[2, 0]) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.9, 0.99])
def test_half_life_of_a_geometric_profile_is_exact(make, decay):
    profile = make(3.0 * decay ** np.arange(200.0))
    assert float(measures.half_life(profile)) == pytest.approx(math.log(0.5) / math.log(decay), rel=1e-9)


def test_half_life_counts_from_the_peak(make):
    assert float(measures.half_life(make(np.array([0.1, 1.0, 4.0, 2.0, 1.0])))) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ([1.0, 0.9, 0.8], math.inf),
        ([0.0, 0.0], math.nan),
        ([math.nan, math.nan], math.nan),
        ([1.0, 0.0], 1.0),
        ([1.0], math.inf),
    ],
)
def test_half_life_at_the_boundaries(make, profile, expected):
    np.testing.assert_equal(float(measures.half_life(make(np.array(profile)))), expected)


def test_half_life_along_another_axis(make):
    profile = np.stack([0.5 ** np.arange(9.0), 0.25 ** np.arange(9.0)], axis=1)
    np.testing.assert_allclose(back(measures.half_life(make(profile), axis=0)), [1.0, 0.5])


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.01])
def test_horizon_of_a_geometric_profile(make, epsilon):
    found = int(measures.horizon(make(0.9 ** np.arange(100.0)), epsilon=epsilon))
    assert found == math.floor(math.log(epsilon) / math.log(0.9))


def test_horizon_of_nothing_is_minus_one(make):
    assert int(measures.horizon(make(np.zeros(4)))) == -1


def test_mean_lag_of_a_geometric_profile(make):
    found = float(measures.mean_lag(make(0.5 ** np.arange(60.0))))
    assert found == pytest.approx(1.0, abs=1e-12)  # a / (1 - a)


def test_covering_lag_of_a_flat_profile(make):
    assert int(measures.covering_lag(make(np.ones(10)), share=0.9)) == 8
    assert int(measures.covering_lag(make(np.zeros(10)))) == -1
