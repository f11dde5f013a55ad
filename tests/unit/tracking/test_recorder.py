"""Records go to every sink, whatever one of them does."""

import numpy as np
import pytest

from rnnlens.errors import InputError
from rnnlens.tracking.recorder import Recorder
from rnnlens.tracking.records import Record
from rnnlens.tracking.schedule import Schedule


class Broken:
    def write(self, record):
        raise OSError("disk full")

    def close(self, reason):
        raise OSError("disk full")


class Kept:
    def __init__(self):
        self.told = []

    def write(self, record):
        self.told.append(record.step)

    def close(self, reason):
        self.told.append(reason)


def test_a_sink_that_fails_keeps_nothing_from_the_others():
    kept = Kept()
    recorder = Recorder([Broken(), kept], Schedule(1))
    with pytest.raises(OSError, match="disk full"):
        recorder.write(Record(3, 0, "probe", {}))
    with pytest.raises(OSError, match="disk full"):
        recorder.close("finished", steps=3)
    assert kept.told == [3, "finished"]


@pytest.mark.parametrize("epochs", [5, "4", (-1,), (1.5,), (True,)])
def test_epochs_are_several_whole_numbers(epochs):
    with pytest.raises(InputError, match="epochs= are whole numbers"):
        Schedule(1, epochs)


def test_numbers_of_numpy_count():
    assert Schedule(np.int64(4), np.array([2])).due(8, 0)
    assert Schedule(1, np.array([2])).due_after(2)
