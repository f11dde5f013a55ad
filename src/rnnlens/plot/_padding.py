"""Which steps of an array are padding: they count in no measure, and figures show them grey."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ..vocabulary import IN_TIME, OUT_TIME, SAMPLE
from ._data import Numbers, nonfinite_note

#: Coordinates that say which steps are real: of a layer's quantities, and of either axis of a time Jacobian.
MASKS = ("mask", f"{OUT_TIME}_mask", f"{IN_TIME}_mask")

NOTE = "padding is grey"


def hidden(array: xr.DataArray) -> xr.DataArray | None:
    """True where a value belongs to a padded step (of either axis); None where no step is padding."""
    found: xr.DataArray | None = None
    for name in MASKS:
        if name in array.coords:
            padded = (array.coords[name] == 0).drop_vars(MASKS, errors="ignore")
            found = padded if found is None else found | padded
    return found if found is not None and bool(found.any()) else None


def without_padding(array: xr.DataArray) -> xr.DataArray:
    """The array with NaN at padded steps."""
    padded = hidden(array)
    return array if padded is None else array.where(~padded)


def notes_of(array: xr.DataArray) -> list[str | None]:
    """What is missing at real steps, and that there is padding."""
    padded = hidden(array)
    if padded is None:
        return [nonfinite_note(array.values)]
    return [nonfinite_note(array.where(~padded, 0.0).values), NOTE]


def mean_of_real(array: xr.DataArray) -> xr.DataArray:
    """Mean over samples, each step over those for which it is real; NaN where it is so for none."""
    padded = hidden(array)
    if padded is None:
        return array.mean(SAMPLE, skipna=False)  # a missing value in any sample stays visible
    count = (~padded).sum(SAMPLE) if SAMPLE in padded.dims else (~padded) * array.sizes[SAMPLE]
    return array.where(~padded, 0.0).sum(SAMPLE, skipna=False) / count.where(count > 0)


def shade(ax: Any, steps: Numbers, padded: Numbers) -> None:
    """Grey behind the steps that are padding in every sample."""
    for step in np.asarray(steps, dtype=float)[padded]:
        ax.axvspan(step - 0.5, step + 0.5, color="#dcdcdc", linewidth=0, zorder=0.2, gid="padding")
