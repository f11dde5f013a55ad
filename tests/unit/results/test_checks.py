import math

import numpy as np
import pytest

from rnnlens.errors import SelfCheckWarning
from rnnlens.results.checks import Check, epsilon, residual, rounding_bound, warn_of_failed_checks, weight_sum_check


def test_epsilon_by_name_of_any_library():
    for dtype in ("float64", "float32", "float16"):
        assert epsilon(np.dtype(dtype)) == np.finfo(dtype).eps
        assert epsilon(f"torch.{dtype}") == np.finfo(dtype).eps
    assert epsilon("bfloat16") == 2.0**-7
    assert epsilon(np.dtype("int32")) == np.finfo("float64").eps


def test_the_bound_grows_with_the_root_of_the_steps():
    assert rounding_bound("float32", 400) == pytest.approx(20 * rounding_bound("float32", 1))
    assert rounding_bound("float64", 1) == 32 * 2.0**-52
    assert rounding_bound("float32", 1000) < 2e-4
    assert rounding_bound("float16", 10**6) == 0.25


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_residual_is_relative_to_the_largest_value_expected(library):
    xp = pytest.importorskip(library)
    expected = xp.asarray([1.0, -4.0, 0.0])
    assert residual(xp.asarray([1.0, -4.0, 1.0]), expected) == 0.25
    assert residual(xp.asarray([1.0, -4.0, 1.0]), expected, scale=8.0) == 0.125
    assert residual(expected, expected) == 0.0
    nan = xp.asarray([math.nan, -4.0, 0.0])
    assert residual(nan, nan) == 0.0
    assert residual(nan, expected) == math.inf
    assert residual(expected, nan) == math.inf
    zero = xp.zeros(3)
    assert residual(zero, zero) == 0.0
    assert residual(expected, zero) == math.inf


def test_numbers_that_overflowed_agree_whatever_became_of_them():
    for value in (np.inf, -np.inf, np.nan):
        assert residual(np.array([np.inf, 1.0]), np.array([value, 1.0])) == 0.0
        assert residual(np.array([np.inf, 1.5]), np.array([value, 1.0])) == 0.5
        assert residual(np.array([2.0, 1.0]), np.array([value, 1.0])) == math.inf


def test_a_lost_step_fails_and_rounding_passes():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(2, 50, 4))
    rounded = exact.astype("float32")
    bound = rounding_bound("float32", 50)
    assert Check("replayed output", "lstm", residual(rounded.astype("float64"), exact), bound).ok
    shifted = np.roll(exact, 1, axis=1)
    assert not Check("replayed output", "lstm", residual(shifted, exact), bound).ok


def test_weight_sums_take_the_worst_weight_and_the_scale_of_the_layer():
    reference = {"kernel": np.array([[100.0, -3.0]]), "bias": np.array([1e-9, 0.0]), "unused": np.zeros(1)}
    close_sums = {"kernel": np.array([[100.0, -3.0]]), "bias": np.array([2e-9, 0.0]), "other": np.ones(1)}
    check = weight_sum_check("lstm", close_sums, reference, steps=4)
    assert check.residual == pytest.approx(1e-11)
    wrong_sums = {**close_sums, "kernel": np.array([[100.0, -3.5]])}
    assert weight_sum_check("lstm", wrong_sums, reference, steps=4).residual == pytest.approx(0.005)
    assert not weight_sum_check("lstm", wrong_sums, reference, steps=4, dtype="float32").ok


def test_failed_checks_warn_with_their_sentence_and_passed_ones_do_not():
    good, bad, nan = Check("replay", "a", 1e-9, 1e-6), Check("replay", "b", 0.5, 1e-6), Check("x", "c", math.nan, 1.0)
    with pytest.warns(SelfCheckWarning) as caught:
        warn_of_failed_checks([good, bad, nan])
    assert [str(w.message) for w in caught] == [
        "b: the replayed output differs from the captured one by 0.5 (relative); rounding explains 1e-06",
        "c: x: two computations of the same quantity differ by nan (relative); rounding explains 1",
    ]


def test_no_warning_without_cause(recwarn):
    warn_of_failed_checks([Check("replay", "a", 0.0, 0.0)])
    assert not recwarn.list


@pytest.mark.parametrize(("small", "fails"), [(1e-45, False), (5e-39, False), (1e-32, True), (1.0, True)])
def test_digits_that_underflow_are_no_fault(small, fails):
    from rnnlens.verbs.certificates.compare import Comparisons

    comparisons = Comparisons(500, "float32")
    traced, reference = np.float32([small, 0.0]), np.float32([-small, small])
    comparisons.compare("gradient", "lstm", [(traced, reference)])
    assert comparisons.checks[0].ok is not fails
    assert weight_sum_check("lstm", {"kernel": traced}, {"kernel": reference}, steps=500).ok is not fails


@pytest.mark.parametrize(("traced", "outcome"), [(0.0, "left out"), (1e-9, "left out"), (1.0, "failed")])
def test_what_drowns_in_rounding_is_not_said_to_be_certified(traced, outcome):
    from rnnlens.verbs.certificates.compare import Comparisons

    comparisons = Comparisons(100, "float32")
    comparisons.compare("reference loss", "", [(2.0, 2.0)])
    comparisons.compare(
        "reference initial state gradient", "lstm", [(np.float32([traced]), np.float32([1e-9]))], scale=1.0
    )
    certificate = comparisons.certificate("torch", certified=("loss",))
    assert certificate.state == ("failed" if outcome == "failed" else "passed")
    left_out = ("lstm initial state gradient (no larger than what rounding explains)",)
    assert certificate.uncertified == (left_out if outcome == "left out" else ())


def test_what_stands_out_of_rounding_is_compared():
    from rnnlens.verbs.certificates.compare import Comparisons

    comparisons = Comparisons(100, "float32")
    comparisons.compare("gradient", "lstm", [(np.float32([0.02]), np.float32([0.01]))], scale=1.0)
    assert [check.ok for check in comparisons.checks] == [False]
