"""Array types, and nested tuples, lists, dicts and dataclasses of arrays.

``Array`` is any array of the array-API standard: NumPy, torch, JAX, CuPy. Entries of a dict keep their insertion order.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Array = Any
Namespace = Any


def leaves_of(tree: Any) -> list[Any]:
    """Return the arrays in nested tuples, lists, dicts and dataclasses, in order; None counts as no array."""
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves_of(part)]
    if isinstance(tree, tuple | list) and not is_packed(tree):
        return [leaf for part in tree for leaf in leaves_of(part)]
    if is_record(tree):
        return [leaf for field in dataclasses.fields(tree) for leaf in leaves_of(getattr(tree, field.name))]
    return [] if tree is None else [tree]


def arrays_of(tree: Any) -> list[Any]:
    """Return the arrays of :func:`leaves_of`; of a packed sequence its data."""
    return [leaf.data if is_packed(leaf) else leaf for leaf in leaves_of(tree)]


def named_leaves(tree: Any) -> tuple[str, ...]:
    """Return a name for every array of :func:`leaves_of`: its key or field, and ``key.1`` inside a nested part."""
    if isinstance(tree, Mapping):
        parts = [(str(key), part) for key, part in tree.items()]
    elif is_record(tree):
        parts = [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    elif isinstance(tree, tuple | list) and not is_packed(tree):
        parts = list(zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True))
    else:
        return () if tree is None else ("",)
    return tuple(f"{key}.{inner}" if inner else key for key, part in parts for inner in named_leaves(part))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same structure with ``function`` applied to every array; None stays None."""
    if isinstance(tree, Mapping) and is_record(tree):  # an output of Hugging Face: its fields are its entries
        mapped_record: Any = copy.copy(tree)
        for key, part in tree.items():
            mapped_record[key] = map_leaves(function, part)
        return mapped_record
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, part) for key, part in tree.items()}
    if isinstance(tree, tuple | list) and not is_packed(tree):
        parts = [map_leaves(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if is_record(tree):
        return map_fields(lambda part: map_leaves(function, part), tree)
    return None if tree is None else function(tree)


def is_record(tree: Any) -> bool:
    """Return whether a value is a dataclass instance, such as a model output. A Zarr array is none."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not hasattr(tree, "shape")


def map_fields(function: Callable[[Any], Any], record: Any) -> Any:
    """Return a copy of a dataclass instance with ``function`` applied to every field, frozen ones included."""
    mapped_record = copy.copy(record)
    for field in dataclasses.fields(record):
        object.__setattr__(mapped_record, field.name, function(getattr(record, field.name)))
    return mapped_record


def is_packed(tree: Any) -> bool:
    """Return whether ``tree`` is a torch ``PackedSequence``: a named tuple that is treated as one array."""
    return type(tree).__name__ == "PackedSequence"
