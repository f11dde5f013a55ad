"""Random arguments to each verb on a Keras model give a result or one clear error, in bounded time and memory."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from hostile import diagnosis_targets, faults, run_calls, verb_targets

pytestmark = [pytest.mark.one_engine, pytest.mark.op_by_op]

FOREIGN = {
    "requires grad": lambda: torch.ones(2, 5, 3, requires_grad=True),
    "bfloat16": lambda: torch.ones(2, 5, 3, dtype=torch.bfloat16),
    "meta": lambda: torch.ones(2, 5, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 5, 3).to_sparse(),
    "a tensor": lambda: keras.ops.ones((2, 5, 3)),
    "half tensor": lambda: keras.ops.ones((2, 5, 3), dtype="bfloat16"),
    "complex tensor": lambda: keras.ops.ones((2, 5, 3), dtype="complex64"),
    "symbolic": lambda: keras.Input((5, 3)),
    "layer": lambda: keras.layers.LSTM(2),
    "empty model": keras.Sequential,
    "model class": lambda: keras.Model,
    "loss class": lambda: keras.losses.MeanSquaredError,
    "loss": keras.losses.MeanSquaredError,
    "batches": lambda: Batches(),
}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((2, 5, 3)), np.ones((2, 5, 2))


def make_cases(tmp_path):
    inputs = keras.Input((None, 3))
    hidden = keras.layers.LSTM(4, return_sequences=True, name="lstm")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="top")(hidden))
    # Run eagerly: compiled programs are tested elsewhere.
    model.compile(loss="mse", run_eagerly=True)
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("f4")
    return verb_targets(model, x, np.zeros((2, 5, 2), "f4"), "mse", tmp_path)


@pytest.mark.one_engine
def test_every_call_ends_in_a_result_or_in_one_error_of_ours(tmp_path):
    outcomes = run_calls(make_cases(tmp_path), FOREIGN, 120, 0)
    assert not faults(outcomes)
    assert sum(outcome.kind == "result" for outcome in outcomes) > 8  # many calls must give a result


@pytest.mark.one_engine
def test_every_diagnosis_ends_in_a_result_or_in_one_error_of_ours(tmp_path):
    model, x, y = (make_cases(tmp_path)[1].good[name]() for name in ("model", "x", "y"))
    outcomes = run_calls(diagnosis_targets(model, x, y), FOREIGN, 60, 0)
    assert not faults(outcomes)
    assert sum(outcome.kind == "result" for outcome in outcomes) > 5


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 3))
def test_so_do_thousands(seed, tmp_path):
    assert not faults(run_calls(make_cases(tmp_path), FOREIGN, 1500, seed))


def test_hostile_calls_leave_the_model_as_it_was(tmp_path):
    cases = make_cases(tmp_path)
    model = cases[0].good["model"]()
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.variables]
    run_calls(cases, FOREIGN, 30, 9)
    after = [keras.ops.convert_to_numpy(variable) for variable in model.variables]
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert model.compiled
