"""Measures against closed forms, on NumPy, torch and array-api-strict."""

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
def to_array(request):
    return NAMESPACES[request.param]


def to_numpy(array):
    return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)


def test_norm_of_a_vanishing_gradient_does_not_underflow(to_array):
    tiny = to_array(np.full((2, 4), 1e-30, dtype=np.float32))
    np.testing.assert_allclose(to_numpy(measures.safe_norm(tiny, axis=1)), 2e-30, rtol=1e-6)


def test_norm_of_a_huge_gradient_does_not_overflow(to_array):
    huge = to_array(np.full((2, 4), 1e30, dtype=np.float32))
    np.testing.assert_allclose(to_numpy(measures.safe_norm(huge, axis=1)), 2e30, rtol=1e-6)


def test_norm_over_several_axes_is_the_frobenius_norm(to_array):
    values = np.random.default_rng(0).normal(size=(3, 4, 5))
    np.testing.assert_allclose(
        to_numpy(measures.safe_norm(to_array(values), axis=(1, 2))),
        np.linalg.norm(values.reshape(3, -1), axis=1),
        rtol=1e-14,
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norm_does_not_hide_what_is_not_finite(to_array, bad):
    values = np.array([[1.0, bad], [3.0, 4.0]])
    norm = to_numpy(measures.safe_norm(to_array(values), axis=1))
    assert not np.isfinite(norm[0])
    assert norm[1] == 5.0


def test_finite_mean_leaves_out_nan_and_infinity(to_array):
    values = to_array(np.array([[1.0, math.nan, math.nan], [3.0, 5.0, math.inf]]))
    np.testing.assert_array_equal(to_numpy(measures.finite_mean(values, axis=0)), [2.0, 5.0, math.nan])


def test_masked_mean_obeys_the_mask_and_keeps_nan(to_array):
    values = np.array([[1.0, 9.0, math.nan, math.nan], [3.0, 5.0, 1.0, 7.0]])
    mask = np.array([[True, False, True, False], [True, True, True, False]])
    np.testing.assert_array_equal(
        to_numpy(measures.masked_mean(to_array(values), to_array(mask), axis=0)), [2.0, 5.0, math.nan, math.nan]
    )


@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_quantile_is_numpys(to_array, q):
    values = np.random.default_rng(1).normal(size=(7, 3))
    (quantile,) = measures.quantiles(to_array(values), q=(q,), axis=0)
    np.testing.assert_allclose(to_numpy(quantile), np.quantile(values, q, axis=0), rtol=1e-14)


def test_quantile_of_nan_is_nan(to_array):
    (quantile,) = measures.quantiles(to_array(np.array([[1.0, math.nan], [2.0, 0.0]])), q=(0.5,), axis=0)
    np.testing.assert_array_equal(to_numpy(quantile), [1.5, math.nan])


def test_saturation_share_counts_strictly_beyond(to_array):
    gates = to_array(np.array([[0.05, 0.1], [0.95, 0.9], [0.5, 0.99], [math.nan, 0.0]]))
    low, high = measures.saturation_share(gates, axis=0)
    np.testing.assert_allclose(to_numpy(low), [1 / 3, 1 / 4])
    np.testing.assert_allclose(to_numpy(high), [1 / 3, 1 / 4])


def test_saturation_share_leaves_out_masked_steps(to_array):
    gates = to_array(np.array([[0.0, 0.5], [1.0, 1.0]]))
    low, high = measures.saturation_share(gates, axis=0, where=to_array(np.array([[True, False], [False, False]])))
    np.testing.assert_allclose(to_numpy(low), [1.0, math.nan])
    np.testing.assert_allclose(to_numpy(high), [0.0, math.nan])


def geometric_norms(length, decay):
    lag = np.arange(length)[:, None] - np.arange(length)
    return np.where(lag >= 0, decay ** np.maximum(lag, 0).astype(float), 0.0)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_lag_profile_of_a_geometric_jacobian_is_geometric(to_array, length):
    profile = to_numpy(measures.lag_profile(to_array(geometric_norms(length, 0.8)[None])))
    np.testing.assert_allclose(profile, 0.8 ** np.arange(length)[None], rtol=1e-14)


def test_lag_profile_is_the_mean_of_each_diagonal(to_array):
    norms = np.abs(np.random.default_rng(2).normal(size=(3, 6, 6)))
    expected = np.stack([np.diagonal(norms, -lag, 1, 2).mean(axis=1) for lag in range(6)], axis=1)
    np.testing.assert_allclose(to_numpy(measures.lag_profile(to_array(norms))), expected, rtol=1e-14)


def test_lag_profile_of_selected_times_uses_only_pairs_that_were_given(to_array):
    norms = np.abs(np.random.default_rng(3).normal(size=(8, 8)))
    out_times, in_times = [7, 2], [0, 5]
    profile = to_numpy(
        measures.lag_profile(to_array(norms[np.ix_(out_times, in_times)]), out_times=out_times, in_times=in_times)
    )
    expected = np.full(8, math.nan)
    expected[7], expected[2] = norms[7, 0], (norms[7, 5] + norms[2, 0]) / 2
    np.testing.assert_allclose(profile, expected, rtol=1e-14)


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.9, 0.99])
def test_half_life_of_a_geometric_profile_is_exact(to_array, decay):
    profile = to_array(3.0 * decay ** np.arange(200.0))
    assert float(measures.half_life(profile)) == pytest.approx(math.log(0.5) / math.log(decay), rel=1e-9)


def test_half_life_counts_from_the_peak(to_array):
    assert float(measures.half_life(to_array(np.array([0.1, 1.0, 4.0, 2.0, 1.0])))) == pytest.approx(1.0)


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
def test_half_life_at_the_boundaries(to_array, profile, expected):
    np.testing.assert_equal(float(measures.half_life(to_array(np.array(profile)))), expected)


def test_half_life_along_another_axis(to_array):
    profile = np.stack([0.5 ** np.arange(9.0), 0.25 ** np.arange(9.0)], axis=1)
    np.testing.assert_allclose(to_numpy(measures.half_life(to_array(profile), axis=0)), [1.0, 0.5])


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.01])
def test_horizon_of_a_geometric_profile(to_array, epsilon):
    horizon = int(measures.horizon(to_array(0.9 ** np.arange(100.0)), epsilon=epsilon))
    assert horizon == math.floor(math.log(epsilon) / math.log(0.9))


def test_horizon_of_nothing_is_minus_one(to_array):
    assert int(measures.horizon(to_array(np.zeros(4)))) == -1


def test_mean_lag_of_a_geometric_profile(to_array):
    mean_lag = float(measures.mean_lag(to_array(0.5 ** np.arange(60.0))))
    assert mean_lag == pytest.approx(1.0, abs=1e-12)  # a / (1 - a) with a = 0.5


def test_covering_lag_of_a_flat_profile(to_array):
    assert int(measures.covering_lag(to_array(np.ones(10)), share=0.9)) == 8
    assert int(measures.covering_lag(to_array(np.zeros(10)))) == -1
