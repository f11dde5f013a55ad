"""netCDF-4 files with a checksum appended; written through memory, and checked before they are read.

The HDF5 library cannot be interrupted safely: on a full disk, or on a damaged file, it may take the process down. So it
writes to memory only, and reads a file only after the checksum of the whole file was verified. The checksum follows
the part of the file that HDF5 reads; other readers of netCDF ignore it.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from ...errors import TooLargeError
from ...settings import format_memory
from . import COUNT, DEPTH, LABEL, TEXT, check_size, damaged, foreign

#: Marker between the netCDF image and its SHA-256.
SEAL = b"\nrnnlens-sha256\n"
_SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size
_PIECE = 2**20
#: Additional bytes for HDF5 and labels.
_ROOM = 16 * 2**20

#: A dimension without labels, as netCDF-4 keeps it: a length, with no values stored.
_PLACEHOLDER = b"This is a netCDF dimension but not a netCDF variable"
_DEFLATE = h5py.h5z.FILTER_DEFLATE
_FILTERS = (_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32)


def check_room(target: Path, size: int) -> None:
    """Raise TooLargeError if there is no memory for a netCDF image and its copy; HDF5 may crash instead."""
    try:
        mmap.mmap(-1, 2 * size + size // 4 + _ROOM).close()
    except (OSError, ValueError, OverflowError) as error:
        hint = "a path ending in .zarr, which is written in chunks"
        got = f"{target}: {format_memory(size)}, twice"
        raise TooLargeError(
            "A netCDF file of this result is larger than the memory limit.", got=got, hint=hint
        ) from error


def sealed(image: memoryview) -> Iterator[bytes | memoryview]:
    """Yield the parts of a sealed file: the netCDF image, the marker, the SHA-256 of the image."""
    yield image
    yield SEAL
    yield hashlib.sha256(image).digest()


def check_seal(path: Path) -> bool:
    """Verify the checksum at the end of a file; return False if there is none, raise FileError if it differs."""
    with path.open("rb") as stream:
        proper = max(os.fstat(stream.fileno()).st_size - _SEAL_BYTES, 0)
        stream.seek(proper)
        mark, found = stream.read(len(SEAL)), stream.read()
        if mark != SEAL:
            return False
        stream.seek(0)
        if _digest(stream, proper) != found:
            raise damaged(path, "its checksum does not match")
    return True


def _digest(stream: IO[bytes], size: int) -> bytes:
    running = hashlib.sha256()
    while size > 0 and (piece := stream.read(min(_PIECE, size))):
        running.update(piece)
        size -= len(piece)
    return running.digest()


def check_contents(path: Path, memory: int) -> None:
    """Check the metadata of a netCDF file before its arrays are read.

    Raises FileError for damage or content that rnnlens never writes, TooLargeError for more than ``memory`` bytes.
    """
    file_size = path.stat().st_size
    with h5py.File(path, "r") as file:
        objects = list(_objects(path, file))
        for item in objects:
            for name in item.attrs:
                found = item.attrs.get_id(name)
                if found.get_storage_size() > TEXT:
                    raise foreign(path, f"an attribute of {found.get_storage_size()} bytes, {name!r}")
                many = math.prod(found.shape) if found.shape else 1
                if many > 1 and h5py.check_string_dtype(found.dtype) is not None and many * file_size > memory:
                    raise foreign(path, f"a list of texts in a large file, {name!r}")
        datasets = [item for item in objects if isinstance(item, h5py.Dataset)]
        check_size(path, sum(_bytes(path, dataset) for dataset in datasets), memory)
        for dataset in datasets:
            _check_storage(path, dataset)
            _check_labels(path, dataset, file_size, memory)


def _objects(path: Path, file: h5py.File) -> Iterator[Any]:
    """Yield every group and variable of a file once; refuse links and objects with two names."""
    waiting, seen = [(file["/"], 0)], set()
    while waiting:
        item, depth = waiting.pop()
        address = h5py.h5o.get_info(item.id).addr
        if address in seen:
            raise foreign(path, f"{item.name} is linked under two names")
        seen.add(address)
        if depth > DEPTH or len(seen) > COUNT:
            raise foreign(path, f"more than {DEPTH} groups within groups, or {COUNT} variables")
        yield item
        if isinstance(item, h5py.Group):
            waiting += [(_child(path, item, name), depth + 1) for name in item]


def _child(path: Path, group: h5py.Group, name: str) -> Any:
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise foreign(path, f"a link, {group.name}/{name}")
    child = group[name]
    if not isinstance(child, h5py.Group | h5py.Dataset):
        raise foreign(path, f"a named type, {group.name}/{name}")
    return child


def _bytes(path: Path, dataset: h5py.Dataset) -> int:
    """Return the bytes that a variable needs in memory, from its declared shape and dtype."""
    kind = dataset.dtype
    text = h5py.check_string_dtype(kind) is not None and kind.kind == "O"
    if not text and kind.kind not in "biufcSU":
        raise foreign(path, f"values of type {kind} in {dataset.name}")
    itemsize = LABEL if text else kind.itemsize
    chunk = math.prod(dataset.chunks) if dataset.chunks else 0
    return max(math.prod(dataset.shape or ()), chunk) * itemsize


def _check_storage(path: Path, dataset: h5py.Dataset) -> None:
    """Check that all values of a variable are in this file, and unpack to no more than declared."""
    created = dataset.id.get_create_plist()
    if dataset.is_virtual or created.get_external_count():
        raise foreign(path, f"values stored in another file, {dataset.name}")
    filters = [created.get_filter(i)[0] for i in range(created.get_nfilters())]
    if set(filters) - set(_FILTERS):
        raise foreign(path, f"an unknown compression of {dataset.name}")
    announced = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    if dataset.attrs.get("NAME", b"")[: len(_PLACEHOLDER)] == _PLACEHOLDER:
        return
    if not filters and dataset.id.get_storage_size() < announced:
        raise damaged(path, f"{dataset.name} declares more values than the file contains")
    if filters:
        size = math.prod(dataset.chunks) * dataset.dtype.itemsize
        shape = zip(dataset.shape, dataset.chunks, strict=True)
        count = math.prod(-(-length // chunk) for length, chunk in shape)
        if dataset.id.get_num_chunks() < count:
            raise damaged(path, f"{dataset.name} declares more values than the file contains")
        for index in range(count if _DEFLATE in filters else 0):
            skipped, packed = dataset.id.read_direct_chunk(dataset.id.get_chunk_info(index).chunk_offset)
            # Four bytes more are allowed for the Fletcher-32 checksum, which may be part of the compressed data.
            if not skipped and len(zlib.decompressobj().decompress(packed, size + 5)) > size + 4:
                raise damaged(path, f"a part of {dataset.name} decompresses to more than declared")


def _check_labels(path: Path, dataset: h5py.Dataset, file_size: int, memory: int) -> None:
    """Check that the labels of a text variable fit into memory: many may refer to one long text in the file."""
    if dataset.dtype.kind != "O" or dataset.size * file_size <= memory:
        return
    at_once = max(memory // max(file_size, 1), 1)
    if dataset.ndim != 1:
        raise foreign(path, f"labels with {dataset.ndim} dimensions in a large file, {dataset.name}")
    total = 0
    for start in range(0, dataset.size, at_once):
        total += sum(len(label) for label in np.asarray(dataset[start : start + at_once]).ravel())
        check_size(path, total, memory)
