"""The result of ``rl.jacobian``: a labelled array that can be saved and says how it was checked."""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

import xarray as xr

from ..arguments import checked
from ..arguments import path as path_of
from .checks import Check

#: The attribute in which the checks of an array travel, also through a file.
CHECKS = "checks"


class TimeJacobian(xr.DataArray):  # type: ignore[no-untyped-call]  # xarray's own __init_subclass__
    """A DataArray, with :meth:`save` and :attr:`checks` as other results have them; what is made from it keeps both."""

    __slots__ = ()

    @property
    def checks(self) -> list[Check]:
        """Self-checks of the replayed layers, and the comparisons with the user's own model."""
        return checks_of(self)

    @checked(path=path_of)
    def save(self, path: str | PathLike[str]) -> None:
        """Write it to one file: netCDF for ``.nc``, Zarr for ``.zarr``; ``rl.open`` reads it back.

        Raises
        ------
        FileError
            If the path cannot be written, or ends in neither.
        """
        from .files import save

        save(self, path)


def checks_of(array: xr.DataArray) -> list[Check]:
    """The checks that travel in the attributes of an array."""
    return [Check(**found) for found in json.loads(array.attrs.get(CHECKS, "[]"))]


def as_result(array: Any) -> Any:
    """A time Jacobian as one; anything else as it is."""
    ours = isinstance(array, xr.DataArray) and array.name == "jacobian" and "wrt" in array.attrs
    return TimeJacobian(array) if ours else array
