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
from ..results.disk.run_folder import committed, committed_count, row_sums
from ..results.encoding import to_paths
from ..typing import Array
from .records import TrainingRecord

#: Largest number of notes stored for one kind of records.
_MOST_NOTES = 1000
_COMPRESSOR = BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
#: Bytes of one chunk of a large array, and largest number of records in one chunk.
_CHUNK, _RECORDS = 2**20, 64
#: Number of rows by which arrays grow; rows after ``committed`` are empty, and are cut off at the end.
_ADVANCE = 64
#: Axes whose length may differ between records.
_FREE = ("time", "lag", "sample")
#: Significand bits kept of a profile: relative rounding error of 1/256.
PROFILE_BITS = 7


class Rows:
    """Records of one kind on disk: a Zarr group whose arrays grow along ``step``."""

    def __init__(self, group: zarr.Group, points: int | None) -> None:
        self._group, self._points = group, points
        self._names: list[str] = list(group.attrs.get("scalars", []))
        self._layers: list[str] = list(group.attrs.get("layers", []))
        self._arrays: dict[str, zarr.Array] = {}
        if "committed" not in group:
            new = {"shape": (2,), "dtype": "int64", "fill_value": 0, "compressors": _COMPRESSOR}
            group.create_array("committed", dimension_names=("number",), **new)[:] = committed(0)
        self._committed = group["committed"]
        self._count = committed_count(self._committed[:], Path(str(group.store_path)))
        self._sums: dict[str, Any] = {}
        for name, dtype in (("step", "int64"), ("epoch", "int64"), ("written", "float64")):
            self._array(name, (), dtype, ("step",))
        self._array("scalars", (len(self._names),), "float32", ("step", "scalar"))
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
        if any(layer not in self._layers for layer in record.layers):
            self._layers = list(dict.fromkeys([*self._layers, *record.layers]))
            self._group.attrs.update({"layers": self._layers})
        paths = to_paths(self._layers)
        for layer, arrays in record.layers.items():
            for name, array in arrays.items():
                self._put_labelled(f"layers{paths[layer]}/{name}", array)
        there = self._group.attrs.get("notes", [])
        if notes := [[record.step, note] for note in record.notes][: _MOST_NOTES - len(there)]:
            self._group.attrs.update({"notes": [*there, *notes]})
        names = self._group.attrs["arrays"]
        sums = np.array([self._sums.get(name, 0) for name in names], dtype=np.uint32)
        if "sums" not in self._arrays:
            self._array("sums", sums.shape, "uint32", ("step", "array"))
        self._put("sums", sums)
        self._committed[:] = committed(self._count + 1)
        self._count += 1
        self.last_step = record.step

    def _refuse_another_network(self, record: TrainingRecord) -> None:
        """Raise FileError if an array has other axes, or other sizes besides steps, lags and samples, than before."""
        paths = to_paths([*self._layers, *(layer for layer in record.layers if layer not in self._layers)])
        for layer, arrays in record.layers.items():
            for name, array in arrays.items():
                there = self._arrays.get(f"layers{paths[layer]}/{name}")
                if there is None:
                    continue
                before = dict(zip(there.metadata.dimension_names, there.shape, strict=True))
                now = {"step": there.shape[0], **{str(dim): size for dim, size in array.sizes.items()}}
                if list(before) != list(now) or any(before[dim] != now[dim] for dim in before if dim not in _FREE):
                    raise FileError(
                        "This run was recorded from another network.",
                        got=f"{layer}.{name} with {', '.join(f'{dim} {now[dim]}' for dim in list(now)[1:])}",
                        expected=", ".join(f"{dim} {before[dim]}" for dim in list(before)[1:]),
                        hint="a different path for each network, or resume=False",
                    )

    def cut(self, step: int) -> int:
        """Delete the records after ``step`` from disk; return how many were deleted."""
        kept = int(np.sum(self._arrays["step"][: self._count] <= step))
        dropped = self._count - kept
        if dropped:
            self._committed[:] = committed(kept)
            self._count = kept
            self._trim(kept)
            self.last_step = int(self._arrays["step"][-1]) if kept else None
        return dropped

    def close(self) -> None:
        """Cut off all rows after the last complete record."""
        self._trim(self._count)

    def _trim(self, count: int) -> None:
        """Cut off incomplete rows of a killed process, and rows allocated in advance."""
        for array in self._arrays.values():
            if array.shape[0] > count:
                array.resize((count, *array.shape[1:]))

    def _put_scalars(self, scalars: Mapping[str, float]) -> None:
        new = [name for name in scalars if name not in self._names]
        if new:
            self._names += new
            self._group.attrs.update({"scalars": self._names})
        row = np.array([scalars.get(name, np.nan) for name in self._names])
        with np.errstate(over="ignore"):  # an exploding gradient may exceed float32: it is stored as infinity
            self._put("scalars", row.astype(np.float32))

    def _put_labelled(self, path: str, array: xr.DataArray) -> None:
        values = np.asarray(array.values)
        labels = {str(dim): array[dim].values for dim in array.dims if dim in array.coords}
        if "sample" not in array.dims:  # a profile
            values, labels = _thinned(values, list(map(str, array.dims)), labels, self._points)
            values = _rounded(values)
        if path not in self._arrays:
            words = {key: value for key, value in array.attrs.items() if isinstance(value, str | int | float)}
            # 0, 1, 2, ... are the default labels of an axis.
            axes = {
                dim: np.asarray(at).tolist() for dim, at in labels.items() if not np.array_equal(at, np.arange(len(at)))
            }
            self._array(path, values.shape, str(values.dtype), ("step", *map(str, array.dims)))
            self._arrays[path].attrs.update({**words, "labels": axes})
        self._put(path, values)

    def _put(self, path: str, values: Any) -> None:
        """Write one row of an array; axes grow if it is longer than earlier ones, and a shorter one is filled up."""
        array = self._arrays[path]
        shape = np.shape(values)
        sizes = tuple(map(max, array.shape[1:], shape)) if shape else ()
        if array.shape[0] <= self._count or array.shape[1:] != sizes:
            rows = max(array.shape[0], self._count + _ADVANCE)  # in steps, because each resize writes a file
            array.resize((rows, *sizes))
        array[(self._count, *map(slice, shape))] = values
        if path != "sums":
            self._sums[path] = row_sums(np.asarray(values, dtype=array.dtype)[None], path)[0]

    def _array(self, path: str, sizes: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> None:
        if path in self._group:
            self._arrays[path] = self._group[path]
        else:
            cell = int(np.prod(sizes, dtype=np.int64)) * np.dtype(dtype).itemsize or 1
            chunks = (max(1, min(_RECORDS, _CHUNK // cell)), *(max(1, size) for size in sizes))
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
        named = self._group.attrs.get("arrays", [])
        if new := [one for one in self._arrays if one not in named and one != "sums"]:
            self._group.attrs.update({"arrays": [*named, *new]})


def _thinned(
    values: Array, dims: list[str], labels: dict[str, Any], points: int | None
) -> tuple[Array, dict[str, Any]]:
    """Average profiles of more than ``points`` steps over ``points`` equal intervals, labelled by their middles."""
    for axis, dim in enumerate(dims):
        size = values.shape[axis]
        if dim not in ("time", "lag") or points is None or size <= points:
            continue
        edges = np.linspace(0, size, points + 1).round().astype(int)
        parts = [values.take(range(a, b), axis=axis).mean(axis=axis) for a, b in pairwise(edges)]
        values = np.stack(parts, axis=axis)
        labels = {**labels, dim: (edges[:-1] + edges[1:] - 1) / 2}
    return values, labels


def _rounded(values: Array) -> Array:
    """Round to float32 with ``PROFILE_BITS`` significand bits, which compresses well (Klöwer et al. 2021)."""
    if values.dtype.kind != "f":
        return values
    codec = BitRound(keepbits=PROFILE_BITS)
    with np.errstate(over="ignore"):
        flat = np.ascontiguousarray(values, dtype=np.float32)
    return np.asarray(codec.decode(codec.encode(flat))).view(np.float32).reshape(values.shape)
