"""Results to files and back: netCDF-4 (through h5netcdf) and Zarr.

What comes back is what went in: values, dtypes, coordinates, attributes, class, notes, checks, and a loss of NaN. The
root of a file says what it is:

=================  =====================================================================
``rnnlens_kind``   which result class (``"trace"``, ...), or ``"array"`` or ``"dataset"``
``rnnlens_schema`` rises when older and newer versions could misread each other
``rnnlens_meta``   JSON: what the class holds beside labelled arrays
``rnnlens_order``  JSON: order of the variables per node, which a folder of files does not keep
=================  =====================================================================
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

import xarray as xr

from ..arguments import checked, switch
from ..arguments import path as path_of
from ..errors import FileError, InputError, MissingDependencyError, RnnlensError, message
from .attributes import decode, encode
from .base import Result, result_class
from .schema import SCHEMA_VERSION

KIND, SCHEMA, VERSION = "rnnlens_kind", "rnnlens_schema", "rnnlens_version"
META, ORDER = "rnnlens_meta", "rnnlens_order"

_ENGINES = {".nc": "h5netcdf", ".zarr": "zarr"}
#: The Zarr format whose text labels every reader knows; version 3 has no specification for them yet.
_ZARR_FORMAT = 2
#: Nothing of ours is a calendar time; units such as "seconds" must stay numbers.
_DECODE: dict[str, Any] = {"decode_times": False, "decode_timedelta": False}


def save(result: Result | xr.DataArray | xr.Dataset, path: str | PathLike[str]) -> None:
    """Write a result to ``path``: netCDF for ``.nc``, Zarr for ``.zarr``.

    A result that is already there is replaced, once the new one is complete. After an error or an interrupt the old
    file is as it was and nothing else is left. A directory that is no Zarr store is never replaced.

    Raises
    ------
    FileError
        If the path ends in neither, its folder does not exist, or it cannot be written.
    InputError
        If ``result`` is none of ours.
    """
    target = Path(path)
    engine = _engine(target)
    tree = _to_tree(result)
    _check_target(target, engine)
    with _replacing(target) as temporary:
        if engine == "zarr":
            tree.to_zarr(temporary, mode="w", zarr_format=_ZARR_FORMAT, consolidated=True)
        else:
            tree.to_netcdf(temporary, engine="h5netcdf", format="NETCDF4", encoding=_no_fill_values(tree))


def check_path(path: str | PathLike[str]) -> None:
    """Find out now, rather than after a long computation, that nothing could be saved to ``path``.

    Raises
    ------
    FileError
        As :func:`save` would.
    """
    _check_target(Path(path), _engine(Path(path)))


@checked(path=path_of, lazy=switch)
def open(path: str | PathLike[str], *, lazy: bool = False) -> Any:
    """Read a saved result; its class is the one that was saved.

    Parameters
    ----------
    path
        A ``.nc`` file or ``.zarr`` folder written by rnnlens, or a labelled array of ours written with ``to_netcdf``.
    lazy
        Zarr only: leave the arrays on disk until they are used. By default everything is in memory and the file is
        closed, so that it may be moved or replaced.

    Returns
    -------
    Trace, Gradients, ..., DataArray or Dataset

    Raises
    ------
    FileError
        If there is no such file, it cannot be read, is not ours, or was written by a newer rnnlens.
    """
    source = Path(path)
    engine = _engine(source)
    if lazy and engine != "zarr":
        raise InputError(
            message("Only Zarr can be read lazily.", got=str(source), hint="save to a path ending in .zarr")
        )
    if not source.exists():
        raise FileError(message("There is no such file.", got=str(source), expected="a result saved by rnnlens"))
    tree = _read(source, engine, lazy=lazy)
    if KIND not in tree.attrs:
        return _unmarked(tree, source)
    _check_schema(tree.attrs.get(SCHEMA), tree.attrs.get(VERSION), source)
    return _from_tree(tree, source)


def root_attrs(kind: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that mark the root of a file as ours, for results that are written piece by piece."""
    from .. import __version__

    return {KIND: kind, SCHEMA: SCHEMA_VERSION, VERSION: __version__, META: json.dumps(dict(meta))}


def _to_tree(result: Any) -> xr.DataTree:
    tree = _marked_tree(result)
    encode(tree)
    tree.attrs[ORDER] = json.dumps({node.path: list(node.data_vars) for node in tree.subtree if node.has_data})
    return tree


def _marked_tree(result: Any) -> xr.DataTree:
    if isinstance(result, Result):
        tree = result.tree.copy(deep=False)
        tree.attrs = root_attrs(result.kind, {**result._meta(), "layers": list(result.layers)})
        return tree
    if isinstance(result, xr.DataArray):
        name = result.name or "values"
        dataset, kind, meta = result.to_dataset(name=name), "array", {"name": name}
    elif isinstance(result, xr.Dataset):
        dataset, kind, meta = result, "dataset", {}
    else:
        expected = "a result of rnnlens, a DataArray or a Dataset"
        raise InputError(message("This cannot be saved.", got=type(result).__qualname__, expected=expected))
    return xr.DataTree(dataset.copy(deep=False).assign_attrs(root_attrs(kind, meta)))


def _from_tree(tree: xr.DataTree, source: Path) -> Any:
    kind = str(tree.attrs[KIND])
    cls = result_class(kind)
    if cls is None and kind not in ("array", "dataset"):
        raise FileError(
            message("This rnnlens has no such kind of result.", got=f"{kind!r} in {source}", hint="upgrade rnnlens")
        )
    try:
        return _restore(cls, tree)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(message("This file is damaged.", got=f"{source}: {type(error).__name__}: {error}")) from error


def _restore(cls: type[Result] | None, tree: xr.DataTree) -> Any:
    """The result, from a tree that still carries our marks; they are taken off."""
    meta = json.loads(tree.attrs[META])
    for path, names in json.loads(tree.attrs.get(ORDER, "{}")).items():
        node: Any = tree[path]
        node.dataset = node.to_dataset(inherit=False)[names]
    tree.attrs = {key: value for key, value in tree.attrs.items() if key not in (KIND, SCHEMA, VERSION, META, ORDER)}
    if cls is not None:
        return cls._restore(tree, meta)
    dataset = tree.to_dataset()
    return dataset[meta["name"]] if "name" in meta else dataset


def _unmarked(tree: xr.DataTree, source: Path) -> Any:
    """A DataArray or Dataset of ours that the user wrote with xarray itself: its variables say that they are ours."""
    dataset = tree.to_dataset()
    schemas = [
        variable.attrs.get("schema") for variable in dataset.data_vars.values() if "provenance" in variable.attrs
    ]
    if not schemas or tree.children or len(schemas) != len(dataset.data_vars):
        raise FileError(
            message(
                "This file was not written by rnnlens.", got=str(source), hint=f"xarray.open_datatree({str(source)!r})"
            )
        )
    for schema in schemas:
        _check_schema(schema, None, source)
    return next(iter(dataset.data_vars.values())) if len(schemas) == 1 else dataset


def _check_schema(schema: Any, version: Any, source: Path) -> None:
    if schema is not None and int(schema) > SCHEMA_VERSION:
        writer = f"schema {schema}" + (f", written by rnnlens {version}" if version else "")
        raise FileError(
            message(
                "This file was written by a newer rnnlens.",
                got=f"{source}: {writer}",
                expected=f"schema {SCHEMA_VERSION} or older",
                hint="pip install --upgrade rnnlens",
            )
        )


def _read(source: Path, engine: str, *, lazy: bool) -> xr.DataTree:
    options: dict[str, Any] = {**_DECODE, **({"consolidated": False} if engine == "zarr" else {})}
    try:
        opened = xr.open_datatree(source, engine=engine, chunks=None, **options)
        if not lazy:
            with opened:
                opened.load()
        decode(opened)
        return opened
    except RnnlensError:
        raise
    except Exception as error:  # whatever the libraries below say about a damaged file, the user meets one error
        reason = str(error).strip().splitlines()
        raise FileError(
            message(
                "This file cannot be read.",
                got=f"{source}: {type(error).__name__}" + (f": {reason[0]}" if reason else ""),
                expected="a result saved by rnnlens, as netCDF (.nc) or Zarr (.zarr)",
            )
        ) from error


def _no_fill_values(tree: xr.DataTree) -> dict[str, Any]:
    """Encoding that keeps NaN what it is: a value, not a hole."""
    return {
        node.path: {name: {"_FillValue": None} for name, v in node.variables.items() if v.dtype.kind == "f"}
        for node in tree.subtree
    }


def _engine(path: Path) -> str:
    engine = _ENGINES.get(path.suffix.lower())
    if engine is None:
        raise FileError(message("The format is told by the ending.", got=str(path), expected="a path in .nc or .zarr"))
    if importlib.util.find_spec(engine) is None:
        hint = f"pip install {engine}"
        raise MissingDependencyError(message(f"Files in {path.suffix} need {engine}.", got="not installed", hint=hint))
    return engine


def _check_target(target: Path, engine: str) -> None:
    if not target.parent.is_dir():
        raise FileError(message("There is no such folder.", got=str(target.parent), hint="create it first"))
    if not os.access(target.parent, os.W_OK):
        raise FileError(message("Nothing can be written to this folder.", got=str(target.parent)))
    store = any((target / name).is_file() for name in (".zgroup", "zarr.json"))
    if target.is_dir() and not (engine == "zarr" and (store or not any(target.iterdir()))):
        raise FileError(message("A folder is in the way.", got=str(target), hint="save under another name"))
    if target.is_file() and engine == "zarr":
        raise FileError(message("A file is in the way of a Zarr folder.", got=str(target), hint="another name"))


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A path beside the target to write to; it takes the target's place on success, and vanishes otherwise."""
    temporary = target.with_name(f".{target.stem}-{uuid4().hex[:8]}{target.suffix}")
    try:
        yield temporary
        _swap(temporary, target)
    except OSError as error:
        raise FileError(message("The file cannot be written.", got=f"{target}: {error}")) from error
    finally:
        _remove(temporary)


def _swap(new: Path, target: Path) -> None:
    if not target.is_dir():
        os.replace(new, target)
        return
    # A folder cannot be replaced in one step; the old one steps aside and comes back if the new one cannot move in.
    old = target.with_name(f".{target.stem}-{uuid4().hex[:8]}.old")
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
