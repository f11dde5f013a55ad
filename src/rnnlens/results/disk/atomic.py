"""Old or new, never half: what is written takes its name in one step, once it is complete.

What is new grows in a folder of its own beside the old one, held by a lock that the system drops when the process dies.
Unlocked ones are what killed processes left behind; whoever saves next in that folder removes them. Only folders are
locked: HDF5 locks the files that it reads, and would be refused what is locked already.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, so nothing that was left behind is removed
    fcntl = None  # type: ignore[assignment]

#: Begins the name of everything that is not complete.
TEMPORARY = ".rnnlens-tmp-"
#: Begins the name of an old folder while it steps aside, where two names cannot be swapped in one step.
ASIDE = ".rnnlens-old-"

_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
#: What file systems say that have no locks, or none for folders (NFS): there, too, what is left behind stays.
_NO_LOCKS = (*_UNSUPPORTED, errno.ENOLCK, errno.EBADF)


def write_file(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write ``parts`` to the file ``target``, which keeps its permissions; an OSError leaves the old one as it was."""
    remove_leftovers(target.parent)
    with _claimed(target, private=True) as folder:
        new = folder / "new"
        with new.open("xb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        _keep_permissions(target, new)
        os.replace(new, target)
        _sync_folder(target.parent)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A new folder that takes the name ``target`` at the end, and vanishes if the block fails."""
    recover(target)
    remove_leftovers(target.parent)
    with _claimed(target, private=target.exists()) as folder:
        yield folder
        _keep_permissions(target, folder)
        _switch(folder, target)


def recover(target: Path) -> None:
    """Give a folder its name back whose replacement was killed halfway, where that takes two steps."""
    aside = _aside(target)
    if not os.path.lexists(target) and os.path.lexists(aside):
        with suppress(OSError), _unclaimed(aside) as certain:
            if certain:
                os.rename(aside, target)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder; what others are writing just now is locked, and stays."""
    with suppress(OSError):  # a folder that may not be listed
        for path in folder.iterdir():
            if path.name.startswith(TEMPORARY) and not path.is_symlink():
                with suppress(OSError), _unclaimed(path) as certain:
                    if certain:
                        _remove(path)


@contextmanager
def _claimed(target: Path, *, private: bool) -> Iterator[Path]:
    """A new folder beside the target, locked; what then has its name is removed at the end."""
    path, lock = _new_folder(target, 0o700 if private else 0o777)
    try:
        yield path
    finally:
        _remove(path)
        if lock is not None:
            os.close(lock)


def _new_folder(target: Path, mode: int) -> tuple[Path, int | None]:
    """A folder, and the open lock on it; another one if it was taken for a leftover between its birth and the lock."""
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
def _unclaimed(path: Path) -> Iterator[bool]:
    """Holds the lock of a folder, and whether it could; BlockingIOError if somebody is writing it."""
    if not fcntl:
        yield False
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield _lock(handle, wait=False)
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock a folder for oneself; False where the file system has no locks for it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _keep_permissions(old: Path, new: Path) -> None:
    """Owner and mode of what is replaced; what has no forerunner keeps those that the system gave it."""
    try:
        found = os.stat(old)
    except FileNotFoundError:
        return
    with suppress(OSError):  # only root can give files away
        os.chown(new, found.st_uid, found.st_gid)
    os.chmod(new, stat.S_IMODE(found.st_mode))


def _switch(new: Path, target: Path) -> None:
    """The new folder gets the name; the old one ends under the new one's, or under none."""
    if not target.exists():
        os.rename(new, target)
    elif not _swap_names(new, target):
        aside = _aside(target)
        with _unclaimed(target):  # nobody takes it for the rest of a killed process meanwhile
            os.rename(target, aside)
            try:
                os.rename(new, target)
            except BaseException:
                os.rename(aside, target)
                raise
            _remove(aside)


def _swap_names(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if sys.platform == "win32":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
        failed = libc.renameat2(here, names[0], here, names[1], exchange)
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, 2)  # RENAME_SWAP of macOS
    else:
        return False
    code = ctypes.get_errno()
    if failed and code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), str(other))
    return not failed


def _aside(target: Path) -> Path:
    return target.with_name(f"{ASIDE}{target.name}")


def _sync_folder(folder: Path) -> None:
    """Have the new name itself survive a power cut, where the system can promise that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Where one of the writers of a Zarr folder failed, the others may still put files into it for a moment.
        for _ in range(40):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                break
            time.sleep(0.05)
    else:
        path.unlink(missing_ok=True)
