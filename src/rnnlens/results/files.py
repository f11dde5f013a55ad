"""Saving and opening results: netCDF-4 (through h5netcdf) and Zarr.

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

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import xarray as xr

from ..arguments import checked, switch
from ..arguments import memory as memory_of
from ..arguments import path as path_of
from ..errors import FileError, InputError, MissingDependencyError, RnnlensError
from ..settings import current
from ..vocabulary import SAMPLE
from .array import as_result, record_of
from .attributes import decode, encode
from .base import Result, result_class
from .disk import atomic
from .disk.limits import damaged
from .disk.regions import complete, records_of, write_regions
from .schema import SCHEMA_VERSION

KIND, SCHEMA, VERSION = "rnnlens_kind", "rnnlens_schema", "rnnlens_version"
META, ORDER, SEALED = "rnnlens_meta", "rnnlens_order", "rnnlens_sealed"
_MARKS = (KIND, SCHEMA, VERSION, META, ORDER, SEALED)

_ENGINES = {".nc": "h5netcdf", ".zarr": "zarr"}
#: Zarr format 2, in which text labels are specified; format 3 has no specification of them yet.
_ZARR_FORMAT = 2
#: No variable is a calendar time; those with units such as "seconds" must stay numbers.
_DECODE: dict[str, Any] = {"decode_times": False, "decode_timedelta": False}
#: Number of attempts to read a folder that is replaced while it is read.
_ATTEMPTS = 50


def save(result: Result | xr.DataArray | xr.Dataset, path: str | PathLike[str]) -> None:
    """Write a result to ``path``: netCDF for ``.nc``, Zarr for ``.zarr``.

    An existing result is replaced atomically once the new one is complete, and keeps its permissions; a link is
    followed. After an error, an interrupt or a full disk the old file is unchanged; the next save into that folder
    removes temporary files of killed processes. Checksums are written too, and :func:`open` verifies them. A netCDF
    file is first built in memory, which takes as much memory again as the result; Zarr is written chunk by chunk.

    Raises
    ------
    FileError
        If the path has another suffix, its folder does not exist, or it cannot be written.
    InputError
        If ``result`` is no result of rnnlens, DataArray or Dataset.
    TooLargeError
        If there is not enough memory to build a netCDF file.
    """
    engine = _engine(_path(path))
    tree = _to_tree(result)
    tree.attrs[SEALED] = 1
    target = check_path(path)
    with _writing(target):
        if engine == "zarr":
            _write_zarr(tree, target)
        else:
            _write_netcdf(tree, target)


def save_chunks(result: Result | xr.DataArray, tasks: Any, path: str | PathLike[str]) -> None:
    """Compute a lazy result chunk by chunk into the Zarr folder ``path``, as :meth:`LazyArray.save` describes it."""
    target = check_path(path)
    if _engine(target) != "zarr":
        raise FileError("A lazy result is written chunk by chunk.", got=str(path), expected="a path in .zarr")
    tree = _to_tree(result)
    tree.attrs[SEALED] = 1
    names = {
        (node.path, key): getattr(v.data, "name", "") for node in tree.subtree for key, v in node.variables.items()
    }
    places = {
        tasks.names[lazy]: (f"{path}/{key}", tree[path].variables[key].dims.index(SAMPLE))
        for (path, key), lazy in names.items()
        if lazy in tasks.names
    }
    with _writing(target):
        folder = write_regions(tree, places, tasks, target)
        count = len(tasks.arguments)
        found = tasks.reduced(records_of(folder, count))
        if isinstance(result, Result):
            result._complete(found)
            meta = {**result._meta(), "layers": result._stored()[1]}
            attributes = {"": {META: json.dumps(meta)}}
        else:
            path_of_array = next(iter(places.values()))[0]
            attributes = {path_of_array: record_of(found)}
        complete(folder, target, count, attributes)


def check_path(path: str | PathLike[str]) -> Path:
    """Check before a long computation that a result could be saved to ``path``.

    Returns
    -------
    Path
        The target of the save, with links resolved.

    Raises
    ------
    FileError
        In the same cases as :func:`save`.
    """
    given = _path(path)
    engine = _engine(given)
    with _writing(given):
        target = Path(os.path.realpath(given))
        _check_target(target, engine)
    return target


@checked(path=path_of, lazy=switch, memory=memory_of, skip_damaged=switch)
def open(
    path: str | PathLike[str],
    *,
    lazy: bool = False,
    memory: str | int | None = None,
    skip_damaged: bool = False,
) -> Any:
    """Read a saved result; the class of the saved result is restored.

    Parameters
    ----------
    path
        A ``.nc`` file or ``.zarr`` folder written by rnnlens, or an array of rnnlens written with ``to_netcdf``.
    lazy
        Zarr only: leave the arrays on disk until they are used. By default all arrays are loaded and the file is
        closed, so that it may be moved or replaced.

    memory
        Largest size of the arrays in memory, such as ``"4 GiB"``; by default the value of ``rl.options(memory=)``. A
        file that declares more is refused before it is read.
    skip_damaged
        Watched trainings only: leave out records that do not match their checksums, and list them in ``gaps``. By
        default a run with such records is refused.

    Returns
    -------
    Trace, Gradients, Run, ..., DataArray or Dataset
        A watched training may still be written by another process: all complete records are read.

    Raises
    ------
    FileError
        If the file does not exist, cannot be read, is damaged, was not written by rnnlens or by a newer one, or refers
        to other files.
    TooLargeError
        If the arrays exceed ``memory``.
    """
    given = Path(path)
    engine = _engine(given)
    if lazy and engine != "zarr":
        raise InputError("Only Zarr can be read lazily.", got=str(given), hint="save to a path ending in .zarr")
    limit = int(current().memory if memory is None else memory)
    with _reading(given):
        followed = engine == "zarr" and (given / "zarr.json").is_file()
    if followed:
        if lazy:
            raise InputError("A run is read whole.", got="lazy=True", hint="leave it out, or raise memory=")
        return _open_run(given, None if memory is None else limit, skip_damaged=skip_damaged)
    if skip_damaged:
        raise InputError("skip_damaged= applies only to the run of a followed training.", got=str(given))
    with _reading(given):
        if engine == "zarr":
            return _steadily(given, lambda: _open_zarr(given, limit, lazy=lazy))
        _check_exists(given)
        return _open_netcdf(given, limit)


def root_attrs(kind: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that mark the root of a file as written by rnnlens."""
    from .. import __version__

    return {KIND: kind, SCHEMA: SCHEMA_VERSION, VERSION: __version__, META: json.dumps(dict(meta))}


def _to_tree(result: Any) -> xr.DataTree:
    tree = _marked_tree(result)
    encode(tree)
    tree.attrs[ORDER] = json.dumps({node.path: list(node.data_vars) for node in tree.subtree if node.has_data})
    return tree


def _marked_tree(result: Any) -> xr.DataTree:
    if isinstance(result, Result):
        stored, layers = result._stored()
        tree = stored.copy(deep=False)
        tree.attrs = root_attrs(result.kind, {**result._meta(), "layers": layers})
        return tree
    if isinstance(result, xr.DataArray):
        name = result.name or "values"
        dataset, kind, meta = result.to_dataset(name=name), "array", {"name": name}
    elif isinstance(result, xr.Dataset):
        dataset, kind, meta = result, "dataset", {}
    else:
        expected = "a result of rnnlens, a DataArray or a Dataset"
        raise InputError("This cannot be saved.", got=type(result).__qualname__, expected=expected)
    return xr.DataTree(dataset.copy(deep=False).assign_attrs(root_attrs(kind, meta)))


def _write_netcdf(tree: xr.DataTree, target: Path) -> None:
    from .disk.netcdf import check_room, sealed

    check_room(target, tree.nbytes)
    encoding = _no_fill_values(tree)
    # Released: if a BytesIO is collected with open views, CPython 3.12.1 crashes and 3.13.0 reports a BufferError.
    with memoryview(tree.to_netcdf(None, engine="h5netcdf", format="NETCDF4", encoding=encoding)) as image:
        atomic.write_file(target, sealed(image))


def _write_zarr(tree: xr.DataTree, target: Path) -> None:
    from .disk.store import new_recording

    with atomic.replacing_folder(target) as folder, new_recording(folder) as store:
        encoding = _every_chunk(tree)
        tree.to_zarr(store, mode="w-", zarr_format=_ZARR_FORMAT, consolidated=True, encoding=encoding)
        store.seal()


def _open_netcdf(source: Path, limit: int) -> Any:
    from .disk.netcdf import check_contents, check_seal

    sealed = check_seal(source)
    check_contents(source, limit)
    with xr.open_datatree(source, engine="h5netcdf", chunks=None, **_DECODE) as opened:
        opened.load()
    return _told(opened, source, sealed=sealed)


def _open_zarr(source: Path, limit: int, *, lazy: bool) -> tuple[Any, bool]:
    """Read a Zarr folder; return the result, and True if all its files were verified by checksums."""
    from .disk.store import root_attributes, verified

    root = Path(os.path.realpath(source))
    atomic.recover(root)
    _check_exists(source)
    marks = root_attributes(root)
    _check_schema(marks.get(SCHEMA), marks.get(VERSION), source)
    store = verified(root, limit, lazy=lazy)
    options: dict[str, Any] = {**_DECODE, "consolidated": False, "zarr_format": _ZARR_FORMAT, "chunks": None}
    opened = xr.open_datatree(store, engine="zarr", **options)
    if not lazy:
        with opened:
            opened.load()
    return _told(opened, source, sealed=store.sealed), store.sealed


def _open_run(source: Path, memory: int | None, *, skip_damaged: bool) -> Any:
    """Read the complete records of a watched training."""
    from .disk.run_folder import read_metadata
    from .training_run import read_run

    with _reading(source):
        attributes = read_metadata(Path(os.path.realpath(source)), "", sealed=False)["attributes"]
    if attributes.get(KIND) != "run":
        hint = f"xarray.open_datatree({str(source)!r}, engine='zarr')"
        raise FileError("This folder was not written by rnnlens.", got=str(source), hint=hint)
    with _reading(source):
        return read_run(source, memory=memory, skip_damaged=skip_damaged)


def _steadily(source: Path, read: Callable[[], tuple[Any, bool]]) -> Any:
    """Call ``read`` again if the folder was replaced while it was read.

    ``read`` returns the result, and True if checksums prove that all of it comes from one folder.
    """
    for attempt in range(_ATTEMPTS):
        before = _identity(source)
        try:
            found, certain = read()
        except Exception:
            if attempt == _ATTEMPTS - 1 or _identity(source) == before:
                raise
        else:
            if certain or _identity(source) == before:
                return found
    raise FileError("This folder was replaced repeatedly while it was being read.", got=str(source))


def _identity(path: Path) -> tuple[int, ...]:
    """Return device, inode and change time of a path, which differ once another file takes its name; () if absent."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _told(tree: xr.DataTree, source: Path, *, sealed: bool) -> Any:
    """Build the result from an opened tree, according to the attributes of its root."""
    decode(tree)
    if KIND not in tree.attrs:
        return _unmarked(tree, source)
    _check_schema(tree.attrs.get(SCHEMA), tree.attrs.get(VERSION), source)
    return _from_tree(tree, source, sealed=sealed)


def _from_tree(tree: xr.DataTree, source: Path, *, sealed: bool) -> Any:
    kind = str(tree.attrs[KIND])
    cls = result_class(kind)
    if cls is None and kind not in ("array", "dataset"):
        raise FileError(
            "This version of rnnlens has no such kind of result.", got=f"{kind!r} in {source}", hint="upgrade rnnlens"
        )
    if SEALED in tree.attrs and not sealed:
        raise damaged(source, "its checksum is missing: the file was truncated, or another program changed it")
    try:
        return _restore(cls, tree)
    except RnnlensError:
        raise
    except Exception as error:  # a class may raise anything for data that it did not write
        raise damaged(source, f"{type(error).__name__}: {error}") from error


def _restore(cls: type[Result] | None, tree: xr.DataTree) -> Any:
    """Rebuild the result from a tree, and remove the root attributes of rnnlens."""
    meta = json.loads(tree.attrs[META])
    for path, names in json.loads(tree.attrs.get(ORDER, "{}")).items():
        node: Any = tree[path]
        node.dataset = node.to_dataset(inherit=False)[names]
    tree.attrs = {key: value for key, value in tree.attrs.items() if key not in _MARKS}
    if cls is not None:
        return cls._restore(tree, meta)
    dataset = tree.to_dataset()
    return as_result(dataset[meta["name"]]) if "name" in meta else dataset


def _unmarked(tree: xr.DataTree, source: Path) -> Any:
    """Return the DataArray or Dataset in a file that was written with xarray itself.

    Each variable must have the attributes ``provenance`` and ``schema`` of rnnlens.
    """
    dataset = tree.to_dataset()
    schemas = [
        variable.attrs.get("schema") for variable in dataset.data_vars.values() if "provenance" in variable.attrs
    ]
    if not schemas or tree.children or len(schemas) != len(dataset.data_vars):
        raise FileError(
            "This file was not written by rnnlens.", got=str(source), hint=f"xarray.open_datatree({str(source)!r})"
        )
    for schema in schemas:
        _check_schema(schema, None, source)
    return as_result(next(iter(dataset.data_vars.values()))) if len(schemas) == 1 else dataset


def _check_schema(schema: Any, version: Any, source: Path) -> None:
    if schema is None:
        return
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise damaged(source, f"a schema of {schema!r}")
    if schema > SCHEMA_VERSION:
        writer = f"schema {schema}" + (f", written by rnnlens {version}" if version else "")
        raise FileError(
            "This file was written by a newer rnnlens.",
            got=f"{source}: {writer}",
            expected=f"schema {SCHEMA_VERSION} or older",
            hint="pip install --upgrade rnnlens",
        )


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Convert any exception while reading a file to a FileError."""
    try:
        yield
    except RnnlensError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        locked = isinstance(error, BlockingIOError)
        raise FileError(
            "This file cannot be read.",
            got=f"{source}: {type(error).__name__}" + (f": {reason[0]}" if reason else ""),
            expected="a result saved by rnnlens, as netCDF (.nc) or Zarr (.zarr)",
            hint="try again after the program that is writing it has finished" if locked else None,
        ) from error


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Convert an OSError while writing a file to a FileError."""
    try:
        yield
    except RnnlensError:
        raise
    except OSError as error:
        raise FileError("The file cannot be written.", got=f"{target}: {error}") from error


def _no_fill_values(tree: xr.DataTree) -> dict[str, Any]:
    """Return an encoding without fill values, so that NaN is stored as a value and not as missing."""
    return {
        node.path: {name: {"_FillValue": None} for name, v in node.variables.items() if v.dtype.kind == "f"}
        for node in tree.subtree
    }


def _path(path: Any) -> Path:
    return Path(path_of("path", path))


def _check_exists(source: Path) -> None:
    if not source.exists():
        raise FileError("There is no such file.", got=str(source), expected="a result saved by rnnlens")


def _every_chunk(tree: xr.DataTree) -> dict[str, Any]:
    """Return an encoding that writes every chunk, also chunks of zeros, so that a missing chunk is an error."""
    return {
        node.path: {
            name: {"write_empty_chunks": True, **{key: v.encoding[key] for key in ("chunks",) if key in v.encoding}}
            for name, v in node.variables.items()
        }
        for node in tree.subtree
    }


def _engine(path: Path) -> str:
    engine = _ENGINES.get(path.suffix.lower())
    if engine is None:
        raise FileError(
            "The suffix of the path must name the format.", got=str(path), expected="a path in .nc or .zarr"
        )
    if importlib.util.find_spec(engine) is None:
        hint = f"pip install {engine}"
        raise MissingDependencyError(f"Files in {path.suffix} need {engine}.", got="not installed", hint=hint)
    return engine


def _check_target(target: Path, engine: str) -> None:
    if not target.parent.is_dir():
        raise FileError("There is no such folder.", got=str(target.parent), hint="create it first")
    if not os.access(target.parent, os.W_OK):
        raise FileError("This folder is not writable.", got=str(target.parent))
    store = any((target / name).is_file() for name in (".zgroup", "zarr.json"))
    if target.is_dir() and not (engine == "zarr" and (store or not any(target.iterdir()))):
        raise FileError("A folder is in the way.", got=str(target), hint="save under another name")
    if target.is_file() and engine == "zarr":
        raise FileError("A file exists where the Zarr folder would be created.", got=str(target), hint="another name")
