"""``Rows``: the records of one kind in a run on disk, as arrays that grow by one row per record."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from numcodecs import BitRound
from zarr.codecs import BloscCodec

from ..errors import FileError
from ..results.disk.run_folder import committed_count, committed_values, row_sums
from ..results.encoding import to_paths
from ..typing import Array
from .records import TrainingRecord

#: Largest number of notes stored for one kind of records.
_MOST_NOTES = 1000
_COMPRESSOR = BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
#: Bytes of one chunk of a large array, and largest number of records in one chunk.
_CHUNK, _RECORDS = 2**20, 64
#: Number of rows by which arrays grow; rows after ``committed`` are empty, and are cut off at the end.
_ROWS_IN_ADVANCE = 64
#: Axes whose length may differ between records.
_VARIABLE_AXES = ("time", "lag", "sample")
#: Significand bits kept of a profile: relative rounding error of 1/256.
PROFILE_BITS = 7


class Rows:
    """Records of one kind on disk: a Zarr group whose arrays grow along ``step``."""

    def __init__(self, group: zarr.Group, points: int | None) -> None:
        self._group, self._points = group, points
        self._scalar_names: list[str] = list(group.attrs.get("scalars", []))
        self._layer_names: list[str] = list(group.attrs.get("layers", []))
        self._arrays: dict[str, zarr.Array] = {}
        if "committed" not in group:
            array_options = {"shape": (2,), "dtype": "int64", "fill_value": 0, "compressors": _COMPRESSOR}
            group.create_array("committed", dimension_names=("number",), **array_options)[:] = committed_values(0)
        self._committed = group["committed"]
        self._count = committed_count(self._committed[:], Path(str(group.store_path)))
        self._sums: dict[str, Any] = {}
        for name, dtype in (("step", "int64"), ("epoch", "int64"), ("written", "float64")):
            self._open_array(name, (), dtype, ("step",))
        self._open_array("scalars", (len(self._scalar_names),), "float32", ("step", "scalar"))
        self._arrays |= {path: group[path] for path in [*group.attrs.get("arrays", []), "sums"] if path in group}
        self._trim(self._count)
        steps = self._arrays["step"][:]
        self.last_step: int | None = int(steps[-1]) if self._count else None

    def append(self, record: TrainingRecord) -> None:
        """Write all parts of a record, then the number of complete records."""
        self._refuse_another_network(record)
        self._sums = {}
        self._put("step", np.int64(record.step))
        self._put("epoch", np.int64(record.epoch))
        self._put("written", np.float64(record.time))
        self._put_scalars(record.scalars)
        if any(layer not in self._layer_names for layer in record.layers):
            self._layer_names = list(dict.fromkeys([*self._layer_names, *record.layers]))
            self._group.attrs.update({"layers": self._layer_names})
        paths = to_paths(self._layer_names)
        for layer, arrays in record.layers.items():
            for name, array in arrays.items():
                self._put_labelled(f"layers{paths[layer]}/{name}", array)
        stored_notes = self._group.attrs.get("notes", [])
        if new_notes := [[record.step, note] for note in record.notes][: _MOST_NOTES - len(stored_notes)]:
            self._group.attrs.update({"notes": [*stored_notes, *new_notes]})
        names = self._group.attrs["arrays"]
        sums = np.array([self._sums.get(name, 0) for name in names], dtype=np.uint32)
        if "sums" not in self._arrays:
            self._open_array("sums", sums.shape, "uint32", ("step", "array"))
        self._put("sums", sums)
        self._committed[:] = committed_values(self._count + 1)
        self._count += 1
        self.last_step = record.step

    def _refuse_another_network(self, record: TrainingRecord) -> None:
        """Raise FileError if an array has other axes, or other sizes besides steps, lags and samples, than before."""
        paths = to_paths([*self._layer_names, *(layer for layer in record.layers if layer not in self._layer_names)])
        for layer, arrays in record.layers.items():
            for name, array in arrays.items():
                stored_array = self._arrays.get(f"layers{paths[layer]}/{name}")
                if stored_array is None:
                    continue
                stored_sizes = dict(zip(stored_array.metadata.dimension_names, stored_array.shape, strict=True))
                sizes = {"step": stored_array.shape[0], **{str(dim): size for dim, size in array.sizes.items()}}
                if list(stored_sizes) != list(sizes) or any(
                    stored_sizes[dim] != sizes[dim] for dim in stored_sizes if dim not in _VARIABLE_AXES
                ):
                    raise FileError(
                        "This run was recorded from another network.",
                        got=f"{layer}.{name} with {', '.join(f'{dim} {sizes[dim]}' for dim in list(sizes)[1:])}",
                        expected=", ".join(f"{dim} {stored_sizes[dim]}" for dim in list(stored_sizes)[1:]),
                        hint="a different path for each network, or resume=False",
                    )

    def cut(self, step: int) -> int:
        """Delete the records after ``step`` from disk; return how many were deleted."""
        kept_count = int(np.sum(self._arrays["step"][: self._count] <= step))
        dropped_count = self._count - kept_count
        if dropped_count:
            self._committed[:] = committed_values(kept_count)
            self._count = kept_count
            self._trim(kept_count)
            self.last_step = int(self._arrays["step"][-1]) if kept_count else None
        return dropped_count

    def close(self) -> None:
        """Cut off all rows after the last complete record."""
        self._trim(self._count)

    def _trim(self, count: int) -> None:
        """Shorten all arrays to ``count`` records: incomplete rows and rows allocated in advance are deleted."""
        for array in self._arrays.values():
            if array.shape[0] > count:
                array.resize((count, *array.shape[1:]))

    def _put_scalars(self, scalars: Mapping[str, float]) -> None:
        new_names = [name for name in scalars if name not in self._scalar_names]
        if new_names:
            self._scalar_names += new_names
            self._group.attrs.update({"scalars": self._scalar_names})
        row = np.array([scalars.get(name, np.nan) for name in self._scalar_names])
        with np.errstate(over="ignore"):  # an exploding gradient may exceed float32: it is stored as infinity
            self._put("scalars", row.astype(np.float32))

    def _put_labelled(self, path: str, array: xr.DataArray) -> None:
        values = np.asarray(array.values)
        labels = {str(dim): array[dim].values for dim in array.dims if dim in array.coords}
        if "sample" not in array.dims:  # a profile
            values, labels = _average_intervals(values, list(map(str, array.dims)), labels, self._points)
            values = _round_profile(values)
        if path not in self._arrays:
            attributes = {key: value for key, value in array.attrs.items() if isinstance(value, str | int | float)}
            # 0, 1, 2, ... are the default labels of an axis.
            axis_labels = {
                dim: np.asarray(positions).tolist()
                for dim, positions in labels.items()
                if not np.array_equal(positions, np.arange(len(positions)))
            }
            self._open_array(path, values.shape, str(values.dtype), ("step", *map(str, array.dims)))
            self._arrays[path].attrs.update({**attributes, "labels": axis_labels})
        self._put(path, values)

    def _put(self, path: str, values: Any) -> None:
        """Write one row of an array; axes grow if it is longer than earlier ones, and a shorter one is filled up."""
        array = self._arrays[path]
        shape = np.shape(values)
        sizes = tuple(map(max, array.shape[1:], shape)) if shape else ()
        if array.shape[0] <= self._count or array.shape[1:] != sizes:
            rows = max(array.shape[0], self._count + _ROWS_IN_ADVANCE)  # in steps, because each resize writes a file
            array.resize((rows, *sizes))
        array[(self._count, *map(slice, shape))] = values
        if path != "sums":
            self._sums[path] = row_sums(np.asarray(values, dtype=array.dtype)[None], path)[0]

    def _open_array(self, path: str, sizes: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> None:
        if path in self._group:
            self._arrays[path] = self._group[path]
        else:
            row_bytes = int(np.prod(sizes, dtype=np.int64)) * np.dtype(dtype).itemsize or 1
            chunks = (max(1, min(_RECORDS, _CHUNK // row_bytes)), *(max(1, size) for size in sizes))
            self._arrays[path] = self._group.create_array(
                path,
                shape=(0, *sizes),
                chunks=chunks if len(chunks) > 1 else (1024,),
                dtype=dtype,
                fill_value=np.nan if np.dtype(dtype).kind == "f" else 0,
                compressors=_COMPRESSOR,
                dimension_names=dims,
            )
        # Readers use this list instead of that of the folder, which may contain temporary files.
        listed_names = self._group.attrs.get("arrays", [])
        if new_names := [name for name in self._arrays if name not in listed_names and name != "sums"]:
            self._group.attrs.update({"arrays": [*listed_names, *new_names]})


def _average_intervals(
    values: Array, dims: list[str], labels: dict[str, Any], points: int | None
) -> tuple[Array, dict[str, Any]]:
    """Average profiles of more than ``points`` steps over ``points`` equal intervals, labelled by their middles."""
    for axis, dim in enumerate(dims):
        size = values.shape[axis]
        if dim not in ("time", "lag") or points is None or size <= points:
            continue
        edges = np.linspace(0, size, points + 1).round().astype(int)
        interval_means = [values.take(range(start, stop), axis=axis).mean(axis=axis) for start, stop in pairwise(edges)]
        values = np.stack(interval_means, axis=axis)
        labels = {**labels, dim: (edges[:-1] + edges[1:] - 1) / 2}
    return values, labels


def _round_profile(values: Array) -> Array:
    """Round to float32 with ``PROFILE_BITS`` significand bits, which compresses well (Klöwer et al. 2021)."""
    if values.dtype.kind != "f":
        return values
    codec = BitRound(keepbits=PROFILE_BITS)
    with np.errstate(over="ignore"):
        float_values = np.ascontiguousarray(values, dtype=np.float32)
    return np.asarray(codec.decode(codec.encode(float_values))).view(np.float32).reshape(values.shape)
