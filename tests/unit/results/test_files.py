import io
import json
import math
import os

import h5py
import numpy as np
import pytest
import xarray as xr

from rnnlens.errors import FileError, InputError
from rnnlens.results import disk, opening, saving
from rnnlens.results.gradients import Gradients
from rnnlens.results.schema import SCHEMA_VERSION
from rnnlens.results.trace import Trace

from .conftest import gru_dataset, lstm_dataset

SUFFIXES = [".nc", ".zarr"]
each_format = pytest.mark.parametrize("suffix", SUFFIXES)


def assert_same(left, right):
    assert type(left) is type(right)
    assert left.layers == right.layers
    assert repr(left) == repr(right)
    assert left._meta() == right._meta() or math.isnan(left.loss)
    for name in left:
        left_data, right_data = left.dataset(name), right.dataset(name)
        xr.testing.assert_identical(left_data, right_data)
        assert list(left_data.data_vars) == list(right_data.data_vars)
        for variable in left_data.variables:
            assert left_data[variable].dtype == right_data[variable].dtype, variable
            assert left_data[variable].values.tobytes() == right_data[variable].values.tobytes(), variable
            for key, value in left_data[variable].attrs.items():
                assert type(value) is type(right_data[variable].attrs[key])


@each_format
def test_what_comes_back_is_what_went_in(trace, tmp_path, suffix):
    trace.save(tmp_path / f"run{suffix}")
    loaded = opening.open(tmp_path / f"run{suffix}")
    assert_same(trace, loaded)
    assert math.isnan(loaded.loss)
    assert loaded.checks[0] == trace.checks[0]
    assert math.isnan(loaded.checks[1].residual)
    assert loaded.notes == trace.notes
    assert loaded.provenance == trace.provenance
    assert loaded.quantities == trace.quantities


@pytest.mark.slow
@each_format
def test_names_of_every_kind_survive(tmp_path, suffix):
    names = ("lstm", "lstm#3", "encoder.rnn[1]", "a/b/c", "@", "..", "50%", "späße", "two words")
    path = str(tmp_path / f"run{suffix}")
    Trace({**{name: lstm_dataset(name) for name in names}, "z": gru_dataset("z")}).save(path)
    loaded = opening.open(path)
    assert loaded.layers == (*names, "z")
    for name in names:
        assert loaded[name].hidden.attrs["layer"] == name


@each_format
def test_a_layer_that_holds_layers_survives(tmp_path, suffix):
    trace = Trace({"outer": lstm_dataset("outer", unit=7), "outer/gru": gru_dataset("outer/gru")}, loss=1.0)
    trace.save(tmp_path / f"run{suffix}")
    assert_same(trace, opening.open(tmp_path / f"run{suffix}"))


@each_format
def test_a_layer_without_variables_and_a_trace_without_layers_survive(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    Trace({"lstm": lstm_dataset()[[]]}).save(path)
    assert opening.open(path).layers == ("lstm",)
    Trace({}).save(path)
    assert opening.open(path).layers == ()


@each_format
def test_arrays_and_datasets_survive(trace, tmp_path, suffix):
    for value in (trace["gru"].gates, trace["gru"].gates.isel(time=-1), trace.dataset("lstm#1")):
        saving.save(saving.tree_of(value), tmp_path / f"part{suffix}")
        xr.testing.assert_identical(opening.open(tmp_path / f"part{suffix}"), value)


def test_an_array_that_was_written_with_xarray_is_recognised(trace, tmp_path):
    trace["gru"].hidden.to_netcdf(tmp_path / "hidden.nc")
    xr.testing.assert_identical(opening.open(tmp_path / "hidden.nc"), trace["gru"].hidden)


def test_nan_is_a_value_in_a_file_and_not_a_hole(trace, tmp_path):
    trace.save(tmp_path / "run.nc")
    with h5py.File(tmp_path / "run.nc") as file:
        assert np.isnan(file["lstm#1/hidden_grad"][0, 0, 0])
        assert "_FillValue" not in file["lstm#1/hidden_grad"].attrs


LABELS = {
    "dates": np.array(["2020-01-01", "2020-01-02", "NaT"], "datetime64[ns]"),
    "seconds": np.array(["2020-01-01T00:00:01", "2020-01-02", "1960-01-01"], "datetime64[s]"),
    "durations": np.array([1, 2, 3], "timedelta64[h]").astype("timedelta64[ns]"),
    "texts": np.array(["a", "", "\u00fc"]),
    "text objects": np.array(["a", "b", ""], dtype=object),
    "booleans": np.array([True, False, True]),
    "numbers": np.array([0.5, np.nan, -np.inf]),
    "small integers": np.array([1, 2, 255], np.uint8),
}


@each_format
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_coordinates_of_every_dtype_survive(tmp_path, suffix, labels):
    array = xr.DataArray(
        np.zeros((2, 3), "f4"), dims=("sample", "time"), coords={"time": labels, "when": ("time", labels[::-1])}
    )
    Gradients({"lstm": xr.Dataset({"hidden": array.assign_attrs(tensor="lstm.hidden")})}).save(tmp_path / f"g{suffix}")
    saving.save(saving.tree_of(array.rename("jacobian")), tmp_path / f"a{suffix}")
    for loaded in (opening.open(tmp_path / f"g{suffix}")["lstm"].hidden, opening.open(tmp_path / f"a{suffix}")):
        for name in ("time", "when"):
            assert loaded[name].dtype == array[name].dtype
            np.testing.assert_array_equal(loaded[name].values, array[name].values)
            assert loaded[name].attrs == {}


@each_format
def test_attributes_of_every_kind_survive(trace, tmp_path, suffix):
    attrs = {
        "yes": True,
        "none": None,
        "count": 3,
        "bytes": 2**40,
        "flops": 2**70,
        "share": 0.5,
        "nan": float("inf"),
        "empty": "",
        "text": "json:not",
        "list": [1, 2.5, "a"],
        "map": {"mode": "reverse", "chunks": [1, None]},
    }
    jacobian = xr.DataArray(np.zeros((2, 3)), dims=("sample", "lag"), attrs=attrs, name="jacobian")
    saving.save(saving.tree_of(jacobian), tmp_path / f"j{suffix}")
    loaded = opening.open(tmp_path / f"j{suffix}")
    assert loaded.attrs == attrs
    assert {key: type(value) for key, value in loaded.attrs.items()} == {
        key: type(value) for key, value in attrs.items()
    }
    assert jacobian.attrs == attrs


@each_format
def test_saving_changes_nothing_in_the_result(trace, tmp_path, suffix):
    before = repr(trace.tree), {name: trace.dataset(name).copy(deep=True) for name in trace}
    trace.save(tmp_path / f"run{suffix}")
    assert repr(trace.tree) == before[0]
    for name in trace:
        xr.testing.assert_identical(trace.dataset(name), before[1][name])


@each_format
def test_a_saved_result_is_replaced_and_nothing_else_is_left(trace, tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    Trace({"old": lstm_dataset("old")}).save(path)
    trace.save(path)
    assert opening.open(path).layers == trace.layers
    assert os.listdir(tmp_path) == [path.name]


@each_format
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_a_failed_save_leaves_the_old_file_and_no_half_of_a_new_one(trace, tmp_path, suffix, error, monkeypatch):
    path = tmp_path / f"run{suffix}"
    Trace({"old": lstm_dataset("old")}).save(path)

    def break_off(*_):
        raise error("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", break_off)
        with pytest.raises(FileError if error is OSError else error):
            trace.save(path)
    assert os.listdir(tmp_path) == [path.name]
    assert opening.open(path).layers == ("old",)


def test_a_zarr_folder_comes_back_if_the_new_one_cannot_move_in(trace, tmp_path, monkeypatch):
    path = tmp_path / "run.zarr"
    Trace({"old": lstm_dataset("old")}).save(path)
    rename, calls = os.rename, []

    def second_fails(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError("busy")
        rename(source, target)

    monkeypatch.setattr(disk, "_swap_names", lambda first, second: False)
    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(FileError, match="busy"):
        trace.save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["run.zarr"]
    assert opening.open(path).layers == ("old",)


@pytest.mark.linux
@each_format
def test_no_file_stays_open(trace, tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    trace.save(path)
    loaded = opening.open(path)
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    assert not [name for name in open_files if name.startswith(str(path))]
    assert isinstance(loaded["gru"].hidden.variable._data, np.ndarray)


def _exists(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_zarr_can_be_read_lazily_and_netcdf_cannot(trace, tmp_path):
    trace.save(tmp_path / "run.zarr")
    loaded = opening.open(tmp_path / "run.zarr", lazy=True)
    assert not isinstance(loaded["gru"].hidden.variable._data, np.ndarray)
    assert_same(trace, loaded)
    trace.save(tmp_path / "run.nc")
    with pytest.raises(InputError) as caught:
        opening.open(tmp_path / "run.nc", lazy=True)
    assert str(caught.value) == (
        f"Only Zarr can be read lazily.\n  got:      {tmp_path}/run.nc\n  try:      save to a path ending in .zarr"
    )


def error_message(path):
    with pytest.raises(FileError) as caught:
        opening.open(path)
    return str(caught.value)


def test_a_file_of_a_newer_schema_is_refused(trace, tmp_path):
    trace.save(tmp_path / "run.nc")
    with h5py.File(tmp_path / "run.nc", "a") as file:
        file.attrs["rnnlens_schema"] = SCHEMA_VERSION + 1
        file.attrs["rnnlens_version"] = "9.9"
    trace.save(tmp_path / "run.zarr")
    attributes = tmp_path / "run.zarr" / ".zattrs"
    stored = json.loads(attributes.read_text())
    attributes.write_text(json.dumps({**stored, "rnnlens_schema": SCHEMA_VERSION + 1, "rnnlens_version": "9.9"}))
    for suffix in SUFFIXES:
        assert error_message(tmp_path / f"run{suffix}") == (
            "This file was written by a newer rnnlens.\n"
            f"  got:      {tmp_path}/run{suffix}: schema {SCHEMA_VERSION + 1}, written by rnnlens 9.9\n"
            f"  expected: schema {SCHEMA_VERSION} or older\n"
            "  try:      pip install --upgrade rnnlens"
        )


def test_an_array_of_a_newer_schema_is_refused(trace, tmp_path):
    trace["gru"].hidden.assign_attrs(schema=SCHEMA_VERSION + 1).to_netcdf(tmp_path / "hidden.nc")
    assert error_message(tmp_path / "hidden.nc").startswith("This file was written by a newer rnnlens.")


def test_what_is_not_there_or_has_no_known_ending(tmp_path):
    assert error_message(tmp_path / "run.nc") == (
        f"There is no such file.\n  got:      {tmp_path}/run.nc\n  expected: a result saved by rnnlens\n"
        '  try:      trace.save("run.nc") writes one'
    )
    assert error_message(tmp_path / "run.pkl") == (
        f"The suffix of the path must name the format.\n  got:      {tmp_path}/run.pkl\n  expected: a path in .nc or "
        ".zarr\n  try:      run.nc for a result; models are saved and loaded by their framework"
    )


def test_damaged_files_give_one_clear_error(trace, tmp_path):
    (tmp_path / "text.nc").write_text("no netCDF")
    (tmp_path / "empty.nc").write_bytes(b"")
    (tmp_path / "empty.zarr").mkdir()
    trace.save(tmp_path / "run.nc")
    (tmp_path / "cut.nc").write_bytes((tmp_path / "run.nc").read_bytes()[:4000])
    for name in ("text.nc", "empty.nc", "empty.zarr", "cut.nc"):
        text = error_message(tmp_path / name).splitlines()
        assert text[0] == "This file cannot be read."
        assert text[1].startswith(f"  got:      {tmp_path}/{name}: ")
        assert text[2] == "  expected: a result saved by rnnlens, as netCDF (.nc) or Zarr (.zarr)"
        assert len(text) == 3


@pytest.mark.parametrize("meta", ["{", "{}", '{"layers": ["gone"]}', '{"layers": [], "unheard_of": 1}', None])
def test_damaged_metadata_gives_one_clear_error(trace, tmp_path, meta):
    trace.save(tmp_path / "run.nc")
    with h5py.File(tmp_path / "run.nc", "a") as file:
        if meta is None:
            del file.attrs["rnnlens_meta"]
        else:
            file.attrs["rnnlens_meta"] = meta
    assert error_message(tmp_path / "run.nc").startswith(f"This file is damaged.\n  got:      {tmp_path}/run.nc: ")


def test_files_of_others_are_refused(tmp_path):
    xr.Dataset({"a": ("x", [1.0])}).to_netcdf(tmp_path / "other.nc")
    path = tmp_path / "other.nc"
    assert error_message(path) == (
        f"This file was not written by rnnlens.\n  got:      {path}\n  try:      xarray.open_datatree({str(path)!r})"
    )


def test_an_unknown_kind_is_refused(trace, tmp_path):
    trace.save(tmp_path / "run.nc")
    with h5py.File(tmp_path / "run.nc", "a") as file:
        file.attrs["rnnlens_kind"] = "horoscope"
    assert error_message(tmp_path / "run.nc") == (
        f"This version of rnnlens has no such kind of result.\n  got:      'horoscope' in {tmp_path}/run.nc\n"
        "  try:      upgrade rnnlens"
    )


def test_nothing_but_a_zarr_store_is_ever_replaced_by_one(trace, tmp_path):
    folder = tmp_path / "photos.zarr"
    folder.mkdir()
    (folder / "cat.jpg").write_text("meow")
    (tmp_path / "note.zarr").write_text("text")
    (tmp_path / "folder.nc").mkdir()
    for name in ("photos.zarr", "note.zarr", "folder.nc", "missing/run.nc"):
        with pytest.raises(FileError):
            trace.save(tmp_path / name)
    assert (folder / "cat.jpg").read_text() == "meow"
    assert sorted(os.listdir(tmp_path)) == ["folder.nc", "note.zarr", "photos.zarr"]


def test_a_failed_save_leaves_no_view_of_the_image(trace, tmp_path, monkeypatch):
    """No view of the BytesIO stays open: CPython 3.12.1 crashes when it is then collected, 3.13.0 reports an error."""
    image = io.BytesIO(b"x" * 100)
    monkeypatch.setattr(xr.DataTree, "to_netcdf", lambda *_, **__: image.getbuffer())
    monkeypatch.setattr(saving, "write_file", lambda target, parts: list(parts) and 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        trace.save(tmp_path / "a.nc")
    image.truncate(0)  # raises BufferError if a view is open
    assert caught.value.__traceback__
