"""``before_after``: two results of one model on one scale, and their difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..errors import InputError, message
from ..vocabulary import DIRECTION, GATE, TIME
from ._colour import DIVERGING, around_zero
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
)
from ._door import figure as figure_door
from ._images import IMSHOW, Matrix, colour_bars, draw_image, merge_note, separate, steps_for
from ._keywords import checked
from ._layers import variable
from ._matrices import GUESS, axes_of, matrix_of, slots_of
from ._panels import Grid, Panels, open_panels
from ._samples import by_loss, rms_picture

#: Rows and columns that one panel can show.
CELLS = (180, 240)


@figure_door(samples=one_of("panels", "rms"))
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
    dims
        Dimensions of plain arrays where the guess (as for :func:`heatmap`) does not fit.
    names
        Titles of the first two columns.
    limit
        Colour scale from -limit to limit instead of the largest magnitude of both and of the difference.
    log
        Symmetric logarithmic colours over 4 decades.
    max_rows, page
        More rows are thinned evenly; ``page`` shows the page-th run of them instead. The figure says so.
    as_computed
        Turn the backward half of a bidirectional layer round, into the order in which it was computed.
    colorbar
        Draw the colour bar.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, three per row, or a Figure or SubFigure to draw into.
    **image
        Properties of matplotlib's AxesImage and keywords of ``Axes.imshow``.

    Returns
    -------
    1-D array of Axes: before, after, difference, row by row, forward before backward

    Raises
    ------
    InputError
        If dimensions and sizes of the two differ, a keyword is unknown, or ``ax`` has not three Axes per row.
    """
    keywords = checked(image, AxesImage, figure="before_after", extra=IMSHOW)
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
    look = {"cmap": DIVERGING, "norm": around_zero(top, log=log), **keywords}
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
            drawn.append(_draw(place, columns[column], where, *dims, look))
            between = " · " if len(words) + len(sample) < 32 else "\n"
            place.set_title(between.join(part for part in (words, sample) if part), fontsize="small", pad=3)
    return drawn


def _draw(ax: Any, half: DirectionView, where: dict[str, int], across: str, down: str, look: dict[str, Any]) -> Any:
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
