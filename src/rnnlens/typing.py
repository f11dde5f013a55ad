"""Array types, and trees: nested tuples, lists, dicts, dataclasses and registered containers of arrays and constants.

``Array`` is any array of the array-API standard: NumPy, torch, JAX, CuPy. A *leaf* is a numeric array, a tensor of
strings of TensorFlow, or a torch ``PackedSequence``. Anything else that is no container is a *constant*: numbers, NumPy
scalars, strings, None, objects. Constants are handed on unchanged. Entries of a dict keep their insertion order.
Containers of other classes are those registered with ``torch.utils._pytree``, JAX, optree or Keras; none of these is
imported here.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Array = Any
Namespace = Any


class Container(NamedTuple):
    """The parts of one container, their names, and a function that builds the same container from other parts."""

    names: Sequence[str]
    parts: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]


#: Types whose values have no parts; made once, since most values of a call are of them.
_NO_CONTAINER = str | bytes | int | float | np.ndarray | np.generic | type


def container_of(tree: Any) -> Container | None:
    """Return the parts of a container; None for a leaf or a constant."""
    if tree is None or isinstance(tree, _NO_CONTAINER):
        return None
    registered = getattr(sys.modules.get("torch.utils._pytree"), "SUPPORTED_NODES", {}).get(type(tree))
    if registered is not None and type(tree) not in _PLAIN and not is_record(tree):
        parts, context = registered.flatten_fn(tree)
        return Container(_names(tree, parts), parts, lambda changed: registered.unflatten_fn(list(changed), context))
    if isinstance(tree, Mapping):
        return Container(list(map(str, tree)), list(tree.values()), lambda parts: _with_entries(tree, parts))
    if isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", None)
        build = type(tree) if names is None else lambda parts: type(tree)(*parts)
        return None if is_packed(tree) else Container(names or list(map(str, range(len(tree)))), tree, build)
    if is_record(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return Container(names, [getattr(tree, name) for name in names], lambda parts: _with_fields(tree, names, parts))
    has_other_registry = "jax" in sys.modules or "optree" in sys.modules
    return _registered_elsewhere(tree) if has_other_registry and not is_leaf(tree) else None


def is_leaf(value: Any) -> bool:
    """Return whether a value that is no container is a leaf: an array, a tensor of strings, or a packed sequence."""
    if isinstance(value, type | np.generic):
        return False
    try:
        dtype = value.dtype
        _ = value.shape
    except Exception:  # of any class of the user
        return is_packed(value)
    name = getattr(dtype, "name", "")
    if isinstance(name, str) and name == "string":  # an attribute of a Delayed of Dask compares as no truth value
        return hasattr(dtype, "as_datatype_enum")  # of TensorFlow, for layers that look words up; not of pandas
    return dtype is not None and getattr(dtype, "kind", "") not in {*"OSUMmT"}


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    container = container_of(tree)
    if container is None:
        return [tree] if is_leaf(tree) else []
    return [leaf for part in container.parts for leaf in leaves_of(part)]


def arrays_of(tree: Any) -> list[Any]:
    """Return the arrays of :func:`leaves_of`; of a packed sequence its data."""
    return [leaf.data if is_packed(leaf) else leaf for leaf in leaves_of(tree)]


def values_of(tree: Any) -> list[Any]:
    """Return leaves and constants of a tree, in order."""
    container = container_of(tree)
    if container is None:
        return [tree]
    return [value for part in container.parts for value in values_of(part)]


def named_values(tree: Any) -> list[tuple[str, Any]]:
    """Return leaves and constants of a tree with the names of :func:`named_leaves`."""
    container = container_of(tree)
    if container is None:
        return [("", tree)]
    named_parts = zip(container.names, container.parts, strict=True)
    return [
        (f"{name}.{inner}" if inner else name, value)
        for name, part in named_parts
        for inner, value in named_values(part)
    ]


def named_leaves(tree: Any) -> tuple[str, ...]:
    """Return a name for every leaf: its key, field or position, ``key.1`` inside a nested part; "" for a lone leaf."""
    return tuple(name for name, value in named_values(tree) if is_leaf(value))


def named_constants(tree: Any) -> dict[str, Any]:
    """Return the constants of a tree by the names of :func:`named_leaves`, without None."""
    return {name: value for name, value in named_values(tree) if value is not None and not is_leaf(value)}


def signature(tree: Any) -> Hashable:
    """Return the names, shapes, dtypes and constants of a tree; None if it has constants that cannot be compared."""
    entries: list[Hashable] = []
    for name, value in named_values(tree):
        array = value.data if is_packed(value) else value
        if is_leaf(value):
            entries.append((name, tuple(np.shape(array)), str(array.dtype)))
        elif value is None or isinstance(value, str | bytes | int | float | np.generic):
            entries.append((name, repr(value)))
        else:
            return None
    return tuple(entries)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same structure with ``function`` applied to every leaf; constants stay."""
    container = container_of(tree)
    if container is None:
        return function(tree) if is_leaf(tree) else tree
    return container.rebuild([map_leaves(function, part) for part in container.parts])


def is_record(tree: Any) -> bool:
    """Return whether a value is a dataclass instance, such as a model output. A Zarr array is none."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not hasattr(tree, "shape")


def is_packed(tree: Any) -> bool:
    """Return whether ``tree`` is a torch ``PackedSequence``: a named tuple that is treated as one array."""
    return type(tree).__name__ == "PackedSequence"


def _with_entries(tree: Mapping[Any, Any], parts: Sequence[Any]) -> Any:
    entries = dict(zip(tree, parts, strict=True))
    if not is_record(tree):
        return entries
    mapped: Any = copy.copy(tree)  # an output of Hugging Face: its fields are its entries
    for key, part in entries.items():
        mapped[key] = part
    return mapped


def _with_fields(record: Any, names: Sequence[str], parts: Sequence[Any]) -> Any:
    """Return a copy of a dataclass instance, frozen or not, with other values of its fields."""
    mapped = copy.copy(record)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(mapped, name, part)
    return mapped


#: Containers with a rule of their own here, although torch registers them too.
_PLAIN = (dict, list, tuple)


def _registered_elsewhere(tree: Any) -> Container | None:
    jax: Any = sys.modules.get("jax")
    optree: Any = sys.modules.get("optree")
    if jax is not None:
        parts, structure = jax.tree.flatten(tree, is_leaf=lambda part: part is not tree)
        if not (len(parts) == 1 and parts[0] is tree):
            return Container(_names(tree, parts), parts, lambda changed: jax.tree.unflatten(structure, changed))
    for namespace in ("", "keras") if optree is not None else ():
        try:
            parts, metadata, _, build = optree.tree_flatten_one_level(tree, namespace=namespace)
        except Exception:  # not registered: its error shows the object, whose text may fail
            continue
        return Container(_names(tree, parts), parts, partial(build, metadata))
    return None


def _names(tree: Any, parts: Sequence[Any]) -> Sequence[str]:
    """Return the keys of a registered container where it has one for each part, else positions."""
    keys = getattr(tree, "keys", None)
    names = list(map(str, keys())) if callable(keys) else []
    return names if len(names) == len(parts) else list(map(str, range(len(parts))))
