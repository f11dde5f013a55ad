"""Figures of whole-sequence layers: ``total_and_frozen``, two time Jacobians; ``decay_by_lag``, the share left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import whole
from ..errors import InputError
from ..measures.scans import half_life_of, logarithms
from ..recurrence.measures import lag_profile
from ..vocabulary import DIRECTION, IN_TIME, OUT_TIME, SAMPLE, TIME
from ._axes import POSITIVE
from ._call import drawing
from ._data import Numbers, axis_label, labelled, largest_magnitude, layer_title, positions, require_time, value_label
from ._frame import Grid, open_panels
from ._images import IMSHOW, Matrix, colour_bar, colour_bars, draw_image, merge_note, steps_for
from ._samples import notes_of
from .time_jacobian import CELLS, block_norms, draw_matrix, matrices_of

#: Largest number of rows and columns of the picture of decays, and largest lag.
_ROWS, _LAGS = (200, 400), 10_000
#: Share of the largest value of the lag profile above which the two maps are compared.
_SEEN = 0.01


@drawing(AxesImage, extra=IMSHOW)
def total_and_frozen(
    total: Any,
    frozen: Any,
    *,
    dims: Sequence[str] | None = None,
    log: bool = True,
    limit: float | None = None,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw the total time Jacobian of a whole-sequence layer beside the one with its coefficients held, on one scale.

    The frozen map, of which attention-like pictures of such layers are made, leaves out that an input also changes
    decay, write and read of later steps. Norms are means over samples; the title compares them by lag.

    Parameters
    ----------
    total, frozen : (sample, out_time, in_time), or with out_unit and in_feature
        Results of :func:`rnnlens.jacobian`, the second with ``frozen=True``; or plain arrays.
    log
        Logarithmic colours over 4 decades, linear below.
    limit
        Largest value of the colour scale; by default the largest of both maps.

    Returns
    -------
    1-D array of two Axes: total, frozen

    References
    ----------
    Frozen map: Ali, Zimerman, Wolf 2024, arXiv:2403.01590, eqs. 10-12.
    """
    given = [block_norms(one, "total_and_frozen", dims) for one in (total, frozen)]
    arrays = [array for array, _ in given]
    _refuse_others(arrays)
    parts = [matrices_of(array, "mean", 1) for array in arrays]
    matrices = [abs(found[0]) for _, found, _, _ in parts]
    panels = open_panels("total_and_frozen", 2, Grid((3.4, 3.0), (1.6, 1.0), (1, 2)), (None,), ax, figure)
    top = limit if limit is not None else largest_magnitude(*matrices)
    drawn = []
    for place, matrix, part, array, name in zip(
        panels.axes, matrices, parts, arrays, ("total", "coefficients held"), strict=True
    ):
        drawn.append(draw_matrix(place, matrix, part[2][0], array, top, image, log=log))
        place.set_title(name, fontsize="small", pad=3)
    words = value_label(arrays[0]).split(" [")[0] + (" (Frobenius)" if given[0][1] else "")
    colour_bars(panels, drawn, words, shared=True, wanted=colorbar)
    panels.label(axis_label(arrays[0], IN_TIME), axis_label(arrays[0], OUT_TIME) if len(matrices[0]) > 1 else words)
    if panels.owners:
        panels.outer_ticks_only()
    merged = merge_note(steps_for(matrices[0].shape, CELLS), "output step", "input step")
    head = layer_title(arrays[0].attrs, _shares(matrices, arrays[0]))
    return panels.titled(title or head, [parts[0][3], merged, *notes_of(arrays[0])])


def _refuse_others(arrays: Sequence[xr.DataArray]) -> None:
    """Raise InputError for two maps that differ in shape, or that have two directions."""
    first, second = ({str(d): int(n) for d, n in array.sizes.items()} for array in arrays)
    if first != second or DIRECTION in first:
        raise InputError(
            "plot.total_and_frozen compares two time Jacobians of one layer.",
            got=f"total {first}, frozen {second}",
            expected="equal dimensions, of one direction",
            hint="call rl.jacobian twice with the same arguments, the second time with frozen=True",
        )


def _shares(matrices: Sequence[Numbers], array: xr.DataArray) -> str:
    """Return how large the frozen map is beside the total one, at the smallest and largest lag that has values."""
    rows, columns = (positions(array, dim).tolist() for dim in (OUT_TIME, IN_TIME))
    total, frozen = (np.asarray(lag_profile(m, out_times=rows, in_times=columns, xp=np)) for m in matrices)
    with np.errstate(invalid="ignore"):
        seen = np.flatnonzero(total > _SEEN * np.nanmax(total)) if np.isfinite(total).any() else np.zeros(0, int)
    if not seen.size or not np.nanmax(total) > 0:
        return "total and frozen map"
    ends = [f"{frozen[lag] / total[lag]:.2g} (lag {lag})" for lag in dict.fromkeys((int(seen[0]), int(seen[-1])))]
    return f"the frozen map is {' to '.join(ends)} of the total one"


@drawing(AxesImage, extra=IMSHOW, lags=whole(least=1, most=_LAGS))
def decay_by_lag(
    decay: Any,
    *,
    lags: int | None = None,
    dims: Sequence[str] | None = None,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw the share of a state that the decay leaves, heads or channels by lag, with the half-life of each row.

    The share after k steps is the k-th power of the geometric mean of the decays over samples and steps. Rows are
    sorted by their half-life, drawn as a line; a half-life beyond the last lag is at the border.

    Parameters
    ----------
    decay : (sample, time, head), (sample, time, channel, state_unit) or the like
        ``trace["mixer"].decay``, or a plain array with ``dims=``.
    lags
        Largest lag; the number of steps by default.

    Returns
    -------
    1-D array with one Axes

    References
    ----------
    Half-life of the mean decay: Mahto et al. 2021, arXiv:2009.12727, eq. 3.
    """
    array = labelled(decay, "decay_by_lag", dims=dims, guess={3: (SAMPLE, TIME, "head")})
    require_time(array, "decay_by_lag")
    values = (array if SAMPLE in array.dims else array.expand_dims(SAMPLE)).transpose(SAMPLE, TIME, ...)
    if (values.values < 0).any() or not np.isfinite(values.values).all():
        raise InputError(
            "plot.decay_by_lag draws decays.", got="negative or non-finite values", expected="numbers from 0 on"
        )
    total, count = (np.ravel(part) for part in logarithms(values.values))
    half_life = half_life_of(total, count)
    order = np.argsort(half_life)
    last = lags or int(values.sizes[TIME])
    steps = np.arange(last + 1)
    mean = np.where(count > 0, total / np.maximum(count, 1), -np.inf)[order]
    with np.errstate(invalid="ignore"):
        shares = np.where(steps > 0, np.exp(mean[:, None] * np.maximum(steps, 1)), 1.0)
    rows = " × ".join(f"{dim}s".replace("_", " ") for dim in map(str, values.dims[2:])) or "state"  # noqa: RUF001
    panels = open_panels("decay_by_lag", 1, Grid((4.6, 3.0), (1.2, 0.9)), (None,), ax, figure)
    look = {"cmap": POSITIVE, "vmin": 0.0, "vmax": 1.0, **image}
    place = panels.axes[0]
    grid = Matrix(shares, steps, np.arange(len(order)), over_time=False)
    drawn = draw_image(place, grid, look=look, limits=_ROWS)
    limits = place.get_xlim(), place.get_ylim()
    at = np.minimum(half_life[order], last)
    place.step(np.r_[at, at[-1]], np.arange(len(order) + 1) - 0.5, where="post", color="black", lw=1.2, gid="half-life")
    place.set(xlim=limits[0], ylim=limits[1])
    if colorbar:
        colour_bar([place], drawn, "share of the state left")
    panels.label("lag [step]", f"{rows}, fastest first")
    merged = merge_note(steps_for(shares.shape, _ROWS), "row", "lag")
    return panels.titled(title or layer_title(array.attrs, _finding(half_life)), ["line: half-life", merged])


def _finding(half_life: Numbers) -> str:
    """Return a title with the fastest, the median and the slowest half-life."""
    low, middle, high = (
        "for ever" if np.isinf(v) else f"{v:.2g} steps" if v < 10 else f"{v:.0f} steps"
        for v in (half_life.min(), np.median(half_life), half_life.max())
    )
    if low == high:
        return f"half-life of the state: {low}"
    return f"half-life of the state: {low} to {high}, median {middle}"
