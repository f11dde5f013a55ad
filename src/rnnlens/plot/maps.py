"""``heatmap``: units by time as colours, white is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import one_of
from ..vocabulary import DIRECTION, GATE, TIME
from ._colour import DIVERGING, POSITIVE, around_zero, from_zero
from ._data import (
    Numbers,
    axis_label,
    choose,
    halves,
    labelled,
    largest_magnitude,
    names_of,
    positions,
    title_of,
    value_label,
)
from ._door import figure as figure_door
from ._images import IMSHOW, MOST_CELLS, Matrix, colour_bars, draw_image, merge_note, separate, steps_for
from ._keywords import checked
from ._lines import is_positive
from ._matrices import GUESS, axes_of, matrix_of, slots_of
from ._padding import hidden, notes_of, without_padding
from ._panels import Grid, open_panels
from ._samples import by_loss, rms_picture


@figure_door(samples=one_of("panels", "rms"))
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
    dims
        Dimensions of a plain array where the guess does not fit.
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
    max_panels, page
        More panels are thinned evenly; ``page`` shows the page-th run of them instead. The figure says so.
    as_computed
        Turn the backward half of a bidirectional layer round, into the order in which it was computed.
    colorbar
        Draw the colour bar.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per panel, or a Figure or SubFigure to draw into.
    **image
        Properties of matplotlib's AxesImage and keywords of ``Axes.imshow`` (``cmap``, ``norm``, ``interpolation``).

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward

    Raises
    ------
    InputError
        If a dimension or keyword is unknown or ``ax`` has not one Axes per panel.
    """
    array = labelled(data, "heatmap", dims=dims, guess=GUESS)
    keywords = checked(image, AxesImage, figure="heatmap", extra=IMSHOW)
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
    kind = _Kind(across, down, stacked, log, is_positive(array.values), _cells(len(picked)), keywords)
    drawn = []
    for half, axes in zip(shown, panels.halves, strict=True):
        for place, slot in zip(axes, [slots[i] for i in picked], strict=True):
            scale = top if shared or limit is not None else None
            drawn.append(_draw(place, half.data, slot, scale, kind))
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


def _draw(ax: Any, data: xr.DataArray, slot: tuple[dict[str, int], str], top: float | None, kind: _Kind) -> Any:
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
