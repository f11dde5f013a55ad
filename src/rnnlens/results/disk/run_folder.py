"""Reader of the folder of a watched training; every ``zarr.json`` and every row is verified by a checksum.

A run grows while it is read, so a list of files cannot be complete. Instead each ``zarr.json`` contains a checksum of
itself, and each record has a checksum of its row in every array; both are written before the record is counted. Chunks
are read here, not by Zarr: a chunk that declares more bytes than its array has is not unpacked, and no link, pipe or
device is opened. Damage is reported by row.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc
from zarr.abc.store import Store
from zarr.storage import WrapperStore

from ...errors import FileError
from ...typing import Array
from . import DEPTH_LIMIT, TEXT_LIMIT, check_size, damaged_file_error, foreign_content_error

#: Attribute of every ``zarr.json`` with its checksum.
SUM = "rnnlens_sum"
METADATA = "zarr.json"
#: Largest number of arrays of one kind of records, and of files of a run.
MOST_ARRAYS, MOST_FILES = 10_000, 500_000
#: Largest size in bytes of a chunk with more than one row.
MAX_CHUNK_BYTES = 2**20
#: Unless ``memory=`` is given, arrays of more bytes than this may be a thousand times as large as their files.
_USUAL_BYTES, _MAX_RATIO = 128 * 2**20, 1000
_DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
#: Elements whose checksums are computed at once.
_BLOCK_SIZE = 2**18
#: Multipliers of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 16).
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


# ---- checksums


def row_sums(rows: Array, path: str) -> Array:
    """Compute a 32-bit checksum of each row of an array: (step, ...) to (step,).

    The checksum is the sum over all values of a hash of value and position. The fill value, NaN or 0, contributes 0,
    so the checksum does not change when a later record makes an axis longer.
    """
    rows = np.ascontiguousarray(rows)
    filled_with_nan = rows.dtype.kind == "f"
    if rows.dtype.kind == "c":
        rows = rows.view(rows.real.dtype).reshape(*rows.shape, 2)
    keys = np.array([zlib.crc32(path.encode())], dtype=np.uint64)
    for axis, size in enumerate(rows.shape[1:], start=1):
        stride = _hash_integers(np.array([axis], dtype=np.uint64)) | np.uint64(1)
        keys = (keys[:, None] + np.arange(size, dtype=np.uint64) * stride).reshape(-1)
    keys, flat_rows = _hash_integers(keys), rows.reshape(len(rows), math.prod(rows.shape[1:]))
    sums = np.zeros(len(rows), dtype=np.uint64)
    for columns in _blocks(flat_rows.shape[1], _BLOCK_SIZE):
        for row_slice in _blocks(len(flat_rows), max(1, _BLOCK_SIZE // max(1, columns.stop - columns.start))):
            block = np.ascontiguousarray(flat_rows[row_slice, columns])
            bits = block.view(f"u{block.dtype.itemsize}").astype(np.uint64)
            is_filled = ~np.isnan(block) if filled_with_nan else block != 0
            sums[row_slice] += np.where(is_filled, _hash_integers(bits + keys[columns]), np.uint64(0)).sum(
                axis=1, dtype=np.uint64
            )
    return (sums >> np.uint64(32)).astype(np.uint32)


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _hash_integers(values: Array) -> Array:
    """Hash 64-bit integers elementwise by a bijection (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _M1
        values = (values ^ (values >> np.uint64(27))) * _M2
        return np.asarray(values ^ (values >> np.uint64(31)))


def committed_values(count: int) -> Array:
    """Return the array ``committed``: the number of complete records, and the checksum of that number."""
    number = np.array([count], dtype=np.uint64)
    return np.array([count, _hash_integers(number + np.uint64(1)).view(np.int64)[0]], dtype=np.int64)


def committed_count(values: Array, path: Path) -> int:
    """Return the number of complete records from the array ``committed``; raise FileError if its checksum differs."""
    if values.shape != (2,) or values[0] < 0 or not np.array_equal(committed_values(int(values[0])), values):
        raise damaged_file_error(path, "the number of its records does not match its checksum")
    return int(values[0])


def _digest(metadata: Mapping[str, Any]) -> str:
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class SealedMetadata(WrapperStore):  # type: ignore[misc]
    """Zarr store for writing a run: it adds to every ``zarr.json`` a checksum of its content."""

    def _with_store(self, store: Any) -> SealedMetadata:
        return SealedMetadata(store)

    async def set(self, key: str, value: Any) -> None:
        """Write one file; add the checksum if it is a ``zarr.json``."""
        if key.rpartition("/")[2] == METADATA:
            metadata = json.loads(value.to_bytes())
            attributes = metadata.setdefault("attributes", {})
            attributes.pop(SUM, None)
            content = json.dumps({**metadata, "attributes": {**attributes, SUM: _digest(metadata)}}).encode()
            if len(content) > TEXT_LIMIT:
                got = f"{len(content)} bytes in {key}"
                raise FileError("The metadata of this run exceeds its limit.", got=got)
            value = type(value).from_bytes(content)
        await self._store.set(key, value)

    async def set_if_not_exists(self, key: str, value: Any) -> None:
        """Write one file, unless it exists."""
        if not await self._store.exists(key):
            await self.set(key, value)

    async def _set_many(self, values: Any) -> None:
        await Store._set_many(self, values)


# ---- reading


def read_metadata(root: Path, key: str, *, sealed: bool = True) -> dict[str, Any]:
    """Read and verify the ``zarr.json`` of a group or an array; with ``sealed=False`` it may have no checksum."""
    content = _read_plain_file(root, f"{key}/{METADATA}" if key else METADATA, TEXT_LIMIT)
    try:
        metadata = json.loads(content)
        expected_sum = metadata.setdefault("attributes", {}).pop(SUM, None)
        matches = _digest(metadata) == expected_sum or (expected_sum is None and not sealed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged_file_error(root, f"the metadata of {key or 'the run'} cannot be read") from error
    if not matches:
        raise damaged_file_error(root, f"the metadata of {key or 'the run'} does not match its checksum")
    return dict(metadata)


def _read_plain_file(root: Path, key: str, max_bytes: float) -> bytes:
    """Read a plain file of at most ``max_bytes`` bytes. Links are not followed, pipes do not block."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(root / key, flags)
    except FileNotFoundError as error:
        raise damaged_file_error(root, f"{key} is missing") from error
    with open(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise foreign_content_error(root, f"a link or a device, {key}")
        if status.st_size > max_bytes:
            raise foreign_content_error(root, f"{status.st_size} bytes in {key}")
        return stream.read()


def chunk_files(root: Path, kind: str) -> dict[str, list[str]]:
    """List the chunk names of each array of one kind of records; refuse links, pipes, devices and too many files."""
    files_by_array: dict[str, list[str]] = {}
    entry_count = 0
    pending = [("", 0)]
    while pending:
        prefix, depth = pending.pop()
        if depth > DEPTH_LIMIT:
            raise foreign_content_error(root, f"more than {DEPTH_LIMIT} folders within folders")
        try:
            entries = os.scandir(root / prefix)
        except FileNotFoundError:
            continue
        with entries:
            for entry in entries:
                entry_count += 1
                key = f"{prefix}{entry.name}"
                if entry_count > MOST_FILES:
                    raise foreign_content_error(root, f"more than {MOST_FILES} files")
                if entry.is_dir(follow_symlinks=False):
                    pending.append((f"{key}/", depth + 1))
                elif entry.is_symlink() or not entry.is_file(follow_symlinks=False):
                    if entry.is_symlink() or os.path.lexists(root / key):  # else a temporary file of the writer
                        raise foreign_content_error(root, f"a link or a device, {key}")
                elif key.startswith(f"{kind}/") and "/c/" in key and not key.endswith(".partial"):
                    array, _, chunk = key.removeprefix(f"{kind}/").rpartition("/c/")
                    files_by_array.setdefault(array, []).append(chunk)
    return files_by_array


@dataclass(frozen=True)
class RunArray:
    """One array of a run in the folder ``key``, as declared by its metadata; the first axis is the step."""

    root: Path
    key: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    dims: tuple[str, ...]
    attrs: Mapping[str, Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, row_count: int, chunk_names: list[str]) -> tuple[Array, list[slice]]:
        """Return the first ``row_count`` rows of the chunks ``chunk_names``, and row ranges of unreadable chunks."""
        values = np.full((row_count, *self.shape[1:]), self.fill, dtype=self.dtype)
        unreadable_rows: list[slice] = []
        for name in chunk_names:
            chunk_index = [int(part) for part in name.split("/") if part.isascii() and part.isdigit()]
            if len(chunk_index) != len(self.shape):
                raise foreign_content_error(self.root, f"{self.key}/c/{name}")
            region = tuple(slice(i * size, (i + 1) * size) for i, size in zip(chunk_index, self.chunks, strict=True))
            if not all(s.start < size for s, size in zip(region, values.shape, strict=True)):
                continue
            chunk = self._chunk(name)
            target = values[region]
            if chunk is None:
                unreadable_rows.append(region[0])
            else:
                target[...] = chunk[tuple(slice(size) for size in target.shape)]
        return values, unreadable_rows

    def _chunk(self, name: str) -> Array | None:
        """Read and decompress one chunk; return None if it is damaged."""
        chunk_size = math.prod(self.chunks) * self.dtype.itemsize
        try:
            packed_chunk = _read_plain_file(self.root, f"{self.key}/c/{name}", chunk_size + 2**16)
            if int.from_bytes(packed_chunk[4:8], "little") != chunk_size or int.from_bytes(
                packed_chunk[12:16], "little"
            ) != len(packed_chunk):
                return None
            values: Array = np.frombuffer(blosc.decompress(packed_chunk), dtype=self.dtype).reshape(self.chunks)
        except FileError:
            raise
        except Exception:  # the decoder may raise anything for damaged bytes
            return None
        return values


def read_array(root: Path, key: str) -> RunArray:
    """Read and check the metadata of an array; raise FileError for arrays that rnnlens does not write."""
    metadata = read_metadata(root, key)
    try:
        shape = tuple(int(size) for size in metadata["shape"])
        chunks = tuple(int(size) for size in metadata["chunk_grid"]["configuration"]["chunk_shape"])
        codec_names = [codec["name"] for codec in metadata["codecs"]]
        dims = metadata.get("dimension_names") or [f"dim_{axis}" for axis in range(len(shape))]
        dtype_name, declared_fill = metadata["data_type"], metadata["fill_value"]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise damaged_file_error(root, f"{key}: {type(error).__name__}: {error}") from error
    is_supported = (
        dtype_name in _DTYPES and codec_names == ["bytes", "blosc"] and len(shape) == len(chunks) == len(dims) > 0
    )
    if not is_supported or min(shape) < 0 or min(chunks) < 1 or max(*shape, *chunks) > 2**40:
        raise foreign_content_error(root, f"values of type {dtype_name} under {codec_names} in {key}")
    dtype = np.dtype(dtype_name)
    fill_value = np.nan if declared_fill == "NaN" else 0
    array = RunArray(root, key, shape, chunks, dtype, fill_value, tuple(map(str, dims)), metadata["attributes"])
    if math.prod(chunks) * dtype.itemsize > max(MAX_CHUNK_BYTES, array.row_bytes):
        raise foreign_content_error(root, f"chunks of {math.prod(chunks)} values in {key}")
    return array


def check_total(root: Path, arrays: Mapping[str, RunArray], count: int, memory: int, *, memory_given: bool) -> None:
    """Raise TooLargeError if a run exceeds ``memory`` or, unless ``memory_given``, is much larger than its files."""
    total_size = sum(count * array.row_bytes for array in arrays.values())
    check_size(root, max([total_size, *(a.row_bytes for a in arrays.values())], default=0), memory)
    if not memory_given and total_size > _USUAL_BYTES:
        disk_size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        check_size(root, total_size, max(_USUAL_BYTES, _MAX_RATIO * disk_size))
