"""Arrays cut into panels and matrices: which dimensions go across and down, and which become panels."""

from __future__ import annotations

import numpy as np
import xarray as xr

from ..errors import InputError, message
from ..vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ._data import Numbers, place_words, refuse_places_of_others, require_dim, unit_dim

#: Dimensions of a plain array by its rank.
GUESS = {2: (TIME, "unit"), 3: (SAMPLE, TIME, "unit"), 4: (SAMPLE, TIME, GATE, "unit")}


def axes_of(array: xr.DataArray, figure: str, x: str | None = None, y: str | None = None) -> tuple[str, str]:
    """Dimension across and dimension down."""
    for given in (x, y):
        if given is not None:
            refuse_places_of_others(array, given, figure, DIRECTION)
            require_dim(array, given, figure)
    free = [str(d) for d in array.dims if d not in (DIRECTION, x, y)]
    if len(free) + (x is not None) + (y is not None) < 2:
        raise InputError(
            message(
                f"plot.{figure} needs two dimensions.",
                got=f"dimensions ({', '.join(map(str, array.dims))})",
                expected="at least two besides direction",
                hint="draw it with plot.curves or plot.points",
            )
        )
    if x is None:
        x = TIME if TIME in free else next(d for d in reversed(free) if d != GATE)
        free.remove(x)
    if y is None:
        unit = unit_dim(array)
        plain = [d for d in free if d not in (GATE, SAMPLE)] or [d for d in free if d != GATE] or free
        y = unit if unit in plain else plain[-1]
    return x, y


def slots_of(array: xr.DataArray, keep: list[str]) -> list[tuple[dict[str, int], str]]:
    """Selection and title of each panel."""
    found: list[tuple[dict[str, int], str]] = [({}, "")]
    for dim in keep:
        found = [
            ({**where, dim: i}, f"{title} · {place_words(array, dim, i)}".removeprefix(" · "))
            for where, title in found
            for i in range(array.sizes[dim])
        ]
    return found


def matrix_of(data: xr.DataArray, across: str, down: str, stacked: bool) -> Numbers:
    """(down, across), gates stacked into the rows."""
    if not stacked:
        return np.asarray(data.transpose(down, across).values)
    values = data.transpose(GATE, down, across).values
    return np.asarray(values.reshape(-1, values.shape[-1]))
