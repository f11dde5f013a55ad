"""Names and values of a record for loggers: scalars, distributions, and the film of adjoint profiles.

Names have slashes, by which every tool groups them: ``rnnlens/probe/lstm/reach``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import xarray as xr

from ...typing import Array
from ...vocabulary import DIRECTION, GATE
from ..records import TrainingRecord

#: First part of all logged names, which groups them.
ROOM = "rnnlens"

#: Name of the adjoint over time in a record.
PROFILE = "adjoint_profile"


def numbers(record: TrainingRecord) -> dict[str, float]:
    """Return all scalars of a record by logged name, including those that are not finite."""
    return {f"{ROOM}/{record.kind}/{name}": float(value) for name, value in record.scalars.items()}


def distributions(record: TrainingRecord) -> Iterator[tuple[str, Array]]:
    """Yield name and finite values, flattened, of every labelled array, one entry per gate; empty ones are skipped."""
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


#: Decades below the peak of a record that the colours cover.
DECADES = 6.0
#: Smallest number of pixels of each side of an image.
PIXELS = 240


class Film:
    """Adjoint profiles of all records of each layer, drawn as one image per layer."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Array]] = {}
        self._count = 0

    def add(self, record: TrainingRecord) -> bool:
        """Add the profiles of a record; return True when a new picture is due: at 2, 4, 8, ... records."""
        found = False
        for layer, arrays in record.layers.items():
            if PROFILE in arrays:
                found = True
                for side, row in _sides(arrays[PROFILE]):
                    name = f"{ROOM}/{record.kind}/{layer}{side}/film"
                    self._rows.setdefault(name, []).append(row)
        self._count += found
        return found and self._count >= 2 and math.log2(self._count).is_integer()

    def pictures(self) -> dict[str, Array]:
        """Return images by name, (height, width, 3) of uint8: first record on top, first time step on the left."""
        return {name: _drawn(rows) for name, rows in self._rows.items() if len(rows) > 1}


def _sides(profile: xr.DataArray) -> Iterator[tuple[str, Array]]:
    """Yield suffix and profile over time, one for each direction."""
    if DIRECTION not in profile.dims:
        yield "", np.asarray(profile, dtype=np.float64)
        return
    for side in map(str, profile[DIRECTION].values):
        yield f"/{side}", np.asarray(profile.sel({DIRECTION: side}), dtype=np.float64)


def _drawn(rows: list[Array]) -> Array:
    from matplotlib import colormaps

    width = max(len(row) for row in rows)
    image = np.full((len(rows), width), np.nan)
    for index, row in enumerate(rows):
        peak = np.max(row, where=np.isfinite(row), initial=0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            image[index, : len(row)] = np.log10(row / peak)
    shades = np.clip(1 + image / DECADES, 0.0, 1.0)
    colours = colormaps["magma"](np.ma.masked_invalid(np.where(np.isneginf(image), 0.0, shades)), bytes=True)[..., :3]
    high, wide = (max(1, -(-PIXELS // size)) for size in image.shape)
    pixels: Array = np.repeat(np.repeat(colours, high, axis=0), wide, axis=1)
    return pixels
