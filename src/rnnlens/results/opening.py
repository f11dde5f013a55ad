"""Opening results that :mod:`rnnlens.results.saving` wrote, and runs of watched trainings, after checks in ``disk``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import xarray as xr

from ..arguments import checked, switch
from ..arguments import memory as memory_of
from ..arguments import path as path_of
from ..errors import FileError, InputError, RnnlensError
from ..settings import current
from .array import as_result
from .base import Result, result_class
from .disk import damaged_file_error, recover
from .disk.netcdf import check_contents, check_seal
from .disk.run_folder import read_metadata
from .disk.store import root_attributes, verified_store
from .encoding import decode
from .saving import KIND, META, ORDER, SCHEMA, SEALED, VERSION, ZARR_FORMAT, check_schema, engine_of
from .training_run import read_run

_ROOT_ATTRIBUTES = (KIND, SCHEMA, VERSION, META, ORDER, SEALED)
#: No variable is a calendar time; those with units such as "seconds" must stay numbers.
_DECODE: dict[str, Any] = {"decode_times": False, "decode_timedelta": False}
#: Number of attempts to read a folder that is replaced while it is read.
_MAX_ATTEMPTS = 50


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
        default a run with damaged records is refused.

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

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> model = torch.nn.LSTM(2, 4, batch_first=True)
    >>> x = torch.randn(3, 9, 2)
    >>> trace = rl.trace(model, x, loss=lambda output: output[0].square().sum())
    >>> trace.save("run.nc")
    >>> rl.open("run.nc")["lstm"].hidden_grad.shape
    (3, 9, 4)
    """
    source = Path(path)
    engine = engine_of(source)
    if lazy and engine != "zarr":
        raise InputError("Only Zarr can be read lazily.", got=str(source), hint="save to a path ending in .zarr")
    memory_limit = int(current().memory if memory is None else memory)
    with _convert_read_errors(source):
        is_run_folder = engine == "zarr" and (source / "zarr.json").is_file()
    if is_run_folder:
        if lazy:
            raise InputError("A run is read whole.", got="lazy=True", hint="leave it out, or raise memory=")
        return _open_run(source, None if memory is None else memory_limit, skip_damaged=skip_damaged)
    if skip_damaged:
        raise InputError("skip_damaged= applies only to the run of a followed training.", got=str(source))
    with _convert_read_errors(source):
        if engine == "zarr":
            return _read_unreplaced(source, lambda: _open_zarr(source, memory_limit, lazy=lazy))
        _check_exists(source)
        return _open_netcdf(source, memory_limit)


def _open_netcdf(source: Path, memory_limit: int) -> Any:
    is_sealed = check_seal(source)
    check_contents(source, memory_limit)
    with xr.open_datatree(source, engine="h5netcdf", chunks=None, **_DECODE) as tree:
        tree.load()
    return _result_of_tree(tree, source, is_sealed=is_sealed)


def _open_zarr(source: Path, memory_limit: int, *, lazy: bool) -> tuple[Any, bool]:
    """Read a Zarr folder; return the result, and True if all its files were verified by checksums."""
    root = Path(os.path.realpath(source))
    recover(root)
    _check_exists(source)
    marks = root_attributes(root)
    check_schema(marks, source)
    store = verified_store(root, memory_limit, lazy=lazy)
    options: dict[str, Any] = {**_DECODE, "consolidated": False, "zarr_format": ZARR_FORMAT, "chunks": None}
    tree = xr.open_datatree(store, engine="zarr", **options)
    if not lazy:
        with tree:
            tree.load()
    return _result_of_tree(tree, source, is_sealed=store.sealed), store.sealed


def _open_run(source: Path, memory: int | None, *, skip_damaged: bool) -> Any:
    """Read the complete records of a watched training."""
    with _convert_read_errors(source):
        attributes = read_metadata(Path(os.path.realpath(source)), "", sealed=False)["attributes"]
    if attributes.get(KIND) != "run":
        hint = f"xarray.open_datatree({str(source)!r}, engine='zarr')"
        raise FileError("This folder was not written by rnnlens.", got=str(source), hint=hint)
    with _convert_read_errors(source):
        return read_run(source, memory=memory, skip_damaged=skip_damaged)


def _read_unreplaced(source: Path, read: Callable[[], tuple[Any, bool]]) -> Any:
    """Read a folder that another process may replace meanwhile, and return what was read.

    ``read()`` returns it, and whether checksums prove that all files are of one folder. Without such proof it is called
    again if the folder was replaced. Raises FileError if every attempt met a replacement.
    """
    for attempt in range(_MAX_ATTEMPTS):
        identity_before = _identity(source)
        try:
            result, is_verified = read()
        except Exception:
            if attempt == _MAX_ATTEMPTS - 1 or _identity(source) == identity_before:
                raise
        else:
            if is_verified or _identity(source) == identity_before:
                return result
    raise FileError("This folder was replaced repeatedly while it was being read.", got=str(source))


def _identity(path: Path) -> tuple[int, ...]:
    """Return device, inode and change time of a path, which differ once another file takes its name; () if absent."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _result_of_tree(tree: xr.DataTree, source: Path, *, is_sealed: bool) -> Any:
    """Build the result that an opened tree contains, by the attributes of its root."""
    decode(tree)
    if KIND not in tree.attrs:  # written with xarray itself: variables with provenance and schema of rnnlens
        dataset = tree.to_dataset()
        schemas = [v.attrs.get("schema") for v in dataset.data_vars.values() if "provenance" in v.attrs]
        if not schemas or tree.children or len(schemas) != len(dataset.data_vars):
            raise FileError(
                "This file was not written by rnnlens.", got=str(source), hint=f"xarray.open_datatree({str(source)!r})"
            )
        for schema in schemas:
            check_schema({SCHEMA: schema}, source)
        return as_result(next(iter(dataset.data_vars.values()))) if len(schemas) == 1 else dataset
    check_schema(tree.attrs, source)
    kind = str(tree.attrs[KIND])
    cls = result_class(kind)
    if cls is None and kind not in ("array", "dataset"):
        raise FileError(
            "This version of rnnlens has no such kind of result.", got=f"{kind!r} in {source}", hint="upgrade rnnlens"
        )
    if SEALED in tree.attrs and not is_sealed:
        raise damaged_file_error(
            source, "its checksum is missing: the file was truncated, or another program changed it"
        )
    try:
        return _rebuild_result(cls, tree)
    except RnnlensError:
        raise
    except Exception as error:  # a class may raise anything for data that it did not write
        raise damaged_file_error(source, f"{type(error).__name__}: {error}") from error


def _rebuild_result(cls: type[Result] | None, tree: xr.DataTree) -> Any:
    """Rebuild the result from a tree, and remove the root attributes of rnnlens."""
    meta = json.loads(tree.attrs[META])
    for path, names in json.loads(tree.attrs.get(ORDER, "{}")).items():
        node: Any = tree[path]
        dataset = node.to_dataset(inherit=False)
        node.dataset = dataset[names].assign_coords(dataset.coords)  # also those whose axes no variable has
    tree.attrs = {key: value for key, value in tree.attrs.items() if key not in _ROOT_ATTRIBUTES}
    if cls is not None:
        return cls._restore(tree, meta)
    dataset = tree.to_dataset()
    return as_result(dataset[meta["name"]]) if "name" in meta else dataset


@contextmanager
def _convert_read_errors(source: Path) -> Iterator[None]:
    """Convert any exception while reading a file to a FileError."""
    try:
        yield
    except RnnlensError:
        raise
    except Exception as error:
        reason_lines = str(error).strip().splitlines()
        is_locked = isinstance(error, BlockingIOError)
        raise FileError(
            "This file cannot be read.",
            got=f"{source}: {type(error).__name__}" + (f": {reason_lines[0]}" if reason_lines else ""),
            expected="a result saved by rnnlens, as netCDF (.nc) or Zarr (.zarr)",
            hint="try again after the program that is writing it has finished" if is_locked else None,
        ) from error


def _check_exists(source: Path) -> None:
    if not source.exists():
        results = sorted(path.name for path in source.parent.glob("*") if path.suffix in (".nc", ".zarr"))[:10]
        hint = f"in {source.parent}: {', '.join(results)}" if results else f'trace.save("{source.name}") writes one'
        raise FileError("There is no such file.", got=str(source), expected="a result saved by rnnlens", hint=hint)
