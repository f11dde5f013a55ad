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

from ...cluster import current_client, failed_samples_text, finished_results
from ...errors import FileError, RnnlensError, UserCodeError, message
from ...settings import Progress
from . import replacing_folder, write_file
from .store import recording_store

#: Within a folder in progress: the folder of finished chunks' records, and the checksums of labels and metadata.
_RECORDS_FOLDER, _LAYOUT_SUMS = ".chunks", ".labels.json"

#: Kind and text of an error: of a chunk, a file or a worker.
Failure = tuple[str, str]
_WRITE_EMPTY = {"write_empty_chunks": True}


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
    destinations: Mapping[str, tuple[str, int]]


def write_regions(
    tree: xr.DataTree, destinations: Mapping[str, tuple[str, int]], tasks: ChunkTasks, target: Path
) -> Path:
    """Lay out a folder, compute all chunks that are missing in it, and return it; raise an error if some fail."""
    folder = target.with_name(f".{target.name}.{tasks.token[:16]}.unfinished")
    if not (folder / _LAYOUT_SUMS).is_file():
        _write_layout(tree, folder)
    region = Region(str(folder), dict(destinations))
    missing = [i for i in range(len(tasks.arguments)) if not _record_path(folder, i).is_file()]
    with Progress(tasks.title, len(tasks.arguments)) as progress:
        progress.advance(len(tasks.arguments) - len(missing))
        failures = _compute_missing(region, missing, tasks, progress)
    missing = [i for i in missing if not _record_path(folder, i).is_file()]
    if failures or missing:
        other_disk_failure = "file", "the workers write to another disk: take a folder of all machines"
        kind, reason = failures[min(failures)] if failures else other_disk_failure
        problem = (
            f"{len(missing)} of {len(tasks.arguments)} chunks are not written to {target.name}; the others are kept."
        )
        hint = "mend the cause and call save with the same path: it goes on with the missing chunks"
        error_class = UserCodeError if kind == "chunk" else FileError
        raise error_class(message(problem, got=" ".join(reason.split()), hint=hint))
    return folder


def _write_layout(tree: xr.DataTree, folder: Path) -> None:
    """Write labels and metadata of all arrays, lazy ones without values."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store = recording_store(folder)
    for node in tree.subtree:
        dataset = node.to_dataset(inherit=False)
        encoding = dict.fromkeys(dataset.variables, _WRITE_EMPTY)
        options: dict[str, Any] = {"zarr_format": 2, "consolidated": False, "compute": False, "encoding": encoding}
        dataset.to_zarr(store, group=node.path, mode="a", **options)
    (folder / _RECORDS_FOLDER).mkdir()
    write_file(folder / _LAYOUT_SUMS, [json.dumps(store.sums).encode()])


def _compute_missing(
    region: Region, missing: Sequence[int], tasks: ChunkTasks, progress: Progress
) -> dict[int, Failure]:
    """Compute the missing chunks; return the kind and the text of the error of each chunk that failed."""
    if not missing:
        return {}
    dask = importlib.import_module("dask")
    write = dask.delayed(write_chunk)
    writers = {
        i: write(region, *tasks.arguments[i], dask_key_name=(f"{tasks.title}-write-{tasks.token}", i)) for i in missing
    }
    dask_client, failures = current_client(), {}
    if dask_client is None:
        outcomes = _outcomes_in_process(dask, region, writers)
    else:
        futures = dict(zip(dask_client.compute(list(writers.values())), writers, strict=True))
        outcomes = ((futures[future], outcome) for future, outcome in finished_results(dask_client, list(futures)))
    for chunk_number, outcome in outcomes:
        progress.advance()
        if isinstance(outcome, Exception):
            _check_connection(outcome)
            _, start, stop, _ = tasks.arguments[chunk_number][2]
            kind = "worker" if type(outcome).__name__ == "KilledWorker" else "chunk"
            reason = str(outcome) if isinstance(outcome, RnnlensError) else failed_samples_text((start, stop), outcome)
            outcome = kind, reason
        if outcome is not None:
            failures[chunk_number] = outcome
    return failures


def _outcomes_in_process(dask: Any, region: Region, writers: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
    """Compute chunks in this process; yield the number of each chunk with its result or exception."""
    try:
        outcomes = dask.compute(*writers.values())
    except Exception:  # data of the user that cannot be read: each chunk alone, so that the others are not lost
        outcomes = [_outcome_alone(dask, region, chunk_number, writer) for chunk_number, writer in writers.items()]
    yield from zip(writers, outcomes, strict=True)


def _outcome_alone(dask: Any, region: Region, chunk_number: int, writer: Any) -> Any:
    if _record_path(Path(region.folder), chunk_number).is_file():
        return None
    try:
        return dask.compute(writer)[0]
    except Exception as error:
        return error


def _check_connection(error: Exception) -> None:
    """Raise FileError if the connection to the scheduler is lost."""
    if type(error).__name__ in ("FutureCancelledError", "CancelledError", "CommClosedError"):
        raise FileError(
            "The connection to the Dask scheduler was lost before all chunks were written.",
            got=f"{type(error).__name__}: {error}",
            hint="connect a new Client and call save with the same path: it goes on with the missing chunks",
        ) from error


def write_chunk(region: Region, task: Any, model: Any, row_range: tuple[int, ...], *inputs: Any) -> Failure | None:
    """Compute one chunk and write its regions, then its record; return None, or the kind and the text of an error."""
    folder, chunk_number = Path(region.folder), row_range[0]
    try:
        chunk_values = task(model, row_range, *inputs)
    except Exception as error:
        return "chunk", str(error)
    store = recording_store(folder)
    try:
        group = zarr.open_group(store, mode="r+", zarr_format=2)
        for name, (path, axis) in region.destinations.items():
            array_values = chunk_values.kept[name]
            zarr_array = group[path.lstrip("/")].with_config(_WRITE_EMPTY)
            index = tuple(
                slice(row_range[1], row_range[2]) if i == axis else slice(None) for i in range(array_values.ndim)
            )
            zarr_array[index] = array_values
        chunk_record = {"sums": store.sums, "record": chunk_values.record()}
        write_file(_record_path(folder, chunk_number), [json.dumps(chunk_record, default=_json_default).encode()])
    except OSError as error:
        return "file", f"samples {row_range[1]} to {row_range[2] - 1}: {error}"
    return None


def _json_default(value: Any) -> Any:
    return np.asarray(value).tolist()


def _record_path(folder: Path, chunk_number: int) -> Path:
    return folder / _RECORDS_FOLDER / f"{chunk_number}.json"


def records_of(folder: Path, chunk_count: int) -> list[dict[str, Any]]:
    """Return the records of all chunks, in order."""
    return [json.loads(_record_path(folder, i).read_text())["record"] for i in range(chunk_count)]


def finish_folder(folder: Path, target: Path, chunk_count: int, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Add attributes, by path of a group or array, and checksums of all files; give the folder its name."""
    sums = json.loads((folder / _LAYOUT_SUMS).read_text())
    for chunk_number in range(chunk_count):
        sums |= json.loads(_record_path(folder, chunk_number).read_text())["sums"]
    shutil.rmtree(folder / _RECORDS_FOLDER)
    (folder / _LAYOUT_SUMS).unlink()
    store = recording_store(folder, sums)
    group = zarr.open_group(store, mode="r+", zarr_format=2)
    for path, attrs in attributes.items():
        node: Any = group[path.strip("/")] if path.strip("/") else group
        node.attrs.update(dict(attrs))
    zarr.consolidate_metadata(store, zarr_format=2)
    store.seal()
    with replacing_folder(target) as new_folder:
        new_folder.rmdir()
        os.rename(folder, new_folder)
