"""Files of results: replaced completely or not at all, and checked against limits before they are read.

New content is written to a locked temporary folder beside the old one. The system releases the lock when the process
ends, so unlocked temporary folders are leftovers of killed processes; the next save removes them. Only folders are
locked, because HDF5 locks the files that it reads, and would fail on a locked file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ...errors import FileError, TooLargeError
from ...settings import format_memory

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, so leftovers are not removed
    fcntl = None  # type: ignore[assignment]

#: Prefix of the names of temporary folders.
TEMPORARY = ".rnnlens-tmp-"
#: Prefix of the name of an old folder during its replacement, where two names cannot be swapped in one step.
ASIDE = ".rnnlens-old-"

_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
#: Error codes of file systems without locks, or without locks on folders (NFS); leftovers are not removed there.
_NO_LOCKS = (*_UNSUPPORTED, errno.ENOLCK, errno.EBADF)


def write_file(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write ``parts`` to the file ``target`` atomically, keeping its permissions; an error leaves the old one."""
    remove_leftovers(target.parent)
    with _locked_new_folder(target, private=True) as folder:
        new_file = folder / "new"
        with new_file.open("xb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        _keep_permissions(target, new_file)
        os.replace(new_file, target)
        _sync_folder(target.parent)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that replaces ``target`` when the block ends, and is removed if the block raises."""
    recover(target)
    remove_leftovers(target.parent)
    with _locked_new_folder(target, private=target.exists()) as folder:
        yield folder
        _keep_permissions(target, folder)
        _replace_folder(folder, target)


def recover(target: Path) -> None:
    """Rename the old folder back if its replacement was killed between the two renames."""
    aside_path = target.with_name(f"{ASIDE}{target.name}")
    if not os.path.lexists(target) and os.path.lexists(aside_path):
        with suppress(OSError), _folder_lock(aside_path) as is_locked:
            if is_locked:
                os.rename(aside_path, target)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders that killed processes left behind. Folders still being written are locked and stay."""
    with suppress(OSError):  # a folder that may not be listed
        for path in folder.iterdir():
            if path.name.startswith(TEMPORARY) and not path.is_symlink():
                with suppress(OSError), _folder_lock(path) as is_locked:
                    if is_locked:
                        _remove(path)


@contextmanager
def _locked_new_folder(target: Path, *, private: bool) -> Iterator[Path]:
    """Yield a new locked temporary folder beside the target; on exit remove the folder that then has its name."""
    path, lock = _new_folder(target, 0o700 if private else 0o777)
    try:
        yield path
    finally:
        _remove(path)
        if lock is not None:
            os.close(lock)


def _new_folder(target: Path, mode: int) -> tuple[Path, int | None]:
    """Create a temporary folder that no other process removes; return its path and lock, None without locks."""
    while True:
        path = target.with_name(f"{TEMPORARY}{uuid4().hex}")
        os.mkdir(path, mode)
        if not fcntl:
            return path, None
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        except BaseException:
            _remove(path)
            raise
        _lock(lock, wait=True)
        if os.path.lexists(path):
            return path, lock
        os.close(lock)


@contextmanager
def _folder_lock(path: Path) -> Iterator[bool]:
    """Lock a folder within the block; yield False without locks, raise BlockingIOError if another process has it."""
    if not fcntl:
        yield False
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield _lock(handle, wait=False)
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open folder against other processes; return False if the file system does not support locks.

    Raises ``OSError`` if another process holds the lock and ``wait`` is False.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _keep_permissions(old: Path, new: Path) -> None:
    """Copy owner and mode of the old path to the new one; do nothing if the old one does not exist."""
    try:
        status = os.stat(old)
    except FileNotFoundError:
        return
    with suppress(OSError):  # only root can give files away
        os.chown(new, status.st_uid, status.st_gid)
    os.chmod(new, stat.S_IMODE(status.st_mode))


def _replace_folder(new: Path, target: Path) -> None:
    """Rename the new folder to the target; the old target gets the new folder's former name, or is removed."""
    if not target.exists():
        os.rename(new, target)
    elif not _swap_names(new, target):
        aside_path = target.with_name(f"{ASIDE}{target.name}")
        with _folder_lock(target):  # locked, so that no other process removes it as a leftover
            os.rename(target, aside_path)
            try:
                os.rename(new, target)
            except BaseException:
                os.rename(aside_path, target)
                raise
            _remove(aside_path)


def _swap_names(first: Path, second: Path) -> bool:
    """Exchange two names in one system call; return False where the system does not support it."""
    if sys.platform == "win32":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if hasattr(libc, "renameat2"):
        current_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
        has_failed = libc.renameat2(current_folder, names[0], current_folder, names[1], exchange)
    elif hasattr(libc, "renamex_np"):
        has_failed = libc.renamex_np(*names, 2)  # RENAME_SWAP of macOS
    else:
        return False
    code = ctypes.get_errno()
    if has_failed and code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), str(second))
    return not has_failed


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk so that a rename survives a power cut, where the system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


#: Groups within groups.
DEPTH_LIMIT = 64
#: Variables and groups of one file.
COUNT_LIMIT = 100_000
#: Bytes of one attribute, or of one metadata file: parsed JSON takes about thirty times the memory of its text.
TEXT_LIMIT = 2 * 2**20
#: Assumed bytes in memory of one text label: a reference and a Python string.
LABEL_BYTES = 80


def damaged_file_error(path: Path, problem: str) -> FileError:
    """Create the FileError for a file whose content does not match its metadata or checksums."""
    return FileError("This file is damaged.", got=f"{path}: {problem}")


def foreign_content_error(path: Path, content: str) -> FileError:
    """Create the FileError for content that rnnlens never writes and that could do harm."""
    return FileError(
        "This file contains something that rnnlens does not read.", got=f"{path}: {content}", expected="plain arrays"
    )


def check_size(path: Path, size: int, memory: int, *, can_be_lazy: bool = False) -> None:
    """Raise TooLargeError if arrays of ``size`` bytes exceed ``memory``."""
    if size <= memory:
        return
    sufficient_memory = format_memory(size + size // 10)
    raise TooLargeError(
        "This file is larger than the memory limit.",
        got=f"{path}: arrays of {format_memory(size)}",
        expected=f"at most {format_memory(memory)} (memory=)",
        hint=f'memory="{sufficient_memory}"' + (" or lazy=True" if can_be_lazy else ""),
    )
