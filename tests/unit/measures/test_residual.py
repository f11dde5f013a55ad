"""The residual test: detects a planted dependency on a past step, and none in noise."""

import time

import numpy as np
import pytest

from rnnlens.measures import residual


def noise(samples=400, steps=40, features=2, seed=0):
    return np.random.default_rng(seed).normal(size=(samples, steps, features))


@pytest.mark.parametrize("step", [0, 17, 39])
def test_names_the_step(step):
    x = noise()
    y = x[:, step, :1]
    result = residual.missed_dependency(y, x, float(y.var()))
    assert result.step == step
    assert result.effect > 0.1
    assert result.p_value < 0.01
    assert result.by_step[step] > result.threshold


def test_sees_a_product_within_a_step():
    x = noise(1000)
    y = x[:, 11, :1] * x[:, 11, 1:]
    result = residual.missed_dependency(y, x, float(y.var()))
    assert (result.step, result.p_value < 0.01) == (11, True)


def test_says_nothing_of_noise():
    alarms = 0
    for seed in range(20):
        x, y = noise(200, 20, 1, seed), np.random.default_rng(100 + seed).normal(size=(200, 1))
        result = residual.missed_dependency(y, x, float(y.var()), seed=seed)
        alarms += result.effect >= 0.02 and result.p_value < 0.01
    assert alarms == 0


@pytest.mark.full
def test_does_not_see_a_parity_over_two_steps():
    """The residual test misses the product of two steps, as documented: a negative result is no proof."""
    x = np.sign(noise(2000, 20, 1))
    y = x[:, 3] * x[:, 12]
    result = residual.missed_dependency(y, x, float(y.var()))
    assert result.effect < 0.02


def test_a_constant_feature_does_no_harm():
    x = np.concatenate([noise(), np.full((400, 40, 1), 0.7)], axis=2)
    y = x[:, 5, :1]
    assert residual.missed_dependency(y, x, float(y.var())).step == 5


def test_outputs_of_a_vocabulary_cost_no_more_than_their_samples():
    """A rotation of the errors into 4,000 outputs changes no statistic, and the time by less than that of its QR."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(48, 6, 4))
    errors = x[:, 1, :1] * rng.normal(size=5) + rng.normal(size=(48, 5))
    rotation = np.linalg.qr(rng.normal(size=(4000, 5)))[0].T
    variance = float(errors.var(axis=0).sum())
    few, many = (residual.missed_dependency(e, x, variance, seed=2) for e in (errors, errors @ rotation))
    assert (few.step, few.p_value) == (many.step, many.p_value)
    np.testing.assert_allclose(many.by_step, few.by_step, rtol=1e-9)
    np.testing.assert_allclose([many.effect, many.threshold], [few.effect, few.threshold], rtol=1e-9)

    def seconds(outputs):
        wide = rng.normal(size=(48, outputs))
        start = time.process_time()
        residual.missed_dependency(wide, x, 1.0, seed=2)
        return time.process_time() - start

    assert min(seconds(4000) for _ in range(3)) < 4 * min(seconds(48) for _ in range(3))
