"""Records are written to every sink, also when one of them fails."""

import warnings

import numpy as np
import pytest

from rnnlens.errors import InputError, TrackingWarning
from rnnlens.tracking.recorder import MOST_GAPS, Recorder
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.watch_arguments import Schedule


class Broken:
    def write(self, record):
        raise OSError("disk full")

    def close(self, reason):
        raise OSError("disk full")


class CollectingSink:
    def __init__(self):
        self.calls = []

    def write(self, record):
        self.calls.append(record.step)

    def close(self, reason):
        self.calls.append(reason)


def test_a_sink_that_fails_keeps_nothing_from_the_others_and_ends_nothing():
    sink = CollectingSink()
    recorder = Recorder([Broken(), sink], Schedule(1))
    with pytest.warns(TrackingWarning, match=r"(?s)Step 3 was not written to the logger Broken.*disk full"):
        recorder.write(TrainingRecord(3, 0, "probe", {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # only the first failure warns
        recorder.write(TrainingRecord(4, 0, "probe", {}))
        recorder.close("finished", steps=4)
    assert sink.calls == [3, 4, "finished"]
    assert [(gap.where, gap.first, gap.records) for gap in recorder.gaps] == [("the logger Broken", 3, 3)]
    assert recorder.describe("Watch", 1, None) == "<rnnlens Watch> closed: 1 batch, 2 records, 0 alerts, 1 gap"


def test_a_thousand_causes_are_a_hundred_gaps():
    recorder = Recorder([], Schedule(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        for step in range(1000):
            recorder.fail_record(step, OSError("a" * step))
    assert len(recorder.gaps) == MOST_GAPS + 1
    assert sum(gap.records for gap in recorder.gaps) == 1000


@pytest.mark.parametrize("epochs", [5, "4", (-1,), (1.5,), (True,)])
def test_epochs_are_several_whole_numbers(epochs):
    with pytest.raises(InputError, match="epochs= are whole numbers"):
        Schedule(1, epochs)


def test_numbers_of_numpy_count():
    assert Schedule(np.int64(4), np.array([2])).is_due(8, 0)
    assert Schedule(1, np.array([2])).is_due_after(2)
