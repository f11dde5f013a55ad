"""Conversion between layer names and paths in a DataTree.

A layer of a nested model, ``"encoder/lstm"``, is the node ``lstm`` of the group ``encoder``. Groups of a tree share
their coordinates with their children, whose sizes must then agree. So a layer that has variables and also contains
layers keeps its variables in a child named ``"@"``.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

OWN, EMPTY = "@", "%"


def to_paths(names: Iterable[str]) -> dict[str, str]:
    """Return the tree path of each layer name.

    >>> to_paths(["lstm#0", "encoder/gru", "rnn[1]"])
    {'lstm#0': '/lstm#0', 'encoder/gru': '/encoder/gru', 'rnn[1]': '/rnn[1]'}
    >>> to_paths(["encoder", "encoder/gru"])
    {'encoder': '/encoder/@', 'encoder/gru': '/encoder/gru'}
    """
    names = list(names)
    parents = {"/".join(parts[:i]) for parts in (name.split("/") for name in names) for i in range(1, len(parts))}
    return {name: _path(name) + (f"/{OWN}" if name in parents else "") for name in names}


def from_path(path: str) -> str:
    """Return the layer name for a tree path.

    >>> from_path("/encoder/@"), from_path("/encoder/gru")
    ('encoder', 'encoder/gru')
    """
    parts = path.removesuffix(f"/{OWN}").removeprefix("/").split("/")
    return "/".join("" if part == EMPTY else unquote(part) for part in parts)


def _path(name: str) -> str:
    return "".join(f"/{_quote(part)}" for part in name.split("/"))


def _quote(part: str) -> str:
    """Escape a part of a name for use in a path: an empty part, ``.``, ``..``, ``@``, percent sign and backslash."""
    escaped = part.replace("%", "%25").replace("\\", "%5C")
    if escaped in (".", "..", OWN):
        return "".join(f"%{ord(character):02X}" for character in escaped)
    return escaped or EMPTY
