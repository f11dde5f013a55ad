"""Faults while a lazy result is computed or saved on a cluster: one clear error, and no other chunk is lost."""

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from chunked_models import Net, RaisesForLargeInput, Slow, make_seeded, samples
from dask.distributed import Client

import rnnlens as rl
from rnnlens.results.disk import regions

MSE = torch.nn.functional.mse_loss
CHUNK, COUNT = 16, 160
X, Y = samples(COUNT)
HELPERS = Path(__file__).resolve().parents[1] / "helpers"

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def expected():
    return rl.gradients(make_seeded(Net), X, Y, loss=MSE, wrt="input", batch_size=CHUNK).values


def to_dask(array):
    return da.from_array(array, chunks=(CHUNK, *array.shape[1:]))


def input_gradients(net, x=X):
    return rl.gradients(net, to_dask(x) if isinstance(x, np.ndarray) else x, to_dask(Y), loss=MSE, wrt="input")


def chunks_written(folder):
    """Return the modification times of the records of finished chunks of an unfinished save, by name."""
    return {record.name: record.stat().st_mtime_ns for record in folder.glob(".*.unfinished/.chunks/*.json")}


def resume_save(result, path, before):
    """Save a result again, assert that no chunk in ``before`` is rewritten, and return the saved values."""
    written = {}

    def record_and_finish(folder, *args):
        written.update(chunks_written(folder.parent))
        return finish_folder(folder, *args)

    finish_folder = regions.finish_folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rnnlens.results.saving.finish_folder", record_and_finish)
        result.save(path)
    assert len(written) == COUNT // CHUNK
    assert {name: written[name] for name in before} == before
    return rl.open(path).values


@pytest.fixture(params=["here", "cluster"])
def scheduler(request):
    """Compute chunks in threads of this process, or on the workers of a cluster."""
    if request.param == "cluster":
        request.getfixturevalue("client")
        yield
    else:
        with pytest.MonkeyPatch.context() as patch, dask.config.set(scheduler="threads"):
            patch.setattr(regions, "current_client", lambda: None)
            yield


def test_the_first_of_several_failing_chunks_is_named_whichever_ends_first(scheduler, tmp_path):
    x = X.copy()
    x[100], x[40] = 5e3, 5e4  # the chunk of sample 40 fails a second later
    with pytest.raises(
        rl.errors.UserCodeError, match=r"2 of 10 chunks(.|\n)*Samples 32 to 47 failed: (.|\n)*an input is too large"
    ):
        input_gradients(make_seeded(RaisesForLargeInput), x).save(tmp_path / "g.zarr")
    assert len(chunks_written(tmp_path)) == 8


def test_data_that_cannot_be_read_names_its_samples_and_loses_nothing(scheduler, expected, tmp_path):
    broken = tmp_path / "broken"
    broken.touch()

    def read_block(block, block_info=None):
        if block_info and block_info[0]["chunk-location"][0] == 2 and broken.exists():
            raise OSError("no such block")
        return block

    result = input_gradients(
        make_seeded(Net), to_dask(X).map_blocks(read_block, dtype="float32", meta=np.empty((0, 0, 0), "float32"))
    )
    message = r"1 of 10 chunks(.|\n)*Samples 32 to 47 failed: OSError: no such block"
    with pytest.raises(rl.errors.UserCodeError, match=message):
        result.save(tmp_path / "g.zarr")
    before = chunks_written(tmp_path)
    assert len(before) == 9
    broken.unlink()
    np.testing.assert_array_equal(resume_save(result, tmp_path / "g.zarr", before), expected)


def test_a_second_save_at_once_computes_what_failed_though_the_client_is_busy(client, expected, tmp_path):
    """An immediate second save recomputes failed chunks, though a busy client is late to release the failed tasks."""
    broken = tmp_path / "broken"
    broken.touch()

    def read_block(block, block_info=None):
        if block_info and block_info[0]["chunk-location"][0] == 2 and broken.exists():
            raise OSError("no such block")
        return block

    def keep_busy():
        time.sleep(0.5)
        if broken.exists():
            client.loop.call_later(0.01, keep_busy)

    result = input_gradients(
        make_seeded(Net), to_dask(X).map_blocks(read_block, dtype="float32", meta=np.empty((0, 0, 0), "float32"))
    )
    client.loop.add_callback(keep_busy)
    with pytest.raises(rl.errors.UserCodeError):
        result.save(tmp_path / "g.zarr")
    broken.unlink()
    result.save(tmp_path / "g.zarr")
    np.testing.assert_array_equal(rl.open(tmp_path / "g.zarr").values, expected)


def limit_files(size):
    """Limit the size of files that this worker writes, to simulate a full disk; -1 for no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_disk_that_is_full_for_one_worker(client, expected, tmp_path):
    result, (full_worker, _) = input_gradients(make_seeded(Slow)), client.scheduler_info()["workers"]
    client.run(limit_files, 100, workers=[full_worker])
    try:
        with pytest.raises(rl.errors.FileError, match=r"of 10 chunks(.|\n)*File too large(.|\n)*goes on"):
            result.save(tmp_path / "g.zarr")
    finally:
        client.run(limit_files, -1)
    before = chunks_written(tmp_path)
    assert 0 < len(before) < 10
    np.testing.assert_array_equal(resume_save(result, tmp_path / "g.zarr", before), expected)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_a_worker_killed_at_a_random_moment_changes_no_number(client, expected, tmp_path, seed):
    """Killing a worker at a random moment (of about a second) changes no number; odd seeds compute, even ones save."""
    rng = random.Random(seed)
    moment, worker = rng.uniform(0.0, 0.7), rng.randrange(2)
    result, pids = input_gradients(make_seeded(Slow)), sorted(client.run(os.getpid).values())
    killer = threading.Timer(moment, os.kill, (pids[worker], signal.SIGKILL))
    killer.start()
    try:
        if seed % 2:
            values = result.compute().values
        else:
            result.save(tmp_path / "g.zarr")
            values = rl.open(tmp_path / "g.zarr").values
    finally:
        killer.join()
    np.testing.assert_array_equal(values, expected)
    client.wait_for_workers(2, timeout=60)


PROGRAM = """
    import os, signal, sys, threading, time
    import dask, dask.array as da
    from chunked_models import Slow, samples, make_seeded
    import rnnlens as rl
    import torch

    def end_after_three_chunks():
        while len(list(folder.glob(".*.unfinished/.chunks/*.json"))) < 3:
            time.sleep(0.005)
        os.kill(int(sys.argv[2]) or os.getpid(), signal.SIGKILL)

    def main():
        x, y = (da.from_array(part, chunks=(16, *part.shape[1:])) for part in samples(160))
        result = rl.gradients(make_seeded(Slow), x, y, loss=torch.nn.functional.mse_loss, wrt="input")
        threading.Thread(target=end_after_three_chunks, daemon=True).start()
        result.save(folder / "g.zarr")

    from pathlib import Path
    folder = Path(sys.argv[1])
    if __name__ == "__main__":
        main()
"""


def test_a_client_that_was_killed_goes_on_with_what_is_missing(expected, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *filter(None, sys.path)])}
    completed = subprocess.run([sys.executable, program, tmp_path, "0"], env=environment, timeout=120)
    assert completed.returncode == -signal.SIGKILL
    before = chunks_written(tmp_path)
    assert 3 <= len(before) < 10
    assert not (tmp_path / "g.zarr").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "current_client", lambda: None)
        np.testing.assert_array_equal(
            resume_save(input_gradients(make_seeded(Slow)), tmp_path / "g.zarr", before), expected
        )


@pytest.fixture
def client_and_pid(tmp_path):
    """Start a scheduler and a worker as separate programs; return a client and the scheduler's process id."""
    file = tmp_path / "scheduler.json"
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *filter(None, sys.path)])}
    processes = []
    for module, options in (
        ("distributed.cli.dask_scheduler", ["--host", "127.0.0.1", "--port", "0"]),
        ("distributed.cli.dask_worker", ["--nthreads", "1", "--death-timeout", "60"]),
    ):
        command = [sys.executable, "-W", "ignore", "-m", module, *options, *common]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        while not file.exists():
            time.sleep(0.05)
    yield Client(scheduler_file=str(file), timeout=30), processes[0].pid
    for process in reversed(processes):
        process.terminate()
        process.wait(timeout=30)


def test_a_lost_scheduler_is_one_clear_error_and_the_save_goes_on(expected, tmp_path, client_and_pid, cluster):
    result = input_gradients(make_seeded(Slow))

    def kill_scheduler():
        while len(chunks_written(tmp_path)) < 3:
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)

    own_client, pid = client_and_pid
    killer = threading.Thread(target=kill_scheduler)
    killer.start()
    message = r"connection to the Dask scheduler was lost(.|\n)*goes on"
    with own_client, pytest.raises(rl.errors.FileError, match=message):
        result.save(tmp_path / "g.zarr")
    killer.join()
    before = chunks_written(tmp_path)
    assert 3 <= len(before) < 10
    with Client(cluster):
        np.testing.assert_array_equal(resume_save(result, tmp_path / "g.zarr", before), expected)
