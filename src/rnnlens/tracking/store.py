"""A run on disk: one Zarr group that grows record by record and can be read, whole, at every moment.

Layout, format 3 of Zarr, so that any reader of Zarr can look into it:

================================  ====================================================================
``/``                             attributes: what wrote it, when it was opened and how it ended
``/probe``, ``/batch``            records by kind; attributes: names of scalars and layers, notes with steps
``.../committed``                 how many records are complete: written last, in one step
``.../step, epoch, written``      (step,)
``.../scalars``                   (step, scalar)
``.../layers/<layer>/<name>``     (step, ...); attributes: words, and labels of its axes
================================  ====================================================================

Every file is replaced, never changed, so that a reader finds the old or the new one. What lies behind ``committed``
was half-written when its process died: readers do not look at it, and the next writer cuts it off.
"""

from __future__ import annotations

import os
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from numcodecs import BitRound
from zarr.codecs import BloscCodec

from ..errors import FileError, message
from ..results.files import root_attrs
from ..results.names import to_paths
from ..typing import Array
from .records import KINDS, Record

try:
    import fcntl
except ImportError:  # Windows: two writers of one run are not told apart there
    fcntl = None  # type: ignore[assignment]

_COMPRESSOR = BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
#: Bytes of one chunk of a large array; records in one of small ones.
_CHUNK, _RECORDS = 2**20, 64
#: Rows that arrays grow by; those behind ``committed`` hold nothing yet, and are cut off at the end.
_ADVANCE = 64
#: Stores of this process that were not closed, by their folder.
_OPEN: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()
#: Bits of the significand that a profile keeps: 1 part in 256.
PROFILE_BITS = 7


class Store:
    """Writes the records of a run to a folder; a :class:`~rnnlens.tracking.records.Sink`.

    Parameters
    ----------
    path
        Ends in ``.zarr``; folders above it are made. A run that is there is gone on with.
    resume
        False replaces a run that is there.
    points
        Most points of a profile over time; longer ones are averaged in as many equal stretches. None keeps every step.
    provenance
        Framework, versions, device.

    Raises
    ------
    FileError
        If something that is no run is in the way, or another process is writing this run. A store of this process that
        was left open, as Ctrl-C does, is closed, and the new one goes on.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        resume: bool = True,
        points: int | None = 64,
        provenance: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._points = points
        with _said_as_ours(self.path):
            self._open(resume, provenance)

    def _open(self, resume: bool, provenance: Mapping[str, str] | None) -> None:
        _refuse_what_is_in_the_way(self.path)
        key = os.path.realpath(self.path)
        before = _OPEN.pop(key, None)
        if before is not None:  # of a training in this process that was interrupted
            before.close("interrupted")
        self.path.mkdir(parents=True, exist_ok=True)
        lock = _locked(self.path)
        #: Lets go of the lock; also when a store is dropped that nobody closed.
        self._unlock = weakref.finalize(self, lambda: None if lock is None else os.close(lock))
        remove_partial(self.path)
        if not resume:
            _empty(self.path)
        if not (self.path / "zarr.json").is_file():  # with its attributes, so that it is a run from its first moment
            zarr.create_group(self.path, zarr_format=3, attributes=root_attrs("run", {}))
        self._root = zarr.open_group(self.path, mode="r+", zarr_format=3)
        began = {"time": time.time(), "provenance": dict(provenance or {})}
        sessions = [*self._root.attrs.get("sessions", []), began]
        self._root.attrs.update({**root_attrs("run", {}), "sessions": sessions, "ended": None})
        self._closed = False
        _OPEN[key] = self
        self._kinds: dict[str, _Kind] = {}
        for kind in (kind for kind in KINDS if kind in self._root):
            self._kinds[kind] = _Kind(self._root[kind], self._points)

    @property
    def last_step(self) -> int | None:
        """Step of the last complete record; None of an empty run."""
        return max((kind.last_step for kind in self._kinds.values() if kind.last_step is not None), default=None)

    def last_step_of(self, kind: str) -> int | None:
        """Step of the last complete record of a kind; None where there is none."""
        return self._kinds[kind].last_step if kind in self._kinds else None

    def go_on(self, taken: int) -> int:
        """The step that training goes on from, whose optimizer has taken ``taken`` steps.

        An optimizer that was restored from before the last record goes on from there: what was recorded of weights that
        are gone is dropped. One that starts anew counts on from the last record.
        """
        last = self.last_step
        if last is None or taken >= last:
            return taken
        if taken == 0:
            return last
        self.cut(taken)
        return taken

    def cut(self, step: int) -> int:
        """Drop the records of steps beyond ``step``: training goes on from weights older than they are.

        Returns
        -------
        int
            How many were dropped.
        """
        return sum(kind.cut(step) for kind in self._kinds.values())

    def write(self, record: Record) -> None:
        """Append a record; when this returns it is there, whatever happens to the process.

        Raises
        ------
        FileError
            If it was closed, or another training of this process took over the run.
        """
        if self._closed:
            raise FileError(
                message("This run is closed.", got=str(self.path), hint="a path of its own for each training")
            )
        if record.kind not in self._kinds:
            self._kinds[record.kind] = _Kind(self._root.require_group(record.kind), self._points)
        self._kinds[record.kind].append(record)

    def close(self, reason: str) -> None:
        """Note how the run ended, and let another process go on with it."""
        if self._closed:
            return
        self._closed = True
        self._root.attrs.update({"ended": {"time": time.time(), "reason": reason}})
        for kind in self._kinds.values():
            kind.close()
        self._unlock()


class _Kind:
    """The records of one kind: a group with a growing ``step``."""

    def __init__(self, group: zarr.Group, points: int | None) -> None:
        self._group, self._points = group, points
        self._names: list[str] = list(group.attrs.get("scalars", []))
        self._layers: list[str] = list(group.attrs.get("layers", []))
        self._arrays: dict[str, zarr.Array] = {}
        if "committed" not in group:
            group.create_array("committed", shape=(), dtype="int64", fill_value=0)
        self._committed = group["committed"]
        self._count = int(self._committed[()])
        for name, dtype in (("step", "int64"), ("epoch", "int64"), ("written", "float64")):
            self._array(name, (), dtype, ("step",))
        self._array("scalars", (len(self._names),), "float32", ("step", "scalar"))
        self._arrays |= {path: group[path] for path in group.attrs.get("arrays", []) if path in group}
        self._trim(self._count)
        steps = self._arrays["step"][:]
        self.last_step: int | None = int(steps[-1]) if self._count else None

    def append(self, record: Record) -> None:
        """All parts of a record, then their number."""
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
        if record.notes:
            notes = [*self._group.attrs.get("notes", []), *([record.step, note] for note in record.notes)]
            self._group.attrs.update({"notes": notes})
        self._count += 1
        self._committed[()] = self._count
        self.last_step = record.step

    def cut(self, step: int) -> int:
        """Drop records behind ``step``."""
        kept = int(np.sum(self._arrays["step"][: self._count] <= step))
        dropped = self._count - kept
        if dropped:
            self._committed[()] = self._count = kept
            self._trim(kept)
            self.last_step = int(self._arrays["step"][-1]) if kept else None
        return dropped

    def close(self) -> None:
        """No rows but those of complete records."""
        self._trim(self._count)

    def _trim(self, count: int) -> None:
        """Cut off what a process that died left half-written, and rows that were made in advance."""
        for array in self._arrays.values():
            if array.shape[0] > count:
                array.resize((count, *array.shape[1:]))

    def _put_scalars(self, scalars: Mapping[str, float]) -> None:
        new = [name for name in scalars if name not in self._names]
        if new:
            self._names += new
            self._group.attrs.update({"scalars": self._names})
        row = np.array([scalars.get(name, np.nan) for name in self._names])
        with np.errstate(over="ignore"):  # of a gradient that explodes: infinite is what it is
            self._put("scalars", row.astype(np.float32))

    def _put_labelled(self, path: str, array: xr.DataArray) -> None:
        profile = "sample" not in array.dims
        values = np.asarray(array.values)
        labels = {str(dim): array[dim].values for dim in array.dims if dim in array.coords}
        if profile:
            values, labels = _thinned(values, list(map(str, array.dims)), labels, self._points)
            values = _rounded(values)
        if path not in self._arrays:
            words = {key: value for key, value in array.attrs.items() if isinstance(value, str | int | float)}
            axes = {dim: np.asarray(values_).tolist() for dim, values_ in labels.items()}
            self._array(path, values.shape, str(values.dtype), ("step", *map(str, array.dims)))
            self._arrays[path].attrs.update({**words, "labels": axes})
        self._put(path, values)

    def _put(self, path: str, values: Any) -> None:
        """One row; axes grow where this record is longer than those before, and the rest of a shorter one is NaN."""
        array = self._arrays[path]
        shape = np.shape(values)
        sizes = tuple(map(max, array.shape[1:], shape)) if shape else ()
        if array.shape[0] <= self._count or array.shape[1:] != sizes:
            rows = max(array.shape[0], self._count + _ADVANCE)  # not at every record: it writes a file as well
            array.resize((rows, *sizes))
        array[(self._count, *map(slice, shape))] = values

    def _array(self, path: str, sizes: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> None:
        if path in self._group:
            self._arrays[path] = self._group[path]
            self._list()
            return
        cell = int(np.prod(sizes, dtype=np.int64)) * np.dtype(dtype).itemsize or 1
        chunks = (max(1, min(_RECORDS, _CHUNK // cell)), *(max(1, size) for size in sizes))
        fill = np.nan if np.dtype(dtype).kind == "f" else 0
        self._arrays[path] = self._group.create_array(
            path,
            shape=(0, *sizes),
            chunks=chunks if len(chunks) > 1 else (1024,),
            dtype=dtype,
            fill_value=fill,
            compressors=_COMPRESSOR,
            dimension_names=dims,
        )
        self._list()

    def _list(self) -> None:
        """Have the group name its arrays: listing the folder would meet files that are being written."""
        named = self._group.attrs.get("arrays", [])
        if any(path not in named for path in self._arrays):
            self._group.attrs.update({"arrays": list(dict.fromkeys([*named, *self._arrays]))})


def _thinned(
    values: Array, dims: list[str], labels: dict[str, Any], points: int | None
) -> tuple[Array, dict[str, Any]]:
    """Profiles of more than ``points`` steps, averaged over as many equal stretches, each labelled by its middle."""
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
    """Float32 with zeros where nobody looks, which then take no room once compressed (Klöwer et al. 2021)."""
    if values.dtype.kind != "f":
        return values
    codec = BitRound(keepbits=PROFILE_BITS)
    with np.errstate(over="ignore"):
        flat = np.ascontiguousarray(values, dtype=np.float32)
    return np.asarray(codec.decode(codec.encode(flat))).view(np.float32).reshape(values.shape)


@contextmanager
def _said_as_ours(path: Path) -> Iterator[None]:
    """Within the block, what the system refuses becomes one error of ours."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        got = f"{path}: {error.strerror or error}"
        raise FileError(message("This run cannot be written.", got=got, expected="a folder to write to")) from error


def _refuse_what_is_in_the_way(path: Path) -> None:
    if path.suffix.lower() != ".zarr":
        raise FileError(message("A run is a folder of Zarr.", got=str(path), expected="a path ending in .zarr"))
    if path.is_file():
        raise FileError(message("A file is in the way of a run.", got=str(path), hint="another name"))
    if path.is_dir() and any(path.iterdir()):
        from ..results.run import is_run

        if not is_run(path) and not _only_begun(path):
            raise FileError(message("A folder that is no run is in the way.", got=str(path), hint="another name"))


def _only_begun(path: Path) -> bool:
    """Whether a writer died while it made the folder."""
    return all(child.name == "zarr.json" or child.name.endswith(".partial") for child in path.iterdir())


def _locked(path: Path) -> int | None:
    """A lock that the system drops when the process dies; None where there are none."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FileError(
            message("Another process is writing this run.", got=str(path), hint="a path of its own for each training")
        ) from None
    except OSError:  # a file system without locks
        pass
    return handle


def _empty(path: Path) -> None:
    """Remove what is in the folder of a run."""
    (path / "zarr.json").unlink(missing_ok=True)  # first, so that what is left of a killed process is no run
    for child in path.iterdir():
        if child.is_dir():
            shutil.rmtree(child)


def remove_partial(path: Path) -> None:
    """Files that a killed writer had not finished."""
    for file in path.rglob("*.partial"):
        with suppress(OSError):
            file.unlink()
