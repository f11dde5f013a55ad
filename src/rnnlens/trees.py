"""Nested tuples, lists and dicts of arrays: the entries of a dict in the order in which the user wrote them down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def leaves_of(tree: Any) -> list[Any]:
    """Arrays within nested tuples, lists and dicts, in order; None is none."""
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves_of(part)]
    if isinstance(tree, tuple | list) and not is_packed(tree):
        return [leaf for part in tree for leaf in leaves_of(part)]
    return [] if tree is None else [tree]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with ``function`` applied to every array."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, part) for key, part in tree.items()}
    if isinstance(tree, tuple | list) and not is_packed(tree):
        parts = [map_leaves(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return None if tree is None else function(tree)


def is_packed(tree: Any) -> bool:
    """A torch ``PackedSequence`` is a named tuple, but one thing."""
    return type(tree).__name__ == "PackedSequence"
