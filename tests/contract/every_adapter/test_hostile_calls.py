"""Random arguments to each verb give a result or one clear error, in bounded time and memory, and change no model."""

from __future__ import annotations

import numpy as np
import pytest
from hostile import diagnosis_targets, faults, run_calls, verb_targets
from tested_adapter import ADAPTER, on_keras, specimens

pytestmark = [pytest.mark.op_by_op, *on_keras(pytest.mark.one_engine("torch", "tf_keras"))]

FOREIGN = specimens.FOREIGN
X, Y = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("f4"), np.zeros((2, 5, 2), "f4")
#: Calls of verbs and diagnoses: fewer where a call takes longer, fewest where it compiles.
CALLS, DIAGNOSES = {"torch": (350, 160), "jax": (60, 24)}.get(ADAPTER, (120, 60))


@pytest.fixture
def tagger():
    return specimens.tagger()


def verbs(tagger, folder):
    model, loss = tagger
    targets = verb_targets(model, X, Y, loss, folder)
    for target in targets if loss is None else ():
        target.good.pop("loss", None)
    return targets


def diagnoses(tagger):
    model, loss = tagger
    # In JAX, a model that is given y and no loss returns the loss itself.
    return diagnosis_targets(model, X, Y, loss if ADAPTER == "jax" else None)


def test_every_call_ends_in_a_result_or_in_one_error_of_ours(tagger, tmp_path):
    outcomes = run_calls(verbs(tagger, tmp_path), FOREIGN, CALLS, 0)
    assert not faults(outcomes)
    assert sum(outcome.kind == "result" for outcome in outcomes) > CALLS // 15  # many calls must give a result


def test_every_diagnosis_ends_in_a_result_or_in_one_error_of_ours(tagger):
    outcomes = run_calls(diagnoses(tagger), FOREIGN, DIAGNOSES, 0)
    assert not faults(outcomes)
    assert sum(outcome.kind == "result" for outcome in outcomes) > DIAGNOSES // 12


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
def test_so_do_thousands_of_diagnoses(seed, tagger):
    assert not faults(run_calls(diagnoses(tagger), FOREIGN, 9 * DIAGNOSES, seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
def test_so_do_thousands(seed, tagger, tmp_path):
    assert not faults(run_calls(verbs(tagger, tmp_path), FOREIGN, 6 * CALLS, seed))


def test_hostile_calls_leave_the_model_and_the_process_as_they_were(tagger, tmp_path):
    before = specimens.state_of(tagger[0])
    run_calls(verbs(tagger, tmp_path), {}, CALLS // 3, 9)
    assert specimens.state_of(tagger[0]) == before
