"""Samples in figures: selection by loss, one picture of all samples, and padded steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ..arguments import as_numbers
from ..errors import InputError
from ..measures.profiles import rms_of_shapes, typical_first
from ..vocabulary import IN_TIME, OUT_TIME, SAMPLE, TIME
from ._data import Numbers, names_of, nonfinite_note, numpy_by_sample, require_dim


def sort_by_loss(array: xr.DataArray, losses: Any, figure: str) -> xr.DataArray:
    """Sort the samples from the median loss outwards, and name them by their losses; unchanged without losses."""
    if losses is None:
        return array
    values = losses_of(array, losses, figure)
    order = typical_first(values)
    names = names_of(array, SAMPLE)
    sample_labels = [f"sample {names[i]}, loss {values[i]:.2g}" for i in order]
    sample_labels[0] += " (the median)"
    return array.isel({SAMPLE: order}).assign_coords({SAMPLE: np.array(sample_labels, dtype=object).astype(str)})


def losses_of(array: xr.DataArray, losses: Any, figure: str) -> Numbers:
    """Return the loss of each sample. Raise InputError if there are not as many losses as samples."""
    require_dim(array, SAMPLE, figure)
    values, count = as_numbers("losses", losses), array.sizes[SAMPLE]
    if values.size != count:
        message, received = "losses= has one number for each sample.", f"{values.size} numbers"
        raise InputError(message, got=received, expected=f"{count} of them")
    return values.reshape(-1).astype(float)


def rms_picture(array: xr.DataArray, figure: str) -> xr.DataArray:
    """Return the RMS over samples, each divided by its own peak; padded steps do not count."""
    require_dim(array, SAMPLE, figure)
    ordered = array.transpose(SAMPLE, ...)
    padded = padding_mask(ordered)
    real_mask = None if padded is None else ~full_padding_mask(ordered).values
    first_sample = ordered.isel({SAMPLE: 0}, drop=True).drop_vars("mask", errors="ignore")
    attrs = {**array.attrs, "long_name": array.attrs.get("long_name") or array.name or "values", "units": "1"}
    attrs.pop("definition", None)
    picture = first_sample.copy(data=rms_of_shapes(ordered.values, real_mask)).assign_attrs(attrs)
    if "reset" in array.coords:
        picture = picture.assign_coords(reset=array.coords["reset"].mean(SAMPLE))
    if padded is None or SAMPLE not in padded.dims:
        return picture
    return picture.drop_vars(MASKS, errors="ignore").assign_coords(mask=~padded.all(SAMPLE))


def rms_note(count: int) -> str:
    """Return the note that names the reduction of :func:`rms_picture` over ``count`` samples."""
    return f"RMS over {count} samples, each by its own peak"


#: Coordinates with masks of real steps: of a layer's quantities, and of either axis of a time Jacobian.
MASKS = ("mask", f"{OUT_TIME}_mask", f"{IN_TIME}_mask")

PADDING_NOTE = "padding is grey"


def padding_mask(array: xr.DataArray) -> xr.DataArray | None:
    """Return a mask of an image that is True at padded steps (of either axis); None without padding."""
    mask: xr.DataArray | None = None
    for name in MASKS:
        if name in array.coords:
            padded = (array.coords[name] == 0).drop_vars(MASKS, errors="ignore")
            mask = padded if mask is None else mask | padded
    return mask if mask is not None and bool(mask.any()) else None


def full_padding_mask(array: xr.DataArray) -> xr.DataArray:
    """Return a mask with the dimensions of the array, True at padded steps."""
    all_real, padded = xr.zeros_like(array, dtype=bool), padding_mask(array)
    return all_real if padded is None else (all_real | padded).transpose(*array.dims)


def real_step_mask(array: xr.DataArray) -> Numbers:
    """Return a mask (sample, time) that is False at padded steps."""
    padded, shape = padding_mask(array), tuple(array.sizes.get(dim, 1) for dim in (SAMPLE, TIME))
    return np.ones(shape, bool) if padded is None else np.broadcast_to(~numpy_by_sample(padded, TIME), shape)


def nan_at_padding(array: xr.DataArray) -> xr.DataArray:
    """Return the array with NaN at padded steps."""
    padded = padding_mask(array)
    return array if padded is None else array.where(~padded)


def notes_of(array: xr.DataArray) -> list[str | None]:
    """Return the notes on non-finite values at real steps, and on padding."""
    padded, resets = padding_mask(array), "dashed: the state begins anew" if "reset" in array.coords else None
    if padded is None:
        return [nonfinite_note(array.values), resets]
    return [nonfinite_note(array.where(~padded, 0.0).values), PADDING_NOTE, resets]


def mean_of_real_steps(array: xr.DataArray) -> xr.DataArray:
    """Return the mean over samples at real steps; NaN where no sample has a real step."""
    padded = padding_mask(array)
    if padded is None:
        return array.mean(SAMPLE, skipna=False)  # a missing value in any sample stays visible
    count = (~padded).sum(SAMPLE) if SAMPLE in padded.dims else (~padded) * array.sizes[SAMPLE]
    return array.where(~padded, 0.0).sum(SAMPLE, skipna=False) / count.where(count > 0)


def mark_resets(ax: Any, reset: xr.DataArray | None, steps: Numbers) -> None:
    """Draw a dashed line before each step at which the state of a sample was reset, fainter for few samples."""
    if reset is None or TIME not in reset.dims:
        return
    reset_shares = np.asarray(reset.mean([dim for dim in reset.dims if dim != TIME]), dtype=float)
    for step, reset_share in zip(np.asarray(steps, dtype=float), reset_shares, strict=True):
        if reset_share > 0:
            style = {"color": "#444444", "linestyle": (0, (3, 2)), "linewidth": 0.9, "alpha": 0.3 + 0.6 * reset_share}
            ax.axvline(step - 0.5, gid="reset", **style)


def shade_padding(ax: Any, steps: Numbers, padded: Numbers) -> None:
    """Shade the steps that are padding in every sample."""
    for step in np.asarray(steps, dtype=float)[padded]:
        ax.axvspan(step - 0.5, step + 0.5, color="#dcdcdc", linewidth=0, zorder=0.2, gid="padding")
