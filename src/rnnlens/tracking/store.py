"""A run on disk: one Zarr group that grows record by record and can be read, whole, at every moment.

Layout, format 3 of Zarr, so that any reader of Zarr can look into it:

================================  ====================================================================
``/``                             attributes: what wrote it, when it was opened and how it ended
``/probe``, ``/batch``            records by kind; attributes: names of scalars, layers, arrays; notes with steps
``.../committed``                 how many records are complete, and a checksum of it: written last, in one step
``.../sums``                      (step, array): checksum of each row of each array, in the order of ``arrays``
``.../step, epoch, written``      (step,)
``.../scalars``                   (step, scalar)
``.../layers/<layer>/<name>``     (step, ...); attributes: words, and labels of its axes
================================  ====================================================================

Every ``zarr.json`` holds a checksum of itself. Every file is replaced, never changed, so that a reader finds the old or
the new one. What lies behind ``committed`` was half-written when its process died: readers do not look at it, and the
next writer cuts it off.
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

from ..errors import FileError, message
from ..results.disk.run_folder import SealedMetadata, read_metadata
from ..results.files import root_attrs
from ..results.training_run import is_run, refuse_newer
from .records import KINDS, TrainingRecord
from .rows import Rows

try:
    import fcntl
except ImportError:  # Windows: two writers of one run are not told apart there
    fcntl = None  # type: ignore[assignment]

#: Stores of this process that were not closed, by their folder.
_OPEN: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()


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
            attributes = root_attrs("run", {})
            zarr.create_group(SealedMetadata(LocalStore(self.path)), zarr_format=3, attributes=attributes)
        refuse_newer(self.path, read_metadata(self.path, "")["attributes"])
        self._root = zarr.open_group(SealedMetadata(LocalStore(self.path)), mode="r+", zarr_format=3)
        began = {"time": time.time(), "provenance": dict(provenance or {})}
        sessions = [*self._root.attrs.get("sessions", []), began]
        self._root.attrs.update({**root_attrs("run", {}), "sessions": sessions, "ended": None})
        self._closed = False
        self._folder = _identity(self.path)
        self._earlier_gaps: list[Any] = list(self._root.attrs.get("gaps", []))
        self._gaps: list[Any] = []
        self._gaps_are_written = True
        _OPEN[key] = self
        self._kinds: dict[str, Rows] = {}
        for kind in (kind for kind in KINDS if kind in self._root):
            self._kinds[kind] = Rows(self._root[kind], self._points)

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

    def write(self, record: TrainingRecord) -> None:
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
        self._check_folder()
        try:
            if record.kind not in self._kinds:
                self._kinds[record.kind] = Rows(self._root.require_group(record.kind), self._points)
            self._kinds[record.kind].append(record)
        except BaseException:
            # What is on disk of this record is unknown: the next one reads it anew.
            self._kinds.pop(record.kind, None)
            raise
        if not self._gaps_are_written:
            self.note_gaps(self._gaps)

    def note_gaps(self, gaps: Sequence[Sequence[Any]]) -> None:
        """Write which records are missing, and why; they are kept until they could be written."""
        self._gaps, self._gaps_are_written = [list(gap) for gap in gaps], False
        if self._closed:
            return
        self._check_folder()
        self._root.attrs.update({"gaps": self._earlier_gaps + self._gaps})
        self._gaps_are_written = True

    def close(self, reason: str) -> None:
        """Note how the run ended, and let another process go on with it."""
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
        """Refuse to write where the folder of the run was removed or replaced: the rest of it is gone.

        Raises
        ------
        FileError
            With its path.
        """
        if _identity(self.path) != self._folder or not (self.path / "zarr.json").is_file():
            what = "The folder of this run was removed or replaced while it was being written."
            raise FileError(message(what, got=str(self.path)))


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and number of a folder; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


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
    if path.is_dir() and any(path.iterdir()) and not is_run(path) and not _only_begun(path):
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
