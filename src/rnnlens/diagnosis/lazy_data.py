"""Data that are not in memory (Dask, zarr, HDF5): only the samples of a diagnosis are read, in blocks of neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import data
from ..arguments import is_lazy
from ..errors import InputError
from ..typing import Array

#: Number of blocks in which samples are read: chunks on disk hold neighbours, so single rows would read them all.
_BLOCKS = 16


def is_outside_memory(tree: Any) -> bool:
    """Return whether an array of ``tree`` is lazy, or lies in chunks on disk."""
    return any(is_lazy(leaf) or _is_on_disk(leaf) for leaf in data.leaves_of(tree))


def load_samples(x: Any, y: Any, count: int) -> tuple[Any, Any, str]:
    """Read at most ``count`` samples (first axis) of x and y; return them, and a note on which these are.

    Raises
    ------
    InputError
        If x and y have different numbers of samples, or Dask does not know the number.
    """
    counts = [leaf.shape[0] for leaf in (*data.leaves_of(x), *data.leaves_of(y)) if getattr(leaf, "ndim", 0)]
    if any(number != counts[0] for number in counts):  # a number that is not known is NaN
        raise InputError(
            "The number of samples is not known, or differs between arrays.",
            got=", ".join(map(str, counts)),
            expected="one number of samples on the first axis",
            hint="of a dask array: x.compute_chunk_sizes()",
        )
    total = int(counts[0])
    rows = _rows(total, count)
    note = (
        f"{len(rows)} of {total:,} samples were read, in {_BLOCKS} blocks of neighbours spread evenly over the data."
        if len(rows) < total
        else ""
    )
    return _load(x, rows), None if y is None else _load(y, rows), note


def _rows(total: int, count: int) -> Array:
    """Return the numbers of at most ``count`` of ``total`` samples, in ``_BLOCKS`` blocks."""
    if total <= count:
        return np.arange(total)
    in_block = -(-count // _BLOCKS)
    starts = np.linspace(0, total - in_block, _BLOCKS).astype(int)
    return np.unique((starts[:, None] + np.arange(in_block)).reshape(-1))[:count]


def _load(tree: Any, rows: Array) -> Any:
    def load(leaf: Any) -> Any:
        if not getattr(leaf, "ndim", 0):
            return leaf
        chosen = leaf.isel({leaf.dims[0]: rows}) if hasattr(leaf, "isel") else leaf[rows]
        return chosen.compute() if is_lazy(chosen) else chosen

    return data.map_leaves(load, tree)


def _is_on_disk(leaf: Any) -> bool:
    """Return whether an array is one of zarr or h5py: these have chunks, but in h5py only if they were asked for."""
    # ``read_direct`` is a method of the datasets of h5py.
    return getattr(leaf, "chunks", None) is not None or hasattr(leaf, "read_direct")
