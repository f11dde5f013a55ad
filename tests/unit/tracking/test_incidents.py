"""The first batch that is not finite: to a file and back."""

import logging

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.adapters.protocol import Batch
from rnnlens.errors import InputError
from rnnlens.tracking.incidents import Incidents, checked_on_nonfinite, is_finite, told

WEIGHTS = {"lstm/lstm_cell/kernel": np.ones((2, 3), "f"), "lstm/lstm_cell/bias": np.arange(3.0)}


@pytest.mark.parametrize(
    "x",
    [
        np.arange(6.0).reshape(2, 3),
        [np.ones((2, 3)), np.zeros(2)],
        (np.ones((2, 3)),),
        {"a": np.ones((2, 3), "f"), "b": [np.arange(2), (np.array([1.0, np.nan]),)]},
    ],
)
def test_what_was_reported_comes_back(tmp_path, x):
    incidents = Incidents(tmp_path / "runs" / "a.zarr")
    path = incidents.report(Batch(x, np.array([1.0, np.inf])), WEIGHTS, {"step": 7, "epoch": 2, "loss": np.nan})
    assert path == tmp_path / "runs" / "a.nonfinite.nc"
    back = rl.open(path)
    np.testing.assert_equal(back.x, x)
    assert type(back.x) is type(x)
    np.testing.assert_equal(back.y, [1.0, np.inf])
    assert back.sample_weight is None
    np.testing.assert_equal(back.weights, WEIGHTS)
    assert list(back.weights) == list(WEIGHTS)
    assert (back.step, back.epoch) == (7, 2)
    assert np.isnan(back.loss)
    assert "step 7 of training" in repr(back)


def test_only_the_first_is_written(tmp_path, caplog):
    incidents = Incidents(tmp_path / "a.zarr")
    with caplog.at_level(logging.WARNING, "rnnlens"):
        for step in (3, 4):
            incidents.report(Batch(np.ones(2)), {}, {"step": step})
    assert rl.open(incidents.written).step == 3
    assert len(caplog.messages) == 1
    assert "Step 3 of training is not finite" in caplog.messages[0]


def test_the_switch():
    assert checked_on_nonfinite(None) is None
    assert checked_on_nonfinite("report") == "report"
    with pytest.raises(InputError, match="on_nonfinite= is not understood"):
        checked_on_nonfinite("stop")


def test_what_is_finite():
    assert is_finite(None)
    assert is_finite(np.float32(1))
    assert not is_finite(np.inf)


def test_an_error_without_words_is_told_by_its_name():
    def ask():
        raise KeyError

    assert told(ask) == "its origin could not be determined (KeyError)"
