"""Data in chunks of samples: the axis of samples, where chunks begin and end, and random data of the same shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Batch
from ...arguments.data import is_lazy
from ...errors import InputError, UnsupportedError
from ...layout import Layout
from ...settings import must_fit
from ...typing import Array
from ...vocabulary import SAMPLE
from ..axes import ModelAxes
from ..batches import layouts_to_cut

_PARTS = ("x", "y", "sample_weight")
#: Number of samples of the random data that substitute the user's data while a lazy result is made.
_FEW = (3, 5, 7, 11)


@dataclass(frozen=True)
class ChunkRows:
    """One chunk: its number, and the samples ``start`` to ``stop`` of ``total``."""

    number: int
    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass
class SampleChunks:
    """Data of a call as chunks of samples."""

    #: The call's data and options, as the user passed them.
    run: Batch
    #: Axes of the arrays of each part, as :func:`~rnnlens.verbs.batches.layouts_to_cut` returns them; None if samples
    #: come first.
    layouts: data.DataLayouts | None
    #: The chunks in order; empty ones are left out.
    bounds: list[ChunkRows]
    #: Sentences on what was rechunked.
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, axes: ModelAxes, run: Batch, batch_size: int | None = None) -> SampleChunks:
        """Find the sample axis of every array of a call, and the sizes of the chunks along it."""
        for name in _PARTS:
            _refuse_unknown_chunks(name, getattr(run, name))
        for leaf in data.leaves_of(run.x):
            if 0 in leaf.shape:
                got = f"x of shape {tuple(leaf.shape)}"
                raise InputError("Batch is empty.", got=got, expected="at least 1 sample")
        if is_lazy(run.initial_state):
            hint = "compute them first: one row for each sample, or one for all"
            raise UnsupportedError("initial_state= is lazy.", expected="arrays in memory", hint=hint)
        # Zeros of the same shapes, which take no memory.
        substitutes = [
            data.map_leaves(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), getattr(run, name))
            for name in _PARTS
        ]
        template = replace(run, x=None, y=None, sample_weight=None)
        layouts = layouts_to_cut(axes, template, *substitutes)
        chunks = cls(run, layouts, [])
        total = data.sample_count(substitutes[0], None if layouts is None else layouts["x"])
        sizes = chunks._sizes(batch_size)
        stops = enumerate(np.cumsum(sizes).tolist())
        chunks.bounds = [ChunkRows(i, stop - sizes[i], stop, total) for i, stop in stops]
        for name in _PARTS[1:]:
            for array, axis in chunks.leaves(name):
                if array.shape[axis] != total:
                    got = f"{total} and {array.shape[axis]}"
                    raise InputError(f"x and {name} have different numbers of samples.", got=got)
        chunks._refuse_large()
        return chunks

    @property
    def total(self) -> int:
        """Number of samples."""
        return self.bounds[-1].stop

    def leaves(self, name: str) -> Iterator[tuple[Any, int]]:
        """Yield each array of ``x``, ``y`` or ``sample_weight``, without labels, and the index of its sample axis."""
        leaves = data.leaves_of(getattr(self.run, name))
        layouts = [None] * len(leaves) if self.layouts is None else self.layouts[name]
        for leaf, layout in zip(leaves, layouts, strict=True):
            yield (leaf.data if isinstance(leaf, xr.DataArray) else leaf), _sample_axis(name, layout)

    def blocks(self, name: str) -> list[Any]:
        """Return each chunk of a part: a tree of Delayed arrays; or a list of None if the part is missing."""
        import dask.array as da

        tree = getattr(self.run, name)
        if tree is None:
            return [None] * len(self.bounds)
        sizes = tuple(rows.count for rows in self.bounds)
        blocks_by_leaf = []
        for leaf, (array, axis) in zip(data.leaves_of(tree), self.leaves(name), strict=True):
            lazy = array if is_lazy(array) else da.from_array(np.asarray(array), chunks=-1)
            chunks = tuple(sizes if i == axis else (size,) for i, size in enumerate(lazy.shape))
            if any(len(steps) > 1 for i, steps in enumerate(lazy.chunks) if i != axis):
                chunked_axes = [i for i, steps in enumerate(lazy.chunks) if i != axis and len(steps) > 1]
                names = leaf.dims if isinstance(leaf, xr.DataArray) else [f"axis {i}" for i in range(lazy.ndim)]
                axis_names = " and ".join(str(names[i]) for i in chunked_axes)
                self.notes.append(
                    f"{name} was in chunks along {axis_names}, which were put together: a sample is computed whole. "
                    "Chunks along samples alone are read without it."
                )
            blocks_by_leaf.append(lazy.rechunk(chunks).to_delayed(optimize_graph=False).ravel())
        return [_with_leaves(tree, parts) for parts in zip(*blocks_by_leaf, strict=True)]

    def template(self, few: bool = True) -> Batch:
        """Return a batch of random data that has the dtypes, shapes and coordinates of a chunk, of few samples or all.

        Lazy results take their names, axes and attributes from its result, so that none of the user's data is read.
        """
        count = self.bounds[0].count
        if few:
            sizes = {size for name in _PARTS for array, _ in self.leaves(name) for size in array.shape}
            count = min(next((n for n in _FEW if n not in sizes), _FEW[0]), self.total)
        parts: dict[str, Any] = {}
        for name in _PARTS:
            leaves = data.leaves_of(getattr(self.run, name))
            pairs = zip(leaves, self.leaves(name), strict=True)
            filled = [
                _labelled_like(leaf, _random_values(name, array, axis, count), axis) for leaf, (array, axis) in pairs
            ]
            parts[name] = _with_leaves(getattr(self.run, name), filled)
        return replace(self.run, **parts, initial_state=data.samples_of_arrays(self.run.initial_state, 0, count))

    def labels(self) -> Array:
        """Return the sample coordinate of lazy data: that of the first DataArray that has one, else 0, 1, 2, ..."""
        for leaf, (_, axis) in zip(data.leaves_of(self.run.x), self.leaves("x"), strict=True):
            if isinstance(leaf, xr.DataArray) and leaf.dims[axis] in leaf.coords:
                return np.asarray(leaf[leaf.dims[axis]].values)
        return np.arange(self.total)

    def _sizes(self, batch_size: int | None) -> Sequence[int]:
        """Return the chunk sizes along samples: ``batch_size=``, else those of the first lazy array."""
        arrays = [*self.leaves("x"), *self.leaves("y"), *self.leaves("sample_weight")]
        array, axis = next((array, axis) for array, axis in arrays if is_lazy(array))
        total = array.shape[axis]
        if batch_size is None:
            sizes = [int(size) for size in array.chunks[axis] if size]
            batch_size = max(sizes)
            if sizes[:-1] != [batch_size] * (len(sizes) - 1):
                self.notes.append(f"Chunks of samples had several sizes, and were made {batch_size} each but the last.")
        return [min(batch_size, total - start) for start in range(0, total, batch_size)]

    def _refuse_large(self) -> None:
        largest = max(rows.count for rows in self.bounds)
        size = sum(math.prod(a.shape) * a.dtype.itemsize for n in _PARTS for a, _ in self.leaves(n))
        size = size * largest // self.total
        hint = "chunks of fewer samples: x.chunk(sample=...) of a DataArray, x.rechunk(...) of a dask array"
        must_fit(f"A chunk of {largest} samples alone would not fit into the memory granted.", size, hint)


def _with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree of the same structure with other leaves, given in order."""
    leaf_iterator = iter(leaves)
    return data.map_leaves(lambda _: next(leaf_iterator), tree)


def _refuse_unknown_chunks(name: str, tree: Any) -> None:
    for leaf in data.leaves_of(tree):
        if any(isinstance(size, float) and math.isnan(size) for size in getattr(leaf, "shape", ())):
            raise InputError(
                f"{name} has chunks of unknown sizes.",
                got=f"shape {tuple(leaf.shape)}",
                expected="a known number of samples in every chunk",
                hint=f"{name}.compute_chunk_sizes()",
            )


def _sample_axis(name: str, layout: Layout | None) -> int:
    if layout is None or layout.sample is None:
        return 0
    axis = next(i for i, names in enumerate(layout.axes) if SAMPLE in names)
    if len(layout.axes[axis]) > 1:
        raise UnsupportedError(
            f"The samples of {name} are folded with {layout.axes[axis]}, so lazy data cannot be cut along them.",
            expected="an axis of samples alone",
            hint=f"{name}.compute() for one batch in memory",
        )
    return axis


def _random_values(name: str, array: Any, axis: int, count: int) -> Array:
    shape = tuple(count if i == axis else size for i, size in enumerate(array.shape))
    if name == "sample_weight" or array.dtype.kind not in "f":
        return np.full(shape, name == "sample_weight", array.dtype)
    random_values = (
        np.random.default_rng(0).random(shape) if name == "y" else np.random.default_rng(0).normal(size=shape)
    )
    return random_values.astype(array.dtype)


def _labelled_like(leaf: Any, values: Array, axis: int) -> Any:
    """Return ``values`` with the dimensions and coordinates of the first samples of ``leaf``, a DataArray."""
    if not isinstance(leaf, xr.DataArray):
        return values
    first_samples = leaf.isel({leaf.dims[axis]: slice(0, values.shape[axis])})
    coords = {dim: first_samples[dim].variable for dim in first_samples.dims if dim in first_samples.coords}
    return xr.DataArray(values, dims=first_samples.dims, coords=coords)
