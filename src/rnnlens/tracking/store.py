"""``Store``: writes a run to disk as one Zarr group that grows by records and can be read at any time.

Layout, in format 3 of Zarr, which any Zarr library reads:

================================  ====================================================================
``/``                             attributes: version of rnnlens, times of opening, reason of the end
``/probe``, ``/batch``            records by kind; attributes: names of scalars, layers, arrays; notes with steps
``.../committed``                 number of complete records, and its checksum: written last, atomically
``.../sums``                      (step, array): checksum of each row of each array, in the order of ``arrays``
``.../step, epoch, written``      (step,)
``.../scalars``                   (step, scalar)
``.../layers/<layer>/<name>``     (step, ...); attributes: descriptions, and labels of the axes
================================  ====================================================================

Every ``zarr.json`` contains a checksum of itself. Files are replaced atomically, so that a reader finds the old or the
new one. Rows after ``committed`` are incomplete: readers ignore them, and the next writer cuts them off.
"""

from __future__ import annotations

import os
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import LocalStore

from ..errors import FileError
from ..results.disk.run_folder import SealedMetadata, read_metadata
from ..results.saving import check_schema, root_attrs
from ..results.training_run import is_run
from .records import KINDS, TrainingRecord
from .rows import Rows

try:
    import fcntl
except ImportError:  # Windows: two writers of one run are not detected
    fcntl = None  # type: ignore[assignment]

#: Open stores of this process, by folder.
_OPEN_STORES: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()


class Store:
    """Writer of the records of a run to a folder; a :class:`~rnnlens.tracking.records.Sink`.

    Parameters
    ----------
    path
        Path ending in ``.zarr``; parent folders are created. An existing run is continued.
    resume
        False replaces an existing run.
    points
        Largest number of points of a profile; longer ones are averaged over that many equal intervals. None keeps all.
    provenance
        Framework, versions, device.

    Raises
    ------
    FileError
        If the path exists and is no run, or another process is writing this run. A store of this process that was left
        open, as after Ctrl-C, is closed, and the new one continues the run.
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
        with _converted_os_errors(self.path):
            self._open(resume, provenance)

    def _open(self, resume: bool, provenance: Mapping[str, str] | None) -> None:
        _refuse_occupied_path(self.path)
        key = os.path.realpath(self.path)
        open_store = _OPEN_STORES.pop(key, None)
        if open_store is not None:  # from an interrupted training in this process
            open_store.close("interrupted")
        self.path.mkdir(parents=True, exist_ok=True)
        lock = _lock_folder(self.path)
        #: Releases the lock, also when an unclosed store is garbage-collected.
        self._unlock = weakref.finalize(self, lambda: None if lock is None else os.close(lock))
        remove_partial(self.path)
        if not resume:
            _remove_content(self.path)
        if not (self.path / "zarr.json").is_file():  # created with attributes, which make it a run at once
            attributes = root_attrs("run", {})
            zarr.create_group(SealedMetadata(LocalStore(self.path)), zarr_format=3, attributes=attributes)
        check_schema(read_metadata(self.path, "")["attributes"], self.path)
        self._root = zarr.open_group(SealedMetadata(LocalStore(self.path)), mode="r+", zarr_format=3)
        session = {"time": time.time(), "provenance": dict(provenance or {})}
        sessions = [*self._root.attrs.get("sessions", []), session]
        self._root.attrs.update({**root_attrs("run", {}), "sessions": sessions, "ended": None})
        self._closed = False
        self._folder_identity = _identity_of(self.path)
        self._earlier_gaps: list[Any] = list(self._root.attrs.get("gaps", []))
        self._gaps: list[Any] = []
        self._gaps_are_written = True
        _OPEN_STORES[key] = self
        self._kinds: dict[str, Rows] = {}
        for kind in (kind for kind in KINDS if kind in self._root):
            self._kinds[kind] = Rows(self._root[kind], self._points)

    @property
    def last_step(self) -> int | None:
        """Step of the last complete record; None for an empty run."""
        return max((kind.last_step for kind in self._kinds.values() if kind.last_step is not None), default=None)

    def last_step_of(self, kind: str) -> int | None:
        """Return the step of the last complete record of a kind; None without any."""
        return self._kinds[kind].last_step if kind in self._kinds else None

    def resume_step(self, steps_taken: int) -> int:
        """Return the training step to continue from, given the number of steps that the optimizer has taken.

        If the optimizer was restored to a step before the last record, training continues from there, and later
        records are dropped. If it has taken no step, counting continues from the last record.
        """
        last_step = self.last_step
        if last_step is None or steps_taken >= last_step:
            return steps_taken
        if steps_taken == 0:
            return last_step
        self.cut(steps_taken)
        return steps_taken

    def cut(self, step: int) -> int:
        """Drop the records after ``step``, because training continues from older weights; return their number."""
        return sum(kind.cut(step) for kind in self._kinds.values())

    def write(self, record: TrainingRecord) -> None:
        """Append a record, complete on disk on return; raise FileError if the run was closed or its folder replaced."""
        if self._closed:
            raise FileError("This run is closed.", got=str(self.path), hint="a different path for each training")
        self._check_folder()
        try:
            if record.kind not in self._kinds:
                self._kinds[record.kind] = Rows(self._root.require_group(record.kind), self._points)
            self._kinds[record.kind].append(record)
        except BaseException:
            # The state on disk is unknown: the next write reads it again.
            self._kinds.pop(record.kind, None)
            raise
        if not self._gaps_are_written:
            self.note_gaps(self._gaps)

    def note_gaps(self, gaps: Sequence[Sequence[Any]]) -> None:
        """Write which records are missing, and why; after a failure the next record writes them again."""
        self._gaps, self._gaps_are_written = [list(gap) for gap in gaps], False
        if self._closed:
            return
        self._check_folder()
        self._root.attrs.update({"gaps": self._earlier_gaps + self._gaps})
        self._gaps_are_written = True

    def close(self, reason: str) -> None:
        """Write the reason of the end, and release the lock of the run."""
        if self._closed:
            return
        self._closed = True
        try:
            self._check_folder()
            gaps = self._earlier_gaps + self._gaps
            self._root.attrs.update({"ended": {"time": time.time(), "reason": reason}, "gaps": gaps})
            for kind in self._kinds.values():
                kind.close()
        finally:
            self._unlock()

    def _check_folder(self) -> None:
        """Raise FileError if the folder of the run was removed or replaced meanwhile."""
        if _identity_of(self.path) != self._folder_identity or not (self.path / "zarr.json").is_file():
            problem = "The folder of this run was removed or replaced while it was being written."
            raise FileError(problem, got=str(self.path))


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder; None where there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _converted_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError within the block to a FileError of rnnlens."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        got = f"{path}: {error.strerror or error}"
        raise FileError("This run cannot be written.", got=got, expected="a folder to write to") from error


def _refuse_occupied_path(path: Path) -> None:
    if path.suffix.lower() != ".zarr":
        raise FileError("A run is a folder of Zarr.", got=str(path), expected="a path ending in .zarr")
    if path.is_file():
        raise FileError("A file exists where the run folder would be created.", got=str(path), hint="another name")
    if (
        path.is_dir()
        and any(path.iterdir())
        and not is_run(path)
        and not all(child.name == "zarr.json" or child.name.endswith(".partial") for child in path.iterdir())
    ):
        raise FileError("The folder exists and is not a run of rnnlens.", got=str(path), hint="another name")


def _lock_folder(path: Path) -> int | None:
    """Lock the folder until the process ends; return the open handle, or None on Windows."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FileError(
            "Another process is writing this run.", got=str(path), hint="a different path for each training"
        ) from None
    except OSError:  # a file system without locks
        pass
    return handle


def _remove_content(path: Path) -> None:
    """Remove the content of the folder of a run."""
    (path / "zarr.json").unlink(missing_ok=True)  # first, so that a partly removed folder is not taken for a run
    for child in path.iterdir():
        if child.is_dir():
            shutil.rmtree(child)


def remove_partial(path: Path) -> None:
    """Remove temporary files that a killed writer left."""
    for file in path.rglob("*.partial"):
        with suppress(OSError):
            file.unlink()
