"""The residual test: detects a planted dependency on a past step, and none in noise."""

import numpy as np
import pytest

from rnnlens import measures


def noise(samples=400, steps=40, features=2, seed=0):
    return np.random.default_rng(seed).normal(size=(samples, steps, features))


@pytest.mark.parametrize("step", [0, 17, 39])
def test_names_the_step(step):
    x = noise()
    y = x[:, step, :1]
    result = measures.missed_dependency(y, x, float(y.var()))
    assert result.step == step
    assert result.effect > 0.1
    assert result.p_value < 0.01
    assert result.by_step[step] > result.threshold


def test_sees_a_product_within_a_step():
    x = noise(1000)
    y = x[:, 11, :1] * x[:, 11, 1:]
    result = measures.missed_dependency(y, x, float(y.var()))
    assert (result.step, result.p_value < 0.01) == (11, True)


def test_says_nothing_of_noise():
    alarms = 0
    for seed in range(20):
        x, y = noise(200, 20, 1, seed), np.random.default_rng(100 + seed).normal(size=(200, 1))
        result = measures.missed_dependency(y, x, float(y.var()), seed=seed)
        alarms += result.effect >= 0.02 and result.p_value < 0.01
    assert alarms == 0


@pytest.mark.slow
def test_does_not_see_a_parity_over_two_steps():
    """The residual test misses the product of two steps, as documented: a negative result is no proof."""
    x = np.sign(noise(2000, 20, 1))
    y = x[:, 3] * x[:, 12]
    result = measures.missed_dependency(y, x, float(y.var()))
    assert result.effect < 0.02


def test_a_constant_feature_does_no_harm():
    x = np.concatenate([noise(), np.full((400, 40, 1), 0.7)], axis=2)
    y = x[:, 5, :1]
    assert measures.missed_dependency(y, x, float(y.var())).step == 5
