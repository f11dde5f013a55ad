"""``jacobian_margins``: the time Jacobian with its lag profile at the right and the sums of its columns below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..errors import InputError, message
from ..measures.lags import input_totals
from ..recurrence.measures import lag_profile
from ..vocabulary import BACKWARD, DIRECTION, IN_TIME, OUT_TIME
from ._data import Numbers, axis_label, largest_magnitude, names_of, positions
from ._door import figure as figure_door
from ._images import IMSHOW, colour_bar
from ._jacobian import block_norms
from ._keywords import checked
from ._lines import log_limits
from ._marks import log_ticks, step_axis
from ._padding import notes_of
from ._panels import Grid, open_panels
from .jacobians import draw_matrix, matrices_of


@figure_door(samples=one_of("median", "mean"))
def jacobian_margins(
    jacobian: Any,
    *,
    dims: Sequence[str] | None = None,
    samples: str = "median",
    delays: Any = (),
    log: bool = True,
    limit: float | None = None,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw the time Jacobian with margins: the lag profile at its right, the sums of its columns below.

    Both are of the matrix that is drawn. The profile is the mean along each diagonal: how much an output owes to the
    input so many steps before. A column's sum is what one input step moves in all outputs together. Where the task's
    delays are known they are marked: as diagonals of the matrix, and in the profile.

    Parameters
    ----------
    jacobian : (sample, out_time, out_unit, in_time, in_feature), or reduced to (sample, out_time, in_time)
        As for :func:`time_jacobian`, with at least two output steps.
    dims
        Dimensions of a plain array where the guess does not fit.
    samples
        ``"median"`` over samples, each divided by its own peak; or ``"mean"`` of the values themselves.
    delays : int or sequence of int
        Lags at which the task is known to need its input.
    log
        Logarithmic colours over 4 decades, and logarithmic margins.
    limit
        Colours up to this value instead of the largest magnitude.
    title
        Instead of the one made from the labels.
    ax, figure
        Three Axes per direction, or a Figure or SubFigure to draw into.
    **image
        Properties of matplotlib's AxesImage and keywords of ``Axes.imshow``.

    Returns
    -------
    1-D array of Axes: matrix, lag profile, column sums; forward before backward

    Raises
    ------
    InputError
        If there is one output step only, a keyword is unknown, or ``ax`` has not three Axes per direction.
    """
    keywords = checked(image, AxesImage, figure="jacobian_margins", extra=IMSHOW)
    array, _ = block_norms(jacobian, "jacobian_margins", dims)
    if array.sizes[OUT_TIME] < 2:
        hint = "plot.time_jacobian draws the only row as a line"
        got = f"{dict(array.sizes)}"
        raise InputError(message("plot.jacobian_margins needs several output steps.", got=got, hint=hint))
    array = abs(array).assign_attrs(array.attrs)
    notes = notes_of(array)
    _, matrices, empty, note = matrices_of(array, samples, 1)
    ways = names_of(array, DIRECTION) if DIRECTION in array.dims else [None]
    grid = Grid((3.1, 2.6), (1.0, 0.8), (2, 2), widths=(3.2, 1), heights=(3.2, 1))
    panels = open_panels(3, name="jacobian_margins", grid=grid, halves=ways, ax=ax, figure=figure)
    top = limit if limit is not None else largest_magnitude(*matrices)
    for places, matrix, padded, way in zip(panels.halves, matrices, empty, ways, strict=True):
        drawn = draw_matrix(places[0], matrix, padded, array, top, keywords, log=log)
        colour_bar([places[1]], drawn, "share of peak" if "median" in (note or "") else "norm")
        _profile(places[1], matrix, padded, array, log, backward=way == BACKWARD)
        _columns(places[2], matrix, padded, array, log)
        _mark(places, array, delays, backward=way == BACKWARD)
        places[0].set_ylabel(axis_label(array, OUT_TIME))
        places[2].set_xlabel(axis_label(array, IN_TIME))
    head = " · ".join(str(part) for part in (array.attrs.get("layer"), "time Jacobian") if part)
    panels.title(title or head, [note, *notes])
    return panels.result()


def _profile(ax: Any, matrix: Numbers, padded: Numbers, array: xr.DataArray, log: bool, *, backward: bool) -> None:
    """Mean along each diagonal, lag upward."""
    out_times, in_times = (positions(array, dim).tolist() for dim in (OUT_TIME, IN_TIME))
    norms, where = (matrix.T, ~padded.T) if backward else (matrix, ~padded)
    times = (in_times, out_times) if backward else (out_times, in_times)
    norms = np.where(where, norms, 0.0)
    profile = lag_profile(norms, out_times=times[0], in_times=times[1], where=where, xp=np)
    lag = np.arange(len(profile))
    ax.plot(_drawn(profile, log), lag, color="#0072b2", linewidth=1.2, gid="profile")
    ax.set_ylim(-0.5, len(profile) - 0.5)
    step_axis(ax, "y", lag)
    ax.yaxis.tick_left()
    ax.set_ylabel("lag", fontsize="small")
    ax.set_title("mean by lag", fontsize="small", pad=3)
    _value_axis(ax, "x", profile, log)


def _columns(ax: Any, matrix: Numbers, padded: Numbers, array: xr.DataArray, log: bool) -> None:
    """Sum of each column, under it."""
    steps = positions(array, IN_TIME)
    totals = input_totals(np.where(padded, 0.0, matrix))
    ax.plot(steps, _drawn(totals, log), color="#0072b2", linewidth=1.2, gid="columns")
    ax.set_xlim(steps.min() - 0.5, steps.max() + 0.5)
    step_axis(ax, "x", steps)
    ax.set_ylabel("sum of\ncolumn", fontsize="small")
    _value_axis(ax, "y", totals, log)


def _drawn(values: Numbers, log: bool) -> Numbers:
    return np.where(values > 0, values, np.nan) if log else values


def _value_axis(ax: Any, axis: str, values: Numbers, log: bool) -> None:
    ax.tick_params(labelsize="small")
    if not log:
        getattr(ax, f"set_{axis}lim")(0, None)
        return
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return
    if axis == "y":
        log_limits(ax, positive, room=1.6)
        ax.set_yscale("log")
    else:
        ax.set_xlim(max(float(positive.min()), float(positive.max()) * 1e-12) / 1.6, float(positive.max()) * 1.6)
        ax.set_xscale("log")
    log_ticks(ax, axis, most=4)


def _mark(places: list[Any], array: xr.DataArray, delays: Numbers, *, backward: bool) -> None:
    """Delays of the task: diagonals of the matrix, places on the profile."""
    matrix, profile, _ = places
    in_times = positions(array, IN_TIME)
    limits = matrix.get_xlim(), matrix.get_ylim()
    look = {"color": "#111111", "linewidth": 0.9, "linestyle": (0, (1, 2)), "gid": "delay"}
    for delay in delays:
        shift = -delay if backward else delay
        ends = np.array([in_times.min(), in_times.max()], dtype=float)
        matrix.plot(ends, ends + shift, **look)
        profile.axhline(delay, **look)
    matrix.set(xlim=limits[0], ylim=limits[1])
