"""Figures of time Jacobians: ``time_jacobian``, the matrix of step pairs; ``jacobian_margins``, with sums beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..measures.profiles import input_totals, peak_band, quartiles, sample_peaks
from ..recurrence.measures import lag_profile, safe_norm
from ..vocabulary import BACKWARD, DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from ._axes import (
    DIVERGING,
    POSITIVE,
    around_zero,
    from_zero,
    is_positive,
    log_limits,
    log_scale,
    log_ticks,
    mark_below,
    mark_steps,
    step_axis,
    zero_line,
)
from ._call import drawing
from ._data import (
    Numbers,
    axis_label,
    choose,
    labelled,
    largest_magnitude,
    layer_title,
    names_of,
    positions,
    require_dim,
    value_label,
)
from ._frame import Grid, open_panels
from ._images import IMSHOW, Matrix, colour_bar, colour_bars, draw_image, evenly_spaced, merge_note, steps_for
from ._samples import MASKS, hidden, mean_of_real, notes_of, shade, without_padding

#: Dimensions of a plain array by its rank.
GUESS = {
    2: (OUT_TIME, IN_TIME),
    3: (SAMPLE, OUT_TIME, IN_TIME),
    5: (SAMPLE, OUT_TIME, OUT_UNIT, IN_TIME, IN_FEATURE),
}


def block_norms(data: Any, figure: str, dims: Sequence[str] | None) -> tuple[xr.DataArray, bool]:
    """Return one number per pair of steps, and whether it is a norm over output units and input features.

    If only the last output step exists, ``out_time`` has length one.
    """
    array = labelled(data, figure, dims=dims, guess=GUESS)
    require_dim(array, IN_TIME, figure, hint="pass what rl.jacobian(model, x) returned")
    kept = (SAMPLE, OUT_TIME, IN_TIME, DIRECTION)
    blocks = [d for d in array.dims if d not in kept]
    if blocks:
        axes = tuple(array.get_axis_num(d) for d in blocks)
        norms = safe_norm(array.values, axis=axes, xp=np)
        rest = [d for d in array.dims if d in kept]
        coords = {name: given for name, given in array.coords.items() if set(given.dims) <= set(rest)}
        attrs = {**array.attrs, "long_name": f"norm of the {array.attrs.get('long_name', 'time Jacobian')}"}
        array = xr.DataArray(np.asarray(norms), dims=rest, coords=coords, name=array.name, attrs=attrs)
    if OUT_TIME not in array.dims:
        array = array.expand_dims({OUT_TIME: [positions(array, IN_TIME)[-1]]}, axis=array.dims.index(IN_TIME))
    return array, bool(blocks)


#: Largest number of rows and columns of one panel.
CELLS = (360, 400)


@drawing(AxesImage, extra=IMSHOW, samples=one_of("median", "mean", "panels"))
def time_jacobian(
    jacobian: Any,
    *,
    dims: Sequence[str] | None = None,
    samples: str = "median",
    log: bool = True,
    shared: bool = True,
    limit: float | None = None,
    max_panels: int = 16,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw the time Jacobian as an image: input steps across, output steps upward.

    A full Jacobian is drawn as the Frobenius norm over output units and input features of each pair of steps, a reduced
    one unchanged. White is 0. The triangle of inputs after their output is hatched if all its values are 0. The
    diagonal is lag 0. A single output step is drawn as a line over input steps.

    Parameters
    ----------
    jacobian : (sample, out_time, out_unit, in_time, in_feature), or reduced to (sample, out_time, in_time)
        Result of :func:`rnnlens.jacobian`, or a plain array: rank 2 is (out_time, in_time), 3 and 5 as above.
    samples
        ``"median"`` over samples in one panel, each divided by its own peak, so that a few samples do not dominate (the
        figure states the size of the peaks); ``"mean"`` of the values themselves; or ``"panels"``: one for each sample.
    log
        Logarithmic colours over 4 decades, linear below.
    shared
        One colour scale for all panels.
    limit
        Largest value of the colour scale; by default the largest magnitude.

    Returns
    -------
    1-D array of Axes
    """
    array, taken = block_norms(jacobian, "time_jacobian", dims)
    notes = notes_of(array)
    titles, matrices, empty, thinned = matrices_of(array, samples, max_panels)
    panels = open_panels(
        "time_jacobian",
        len(matrices),
        Grid((4.6, 4.1) if len(matrices) == 1 else (2.5, 2.3), margin=(1.6, 1.0)),
        (None,),
        ax,
        figure,
    )
    top = limit if limit is not None else largest_magnitude(*matrices)
    drawn = []
    for place, matrix, padded, name in zip(panels.axes, matrices, empty, titles, strict=True):
        own = top if shared or limit is not None else largest_magnitude(matrix)
        drawn.append(draw_matrix(place, matrix, padded, array, own, image, log=log))
        place.set_title(name, fontsize="small", pad=3)
    words = value_label(array) + (" (Frobenius)" if taken else "")
    words = f"{words.split(' [')[0]}, share of peak" if samples == "median" and "median" in (thinned or "") else words
    colour_bars(panels, drawn, words, shared=shared, wanted=colorbar)
    panels.label(axis_label(array, IN_TIME), axis_label(array, OUT_TIME) if len(matrices[0]) > 1 else words)
    if panels.owners and len(matrices) > 1:
        panels.outer_ticks_only()
    merged = merge_note(steps_for(matrices[0].shape, CELLS), "output step", "input step")
    finding = _finding(matrices[0], empty[0], array) if len(matrices) == 1 else None
    head = layer_title(array.attrs, finding or "time Jacobian")
    return panels.titled(title or head, [thinned, merged, *notes])


def matrices_of(
    array: xr.DataArray, samples: str, most: int
) -> tuple[list[str], list[Numbers], list[Numbers], str | None]:
    """Return titles, (out_time, in_time) matrices, their padding, and the note on how samples were reduced."""
    directions = names_of(array, DIRECTION) if DIRECTION in array.dims else [""]
    parts = [array.isel({DIRECTION: i}) if DIRECTION in array.dims else array for i in range(len(directions))]
    note: str | None = None
    titles, found, empty = [], [], []
    for name, part in zip(directions, parts, strict=True):
        if samples == "panels" and SAMPLE in part.dims:
            picked, note = choose(part.sizes[SAMPLE], most, "samples")
        else:
            part, note = _of_all(part, samples)
            picked = [-1]
        for i in picked:
            one = part if i < 0 else part.isel({SAMPLE: i})
            titles.append(" · ".join(p for p in (name, f"sample {names_of(part, SAMPLE)[i]}" if i >= 0 else "") if p))
            found.append(np.asarray(without_padding(one).transpose(OUT_TIME, IN_TIME).values))
            nowhere = xr.zeros_like(one, dtype=bool)
            padded = hidden(one)
            padded = nowhere if padded is None else nowhere | padded
            empty.append(np.asarray(padded.transpose(OUT_TIME, IN_TIME).values))
    return titles, found, empty, note


def _of_all(part: xr.DataArray, samples: str) -> tuple[xr.DataArray, str | None]:
    """Reduce all samples to one Jacobian; return it and the note on the reduction."""
    if SAMPLE not in part.dims:
        return part, None
    count = part.sizes[SAMPLE]
    if count == 1:
        return part.squeeze(SAMPLE), None
    padded = hidden(part)
    shown = {} if padded is None or SAMPLE not in padded.dims else {"mask": ~padded.all(SAMPLE)}
    if samples == "mean":
        return mean_of_real(part).assign_coords(shown), f"mean over {count} samples"
    ordered = part.transpose(SAMPLE, ...)
    where = None if padded is None else ~(xr.zeros_like(ordered, dtype=bool) | padded).transpose(*ordered.dims).values
    bad = ~np.isfinite(ordered.values) if where is None else ~np.isfinite(ordered.values) & where
    middle = np.where(bad.any(axis=0), np.nan, peak_band(ordered.values, where).median)
    low, median, high = quartiles(
        sample_peaks(ordered.values if where is None else np.where(where, ordered.values, 0.0))
    )
    one = ordered.isel({SAMPLE: 0}, drop=True).drop_vars(MASKS, errors="ignore").copy(data=middle)
    note = f"median over {count} samples, each by its own peak; peaks: {median:.2g}, quartiles {low:.2g} to {high:.2g}"
    return one.assign_coords(shown), note


def draw_matrix(
    ax: Any,
    matrix: Numbers,
    padded: Numbers,
    array: xr.DataArray,
    top: float,
    keywords: dict[str, Any],
    *,
    log: bool,
) -> Any:
    """Draw one panel: signed values on the diverging map, others from white up, padding grey."""
    with np.errstate(invalid="ignore"):
        signed = bool((matrix < 0).any())
    look: dict[str, Any] = {"cmap": DIVERGING if signed else POSITIVE}
    look["norm"] = around_zero(top, log=log) if signed else from_zero(matrix, top, log=log)
    look |= keywords
    ax.tick_params(labelsize="small")
    in_times, out_times = positions(array, IN_TIME), positions(array, OUT_TIME)
    if len(matrix) == 1:
        return _draw_row(ax, matrix[0], padded[0], in_times, log=log)
    image = draw_image(ax, Matrix(matrix, in_times, out_times, padded), look=look, upward=True, limits=CELLS)
    _hatch(ax, matrix, in_times, out_times)
    return image


def _hatch(ax: Any, matrix: Numbers, in_times: Numbers, out_times: Numbers) -> None:
    """Hatch the triangle of inputs that come after the output, if all its values are 0."""
    for later in (True, False):  # outputs of a backward layer depend on later inputs only
        never = in_times[None, :] > out_times[:, None] if later else in_times[None, :] < out_times[:, None]
        if not never.any() or (matrix[never] != 0).any():
            continue
        xs = in_times if evenly_spaced(in_times) else np.arange(len(in_times))
        ys = out_times if evenly_spaced(out_times) else np.arange(len(out_times))
        rows = np.repeat(np.arange(len(ys)), 2)
        edge = xs[0] - 0.5 + ((~never).sum(axis=1) if later else never.sum(axis=1))[rows]
        heights = np.stack([ys - 0.5, ys + 0.5], axis=1).reshape(-1)
        rim = np.full(len(edge), xs[-1] + 0.5 if later else xs[0] - 0.5)
        look = {"facecolor": "none", "edgecolor": "0.75", "hatch": "////", "linewidth": 0, "zorder": 1.5}
        ax.fill_betweenx(heights, edge, rim, gid="non-causal", **look)
        return


def _draw_row(ax: Any, row: Numbers, padded: Numbers, steps: Numbers, *, log: bool) -> None:
    """Draw the only output step as a line, on a logarithmic axis if no value is negative."""
    bad = ~np.isfinite(row)
    mark_steps(ax, steps[bad & ~padded])
    shade(ax, steps, padded)
    positive = log and is_positive(row)
    shown = np.where(bad | ((row == 0) & positive), np.nan, row)
    ax.plot(steps, shown, color="#0072b2", linewidth=1.3, marker="." if len(steps) < 80 else None, gid="row")
    ax.set_xlim(steps.min() - 0.5, steps.max() + 0.5)
    if positive:
        log_scale(ax, row)
        mark_below(ax, steps, np.where(padded, np.nan, row), "#0072b2")
    else:
        zero_line(ax)
    step_axis(ax, "x", steps)


@drawing(AxesImage, extra=IMSHOW, samples=one_of("median", "mean"))
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

    Both margins are computed from the drawn matrix. The profile is the mean along each diagonal: the dependence of an
    output on the input at that lag. The sum of a column is the effect of one input step on all outputs. Known delays of
    the task are marked, as diagonals of the matrix and in the profile.

    Parameters
    ----------
    jacobian : (sample, out_time, out_unit, in_time, in_feature), or reduced to (sample, out_time, in_time)
        As for :func:`time_jacobian`, with at least two output steps.
    samples
        ``"median"`` over samples, each divided by its own peak; or ``"mean"`` of the values themselves.
    delays : int or sequence of int
        Lags at which the task is known to need its input.
    log
        Logarithmic colours over 4 decades, and logarithmic margins.
    limit
        Largest value of the colour scale; by default the largest magnitude.

    Returns
    -------
    1-D array of Axes: matrix, lag profile, column sums; forward before backward
    """
    array, _ = block_norms(jacobian, "jacobian_margins", dims)
    array = abs(array).assign_attrs(array.attrs)
    notes = notes_of(array)
    _, matrices, empty, note = matrices_of(array, samples, 1)
    ways = names_of(array, DIRECTION) if DIRECTION in array.dims else [None]
    grid = Grid((3.1, 2.6), (1.0, 0.8), (2, 2), widths=(3.2, 1), heights=(3.2, 1))
    panels = open_panels("jacobian_margins", 3, grid, ways, ax, figure)
    top = limit if limit is not None else largest_magnitude(*matrices)
    for places, matrix, padded, way in zip(panels.halves, matrices, empty, ways, strict=True):
        drawn = draw_matrix(places[0], matrix, padded, array, top, image, log=log)
        words = "share of peak" if "median" in (note or "") else "norm"
        if drawn is not None:  # None for a single row, which is drawn as a line
            colour_bar([places[1]], drawn, words)
        _profile(places[1], matrix, padded, array, log, backward=way == BACKWARD)
        _columns(places[2], matrix, padded, array, log)
        _mark(places, array, delays, backward=way == BACKWARD)
        places[0].set_ylabel(axis_label(array, OUT_TIME))
        places[2].set_xlabel(axis_label(array, IN_TIME))
        if len(matrix) == 1:
            places[0].set_ylabel(words)
    finding = _finding(matrices[0], empty[0], array) if len(matrices) == 1 else None
    head = layer_title(array.attrs, finding or "time Jacobian")
    return panels.titled(title or head, [note, *notes])


def _finding(matrix: Numbers, padded: Numbers, array: xr.DataArray) -> str | None:
    """Return text on one to three input steps with at least half of the matrix; None if more are needed."""
    totals = input_totals(np.where(padded | ~np.isfinite(matrix), 0.0, np.abs(matrix)))
    steps = positions(array, IN_TIME)
    if len(totals) < 8 or not totals.sum() > 0:
        return None
    order = np.argsort(-totals)
    shares = np.cumsum(totals[order]) / totals.sum()
    count = int(np.searchsorted(shares, 0.5)) + 1
    if count > 3:
        return None
    names = [f"{step:g}" for step in sorted(steps[order[:count]])]
    which = f"step {names[0]} carries" if count == 1 else f"steps {', '.join(names[:-1])} and {names[-1]} carry"
    return f"input {which} {shares[count - 1]:.0%} of the time Jacobian"


def _profile(ax: Any, matrix: Numbers, padded: Numbers, array: xr.DataArray, log: bool, *, backward: bool) -> None:
    """Draw the mean along each diagonal over the lag."""
    out_times, in_times = (positions(array, dim).tolist() for dim in (OUT_TIME, IN_TIME))
    norms, where = (matrix.T, ~padded.T) if backward else (matrix, ~padded)
    times = (in_times, out_times) if backward else (out_times, in_times)
    norms = np.where(where, norms, 0.0)
    profile = lag_profile(norms, out_times=times[0], in_times=times[1], where=where, xp=np)
    lag = np.arange(len(profile))
    ax.plot(lag, _drawn(profile, log), color="#0072b2", linewidth=1.2, gid="profile")
    ax.set_xlim(-0.5, len(profile) - 0.5)
    step_axis(ax, "x", lag, time=False)
    ax.set_xlabel("lag", fontsize="small")
    ax.set_title("mean by lag", fontsize="small", pad=3)
    _value_axis(ax, profile, log)


def _columns(ax: Any, matrix: Numbers, padded: Numbers, array: xr.DataArray, log: bool) -> None:
    """Draw the sum of each column below it."""
    steps = positions(array, IN_TIME)
    totals = input_totals(np.where(padded, 0.0, matrix))
    ax.plot(steps, _drawn(totals, log), color="#0072b2", linewidth=1.2, gid="columns")
    ax.set_xlim(steps.min() - 0.5, steps.max() + 0.5)
    step_axis(ax, "x", steps)
    ax.set_ylabel("sum of\ncolumn", fontsize="small")
    _value_axis(ax, totals, log)


def _drawn(values: Numbers, log: bool) -> Numbers:
    return np.where(values > 0, values, np.nan) if log else values


def _value_axis(ax: Any, values: Numbers, log: bool) -> None:
    """Set the value axis of a margin."""
    ax.tick_params(labelsize="small")
    if not log:
        ax.set_ylim(0, None)
        return
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size:
        log_limits(ax, positive, room=1.6)
        ax.set_yscale("log")
        log_ticks(ax, "y", most=4)


def _mark(places: list[Any], array: xr.DataArray, delays: Numbers, *, backward: bool) -> None:
    """Mark delays of the task: as diagonals of the matrix, named by their lag, and in the profile."""
    matrix, profile, _ = places
    in_times = positions(array, IN_TIME)
    limits = matrix.get_xlim(), matrix.get_ylim()
    look = {"color": "#111111", "linewidth": 0.9, "linestyle": (0, (1, 2)), "gid": "delay"}
    for delay in delays:
        shift = -delay if backward else delay
        ends = np.array([in_times.min(), in_times.max()], dtype=float)
        if array.sizes[OUT_TIME] > 1:
            matrix.plot(ends, ends + shift, **look)
            at = float(limits[1][1]) - 0.12 * (limits[1][1] - limits[1][0])
            words = {"fontsize": "x-small", "ha": "right" if not backward else "left", "va": "bottom", "gid": "lag"}
            matrix.annotate(f"lag {delay:g}", (at - shift, at), (-3, 2), textcoords="offset points", **words)
        profile.axvline(delay, **look)
    matrix.set(xlim=limits[0], ylim=limits[1])
