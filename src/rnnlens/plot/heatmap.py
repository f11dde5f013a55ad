"""``heatmap``: units by time as colours; ``before_after``: two results of one model, and the ratio of magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..errors import InputError, has_attribute
from ..vocabulary import SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers

#: Label of the RMS over samples.
_RMS = "RMS, share of the peak"


@drawing(AxesImage, extra=_images.IMSHOW, samples=one_of("panels", "rms"))
def heatmap(
    data: Any,
    *,
    dims: Sequence[str] | None = None,
    x: str | None = None,
    y: str | None = None,
    samples: str | None = None,
    losses: Any = None,
    shared: bool = True,
    limit: float | None = None,
    log: bool = False,
    max_panels: int = 16,
    page: int | None = None,
    as_computed: bool = False,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw units by time as colours: one picture of all samples, or a panel per sample; directions side by side.

    White is 0; the colours of the two signs differ, and without negative values there is only one colour. Masked steps
    are grey.

    Parameters
    ----------
    data : (sample, time, unit), also with gate or direction; or any array of at least two dimensions
        A DataArray, or a plain array: rank 2 is (time, unit), 3 (sample, time, unit), 4 (sample, time, gate, unit).
    x, y
        Horizontal and vertical dimension; by default time and unit, without time the last two. All others become
        panels; gates are stacked into y.
    samples
        ``"rms"`` (default for several samples): one picture of the network, the RMS over samples, each divided by its
        own peak, so that a few hard samples do not dominate; ``"panels"``: one for each sample, with its signs.
    losses : (sample,)
        Losses of the samples: a panel for each, named by its loss, the one of median loss first.
    shared
        One colour scale for all panels, from the largest finite magnitude in the *whole* array, drawn or not; else
        each panel has its own scale and colour bar.
    log
        Logarithmic colours over 4 decades; the colour bar states the end below which values have one colour.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward

    Examples
    --------
    >>> axes = rl.plot.heatmap(trace["lstm"].hidden_grad)
    >>> len(axes)  # one picture of both samples
    1
    """
    array = _data.label_array(data, "heatmap", dims=dims, guess=_images.GUESS)
    notes = _samples.notes_of(array)
    array = _samples.sort_by_loss(array, losses, "heatmap")
    if samples is None:
        has_several = array.sizes.get(SAMPLE, 1) > 1 and SAMPLE not in (x, y) and array.ndim > 2
        samples = "rms" if has_several and losses is None and page is None else "panels"
    if samples == "rms":
        notes.insert(0, _samples.rms_note(array.sizes.get(SAMPLE, 1)))
        array = _samples.rms_picture(array, "heatmap")
    image_dims = _images.ImageDims.of(array, "heatmap", x, y)
    views = _data.direction_views(array, as_computed=as_computed)
    panel_dims, selections = image_dims.panel_selections(array)
    panel_indices, panel_note = _data.select_evenly(
        len(selections), max_panels, " x ".join(f"{d}s" for d in panel_dims) or "panels", page=page
    )
    common_limit = limit if limit is not None else _data.largest_magnitude(_samples.nan_at_padding(array).values)
    shape, directions = image_dims.shape(array), [view.name for view in views]
    (width, height), cells = _panel_size(len(panel_indices), shape[0])
    size = (width if len(directions) == 1 else 0.62 * width, height)  # a page's width is the limit
    panels = _frame.open_panels(
        "heatmap", len(panel_indices), ax, figure, directions=directions, size=size, margin=(1.9, 1.1)
    )
    has_one_sign, images = _axes.is_positive(array.values), []
    for view, direction_axes in zip(views, panels.axes_by_direction, strict=True):
        for panel_ax, (selection, panel_title) in zip(
            direction_axes, [selections[i] for i in panel_indices], strict=True
        ):
            panel_array = view.data.isel(selection)
            matrix = image_dims.matrix(panel_array)
            panel_limit = common_limit if shared or limit is not None else _data.largest_magnitude(matrix.values)
            style = {**_axes.colour_scale(matrix.values, panel_limit, log=log, positive=has_one_sign), **image}
            images.append(image_dims.draw(panel_ax, panel_array, matrix, panel_title, style=style, cell_limits=cells))
            if image_dims.horizontal == TIME:
                _samples.mark_resets(panel_ax, panel_array.coords.get("reset"), matrix.x)
    x_labels = [
        view.time_label if image_dims.horizontal == TIME else _data.axis_label(array, image_dims.horizontal)
        for view in views
    ]
    panels.label_axes(x_labels, image_dims.label(array))
    label = _RMS if samples == "rms" else _data.value_label(array)
    _images.colour_bars(panels, images, label, shared=shared, enabled=colorbar)
    panels.hide_inner_ticks()
    merge_note = _images.merge_note(shape, cells, image_dims.vertical, image_dims.horizontal)
    return panels.with_title(
        title or _data.title_of(array), [_data.zero_note(array.values), panel_note, merge_note, *notes]
    )


def _panel_size(count: int, rows: int) -> tuple[tuple[float, float], tuple[int, int]]:
    """Return the size of one panel in inches, taller for many rows, and how many cells it can show."""
    width, height = (6.0, 4.6) if count == 1 else (3.4, 2.4) if count <= 4 else (2.6, 1.9)
    cells = _images.MOST_CELLS if count == 1 else (200, 300) if count <= 4 else (150, 220)
    return (width, height * min(1.0, 0.55 + rows / 400)), cells


#: Largest number of rows and columns of one panel of ``before_after``.
CELLS = (180, 240)
#: Least and most decades of the ratio after / before at the ends of its colour bar.
_RATIO_DECADES = (1, 12)


@drawing(AxesImage, extra=_images.IMSHOW, samples=one_of("panels", "rms"))
def before_after(
    before: Any,
    after: Any,
    *,
    quantity: str = "hidden_grad",
    samples: str = "panels",
    losses: Any = None,
    dims: Sequence[str] | None = None,
    names: tuple[str, str] = ("before", "after"),
    limit: float | None = None,
    log: bool = False,
    max_rows: int = 4,
    page: int | None = None,
    as_computed: bool = False,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw a quantity of one model at two moments on one colour scale, and the factor of change.

    The third column is |after| / |before| on a logarithmic scale of its own, from less (blue) to more (orange); white
    is no change. Its ends are the power of ten that 95 % of the ratios do not exceed.

    Parameters
    ----------
    before, after
        Two layers of traces, or two arrays of the same dimensions and sizes: (sample, time, unit), also with gate or
        direction; or weights, whose last two dimensions are drawn. Or two traces of several layers: rows for each.
    samples
        ``"panels"``: a row per sample; ``"rms"``: one picture of each network, the RMS over samples, each divided by
        its own peak, so that a few hard samples do not dominate.
    losses : (sample,)
        Losses of the samples after training, written over the second column; the sample of median loss is first.
    names
        Titles of the first two columns.
    limit
        Colour scale from -limit to limit instead of the largest magnitude of both.

    Returns
    -------
    1-D array of Axes: before, after, ratio, row by row, forward before backward

    Examples
    --------
    >>> axes = rl.plot.before_after(before["lstm"], trace["lstm"], max_rows=2)
    >>> len(axes)  # two samples: before, after, ratio
    6
    """
    pairs = _array_pairs(before, after, quantity, dims)
    has_one_layer, is_rms = len(pairs) == 1, samples == "rms"
    pairs_shown = {
        name: [_samples.sort_by_loss(array, losses, "before_after") for array in arrays]
        for name, arrays in pairs.items()
    }
    reduction_note = None
    if is_rms:
        reduction_note = _samples.rms_note(next(iter(pairs.values()))[0].sizes.get(SAMPLE, 1))
        pairs_shown = {
            name: [_samples.rms_picture(array, "before_after") for array in arrays]
            for name, arrays in pairs_shown.items()
        }
    rows, directions = _compared_rows(pairs_shown, as_computed)
    row_indices, row_note = _data.select_evenly(
        len(rows[0]), max_rows, "samples" if has_one_layer else "rows", page=page
    )
    all_arrays = [array for arrays in pairs_shown.values() for array in arrays]
    common_limit = limit if limit is not None else _data.largest_magnitude(*(array.values for array in all_arrays))
    sizes: dict[str, Any] = {"size": (2.9, 2.2), "margin": (2.2, 1.1), "shape": (len(row_indices), 3)}
    if len(row_indices) == len(directions) == 1:  # one below the other: steps line up, and a page is wide enough
        sizes = {"size": (4.6, 1.5), "margin": (1.9, 1.1), "shape": (3, 1)}
    panels = _frame.open_panels("before_after", 3 * len(row_indices), ax, figure, directions=directions, **sizes)
    style = {
        **_axes.colour_scale(np.concatenate([array.values.reshape(-1) for array in all_arrays]), common_limit, log=log),
        **image,
    }
    decades = _ratio_decades(direction_rows[row] for direction_rows in rows for row in row_indices)
    value_label, ratio_label = (
        (_RMS, "times the share") if is_rms else (_data.value_label(all_arrays[0]), "times as large")
    )
    for direction_axes, direction_rows in zip(panels.axes_by_direction, rows, strict=True):
        for position, row in enumerate(row_indices):
            images = _draw_row(
                direction_axes[3 * position : 3 * position + 3],
                direction_rows[row],
                names,
                losses is not None,
                (style, _ratio_style(decades)),
            )
        if colorbar:
            _images.colour_bar(
                [array for position, array in enumerate(direction_axes) if position % 3 < 2], images[1], value_label
            )
            ratio_bar = _images.colour_bar(direction_axes[2::3], images[2], ratio_label)
            _label_ratios(ratio_bar, decades)
    first_row = rows[0][row_indices[0]]
    panels.label_axes(
        [direction_rows[0].across_label for direction_rows in rows],
        first_row.dims.label(first_row.before) if has_one_layer else "unit",
    )
    if has_one_layer:
        panels.hide_inner_ticks()
    merge_note = _images.merge_note(
        first_row.dims.shape(first_row.before), CELLS, first_row.dims.vertical, first_row.dims.horizontal
    )
    moment_values = (
        np.concatenate([array.values.reshape(-1) for array in moment_arrays])
        for moment_arrays in zip(*pairs.values(), strict=True)
    )
    nonfinite_notes = _data.nonfinite_by_name(names, moment_values)
    default_title = (
        _data.title_of(all_arrays[0]) if has_one_layer else str(all_arrays[0].attrs.get("long_name", quantity))
    )
    zero_note = _data.zero_note(*(array.values for array in all_arrays))
    notes = [zero_note, reduction_note, row_note, merge_note, *nonfinite_notes]
    return panels.with_title(title or default_title, notes)


@dataclass(frozen=True)
class ComparedRow:
    """One row of ``before_after``: a layer, direction and sample at two moments."""

    title: str
    before: xr.DataArray
    after: xr.DataArray
    dims: _images.ImageDims
    across_label: str


def _array_pairs(before: Any, after: Any, quantity: str, dims: Any) -> dict[str, tuple[xr.DataArray, xr.DataArray]]:
    """Return the two arrays to compare, before and after, by layer name; one pair without a name for plain arrays."""

    def read(result: Any) -> dict[str, xr.DataArray]:
        has_layers = isinstance(result, Mapping | xr.DataTree) or has_attribute(result, "layers")
        layers = _data.layers_of(result, "before_after") if has_layers and _data.dataset_of(result) is None else {}
        variables = {
            name: _data.layer_variable(variable, quantity, "before_after")
            for name, variable in (layers if len(layers) > 1 else {"": result}).items()
        }
        guess = _images.GUESS
        return {
            name: _data.label_array(variable, "before_after", dims=dims, guess=guess)
            for name, variable in variables.items()
        }

    arrays_before, arrays_after = read(before), read(after)
    pairs = {}
    for name, array in arrays_before.items():
        array_after = arrays_after.get(name)
        if array_after is None or dict(array.sizes) != dict(array_after.sizes):
            received = (
                f"{dict(array.sizes)} and "
                f"{dict(array_after.sizes) if array_after is not None else f'no layer {name!r}'}"
            )
            hint = "trace the same layers of the model with the same batch"
            message = "plot.before_after compares two results of the same dimensions and sizes."
            raise InputError(message, got=received, hint=hint)
        pairs[name] = (array, array_after.transpose(*array.dims))
    return pairs


def _compared_rows(
    arrays_by_layer: Mapping[str, Sequence[xr.DataArray]], as_computed: bool
) -> tuple[list[list[ComparedRow]], list[str | None]]:
    """Return lists of rows to draw, one list per direction of a single layer, else one list of all; and their names."""
    has_one_layer = len(arrays_by_layer) == 1
    rows_by_direction: dict[str | None, list[ComparedRow]] = {}
    for layer, (before, after) in arrays_by_layer.items():
        image_dims = _images.ImageDims.of(before, "before_after")
        pairs = zip(
            _data.direction_views(before, as_computed=as_computed),
            _data.direction_views(after, as_computed=as_computed),
            strict=True,
        )
        for view_before, view_after in pairs:
            label = (
                view_before.time_label
                if image_dims.horizontal == TIME
                else _data.axis_label(before, image_dims.horizontal)
            )
            for selection, sample_title in image_dims.panel_selections(before)[1]:
                row_title = " · ".join(
                    part for part in (layer, "" if has_one_layer else view_before.name, sample_title) if part
                )
                row = ComparedRow(
                    row_title, view_before.data.isel(selection), view_after.data.isel(selection), image_dims, label
                )
                rows_by_direction.setdefault(view_before.name if has_one_layer else None, []).append(row)
    return list(rows_by_direction.values()), list(rows_by_direction)


def _ratio_decades(rows: Iterable[ComparedRow]) -> int:
    """Return the decades that hold 95 % of the ratios of all rows."""
    ratios = [
        log_ratio(row.dims.matrix(row.before).values, row.dims.matrix(row.after).values).reshape(-1) for row in rows
    ]
    sizes = np.abs(np.concatenate(ratios))
    sizes = sizes[np.isfinite(sizes)]
    return int(np.clip(math.ceil(np.quantile(sizes, 0.95)) if sizes.size else 1, *_RATIO_DECADES))


def _ratio_style(decades: int) -> dict[str, Any]:
    return {"cmap": _axes.DIVERGING, "norm": Normalize(-decades, decades)}


def _label_ratios(bar: Any, decades: int) -> None:
    """Label the colour bar of the ratios with the factors at its ends, at 1 and between."""
    ticks = sorted({-decades, -(decades // 2), 0, decades // 2, decades})
    texts = [_axes.short_number(10.0**tick) for tick in ticks]
    bar.set_ticks(ticks, labels=[f"≤ {texts[0]}", *texts[1:-1], f"≥ {texts[-1]}"])


def _draw_row(
    axes: Sequence[Any],
    row: ComparedRow,
    names: tuple[str, str],
    has_losses: bool,
    styles: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> list[Any]:
    """Draw before, after and their ratio; return the images."""
    matrix_before, matrix_after = row.dims.matrix(row.before), row.dims.matrix(row.after)
    ratio = replace(matrix_before, values=log_ratio(matrix_before.values, matrix_after.values))
    style, ratio_style = styles
    title_before = row.title.partition(", loss")[0] if has_losses else row.title  # the losses are those after training
    columns = (
        (matrix_before, style, names[0], title_before),
        (replace(matrix_after, empty=matrix_before.empty), style, names[1], row.title),
        (ratio, ratio_style, "ratio", title_before),
    )
    images = []
    for panel_ax, (matrix, column_style, column_name, column_title) in zip(axes, columns, strict=True):
        separator = " · " if len(column_name) + len(column_title) < 32 else "\n"
        panel_title = separator.join(title_part for title_part in (column_name, column_title) if title_part)
        images.append(row.dims.draw(panel_ax, row.before, matrix, panel_title, style=column_style, cell_limits=CELLS))
    return images


def log_ratio(before: Numbers, after: Numbers) -> Numbers:
    """Return log10(|after| / |before|), clipped to the widest scale; 0 if both are 0, NaN if one is missing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(np.abs(after)) - np.log10(np.abs(before))
    ratio = np.where((before == 0) & (after == 0), 0.0, ratio)
    return np.where(
        np.isfinite(before) & np.isfinite(after), np.clip(ratio, -_RATIO_DECADES[1], _RATIO_DECADES[1]), np.nan
    )
