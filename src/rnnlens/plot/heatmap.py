"""``heatmap``: units by time as colours; ``before_after``: two results of one model and the ratio of their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..errors import InputError, message
from ..vocabulary import DIRECTION, GATE, TIME
from ._axes import is_positive
from ._call import drawing
from ._colour import DIVERGING, POSITIVE, around_zero, from_zero
from ._data import (
    DirectionView,
    Numbers,
    axis_label,
    choose,
    halves,
    labelled,
    largest_magnitude,
    names_of,
    nonfinite_note,
    positions,
    title_of,
    value_label,
    variable,
)
from ._frame import Grid, Panels, open_panels
from ._images import (
    GUESS,
    IMSHOW,
    MOST_CELLS,
    Matrix,
    axes_of,
    colour_bars,
    draw_image,
    matrix_of,
    merge_note,
    separate,
    slots_of,
    steps_for,
)
from ._samples import by_loss, hidden, notes_of, rms_picture, without_padding


@drawing(AxesImage, extra=IMSHOW, samples=one_of("panels", "rms"))
def heatmap(
    data: Any,
    *,
    dims: Sequence[str] | None = None,
    x: str | None = None,
    y: str | None = None,
    samples: str = "panels",
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
    """Draw units by time as colours, a panel per sample; gates above each other, directions side by side.

    Colours run from one sign to the other, or up from white where no value is negative; white is 0. Steps that the
    layer's mask leaves out are grey.

    Parameters
    ----------
    data : (sample, time, unit), also with gate or direction; or any array of at least two dimensions
        A DataArray, or a plain array: rank 2 is (time, unit), 3 (sample, time, unit), 4 (sample, time, gate, unit).
    x, y
        Dimensions across and down. Default: time and unit; without time the last two. All others become panels, gates
        are stacked into y.
    samples
        ``"panels"``: one for each sample; ``"rms"``: one picture of the network, the RMS over samples, each divided by
        its own peak, so that a few hard samples do not speak for all.
    losses : (sample,)
        Losses of the samples: panels are named with them, the typical one (of the median loss) first.
    shared
        One colour scale for all panels, from the largest finite magnitude in the *whole* array, drawn or not; else
        each panel has its own scale and colour bar.
    limit
        Colours up to this value instead, and down to its negative. Values beyond it take the end colours.
    log
        Logarithmic colours over 4 decades, linear below: shows a gradient while it vanishes.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward

    Raises
    ------
    InputError
        If a dimension or keyword is unknown or ``ax`` has not one Axes per panel.
    """
    array = labelled(data, "heatmap", dims=dims, guess=GUESS)
    notes = notes_of(array)
    array = by_loss(array, losses, "heatmap")
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
        len(picked),
        name="heatmap",
        grid=Grid(_size(len(picked), rows), margin=(1.9, 1.1)),
        halves=[h.name for h in shown],
        ax=ax,
        figure=figure,
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
    panels.title(title or title_of(array), [thinned, merged, *notes])
    return panels.result()


@dataclass(frozen=True)
class _Kind:
    """What all panels of a heatmap have in common.

    Attributes
    ----------
    across, down
        The dimensions of a panel; ``stacked``: gates lie above each other along the second.
    log
        Logarithmic colours.
    positive
        Colours from white up: no value is negative.
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
        """(row, column) of a panel."""
        return matrix_of(panel, self.across, self.down, self.stacked)


def _draw_maps(ax: Any, data: xr.DataArray, slot: tuple[dict[str, int], str], top: float | None, kind: _Kind) -> Any:
    """One panel; ``top`` None scales it by itself."""
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
    ax.set_title(name, fontsize="small", pad=3)
    ax.tick_params(labelsize="small")
    if kind.stacked:
        separate(ax, "y", data.sizes[kind.down], names_of(data, GATE))
    return image


def _cells(count: int) -> tuple[int, int]:
    """Rows and columns that one of ``count`` panels can show."""
    return MOST_CELLS if count == 1 else (200, 300) if count <= 4 else (150, 220)


def _size(count: int, rows: int) -> tuple[float, float]:
    """Inches of one panel: large alone, small among many; tall for many rows."""
    tall = min(1.0, 0.55 + rows / 400)
    width, height = (6.0, 4.6) if count == 1 else (3.4, 2.4) if count <= 4 else (2.6, 1.9)
    return width, height * tall


#: Rows and columns that one panel can show.
CELLS = (180, 240)


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
    """Draw the same quantity of one model twice, and ``after - before``; a row per sample, all on one colour scale.

    Parameters
    ----------
    before, after
        Two layers of traces, or two arrays of the same dimensions and sizes: (sample, time, unit), also with gate or
        direction; or weights, whose last two dimensions are drawn.
    quantity
        Which variable is drawn when layers are given.
    samples
        ``"panels"``: a row per sample; ``"rms"``: one picture of each network, the RMS over samples, each divided by
        its own peak, so that a few hard samples do not speak for all.
    losses : (sample,)
        Losses of the samples after training: rows are named with them, the typical one (of the median loss) first.
    names
        Titles of the first two columns.
    limit
        Colour scale from -limit to limit instead of the largest magnitude of both and of the difference.
    log
        Symmetric logarithmic colours over 4 decades.
    max_rows, page
        More rows are thinned evenly; ``page`` shows the page-th run of them instead. The figure says so.

    Returns
    -------
    1-D array of Axes: before, after, difference, row by row, forward before backward

    Raises
    ------
    InputError
        If dimensions and sizes of the two differ, a keyword is unknown, or ``ax`` has not three Axes per row.
    """
    pair = [
        labelled(variable(one, quantity, "before_after"), "before_after", dims=dims, guess=GUESS)
        for one in (before, after)
    ]
    given = pair
    pair = [by_loss(one, losses, "before_after") for one in pair]
    if samples == "rms":
        pair = [rms_picture(one, "before_after") for one in pair]
    first, second = _same_kind(*pair)
    difference = first.copy(data=second.values - first.values)
    across, down = axes_of(first, "before_after")
    slots = slots_of(first, [str(d) for d in first.dims if d not in (across, down, GATE, DIRECTION)])
    picked, thinned = choose(len(slots), max_rows, "samples", page=page)
    columns = [halves(one, as_computed=as_computed) for one in (first, second, difference)]
    top = limit if limit is not None else largest_magnitude(*(one.values for one in (first, second, difference)))
    panels = open_panels(
        3 * len(picked),
        name="before_after",
        grid=Grid((2.9, 2.2), (1.7, 1.1), (len(picked), 3)),
        halves=[half.name for half in columns[0]],
        ax=ax,
        figure=figure,
    )
    look = {"cmap": DIVERGING, "norm": around_zero(top, log=log), **image}
    drawn: list[Any] = []
    for number, axes in enumerate(panels.halves):
        of_half = [column[number] for column in columns]
        drawn += _draw_rows(axes, of_half, [slots[i] for i in picked], names, (across, down), look)
    words = "RMS, share of the peak" if samples == "rms" else value_label(first)
    _finish(panels, columns[0], across, down, drawn if colorbar else [], words)
    rows = first.sizes[down] * (first.sizes[GATE] if _stacked(first, across, down) else 1)
    merged = merge_note(steps_for((rows, first.sizes[across]), CELLS), down, across)
    missing = [
        f"{name}: {note}" for name, one in zip(names, given, strict=True) if (note := nonfinite_note(one.values))
    ]
    panels.title(title or title_of(first), [thinned, merged, *missing])
    return panels.result()


def _same_kind(before: xr.DataArray, after: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Both with the dimensions in the same order."""
    if dict(before.sizes) != dict(after.sizes):
        raise InputError(
            message(
                "plot.before_after compares two results of the same dimensions and sizes.",
                got=f"{dict(before.sizes)} and {dict(after.sizes)}",
                hint="trace the same layers of the model with the same batch",
            )
        )
    return before, after.transpose(*before.dims)


def _stacked(array: xr.DataArray, across: str, down: str) -> bool:
    return GATE in array.dims and GATE not in (across, down)


def _draw_rows(
    axes: list[Any],
    columns: list[DirectionView],
    slots: list[tuple[dict[str, int], str]],
    names: tuple[str, str],
    dims: tuple[str, str],
    look: dict[str, Any],
) -> list[Any]:
    """Before, after and difference, a row per slot; the images."""
    drawn = []
    for row, (where, sample) in enumerate(slots):
        for column, words in enumerate((*names, f"{names[1]} - {names[0]}")):
            place = axes[3 * row + column]
            drawn.append(_draw_comparison(place, columns[column], where, *dims, look))
            between = " · " if len(words) + len(sample) < 32 else "\n"
            place.set_title(between.join(part for part in (words, sample) if part), fontsize="small", pad=3)
    return drawn


def _draw_comparison(
    ax: Any, half: DirectionView, where: dict[str, int], across: str, down: str, look: dict[str, Any]
) -> Any:
    """One panel."""
    chosen = half.data.isel(where)
    stacked = _stacked(chosen, across, down)
    matrix: Numbers = matrix_of(chosen, across, down, stacked)
    rows = np.arange(len(matrix)) if stacked else positions(chosen, down)
    drawn = draw_image(
        ax, Matrix(matrix, positions(chosen, across), rows, over_time=across == TIME), look=look, limits=CELLS
    )
    ax.tick_params(labelsize="small")
    if stacked:
        separate(ax, "y", chosen.sizes[down], names_of(chosen, GATE))
    return drawn


def _finish(panels: Panels, shown: list[DirectionView], across: str, down: str, drawn: list[Any], label: str) -> None:
    """Labels, ticks and the one colour bar."""
    array = shown[0].data
    words = f"gate, {axis_label(array, down)}" if _stacked(array, across, down) else axis_label(array, down)
    panels.label([half.time_label if across == TIME else axis_label(array, across) for half in shown], words)
    if panels.owners:
        panels.outer_ticks_only()
    if drawn:
        colour_bars(panels, drawn, label, shared=True)
