"""A writer is killed at random moments: the run contains every complete record and nothing else."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.results.disk.run_folder import SUM, _digest
from rnnlens.tracking.store import Store

from .test_store import record

WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from test_store import record
from rnnlens.tracking.store import Store
store = Store(sys.argv[1])
step = 0 if store.last_step is None else store.last_step + 1
done = open(sys.argv[2], "a", buffering=1)
print("ready", flush=True)
while True:
    store.write(record(step, time=7 + step % 5, notes=(f"note {step}",)))
    done.write(f"{step}\\n")
    step += 1
"""


def kill_writer_after(seconds, path, finished_file):
    tests_folder = str(Path(__file__).parent)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, path, finished_file, tests_folder], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "ready\n"
    time.sleep(seconds)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_sigkill_leaves_every_complete_record(tmp_path, kills):
    """A run whose writer is killed and resumed several times has every complete record with its values."""
    random = np.random.default_rng(kills)
    path, finished_file = tmp_path / "a.zarr", tmp_path / "done"
    for _ in range(kills):
        kill_writer_after(random.uniform(0, 0.4), str(path), str(finished_file))
        finished = [int(line) for line in finished_file.read_text().split()]
        run = rl.open(path)
        steps = run.steps.values.tolist()
        assert steps == list(range(len(steps)))
        assert len(finished) <= len(steps) <= len(finished) + kills  # a kill may fall between a record and its line
        if steps:  # on a busy machine the first kill may precede the first record
            np.testing.assert_allclose(run.loss, 1 / (1 + np.arange(len(steps))), rtol=1e-6)
        for step in steps[-3:]:
            profile = run["lstm"].adjoint_profile.sel(step=step).values
            length = 7 + step % 5
            np.testing.assert_allclose(profile[:length], 10.0 ** -np.arange(length) * (1 + step), rtol=2**-8)
            assert np.isnan(profile[length:]).all()
    store = Store(path)
    assert store.last_step == (steps[-1] if steps else None)
    store.close("finished")
    assert not list(path.rglob("*.partial"))


def test_killed_before_the_first_record_is_complete(tmp_path):
    path = tmp_path / "a.zarr"
    Store(path).write(record(0))
    (committed,) = path.rglob("committed")
    shutil.rmtree(committed)
    run = rl.open(path)
    assert run.steps.size == 0
    assert run["lstm"].adjoint_profile.sizes["step"] == 0


def test_killed_before_the_arrays_of_the_first_record_are_listed(tmp_path):
    path = tmp_path / "a.zarr"
    Store(path).write(record(0))
    (committed,) = path.rglob("committed")
    shutil.rmtree(committed)
    metadata_file = committed.parent / "zarr.json"
    metadata = json.loads(metadata_file.read_text())
    for name in ("arrays", SUM):
        del metadata["attributes"][name]
    metadata["attributes"][SUM] = _digest(metadata)
    metadata_file.write_text(json.dumps(metadata))
    assert rl.open(path).steps.size == 0
