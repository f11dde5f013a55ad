"""Data files of the command line: ``.npz`` and ``.npy``, read without unpickling once their declared sizes are checked.

A header of a hundred bytes can announce terabytes, and a compressed file of megabytes can unpack to gigabytes (a "zip
bomb"). Both show in the headers.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import FileError, InputError, RnnlensError, TooLargeError, did_you_mean
from ..settings import current, format_memory

#: Compression ratio that Deflate exceeds only for repetitive data.
_LARGEST_RATIO = 500
#: Size below which any file is unpacked.
_ALWAYS_UNPACKED = 256 * 2**20


@dataclass(frozen=True)
class Data:
    """One batch read from a file. ``x`` is a tuple if the model has several inputs."""

    x: Any
    y: Any = None
    sample_weight: Any = None

    def __str__(self) -> str:
        descriptions = []
        for name, field_value in (("x", self.x), ("y", self.y), ("sample_weight", self.sample_weight)):
            arrays = field_value if isinstance(field_value, tuple) else () if field_value is None else (field_value,)
            descriptions += [f"{name} of shape {' and '.join(str(array.shape) for array in arrays)}"] * bool(arrays)
        return ", ".join(descriptions)

    def head(self, count: int | None) -> Data:
        """Return the first ``count`` samples; all of them for None."""
        if count is None:
            return self
        if count < 1:
            raise InputError("The number of samples must be positive.", got=f"--samples {count}")
        return Data(
            _first_samples(self.x, count), _first_samples(self.y, count), _first_samples(self.sample_weight, count)
        )


def read_data(
    path: Path, x: Sequence[str] | None = None, y: Sequence[str] | None = None, sample_weight: str | None = None
) -> Data:
    """Read one batch: arrays ``x``, ``y`` and ``sample_weight`` unless others are named; x of a file with one array.

    Raise FileError if the file cannot be read, declares more data than it has, or contains Python objects, which could
    run code; TooLargeError if the arrays exceed the memory granted; InputError if there is no array of that name.
    """
    with _open_arrays(path) as arrays:
        stored_names = list(arrays)
        names = list(x or (["x"] if "x" in stored_names or len(stored_names) != 1 else stored_names))
        targets = list(y or (["y"] if "y" in stored_names else []))
        weights = [sample_weight] if sample_weight else ["sample_weight"] if "sample_weight" in stored_names else []
        requested_names = [*names, *targets, *weights]
        for name in requested_names:
            if name not in stored_names:
                hint = did_you_mean(name, stored_names)
                if x is None and name == "x":
                    hint = f"--x NAME --y NAME, with names from the file: {', '.join(stored_names)}"
                raise InputError(f"No array named {name!r} in {path}.", hint=hint)
        _check_fits(path, sum(arrays.size(name) for name in dict.fromkeys(requested_names)))
        arrays_by_name = {name: arrays.read(name) for name in dict.fromkeys(requested_names)}
    field_arrays = [tuple(arrays_by_name[name] for name in field) or None for field in (names, targets, weights)]
    return Data(*(field[0] if field is not None and len(field) == 1 else field for field in field_arrays))


class _Arrays:
    """Arrays of an open ``.npy`` or ``.npz`` by name; each is read only on request."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path, self.stream = path, stream
        magic = stream.read(4)
        if not magic:
            raise EOFError("No data left in file")
        if magic not in (b"\x93NUM", b"PK\x03\x04", b"PK\x05\x06"):
            raise ValueError("it is neither .npz nor .npy")
        stream.seek(0)
        self.archive = zipfile.ZipFile(stream) if magic.startswith(b"PK") else None
        members = self.archive.infolist() if self.archive else []
        self.members = {member.filename.removesuffix(".npy"): member for member in members}

    def __iter__(self) -> Iterator[str]:
        return iter(self.members if self.archive else ["x"])

    def size(self, name: str) -> int:
        """Return the size of an array in bytes, including its header."""
        return self.members[name].file_size if self.archive else self.path.stat().st_size

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Check the declared sizes of an array, then read it."""
        if self.archive is None:
            return self._load_checked(self.stream, self.size(name))
        member = self.members[name]
        _check_unpacked(self.path, [(member.compress_size, member.file_size)])
        return self._load_checked(io.BytesIO(self.archive.read(member)), member.file_size)

    def _load_checked(self, stream: IO[bytes], size: int) -> np.ndarray[Any, Any]:
        _check_header(self.path, stream, size)
        loaded_array: np.ndarray[Any, Any] = np.load(stream, allow_pickle=False)
        return loaded_array


@contextmanager
def _open_arrays(path: Path) -> Iterator[_Arrays]:
    """Open the arrays of a file; convert any exception to a FileError."""
    try:
        if not path.is_file():
            expected = "a .npz file, as numpy.savez writes"
            hint = "numpy.savez('data.npz', x=x, y=y), with x of shape (sample, time, feature)"
            raise FileError("There is no such data file.", got=str(path), expected=expected, hint=hint)
        with path.open("rb") as stream:
            yield _Arrays(path, stream)
    except RnnlensError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise different exceptions for damaged files
        reason = str(error)
        if "Object arrays" in reason:
            reason = "it holds Python objects, which could run code on loading"
        expected = "plain arrays, saved with numpy.savez(path, x=..., y=...)"
        hint = "numpy.savez('data.npz', x=x, y=y), with x of shape (sample, time, feature)"
        raise FileError(
            "This data file cannot be read.", got=f"{path}: {reason}", expected=expected, hint=hint
        ) from error


def _first_samples(arrays: Any, count: int) -> Any:
    if arrays is None:
        return None
    return tuple(a[:count] for a in arrays) if isinstance(arrays, tuple) else arrays[:count]


def _check_unpacked(path: Path, sizes: list[tuple[int, int]]) -> None:
    """Raise FileError if the parts, of (packed, unpacked) bytes, exceed 256 MiB and 500 times their packed size."""
    packed_bytes, unpacked_bytes = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
    if unpacked_bytes > _ALWAYS_UNPACKED and unpacked_bytes > _LARGEST_RATIO * packed_bytes:
        got = f"{path}: {format_memory(packed_bytes)} that would become {format_memory(unpacked_bytes)}"
        raise FileError("This file unpacks to far more than it holds.", got=got, hint="numpy.savez instead")


def check_archive(path: Path) -> None:
    """Raise FileError for a zip archive that :func:`_check_unpacked` refuses; other files pass."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            _check_unpacked(path, [(member.compress_size, member.file_size) for member in archive.infolist()])


def _check_fits(path: Path, size: int) -> None:
    """Raise TooLargeError if ``size`` bytes are more than ``--memory`` or ``rl.options(memory=)`` allow."""
    if size > current().memory:
        raise TooLargeError(
            "These arrays are larger than the memory granted.",
            got=f"{path}: {format_memory(size)}",
            expected=f"at most {format_memory(current().memory)}",
            hint=f'--memory "{format_memory(size + size // 10)}"',
        )


def _check_header(path: Path, stream: IO[bytes], size: int) -> None:
    """Raise FileError if the header of a ``.npy`` of ``size`` bytes declares more data; restore its position."""
    start = stream.tell()
    version: Any = np.lib.format.read_magic(stream)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(stream)
    declared_bytes, present_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize, size - (stream.tell() - start)
    if declared_bytes > present_bytes and not dtype.hasobject:
        got = f"{path}: {format_memory(declared_bytes)} announced, {format_memory(present_bytes)} there"
        raise FileError("This data file is damaged.", got=got)
    stream.seek(start)
