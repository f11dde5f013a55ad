"""A time Jacobian that is written to disk while it is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from ...errors import FileError, RnnlensError, message
from ...results.array import ResultArray
from ...results.checks import Check
from ...results.disk.atomic import replacing_folder
from ...results.disk.store import recording
from ...results.files import check_path
from ...results.files import open as open_result
from .label import Labels
from .tally import Tally

#: Bytes per chunk of the array on disk.
_CHUNK = 4 * 2**20
#: Also chunks that hold nothing but the fill value: one that is missing is a hole, and nothing else.
_EVERY_CHUNK = {"write_empty_chunks": True}


class ZarrTarget:
    """Takes pieces as an array does; what was not written yet reads as NaN.

    The folder appears whole, with all labels and not a single value, and is readable at any moment from then on. The
    attribute ``finished`` of the array is False until everything is there; only then checksums are written.
    """

    def __init__(self, path: str | PathLike[str], labels: Labels, tally: Tally, checks: Sequence[Check]) -> None:
        if Path(path).suffix.lower() != ".zarr":
            raise FileError(message("out= is written piece by piece.", got=str(path), expected="a path in .zarr"))
        self.path, self.asked = check_path(path), Path(path)
        self.labels, self.tally, self.checks = labels, tally, checks
        self.shape, self.dtype = labels.plan.shape, labels.plan.dtype

    def __enter__(self) -> ZarrTarget:
        with self._errors(), replacing_folder(self.path) as folder:
            sums = self._lay_out(folder)
        self.store = recording(self.path, sums)
        self.array = self._group()["jacobian"].with_config(_EVERY_CHUNK)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            return
        with self._errors():
            self._note(self.array, finished=True)
            self.store.seal()

    def __setitem__(self, index: tuple[Any, ...], values: Any) -> None:
        with self._errors():
            self.array[index] = np.asarray(values, dtype=self.dtype)

    def _lay_out(self, folder: Path) -> dict[str, str]:
        """Labels, and an array without values; the checksums of both."""
        template = self._template()
        self.store = recording(folder)
        coords = template.coords.to_dataset()
        encoding = dict.fromkeys(coords.variables, _EVERY_CHUNK)
        coords.to_zarr(self.store, mode="w-", zarr_format=2, consolidated=False, encoding=encoding)
        chunks = _chunks(self.shape, self.dtype.itemsize)
        array = self._group().create_array(
            "jacobian", shape=self.shape, chunks=chunks, dtype=self.dtype, fill_value=np.nan, config=_EVERY_CHUNK
        )
        self._note(array, finished=False)
        return self.store.sums

    def _template(self) -> xr.DataArray:
        """All labels, around nothing."""
        empty = np.broadcast_to(np.asarray(np.nan, self.dtype), self.shape)
        return self.labels.array(empty, self.tally, self.checks)

    def _group(self) -> Any:
        return zarr.open_group(self.store, mode="r+", zarr_format=2)

    def _note(self, array: Any, *, finished: bool) -> None:
        attrs = self._template().attrs
        plain = {key: _jsonable(value) for key, value in attrs.items()}
        array.attrs.update({**plain, "_ARRAY_DIMENSIONS": list(self.labels.plan.dims), "finished": int(finished)})

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RnnlensError:
            raise
        except OSError as error:
            raise FileError(message("The file cannot be written.", got=f"{self.asked}: {error}")) from error

    def result(self) -> ResultArray:
        """What was written, read when looked at."""
        found = open_result(self.asked, lazy=True)
        assert isinstance(found, ResultArray)
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
