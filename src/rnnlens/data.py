"""Batches from arrays, Zarr, ``tf.data``, ``DataLoader`` and generators, read in one way.

No framework is imported: the types of TensorFlow, torch and Keras are looked up in ``sys.modules``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from .arguments.data import is_dataset, is_sequence, is_source, refuse_large
from .autodiff import tensors
from .errors import InputError, has_attribute, raised_by, short_repr
from .layout import Layout
from .typing import container_of, is_packed, leaves_of, map_leaves

__all__ = [
    "DataBatch",
    "DataLayouts",
    "batches",
    "count_batches",
    "has_axes",
    "is_packed",
    "is_read_in_batches",
    "join",
    "leaf_sample_count",
    "leaves_of",
    "map_leaves",
    "pad_packed",
    "sample_count",
    "samples_of",
    "samples_of_arrays",
    "samples_of_tree",
    "select",
]

#: Layouts of the arrays of "x", "y" and "sample_weight"; None for a packed sequence.
DataLayouts = Mapping[str, Sequence[Layout | None]]


class DataBatch(NamedTuple):
    """One batch: the model's input, the target and the sample weights; the last two may be None."""

    x: Any
    y: Any = None
    sample_weight: Any = None


def batches(
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batch_size: int | None = None,
    as_numpy: bool = False,
    layouts: DataLayouts | None = None,
) -> Iterator[DataBatch]:
    """Yield the batches of a data set, with one batch in memory at a time.

    ``x`` is an array, nested arrays, a Zarr array, or a source of batches, which contain their own targets: a
    ``tf.data.Dataset``, torch ``DataLoader``, Keras ``PyDataset`` or generator. Without ``batch_size``, arrays are one
    batch, and a Zarr array is read by its chunks. ``as_numpy`` converts tensors of a source, for a model of another
    framework. ``layouts``: axis names of the arrays; None if samples come first.

    >>> import numpy as np
    >>> [batch.x.shape for batch in batches(np.zeros((5, 3)), batch_size=2)]
    [(2, 3), (2, 3), (1, 3)]
    """
    if batch_size is not None and batch_size < 1:
        raise InputError("The batch size must be positive.", got=f"batch_size={batch_size}")
    if not is_source(x):
        yield from _batches_of_arrays(DataBatch(x, y, sample_weight), batch_size, layouts)
        return
    if y is not None or sample_weight is not None:
        raise InputError(
            f"A {type(x).__name__} has its own targets and weights.",
            got="y or sample_weight beside it",
            expected="batches of x, (x, y) or (x, y, sample_weight)",
            hint="zip y into the data set: batches of (x, y)",
        )
    is_empty = True
    for element in _source_elements(x, batch_size):
        is_empty = False
        yield _as_batch(element, as_numpy)
    if is_empty:
        raise _empty(x)


def _empty(x: Any) -> InputError:
    return InputError(
        "The data set is empty.",
        got=f"a {type(x).__name__} without batches",
        expected="at least 1 batch",
        hint="a generator can be read only once: create a new one for every call",
    )


def first_batch(x: Any) -> tuple[DataBatch, Any]:
    """Return the first batch of a source as NumPy arrays, and the source from its start."""
    element = next(_source_elements(x, None), None)
    if element is None:
        raise _empty(x)
    return _as_batch(element, True), chain([element], x) if has_attribute(x, "__next__") else x


def is_read_in_batches(x: Any, batch_size: int | None) -> bool:
    """Return whether ``x`` is read in batches: a source, a lazily read array, or any data with a batch size."""
    return batch_size is not None or is_source(x) or _is_lazy(x)


def count_batches(x: Any, batch_size: int | None = None, layouts: DataLayouts | None = None) -> int | None:
    """Return how many batches :func:`batches` yields; None if that is unknown before reading."""
    if not is_source(x):
        size = batch_size or _natural_size(x, layouts)
        return -(-sample_count(x, _layouts_of(layouts, "x")) // size)
    if is_dataset(x):
        count = int(x.cardinality()) if batch_size is None else -1
        return count if count >= 0 else None
    try:
        return len(x)
    except TypeError:
        return None


def sample_count(x: Any, layouts: Sequence[Layout | None] | None = None) -> int:
    """Return the number of samples of an array, or of the arrays in a tuple, list or dict."""
    leaves = leaves_of(x)
    pairs = list(zip(leaves, layouts or [None] * len(leaves), strict=True))
    lengths = {leaf_sample_count(leaf, layout) for leaf, layout in pairs if has_axes(leaf)}
    if not lengths:
        if x is not None and container_of(x) is None:
            _sample_count(x)  # raises
        raise InputError("There is no data.", got=short_repr(x), expected="an array with at least 1 sample")
    if len(lengths) > 1:
        raise InputError(
            "The arrays have different numbers of samples.",
            got=", ".join(map(str, sorted(lengths))),
            hint=f"if another axis counts samples, name the axes: axes={_axes_by_input(x)}",
        )
    count = lengths.pop()
    if count == 0:
        shape = next(_shape(leaf) for leaf in leaves if has_axes(leaf))
        raise InputError("Batch is empty.", got=f"x of shape {shape}", expected="at least 1 sample")
    return count


def _axes_by_input(x: Any) -> dict[str, tuple[Any, ...]]:
    """Return axes to type in ``axes=`` for inputs of which the shortest first axis counts samples."""
    keys = list(x) if isinstance(x, Mapping) else range(len(leaves_of(x)))
    shapes = {f"input[{key}]": _shape(leaf) for key, leaf in zip(keys, leaves_of(x), strict=False)}
    shortest = min(shape[0] for shape in shapes.values() if shape)
    axes: dict[str, tuple[Any, ...]] = {}
    for name, shape in shapes.items():
        is_folded = shape[:1] > (shortest,) and len(shape) < 3 and shape[0] % shortest == 0
        leading = [("time", "sample")] if is_folded else ["time", "sample"] if shape[:1] > (shortest,) else ["sample"]
        if shape:
            axes[name] = tuple([*leading, "feature", *(f"axis_{i}" for i in range(2, len(shape)))][: len(shape)])
    return axes


def has_axes(leaf: Any) -> bool:
    """Return whether a leaf has axes, so that one of them may count samples: a packed sequence has, a number not."""
    return is_packed(leaf) or bool(_shape(leaf))


def samples_of_arrays(tree: Any, start: int, stop: int) -> Any:
    """Return samples ``start:stop`` of an array or nested arrays, repeating an array of one sample; None stays None."""

    def cut(leaf: Any) -> Any:
        if not has_axes(leaf):
            return leaf
        if _sample_count(leaf) == 1:
            return tensors.repeat_first_axis(leaf, stop - start)
        return leaf[start:stop]

    return None if tree is None else map_leaves(cut, tree)


def join(trees: Sequence[Any], layouts: Sequence[Layout | None] | None = None) -> Any:
    """Concatenate several batches along their samples: arrays, or tuples, lists and dicts of arrays."""
    leaf_layouts = iter(layouts if layouts is not None else [None] * len(leaves_of(trees[0])))
    other_leaves = [iter(leaves_of(tree)) for tree in trees[1:]]

    def join_leaf(leaf: Any) -> Any:
        layout, leaves = next(leaf_layouts), [leaf, *map(next, other_leaves)]
        axis = 0 if layout is None or layout.sample is None else layout.sample
        return tensors.join(leaves, axis) if has_axes(leaf) else leaf

    return map_leaves(join_leaf, trees[0])


def leaf_sample_count(leaf: Any, layout: Layout | None) -> int:
    """Return the number of samples of one array: without a layout on its first axis, or its packed batch size."""
    if layout is None or layout.sample is None or is_packed(leaf):
        return _sample_count(leaf)
    axis = next(i for i, names in enumerate(layout.axes) if layout.names[layout.sample] in names)
    size = _shape(leaf)[axis]
    if len(layout.axes[axis]) > 1:
        raise InputError(
            "The sample axis of x is merged with another axis, so samples cannot be counted.",
            got=f"an axis of {' and '.join(layout.axes[axis])}, of length {size}",
            hint="an array with an axis for samples alone",
        )
    return size


def samples_of(leaf: Any, layout: Layout | None, start: int, stop: int, count: int = 0) -> Any:
    """Return samples ``start:stop`` of one array.

    ``count``, the array's number of samples, is needed for a layout that folds samples with another axis.
    """
    if is_packed(leaf):
        return _packed_samples(leaf, start, stop)
    if not has_axes(leaf):
        return leaf
    return leaf[start:stop] if layout is None else layout.cut(leaf, start, stop, count)


def pad_packed(packed: Any) -> Any:
    """Return a torch ``PackedSequence`` as a padded tensor, samples first, in the caller's order."""
    return sys.modules["torch.nn.utils.rnn"].pad_packed_sequence(packed, batch_first=True)[0]


def _packed_samples(packed: Any, start: int, stop: int) -> Any:
    """Return samples ``start:stop`` of a torch ``PackedSequence``, counted in the caller's order."""
    rnn = sys.modules["torch.nn.utils.rnn"]
    padded_values, lengths = rnn.pad_packed_sequence(packed, batch_first=True)
    return rnn.pack_padded_sequence(
        padded_values[start:stop], lengths[start:stop], batch_first=True, enforce_sorted=False
    )


def _layouts_of(layouts: DataLayouts | None, name: str) -> Sequence[Layout | None] | None:
    return None if layouts is None else layouts[name]


def _batches_of_arrays(data: DataBatch, batch_size: int | None, layouts: DataLayouts | None) -> Iterator[DataBatch]:
    count = sample_count(data.x, _layouts_of(layouts, "x"))
    if layouts is None:
        _check_lengths(data)
    size = batch_size or _natural_size(data.x, layouts)
    refuse_large("A batch", data.x, f"batch_size={max(1, size // 2)} or less", share=min(1.0, size / count))
    if size >= count and not _is_lazy(data.x):
        yield data
        return
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield DataBatch(
            *(samples_of_tree(getattr(data, name), _layouts_of(layouts, name), start, stop, count) for name in _PARTS)
        )


_PARTS = ("x", "y", "sample_weight")


def samples_of_tree(tree: Any, layouts: Sequence[Layout | None] | None, start: int, stop: int, count: int) -> Any:
    """Return samples ``start:stop`` of every array in a tree of ``count`` samples; None stays None."""
    if tree is None:
        return None
    leaf_layouts = iter(layouts if layouts is not None else [None] * len(leaves_of(tree)))
    return map_leaves(lambda leaf: samples_of(leaf, next(leaf_layouts), start, stop, count), tree)


def select(tree: Any, samples: Any) -> Any:
    """Return the samples at an index, array of indices or slice of every leaf that has axes; samples come first."""
    return map_leaves(lambda leaf: leaf[samples] if has_axes(leaf) else leaf, tree)


def _check_lengths(data: DataBatch) -> None:
    count = sample_count(data.x)
    for name in _PARTS[1:]:
        part = getattr(data, name)
        if part is not None and sample_count(part) != count:
            raise InputError(
                f"x and {name} have different numbers of samples.",
                got=f"{count} and {sample_count(part)}, the lengths of the first axes of x and {name}",
                hint='if another axis counts samples, name the axes: axes={"input": ("time", "sample", "feature"), '
                f'"{name}": ("time", "sample")}}',
            )


def _natural_size(x: Any, layouts: DataLayouts | None = None) -> int:
    """Return the default batch size: the chunk length of a lazily read array, else the number of samples."""
    for leaf, layout in zip(leaves_of(x), _layouts_of(layouts, "x") or [None] * len(leaves_of(x)), strict=True):
        if _is_lazy(leaf):
            return int(leaf.chunks[0 if layout is None or layout.sample is None else layout.sample])
    return sample_count(x, _layouts_of(layouts, "x"))


def _source_elements(x: Any, batch_size: int | None) -> Iterator[Any]:
    """Yield the elements of a source; an exception of the user's source becomes a UserCodeError."""
    if batch_size is not None and not is_dataset(x):
        raise InputError(
            f"A {type(x).__name__} has its own batches.",
            got=f"batch_size={batch_size}",
            hint="set the batch size when creating the data set",
        )
    source_name, sentinel = f"Your data set, a {type(x).__name__},", object()
    with raised_by(source_name):
        source = x if batch_size is None else x.rebatch(batch_size)
        elements = (x[i] for i in range(len(x))) if is_sequence(x) else iter(source)
    while True:
        with raised_by(source_name):
            element = next(elements, sentinel)
        if element is sentinel:
            return
        yield element


def _as_batch(element: Any, as_numpy: bool) -> DataBatch:
    """Convert one element of a source, (x,), (x, y) or (x, y, sample_weight) as a tuple or list, to a DataBatch."""
    parts = tuple(element) if isinstance(element, tuple | list) else (element,)
    if not 1 <= len(parts) <= 3:
        raise InputError(
            "An element of the data set has too many parts.",
            got=f"{len(parts)} parts",
            expected="x, (x, y) or (x, y, sample_weight)",
            hint="put several inputs into one tuple or dict: ((x1, x2), y)",
        )
    leaves = [leaf for part in parts for leaf in leaves_of(part)]
    # Tensors of TensorFlow are always converted, for other engines of Keras.
    if as_numpy or any(tensors.engine_of(leaf) == "tensorflow" for leaf in leaves):
        parts = tuple(None if part is None else map_leaves(_leaf_to_numpy, part) for part in parts)
    return DataBatch(*parts)


def _leaf_to_numpy(leaf: Any) -> Any:
    return tensors.to_numpy(leaf) if hasattr(leaf, "shape") else leaf


def _is_lazy(x: Any) -> bool:
    """Return whether ``x`` is, or contains, a Zarr or HDF5 array, which is read in chunks; False for Dask and NumPy."""
    if container_of(x) is not None:
        return any(_is_lazy(leaf) for leaf in leaves_of(x))
    return isinstance(getattr(x, "chunks", None), tuple) and not hasattr(x, "__dask_graph__") and bool(x.chunks)


def _sample_count(leaf: Any) -> int:
    if is_packed(leaf):
        return int(leaf.batch_sizes[0])
    shape = _shape(leaf)
    if not shape:
        raise InputError(
            "This data cannot be split into batches.",
            got=f"{type(leaf).__name__}",
            expected="an array with samples first, tf.data.Dataset, DataLoader, generator or Zarr array",
        )
    return int(shape[0])


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))
