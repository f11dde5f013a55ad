"""Lazy results written chunk by chunk: each task writes its own region of a Zarr folder, and a killed save goes on.

The folder has a hidden name until it is complete. Each finished chunk leaves a small file with its checksums and its
record of checks, written after its region; a chunk without that file is computed again. Regions equal chunks of the
file, so a chunk that is written twice is the same chunk.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xarray as xr
import zarr

from ...cluster import client, failed_samples, results_of
from ...errors import FileError, RnnlensError, UserCodeError, message
from ...settings import Progress
from . import replacing_folder, write_file
from .store import recording

#: Within a folder in progress: the folder of finished chunks' records, and the checksums of labels and metadata.
_DONE, _LABELS = ".chunks", ".labels.json"

#: Kind and text of an error: of a chunk, a file or a worker.
Failure = tuple[str, str]
_EVERY = {"write_empty_chunks": True}


class ChunkTasks(Protocol):
    """The tasks behind a lazy result, as :class:`~rnnlens.verbs.chunked.graph.ChunkGraph` has them.

    ``names``: by the name of a dask array, that of its part in the values of a chunk, for arrays that keep samples.
    """

    names: dict[str, str]
    title: str

    @property
    def token(self) -> str:
        """Name of the call, the same for the same model, data and arguments."""
        ...

    @property
    def arguments(self) -> Sequence[tuple[Any, ...]]:
        """The arguments of each chunk's task."""
        ...

    def record(self) -> Any:
        """Return a dask array of one element, a mapping: the checks and the certificate of all chunks."""
        ...

    def reduced(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Reduce the records of all chunks to checks, certificate and value."""
        ...


@dataclass(frozen=True)
class Region:
    """Where the arrays of chunks lie: folder, and by the name of a chunk's array its path and axis of samples."""

    folder: str
    places: Mapping[str, tuple[str, int]]


def write_regions(tree: xr.DataTree, places: Mapping[str, tuple[str, int]], tasks: ChunkTasks, target: Path) -> Path:
    """Lay out a folder, compute all chunks that are missing in it, and return it; raise an error if some fail."""
    folder = target.with_name(f".{target.name}.{tasks.token[:16]}.unfinished")
    if not (folder / _LABELS).is_file():
        _lay_out(tree, folder)
    region = Region(str(folder), dict(places))
    missing = [i for i in range(len(tasks.arguments)) if not _record_path(folder, i).is_file()]
    with Progress(tasks.title, len(tasks.arguments)) as progress:
        progress.advance(len(tasks.arguments) - len(missing))
        failures = _run(region, missing, tasks, progress)
    missing = [i for i in missing if not _record_path(folder, i).is_file()]
    if failures or missing:
        elsewhere = "file", "the workers write to another disk: take a folder of all machines"
        kind, text = failures[min(failures)] if failures else elsewhere
        what = f"{len(missing)} of {len(tasks.arguments)} chunks are not written to {target.name}; the others are kept."
        hint = "mend the cause and call save with the same path: it goes on with the missing chunks"
        error = UserCodeError if kind == "chunk" else FileError
        raise error(message(what, got=" ".join(text.split()), hint=hint))
    return folder


def _lay_out(tree: xr.DataTree, folder: Path) -> None:
    """Write labels and metadata of all arrays, lazy ones without values."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store = recording(folder)
    for node in tree.subtree:
        dataset = node.to_dataset(inherit=False)
        encoding = dict.fromkeys(dataset.variables, _EVERY)
        options: dict[str, Any] = {"zarr_format": 2, "consolidated": False, "compute": False, "encoding": encoding}
        dataset.to_zarr(store, group=node.path, mode="a", **options)
    (folder / _DONE).mkdir()
    write_file(folder / _LABELS, [json.dumps(store.sums).encode()])


def _run(region: Region, missing: Sequence[int], tasks: ChunkTasks, progress: Progress) -> dict[int, Failure]:
    """Compute the missing chunks; return the kind and the text of the error of each chunk that failed."""
    if not missing:
        return {}
    dask = importlib.import_module("dask")
    write = dask.delayed(write_chunk)
    writers = {
        i: write(region, *tasks.arguments[i], dask_key_name=(f"{tasks.title}-write-{tasks.token}", i)) for i in missing
    }
    connected, failures = client(), {}
    if connected is None:
        ended = _ended_here(dask, region, writers)
    else:
        futures = dict(zip(connected.compute(list(writers.values())), writers, strict=True))
        ended = ((futures[future], outcome) for future, outcome in results_of(connected, list(futures)))
    for number, outcome in ended:
        progress.advance()
        if isinstance(outcome, Exception):
            _refuse_lost(outcome)
            _, start, stop, _ = tasks.arguments[number][2]
            kind = "worker" if type(outcome).__name__ == "KilledWorker" else "chunk"
            text = str(outcome) if isinstance(outcome, RnnlensError) else failed_samples((start, stop), outcome)
            outcome = kind, text
        if outcome is not None:
            failures[number] = outcome
    return failures


def _ended_here(dask: Any, region: Region, writers: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
    """Compute chunks in this process; yield the number of each chunk with its result or exception."""
    try:
        outcomes = dask.compute(*writers.values())
    except Exception:  # data of the user that cannot be read: each chunk alone, so that the others are not lost
        outcomes = [_ended_alone(dask, region, number, writer) for number, writer in writers.items()]
    yield from zip(writers, outcomes, strict=True)


def _ended_alone(dask: Any, region: Region, number: int, writer: Any) -> Any:
    if _record_path(Path(region.folder), number).is_file():
        return None
    try:
        return dask.compute(writer)[0]
    except Exception as error:
        return error


def _refuse_lost(error: Exception) -> None:
    """Raise FileError if the connection to the scheduler is lost."""
    if type(error).__name__ in ("FutureCancelledError", "CancelledError", "CommClosedError"):
        raise FileError(
            "The connection to the Dask scheduler was lost before all chunks were written.",
            got=f"{type(error).__name__}: {error}",
            hint="connect a new Client and call save with the same path: it goes on with the missing chunks",
        ) from error


def write_chunk(region: Region, task: Any, model: Any, rows: tuple[int, ...], *parts: Any) -> Failure | None:
    """Compute one chunk and write its regions, then its record; return None, or the kind and the text of an error."""
    folder, number = Path(region.folder), rows[0]
    try:
        values = task(model, rows, *parts)
    except Exception as error:
        return "chunk", str(error)
    store = recording(folder)
    try:
        group = zarr.open_group(store, mode="r+", zarr_format=2)
        for name, (path, axis) in region.places.items():
            found = values.kept[name]
            array = group[path.lstrip("/")].with_config(_EVERY)
            index = tuple(slice(rows[1], rows[2]) if i == axis else slice(None) for i in range(found.ndim))
            array[index] = found
        record = {"sums": store.sums, "record": values.record()}
        write_file(_record_path(folder, number), [json.dumps(record, default=_plain).encode()])
    except OSError as error:
        return "file", f"samples {rows[1]} to {rows[2] - 1}: {error}"
    return None


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


def _record_path(folder: Path, number: int) -> Path:
    return folder / _DONE / f"{number}.json"


def records_of(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return the records of all chunks, in order."""
    return [json.loads(_record_path(folder, i).read_text())["record"] for i in range(count)]


def complete(folder: Path, target: Path, count: int, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Add attributes, by path of a group or array, and checksums of all files; give the folder its name."""
    sums = json.loads((folder / _LABELS).read_text())
    for number in range(count):
        sums |= json.loads(_record_path(folder, number).read_text())["sums"]
    shutil.rmtree(folder / _DONE)
    (folder / _LABELS).unlink()
    store = recording(folder, sums)
    group = zarr.open_group(store, mode="r+", zarr_format=2)
    for path, attrs in attributes.items():
        node: Any = group[path.strip("/")] if path.strip("/") else group
        node.attrs.update(dict(attrs))
    zarr.consolidate_metadata(store, zarr_format=2)
    store.seal()
    with replacing_folder(target) as empty:
        empty.rmdir()
        os.rename(folder, empty)
