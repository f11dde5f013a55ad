"""A time Jacobian that is written to disk while it is computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ..errors import FileError, message
from ..results.checks import Check
from ..results.files import check_path
from ..results.files import open as open_result
from .jacobian_label import Labels
from .jacobian_wanted import Tally

#: Bytes per chunk of the array on disk.
_CHUNK = 4 * 2**20


class ZarrTarget:
    """Takes pieces as an array does; what was not written yet reads as NaN.

    The attribute ``finished`` of the array is False until everything is there.
    """

    def __init__(
        self, path: str | PathLike[str], labels: Labels, samples: int, dtype: Any, tally: Tally, checks: Sequence[Check]
    ) -> None:
        self.path, self.labels, self.samples, self.dtype = Path(path), labels, samples, np.dtype(dtype)
        self.tally, self.checks = tally, checks
        if self.path.suffix.lower() != ".zarr":
            raise FileError(message("out= is written piece by piece.", got=str(path), expected="a path in .zarr"))
        check_path(self.path)

    def __enter__(self) -> ZarrTarget:
        import zarr

        shape = self.labels.shape(self.samples)
        template = self.labels.array(np.broadcast_to(np.asarray(np.nan, self.dtype), shape), self.tally, self.checks)
        coords = template.coords.to_dataset()
        coords.to_zarr(self.path, mode="w", zarr_format=2, consolidated=False)
        group = zarr.open_group(self.path, mode="r+", zarr_format=2)
        self.array = group.create_array(
            "jacobian", shape=shape, chunks=_chunks(shape, self.dtype.itemsize), dtype=self.dtype, fill_value=np.nan
        )
        self._note(finished=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._note(finished=kind is None)

    def __setitem__(self, index: tuple[Any, ...], values: Any) -> None:
        self.array[index] = np.asarray(values, dtype=self.dtype)

    def _note(self, *, finished: bool) -> None:
        shape = self.labels.shape(self.samples)
        empty = np.broadcast_to(np.asarray(np.nan, self.dtype), shape)
        attrs = self.labels.array(empty, self.tally, self.checks).attrs
        plain = {key: _jsonable(value) for key, value in attrs.items()}
        self.array.attrs.update({**plain, "_ARRAY_DIMENSIONS": list(self.labels.dims), "finished": int(finished)})

    def result(self) -> xr.DataArray:
        """What was written, read when looked at."""
        found = open_result(self.path, lazy=True)
        assert isinstance(found, xr.DataArray)
        return found


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """One sample at a time, then the leading axes cut until a chunk is small."""
    chunks = list(shape)
    for axis in range(len(chunks)):
        while int(np.prod(chunks)) * itemsize > _CHUNK and chunks[axis] > 1:
            chunks[axis] = -(-chunks[axis] // 2)
    return tuple(max(1, n) for n in chunks)


def _jsonable(value: Any) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        return value.item() if hasattr(value, "item") else str(value)
    return value
