"""``heatmap``: units by time as colours; ``before_after``: two results of one model, and the ratio of magnitudes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """
    array = _data.labelled(data, "heatmap", dims=dims, guess=_images.GUESS)
    notes = _samples.notes_of(array)
    array = _samples.by_loss(array, losses, "heatmap")
    if samples is None:
        several = array.sizes.get(SAMPLE, 1) > 1 and SAMPLE not in (x, y) and array.ndim > 2
        samples = "rms" if several and losses is None and page is None else "panels"
    if samples == "rms":
        array = _samples.rms_picture(array, "heatmap")
    dims_of = _images.ImageDims.of(array, "heatmap", x, y)
    shown = _data.halves(array, as_computed=as_computed)
    along, slots = dims_of.slots(array)
    picked, thinned = _data.choose(len(slots), max_panels, " x ".join(f"{d}s" for d in along) or "panels", page=page)
    top = limit if limit is not None else _data.largest_magnitude(_samples.without_padding(array).values)
    shape, ways = dims_of.shape(array), [half.name for half in shown]
    size, cells = _size(len(picked), shape[0])
    panels = _frame.open_panels("heatmap", len(picked), ax, figure, ways=ways, size=size, margin=(1.9, 1.1))
    positive, drawn = _axes.is_positive(array.values), []
    for half, axes in zip(shown, panels.halves, strict=True):
        for place, (where, name) in zip(axes, [slots[i] for i in picked], strict=True):
            one = half.data.isel(where)
            matrix = dims_of.matrix(one)
            own = top if shared or limit is not None else _data.largest_magnitude(matrix.values)
            look = {**_axes.colours(matrix.values, own, log=log, positive=positive), **image}
            drawn.append(dims_of.draw(place, one, matrix, name, look=look, limits=cells))
            if dims_of.across == TIME:
                _samples.mark_resets(place, one.coords.get("reset"), matrix.x)
    labels = [half.time_label if dims_of.across == TIME else _data.axis_label(array, dims_of.across) for half in shown]
    panels.label(labels, dims_of.label(array))
    words = _RMS if samples == "rms" else _data.value_label(array)
    _images.colour_bars(panels, drawn, words, shared=shared, wanted=colorbar)
    panels.outer_ticks_only()
    merged = _images.merge_note(shape, cells, dims_of.down, dims_of.across)
    return panels.titled(title or _data.title_of(array), [thinned, merged, *notes])


def _size(count: int, rows: int) -> tuple[tuple[float, float], tuple[int, int]]:
    """Return the size of one panel in inches, taller for many rows, and how many cells it can show."""
    width, height = (6.0, 4.6) if count == 1 else (3.4, 2.4) if count <= 4 else (2.6, 1.9)
    cells = _images.MOST_CELLS if count == 1 else (200, 300) if count <= 4 else (150, 220)
    return (width, height * min(1.0, 0.55 + rows / 400)), cells


#: Largest number of rows and columns of one panel of ``before_after``.
CELLS = (180, 240)
#: Decades of the ratio after / before at the ends of its colour bar.
_RATIO = 2.0


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

    The third column is |after| / |before| on a logarithmic scale of its own, from 0.01 (blue) to 100 (orange); white
    is no change.

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
    """
    pairs = _pairs(before, after, quantity, dims)
    one_layer, rms = len(pairs) == 1, samples == "rms"
    shown = {name: [_samples.by_loss(one, losses, "before_after") for one in pair] for name, pair in pairs.items()}
    if rms:
        shown = {name: [_samples.rms_picture(one, "before_after") for one in pair] for name, pair in shown.items()}
    rows, ways = _rows(shown, as_computed)
    picked, thinned = _data.choose(len(rows[0]), max_rows, "samples" if one_layer else "rows", page=page)
    every = [one for pair in shown.values() for one in pair]
    top = limit if limit is not None else _data.largest_magnitude(*(one.values for one in every))
    sizes: dict[str, Any] = {"size": (2.9, 2.2), "margin": (2.2, 1.1), "shape": (len(picked), 3)}
    panels = _frame.open_panels("before_after", 3 * len(picked), ax, figure, ways=ways, **sizes)
    look = {**_axes.colours(np.concatenate([one.values.reshape(-1) for one in every]), top, log=log), **image}
    value, times = (_RMS, "times the share") if rms else (_data.value_label(every[0]), "times as large")
    for axes, of_half in zip(panels.halves, rows, strict=True):
        for i, row in enumerate(picked):
            drawn = _draw_row(axes[3 * i : 3 * i + 3], of_half[row], names, losses is not None, look)
        if colorbar:
            _images.colour_bar([one for i, one in enumerate(axes) if i % 3 < 2], drawn[1], value)
            ratio = _images.colour_bar(axes[2::3], drawn[2], times)
            ratio.set_ticks([-2, -1, 0, 1, 2], labels=["≤ 0.01", "0.1", "1", "10", "≥ 100"])
    first = rows[0][picked[0]]
    panels.label([of_half[0].across_label for of_half in rows], first.dims.label(first.before) if one_layer else "unit")
    if one_layer:
        panels.outer_ticks_only()
    merged = _images.merge_note(first.dims.shape(first.before), CELLS, first.dims.down, first.dims.across)
    sides = (np.concatenate([one.values.reshape(-1) for one in side]) for side in zip(*pairs.values(), strict=True))
    missing = _data.nonfinite_by_name(names, sides)
    head = _data.title_of(every[0]) if one_layer else str(every[0].attrs.get("long_name", quantity))
    return panels.titled(title or head, [thinned, merged, *missing])


@dataclass(frozen=True)
class ComparedRow:
    """One row of ``before_after``: a layer, direction and sample at two moments."""

    words: str
    before: xr.DataArray
    after: xr.DataArray
    dims: _images.ImageDims
    across_label: str


def _pairs(before: Any, after: Any, quantity: str, dims: Any) -> dict[str, tuple[xr.DataArray, xr.DataArray]]:
    """Return the two arrays to compare, before and after, by layer name; one pair without a name for plain arrays."""

    def read(one: Any) -> dict[str, xr.DataArray]:
        many = isinstance(one, Mapping | xr.DataTree) or has_attribute(one, "layers")
        layers = _data.layers_of(one, "before_after") if many and _data.dataset_of(one) is None else {}
        parts = {
            name: _data.variable(part, quantity, "before_after")
            for name, part in (layers if len(layers) > 1 else {"": one}).items()
        }
        guess = _images.GUESS
        return {name: _data.labelled(part, "before_after", dims=dims, guess=guess) for name, part in parts.items()}

    first, second = read(before), read(after)
    found = {}
    for name, array in first.items():
        other = second.get(name)
        if other is None or dict(array.sizes) != dict(other.sizes):
            got = f"{dict(array.sizes)} and {dict(other.sizes) if other is not None else f'no layer {name!r}'}"
            hint = "trace the same layers of the model with the same batch"
            what = "plot.before_after compares two results of the same dimensions and sizes."
            raise InputError(what, got=got, hint=hint)
        found[name] = (array, other.transpose(*array.dims))
    return found


def _rows(
    shown: Mapping[str, Sequence[xr.DataArray]], as_computed: bool
) -> tuple[list[list[ComparedRow]], list[str | None]]:
    """Return lists of rows to draw, one list per direction of a single layer, else one list of all; and their names."""
    one_layer = len(shown) == 1
    found: dict[str | None, list[ComparedRow]] = {}
    for layer, (first, second) in shown.items():
        dims = _images.ImageDims.of(first, "before_after")
        pairs = zip(
            _data.halves(first, as_computed=as_computed), _data.halves(second, as_computed=as_computed), strict=True
        )
        for one, other in pairs:
            label = one.time_label if dims.across == TIME else _data.axis_label(first, dims.across)
            for where, sample in dims.slots(first)[1]:
                words = " · ".join(part for part in (layer, "" if one_layer else one.name, sample) if part)
                row = ComparedRow(words, one.data.isel(where), other.data.isel(where), dims, label)
                found.setdefault(one.name if one_layer else None, []).append(row)
    return list(found.values()), list(found)


def _draw_row(
    axes: Sequence[Any], row: ComparedRow, names: tuple[str, str], has_losses: bool, look: Mapping[str, Any]
) -> list[Any]:
    """Draw before, after and their ratio; return the images."""
    first, second = row.dims.matrix(row.before), row.dims.matrix(row.after)
    ratio = replace(first, values=log_ratio(first.values, second.values))
    of_ratio = {"cmap": _axes.DIVERGING, "norm": Normalize(-_RATIO, _RATIO)}
    untrained = row.words.partition(", loss")[0] if has_losses else row.words  # the losses are those after training
    columns = (
        (first, look, names[0], untrained),
        (replace(second, empty=first.empty), look, names[1], row.words),
        (ratio, of_ratio, "ratio", untrained),
    )
    drawn = []
    for place, (matrix, colouring, name, words) in zip(axes, columns, strict=True):
        between = " · " if len(name) + len(words) < 32 else "\n"
        head = between.join(part for part in (name, words) if part)
        drawn.append(row.dims.draw(place, row.before, matrix, head, look=colouring, limits=CELLS))
    return drawn


def log_ratio(before: Numbers, after: Numbers) -> Numbers:
    """Return log10(|after| / |before|), clipped to its scale; 0 if both are 0, NaN if one is missing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(np.abs(after)) - np.log10(np.abs(before))
    ratio = np.where((before == 0) & (after == 0), 0.0, ratio)
    return np.where(np.isfinite(before) & np.isfinite(after), np.clip(ratio, -_RATIO, _RATIO), np.nan)
