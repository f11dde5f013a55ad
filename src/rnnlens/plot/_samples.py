"""Which samples a figure shows, under which names, and one picture of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ..arguments import as_numbers
from ..errors import InputError, message
from ..measures.samples import rms_of_shapes, typical_first
from ..vocabulary import SAMPLE
from ._data import names_of, require_dim
from ._padding import hidden


def by_loss(array: xr.DataArray, losses: Any, figure: str) -> xr.DataArray:
    """The samples named with their losses, the typical one (of the median loss) first; as it is without losses.

    Raises
    ------
    InputError
        If there are not as many losses as samples.
    """
    if losses is None:
        return array
    require_dim(array, SAMPLE, figure)
    values = as_numbers("losses", losses).reshape(-1).astype(float)
    if values.size != array.sizes[SAMPLE]:
        raise InputError(
            message(
                "losses= has one number for each sample.",
                got=f"{values.size} numbers",
                expected=f"{array.sizes[SAMPLE]} of them",
            )
        )
    order = typical_first(values)
    names = names_of(array, SAMPLE)
    words = [f"sample {names[i]}, loss {values[i]:.2g}" for i in order]
    words[0] += " (the median)"
    return array.isel({SAMPLE: order}).assign_coords({SAMPLE: np.array(words, dtype=object).astype(str)})


def rms_picture(array: xr.DataArray, figure: str) -> xr.DataArray:
    """One picture of all samples: the RMS over them, each by its own peak; padded steps do not count."""
    require_dim(array, SAMPLE, figure)
    ordered = array.transpose(SAMPLE, ...)
    padded = hidden(ordered)
    where = None if padded is None else ~(xr.zeros_like(ordered, dtype=bool) | padded).transpose(*ordered.dims).values
    first = ordered.isel({SAMPLE: 0}, drop=True).drop_vars("mask", errors="ignore")
    words = array.attrs.get("long_name") or array.name or "values"
    count = array.sizes[SAMPLE]
    attrs = {**array.attrs, "long_name": f"{words}, RMS over {count} samples, each by its own peak", "units": "1"}
    attrs.pop("definition", None)
    return first.copy(data=rms_of_shapes(ordered.values, where)).assign_attrs(attrs)
