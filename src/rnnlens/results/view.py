"""What a result holds for one layer: a mapping from the names of its variables to labelled arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import xarray as xr

from ..errors import QuantityNotFoundError
from .base import refuse_no_name
from .page import Row, page


class LayerView(Mapping[str, xr.DataArray]):
    """Variables of one layer, by name or attribute: ``view["hidden"]``, ``view.hidden``; ``.dataset`` has all at once.

    Each is a DataArray that carries its own name, units, definition and origin.
    """

    def __init__(self, name: str, dataset: xr.Dataset) -> None:
        self.name = name
        self.dataset = dataset

    def _absence(self, name: str) -> str:
        """Why there is no such variable, and what to do about it."""
        raise NotImplementedError

    def _found(self, name: str) -> xr.DataArray:
        return self.dataset[name]

    def _has(self, name: str) -> bool:
        return name in self.dataset.data_vars

    def __getitem__(self, name: str) -> xr.DataArray:
        refuse_no_name(name, self, f"layer {self.name!r}")
        if self._has(name):
            return self._found(name)
        raise QuantityNotFoundError(self._absence(name))

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
        return page(type(self).__name__, [Row.of(self.name, "", self.dataset)], [])
