"""Keeps xarray from importing Dask before the user does: by itself it does so with its first array.

Nothing can be a dask array before ``dask`` is imported, so the answer is the same, a third of a second earlier. Once
Dask is imported, by the user or by a lazy result, xarray's own functions answer.
"""

from __future__ import annotations

import sys
from typing import Any

from packaging.version import Version
from xarray.namedarray import pycompat, utils


class DaskOnceImported:
    """Record of Dask for xarray, read from the imported modules; the attributes are those of xarray's own record."""

    @property
    def module(self) -> Any:
        """The package, or None before it is imported."""
        return sys.modules.get("dask")

    @property
    def available(self) -> bool:
        """Whether Dask is imported."""
        return self.module is not None

    @property
    def type(self) -> tuple[Any, ...]:
        """Class of dask arrays, or nothing before it is imported."""
        array = getattr(sys.modules.get("dask.array"), "Array", None)
        return () if array is None else (array,)

    @property
    def version(self) -> Any:
        """Version of Dask; 0 before it is imported."""
        return Version(getattr(self.module, "__version__", "0.0.0"))


def keep_dask_out() -> None:
    """Let xarray look for Dask among the imported modules; do nothing if this xarray looks for it in another way."""
    known: Any = getattr(pycompat, "_cached_duck_array_modules", None)
    before: Any = getattr(utils, "is_dask_collection", None)
    if not isinstance(known, dict) or before is None or isinstance(known.get("dask"), DaskOnceImported):
        return

    def is_dask_collection(x: object) -> bool:
        return "dask" in sys.modules and bool(before(x))

    known["dask"] = DaskOnceImported()
    utils.is_dask_collection = is_dask_collection  # type: ignore[assignment]
