"""Recorded training runs that are damaged or hostile: one rnnlens error at once; intact records stay readable."""

import json
import os
import shutil
import time

import numpy as np
import pytest
import xarray as xr
from zarr.storage import LocalStore

import rnnlens as rl
from rnnlens.errors import FileError, RnnlensError, TooLargeError
from rnnlens.results.disk.run_folder import SUM, _digest, committed_values
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.store import Store

COUNT = 70


def record(step, kind="probe"):
    profile = xr.DataArray(np.linspace(0.1, 1, 5 + step % 7) * (1 + step), dims="time")
    scalars = {"loss": 1 / (1 + step), "lstm/reach": float(step)}
    return TrainingRecord(step, 0, kind, scalars, {"lstm": {"adjoint_profile": profile}}, (f"note {step}",))


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "good.zarr"
    store = Store(path)
    for step in range(COUNT):
        store.write(record(step))
        store.write(record(step, "batch"))
    store.close("finished")
    return path


@pytest.fixture
def run(intact_run, tmp_path):
    shutil.copytree(intact_run, tmp_path / "a.zarr")
    return tmp_path / "a.zarr"


def all_numbers(run):
    """Return the arrays of a run for both kinds of records, with NaN replaced by -7."""
    views = [run, run.batch, run.refresh()]
    return [np.nan_to_num(array.values, nan=-7.0) for view in views for array in arrays_of(view)]


def arrays_of(run):
    yield from run.scalars.data_vars.values()
    yield from (run.scalars[name] for name in ("step", "epoch", "written"))
    yield from run["lstm"].dataset.data_vars.values()


def all_texts(run):
    return run.notes, run.ended, run.provenance, list(run), run.gaps, [array.attrs for array in arrays_of(run)]


def reseal(path, change):
    """Change metadata and write the matching checksum, as an attacker would."""
    metadata = json.loads(path.read_bytes())
    metadata["attributes"].pop(SUM)
    change(metadata)
    metadata["attributes"][SUM] = _digest(metadata)
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(s, marks=pytest.mark.full) for s in range(40, 240))])
def test_a_flipped_bit_is_never_another_number(intact_run, run, seed):
    rng = np.random.default_rng(seed)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    file = files[rng.integers(len(files))]
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    expected = rl.open(intact_run)
    try:
        opened = rl.open(run)
        numbers = all_numbers(opened)
    except FileError:
        pass
    else:
        assert all_texts(opened) == all_texts(expected)
        for actual, reference in zip(numbers, all_numbers(expected), strict=True):
            np.testing.assert_array_equal(actual, reference)


def test_a_damaged_row_is_named_and_left_out_on_request(intact_run, run):
    chunk = run / "probe" / "layers" / "lstm" / "adjoint_profile" / "c" / "0" / "0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileError, match=r"64 of 70 probe records do not match.*layers/lstm/adjoint_profile"):
        rl.open(run)
    remaining = rl.open(run, skip_damaged=True)
    assert remaining.steps.values.tolist() == list(range(64, 70))
    np.testing.assert_array_equal(
        remaining["lstm"].adjoint_profile[:, :5], rl.open(intact_run)["lstm"].adjoint_profile[64:, :5]
    )
    (gap,) = remaining.gaps
    assert (gap.where, gap.first, gap.last, gap.records) == ("the run", 0, 63, 64)
    assert remaining.refresh().steps.size == 6
    assert remaining.batch.steps.size == COUNT


def test_one_value_that_changed_costs_its_row_alone(run):
    import zarr

    array = zarr.open_group(run, mode="r+")["probe/scalars"]
    array[5, 0] = 0.25
    remaining = rl.open(run, skip_damaged=True)
    assert remaining.steps.values.tolist() == [step for step in range(COUNT) if step != 5]


def test_an_array_whose_metadata_is_damaged_is_left_out(run):
    file = run / "probe" / "layers" / "lstm" / "adjoint_profile" / "zarr.json"
    file.write_bytes(file.read_bytes().replace(b"time", b"tine", 1))
    with pytest.raises(FileError, match="does not match its checksum"):
        rl.open(run)
    remaining = rl.open(run, skip_damaged=True)
    assert remaining.steps.size == COUNT
    assert "adjoint_profile" not in remaining["lstm"]
    assert "adjoint_profile" in remaining.gaps[0].reason


@pytest.mark.parametrize("folder", ["layers/lstm/adjoint_profile", "scalars", "sums", "epoch"])
def test_a_folder_that_is_missing_is_no_fewer_numbers(run, folder):
    shutil.rmtree(run / "probe" / folder)
    with pytest.raises(FileError, match=r"damaged"):
        rl.open(run)


def fifo(run):
    os.mkfifo(run / "probe" / "pipe")


def pipe_for_metadata(run):
    (run / "probe" / "zarr.json").unlink()
    os.mkfifo(run / "probe" / "zarr.json")


def link_to_zero(run):
    chunk = run / "probe" / "step" / "c" / "0"
    chunk.unlink()
    chunk.symlink_to("/dev/zero")


def link_out(run):
    (run / "batch" / "layers" / "away").symlink_to(run.parent)


def large_attribute(run):
    reseal(run / "zarr.json", lambda m: m["attributes"].update(words="a" * 200 * 2**20))


def many_names(run):
    names = [f"a{i}" for i in range(200_000)]
    reseal(run / "probe" / "zarr.json", lambda m: m["attributes"].update(arrays=names))


def large_committed(run):
    reseal(run / "probe" / "committed" / "zarr.json", lambda m: m.update(shape=[2**28]))


def many_committed(run):
    from zarr import open_group

    open_group(run, mode="r+")["probe/committed"][:] = committed_values(2**33)


def large_chunk(run):
    def change(metadata):
        metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"] = [2**27], [2**27]

    reseal(run / "probe" / "step" / "zarr.json", change)


def blosc_bomb(run):
    from numcodecs import blosc

    bomb = blosc.compress(np.zeros(2**27, dtype="u1"), b"zstd", 5, 1)
    (run / "probe" / "step" / "c" / "0").write_bytes(bomb)


def large_row(run):
    reseal(
        run / "probe" / "layers" / "lstm" / "adjoint_profile" / "zarr.json",
        lambda m: m.update(shape=[COUNT, 2**22]),
    )


def deep_folders(run):
    folder = run
    for _ in range(80):
        folder = folder / "a"
    folder.mkdir(parents=True)


def nested_json(run):
    (run / "probe" / "zarr.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    "harm",
    [
        fifo,
        pipe_for_metadata,
        link_to_zero,
        link_out,
        large_attribute,
        many_names,
        large_committed,
        many_committed,
        large_chunk,
        blosc_bomb,
        large_row,
        deep_folders,
        nested_json,
    ],
)
def test_hostile_runs_are_refused_at_once(run, harm):
    import resource

    harm(run)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(RnnlensError):
        rl.open(run)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 500 * 2**10


def test_memory_holds_for_every_view(run):
    with pytest.raises(TooLargeError, match="memory="):
        rl.open(run, memory="1 KiB")
    small = rl.open(run, memory="10 KiB")
    from rnnlens.results.training_run import TrainingRun

    assert isinstance(small.batch, TrainingRun)
    store = Store(run)
    for step in range(COUNT, 2 * COUNT):
        store.write(record(step))
    with pytest.raises(TooLargeError):
        small.refresh()
    store.close("finished")


def test_a_reader_is_not_disturbed_by_its_writer(tmp_path, monkeypatch):
    """``rl.open`` reads all complete records even if the writer replaces files between its reads."""
    from rnnlens.results.disk import run_folder

    store, steps, read_plain_file = Store(tmp_path / "a.zarr"), iter(range(10_000)), run_folder._read_plain_file
    store.write(record(next(steps)))

    def write_and_read(root, key, max_bytes):
        store.write(record(next(steps)))
        return read_plain_file(root, key, max_bytes)

    monkeypatch.setattr(run_folder, "_read_plain_file", write_and_read)
    for _ in range(6):
        run = rl.open(tmp_path / "a.zarr")
        assert run.steps.values.tolist() == list(range(run.steps.size))
        assert run.steps.size
    store.close("finished")


def test_any_reader_of_zarr_can_look_into_a_run(run):
    import zarr

    group = zarr.open_group(LocalStore(run), mode="r")
    assert int(group["probe/committed"][0]) == COUNT
    np.testing.assert_array_equal(group["probe/step"][:], range(COUNT))
