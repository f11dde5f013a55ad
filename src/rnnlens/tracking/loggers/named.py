"""What a logger is told of a record: numbers, distributions and the film, under names with slashes.

Every tool groups by the parts between slashes: ``rnnlens/probe/lstm/reach``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from ...typing import Array
from ...vocabulary import GATE
from ..records import Record

#: What all names begin with, so that they stand together and beside nobody else's.
ROOM = "rnnlens"

#: Where the adjoint over time is kept in a record.
PROFILE = "adjoint_profile"


def numbers(record: Record) -> dict[str, float]:
    """All scalars of a record, also those that are not finite."""
    return {f"{ROOM}/{record.kind}/{name}": float(value) for name, value in record.scalars.items()}


def distributions(record: Record) -> Iterator[tuple[str, Array]]:
    """Finite values of every labelled array, flat, one entry per gate; what holds none is left out."""
    for layer, arrays in record.layers.items():
        for name, array in arrays.items():
            stem = f"{ROOM}/{record.kind}/{layer}/{name}"
            for suffix, part in _by_gate(array):
                values = np.asarray(part, dtype=np.float64).ravel()
                values = values[np.isfinite(values)]
                if values.size:
                    yield stem + suffix, values


def _by_gate(array: xr.DataArray) -> Iterator[tuple[str, xr.DataArray]]:
    if GATE not in array.dims:
        yield "", array
        return
    names = array.coords[GATE].values if GATE in array.coords else range(array.sizes[GATE])
    for index, gate in enumerate(names):
        yield f"/{gate}", array.isel({GATE: index})
