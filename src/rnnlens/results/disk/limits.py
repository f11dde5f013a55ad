"""Limits on size, depth and length of texts of a file, checked before it is read."""

from __future__ import annotations

from pathlib import Path

from ...errors import FileError, TooLargeError
from ...settings import format_memory

#: Groups within groups.
DEPTH = 64
#: Variables and groups of one file.
COUNT = 100_000
#: Bytes of one attribute, or of one metadata file: parsed JSON takes about thirty times the memory of its text.
TEXT = 2 * 2**20
#: Assumed bytes in memory of one text label: a reference and a Python string.
LABEL = 80


def damaged(path: Path, what: str) -> FileError:
    """Build the FileError for a file whose content does not match its metadata or checksums."""
    return FileError("This file is damaged.", got=f"{path}: {what}")


def foreign(path: Path, what: str) -> FileError:
    """Build the FileError for content that rnnlens never writes and that could do harm."""
    return FileError(
        "This file contains something that rnnlens does not read.", got=f"{path}: {what}", expected="plain arrays"
    )


def check_size(path: Path, size: int, memory: int, *, lazily: bool = False) -> None:
    """Raise TooLargeError if arrays of ``size`` bytes exceed ``memory``."""
    if size <= memory:
        return
    enough = format_memory(size + size // 10)
    raise TooLargeError(
        "This file is larger than the memory limit.",
        got=f"{path}: arrays of {format_memory(size)}",
        expected=f"at most {format_memory(memory)} (memory=)",
        hint=f'memory="{enough}"' + (" or lazy=True" if lazily else ""),
    )
