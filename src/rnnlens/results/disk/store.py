"""Zarr folders with a list of checksums: every file is verified when it is read.

The list, ``.rnnlens-sha256`` in the root, has the format of ``sha256sum --check``. It is written last. Every file is
verified when it is read, also long after the folder was opened: a file that is missing, damaged, or part of another
result that replaced the folder meanwhile, raises an error.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any

import numpy as np
from zarr.abc.store import Store
from zarr.storage import LocalStore, WrapperStore

from . import (
    COUNT_LIMIT,
    DEPTH_LIMIT,
    LABEL_BYTES,
    TEXT_LIMIT,
    check_size,
    damaged_file_error,
    foreign_content_error,
    write_file,
)

MANIFEST = ".rnnlens-sha256"
#: Files that are read as JSON. The root's .zmetadata, a copy of them for other readers, is not read.
_METADATA = (".zgroup", ".zarray", ".zattrs")
_CHUNK_NAME = re.compile(r"\d+([./]\d+)*")
_COMPRESSORS = (None, "blosc", "zstd")
_ESCAPE_MARK = "\\"
_TEXT_FILTER = {"id": "vlen-utf8"}


class PendingWrites:
    """Number of files that threads of Zarr are writing now; none may begin after :meth:`stop`."""

    def __init__(self) -> None:
        self.condition, self.count, self.stopped = Condition(), 0, False

    @contextmanager
    def count_write(self) -> Iterator[None]:
        """Count one file as being written during the block; raise OSError after :meth:`stop`."""
        with self.condition:
            if self.stopped:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            self.count += 1
        try:
            yield
        finally:
            with self.condition:
                self.count -= 1
                self.condition.notify_all()

    def stop(self, seconds: float = 10.0) -> None:
        """Refuse further files, and wait at most ``seconds`` until the files being written are complete."""
        with self.condition:
            self.stopped = True
            self.condition.wait_for(lambda: self.count == 0, seconds)


class RecordingStore(WrapperStore):  # type: ignore[misc]
    """Zarr store for writing: it records the SHA-256 of every file written."""

    def __init__(self, store: Any, sums: dict[str, str] | None = None, pending: PendingWrites | None = None) -> None:
        super().__init__(store)
        self.sums: dict[str, str] = {} if sums is None else sums
        self.pending = PendingWrites() if pending is None else pending

    def _with_store(self, store: Any) -> RecordingStore:
        return RecordingStore(store, self.sums, self.pending)

    async def set(self, key: str, value: Any) -> None:
        """Write one file and record its checksum."""
        with self.pending.count_write():
            await self._store.set(key, value)
        self.sums[key] = _digest(value.to_bytes())

    async def set_if_not_exists(self, key: str, value: Any) -> None:
        """Write one file and record its checksum, unless the file exists."""
        if not await self._store.exists(key):
            await self.set(key, value)

    async def _set_many(self, values: Any) -> None:
        await Store._set_many(self, values)

    async def delete(self, key: str) -> None:
        """Delete one file and its checksum."""
        await self._store.delete(key)
        self.sums.pop(key, None)

    def seal(self) -> None:
        """Write the list of checksums; no file may be written afterwards."""
        lines = [_format_line(key, digest) for key, digest in sorted(self.sums.items())]
        write_file(Path(self._store.root) / MANIFEST, ["".join(lines).encode()])


def recording_store(root: Path, sums: dict[str, str] | None = None) -> RecordingStore:
    """Return a store that writes to the folder ``root``; ``sums`` are checksums recorded earlier."""
    return RecordingStore(LocalStore(root), sums)


@contextmanager
def new_recording_store(root: Path) -> Iterator[RecordingStore]:
    """Yield a store that writes to the new folder ``root``; after an error nothing is written there any more.

    Zarr writes files side by side: where one fails, others would still create the folder again after its removal.
    """
    store = recording_store(root)
    try:
        yield store
    except BaseException:
        store.pending.stop()
        raise


@dataclass(frozen=True)
class DeclaredSizes:
    """Sizes that an array's metadata declares: bytes of all, of one of ``count`` chunks, and of one unpacked."""

    size: int
    chunk: int
    count: int
    compressor: str | None
    max_unpacked: int

    def unpacked_size(self, chunk: bytes) -> float:
        """Return the number of bytes that a chunk unpacks to, as declared in its header."""
        if self.compressor == "blosc":
            return int.from_bytes(chunk[4:8], "little")
        return _zstd_size(chunk) if self.compressor == "zstd" else len(chunk)


class VerifyingStore(WrapperStore):  # type: ignore[misc]
    """Read-only Zarr store that verifies every file by ``keys``, the checksums by path (None without a list)."""

    def __init__(self, store: Any, keys: Mapping[str, str | None], arrays: Mapping[str, DeclaredSizes]) -> None:
        super().__init__(store)
        self.keys, self.arrays = keys, arrays

    @property
    def sealed(self) -> bool:
        """True if the folder has a list of checksums."""
        return None not in self.keys.values()

    def _with_store(self, store: Any) -> VerifyingStore:
        return VerifyingStore(store, self.keys, self.arrays)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Read and verify one file; return None if the folder has no such file."""
        if byte_range is not None:
            raise NotImplementedError("A chunk of the file has no checksum.")
        if key not in self.keys:
            return None
        file = await self._store.get(key, prototype)
        root = Path(self._store.root)
        if file is None:
            raise damaged_file_error(root, f"{key} is missing")
        content, expected_digest = file.to_bytes(), self.keys[key]
        if expected_digest is not None and _digest(content) != expected_digest:
            raise damaged_file_error(root, f"the checksum of {key} does not match")
        array = self.arrays.get(_array_of(key))
        if array is not None and array.unpacked_size(content) > array.max_unpacked:
            raise damaged_file_error(root, f"{key} decompresses to more than declared")
        return file

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Any]:
        """Read several files; parts of files are refused, because they have no checksum."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def _get_many(self, requests: Any) -> AsyncIterator[tuple[str, Any]]:
        for key, prototype, byte_range in requests:
            yield key, await self.get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        """Return whether the folder has a file ``key``."""
        return key in self.keys

    async def list(self) -> AsyncIterator[str]:
        """Yield the paths of all files."""
        for key in self.keys:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the paths of all files that start with ``prefix``."""
        for key in self.keys:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of the files and folders directly in a folder."""
        start = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        for name in dict.fromkeys(key[len(start) :].split("/")[0] for key in self.keys if key.startswith(start)):
            yield name


def verified_store(root: Path, memory: int, *, lazy: bool) -> VerifyingStore:
    """Check the metadata of a Zarr folder for foreign, missing or too large content; return a store to read it."""
    present_files, digest_by_file = set(_iter_files(root)), read_manifest(root)
    for key in (digest_by_file or {}).keys() - present_files:
        raise damaged_file_error(root, f"{key} is missing")
    keys: Mapping[str, str | None] = (
        dict.fromkeys(sorted(present_files - {MANIFEST})) if digest_by_file is None else digest_by_file
    )
    for key in keys:
        if key.rpartition("/")[2] in _METADATA:
            _check_small(root, key)
    arrays = {
        key.removesuffix(".zarray").rstrip("/"): _declared_sizes(root, key, keys[key], memory)
        for key in keys
        if key.rpartition("/")[2] == ".zarray"
    }
    total_size = sum(array.size for array in arrays.values())
    largest_chunk = max((array.chunk for array in arrays.values()), default=0)
    check_size(root, largest_chunk if lazy else max(total_size, largest_chunk), memory, can_be_lazy=not lazy)
    if digest_by_file is not None:
        _check_complete(root, keys, arrays)
    return VerifyingStore(LocalStore(root, read_only=True), keys, arrays)


def read_manifest(root: Path) -> dict[str, str] | None:
    """Read the list of checksums: path to SHA-256; None if there is no list."""
    try:
        text = (root / MANIFEST).read_text("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise damaged_file_error(root, "the list of checksums cannot be read") from error
    return dict(_parse_line(line) for line in text.split("\n") if line)


def _format_line(key: str, digest: str) -> str:
    """Format one line of the list of checksums as ``sha256sum`` does, with special characters in the name escaped."""
    escaped_key = key.replace("\\", "\\\\").replace("\n", "\\n")
    return f"{'' if escaped_key == key else _ESCAPE_MARK}{digest}  {escaped_key}\n"


def _parse_line(line: str) -> tuple[str, str]:
    digest, _, key = line.partition("  ")
    if digest.startswith(_ESCAPE_MARK):
        key = re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], key)
    return key, digest.removeprefix(_ESCAPE_MARK)


def root_attributes(root: Path) -> dict[str, Any]:
    """Read the attributes of the root without any check; return an empty mapping if they cannot be read."""
    try:
        attributes = json.loads(_read_small(root, ".zattrs"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _declared_sizes(root: Path, key: str, expected_digest: str | None, memory: int) -> DeclaredSizes:
    content = _read_small(root, key)
    if expected_digest is not None and _digest(content) != expected_digest:
        raise damaged_file_error(root, f"the checksum of {key} does not match")
    try:
        metadata = json.loads(content)
        shape, chunks = ([int(n) for n in metadata[name]] for name in ("shape", "chunks"))
        dtype, filters = np.dtype(str(metadata["dtype"])), metadata.get("filters") or []
        compressor = (metadata.get("compressor") or {}).get("id")
        axis_chunks = list(zip(shape, chunks, strict=True))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged_file_error(root, f"{key}: {type(error).__name__}: {error}") from error
    is_text = filters == [_TEXT_FILTER] and dtype.kind == "O"
    if compressor not in _COMPRESSORS or not (is_text or (not filters and dtype.kind in "biufcSU")):
        raise foreign_content_error(root, f"values of type {dtype} under {compressor}, {filters} in {key}")
    if min([1, *shape]) < 0 or min([1, *chunks]) < 1 or metadata.get("dimension_separator", ".") != ".":
        raise damaged_file_error(root, f"{key}: a shape of {shape} in chunks of {chunks}")
    itemsize = LABEL_BYTES if is_text else dtype.itemsize
    chunk = math.prod(chunks) * itemsize
    count = math.prod(-(-length // chunk_length) for length, chunk_length in axis_chunks)
    return DeclaredSizes(math.prod(shape) * itemsize, chunk, count, compressor, memory if is_text else chunk)


def _check_complete(root: Path, keys: Mapping[str, Any], arrays: Mapping[str, DeclaredSizes]) -> None:
    """Check that every chunk of every array is on the list of checksums."""
    listed_chunks = dict.fromkeys(arrays, 0)
    for key in keys:
        if (name := _array_of(key)) in listed_chunks:
            listed_chunks[name] += 1
    for name, array in arrays.items():
        if listed_chunks[name] != array.count:
            raise damaged_file_error(root, f"{name} declares {array.count} chunks and has {listed_chunks[name]}")


def _array_of(key: str) -> str:
    """Return the folder of the array that a chunk file belongs to; the key itself for other files."""
    folder, _, name = key.rpartition("/")
    return folder if _CHUNK_NAME.fullmatch(name) else key


def _iter_files(root: Path) -> Iterator[str]:
    """Yield the paths of all files below ``root``; refuse links and devices."""
    pending, folder_count = [("", 0)], 0
    while pending:
        prefix, depth = pending.pop()
        if depth > DEPTH_LIMIT:
            raise foreign_content_error(root, f"more than {DEPTH_LIMIT} folders within folders")
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                key = f"{prefix}{entry.name}"
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    folder_count += 1
                    pending.append((f"{key}/", depth + 1))
                elif stat.S_ISREG(mode):
                    yield key
                else:
                    raise foreign_content_error(root, f"a link or a device, {key}")
        if folder_count > COUNT_LIMIT:
            raise foreign_content_error(root, f"more than {COUNT_LIMIT} variables")


def _read_small(root: Path, key: str) -> bytes:
    """Read a metadata file, after checking that it is small."""
    _check_small(root, key)
    return (root / key).read_bytes()


def _check_small(root: Path, key: str) -> None:
    if (size := (root / key).stat().st_size) > TEXT_LIMIT:
        raise foreign_content_error(root, f"metadata of {size} bytes, {key}")


def _zstd_size(frame: bytes) -> float:
    """Return the field ``Frame_Content_Size`` of a zstd frame (RFC 8878, section 3.1.1.1); infinity if absent."""
    flags = frame[4] if len(frame) > 4 else 0
    is_single_segment = flags >> 5 & 1
    width = (is_single_segment, 2, 4, 8)[flags >> 6]
    start = 5 + (not is_single_segment) + (0, 1, 2, 4)[flags & 3]
    size = int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0)
    return size if width else math.inf


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
