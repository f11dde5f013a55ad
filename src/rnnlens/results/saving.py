"""Saving results: netCDF-4 (through h5netcdf) and Zarr.

Saving and opening preserves values, dtypes, coordinates, attributes, class, notes, checks, and a loss of NaN. The root
of a file has these attributes:

=================  =====================================================================
``rnnlens_kind``   kind of the result class (``"trace"``, ...), or ``"array"`` or ``"dataset"``
``rnnlens_schema`` version of the layout; older versions of rnnlens refuse newer layouts
``rnnlens_meta``   JSON: data of the class beside labelled arrays
``rnnlens_order``  JSON: order of the variables per node, which a folder does not preserve
``rnnlens_sealed`` 1 if checksums were written; the file is then refused without them
=================  =====================================================================

Atomic writing and the checks before reading are in ``disk``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import xarray as xr

from .. import __version__
from ..arguments import path as path_of
from ..errors import FileError, RnnlensError
from ..vocabulary import SAMPLE
from .disk import damaged_file_error, replacing_folder, write_file
from .disk.netcdf import check_memory, sealed_parts
from .disk.regions import ChunkTasks, finish_folder, records_of, write_regions
from .disk.store import new_recording_store
from .encoding import encode
from .schema import SCHEMA_VERSION

KIND, SCHEMA, VERSION = "rnnlens_kind", "rnnlens_schema", "rnnlens_version"
META, ORDER, SEALED = "rnnlens_meta", "rnnlens_order", "rnnlens_sealed"

_ENGINES = {".nc": "h5netcdf", ".zarr": "zarr"}
#: Zarr format 2, in which text labels are specified; format 3 has no specification of them yet.
ZARR_FORMAT = 2


def root_attrs(kind: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that mark the root of a file as written by rnnlens."""
    return {KIND: kind, SCHEMA: SCHEMA_VERSION, VERSION: __version__, META: json.dumps(dict(meta))}


def check_schema(attributes: Mapping[Any, Any], source: Path) -> None:
    """Raise FileError if root attributes name the schema of a newer rnnlens, or none that exists."""
    schema, version = attributes.get(SCHEMA, SCHEMA_VERSION), attributes.get(VERSION)
    if schema is None:
        return
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise damaged_file_error(source, f"a schema of {schema!r}")
    if schema > SCHEMA_VERSION:
        writer = f"schema {schema}" + (f", written by rnnlens {version}" if version else "")
        raise FileError(
            "This file was written by a newer rnnlens.",
            got=f"{source}: {writer}",
            expected=f"schema {SCHEMA_VERSION} or older",
            hint="pip install --upgrade rnnlens",
        )


def tree_of(data: xr.DataArray | xr.Dataset) -> xr.DataTree:
    """Return an array or a dataset as a tree with the attributes of a root."""
    if isinstance(data, xr.Dataset):
        dataset, attrs = data, root_attrs("dataset", {})
    else:
        name = data.name or "values"
        dataset, attrs = data.to_dataset(name=name), root_attrs("array", {"name": name})
    return xr.DataTree(dataset.copy(deep=False).assign_attrs(attrs))


def save(tree: xr.DataTree, path: str | PathLike[str]) -> None:
    """Write a tree whose root has :func:`root_attrs` to ``path``: netCDF for ``.nc``, Zarr for ``.zarr``.

    An existing result is replaced atomically once the new one is complete, and keeps its permissions; a link is
    followed. After an error, an interrupt or a full disk the old file is unchanged. A netCDF file is first built in
    memory, which takes as much memory again as the result; Zarr is written chunk by chunk.
    """
    target = check_path(path)
    _prepare(tree)
    with _convert_write_errors(target):
        if engine_of(target) == "zarr":
            _write_zarr(tree, target)
        else:
            _write_netcdf(tree, target)


def save_chunks(
    tree: xr.DataTree,
    tasks: ChunkTasks,
    path: str | PathLike[str],
    attributes: Callable[[dict[str, Any], str], dict[str, Any]],
) -> None:
    """Compute a lazy result chunk by chunk into the Zarr folder ``path``, with ``attributes`` of its reduced record."""
    target = check_path(path)
    if engine_of(target) != "zarr":
        raise FileError("A lazy result is written chunk by chunk.", got=str(path), expected="a path in .zarr")
    _prepare(tree)
    destinations = {
        tasks.names[dask_name(v)]: (f"{node.path}/{key}", v.dims.index(SAMPLE))
        for node in tree.subtree
        for key, v in node.variables.items()
        if dask_name(v) in tasks.names
    }
    with _convert_write_errors(target):
        folder = write_regions(tree, destinations, tasks, target)
        chunk_count = len(tasks.arguments)
        record = tasks.reduced(records_of(folder, chunk_count))
        finish_folder(folder, target, chunk_count, attributes(record, next(iter(destinations.values()))[0]))


def dask_name(array: Any) -> str:
    """Return the name of a Dask array; "" for one in memory."""
    return str(getattr(array.data, "name", ""))


def check_path(path: str | PathLike[str]) -> Path:
    """Return the target of a save, with links resolved; raise FileError where :func:`save` would, before computing."""
    requested_path = Path(path_of("path", path))
    engine = engine_of(requested_path)
    with _convert_write_errors(requested_path):
        target = Path(os.path.realpath(requested_path))
        if not target.parent.is_dir():
            raise FileError("There is no such folder.", got=str(target.parent), hint="create it first")
        if not os.access(target.parent, os.W_OK):
            raise FileError("This folder is not writable.", got=str(target.parent))
        is_zarr_store = any((target / name).is_file() for name in (".zgroup", "zarr.json"))
        if target.is_dir() and not (engine == "zarr" and (is_zarr_store or not any(target.iterdir()))):
            raise FileError("A folder is in the way.", got=str(target), hint="save under another name")
        if target.is_file() and engine == "zarr":
            raise FileError(
                "A file exists where the Zarr folder would be created.", got=str(target), hint="another name"
            )
    return target


def engine_of(path: Path) -> str:
    """Return xarray's name of the format that the suffix of a path names."""
    engine = _ENGINES.get(path.suffix.lower())
    if engine is None:
        raise FileError(
            "The suffix of the path must name the format.",
            got=str(path),
            expected="a path in .nc or .zarr",
            hint=f"{path.stem or 'result'}.nc for a result; models are saved and loaded by their framework",
        )
    return engine


def _prepare(tree: xr.DataTree) -> None:
    """Add the order of variables and the mark of checksums to a tree; convert attributes that files cannot store."""
    encode(tree)
    tree.attrs[ORDER] = json.dumps({node.path: list(node.data_vars) for node in tree.subtree if node.has_data})
    tree.attrs[SEALED] = 1


def _write_netcdf(tree: xr.DataTree, target: Path) -> None:
    check_memory(target, tree.nbytes)
    # Without fill values, so that NaN is stored as a value and not as missing.
    encoding = {
        node.path: {name: {"_FillValue": None} for name, v in node.variables.items() if v.dtype.kind == "f"}
        for node in tree.subtree
    }
    # Released: if a BytesIO is collected with open views, CPython 3.12.1 crashes and 3.13.0 reports a BufferError.
    with memoryview(tree.to_netcdf(None, engine="h5netcdf", format="NETCDF4", encoding=encoding)) as image:
        write_file(target, sealed_parts(image))


def _write_zarr(tree: xr.DataTree, target: Path) -> None:
    # Every chunk is written, also chunks of zeros, so that a missing chunk is an error.
    encoding = {
        node.path: {
            name: {"write_empty_chunks": True, **{key: v.encoding[key] for key in ("chunks",) if key in v.encoding}}
            for name, v in node.variables.items()
        }
        for node in tree.subtree
    }
    with replacing_folder(target) as folder, new_recording_store(folder) as store:
        tree.to_zarr(store, mode="w-", zarr_format=ZARR_FORMAT, consolidated=True, encoding=encoding)
        store.seal()


@contextmanager
def _convert_write_errors(target: Path) -> Iterator[None]:
    """Convert an OSError while writing a file to a FileError."""
    try:
        yield
    except RnnlensError:
        raise
    except OSError as error:
        raise FileError("The file cannot be written.", got=f"{target}: {error}") from error
