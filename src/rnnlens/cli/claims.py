"""Checks of the sizes that a file declares in its headers, before its content is read.

A header of a hundred bytes can announce terabytes, and a compressed file of megabytes can unpack to gigabytes (a "zip
bomb"). Both show in the headers.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import FileError, TooLargeError
from ..settings import current, format_memory

#: Compression ratio that Deflate exceeds only for repetitive data.
_LARGEST_RATIO = 500
#: Size below which any file is unpacked.
_HARMLESS = 256 * 2**20


def check_unpacked(path: Path, sizes: list[tuple[int, int]]) -> None:
    """Refuse a file that unpacks to an implausibly large size.

    Parameters
    ----------
    path
        Path of the file, for the message.
    sizes
        Packed and unpacked bytes of each part.

    Raises
    ------
    FileError
        If the unpacked parts exceed 256 MiB, and 500 times their packed size.
    """
    packed, unpacked = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    if unpacked > _HARMLESS and unpacked > _LARGEST_RATIO * packed:
        got = f"{path}: {format_memory(packed)} that would become {format_memory(unpacked)}"
        raise FileError("This file unpacks to far more than it holds.", got=got, hint="numpy.savez instead")


def check_archive(path: Path) -> None:
    """Refuse a model or weights file that is a zip bomb; files that are no zip archive pass.

    Raises
    ------
    FileError
        In the same cases as :func:`check_unpacked`.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, [(part.compress_size, part.file_size) for part in archive.infolist()])


def check_fits(path: Path, size: int) -> None:
    """Refuse arrays that exceed the memory limit.

    Raises
    ------
    TooLargeError
        If ``size`` bytes are more than ``--memory`` or ``rl.options(memory=)`` allow.
    """
    if size > current().memory:
        raise TooLargeError(
            "These arrays are larger than the memory granted.",
            got=f"{path}: {format_memory(size)}",
            expected=f"at most {format_memory(current().memory)}",
            hint=f'--memory "{format_memory(size + size // 10)}"',
        )


def check_header(path: Path, stream: IO[bytes], size: int) -> None:
    """Refuse a ``.npy`` whose header declares more data than follows; restore the position of the stream.

    Raises
    ------
    FileError
        If the header declares more data than ``size`` bytes, header included, contain.
    """
    start = stream.tell()
    version: Any = np.lib.format.read_magic(stream)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(stream)
    claimed, there = int(np.prod(shape, dtype=object)) * dtype.itemsize, size - (stream.tell() - start)
    if claimed > there and not dtype.hasobject:
        got = f"{path}: {format_memory(claimed)} announced, {format_memory(there)} there"
        raise FileError("This data file is damaged.", got=got)
    stream.seek(start)
