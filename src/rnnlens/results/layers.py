"""The table that ``rl.layers`` returns."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, overload

_COLUMNS = ("name", "kind", "cell", "units", "direction", "return_sequences", "masked", "stateful", "options")


class LayerTable(Sequence[Any]):
    """Recurrent layers in the order of their calls; prints as a table, indexes like a list."""

    def __init__(self, infos: Iterable[Any]) -> None:
        self._infos = tuple(infos)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._infos[index]

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers: what ``layers=`` and ``trace[...]`` take."""
        return tuple(info.name for info in self._infos)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table as text, one tuple per layer."""
        return [tuple(_text(getattr(info, column)) for column in _COLUMNS) for info in self._infos]

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the table."""
        return _COLUMNS

    def __repr__(self) -> str:
        if not self._infos:
            return "no recurrent layers"
        table = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        return f"<table>{row(self.columns, 'th')}{''.join(row(cells, 'td') for cells in self.rows)}</table>"


def _text(value: Any) -> str:
    if value is None:
        return "?"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if hasattr(value, "items"):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return str(value)
