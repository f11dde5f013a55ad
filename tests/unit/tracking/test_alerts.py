"""Alerts compare a scalar with the past of its run; the first non-finite batch is saved to a file and restored."""

import logging
import math

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.adapters.protocol import Batch
from rnnlens.errors import InputError, TrackingWarning
from rnnlens.tracking.alerts import DEVIATIONS, Alerts, Incidents, checked_on_nonfinite, is_finite, text_or_error
from rnnlens.tracking.recorder import Recorder
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.watch_arguments import Schedule


def alerts_of(name, values, alerts=None):
    alerts = alerts or Alerts()
    for step, value in enumerate(values):
        alerts.examine(TrainingRecord(step, 0, "probe", {name: value}))
    return alerts


def noise(count, level=1.0, spread=0.3, seed=0):
    """Return log-normal numbers, which is how norms of gradients are distributed."""
    return list(level * np.exp(spread * np.random.default_rng(seed).normal(size=count)))


def write_all(recorder, values):
    for step, value in enumerate(values):
        recorder.write(TrainingRecord(step, 0, "probe", {"lstm/adjoint": value}))


@pytest.mark.parametrize("level", [1e-12, 1.0, 1e9])
def test_no_size_is_too_large_by_itself(level):
    assert not alerts_of("lstm/adjoint", noise(200, level)).raised_alerts


def test_a_gradient_that_is_a_hundred_times_its_past_is_said_once_with_its_step():
    alerts = alerts_of("lstm/adjoint", noise(40) + noise(20, 100.0, seed=1))
    assert [(a.finding, a.name, a.step) for a in alerts.raised_alerts] == [("exploding", "lstm/adjoint", 40)]
    assert alerts.raised_alerts[0].usual == pytest.approx(1.0, rel=0.3)


def test_one_record_out_of_line_is_no_finding():
    assert not alerts_of("lstm/adjoint", [*noise(40), 500.0, *noise(40, seed=1)]).raised_alerts


@pytest.mark.parametrize("before", [[0.01], [0.01] * 5, noise(40, 0.01), [0.0, 0.01]])
@pytest.mark.parametrize("after", [[280_843.0], [280_843.0, 1.4e36, math.nan]])
def test_an_explosion_is_a_finding_at_once(before, after):
    """A gradient of thousands of times each before it raises an alert in its record, however few are before it."""
    alerts = Alerts()
    alerts_of("lstm/adjoint", before, alerts)
    assert not alerts.raised_alerts
    for step, value in enumerate(after, start=len(before)):
        alerts.examine(TrainingRecord(step, 0, "probe", {"lstm/adjoint": value}))
    assert [(a.finding, a.step, a.value) for a in alerts.raised_alerts] == [("exploding", len(before), 280_843.0)]


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0, 0.3, 0.4],  # a head that is initialised with zeros
        [1.0, 1e-4, 0.9],  # it was as large before
        [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0],  # it grows
        [*noise(40, spread=3.0), 3e3],  # it always jumps
    ],
)
def test_a_gradient_that_is_large_after_small_ones_is_no_explosion(values):
    assert not alerts_of("lstm/adjoint", values).raised_alerts


def test_a_gradient_that_is_not_finite_is_a_finding_at_once():
    alerts = alerts_of("lstm/adjoint", [*noise(10), math.inf])
    assert [(a.finding, a.step) for a in alerts.raised_alerts] == [("exploding", 10)]


def test_a_slow_decline_is_no_finding():
    """A gradient that decreases steadily, as it does while the loss falls, raises no alert."""
    assert not alerts_of("lstm/adjoint", list(np.exp(-np.arange(200) / 20))).raised_alerts


def test_a_gradient_that_explodes_after_a_decline():
    """An explosion is found after a decline, although the decline makes the deviation as large as the jump."""
    declining = list(np.exp(-np.arange(40) / 4))
    assert not alerts_of("lstm/adjoint", declining).raised_alerts
    alerts = alerts_of("lstm/adjoint", [*declining, 1.0, 0.5])
    assert [(a.finding, a.step) for a in alerts.raised_alerts] == [("exploding", 40)]
    rising = [*np.exp(np.arange(40) / 4)]
    assert not alerts_of("lstm/adjoint", rising).raised_alerts  # however large: a drift has no first step


def test_a_reach_that_collapses():
    alerts = alerts_of("lstm/reach", [30, 31, 29, 32, 30, 33, 30, 31, 30, 30, 4, 3, 3])
    assert [(a.finding, a.step) for a in alerts.raised_alerts] == [("vanishing", 10)]


def test_a_memory_of_two_steps_that_is_lost():
    """The loss of a memory of two steps is found by its decay, since a reach of 2 cannot fall to a third."""
    alerts = Alerts()
    for step, (reach, decay) in enumerate([(2, 0.6), (2, 0.62), (3, 0.61)] * 4 + [(1, 0.02), (1, 0.03), (1, 0.03)]):
        alerts.examine(TrainingRecord(step, 0, "probe", {"lstm/reach": reach, "lstm/decay": decay}))
    assert [(a.finding, a.name, a.step) for a in alerts.raised_alerts] == [("vanishing", "lstm/decay", 12)]


def test_a_growing_memory_that_is_lost():
    """The decay shows that memory is lost: the reach falls below a third of its last values, not of its median."""
    alerts = Alerts()
    growing_reach = [round(4 * 1.09**step) for step in range(32)]
    assert not alerts_of("lstm/reach", [*growing_reach, 8, 8, 8]).raised_alerts
    for step, reach in enumerate([*growing_reach, 8, 8, 8]):
        alerts.examine(TrainingRecord(step, 0, "probe", {"lstm/reach": reach, "lstm/decay": 0.9 if step < 32 else 0.2}))
    assert [(a.finding, a.step) for a in alerts.raised_alerts] == [("vanishing", 32)]


def test_what_two_numbers_show_is_said_once():
    alerts = Alerts()
    for step in range(20):
        memory_lost = step >= 12
        scalars = {"reach": 3 if memory_lost else 30, "decay": 0.1 if memory_lost else 0.9, "adjoint": 1.0}
        record = {f"{layer}/{name}": value for layer in ("a", "b") for name, value in scalars.items()}
        alerts.examine(TrainingRecord(step, 0, "probe", record))
    assert [(a.finding, a.name, a.step) for a in alerts.raised_alerts] == [
        ("vanishing", "a/reach", 12),
        ("vanishing", "b/reach", 12),
    ]


def test_gates_that_saturate():
    alerts = alerts_of("lstm/forget/near_1", [0.02, 0.03, 0.02, 0.04, 0.03, 0.02, 0.03, 0.02, 0.03, 0.8, 0.82])
    assert [(a.finding, a.step) for a in alerts.raised_alerts] == [("saturated", 9)]


def test_gates_that_learn_to_hold_a_value_are_no_finding():
    """Learning to saturate a third of a GRU's update gates raises no alert; a rise from a half to 97 % does."""
    learning = [0.0] * 20 + [0.02, 0.03, 0.11, 0.18, 0.21, 0.23, 0.25, 0.27, 0.3, 0.32] + [0.33] * 10
    assert not alerts_of("gru/update/near_1", learning).raised_alerts
    closing = [0.5, 0.52, 0.49, 0.5] * 4 + [0.97, 0.98, 0.99]
    assert [(a.finding, a.step) for a in alerts_of("gru/update/near_1", closing).raised_alerts] == [("saturated", 16)]


def test_the_threshold_is_the_runs_own_spread():
    """The same jump raises an alert in a run with small spread, and none in a run with large spread."""
    jump = math.exp(DEVIATIONS * 0.5)
    assert alerts_of("lstm/adjoint", noise(40, spread=0.1) + [jump] * 3).raised_alerts
    assert not alerts_of("lstm/adjoint", noise(40, spread=1.0) + [jump] * 3).raised_alerts


def test_a_finding_is_logged_noted_and_ends_training(caplog):
    records = []

    class Sink:
        def write(self, record):
            records.append(record)

        def close(self, reason):
            pass

    recorder = Recorder([Sink()], Schedule(1), alerts=Alerts(stop_on="exploding"))
    with caplog.at_level(logging.WARNING, "rnnlens"):
        for step, value in enumerate([*noise(20), 500.0, 600.0]):
            assert recorder.stop is None
            recorder.write(TrainingRecord(step, 0, "probe", {"lstm/adjoint": value}))
    assert recorder.stop.startswith("exploding since step 20: lstm/adjoint is 600")
    assert caplog.messages == [recorder.stop]
    assert [r.step for r in records if r.notes] == [21]


def test_an_alert_is_passed_on_once_and_a_function_that_raises_ends_nothing():
    called, sent, steps = [], [], []

    class Logger:
        def write(self, record):
            steps.append(record.step)

        def alert(self, alert):
            sent.append(alert)

        def close(self, reason):
            pass

    def raise_after(alert):
        called.append(alert)
        raise OSError("no mail")

    recorder = Recorder([Logger()], Schedule(1), alerts=Alerts(on_alert=raise_after))
    with pytest.warns(TrackingWarning, match=r"(?s)The alert of step 21 was not passed on.*no mail"):
        write_all(recorder, [*noise(20), 500.0, 600.0, 700.0])
    assert called == sent == recorder.alerts.raised_alerts
    assert [(alert.finding, alert.step) for alert in sent] == [("exploding", 20)]
    assert steps == list(range(23))


def test_stop_on_names_a_finding():
    with pytest.raises(InputError, match="stop_on= names no finding") as error:
        Alerts(stop_on=("explodng",))
    assert "exploding" in str(error.value)


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
    loaded = rl.open(path)
    np.testing.assert_equal(loaded.x, x)
    assert type(loaded.x) is type(x)
    np.testing.assert_equal(loaded.y, [1.0, np.inf])
    assert loaded.sample_weight is None
    np.testing.assert_equal(loaded.weights, WEIGHTS)
    assert list(loaded.weights) == list(WEIGHTS)
    assert (loaded.step, loaded.epoch) == (7, 2)
    assert np.isnan(loaded.loss)
    assert "step 7 of training" in repr(loaded)


def test_only_the_first_is_written(tmp_path, caplog):
    incidents = Incidents(tmp_path / "a.zarr")
    with caplog.at_level(logging.WARNING, "rnnlens"):
        for step in (3, 4):
            incidents.report(Batch(np.ones(2)), {}, {"step": step})
    assert rl.open(incidents.written_path).step == 3
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
    def raise_key_error():
        raise KeyError

    assert text_or_error(raise_key_error) == "its origin could not be determined (KeyError)"
