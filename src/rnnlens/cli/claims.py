"""What a file claims to hold, compared with what it can hold before any of it is read.

A header of a hundred bytes can announce terabytes, and a compressed file of megabytes can unpack to gigabytes (a "zip
bomb"). Both are told by their headers.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import FileError, TooLargeError, message
from ..settings import current, format_memory

#: Deflate shrinks nothing but repetition more than this.
_LARGEST_RATIO = 500
#: Below, unpacking is a matter of a second.
_HARMLESS = 256 * 2**20


def check_unpacked(path: Path, sizes: list[tuple[int, int]]) -> None:
    """Refuse what unpacks to more than it plausibly holds.

    Parameters
    ----------
    path
        For the message.
    sizes
        Packed and unpacked bytes of each part.

    Raises
    ------
    FileError
        If the parts are more than 256 MiB, and more than 500 times as large as the file that holds them.
    """
    packed, unpacked = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    if unpacked > _HARMLESS and unpacked > _LARGEST_RATIO * packed:
        got = f"{path}: {format_memory(packed)} that would become {format_memory(unpacked)}"
        raise FileError(message("This file unpacks to far more than it holds.", got=got, hint="numpy.savez instead"))


def check_archive(path: Path) -> None:
    """Refuse a model or weights file in which such a bomb is hidden; one that is no archive passes.

    Raises
    ------
    FileError
        As :func:`check_unpacked`.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, [(part.compress_size, part.file_size) for part in archive.infolist()])


def check_fits(path: Path, size: int) -> None:
    """Refuse arrays that exceed the memory granted.

    Raises
    ------
    TooLargeError
        If ``size`` bytes are more than ``--memory`` or ``rl.options(memory=)`` allow.
    """
    if size > current().memory:
        raise TooLargeError(
            message(
                "These arrays are larger than the memory granted.",
                got=f"{path}: {format_memory(size)}",
                expected=f"at most {format_memory(current().memory)}",
                hint=f'--memory "{format_memory(size + size // 10)}"',
            )
        )


def check_header(path: Path, stream: IO[bytes], size: int) -> None:
    """Refuse a ``.npy`` whose header announces more than follows it; leaves the stream where it was.

    Raises
    ------
    FileError
        If the header is damaged, or announces other than ``size`` bytes, header included, can hold.
    """
    start = stream.tell()
    version: Any = np.lib.format.read_magic(stream)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(stream)
    claimed, there = int(np.prod(shape, dtype=object)) * dtype.itemsize, size - (stream.tell() - start)
    if claimed > there and not dtype.hasobject:
        got = f"{path}: {format_memory(claimed)} announced, {format_memory(there)} there"
        raise FileError(message("This data file is damaged.", got=got))
    stream.seek(start)
