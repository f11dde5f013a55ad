"""Zarr folders with a list of checksums: what is read is what was written, all of it, and nothing else.

The list, ``.rnnlens-sha256`` in the root, is what ``sha256sum --check`` reads. It is written last. Every file is held
against it when it is read, also long after the folder was opened: a file that is missing, damaged, or of another result
that took the folder's name meanwhile, is an error rather than a number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from zarr.abc.store import Store
from zarr.storage import LocalStore, WrapperStore

from .atomic import write_file
from .limits import COUNT, DEPTH, LABEL, TEXT, check_size, damaged, foreign

MANIFEST = ".rnnlens-sha256"
#: What is read as JSON. The root's .zmetadata, which repeats them all for other readers, is not.
_METADATA = (".zgroup", ".zarray", ".zattrs")
_CHUNK = re.compile(r"\d+([./]\d+)*")
_COMPRESSORS = (None, "blosc", "zstd")
_ESCAPED = "\\"
_TEXTS = {"id": "vlen-utf8"}


class Recording(WrapperStore):  # type: ignore[misc]
    """A folder to write to that remembers the checksum of everything written."""

    def __init__(self, store: Any, sums: dict[str, str] | None = None) -> None:
        super().__init__(store)
        self.sums: dict[str, str] = {} if sums is None else sums

    def _with_store(self, store: Any) -> Recording:
        return Recording(store, self.sums)

    async def set(self, key: str, value: Any) -> None:
        """Write one file."""
        await self._store.set(key, value)
        self.sums[key] = _sum(value.to_bytes())

    async def set_if_not_exists(self, key: str, value: Any) -> None:
        """Write one file, unless it is there."""
        if not await self._store.exists(key):
            await self.set(key, value)

    async def _set_many(self, values: Any) -> None:
        await Store._set_many(self, values)

    async def delete(self, key: str) -> None:
        """Remove one file."""
        await self._store.delete(key)
        self.sums.pop(key, None)

    def seal(self) -> None:
        """Write the list of checksums; nothing may be written afterwards."""
        lines = [_line(key, digest) for key, digest in sorted(self.sums.items())]
        write_file(Path(self._store.root) / MANIFEST, ["".join(lines).encode()])


def recording(root: Path, sums: dict[str, str] | None = None) -> Recording:
    """A folder to write to; ``sums`` goes on with what was recorded before."""
    return Recording(LocalStore(root), sums)


@dataclass(frozen=True)
class Announced:
    """What an array says of itself.

    Attributes
    ----------
    size, chunk
        Bytes in memory, of all of it and of one chunk.
    count
        Number of chunks.
    compressor
        Name of the compression, or None.
    most
        Bytes that a chunk may unpack to.
    """

    size: int
    chunk: int
    count: int
    compressor: str | None
    most: int

    def unpacked(self, chunk: bytes) -> float:
        """Bytes that a compressed chunk says it unpacks to."""
        if self.compressor == "blosc":
            return int.from_bytes(chunk[4:8], "little")
        return _zstd_size(chunk) if self.compressor == "zstd" else len(chunk)


class Verified(WrapperStore):  # type: ignore[misc]
    """A folder to read from, of which nothing is believed that its list does not bear out.

    Parameters
    ----------
    store
        The folder.
    keys
        What it holds, by checksum; None where there is no list.
    arrays
        What the arrays announce, by folder.
    """

    def __init__(self, store: Any, keys: Mapping[str, str | None], arrays: Mapping[str, Announced]) -> None:
        super().__init__(store)
        self.keys, self.arrays = keys, arrays

    @property
    def sealed(self) -> bool:
        """Whether there is a list of checksums."""
        return None not in self.keys.values()

    def _with_store(self, store: Any) -> Verified:
        return Verified(store, self.keys, self.arrays)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """One file; None if there is none and none should be."""
        if byte_range is not None:
            raise NotImplementedError("A part of a file has no checksum.")
        if key not in self.keys:
            return None
        found = await self._store.get(key, prototype)
        root = Path(self._store.root)
        if found is None:
            raise damaged(root, f"{key} is missing")
        content, expected = found.to_bytes(), self.keys[key]
        if expected is not None and _sum(content) != expected:
            raise damaged(root, f"the checksum of {key} does not match")
        array = self.arrays.get(_array_of(key))
        if array is not None and array.unpacked(content) > array.most:
            raise damaged(root, f"{key} unpacks to more than announced")
        return found

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Any]:
        """Parts of files."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def _get_many(self, requests: Any) -> AsyncIterator[tuple[str, Any]]:
        for key, prototype, part in requests:
            yield key, await self.get(key, prototype, part)

    async def exists(self, key: str) -> bool:
        """Whether there is such a file."""
        return key in self.keys

    async def list(self) -> AsyncIterator[str]:
        """All files."""
        for key in self.keys:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All files whose path begins so."""
        for key in self.keys:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """What lies directly in a folder."""
        start = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        for name in dict.fromkeys(key[len(start) :].split("/")[0] for key in self.keys if key.startswith(start)):
            yield name


def verified(root: Path, memory: int, *, lazy: bool) -> Verified:
    """A folder to read from, once what it announces was looked at.

    Raises
    ------
    FileError
        If it leads elsewhere, holds what rnnlens never writes, or lacks a part.
    TooLargeError
        If its arrays (one chunk of them, where they are read lazily) exceed ``memory``.
    """
    there, listed = set(_files(root)), manifest(root)
    for key in (listed or {}).keys() - there:
        raise damaged(root, f"{key} is missing")
    keys: Mapping[str, str | None] = dict.fromkeys(sorted(there - {MANIFEST})) if listed is None else listed
    for key in keys:
        if key.rpartition("/")[2] in _METADATA:
            _check_small(root, key)
    arrays = {
        key.removesuffix(".zarray").rstrip("/"): _announced(root, key, keys[key], memory)
        for key in keys
        if key.rpartition("/")[2] == ".zarray"
    }
    total = sum(array.size for array in arrays.values())
    largest = max((array.chunk for array in arrays.values()), default=0)
    check_size(root, largest if lazy else max(total, largest), memory, lazily=not lazy)
    if listed is not None:
        _check_complete(root, keys, arrays)
    return Verified(LocalStore(root, read_only=True), keys, arrays)


def manifest(root: Path) -> dict[str, str] | None:
    """Checksums by file; None where there is no list."""
    try:
        text = (root / MANIFEST).read_text("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise damaged(root, "the list of checksums cannot be read") from error
    return dict(_entry(line) for line in text.split("\n") if line)


def _line(key: str, digest: str) -> str:
    """As ``sha256sum`` writes it: a backslash first says that some in the name are escapes."""
    escaped = key.replace("\\", "\\\\").replace("\n", "\\n")
    return f"{'' if escaped == key else _ESCAPED}{digest}  {escaped}\n"


def _entry(line: str) -> tuple[str, str]:
    digest, _, key = line.partition("  ")
    if digest.startswith(_ESCAPED):
        key = re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], key)
    return key, digest.removeprefix(_ESCAPED)


def root_attributes(root: Path) -> dict[str, Any]:
    """What the root says it is, before anything is checked; nothing if it cannot be read."""
    try:
        found = json.loads(_small(root, ".zattrs"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _announced(root: Path, key: str, expected: str | None, memory: int) -> Announced:
    content = _small(root, key)
    if expected is not None and _sum(content) != expected:
        raise damaged(root, f"the checksum of {key} does not match")
    try:
        found = json.loads(content)
        shape, chunks = ([int(n) for n in found[name]] for name in ("shape", "chunks"))
        kind, filters = np.dtype(str(found["dtype"])), found.get("filters") or []
        compressor = (found.get("compressor") or {}).get("id")
        pairs = list(zip(shape, chunks, strict=True))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(root, f"{key}: {type(error).__name__}: {error}") from error
    texts = filters == [_TEXTS] and kind.kind == "O"
    if compressor not in _COMPRESSORS or not (texts or (not filters and kind.kind in "biufcSU")):
        raise foreign(root, f"values of type {kind} under {compressor}, {filters} in {key}")
    if min([1, *shape]) < 0 or min([1, *chunks]) < 1 or found.get("dimension_separator", ".") != ".":
        raise damaged(root, f"{key}: a shape of {shape} in chunks of {chunks}")
    itemsize = LABEL if texts else kind.itemsize
    chunk, count = math.prod(chunks) * itemsize, math.prod(-(-length // part) for length, part in pairs)
    return Announced(math.prod(shape) * itemsize, chunk, count, compressor, memory if texts else chunk)


def _check_complete(root: Path, keys: Mapping[str, Any], arrays: Mapping[str, Announced]) -> None:
    """Every chunk of every array is on the list."""
    listed = dict.fromkeys(arrays, 0)
    for key in keys:
        if (name := _array_of(key)) in listed:
            listed[name] += 1
    for name, array in arrays.items():
        if listed[name] != array.count:
            raise damaged(root, f"{name} announces {array.count} parts and has {listed[name]}")


def _array_of(key: str) -> str:
    """The folder of the array that a chunk belongs to; the key itself for anything else."""
    folder, _, name = key.rpartition("/")
    return folder if _CHUNK.fullmatch(name) else key


def _files(root: Path) -> Iterator[str]:
    """All files below, by path; links and devices are refused."""
    waiting, seen = [("", 0)], 0
    while waiting:
        prefix, depth = waiting.pop()
        if depth > DEPTH:
            raise foreign(root, f"more than {DEPTH} folders within folders")
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                key = f"{prefix}{entry.name}"
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    seen += 1
                    waiting.append((f"{key}/", depth + 1))
                elif stat.S_ISREG(mode):
                    yield key
                else:
                    raise foreign(root, f"a link or a device, {key}")
        if seen > COUNT:
            raise foreign(root, f"more than {COUNT} variables")


def _small(root: Path, key: str) -> bytes:
    """A file of metadata, which is never large."""
    _check_small(root, key)
    return (root / key).read_bytes()


def _check_small(root: Path, key: str) -> None:
    if (size := (root / key).stat().st_size) > TEXT:
        raise foreign(root, f"metadata of {size} bytes, {key}")


def _zstd_size(frame: bytes) -> float:
    """The field ``Frame_Content_Size`` (RFC 8878, section 3.1.1.1); infinite where it is left out."""
    flags = frame[4] if len(frame) > 4 else 0
    single = flags >> 5 & 1
    width = (single, 2, 4, 8)[flags >> 6]
    start = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    size = int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0)
    return size if width else math.inf


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
