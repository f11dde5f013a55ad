"""Conversion of what files cannot store: names of layers, attributes and times.

Names become paths of a DataTree, attributes (True, None, lists, mappings) JSON text, times integers.

A layer of a nested model, ``"encoder/lstm"``, is the node ``lstm`` of the group ``encoder``. Groups of a tree share
their coordinates with their children, whose sizes must then agree. So a layer that has variables and also contains
layers keeps its variables in a child named ``"@"``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
import xarray as xr

from ..errors import FileError, InputError
from .disk import TEXT_LIMIT

OWN_NODE, EMPTY_PART = "@", "%"
_JSON_PREFIX = "json:"
#: Attribute with the dtype of a variable that is stored as integers, or as text of a fixed width.
DTYPE = "rnnlens_dtype"
_DTYPES = re.compile(r"(datetime64|timedelta64)\[(s|ms|us|ns)\]|object")


def encode(tree: xr.DataTree) -> None:
    """Convert attributes, dates and durations of a tree to types that files can store, in place; refuse long texts."""
    _convert_variables(tree, _without_times)
    _convert_attributes(tree, _attribute_to_file)
    if name := _oversized_attribute(tree):
        expected = f"at most {TEXT_LIMIT} characters as JSON"
        raise InputError(f"The attribute {name!r} is too long for a file.", expected=expected)


def decode(tree: xr.DataTree) -> None:
    """Convert attributes, dates and durations of a tree that was read from a file back, in place; refuse long texts."""
    if name := _oversized_attribute(tree):
        raise FileError(f"The attribute {name!r} is too long to be read.", expected=f"at most {TEXT_LIMIT} characters")
    _convert_attributes(tree, _attribute_from_file)
    _convert_variables(tree, _with_times)


def _convert_variables(tree: xr.DataTree, convert: Callable[[xr.Variable], xr.Variable | None]) -> None:
    """Replace each variable for which ``convert`` returns another one."""
    for node in tree.subtree:
        dataset = node.to_dataset(inherit=False)
        converted_vars = {
            name: new_variable for name, v in dataset.variables.items() if (new_variable := convert(v)) is not None
        }
        if converted_vars:
            coords = {name: converted_vars.pop(name) for name in list(converted_vars) if name in dataset.coords}
            node.dataset = dataset.assign_coords(coords).assign(converted_vars)


def _without_times(variable: xr.Variable) -> xr.Variable | None:
    """Convert a variable of dates, durations or texts to a type for files, its dtype in ``DTYPE``; None for others."""
    if variable.dtype.kind not in "mMO":
        return None
    values = np.asarray(variable.values)
    if values.dtype.kind in "mM":
        return xr.Variable(variable.dims, values.view("i8"), {**variable.attrs, DTYPE: str(values.dtype)})
    all_texts = all(isinstance(value, str) for value in values.flat)
    return xr.Variable(variable.dims, values, {**variable.attrs, DTYPE: "object"}) if all_texts else None


def _with_times(variable: xr.Variable) -> xr.Variable | None:
    """Return a variable in the dtype that its attribute ``DTYPE`` names; None without that attribute."""
    if DTYPE not in variable.attrs:
        return None
    dtype = variable.attrs[DTYPE]
    is_time = dtype != "object"
    if not _DTYPES.fullmatch(str(dtype)) or (is_time and variable.dtype != np.int64):
        raise FileError("A variable is damaged.", got=f"{variable.dtype} values as {dtype!r}")
    attrs = {name: value for name, value in variable.attrs.items() if name != DTYPE}
    values = np.asarray(variable.values)
    return xr.Variable(variable.dims, values.view(dtype) if is_time else values.astype(object), attrs)


def _oversized_attribute(tree: xr.DataTree) -> str | None:
    """Return the name of the first text attribute longer than ``TEXT_LIMIT`` characters, or None."""
    for node in tree.subtree:
        for attrs in (node.attrs, *(variable.attrs for variable in node.variables.values())):
            for name, value in attrs.items():
                if isinstance(value, str) and len(value) > TEXT_LIMIT:
                    return str(name)
    return None


def _convert_attributes(tree: xr.DataTree, convert: Callable[[Any], Any]) -> None:
    for node in tree.subtree:
        holders: list[Any] = [node, *node.variables.values()]
        for holder in holders:
            holder.attrs = {key: convert(value) for key, value in holder.attrs.items()}


def _attribute_to_file(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    is_native = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    if is_native or (isinstance(value, str) and not value.startswith(_JSON_PREFIX)):
        return value
    return _JSON_PREFIX + json.dumps(value, default=_json_default)


def _attribute_from_file(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_JSON_PREFIX):
        return json.loads(value.removeprefix(_JSON_PREFIX))
    return value.item() if isinstance(value, np.generic) else value


def _json_default(value: Any) -> Any:
    """Convert a value to a type that JSON can represent: arrays to lists, other objects to text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def to_strict_json(value: Any) -> Any:
    """Convert nested data to strict JSON: None for numbers that are not finite, Python's numbers for NumPy's."""
    if isinstance(value, Mapping):
        return {str(key): to_strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_paths(names: Iterable[str]) -> dict[str, str]:
    """Return the tree path of each layer name.

    >>> to_paths(["lstm#0", "encoder/gru", "rnn[1]"])
    {'lstm#0': '/lstm#0', 'encoder/gru': '/encoder/gru', 'rnn[1]': '/rnn[1]'}
    >>> to_paths(["encoder", "encoder/gru"])
    {'encoder': '/encoder/@', 'encoder/gru': '/encoder/gru'}
    """
    names = list(names)
    group_names = {
        "/".join(name_parts[:i])
        for name_parts in (name.split("/") for name in names)
        for i in range(1, len(name_parts))
    }
    paths = {name: "".join(f"/{_escape_part(part)}" for part in name.split("/")) for name in names}
    return {name: path + f"/{OWN_NODE}" * (name in group_names) for name, path in paths.items()}


def datasets_of(tree: xr.DataTree, names: Iterable[str]) -> dict[str, xr.Dataset]:
    """Return the dataset of each named layer of a tree."""
    nodes: dict[str, Any] = {name: tree[path] for name, path in to_paths(names).items()}
    return {name: node.to_dataset(inherit=False) for name, node in nodes.items()}


def from_path(path: str) -> str:
    """Return the layer name for a tree path.

    >>> from_path("/encoder/@"), from_path("/encoder/gru")
    ('encoder', 'encoder/gru')
    """
    parts = path.removesuffix(f"/{OWN_NODE}").removeprefix("/").split("/")
    return "/".join("" if part == EMPTY_PART else unquote(part) for part in parts)


def _escape_part(part: str) -> str:
    """Escape a part of a name for use in a path: an empty part, ``.``, ``..``, ``@``, percent sign and backslash."""
    escaped = part.replace("%", "%25").replace("\\", "%5C")
    if escaped in (".", "..", OWN_NODE):
        return "".join(f"%{ord(character):02X}" for character in escaped)
    return escaped or EMPTY_PART
