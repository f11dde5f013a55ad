"""Readers while the file is replaced again and again: all of one result, or an error; never some of each."""

import time

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import FileError

from .conftest import made, values

REPLACING = """
one, other = made(1), made(2)
print("ready", flush=True)
while True:
    one.save("run{suffix}")
    other.save("run{suffix}")
"""


def read_while_replaced(start, tmp_path, suffix, seconds):
    made(1).save(tmp_path / f"run{suffix}")
    process = start(REPLACING.format(suffix=suffix))
    assert process.stdout.readline() == "ready\n"
    seen, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(set(map(str, seen))) < 2:
        found = rl.open(tmp_path / f"run{suffix}")
        seen.append([found.loss, *values(found)])
    assert process.poll() is None
    return seen


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_nothing_is_mixed(start, tmp_path, suffix):
    seen = read_while_replaced(start, tmp_path, suffix, 2)
    assert all(found in ([1.0, 1.0], [2.0, 2.0]) for found in seen)


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_nothing_is_mixed_in_the_long_run(start, tmp_path, suffix):
    seen = read_while_replaced(start, tmp_path, suffix, 40)
    print(f"{suffix}: {len(seen)} reads")
    assert all(found in ([1.0, 1.0], [2.0, 2.0]) for found in seen)


def test_what_was_opened_lazily_does_not_turn_into_another(tmp_path):
    made(1).save(tmp_path / "run.zarr")
    lazy = rl.open(tmp_path / "run.zarr", lazy=True)
    made(2).save(tmp_path / "run.zarr")
    with pytest.raises(FileError, match="does not match"):
        np.asarray(lazy["lstm0"].hidden)
