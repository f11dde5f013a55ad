"""One step that explains the errors is found among many steps and features; the power of the test is said rightly."""

import re

import numpy as np
import pytest

from rnnlens.diagnosis.of_model import _power_notes
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


def found_of(effect, samples, steps, features, scale=1.0):
    """Return how often an input with an effect is found in the errors of 10 draws, and the notes on the power."""
    found, notes = [], []
    for seed in range(10):
        x, errors = drawn(samples, steps, features, effect, seed)
        result = missed_dependency(scale * errors, x, 1.0)
        found.append(result.exceeds_chance and result.step == steps // 2)
        notes += _power_notes(missed_dependency(scale * drawn(samples, steps, features, 0.0, seed)[1], x, 1.0))
    return np.mean(found), notes


@pytest.mark.parametrize(("samples", "features", "scale"), [(8, 3, 1.0), (12, 3, 0.6)])
def test_where_no_effect_could_have_been_found_no_share_is_named_but_the_samples_that_it_needs(
    samples, features, scale
):
    found, notes = found_of(1.0, samples, 40, features, scale)
    notes = [note for note in notes if "however large" in note]
    assert len(notes) >= 5
    assert found <= 0.3
    n, sought, needed = map(int, re.findall(r"\d+", notes[0]))
    assert (n, sought) == (samples, 10)
    assert found_of(0.1 / scale**2, 2 * needed, 40, features, scale)[0] >= 0.8
    assert found_of(0.1 / scale**2, round(0.4 * needed), 40, features, scale)[0] <= 0.3


def test_no_note_names_a_share_above_all_that_the_errors_hold():
    for samples, features in ((8, 3), (20, 3), (60, 3), (300, 2)):
        for scale in (1.0, 0.6, 0.25):
            x, errors = drawn(samples, 40, features, 0.0, samples)
            for note in _power_notes(missed_dependency(scale * errors, x, 1.0)):
                shares = [int(share) for share in re.findall(r"(\d+) %", note)]
                assert max(shares) <= 100 * scale**2 * 1.2
                assert scale > 0.3
