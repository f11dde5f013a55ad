"""Nested lists, tuples and dicts of tensors: Keras takes the entries of a dict by the order of their keys.

So do we for outputs. Inputs are numbered as the user wrote them down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .dialect import Dialect, dialect_of


def input_order(keras: Dialect, x: Any) -> list[int]:
    """For each input, as written down, its place among the leaves as Keras takes them."""
    count = iter(range(len(keras.tree.flatten(x))))
    taken: list[int] = keras.tree.flatten(_numbered(x, count))
    return [taken.index(i) for i in range(len(taken))]


def by_key(tree: Any) -> Any:
    """The same with the entries of every dict in the order in which Keras takes them."""
    if isinstance(tree, dict):
        return {key: by_key(tree[key]) for key in sorted(tree)}
    if isinstance(tree, list) or type(tree) is tuple:
        return type(tree)(by_key(part) for part in tree)
    return tree


def output_names(model: Any) -> tuple[str, ...]:
    """Keys of the outputs of a functional model that returns a dict, as ports count them; none for any other."""
    keras = dialect_of(model)
    if not isinstance(model, keras.Functional) or type(model).call is not keras.Functional.call:
        return ()
    _, outputs = keras.graph_of(model)
    if not isinstance(outputs, dict):
        return ()
    return tuple(".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(by_key(outputs)))


def _numbered(tree: Any, count: Iterator[int]) -> Any:
    if isinstance(tree, dict):
        return {key: _numbered(part, count) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [_numbered(part, count) for part in tree]
    return next(count)
