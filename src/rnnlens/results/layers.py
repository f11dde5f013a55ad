"""``LayerTable``, the result of ``rl.layers``, and ``LayerView``, the variables of one layer of any result."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import xarray as xr

from ..errors import LayerNotFoundError, QuantityNotFoundError, did_you_mean
from ..vocabulary import unnamed_states
from .array import LabelledArray, aligned_text
from .base import check_name_is_text
from .page import Row, html_with_styles, result_page

_COLUMNS = ("name", "layer", "cell", "units", "direction", "returns", "masked", "stateful", "options", "states")
_MASKED = {None: "depends on the data", True: "yes", False: "no"}


class LayerTable(Sequence[Any]):
    """Recurrent layers in the order of their calls: a sequence with access by position or by name.

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
        """Headings of :meth:`rows`; columns that are empty for all layers are left out."""
        is_used = [any(row) for row in zip(*(self._cells(info) for info in self._infos), strict=True)]
        return tuple(
            column for column, is_shown in zip(_COLUMNS, is_used or [True] * len(_COLUMNS), strict=True) if is_shown
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of layers as text: one row per layer, cells in the order of :attr:`columns`."""
        column_indices = [_COLUMNS.index(column) for column in self.columns]
        return [tuple(self._cells(info)[i] for i in column_indices) for info in self._infos]

    @staticmethod
    def _cells(info: Any) -> tuple[str, ...]:
        set_options = ((key, value) for key, value in info.options.items() if value not in (None, False, 0, ""))
        options = ", ".join(f"{key}={value}" for key, value in set_options)
        states = tuple(getattr(info, "states", ()))
        axes = getattr(info, "state_axes", ())  # of a whole-sequence layer
        state_sizes = " x ".join(f"{size or '?'} {axis.removesuffix('_unit')}s" for axis, size in axes)
        return (
            info.name,
            info.kind,
            "" if info.cell.replace("_", "") == info.kind.lower() else info.cell,
            state_sizes or str(info.units or "?"),
            info.direction,
            "every step" if info.return_sequences else "last step",
            _MASKED[info.masked],
            "yes" if info.stateful else "",
            options,
            "" if states == unnamed_states(len(states)) else ", ".join(states),
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
        raise LayerNotFoundError(f"No recurrent layer named {key!r}.", hint=did_you_mean(key, self.names))

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
        return html_with_styles(
            f"<details open><summary><strong>{count} recurrent {'layer' if count == 1 else 'layers'}</strong></summary>"
            f"{table}</details>"
        )


class LayerView(Mapping[str, xr.DataArray]):
    """Variables of one layer, by name or attribute: ``view["hidden"]``, ``view.hidden``; ``.dataset`` has all at once.

    Each variable is a DataArray with its name, units, definition and provenance as attributes.
    """

    def __init__(self, name: str, dataset: xr.Dataset) -> None:
        self.name = name
        self.dataset = dataset

    def _missing_message(self, name: str) -> str:
        """Return the message for a variable that does not exist: the reason, and what to do."""
        raise NotImplementedError

    def _title(self) -> str:
        """Return the text after the layer's name in the first line of the repr."""
        return ""

    def _variables(self) -> list[tuple[str, str]]:
        """Return name and description of each variable, for the repr."""
        rows = ((name, self.dataset[name]) for name in self)
        return [(name, f"({sizes_of(array)})  {array.attrs.get('long_name', '')}".rstrip()) for name, array in rows]

    def __repr__(self) -> str:
        title = f"<rnnlens {type(self).__name__} {self.name!r}> {self._title()}"
        return aligned_text(title.rstrip(), self._variables())

    def _variable(self, name: str) -> xr.DataArray:
        return self.dataset[name]

    def _has_variable(self, name: str) -> bool:
        return name in self.dataset.data_vars

    def __getitem__(self, name: str) -> xr.DataArray:
        check_name_is_text(name, self, f"layer {self.name!r}")
        if self._has_variable(name):
            return LabelledArray.around(self._variable(name))
        raise QuantityNotFoundError(self._missing_message(name))

    def __getattr__(self, name: str) -> xr.DataArray:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self.dataset.data_vars

    def __iter__(self) -> Iterator[str]:
        return iter(map(str, self.dataset.data_vars))

    def __len__(self) -> int:
        return len(self.dataset.data_vars)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _repr_html_(self) -> str:
        return result_page(f"Layer {self.name}", [Row.of(self.name, self._title(), self.dataset)], [])


def sizes_of(array: xr.DataArray) -> str:
    """Format the dimensions of an array: ``sample: 4, time: 20``."""
    return ", ".join(f"{dim}: {size}" for dim, size in array.sizes.items())
