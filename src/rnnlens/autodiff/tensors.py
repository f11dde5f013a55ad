"""Conversion between the tensors of torch, TensorFlow, JAX and NumPy arrays, without importing a framework.

A framework is used only if it is already imported; all other values are converted by NumPy. xarray is kept from
importing Dask in the same way.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..typing import Array

#: Tensor classes of each engine.
_TENSORS = {
    "torch": ("Tensor",),
    "tensorflow": ("Tensor", "Variable", "RaggedTensor", "SparseTensor"),
    "jax": ("Array",),
}

#: Dtypes that NumPy does not have, and the dtypes they are converted to.
_WIDENED = {"bfloat16": "float32"}


def engine_of(value: Any) -> str | None:
    """Return the name of the engine that a tensor belongs to; None for NumPy arrays and everything else."""
    if isinstance(value, np.ndarray):
        return None
    for engine, names in _TENSORS.items():
        if (module := sys.modules.get(engine)) is None:
            continue
        classes = tuple(tensor_class for name in names if (tensor_class := getattr(module, name, None)) is not None)
        if classes and isinstance(value, classes):
            return engine
    return None


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Convert any array to NumPy, also one that requires grad or lies on a device; bfloat16 becomes float32.

    Memory is shared where possible.
    """
    if engine_of(value) == "torch":
        value = value.detach().cpu()
        value = (value.float() if dtype_name(value) == "bfloat16" else value).resolve_conj().resolve_neg().numpy()
    values = np.asarray(value)
    # NumPy's own dtypes are never of kind "V"; their names take microseconds.
    return values.astype(np.float32) if values.dtype.kind == "V" and values.dtype.name == "bfloat16" else values


def shared_memory_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the NumPy array that shares memory with a torch tensor on the CPU; None for anything else."""
    if engine_of(value) != "torch" or value.device.type != "cpu":
        return None
    array: np.ndarray[Any, Any] = value.resolve_neg().numpy()
    return array


def converted_like(array: Any, reference: Any) -> Array:
    """Convert an array to the kind, dtype and device of another."""
    engine = engine_of(reference)
    if engine == "torch":
        return array.to(reference) if engine_of(array) == "torch" else reference.new_tensor(np.asarray(array))
    name = dtype_name(reference)
    return np.asarray(to_numpy(array), dtype=reference.dtype if engine is None else _WIDENED.get(name, name))


def join(arrays: Sequence[Any], axis: int) -> Array:
    """Concatenate arrays of one library along an axis."""
    if engine_of(arrays[0]) == "torch":
        return sys.modules["torch"].cat([array.detach() for array in arrays], dim=axis)
    return np.concatenate([np.asarray(array) for array in arrays], axis=axis)


def flip(array: Any, axis: int) -> Array:
    """Reverse an array along an axis, as a copy."""
    return array.flip(axis) if engine_of(array) == "torch" else np.flip(array, axis).copy()


def repeat_first_axis(row: Any, count: int) -> Array:
    """Repeat an array whose first axis has length 1, without a copy."""
    if engine_of(row) == "torch":
        return row.expand(count, *row.shape[1:])
    return np.broadcast_to(np.asarray(row), (count, *row.shape[1:]))


def dtype_name(value: Any) -> str:
    """Return the name of an array's dtype without its library's prefix, such as "float32"."""
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def running_engines() -> set[str]:
    """Return the names of the engines, of JAX and TensorFlow, that have already run in this process.

    An engine that has run has threads; a forked process lacks them and would wait for them forever. Torch is not
    included, because it does not show whether it has run.
    """
    engines = set()
    xla_bridge = sys.modules.get("jax._src.xla_bridge")
    if xla_bridge is not None and getattr(xla_bridge, "_backends", None):
        engines.add("jax")
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is not None and getattr(getattr(context, "_context", None), "_context_handle", None) is not None:
        engines.add("tensorflow")
    return engines


def needs_no_threads(engine: str) -> bool:
    """Return whether an engine computes in the calling thread alone: torch set to one thread."""
    return engine == "torch" and sys.modules["torch"].get_num_threads() == 1


@contextmanager
def global_random_states_restored() -> Iterator[None]:
    """Restore the global random generators of Python, NumPy and torch at the end of the block.

    Data sets of the user draw the order of their samples from them.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch = sys.modules.get("torch")
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(torch_state)


class DaskOnceImported:
    """Record of Dask for xarray, read from the imported modules; the attributes are those of xarray's own record."""

    def __init__(self, version: Callable[[str], Any]) -> None:
        self._version = version

    @property
    def module(self) -> Any:
        """The package, or None before it is imported."""
        return sys.modules.get("dask")

    @property
    def available(self) -> bool:
        """Whether Dask is imported."""
        return self.module is not None

    @property
    def type(self) -> tuple[Any, ...]:
        """Class of dask arrays, or nothing before it is imported."""
        array = getattr(sys.modules.get("dask.array"), "Array", None)
        return () if array is None else (array,)

    @property
    def version(self) -> Any:
        """Version of Dask; 0 before it is imported."""
        return self._version(getattr(self.module, "__version__", "0.0.0"))


def keep_dask_out(pycompat: Any, utils: Any) -> None:
    """Patch xarray so that it does not import Dask when it creates its first array, unless Dask is imported already.

    Nothing can be a dask array before Dask is imported, so the answer is the same. ``pycompat`` and ``utils`` are
    modules of xarray; nothing is done if this xarray looks for Dask in another way.
    """
    known_modules = getattr(pycompat, "_cached_duck_array_modules", None)
    original_check = getattr(utils, "is_dask_collection", None)
    if (
        not isinstance(known_modules, dict)
        or original_check is None
        or isinstance(known_modules.get("dask"), DaskOnceImported)
    ):
        return

    def is_dask_collection(x: object) -> bool:
        return "dask" in sys.modules and bool(original_check(x))

    known_modules["dask"] = DaskOnceImported(pycompat.Version)
    utils.is_dask_collection = is_dask_collection
