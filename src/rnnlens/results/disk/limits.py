"""How large a file may be in memory, how deep, how long its texts, before it is refused unread."""

from __future__ import annotations

from pathlib import Path

from ...errors import FileError, TooLargeError, message
from ...settings import format_memory

#: Groups within groups.
DEPTH = 64
#: Variables and groups of one file.
COUNT = 100_000
#: Bytes of one attribute, or of one file of metadata: JSON grows some thirty times when it is read, and takes its time.
TEXT = 2 * 2**20
#: Bytes in memory of one label of any length: a reference, and a Python string.
LABEL = 80


def damaged(path: Path, what: str) -> FileError:
    """The error for a file that does not hold what it says."""
    return FileError(message("This file is damaged.", got=f"{path}: {what}"))


def foreign(path: Path, what: str) -> FileError:
    """The error for what rnnlens never writes, and could do harm."""
    return FileError(
        message("This file holds what rnnlens does not read.", got=f"{path}: {what}", expected="plain arrays")
    )


def check_size(path: Path, size: int, memory: int, *, lazily: bool = False) -> None:
    """Refuse to read arrays that exceed the memory granted.

    Raises
    ------
    TooLargeError
        If ``size`` is more than ``memory``.
    """
    if size <= memory:
        return
    enough = format_memory(size + size // 10)
    raise TooLargeError(
        message(
            "This file would not fit into the memory granted.",
            got=f"{path}: arrays of {format_memory(size)}",
            expected=f"at most {format_memory(memory)} (memory=)",
            hint=f'memory="{enough}"' + (" or lazy=True" if lazily else ""),
        )
    )
