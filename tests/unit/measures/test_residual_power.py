"""One step that explains the errors is found among many steps and features; the power of the test is said rightly."""

import numpy as np
import pytest

from rnnlens.measures import missed_dependency
from rnnlens.measures.residual import ridge_effects, single_step_effects, step_features


def drawn(samples, steps, features, effect, seed):
    """Return inputs, and errors of variance 1 of which one input explains a share."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, steps, features))
    noise = rng.normal(size=samples)
    return x, (np.sqrt(effect) * x[:, steps // 2, 0] + np.sqrt(1 - effect) * noise)[:, None]


def test_a_copied_step_is_found_where_ridge_on_all_steps_drowns():
    x, errors = drawn(256, 100, 8, 1.0, 0)
    features = step_features(x)
    assert ridge_effects([errors], features)[0] < 0.1
    assert single_step_effects([errors], features)[0] > 0.9
    found = missed_dependency(errors, x, float(errors.var()))
    assert found.step == 50
    assert found.effect > 0.9


@pytest.mark.parametrize("seed", range(8))
def test_noise_has_no_effect_by_a_step_that_was_searched_for(seed):
    x, errors = drawn(128, 60, 4, 0.0, seed)
    assert single_step_effects([errors], step_features(x))[0] < 0.02


@pytest.mark.parametrize(("factor", "least", "most"), [(0.4, 0.0, 0.4), (2.5, 0.8, 1.0)])
def test_the_number_of_samples_needed_is_where_an_effect_begins_to_be_found(factor, least, most):
    x, noise = drawn(64, 40, 3, 0.0, 0)
    needed = missed_dependency(noise, x, 1.0).samples_for(0.1)
    found = []
    for seed in range(10):
        x, errors = drawn(round(factor * needed), 40, 3, 0.1, 100 + seed)
        result = missed_dependency(errors, x, 1.0)
        found.append(result.p_value < 0.01 + 1e-9 and result.step == 20)
    assert least <= np.mean(found) <= most
