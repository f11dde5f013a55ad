"""A run on disk is read as it was written, also after its writer was interrupted or dropped."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore

import rnnlens as rl
from rnnlens.errors import FileError
from rnnlens.results.disk.run_folder import SealedMetadata
from rnnlens.tracking.records import TrainingRecord
from rnnlens.tracking.store import Store


def record(step, *, time=7, kind="probe", loss=None, **options):
    profile = xr.DataArray(10.0 ** -np.arange(time) * (1 + step), dims="time", attrs={"long_name": "adjoint"})
    gates = xr.DataArray(np.full((2, time), 0.25), dims=("gate", "time"), coords={"gate": ["input", "forget"]})
    scalars = {"loss": 1 / (1 + step) if loss is None else loss, "lstm/reach": float(step), "lstm/forget/near_0": 0.5}
    return TrainingRecord(
        step, step // 10, kind, scalars, {"lstm": {"adjoint_profile": profile, "gates": gates}}, **options
    )


def write_run(path, steps, **options):
    store = Store(path, **options)
    for step in steps:
        store.write(record(step))
    return store


def test_what_was_written_is_read(tmp_path):
    write_run(tmp_path / "a.zarr", [0, 5, 10], provenance={"framework": "keras 3"}).close("finished")
    run = rl.open(tmp_path / "a.zarr")
    assert list(run) == ["lstm"]
    assert run.ended == "finished"
    np.testing.assert_array_equal(run.steps, [0, 5, 10])
    np.testing.assert_allclose(run.loss, [1, 1 / 6, 1 / 11], rtol=1e-6)
    profile = run["lstm"].adjoint_profile
    assert profile.dims == ("step", "time")
    np.testing.assert_allclose(profile.sel(step=5), 10.0 ** -np.arange(7) * 6, rtol=2**-8)
    assert list(run["lstm"].gates.gate.values) == ["input", "forget"]
    np.testing.assert_array_equal(run["lstm"].reach, [0, 5, 10])
    assert run["lstm"].forget_near_0.dims == ("step",)
    assert run.provenance["framework"] == "keras 3"
    assert "3 probe records, steps 0 to 10" in repr(run)


def test_a_run_is_read_while_it_is_written(tmp_path):
    store = write_run(tmp_path / "a.zarr", [0])
    run = rl.open(tmp_path / "a.zarr")
    assert run.ended is None
    store.write(record(5))
    assert run.steps.size == 1
    assert run.refresh().steps.size == 2


def test_resuming_appends(tmp_path):
    write_run(tmp_path / "a.zarr", [0, 5]).close("KeyboardInterrupt")
    resumed = Store(tmp_path / "a.zarr")
    assert resumed.last_step == 5
    resumed.write(record(10))
    np.testing.assert_array_equal(rl.open(tmp_path / "a.zarr").steps, [0, 5, 10])


WRITER = (
    "import sys; from rnnlens.tracking.store import Store; s = Store(sys.argv[1]); print('open', flush=True); input()"
)


@pytest.mark.linux
@pytest.mark.slow
def test_two_processes_cannot_write_one_run(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.zarr")]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "open\n"
    with pytest.raises(FileError, match="Another process is writing"):
        Store(tmp_path / "a.zarr")
    writer.communicate("\n")
    write_run(tmp_path / "a.zarr", [0]).close("finished")


def test_a_store_that_was_dropped_is_not_in_the_way(tmp_path):
    write_run(tmp_path / "a.zarr", [0])
    np.testing.assert_array_equal(rl.open(tmp_path / "a.zarr").steps, [0])
    write_run(tmp_path / "a.zarr", [5]).close("finished")
    np.testing.assert_array_equal(rl.open(tmp_path / "a.zarr").steps, [0, 5])


def test_what_an_interrupted_training_left_open_is_gone_on_with(tmp_path):
    interrupted = write_run(tmp_path / "a.zarr", [0, 5])
    resumed = write_run(tmp_path / "a.zarr", [10])
    np.testing.assert_array_equal(rl.open(tmp_path / "a.zarr").steps, [0, 5, 10])
    with pytest.raises(FileError, match="This run is closed"):
        interrupted.write(record(6))
    resumed.close("finished")
    assert rl.open(tmp_path / "a.zarr").ended == "finished"


def test_what_is_no_run_is_not_written_to(tmp_path):
    (tmp_path / "full.zarr").mkdir()
    (tmp_path / "full.zarr" / "mine").write_text("mine")
    with pytest.raises(FileError, match="exists and is not a run"):
        Store(tmp_path / "full.zarr")
    with pytest.raises(FileError, match=r"ending in \.zarr"):
        Store(tmp_path / "a.nc")
    assert (tmp_path / "full.zarr" / "mine").read_text() == "mine"


def test_what_the_system_refuses_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="This run cannot be written"):
        Store(tmp_path / "file" / "a.zarr")


def test_a_run_of_another_network_is_not_gone_on_with(tmp_path):
    write_run(tmp_path / "a.zarr", [0, 5]).close("finished")
    store, next_record = Store(tmp_path / "a.zarr"), record(10)
    profile_by_direction = xr.DataArray(np.zeros((7, 2)), dims=("time", "direction"))
    three_gates = xr.DataArray(np.zeros((3, 7)), dims=("gate", "time"))
    for name, array in {"adjoint_profile": profile_by_direction, "gates": three_gates}.items():
        with pytest.raises(FileError, match="This run was recorded from another network"):
            store.write(replace(next_record, scalars={"new": 1.0}, layers={"lstm": {name: array}}))
    store.write(record(15, time=9))
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == [0, 5, 15]
    assert "new" not in run.scalars


def test_a_run_of_a_newer_rnnlens_is_left_alone(tmp_path):
    write_run(tmp_path / "a.zarr", [0]).close("finished")
    root = zarr.open_group(SealedMetadata(LocalStore(tmp_path / "a.zarr")), mode="r+")
    root.attrs["rnnlens_schema"] = 99
    with pytest.raises(FileError, match="written by a newer rnnlens"):
        Store(tmp_path / "a.zarr")
    assert zarr.open_group(tmp_path / "a.zarr", mode="r").attrs["rnnlens_schema"] == 99


def test_a_run_is_replaced_on_request(tmp_path):
    write_run(tmp_path / "a.zarr", [0, 5]).close("finished")
    write_run(tmp_path / "a.zarr", [3], resume=False).close("finished")
    np.testing.assert_array_equal(rl.open(tmp_path / "a.zarr").steps, [3])


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_a_run_is_saved_as_one_file(tmp_path, suffix):
    write_run(tmp_path / "a.zarr", [0, 5, 10]).close("finished")
    run = rl.open(tmp_path / "a.zarr")
    run.save(tmp_path / f"copy.{suffix}")
    copy = rl.open(tmp_path / f"copy.{suffix}")
    assert type(copy) is type(run)
    xr.testing.assert_identical(copy.scalars, run.scalars)
    xr.testing.assert_equal(copy["lstm"].adjoint_profile, run["lstm"].adjoint_profile)


def test_probe_and_batch_records_are_kept_apart(tmp_path):
    store = write_run(tmp_path / "a.zarr", [0, 5])
    store.write(record(3, kind="batch"))
    store.close("finished")
    run = rl.open(tmp_path / "a.zarr")
    assert (run.of, run.batch.of, run.batch.probe.of) == ("probe", "batch", "probe")
    assert run.batch.steps.values.tolist() == [3]


def test_long_profiles_are_averaged_over_equal_stretches(tmp_path):
    store = Store(tmp_path / "a.zarr", points=4)
    ramp = xr.DataArray(np.arange(8.0), dims="time")
    store.write(TrainingRecord(0, 0, "probe", {}, {"lstm": {"ramp": ramp}}))
    store.close("finished")
    averaged = rl.open(tmp_path / "a.zarr")["lstm"]["ramp"].isel(step=0)
    np.testing.assert_array_equal(averaged, [0.5, 2.5, 4.5, 6.5])
    np.testing.assert_array_equal(averaged.time, [0.5, 2.5, 4.5, 6.5])


@pytest.mark.full
def test_a_thousand_records_of_two_large_layers_are_below_a_megabyte(tmp_path):
    """1,000 records of two layers (256 units, 200 steps) take less than 1 MB, extrapolated from 96 to save time."""
    random, count = np.random.default_rng(0), 96
    store = Store(tmp_path / "a.zarr")
    for step in range(count):
        store.write(two_layer_record(step, random))
    store.close("finished")
    size = sum(path.stat().st_size for path in (tmp_path / "a.zarr").rglob("*") if path.is_file())
    assert size / count * 1000 < 1e6


def two_layer_record(step, random):
    noise = lambda *shape: 1 + 0.05 * random.normal(size=shape)  # noqa: E731
    lags = np.exp(-np.arange(200) * (0.1 - 0.0003 * step))
    layers = {
        name: {
            "adjoint_profile": xr.DataArray(lags[::-1] * noise(200), dims="time"),
            "lag_profile": xr.DataArray(lags * noise(200), dims="lag"),
            "gates": xr.DataArray(0.5 * noise(4, 200), dims=("gate", "time")),
        }
        for name in ("lstm", "lstm_1")
    }
    names = [f"{name}/{i}" for name in layers for i in range(13)]
    return TrainingRecord(step, 0, "probe", {"loss": 1.0, **{name: float(random.normal()) for name in names}}, layers)
