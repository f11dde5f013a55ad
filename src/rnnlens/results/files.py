"""Results to files and back: netCDF (through h5netcdf) and Zarr."""

from __future__ import annotations

from os import PathLike
from typing import Any


def save(result: Any, path: str | PathLike[str]) -> None:
    """Write a result."""
    raise NotImplementedError
