"""The result of ``rl.layers``: what is recurrent in a model, as a table that is also a sequence."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from ..errors import LayerNotFoundError, did_you_mean, message
from .page import around

_COLUMNS = ("name", "layer", "cell", "units", "direction", "returns", "masked", "stateful", "options")
_MASKED = {None: "depends on the data", True: "yes", False: "no"}


class LayerTable(Sequence[Any]):
    """Recurrent layers in the order in which they are called; rows by position or by name.

    Each row is a :class:`~rnnlens.adapters.protocol.LayerInfo`.
    """

    def __init__(self, infos: Iterable[Any]) -> None:
        self._infos = tuple(infos)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(info.name for info in self._infos)

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of :meth:`rows`: those that say anything about any of the layers."""
        used = [any(row) for row in zip(*(self._cells(info) for info in self._infos), strict=True)]
        return tuple(column for column, shown in zip(_COLUMNS, used or [True] * len(_COLUMNS), strict=True) if shown)

    def rows(self) -> list[tuple[str, ...]]:
        """Text of every row, in the order of :attr:`columns`."""
        keep = [_COLUMNS.index(column) for column in self.columns]
        return [tuple(self._cells(info)[i] for i in keep) for info in self._infos]

    @staticmethod
    def _cells(info: Any) -> tuple[str, ...]:
        options = ", ".join(f"{key}={value}" for key, value in info.options.items() if _telling(value))
        return (
            info.name,
            info.kind,
            "" if info.cell.replace("_", "") == info.kind.lower() else info.cell,
            str(info.units or "?"),
            info.direction,
            "every step" if info.return_sequences else "last step",
            _MASKED[info.masked],
            "yes" if info.stateful else "",
            options,
        )

    @overload
    def __getitem__(self, key: int | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> LayerTable: ...
    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return LayerTable(self._infos[key])
        if isinstance(key, int) and -len(self) <= key < len(self):
            return self._infos[key]
        for info in self._infos:
            if info.name == key:
                return info
        raise LayerNotFoundError(message(f"No recurrent layer named {key!r}.", hint=did_you_mean(key, self.names)))

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._infos)

    def __contains__(self, item: object) -> bool:
        return item in self._infos or item in self.names

    def __repr__(self) -> str:
        if not self._infos:
            return "no recurrent layers"
        rows = [self.columns, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            inner = "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in cells)
            return f"<tr>{inner}</tr>"

        body = "".join(row(cells, "td") for cells in self.rows())
        table = f"<table><thead>{row(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"
        count = len(self)
        return around(
            f"<details open><summary><strong>{count} recurrent {'layer' if count == 1 else 'layers'}</strong></summary>"
            f"{table}</details>"
        )


def _telling(value: Any) -> bool:
    """Whether an option says something: not absent, off, or zero."""
    return value is not None and value is not False and value != 0 and value != 0.0 and value != ""
