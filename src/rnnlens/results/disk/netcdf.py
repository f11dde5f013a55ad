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
from . import COUNT_LIMIT, DEPTH_LIMIT, LABEL_BYTES, TEXT_LIMIT, check_size, damaged_file_error, foreign_content_error

#: Marker between the netCDF image and its SHA-256.
SEAL = b"\nrnnlens-sha256\n"
_SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size
_BLOCK_BYTES = 2**20
#: Additional bytes for HDF5 and labels.
_EXTRA_BYTES = 16 * 2**20

#: A dimension without labels, as netCDF-4 keeps it: a length, with no values stored.
_PLACEHOLDER = b"This is a netCDF dimension but not a netCDF variable"
_DEFLATE = h5py.h5z.FILTER_DEFLATE
_FILTERS = (_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32)


def check_memory(target: Path, size: int) -> None:
    """Raise TooLargeError if there is no memory for a netCDF image and its copy; HDF5 may crash instead."""
    try:
        mmap.mmap(-1, 2 * size + size // 4 + _EXTRA_BYTES).close()
    except (OSError, ValueError, OverflowError) as error:
        hint = "a path ending in .zarr, which is written in chunks"
        got = f"{target}: {format_memory(size)}, twice"
        raise TooLargeError(
            "A netCDF file of this result is larger than the memory limit.", got=got, hint=hint
        ) from error


def sealed_parts(image: memoryview) -> Iterator[bytes | memoryview]:
    """Yield the parts of a sealed file: the netCDF image, the marker, the SHA-256 of the image."""
    yield image
    yield SEAL
    yield hashlib.sha256(image).digest()


def check_seal(path: Path) -> bool:
    """Verify the checksum at the end of a file; return False if there is none, raise FileError if it differs."""
    with path.open("rb") as stream:
        image_size = max(os.fstat(stream.fileno()).st_size - _SEAL_BYTES, 0)
        stream.seek(image_size)
        marker, stored_digest = stream.read(len(SEAL)), stream.read()
        if marker != SEAL:
            return False
        stream.seek(0)
        if _digest(stream, image_size) != stored_digest:
            raise damaged_file_error(path, "its checksum does not match")
    return True


def _digest(stream: IO[bytes], size: int) -> bytes:
    hasher = hashlib.sha256()
    while size > 0 and (block := stream.read(min(_BLOCK_BYTES, size))):
        hasher.update(block)
        size -= len(block)
    return hasher.digest()


def check_contents(path: Path, memory: int) -> None:
    """Check the metadata of a netCDF file before its arrays are read.

    Raises FileError for damage or content that rnnlens never writes, TooLargeError for more than ``memory`` bytes.
    """
    file_size = path.stat().st_size
    with h5py.File(path, "r") as file:
        objects = list(_iter_objects(path, file))
        for item in objects:
            for name in item.attrs:
                attribute = item.attrs.get_id(name)
                if attribute.get_storage_size() > TEXT_LIMIT:
                    raise foreign_content_error(path, f"an attribute of {attribute.get_storage_size()} bytes, {name!r}")
                value_count = math.prod(attribute.shape) if attribute.shape else 1
                if (
                    value_count > 1
                    and h5py.check_string_dtype(attribute.dtype) is not None
                    and value_count * file_size > memory
                ):
                    raise foreign_content_error(path, f"a list of texts in a large file, {name!r}")
        datasets = [item for item in objects if isinstance(item, h5py.Dataset)]
        check_size(path, sum(_memory_bytes(path, dataset) for dataset in datasets), memory)
        for dataset in datasets:
            _check_storage(path, dataset)
            _check_labels(path, dataset, file_size, memory)


def _iter_objects(path: Path, file: h5py.File) -> Iterator[Any]:
    """Yield every group and variable of a file once; refuse links and objects with two names."""
    pending, seen_addresses = [(file["/"], 0)], set()
    while pending:
        item, depth = pending.pop()
        address = h5py.h5o.get_info(item.id).addr
        if address in seen_addresses:
            raise foreign_content_error(path, f"{item.name} is linked under two names")
        seen_addresses.add(address)
        if depth > DEPTH_LIMIT or len(seen_addresses) > COUNT_LIMIT:
            raise foreign_content_error(
                path, f"more than {DEPTH_LIMIT} groups within groups, or {COUNT_LIMIT} variables"
            )
        yield item
        if isinstance(item, h5py.Group):
            pending += [(_child(path, item, name), depth + 1) for name in item]


def _child(path: Path, group: h5py.Group, name: str) -> Any:
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise foreign_content_error(path, f"a link, {group.name}/{name}")
    child = group[name]
    if not isinstance(child, h5py.Group | h5py.Dataset):
        raise foreign_content_error(path, f"a named type, {group.name}/{name}")
    return child


def _memory_bytes(path: Path, dataset: h5py.Dataset) -> int:
    """Return the bytes that a variable needs in memory, from its declared shape and dtype."""
    dtype = dataset.dtype
    is_text = h5py.check_string_dtype(dtype) is not None and dtype.kind == "O"
    if not is_text and dtype.kind not in "biufcSU":
        raise foreign_content_error(path, f"values of type {dtype} in {dataset.name}")
    itemsize = LABEL_BYTES if is_text else dtype.itemsize
    chunk_size = math.prod(dataset.chunks) if dataset.chunks else 0
    return max(math.prod(dataset.shape or ()), chunk_size) * itemsize


def _check_storage(path: Path, dataset: h5py.Dataset) -> None:
    """Check that all values of a variable are in this file, and unpack to no more than declared."""
    create_plist = dataset.id.get_create_plist()
    if dataset.is_virtual or create_plist.get_external_count():
        raise foreign_content_error(path, f"values stored in another file, {dataset.name}")
    filters = [create_plist.get_filter(i)[0] for i in range(create_plist.get_nfilters())]
    if set(filters) - set(_FILTERS):
        raise foreign_content_error(path, f"an unknown compression of {dataset.name}")
    declared_size = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    if dataset.attrs.get("NAME", b"")[: len(_PLACEHOLDER)] == _PLACEHOLDER:
        return
    if not filters and dataset.id.get_storage_size() < declared_size:
        raise damaged_file_error(path, f"{dataset.name} declares more values than the file contains")
    if filters:
        chunk_size = math.prod(dataset.chunks) * dataset.dtype.itemsize
        axis_sizes = zip(dataset.shape, dataset.chunks, strict=True)
        chunk_count = math.prod(-(-length // chunk) for length, chunk in axis_sizes)
        if dataset.id.get_num_chunks() < chunk_count:
            raise damaged_file_error(path, f"{dataset.name} declares more values than the file contains")
        for index in range(chunk_count if _DEFLATE in filters else 0):
            filter_mask, packed_chunk = dataset.id.read_direct_chunk(dataset.id.get_chunk_info(index).chunk_offset)
            # Four bytes more are allowed for the Fletcher-32 checksum, which may be part of the compressed data.
            if not filter_mask and len(zlib.decompressobj().decompress(packed_chunk, chunk_size + 5)) > chunk_size + 4:
                raise damaged_file_error(path, f"a part of {dataset.name} decompresses to more than declared")


def _check_labels(path: Path, dataset: h5py.Dataset, file_size: int, memory: int) -> None:
    """Check that the labels of a text variable fit into memory: many may refer to one long text in the file."""
    if dataset.dtype.kind != "O" or dataset.size * file_size <= memory:
        return
    labels_at_once = max(memory // max(file_size, 1), 1)
    if dataset.ndim != 1:
        raise foreign_content_error(path, f"labels with {dataset.ndim} dimensions in a large file, {dataset.name}")
    total_size = 0
    for start in range(0, dataset.size, labels_at_once):
        total_size += sum(len(label) for label in np.asarray(dataset[start : start + labels_at_once]).ravel())
        check_size(path, total_size, memory)
