"""``heatmap``: units by time as colours.

``before_after``: two results of one model and the ratio of their magnitudes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..errors import InputError, has_attribute
from ..vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ._axes import DIVERGING, POSITIVE, around_zero, from_zero, is_positive
from ._call import drawing
from ._data import (
    Numbers,
    axis_label,
    choose,
    dataset_of,
    halves,
    labelled,
    largest_magnitude,
    layers_of,
    names_of,
    nonfinite_note,
    positions,
    title_of,
    value_label,
    variable,
)
from ._frame import Grid, open_panels
from ._images import (
    GUESS,
    IMSHOW,
    MOST_CELLS,
    Matrix,
    axes_of,
    colour_bar,
    colour_bars,
    draw_image,
    matrix_of,
    merge_note,
    separate,
    slots_of,
    steps_for,
)
from ._samples import by_loss, hidden, mark_resets, notes_of, rms_picture, without_padding


@drawing(AxesImage, extra=IMSHOW, samples=one_of("panels", "rms"))
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
    limit
        Largest magnitude of the colour scale. Values beyond it have the end colours.
    log
        Logarithmic colours over 4 decades; the colour bar states the end below which values have one colour.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward
    """
    array = labelled(data, "heatmap", dims=dims, guess=GUESS)
    notes = notes_of(array)
    array = by_loss(array, losses, "heatmap")
    if samples is None:
        several = array.sizes.get(SAMPLE, 1) > 1 and SAMPLE not in (x, y) and array.ndim > 2
        samples = "rms" if several and losses is None and page is None else "panels"
    if samples == "rms":
        array = rms_picture(array, "heatmap")
    across, down = axes_of(array, "heatmap", x, y)
    keep = [str(d) for d in array.dims if d not in (across, down, GATE, DIRECTION)]
    stacked = GATE in array.dims and GATE not in (across, down)
    shown = halves(array, as_computed=as_computed)
    slots = slots_of(array, keep)
    picked, thinned = choose(len(slots), max_panels, " x ".join(f"{d}s" for d in keep) or "panels", page=page)
    top = limit if limit is not None else largest_magnitude(without_padding(array).values)
    rows = array.sizes[down] * (array.sizes[GATE] if stacked else 1)
    panels = open_panels(
        "heatmap", len(picked), Grid(_size(len(picked), rows), margin=(1.9, 1.1)), [h.name for h in shown], ax, figure
    )
    kind = _Kind(across, down, stacked, log, is_positive(array.values), _cells(len(picked)), image)
    drawn = []
    for half, axes in zip(shown, panels.halves, strict=True):
        for place, slot in zip(axes, [slots[i] for i in picked], strict=True):
            scale = top if shared or limit is not None else None
            drawn.append(_draw_maps(place, half.data, slot, scale, kind))
    labels = [half.time_label if across == TIME else axis_label(array, across) for half in shown]
    panels.label(labels, f"gate, {axis_label(array, down)}" if stacked else axis_label(array, down))
    words = "RMS, share of the peak" if samples == "rms" else value_label(array)
    colour_bars(panels, drawn, words, shared=shared, wanted=colorbar)
    if panels.owners:
        panels.outer_ticks_only()
    merged = merge_note(steps_for((rows, array.sizes[across]), kind.limits), down, across)
    return panels.titled(title or title_of(array), [thinned, merged, *notes])


@dataclass(frozen=True)
class _Kind:
    """Properties that all panels of a heatmap share.

    Attributes
    ----------
    across, down
        The horizontal and vertical dimension of a panel. ``stacked``: gates are stacked along the second.
    log
        Logarithmic colours.
    positive
        Colours from white up, as no value is negative.
    limits
        Rows and columns that one panel can show.
    keywords
        Properties of the images.
    """

    across: str
    down: str
    stacked: bool
    log: bool
    positive: bool
    limits: tuple[int, int]
    keywords: dict[str, Any]

    def matrix(self, panel: xr.DataArray) -> Numbers:
        """Return the matrix (row, column) of a panel."""
        return matrix_of(panel, self.across, self.down, self.stacked)


def _draw_maps(ax: Any, data: xr.DataArray, slot: tuple[dict[str, int], str], top: float | None, kind: _Kind) -> Any:
    """Draw one panel; ``top`` is the colour limit, None for the panel's own."""
    where, name = slot
    one = data.isel(where)
    matrix = kind.matrix(without_padding(one))
    padded = hidden(one)
    padded = xr.zeros_like(one, dtype=bool) | (False if padded is None else padded)
    own = largest_magnitude(matrix) if top is None else top
    look = {"cmap": DIVERGING, "norm": around_zero(own, log=kind.log)}
    if kind.positive:
        look = {"cmap": POSITIVE, "norm": from_zero(matrix, own, log=kind.log)}
    rows = np.arange(len(matrix)) if kind.stacked else positions(data, kind.down)
    image = draw_image(
        ax,
        Matrix(matrix, positions(data, kind.across), rows, kind.matrix(padded), kind.across == TIME),
        look={**look, **kind.keywords},
        limits=kind.limits,
    )
    if kind.across == TIME:
        mark_resets(ax, one.coords.get("reset"), positions(data, TIME))
    ax.set_title(name, fontsize="small", pad=3)
    ax.tick_params(labelsize="small")
    if kind.stacked:
        separate(ax, "y", data.sizes[kind.down], names_of(data, GATE))
    return image


def _cells(count: int) -> tuple[int, int]:
    """Return how many rows and columns one of ``count`` panels can show."""
    return MOST_CELLS if count == 1 else (200, 300) if count <= 4 else (150, 220)


def _size(count: int, rows: int) -> tuple[float, float]:
    """Return width and height of one panel in inches: large alone, small among many; tall for many rows."""
    tall = min(1.0, 0.55 + rows / 400)
    width, height = (6.0, 4.6) if count == 1 else (3.4, 2.4) if count <= 4 else (2.6, 1.9)
    return width, height * tall


#: Largest number of rows and columns of one panel of ``before_after``.
CELLS = (180, 240)
#: Decades of the ratio after / before at the ends of its colour bar.
_RATIO = 2.0


@drawing(AxesImage, extra=IMSHOW, samples=one_of("panels", "rms"))
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
    quantity
        Variable to draw, if layers are passed.
    samples
        ``"panels"``: a row per sample; ``"rms"``: one picture of each network, the RMS over samples, each divided by
        its own peak, so that a few hard samples do not dominate.
    losses : (sample,)
        Losses of the samples after training, written over the second column; the sample of median loss is first.
    names
        Titles of the first two columns.
    limit
        Colour scale from -limit to limit instead of the largest magnitude of both.
    log
        Symmetric logarithmic colours over 4 decades.

    Returns
    -------
    1-D array of Axes: before, after, ratio, row by row, forward before backward
    """
    pairs = _pairs(before, after, quantity, dims)
    given = [[one for pair in pairs.values() for one in pair][side::2] for side in (0, 1)]
    shown = {name: tuple(_pictures(one, samples, losses) for one in pair) for name, pair in pairs.items()}
    rows, ways = _rows(shown, as_computed)
    picked, thinned = choose(len(rows[0]), max_rows, "rows" if len(pairs) > 1 else "samples", page=page)
    every = [one for pair in shown.values() for one in pair]
    top = limit if limit is not None else largest_magnitude(*(one.values for one in every))
    grid = Grid((2.9, 2.2), (2.2, 1.1), (len(picked), 3))
    panels = open_panels("before_after", 3 * len(picked), grid, ways, ax, figure)
    values = np.concatenate([one.values.reshape(-1) for one in every])
    look: dict[str, Any] = {"cmap": DIVERGING, "norm": around_zero(top, log=log)}
    if is_positive(values):
        look = {"cmap": POSITIVE, "norm": from_zero(values, top, log=log)}
    look |= image
    value = "RMS, share of the peak" if samples == "rms" else value_label(every[0])
    for axes, of_half in zip(panels.halves, rows, strict=True):
        chosen = [of_half[i] for i in picked]
        drawn = [
            _draw_row(axes[3 * i : 3 * i + 3], row, names, losses is not None, look) for i, row in enumerate(chosen)
        ]
        if colorbar:
            colour_bar([one for i in range(len(chosen)) for one in axes[3 * i : 3 * i + 2]], drawn[-1][1], value)
            times = "times the share" if samples == "rms" else "times as large"
            ratio = colour_bar(axes[2::3], drawn[-1][2], times)
            ratio.set_ticks([-2, -1, 0, 1, 2], labels=["≤ 0.01", "0.1", "1", "10", "≥ 100"])
    first = rows[0][picked[0]]
    words = f"gate, {axis_label(first.before, first.down)}" if first.stacked else axis_label(first.before, first.down)
    panels.label([of_half[0].across_label for of_half in rows], words if len(pairs) == 1 else "unit")
    if panels.owners and len(pairs) == 1:
        panels.outer_ticks_only()
    merged = merge_note(steps_for(first.shape, CELLS), first.down, first.across)
    missing = [
        f"{name}: {note}"
        for name, side in zip(names, given, strict=True)
        if (note := nonfinite_note(np.concatenate([one.values.reshape(-1) for one in side])))
    ]
    head = title_of(every[0]) if len(pairs) == 1 else str(every[0].attrs.get("long_name", quantity))
    return panels.titled(title or head, [thinned, merged, *missing])


@dataclass(frozen=True)
class ComparedRow:
    """One row of ``before_after``: a matrix of a layer, direction and sample at two moments."""

    words: str
    before: xr.DataArray
    after: xr.DataArray
    across: str
    down: str
    across_label: str

    @property
    def stacked(self) -> bool:
        """Whether gates are stacked into the rows."""
        return GATE in self.before.dims and GATE not in (self.across, self.down)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        gates = self.before.sizes[GATE] if self.stacked else 1
        return self.before.sizes[self.down] * gates, self.before.sizes[self.across]

    def matrix(self, array: xr.DataArray) -> Numbers:
        """Return the matrix (row, column) of one moment, or of a mask."""
        return matrix_of(array, self.across, self.down, self.stacked)


def _pairs(before: Any, after: Any, quantity: str, dims: Any) -> dict[str, tuple[xr.DataArray, xr.DataArray]]:
    """Return the arrays of both moments, by layer if there are several."""

    def read(one: Any) -> dict[str, xr.DataArray]:
        whole = dataset_of(one) is None and (isinstance(one, Mapping | xr.DataTree) or has_attribute(one, "layers"))
        layers = layers_of(one, "before_after") if whole else {}
        members = layers if len(layers) > 1 else {"": one}
        return {
            name: labelled(variable(part, quantity, "before_after"), "before_after", dims=dims, guess=GUESS)
            for name, part in members.items()
        }

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


def _pictures(array: xr.DataArray, samples: str, losses: Any) -> xr.DataArray:
    """Name the samples with their losses, or reduce them to their RMS."""
    array = by_loss(array, losses, "before_after")
    return rms_picture(array, "before_after") if samples == "rms" else array


def _rows(
    shown: Mapping[str, tuple[xr.DataArray, ...]], as_computed: bool
) -> tuple[list[list[ComparedRow]], list[str | None]]:
    """Return the rows for each direction, and the directions' names; with several layers, each direction is a row."""
    one_layer = len(shown) == 1
    found: dict[str | None, list[ComparedRow]] = {}
    for layer, (first, second) in shown.items():
        across, down = axes_of(first, "before_after")
        slots = slots_of(first, [str(d) for d in first.dims if d not in (across, down, GATE, DIRECTION)])
        pairs = zip(halves(first, as_computed=as_computed), halves(second, as_computed=as_computed), strict=True)
        for one, other in pairs:
            label = one.time_label if across == TIME else axis_label(first, across)
            for where, sample in slots:
                words = " · ".join(part for part in (layer, "" if one_layer else one.name, sample) if part)
                row = ComparedRow(words, one.data.isel(where), other.data.isel(where), across, down, label)
                found.setdefault(one.name if one_layer else None, []).append(row)
    return list(found.values()), list(found)


def _draw_row(
    axes: Sequence[Any], row: ComparedRow, names: tuple[str, str], has_losses: bool, look: Mapping[str, Any]
) -> list[Any]:
    """Draw before, after and their ratio; return the images."""
    padded = hidden(row.before)
    nowhere = xr.zeros_like(row.before, dtype=bool) | (False if padded is None else padded)
    empty = row.matrix(nowhere)
    first, second = (row.matrix(without_padding(one)) for one in (row.before, row.after))
    ratio = {"cmap": DIVERGING, "norm": Normalize(-_RATIO, _RATIO)}
    untrained = row.words.partition(", loss")[0] if has_losses else row.words  # the losses are those after training
    titles = (untrained, row.words, untrained)
    drawn = []
    columns = ((first, look, names[0]), (second, look, names[1]), (log_ratio(first, second), ratio, "ratio"))
    x, y = positions(row.before, row.across), positions(row.before, row.down)
    for place, (values, colours, name), words in zip(axes, columns, titles, strict=True):
        matrix = Matrix(values, x, np.arange(len(values)) if row.stacked else y, empty, row.across == TIME)
        drawn.append(draw_image(place, matrix, look=dict(colours), limits=CELLS))
        between = " · " if len(name) + len(words) < 32 else "\n"
        place.set_title(between.join(part for part in (name, words) if part), fontsize="small", pad=3)
        place.tick_params(labelsize="small")
        if row.stacked:
            separate(place, "y", row.before.sizes[row.down], names_of(row.before, GATE))
    return drawn


def log_ratio(before: Numbers, after: Numbers) -> Numbers:
    """Return log10(|after| / |before|), clipped to its scale; 0 if both are 0, NaN if one is missing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(np.abs(after)) - np.log10(np.abs(before))
    ratio = np.where((before == 0) & (after == 0), 0.0, ratio)
    return np.where(np.isfinite(before) & np.isfinite(after), np.clip(ratio, -_RATIO, _RATIO), np.nan)
