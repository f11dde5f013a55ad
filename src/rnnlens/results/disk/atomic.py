"""Old or new, never half: what is written takes its name in one step, once it is complete.

A new file or folder grows under a name of its own beside the old one, held by a lock that the system drops when the
process dies. Unlocked ones are what killed processes left behind; whoever saves next in that folder removes them.
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

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, and nothing that was left behind is removed
    fcntl = None  # type: ignore[assignment]

#: Begins the name of everything that is not complete.
TEMPORARY = ".rnnlens-tmp-"
#: Begins the name of an old folder while it steps aside, where two names cannot be swapped in one step.
ASIDE = ".rnnlens-old-"

_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def write_file(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write ``parts`` to the file ``target``, which keeps its permissions; an OSError leaves the old one as it was."""
    remove_leftovers(target.parent)
    temporary, lock = _claimed(target, folder=False)
    try:
        with os.fdopen(os.dup(lock), "wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        _keep_permissions(target, temporary)
        os.replace(temporary, target)
        _sync_folder(target.parent)
    finally:
        _remove(temporary)
        os.close(lock)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A new folder that takes the name ``target`` at the end, and vanishes if the block fails."""
    recover(target)
    remove_leftovers(target.parent)
    temporary, lock = _claimed(target, folder=True)
    try:
        yield temporary
        _keep_permissions(target, temporary)
        _switch(temporary, target)
    finally:
        _remove(temporary)
        os.close(lock)


def recover(target: Path) -> None:
    """Give a folder its name back whose replacement was killed halfway, where that takes two steps."""
    aside = _aside(target)
    if not os.path.lexists(target) and os.path.lexists(aside):
        with suppress(OSError), _unclaimed(aside):
            os.rename(aside, target)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder; what others are writing just now is locked, and stays."""
    if not fcntl:
        return
    with suppress(OSError):  # a folder that may not be listed
        for path in folder.iterdir():
            if path.name.startswith(TEMPORARY) and not path.is_symlink():
                with suppress(OSError), _unclaimed(path):
                    _remove(path)


def _claimed(target: Path, *, folder: bool) -> tuple[Path, int]:
    """A new file or folder beside the target, and the open lock on it; private where it replaces another."""
    private = target.exists()
    while True:
        path = target.with_name(f"{TEMPORARY}{uuid4().hex}")
        if folder:
            os.mkdir(path, 0o700 if private else 0o777)
            lock = os.open(path, os.O_RDONLY)
        else:
            lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.lexists(path):  # between its birth and the lock it may have been taken for a leftover
            return path, lock
        os.close(lock)


@contextmanager
def _unclaimed(path: Path) -> Iterator[None]:
    """Holds the lock of something that nobody is writing; BlockingIOError if somebody is."""
    lock = os.open(path, os.O_RDONLY)
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


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
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
