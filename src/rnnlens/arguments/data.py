"""Checks of input data: plain numeric arrays in one batch or a data set; conversion of any array to NumPy."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from itertools import count, cycle, repeat
from typing import Any

import numpy as np

from ..autodiff.tensors import engine_of, to_numpy
from ..errors import InputError, UnsupportedError, has_attribute, shape_of, short_repr
from ..settings import must_fit
from ..typing import arrays_of, container_of, is_packed, leaves_of, values_of

#: What to type where the data are text.
TEXT_HINT = (
    "encode text as integer ids first; of a Keras model that does so itself: ids = model.layers[0](x), "
    "inner = keras.Sequential(model.layers[1:]), inner(ids), and inner in place of model, ids in place of x"
)
_NUMBERS = re.compile(r"(bool|u?int|float|bfloat|half|double|long|short|e?char)[0-9a-z_]*")
_MAX_DEPTH, _MAX_ITEMS = 32, 20_000_000


def one_batch(name: str, value: Any) -> Any:
    """Check that ``value`` is one batch within the memory granted: an array, or a tuple, list or dict of arrays."""
    if is_source(value):
        raise InputError(
            f"{name} is a data set, and this function takes one batch.",
            got=type(value).__name__,
            expected="an array, or a tuple, list or dict of arrays",
            hint="x, y = next(iter(data_set)); rl.gradients(model, data_set) goes through all batches",
        )
    return examples(name, data_set(name, value))


def data_set(name: str, value: Any) -> Any:
    """Check that ``value`` is one batch of arrays or a source of batches, which is returned unchanged."""
    if isinstance(value, repeat | cycle | count):
        raise InputError(f"{name} never ends.", got=short_repr(value), expected="batches that end")
    if is_source(value):
        return value
    if is_instance(value, ("torch.utils.data", "Dataset")):
        hint = "torch.utils.data.DataLoader(dataset, batch_size=...)"
        message = f"{name} is a torch Dataset, which gives single samples."
        raise InputError(message, got=type(value).__name__, expected="batches", hint=hint)
    arrays = many_examples(name, value)
    if container_of(arrays) is None and shape_of(arrays) == ():
        raise InputError(f"{name} is a single number.", got="shape ()", expected="(sample, time, feature)")
    return arrays


def examples(name: str, value: Any) -> Any:
    """Check numeric arrays with samples on the first axis, and that they fit into the memory granted."""
    arrays = many_examples(name, value)
    refuse_large(name, arrays)
    return arrays


def refuse_large(name: str, value: Any, hint: str = "fewer samples or steps at a time", *, share: float = 1.0) -> None:
    """Raise TooLargeError if ``share`` times the size of the arrays in ``value`` exceeds the memory granted."""
    size = 0.0
    for leaf in arrays_of(value):
        itemsize = getattr(getattr(leaf, "dtype", None), "itemsize", None) or getattr(leaf, "itemsize", None) or 4
        size += share * math.prod(shape_of(leaf) or (0,)) * int(itemsize)
    must_fit(f"{name} alone is larger than the memory limit.", size, hint)


def many_examples(name: str, value: Any) -> Any:
    """Check numeric arrays, samples first, without a limit on memory; nested lists of numbers become one array."""
    _refuse_depth(name, value)
    if not any(_is_array(leaf) for leaf in values_of(value)):
        value = _from_numbers(name, value)
    return _map_arrays(_check_array, name, value)


def weights_of_samples(name: str, value: Any) -> Any:
    """Check ``sample_weight=``: finite numbers with samples on the first axis, without a limit on memory."""
    return _require_finite(name, plain_weights(name, value))


def plain_weights(name: str, value: Any) -> Any:
    """Check ``sample_weight=`` like :func:`weights_of_samples`; values may be NaN or infinite."""
    if has_attribute(value, "batch_sizes"):
        raise InputError(f"{name} is a packed sequence.", got=short_repr(value), expected="one number per sample")
    return many_examples(name, value)


def finite_states(name: str, value: Any) -> dict[str, Any]:
    """Check initial states like :func:`states`; their values must be finite."""
    return {
        layer: _require_finite(f"{name}[{layer!r}]", layer_states)
        for layer, layer_states in states(name, value).items()
    }


def _require_finite(name: str, tree: Any) -> Any:
    """Raise InputError if an array of a tree has a value that is not finite; return the tree."""
    for leaf in leaves_of(tree):
        if is_packed(leaf):
            continue
        values = as_numpy(leaf)
        # Of the extremes alone: an array of flags may be larger than memory, where the values are one number repeated.
        if values.dtype.kind == "f" and values.size and not np.isfinite([values.min(), values.max()]).all():
            hint = "rl.find_nonfinite(model, x, y, ...) follows such numbers through the model"
            raise InputError(f"{name} is not finite.", got="NaN or infinity", expected="finite numbers", hint=hint)
    return tree


def chunked(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return a check that returns numeric lazy arrays (Dask) unchanged, and applies ``check`` to other values."""

    def check_leaf(leaf_name: str, leaf: Any) -> Any:
        if not is_lazy(leaf):
            return _check_array(leaf_name, leaf)
        if getattr(leaf, "chunks", None) is None or not hasattr(leaf, "dtype"):
            expected = "a dask array, or a DataArray of one"
            raise InputError(
                f"{leaf_name} is lazy, and no array.", got=short_repr(type(leaf).__name__), expected=expected
            )
        _refuse_dtype(leaf_name, leaf.dtype)
        return leaf

    def check_unless_lazy(name: str, value: Any) -> Any:
        if not is_lazy(value):
            return check(name, value)
        if shape_of(value) == ():
            raise InputError(f"{name} is a single number.", got="shape ()", expected="(sample, time, feature)")
        _refuse_depth(name, value)
        return _map_arrays(check_leaf, name, value)

    return check_unless_lazy


def in_memory(name: str, value: Any) -> Any:
    """Raise InputError for a lazy array (Dask), which would be computed in this process. Nothing else is checked."""
    if is_lazy(value):
        hint = f"{name}.compute(), or fewer samples: {name}[:512].compute()"
        message = f"{name} is lazy, and this call needs numbers: it would be computed here, all of it."
        raise InputError(message, got=type(value).__name__, expected="an array in memory", hint=hint)
    return value


def is_lazy(tree: Any, depth: int = 0) -> bool:
    """Return whether an array, or any array in a tuple, list or dict, is backed by Dask; no data is read."""
    if isinstance(tree, Mapping | tuple | list) and not has_attribute(tree, "batch_sizes"):
        children = list(tree.values()) if isinstance(tree, Mapping) else tree
        # A long list of numbers is not gone through.
        is_number_list = isinstance(tree, tuple | list) and children and isinstance(children[0], int | float | str)
        return depth <= _MAX_DEPTH and not is_number_list and any(is_lazy(child, depth + 1) for child in children)
    # A DataArray has the method also without Dask; its chunks are None then.
    return hasattr(type(tree), "__dask_graph__") and getattr(tree, "chunks", ()) is not None


def states(name: str, value: Any) -> dict[str, Any]:
    """Check initial states, a dict from layer name to its states, and return a list of arrays for each layer."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(layer, str) for layer in value):
        expected = 'a dict from layer to its states, such as {"lstm": [h, c]}'
        raise InputError(f"{name}= is a mapping from layer names to arrays.", got=short_repr(value), expected=expected)
    arrays_by_layer = {}
    for layer, layer_states in value.items():
        arrays = examples(f"{name}[{layer!r}]", layer_states)
        shape = shape_of(arrays)  # one array of rank 3, as nested lists are, is split along its first axis
        arrays_by_layer[layer] = values_of(arrays) if shape is None else list(arrays) if len(shape) == 3 else [arrays]
    return arrays_by_layer


def is_source(x: Any) -> bool:
    """Return whether ``x`` is a source of batches: a data set, data loader, Keras sequence or iterator."""
    return is_instance(x, _TF_DATASET, ("torch.utils.data", "DataLoader"), *_SEQUENCES) or has_attribute(x, "__next__")


def is_dataset(x: Any) -> bool:
    """Return whether ``x`` is a ``tf.data.Dataset``."""
    return is_instance(x, _TF_DATASET)


def is_sequence(x: Any) -> bool:
    """Return whether ``x`` is a Keras ``PyDataset`` or a ``Sequence`` of tf_keras, which give batches by index."""
    return is_instance(x, *_SEQUENCES)


_TF_DATASET = ("tensorflow", "data.Dataset")
_SEQUENCES = (("keras", "utils.PyDataset"), ("tf_keras", "utils.Sequence"))


def is_instance(x: Any, *classes: tuple[str, str]) -> bool:
    """Return whether ``x`` is of one of these classes, by module and dotted name; no module is imported."""
    for module, name in classes:
        kind: Any = sys.modules.get(module)
        for attribute in name.split("."):
            kind = getattr(kind, attribute, None)
        if kind is not None and isinstance(x, kind):
            return True
    return False


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Convert an array of any framework to NumPy, also one that requires grad, lies on a device or is in bfloat16."""
    try:
        array = to_numpy(value)
    except Exception as error:
        expected = "an array with values"
        raise InputError("This cannot be read as an array.", got=short_repr(value), expected=expected) from error
    if array.dtype.name.startswith(("bfloat16", "float8", "float128", "longdouble")):
        return array.astype(np.float64 if array.dtype.itemsize > 8 else np.float32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_numbers(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Convert an array of any framework, or nested lists of real numbers, to a NumPy array.

    Raise InputError or UnsupportedError for any other value, such as text, complex numbers or a sparse array.
    """
    if not _is_array(value):
        _refuse_depth(name, value)
        return _from_numbers(name, value)
    return as_numpy(_check_array(name, value))


def _refuse_depth(name: str, value: Any, depth: int = 0, item_count: list[int] | None = None) -> None:
    """Raise InputError for lists nested too deeply, lists too long to convert, or dict keys that are no strings."""
    item_count = [0] if item_count is None else item_count
    if depth > _MAX_DEPTH:
        expected = f"at most {_MAX_DEPTH} nested lists"
        raise InputError(f"{name} is nested too deeply.", got=type(value).__name__, expected=expected)
    if isinstance(value, Mapping):
        keys = list(value.keys())  # a TensorDict iterates over its samples
        if not all(isinstance(key, str) for key in keys):
            got = ", ".join(short_repr(key) for key in keys[:3])
            raise InputError(f"{name} is a dict whose keys are not strings.", got=got, expected='{"name": array}')
        value = list(value.values())
    if not isinstance(value, tuple | list):
        return
    item_count[0] += len(value)
    if item_count[0] > _MAX_ITEMS:
        raise InputError(f"{name} is too long for a list.", got=type(value).__name__, expected="an array")
    for item in value:
        if isinstance(item, Mapping | tuple | list):
            _refuse_depth(name, item, depth + 1, item_count)


def _map_arrays(function: Callable[[str, Any], Any], name: str, tree: Any) -> Any:
    """Apply ``function(name, array)`` to each array of a tree; constants are returned unchanged."""
    container = container_of(tree)
    if container is None:
        return function(name, tree) if _is_array(tree) else tree
    is_mapping = isinstance(tree, Mapping)
    parts = zip(container.names, container.parts, strict=True)
    return container.rebuild(
        [_map_arrays(function, f"{name}[{key!r}]" if is_mapping else f"{name}[{key}]", part) for key, part in parts]
    )


def _from_numbers(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Convert nested lists of numbers to one NumPy array, or raise InputError."""
    if isinstance(value, Mapping) or value is None or (isinstance(value, tuple | list) and not values_of(value)):
        got = "None" if value is None else short_repr(value)
        raise InputError(f"{name} holds no data.", got=got, expected="an array with at least 1 sample")
    number_types = (int, float, complex, np.generic)
    if not all(isinstance(leaf, number_types) or has_attribute(leaf, "__array__") for leaf in values_of(value)):
        expected = "an array, or a tuple, list or dict of arrays"
        hint = TEXT_HINT if all(isinstance(leaf, str) for leaf in values_of(value)) else None
        if is_model := has_attribute(value, "parameters") or has_attribute(value, "trainable_variables"):
            is_first = name.isidentifier()
            hint = "the model first: rl.trace(model, x, y)" if is_first else "a variable of rl.trace(model, x, y)"
        got = f"a model, {type(value).__name__}" if is_model else short_repr(value)
        raise InputError(f"{name} is not numeric data.", got=got, expected=expected, hint=hint)
    _refuse_table(name, value)
    try:
        array = np.asarray(value)
    except Exception:
        message = f"{name} is not an array: its rows differ in length, or contain something other than numbers."
        raise InputError(
            message, got=short_repr(value), expected="rows of one length", hint="pad them to one length and mask"
        ) from None
    _refuse_dtype(name, array.dtype)
    if array.ndim == 0:
        raise InputError(f"{name} is a single number.", got=short_repr(value), expected="(sample, time, feature)")
    return array


def _refuse_table(name: str, value: Any) -> None:
    """Raise InputError for a table of measurements as input: its rows are steps or samples, which only the user knows.

    A table of integers passes: it is read as token ids, (sample, time).
    """
    if name.partition("[")[0] != "x" or not is_instance(value, ("pandas", "DataFrame"), ("polars", "DataFrame")):
        return
    values = value.to_numpy()
    if values.dtype.kind != "f":
        return
    window = "numpy.lib.stride_tricks.sliding_window_view"
    raise InputError(
        f"{name} is a table, and a recurrent network reads sequences.",
        got=f"DataFrame of {values.shape[0]} rows and {values.shape[1]} columns",
        expected="an array of shape (sample, time, feature)",
        hint=f"if rows are steps, windows of 20: x = {window}(df.to_numpy('float32'), 20, axis=0).swapaxes(1, 2).copy()"
        "; if each row is a sample: df.to_numpy('float32')",
    )


def _is_array(leaf: Any) -> bool:
    """Return whether a value, or its class, has a ``shape``, or is a packed sequence; a NumPy scalar is no array."""
    is_other = isinstance(leaf, type | np.generic)
    return not is_other and (hasattr(type(leaf), "shape") or has_attribute(leaf, "shape") or is_packed(leaf))


def _check_array(name: str, value: Any) -> Any:
    """Check that an array has numeric values, and convert it to native byte order."""
    if has_attribute(value, "batch_sizes"):
        return value
    if isinstance(value, np.ma.MaskedArray):
        expected = "plain numbers; the mask of a masked array would be dropped"
        hint = f"{name}.filled(0), and a Masking layer or lengths for what is missing"
        raise InputError(f"{name} is a masked array.", got=short_repr(value), expected=expected, hint=hint)
    if is_lazy(value):
        in_memory(name, value)
    if not has_attribute(value, "dtype"):
        return _from_numbers(name, value)
    _refuse_unreadable(name, value)
    _refuse_dtype(name, value.dtype)
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    if not hasattr(type(value), "__getitem__"):  # of no framework
        return as_numpy(value)
    is_negative = getattr(value, "is_neg", None)  # a torch tensor whose sign is a flag: NumPy cannot read it
    return value.resolve_neg() if callable(is_negative) and is_negative() is True else value


def _refuse_dtype(name: str, dtype: Any) -> None:
    dtype_name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if dtype_name.startswith("complex") or dtype_name in ("cfloat", "cdouble"):
        raise UnsupportedError(
            f"{name} is complex: its imaginary part would be dropped.",
            got=dtype_name,
            expected="real numbers",
            hint="real and imaginary part as two features",
        )
    if name.partition("[")[0] == "x" and dtype_name == "string":
        return  # a tensor of TensorFlow for a layer of the model that looks words up
    if not _NUMBERS.fullmatch(dtype_name):
        hint = TEXT_HINT if dtype_name.startswith(("str", "object", "bytes")) else None
        raise InputError(f"{name} is not numeric.", got=f"dtype {dtype}", expected="numbers", hint=hint)


def _has_a_value(variable: Any) -> bool:
    """Return whether a TensorFlow variable can be read; that of a graph can be read by its session only."""
    try:
        return bool(as_numpy(variable).dtype.kind != "O")
    except InputError:
        return False


def _refuse_unreadable(name: str, value: Any) -> None:
    """Raise InputError for arrays without values, and for ragged, quantized or sparse arrays."""
    kind, is_sparse = type(value).__name__, str(getattr(value, "layout", "")).startswith("torch.sparse")
    if getattr(value, "is_meta", False) or kind in ("KerasTensor", "SymbolicTensor", "ShapeDtypeStruct", "FakeTensor"):
        problem, hint = "has a shape but no values", "a tensor with values, not a meta or symbolic tensor"
    elif getattr(value, "is_nested", False) or "Ragged" in kind:
        problem, hint = "is ragged", "pad to one length and mask"
    elif getattr(value, "is_quantized", False):
        problem, hint = "is quantized", f"{name}.dequantize()"
    elif engine_of(value) == "tensorflow" and "Variable" in kind and not _has_a_value(value):
        problem, hint = "is a variable of a graph, without a value of its own", f"session.run({name})"
    elif "parse" in kind or hasattr(value, "tocsr") or kind in ("BCOO", "BCSR") or is_sparse:
        problem, hint = "is sparse", f"{name}.to_dense(), .todense() or tf.sparse.to_dense({name})"
    else:
        return
    raise InputError(f"{name} {problem}.", got=kind, expected="a plain array", hint=hint)
