"""Readers of a file that is replaced repeatedly get all of one result, or an error, but never a mixture."""

import time

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import FileError

from .conftest import make_trace, values

REPLACING = """
one, other = made(1), made(2)
print("ready", flush=True)
while True:
    one.save("run{suffix}")
    other.save("run{suffix}")
"""


def read_while_replaced(start, tmp_path, suffix, seconds):
    make_trace(1).save(tmp_path / f"run{suffix}")
    process = start(REPLACING.format(suffix=suffix))
    assert process.stdout.readline() == "ready\n"
    reads, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline or len(set(map(str, reads))) < 2:
        trace = rl.open(tmp_path / f"run{suffix}")
        reads.append([trace.loss, *values(trace)])
    assert process.poll() is None
    return reads


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_nothing_is_mixed(start, tmp_path, suffix):
    reads = read_while_replaced(start, tmp_path, suffix, 2)
    assert all(read in ([1.0, 1.0], [2.0, 2.0]) for read in reads)


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_nothing_is_mixed_in_the_long_run(start, tmp_path, suffix):
    reads = read_while_replaced(start, tmp_path, suffix, 40)
    print(f"{suffix}: {len(reads)} reads")
    assert all(read in ([1.0, 1.0], [2.0, 2.0]) for read in reads)


def test_what_was_opened_lazily_does_not_turn_into_another(tmp_path):
    make_trace(1).save(tmp_path / "run.zarr")
    lazy = rl.open(tmp_path / "run.zarr", lazy=True)
    make_trace(2).save(tmp_path / "run.zarr")
    with pytest.raises(FileError, match="does not match"):
        np.asarray(lazy["lstm0"].hidden)
