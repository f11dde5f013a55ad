"""Conversion of attributes that files cannot store (True, None, lists, mappings) to JSON text and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from ..errors import FileError, InputError, message
from .disk.limits import TEXT

_MARK = "json:"


def encode(tree: xr.DataTree) -> None:
    """Convert all attributes of a tree to types that files can store, in place.

    Raises
    ------
    InputError
        If a text attribute is longer than ``TEXT`` characters, which :func:`decode` would refuse.
    """
    _change(tree, _to_file)
    if name := _too_long(tree):
        expected = f"at most {TEXT} characters as JSON"
        raise InputError(message(f"The attribute {name!r} is too long for a file.", expected=expected))


def decode(tree: xr.DataTree) -> None:
    """Convert the attributes of a tree read from a file back to plain Python values, in place.

    Raises
    ------
    FileError
        If a text attribute is longer than ``TEXT`` characters.
    """
    if name := _too_long(tree):
        raise FileError(
            message(f"The attribute {name!r} is too long to be read.", expected=f"at most {TEXT} characters")
        )
    _change(tree, _from_file)


def _too_long(tree: xr.DataTree) -> str | None:
    """Return the name of the first text attribute longer than ``TEXT`` characters, or None."""
    for node in tree.subtree:
        for attrs in (node.attrs, *(variable.attrs for variable in node.variables.values())):
            for name, value in attrs.items():
                if isinstance(value, str) and len(value) > TEXT:
                    return str(name)
    return None


def _change(tree: xr.DataTree, change: Callable[[Any], Any]) -> None:
    for node in tree.subtree:
        node.attrs = _changed(node.attrs, change)
        for variable in node.variables.values():
            variable.attrs = _changed(variable.attrs, change)


def _changed(attrs: Mapping[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any]:
    return {key: change(value) for key, value in attrs.items()}


def _to_file(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    native = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    if native or (isinstance(value, str) and not value.startswith(_MARK)):
        return value
    return _MARK + json.dumps(value, default=_plain)


def _from_file(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_MARK):
        return json.loads(value.removeprefix(_MARK))
    return value.item() if isinstance(value, np.generic) else value


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent: arrays to lists, anything else to its text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
