"""Samples of data that are not in memory: which are read, and how many chunks that touches."""

import dask.array as da
import h5py
import numpy as np
import pytest
import xarray as xr
import zarr

from rnnlens.diagnosis.lazy_data import is_outside_memory, load_samples
from rnnlens.errors import InputError

VALUES = np.random.default_rng(0).normal(size=(4000, 5, 2)).astype("float32")


def of_kind(kind, path):
    if kind == "zarr":
        array = zarr.create_array(str(path / "x.zarr"), shape=VALUES.shape, chunks=(100, 5, 2), dtype="float32")
        array[:] = VALUES
        return array
    if kind == "h5py":
        return h5py.File(path / "x.h5", "w").create_dataset("x", data=VALUES)
    lazy = da.from_array(VALUES, chunks=(100, 5, 2))
    return xr.DataArray(lazy, dims=("sample", "time", "feature")) if kind == "xarray" else lazy


@pytest.mark.product(keep=("dask", "zarr"))
@pytest.mark.parametrize("kind", ["dask", "zarr", "h5py", "xarray"])
def test_samples_are_read_in_blocks_with_their_targets(kind, tmp_path):
    x = of_kind(kind, tmp_path)
    assert is_outside_memory({"x": x})
    (read_x,), y, note = load_samples((x,), np.arange(4000), 64)
    assert len(y) == 64
    np.testing.assert_array_equal(np.asarray(read_x), VALUES[y])
    assert y[0] == 0
    assert y[-1] == 3999
    assert set(np.diff(y).tolist()) <= {1, *range(250, 280)}  # 16 blocks of 4
    assert note.startswith("64 of 4,000 samples")


def test_chunks_without_a_chosen_sample_are_not_computed():
    computed = []

    def chunk(block_info=None):
        computed.append(block_info[None]["chunk-location"])
        return np.zeros((100, 5, 2))

    x = da.map_blocks(chunk, chunks=((100,) * 400, (5,), (2,)), dtype=float, meta=np.zeros((0, 0, 0)))
    (read_x, _, _) = load_samples(x, None, 64)
    assert read_x.shape == (64, 5, 2)
    assert len(computed) <= 32


def test_arrays_in_memory_are_not_outside():
    assert not is_outside_memory((VALUES, [1.0, 2.0], xr.DataArray(VALUES)))
    x, y, note = load_samples(VALUES[:20], None, 64)
    np.testing.assert_array_equal(x, VALUES[:20])
    assert y is None
    assert not note


@pytest.mark.parametrize("samples", ["unknown", "different"])
def test_numbers_of_samples_that_do_not_fit_are_refused(samples):
    x = da.from_array(VALUES, chunks=(100, 5, 2))
    y = x[x[:, 0, 0] > 0] if samples == "unknown" else x[:100]
    with pytest.raises(InputError, match="number of samples"):
        load_samples(y if samples == "unknown" else x, y, 64)
