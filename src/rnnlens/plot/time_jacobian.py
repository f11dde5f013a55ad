"""Figures of time Jacobians: ``time_jacobian``; ``jacobian_margins``, with sums; ``total_and_frozen``, two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..errors import InputError
from ..measures.profiles import input_totals, peak_band, quartiles, sample_peaks
from ..recurrence.measures import lag_profile
from ..vocabulary import BACKWARD, DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers

#: Dimensions of a plain array by its rank.
GUESS = {
    2: (OUT_TIME, IN_TIME),
    3: (SAMPLE, OUT_TIME, IN_TIME),
    5: (SAMPLE, OUT_TIME, OUT_UNIT, IN_TIME, IN_FEATURE),
}


def block_norms(data: Any, figure: str, dims: Sequence[str] | None) -> tuple[xr.DataArray, bool]:
    """Return one number per pair of steps, and whether it is a norm over output units and input features."""
    array = _data.labelled(data, figure, dims=dims, guess=GUESS)
    _data.require_dim(array, IN_TIME, figure, hint="pass what rl.jacobian(model, x) returned")
    blocks = [d for d in array.dims if d not in (SAMPLE, OUT_TIME, IN_TIME, DIRECTION)]
    if blocks:
        words = f"norm of the {array.attrs.get('long_name', 'time Jacobian')}"
        array = _data.norm_over(array, blocks).assign_attrs(long_name=words)
    if OUT_TIME not in array.dims:
        array = array.expand_dims({OUT_TIME: [_data.positions(array, IN_TIME)[-1]]}, axis=array.dims.index(IN_TIME))
    return array, bool(blocks)


#: Largest number of rows and columns of one panel.
CELLS = (360, 400)


@drawing(AxesImage, extra=_images.IMSHOW, samples=one_of("median", "mean", "panels"))
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
    shared
        One colour scale for all panels.

    Returns
    -------
    1-D array of Axes
    """
    array, taken = block_norms(jacobian, "time_jacobian", dims)
    notes = _samples.notes_of(array)
    titles, matrices, empty, thinned = matrices_of(array, samples, max_panels)
    size = (4.6, 4.1) if len(matrices) == 1 else (2.5, 2.3)
    panels = _frame.open_panels("time_jacobian", len(matrices), ax, figure, size=size, margin=(1.6, 1.0))
    top = limit if limit is not None else _data.largest_magnitude(*matrices)
    drawn = []
    for place, matrix, padded, name in zip(panels.axes, matrices, empty, titles, strict=True):
        own = top if shared or limit is not None else _data.largest_magnitude(matrix)
        drawn.append(draw_matrix(place, matrix, padded, array, own, image, log=log))
        place.set_title(name, fontsize="small", pad=3)
    words = _data.value_label(array) + (" (Frobenius)" if taken else "")
    words = f"{words.split(' [')[0]}, share of peak" if samples == "median" and "median" in (thinned or "") else words
    _images.colour_bars(panels, drawn, words, shared=shared, wanted=colorbar)
    panels.label(_data.axis_label(array, IN_TIME), _data.axis_label(array, OUT_TIME) if len(matrices[0]) > 1 else words)
    if len(matrices) > 1:
        panels.outer_ticks_only()
    merged = _images.merge_note(matrices[0].shape, CELLS, "output step", "input step")
    return panels.titled(title or _headline(matrices, empty, array), [thinned, merged, *notes])


def matrices_of(
    array: xr.DataArray, samples: str, most: int
) -> tuple[list[str], list[Numbers], list[Numbers], str | None]:
    """Return titles, (out_time, in_time) matrices, their padding, and the note on how samples were reduced."""
    note: str | None = None
    titles, found, empty = [], [], []
    for half in _data.halves(array):
        part = half.data
        if samples == "panels" and SAMPLE in part.dims:
            picked, note = _data.choose(part.sizes[SAMPLE], most, "samples")
        else:
            part, note = _of_all(part, samples)
            picked = [-1]
        for i in picked:
            one = part if i < 0 else part.isel({SAMPLE: i})
            sample = f"sample {_data.names_of(part, SAMPLE)[i]}" if i >= 0 else ""
            titles.append(" · ".join(words for words in (half.name, sample) if words))
            found.append(np.asarray(_samples.without_padding(one).transpose(OUT_TIME, IN_TIME).values))
            empty.append(np.asarray(_samples.padding_of(one).transpose(OUT_TIME, IN_TIME).values))
    return titles, found, empty, note


def _of_all(part: xr.DataArray, samples: str) -> tuple[xr.DataArray, str | None]:
    """Reduce all samples to one Jacobian; return it and the note on the reduction."""
    if SAMPLE not in part.dims:
        return part, None
    count = part.sizes[SAMPLE]
    if count == 1:
        return part.squeeze(SAMPLE), None
    padded = _samples.hidden(part)
    shown = {} if padded is None or SAMPLE not in padded.dims else {"mask": ~padded.all(SAMPLE)}
    if samples == "mean":
        return _samples.mean_of_real(part).assign_coords(shown), f"mean over {count} samples"
    ordered = part.transpose(SAMPLE, ...)
    where = ~_samples.padding_of(ordered).values
    bad = ~np.isfinite(ordered.values) & where
    middle = np.where(bad.any(axis=0), np.nan, peak_band(ordered.values, where).median)
    low, median, high = quartiles(sample_peaks(np.where(where, ordered.values, 0.0)))
    one = ordered.isel({SAMPLE: 0}, drop=True).drop_vars(_samples.MASKS, errors="ignore").copy(data=middle)
    note = f"median over {count} samples, each by its own peak; peaks: {median:.2g}, quartiles {low:.2g} to {high:.2g}"
    return one.assign_coords(shown), note


def draw_matrix(
    ax: Any, matrix: Numbers, padded: Numbers, array: xr.DataArray, top: float, keywords: dict[str, Any], *, log: bool
) -> Any:
    """Draw one panel: signed values on the diverging map, others from white up, padding grey."""
    with np.errstate(invalid="ignore"):
        signed = bool((matrix < 0).any())
    look = {**_axes.colours(matrix, top, log=log, positive=not signed), **keywords}
    in_times, out_times = _data.positions(array, IN_TIME), _data.positions(array, OUT_TIME)
    if len(matrix) == 1:
        return _draw_row(ax, matrix[0], padded[0], in_times, log=log)
    image = _images.draw_image(
        ax, _images.Matrix(matrix, in_times, out_times, padded), look=look, upward=True, limits=CELLS
    )
    _hatch(ax, matrix, in_times, out_times)
    return image


def _hatch(ax: Any, matrix: Numbers, in_times: Numbers, out_times: Numbers) -> None:
    """Hatch the triangle of inputs that come after the output, if all its values are 0."""
    for later in (True, False):  # outputs of a backward layer depend on later inputs only
        never = in_times[None, :] > out_times[:, None] if later else in_times[None, :] < out_times[:, None]
        if not never.any() or (matrix[never] != 0).any():
            continue
        xs = in_times if _images.evenly_spaced(in_times) else np.arange(len(in_times))
        ys = out_times if _images.evenly_spaced(out_times) else np.arange(len(out_times))
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
    _axes.mark_steps(ax, steps[bad & ~padded])
    _samples.shade(ax, steps, padded)
    positive = log and _axes.is_positive(row)
    shown = np.where(bad | ((row == 0) & positive), np.nan, row)
    ax.plot(steps, shown, color="#0072b2", linewidth=1.3, marker="." if len(steps) < 80 else None, gid="row")
    _axes.step_axis(ax, "x", steps, room=0.5)
    if positive:
        _axes.value_axis(ax, row, log=True)
        _axes.mark_below(ax, steps, np.where(padded, np.nan, row), "#0072b2")
    else:
        _axes.zero_line(ax)


@drawing(AxesImage, extra=_images.IMSHOW, samples=one_of("median", "mean"))
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
    log
        Logarithmic colours over 4 decades, and logarithmic margins.

    Returns
    -------
    1-D array of Axes: matrix, lag profile, column sums; forward before backward
    """
    array, _ = block_norms(jacobian, "jacobian_margins", dims)
    array = abs(array).assign_attrs(array.attrs)
    notes = _samples.notes_of(array)
    _, matrices, empty, note = matrices_of(array, samples, 1)
    ways = [half.name for half in _data.halves(array)]
    sizes: dict[str, Any] = {"size": (3.1, 2.6), "margin": (1.0, 0.8), "widths": (3.2, 1), "heights": (3.2, 1)}
    panels = _frame.open_panels("jacobian_margins", 3, ax, figure, ways=ways, shape=(2, 2), **sizes)
    top = limit if limit is not None else _data.largest_magnitude(*matrices)
    for places, matrix, padded, way in zip(panels.halves, matrices, empty, ways, strict=True):
        drawn = draw_matrix(places[0], matrix, padded, array, top, image, log=log)
        words = "share of peak" if "median" in (note or "") else "norm"
        if drawn is not None:  # None for a single row, which is drawn as a line
            _images.colour_bar([places[1]], drawn, words)
        _profile(places[1], matrix, padded, array, log, backward=way == BACKWARD)
        _columns(places[2], matrix, padded, array, log)
        _mark(places, array, delays, backward=way == BACKWARD)
        places[0].set_ylabel(_data.axis_label(array, OUT_TIME) if len(matrix) > 1 else words)
        places[2].set_xlabel(_data.axis_label(array, IN_TIME))
    return panels.titled(title or _headline(matrices, empty, array), [note, *notes])


def _headline(matrices: list[Numbers], padding: list[Numbers], array: xr.DataArray) -> str:
    """Return a title: of a single matrix the one to three input steps that hold half of it, if there are so few."""
    words, steps = "time Jacobian", _data.positions(array, IN_TIME)
    totals = input_totals(np.where(padding[0] | ~np.isfinite(matrices[0]), 0.0, np.abs(matrices[0])))
    if len(matrices) == 1 and len(totals) >= 8 and totals.sum() > 0:
        order = np.argsort(-totals)
        shares = np.cumsum(totals[order]) / totals.sum()
        count = int(np.searchsorted(shares, 0.5)) + 1
        *first, last = [f"{step:g}" for step in sorted(steps[order[:count]])]
        which = f"steps {', '.join(first)} and {last} carry" if first else f"step {last} carries"
        words = words if count > 3 else f"input {which} {shares[count - 1]:.0%} of the time Jacobian"
    return _data.layer_title(array.attrs, words)


def _profile(ax: Any, matrix: Numbers, padded: Numbers, array: xr.DataArray, log: bool, *, backward: bool) -> None:
    """Draw the mean along each diagonal over the lag."""
    out_times, in_times = (_data.positions(array, dim).tolist() for dim in (OUT_TIME, IN_TIME))
    norms, where = (matrix.T, ~padded.T) if backward else (matrix, ~padded)
    times = (in_times, out_times) if backward else (out_times, in_times)
    norms = np.where(where, norms, 0.0)
    profile = lag_profile(norms, out_times=times[0], in_times=times[1], where=where)
    lag = np.arange(len(profile))
    _margin(ax, lag, profile, log, gid="profile")
    _axes.step_axis(ax, "x", lag, time=False, room=0.5)
    ax.set_xlabel("lag", fontsize="small")
    ax.set_title("mean by lag", fontsize="small", pad=3)


def _columns(ax: Any, matrix: Numbers, padded: Numbers, array: xr.DataArray, log: bool) -> None:
    """Draw the column sums of a time Jacobian, on Axes below it."""
    steps = _data.positions(array, IN_TIME)
    _margin(ax, steps, input_totals(np.where(padded, 0.0, matrix)), log, gid="columns")
    _axes.step_axis(ax, "x", steps, room=0.5)
    ax.set_ylabel("sum of\ncolumn", fontsize="small")


def _margin(ax: Any, x: Numbers, values: Numbers, log: bool, *, gid: str) -> None:
    """Draw the values of a margin as a line, and set its value axis."""
    positive = values[np.isfinite(values) & (values > 0)]
    shown = np.where(values > 0, values, np.nan) if log else values
    ax.plot(x, shown, color="#0072b2", linewidth=1.2, gid=gid)
    if not log:
        ax.set_ylim(0, None)
    elif positive.size:
        _axes.log_limits(ax, positive, room=1.6)
        _axes.log_axis(ax, most=4)


def _mark(places: list[Any], array: xr.DataArray, delays: Numbers, *, backward: bool) -> None:
    """Draw the known delays of the task as diagonals of the matrix, named by their lag, and in the lag profile."""
    matrix, profile, _ = places
    in_times = _data.positions(array, IN_TIME)
    limits = matrix.get_xlim(), matrix.get_ylim()
    for delay in delays:
        shift = -delay if backward else delay
        ends = np.array([in_times.min(), in_times.max()], dtype=float)
        if array.sizes[OUT_TIME] > 1:
            matrix.plot(ends, ends + shift, **_axes.DOTTED, gid="delay")
            at = float(limits[1][1]) - 0.12 * (limits[1][1] - limits[1][0])
            side = "left" if backward else "right"
            _axes.write(matrix, f"lag {delay:g}", (at - shift, at), (-3, 2), ha=side, va="bottom", gid="lag")
        profile.axvline(delay, **_axes.DOTTED, gid="delay")
    matrix.set(xlim=limits[0], ylim=limits[1])


#: Share of the largest value of the lag profile above which the total and the frozen map are compared.
_SEEN = 0.01


@drawing(AxesImage, extra=_images.IMSHOW)
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
    panels = _frame.open_panels("total_and_frozen", 2, ax, figure, size=(3.4, 3.0), margin=(1.6, 1.0), shape=(1, 2))
    top = limit if limit is not None else _data.largest_magnitude(*matrices)
    drawn = []
    for place, matrix, part, array in zip(panels.axes, matrices, parts, arrays, strict=True):
        drawn.append(draw_matrix(place, matrix, part[2][0], array, top, image, log=log))
        place.set_title("coefficients held" if len(drawn) > 1 else "total", fontsize="small", pad=3)
    words = _data.value_label(arrays[0]).split(" [")[0] + (" (Frobenius)" if given[0][1] else "")
    _images.colour_bars(panels, drawn, words, shared=True, wanted=colorbar)
    panels.label(
        _data.axis_label(arrays[0], IN_TIME), _data.axis_label(arrays[0], OUT_TIME) if len(matrices[0]) > 1 else words
    )
    panels.outer_ticks_only()
    merged = _images.merge_note(matrices[0].shape, CELLS, "output step", "input step")
    head = _data.layer_title(arrays[0].attrs, _shares(matrices, arrays[0]))
    return panels.titled(title or head, [parts[0][3], merged, *_samples.notes_of(arrays[0])])


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
    """Return text on how large the frozen map is relative to the total one, at the smallest and largest lag."""
    rows, columns = (_data.positions(array, dim).tolist() for dim in (OUT_TIME, IN_TIME))
    total, frozen = (np.asarray(lag_profile(m, out_times=rows, in_times=columns)) for m in matrices)
    with np.errstate(invalid="ignore"):
        seen = np.flatnonzero(total > _SEEN * np.nanmax(total)) if np.isfinite(total).any() else np.zeros(0, int)
    if not seen.size or not np.nanmax(total) > 0:
        return "total and frozen map"
    ends = [f"{frozen[lag] / total[lag]:.2g} (lag {lag})" for lag in dict.fromkeys((int(seen[0]), int(seen[-1])))]
    return f"the frozen map is {' to '.join(ends)} of the total one"
