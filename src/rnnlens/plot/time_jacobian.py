"""Figures of time Jacobians: ``time_jacobian``; ``jacobian_margins``, with sums; ``total_and_frozen``, two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import integer, one_of
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
    array = _data.label_array(data, figure, dims=dims, guess=GUESS)
    _data.require_dim(array, IN_TIME, figure, hint="pass what rl.jacobian(model, x) returned")
    block_dims = [dim for dim in array.dims if dim not in (SAMPLE, OUT_TIME, IN_TIME, DIRECTION)]
    if block_dims:
        norm_name = f"norm of the {array.attrs.get('long_name', 'time Jacobian')}"
        array = _data.norm_over(array, block_dims).assign_attrs(long_name=norm_name)
    if OUT_TIME not in array.dims:
        array = array.expand_dims({OUT_TIME: [_data.positions(array, IN_TIME)[-1]]}, axis=array.dims.index(IN_TIME))
    return array, bool(block_dims)


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

    Examples
    --------
    >>> jacobian = rl.jacobian(model, x, of="lstm.hidden", wrt="input", measure="norm")
    >>> len(rl.plot.time_jacobian(jacobian))
    1
    """
    array, is_norm = block_norms(jacobian, "time_jacobian", dims)
    notes = _samples.notes_of(array)
    titles, matrices, padding_masks, sample_note = matrices_of(array, samples, max_panels)
    size = (4.6, 4.1) if len(matrices) == 1 else (2.5, 2.3)
    panels = _frame.open_panels("time_jacobian", len(matrices), ax, figure, size=size, margin=(1.6, 1.0))
    common_limit = limit if limit is not None else _data.largest_magnitude(*matrices)
    images = []
    for panel_ax, matrix, padding_mask, panel_title in zip(panels.axes, matrices, padding_masks, titles, strict=True):
        panel_limit = common_limit if shared or limit is not None else _data.largest_magnitude(matrix)
        images.append(draw_matrix(panel_ax, matrix, padding_mask, array, panel_limit, image, log=log))
        panel_ax.set_title(panel_title, fontsize="small", pad=3)
    value_label = _data.value_label(array) + (" (Frobenius)" if is_norm else "")
    value_label = (
        f"{value_label.split(' [')[0]}, share of peak"
        if samples == "median" and "median" in (sample_note or "")
        else value_label
    )
    _images.colour_bars(panels, images, value_label, shared=shared, enabled=colorbar)
    panels.label_axes(
        _data.axis_label(array, IN_TIME), _data.axis_label(array, OUT_TIME) if len(matrices[0]) > 1 else value_label
    )
    if len(matrices) > 1:
        panels.hide_inner_ticks()
    merge_note = _images.merge_note(matrices[0].shape, CELLS, "output step", "input step")
    notes = [_data.zero_note(array.values), sample_note, merge_note, *notes]
    return panels.with_title(title or _figure_title(matrices, padding_masks, array), notes)


def matrices_of(
    array: xr.DataArray, samples: str, max_panels: int
) -> tuple[list[str], list[Numbers], list[Numbers], str | None]:
    """Return titles, (out_time, in_time) matrices, their padding, and the note on how samples were reduced."""
    note: str | None = None
    titles, matrices, padding_masks = [], [], []
    for view in _data.direction_views(array):
        direction_array = view.data
        if samples == "panels" and SAMPLE in direction_array.dims:
            sample_indices, note = _data.select_evenly(direction_array.sizes[SAMPLE], max_panels, "samples")
        else:
            direction_array, note = _reduce_samples(direction_array, samples)
            sample_indices = [-1]
        for sample_index in sample_indices:
            sample_array = direction_array if sample_index < 0 else direction_array.isel({SAMPLE: sample_index})
            sample_title = (
                f"sample {_data.names_of(direction_array, SAMPLE)[sample_index]}" if sample_index >= 0 else ""
            )
            titles.append(" · ".join(title_part for title_part in (view.name, sample_title) if title_part))
            matrices.append(np.asarray(_samples.nan_at_padding(sample_array).transpose(OUT_TIME, IN_TIME).values))
            padding_masks.append(
                np.asarray(_samples.full_padding_mask(sample_array).transpose(OUT_TIME, IN_TIME).values)
            )
    return titles, matrices, padding_masks, note


def _reduce_samples(array: xr.DataArray, samples: str) -> tuple[xr.DataArray, str | None]:
    """Reduce all samples to one Jacobian; return it and the note on the reduction."""
    if SAMPLE not in array.dims:
        return array, None
    count = array.sizes[SAMPLE]
    if count == 1:
        return array.squeeze(SAMPLE), None
    padding_mask = _samples.padding_mask(array)
    mask_coord = {} if padding_mask is None or SAMPLE not in padding_mask.dims else {"mask": ~padding_mask.all(SAMPLE)}
    if samples == "mean":
        return _samples.mean_of_real_steps(array).assign_coords(mask_coord), f"mean over {count} samples"
    samples_first = array.transpose(SAMPLE, ...)
    is_real = ~_samples.full_padding_mask(samples_first).values
    is_nonfinite = ~np.isfinite(samples_first.values) & is_real
    median_matrix = np.where(is_nonfinite.any(axis=0), np.nan, peak_band(samples_first.values, is_real).median)
    low_peak, median_peak, high_peak = quartiles(sample_peaks(np.where(is_real, samples_first.values, 0.0)))
    reduced = (
        samples_first.isel({SAMPLE: 0}, drop=True).drop_vars(_samples.MASKS, errors="ignore").copy(data=median_matrix)
    )
    note = (
        f"median over {count} samples, each by its own peak; peaks: {median_peak:.2g}, "
        f"quartiles {low_peak:.2g} to {high_peak:.2g}"
    )
    return reduced.assign_coords(mask_coord), note


def draw_matrix(
    ax: Any,
    matrix: Numbers,
    is_padding: Numbers,
    array: xr.DataArray,
    limit: float,
    keywords: dict[str, Any],
    *,
    log: bool,
) -> Any:
    """Draw one panel: signed values on the diverging map, others from white up, padding grey."""
    with np.errstate(invalid="ignore"):
        is_signed = bool((matrix < 0).any())
    style = {**_axes.colour_scale(matrix, limit, log=log, positive=not is_signed), **keywords}
    in_times, out_times = _data.positions(array, IN_TIME), _data.positions(array, OUT_TIME)
    if len(matrix) == 1:
        return _draw_only_row(ax, matrix[0], is_padding[0], in_times, log=log)
    image = _images.draw_image(
        ax, _images.Matrix(matrix, in_times, out_times, is_padding), style=style, upward=True, cell_limits=CELLS
    )
    _hatch(ax, matrix, in_times, out_times)
    return image


def _hatch(ax: Any, matrix: Numbers, in_times: Numbers, out_times: Numbers) -> None:
    """Hatch the triangle of inputs that come after the output, if all its values are 0."""
    for is_later in (True, False):  # outputs of a backward layer depend on later inputs only
        is_excluded = in_times[None, :] > out_times[:, None] if is_later else in_times[None, :] < out_times[:, None]
        if not is_excluded.any() or (matrix[is_excluded] != 0).any():
            continue
        column_positions = in_times if _images.is_evenly_spaced(in_times) else np.arange(len(in_times))
        row_positions = out_times if _images.is_evenly_spaced(out_times) else np.arange(len(out_times))
        rows = np.repeat(np.arange(len(row_positions)), 2)
        edge_x = column_positions[0] - 0.5 + ((~is_excluded).sum(axis=1) if is_later else is_excluded.sum(axis=1))[rows]
        heights = np.stack([row_positions - 0.5, row_positions + 0.5], axis=1).reshape(-1)
        border = np.full(len(edge_x), column_positions[-1] + 0.5 if is_later else column_positions[0] - 0.5)
        style = {"facecolor": "none", "edgecolor": "0.75", "hatch": "////", "linewidth": 0, "zorder": 1.5}
        ax.fill_betweenx(heights, edge_x, border, gid="non-causal", **style)
        return


def _draw_only_row(ax: Any, row: Numbers, is_padding: Numbers, steps: Numbers, *, log: bool) -> None:
    """Draw the only output step as a line, on a logarithmic axis if no value is negative."""
    is_nonfinite = ~np.isfinite(row)
    _axes.mark_nonfinite(ax, steps[is_nonfinite & ~is_padding])
    _samples.shade_padding(ax, steps, is_padding)
    is_positive = log and _axes.is_positive(row)
    shown_values = np.where(is_nonfinite | ((row == 0) & is_positive), np.nan, row)
    ax.plot(steps, shown_values, color=_axes.BLUE, linewidth=1.3, marker="." if len(steps) < 80 else None, gid="row")
    _axes.tick_steps(ax, "x", steps, margin=0.5)
    if is_positive:
        _axes.set_value_axis(ax, row, log=True)
        _axes.mark_below(ax, steps, np.where(is_padding, np.nan, row), _axes.BLUE)
    else:
        _axes.draw_zero_line(ax)


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
    """Draw the time Jacobian with margins: the lag profile at its right, lag upward, the sums of its columns below.

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

    Examples
    --------
    >>> jacobian = rl.jacobian(model, x, of="lstm.hidden", wrt="input", measure="norm")
    >>> axes = rl.plot.jacobian_margins(jacobian)
    >>> len(axes)  # the matrix, its lag profile, its column sums
    3
    """
    array, _ = block_norms(jacobian, "jacobian_margins", dims)
    array = abs(array).assign_attrs(array.attrs)
    notes = _samples.notes_of(array)
    _, matrices, padding_masks, sample_note = matrices_of(array, samples, 1)
    directions = [view.name for view in _data.direction_views(array)]
    sizes: dict[str, Any] = {"size": (3.1, 2.6), "margin": (1.0, 0.8), "widths": (3.2, 1), "heights": (3.2, 1)}
    panels = _frame.open_panels("jacobian_margins", 3, ax, figure, directions=directions, shape=(2, 2), **sizes)
    common_limit = limit if limit is not None else _data.largest_magnitude(*matrices)
    for direction_axes, matrix, padding_mask, direction in zip(
        panels.axes_by_direction, matrices, padding_masks, directions, strict=True
    ):
        drawn_image = draw_matrix(direction_axes[0], matrix, padding_mask, array, common_limit, image, log=log)
        value_label = "share of peak" if "median" in (sample_note or "") else "norm"
        if drawn_image is not None:  # None for a single row, which is drawn as a line
            _images.colour_bar([direction_axes[1]], drawn_image, value_label)
        _draw_lag_profile(direction_axes[1], matrix, padding_mask, array, log, backward=direction == BACKWARD)
        _draw_column_sums(direction_axes[2], matrix, padding_mask, array, log)
        _mark_delays(direction_axes, array, delays, backward=direction == BACKWARD)
        direction_axes[0].set_ylabel(_data.axis_label(array, OUT_TIME) if len(matrix) > 1 else value_label)
        direction_axes[2].set_xlabel(_data.axis_label(array, IN_TIME))
    notes = [_data.zero_note(array.values), sample_note, *notes]
    return panels.with_title(title or _figure_title(matrices, padding_masks, array), notes)


def _figure_title(matrices: list[Numbers], padding_masks: list[Numbers], array: xr.DataArray) -> str:
    """Return a title: of a single matrix the one to three input steps that hold half of it, if there are so few."""
    title, steps = "time Jacobian", _data.positions(array, IN_TIME)
    column_sums = input_totals(np.where(padding_masks[0] | ~np.isfinite(matrices[0]), 0.0, np.abs(matrices[0])))
    if len(matrices) == 1 and len(column_sums) >= 8 and column_sums.sum() > 0:
        order = np.argsort(-column_sums)
        shares = np.cumsum(column_sums[order]) / column_sums.sum()
        step_count = int(np.searchsorted(shares, 0.5)) + 1
        *first_steps, last_step = [f"{step:g}" for step in sorted(steps[order[:step_count]])]
        steps_text = (
            f"steps {', '.join(first_steps)} and {last_step} carry" if first_steps else f"step {last_step} carries"
        )
        title = title if step_count > 3 else f"input {steps_text} {shares[step_count - 1]:.0%} of the time Jacobian"
    return _data.layer_title(array.attrs, title)


def _draw_lag_profile(
    ax: Any, matrix: Numbers, is_padding: Numbers, array: xr.DataArray, log: bool, *, backward: bool
) -> None:
    """Draw the mean along each diagonal, with the lag upward."""
    out_times, in_times = (_data.positions(array, dim).tolist() for dim in (OUT_TIME, IN_TIME))
    norms, is_real = (matrix.T, ~is_padding.T) if backward else (matrix, ~is_padding)
    times = (in_times, out_times) if backward else (out_times, in_times)
    norms = np.where(is_real, norms, 0.0)
    profile = lag_profile(norms, out_times=times[0], in_times=times[1], where=is_real)
    lags = np.arange(len(profile))
    _draw_margin(ax, lags, profile, log, gid="profile", upward=True)
    _axes.tick_steps(ax, "y", lags, time=False, margin=0.5)
    ax.set_ylabel("lag", fontsize="small")
    ax.set_title("mean by lag", fontsize="small", pad=3)


def _draw_column_sums(ax: Any, matrix: Numbers, is_padding: Numbers, array: xr.DataArray, log: bool) -> None:
    """Draw the column sums of a time Jacobian, on Axes below it."""
    steps = _data.positions(array, IN_TIME)
    _draw_margin(ax, steps, input_totals(np.where(is_padding, 0.0, matrix)), log, gid="columns")
    _axes.tick_steps(ax, "x", steps, margin=0.5)
    ax.set_ylabel("sum of\ncolumn", fontsize="small")


def _draw_margin(ax: Any, steps: Numbers, values: Numbers, log: bool, *, gid: str, upward: bool = False) -> None:
    """Draw the values of a margin as a line, and set its value axis; ``upward``: steps increase upward."""
    positive_values = values[np.isfinite(values) & (values > 0)]
    shown_values = np.where(values > 0, values, np.nan) if log else values
    points, axis = ((shown_values, steps), "x") if upward else ((steps, shown_values), "y")
    ax.plot(*points, color=_axes.BLUE, linewidth=1.2, marker="o" if len(steps) == 1 else None, markersize=4, gid=gid)
    if not log:
        ax.set(**{f"{axis}lim": (0, None)})
    elif positive_values.size:
        _axes.set_log_limits(ax, positive_values, headroom=1.6, axis=axis)
        _axes.set_log_axis(ax, axis, most_ticks=3 if upward else 4)


def _mark_delays(axes: list[Any], array: xr.DataArray, delays: Numbers, *, backward: bool) -> None:
    """Draw the known delays of the task as diagonals of the matrix, named by their lag, and in the lag profile."""
    matrix_ax, profile_ax, _ = axes
    in_times = _data.positions(array, IN_TIME)
    limits = matrix_ax.get_xlim(), matrix_ax.get_ylim()
    for delay in delays:
        shift = -delay if backward else delay
        line_x = np.array([in_times.min(), in_times.max()], dtype=float)
        if array.sizes[OUT_TIME] > 1:
            matrix_ax.plot(line_x, line_x + shift, **_axes.DOTTED, gid="delay")
            label_y = float(limits[1][1]) - 0.12 * (limits[1][1] - limits[1][0])
            alignment = "left" if backward else "right"
            _axes.write_text(
                matrix_ax, f"lag {delay:g}", (label_y - shift, label_y), (-3, 2), ha=alignment, va="bottom", gid="lag"
            )
        profile_ax.axhline(delay, **_axes.DOTTED, gid="delay")
    matrix_ax.set(xlim=limits[0], ylim=limits[1])


#: Share of the largest value of the lag profile above which the total and the frozen map are compared.
_COMPARED_SHARE = 0.01


@drawing(AxesImage, extra=_images.IMSHOW, from_lag=integer(least=0))
def total_and_frozen(
    total: Any,
    frozen: Any,
    *,
    dims: Sequence[str] | None = None,
    from_lag: int = 0,
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
    from_lag
        First lag of the comparison in the title. A convolution before the scan has the same effect in both maps: its
        width, such as 4, leaves its lags out.
    limit
        Largest value of the colour scale; by default the largest of both maps.

    Returns
    -------
    1-D array of two Axes: total, frozen

    References
    ----------
    Frozen map: Ali, Zimerman, Wolf 2024, arXiv:2403.01590, eqs. 10-12.

    Examples
    --------
    >>> ends = {"of": "layers.0.mixer.output", "wrt": "layers.0.mixer.input", "measure": "norm"}
    >>> total, frozen = rl.jacobian(mamba, ids, **ends), rl.jacobian(mamba, ids, frozen=True, **ends)
    >>> len(rl.plot.total_and_frozen(total, frozen))
    2
    """
    norms_and_flags = [block_norms(jacobian, "total_and_frozen", dims) for jacobian in (total, frozen)]
    arrays = [array for array, _ in norms_and_flags]
    _refuse_mismatch(arrays)
    matrix_results = [matrices_of(array, "mean", 1) for array in arrays]
    matrices = [abs(matrix_list[0]) for _, matrix_list, _, _ in matrix_results]
    panels = _frame.open_panels("total_and_frozen", 2, ax, figure, size=(3.4, 3.0), margin=(1.6, 1.0), shape=(1, 2))
    common_limit = limit if limit is not None else _data.largest_magnitude(*matrices)
    images = []
    for panel_ax, matrix, matrix_result, array in zip(panels.axes, matrices, matrix_results, arrays, strict=True):
        images.append(draw_matrix(panel_ax, matrix, matrix_result[2][0], array, common_limit, image, log=log))
        panel_ax.set_title("coefficients held" if len(images) > 1 else "total", fontsize="small", pad=3)
    value_label = _data.value_label(arrays[0]).split(" [")[0] + (" (Frobenius)" if norms_and_flags[0][1] else "")
    _images.colour_bars(panels, images, value_label, shared=True, enabled=colorbar)
    panels.label_axes(
        _data.axis_label(arrays[0], IN_TIME),
        _data.axis_label(arrays[0], OUT_TIME) if len(matrices[0]) > 1 else value_label,
    )
    panels.hide_inner_ticks()
    merge_note = _images.merge_note(matrices[0].shape, CELLS, "output step", "input step")
    default_title = _data.layer_title(arrays[0].attrs, _frozen_share_text(matrices, arrays[0], from_lag))
    notes = [_data.zero_note(*matrices), matrix_results[0][3], merge_note, *_samples.notes_of(arrays[0])]
    return panels.with_title(title or default_title, notes)


def _refuse_mismatch(arrays: Sequence[xr.DataArray]) -> None:
    """Raise InputError for two maps that differ in shape, or that have two directions."""
    total_sizes, frozen_sizes = ({str(dim): int(size) for dim, size in array.sizes.items()} for array in arrays)
    if total_sizes != frozen_sizes or DIRECTION in total_sizes:
        raise InputError(
            "plot.total_and_frozen compares two time Jacobians of one layer.",
            got=f"total {total_sizes}, frozen {frozen_sizes}",
            expected="equal dimensions, of one direction",
            hint="call rl.jacobian twice with the same arguments, the second time with frozen=True",
        )


def _frozen_share_text(matrices: Sequence[Numbers], array: xr.DataArray, from_lag: int) -> str:
    """Return text on how large the frozen map is relative to the total one, at the first and last lag compared."""
    out_times, in_times = (_data.positions(array, dim).tolist() for dim in (OUT_TIME, IN_TIME))
    total, frozen = (np.asarray(lag_profile(matrix, out_times=out_times, in_times=in_times)) for matrix in matrices)
    with np.errstate(invalid="ignore"):
        compared_lags = (
            np.flatnonzero(total > _COMPARED_SHARE * np.nanmax(total)) if np.isfinite(total).any() else np.zeros(0, int)
        )
        compared_lags = compared_lags[compared_lags >= from_lag]
    if not compared_lags.size or not np.nanmax(total) > 0:
        return "total and frozen map"
    share_texts = [
        f"{float(f'{100 * frozen[lag] / total[lag]:.2g}'):g} % (lag {lag})"
        for lag in dict.fromkeys((int(compared_lags[0]), int(compared_lags[-1])))
    ]
    return f"held coefficients show {' to '.join(share_texts)} of the influence"
