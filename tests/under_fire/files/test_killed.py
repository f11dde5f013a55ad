"""Processes killed during a save: the file is the old or the new one, and the next save removes leftovers."""

import os
import random
import signal
import time

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.results import disk

from .conftest import make_trace, values
from .test_full_disk import JACOBIAN

SAVING = """
print("ready", flush=True)
for value in range(2, 1_000_000):
    made(value, steps=400).save("run{suffix}")
"""


def kill_while_saving(start, suffix, delay):
    process = start(SAVING.format(suffix=suffix))
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()


def kill_repeatedly(start, tmp_path, suffix, count):
    make_trace(1, steps=400).save(tmp_path / f"run{suffix}")
    rng = random.Random(0)
    for _ in range(count):
        kill_while_saving(start, suffix, rng.uniform(0, 0.4))
        stored = values(rl.open(tmp_path / f"run{suffix}"))
        assert len(stored) == 1
        assert len(os.listdir(tmp_path)) <= 2, "what the one before left was removed"
    make_trace(1).save(tmp_path / f"run{suffix}")
    assert os.listdir(tmp_path) == [f"run{suffix}"]


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_kills(start, tmp_path, suffix):
    kill_repeatedly(start, tmp_path, suffix, 3)


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_many_kills(start, tmp_path, suffix):
    kill_repeatedly(start, tmp_path, suffix, 50)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_what_another_process_is_writing_just_now_is_left_alone(start, tmp_path, suffix):
    """A save does not remove the temporary files of another process that is in the middle of its own save."""
    process = start(
        f"""
        made(1).save("other{suffix}")
        real = os.chmod
        def waiting(*args):
            print("writing", flush=True)
            sys.stdin.readline() if False else time.sleep(1.5)
            real(*args)
        os.chmod = waiting
        made(2).save("other{suffix}")
        """
    )
    assert process.stdout.readline() == "writing\n"
    make_trace(1).save(tmp_path / f"run{suffix}")
    assert len(os.listdir(tmp_path)) == 3, "the other's two, and ours"
    (tmp_path / "go on").touch()
    assert process.wait(timeout=30) == 0, process.stderr.read()
    assert values(rl.open(tmp_path / f"other{suffix}")) == [2.0]
    assert values(rl.open(tmp_path / f"run{suffix}")) == [1.0]


def test_killed_between_two_names(start, tmp_path, python):
    """If names cannot be swapped in one step and a save is killed in between, the old folder gets its name back."""
    code = """
        from rnnlens.results import disk
        disk._swap_names = lambda one, other: False
        made(1).save("run.zarr")
        rename, calls = os.rename, []
        def killed_at_second(*args):
            calls.append(args)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*args)
        os.rename = killed_at_second
        made(2).save("run.zarr")
    """
    for reader in (rl.open, make_trace(1).save):
        assert python(code).returncode == -signal.SIGKILL
        assert not (tmp_path / "run.zarr").exists()
        reader(tmp_path / "run.zarr")
        assert values(rl.open(tmp_path / "run.zarr")) == [1.0]


def test_names_are_swapped_in_one_step_here(tmp_path):
    """The test system can swap two names in one step; the tests above rely on it to test what they state."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"was-{name}").touch()
    assert disk._swap_names(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["was-b"]


def test_a_time_jacobian_killed_at_any_piece_stays_readable(start, tmp_path):
    earlier = None
    for delay in (0.0, 0.3):
        process = start(JACOBIAN + 'print("ready", flush=True)\nrl.jacobian(model, x, out="j.zarr", memory="1 KiB")\n')
        assert process.stdout.readline() == "ready\n"
        while not (tmp_path / "j.zarr").exists():
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(delay)
        process.kill()
        process.wait()
        partial = rl.open(tmp_path / "j.zarr")
        finite = np.isfinite(partial.values)
        assert partial.dims == ("sample", "out_time", "out_unit", "in_time", "in_feature")
        assert partial.sizes["sample"] == 6
        assert bool(partial.finished) == bool(finite.all())
        if earlier is not None:
            both_finite = finite & np.isfinite(earlier)
            np.testing.assert_array_equal(partial.values[both_finite], earlier[both_finite])
        earlier = partial.values
