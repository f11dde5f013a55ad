"""``time_jacobian``: how much every input step moves every output step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..vocabulary import DIRECTION, IN_TIME, OUT_TIME, SAMPLE
from ._colour import DIVERGING, POSITIVE, around_zero, from_zero
from ._data import (
    Numbers,
    axis_label,
    choose,
    largest_magnitude,
    names_of,
    positions,
    value_label,
)
from ._door import figure as figure_door
from ._images import IMSHOW, Matrix, colour_bars, draw_image, merge_note, steps_for
from ._jacobian import block_norms
from ._keywords import checked
from ._padding import hidden, mean_of_real, notes_of, shade, without_padding
from ._panels import Grid, log_values, mark_steps, open_panels, whole_numbers, zero_line

#: Rows and columns that one panel can show.
CELLS = (360, 400)


@figure_door()
def time_jacobian(
    jacobian: Any,
    *,
    dims: Sequence[str] | None = None,
    samples: str = "mean",
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

    A full Jacobian is drawn as the Frobenius norm over output units and input features of each pair of steps; a reduced
    one as it is. White is 0: an input after the output has no effect on it. The diagonal is lag 0.
    A single output step is drawn as a line over input steps.

    Parameters
    ----------
    jacobian : (sample, out_time, out_unit, in_time, in_feature), or reduced to (sample, out_time, in_time)
        What :func:`rnnlens.jacobian` returned, or a plain array: rank 2 is (out_time, in_time), 3 and 5 as above.
    dims
        Dimensions of a plain array where the guess does not fit.
    samples
        ``"mean"`` over samples in one panel, or ``"panels"``: one for each.
    log
        Logarithmic colours over 4 decades, linear below.
    shared
        One colour scale for all panels.
    limit
        Colours up to this value instead of the largest magnitude.
    max_panels
        More panels are thinned evenly; the figure says so.
    colorbar
        Draw the colour bar.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per panel, or a Figure or SubFigure to draw into.
    **image
        Properties of matplotlib's AxesImage and keywords of ``Axes.imshow``.

    Returns
    -------
    1-D array of Axes

    Raises
    ------
    InputError
        If there is no input time, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    keywords = checked(image, AxesImage, figure="time_jacobian", extra=IMSHOW)
    array, taken = block_norms(jacobian, "time_jacobian", dims)
    notes = notes_of(array)
    panels_of, matrices, empty, thinned = _matrices(array, samples, max_panels)
    panels = open_panels(
        len(matrices),
        name="time_jacobian",
        grid=Grid((4.6, 4.1) if len(matrices) == 1 else (2.5, 2.3), margin=(1.6, 1.0)),
        ax=ax,
        figure=figure,
    )
    top = limit if limit is not None else largest_magnitude(*matrices)
    drawn = []
    for place, matrix, padded, words in zip(panels.axes, matrices, empty, panels_of, strict=True):
        own = top if shared or limit is not None else largest_magnitude(matrix)
        drawn.append(_draw(place, matrix, padded, array, own, keywords, log=log))
        place.set_title(words, fontsize="small", pad=3)
    colour_bars(panels, drawn, value_label(array) + (" (Frobenius)" if taken else ""), shared=shared, wanted=colorbar)
    panels.label(
        axis_label(array, IN_TIME), axis_label(array, OUT_TIME) if len(matrices[0]) > 1 else value_label(array)
    )
    if panels.owners and len(matrices) > 1:
        panels.outer_ticks_only()
    merged = merge_note(steps_for(matrices[0].shape, CELLS), "output step", "input step")
    head = " · ".join(str(part) for part in (array.attrs.get("layer"), "time Jacobian") if part)
    panels.title(title or head, [thinned, merged, *notes])
    return panels.result()


def _matrices(
    array: xr.DataArray, samples: str, most: int
) -> tuple[list[str], list[Numbers], list[Numbers], str | None]:
    """Titles, (out_time, in_time) matrices, where these are padding, and the note that some were left out."""
    directions = names_of(array, DIRECTION) if DIRECTION in array.dims else [""]
    parts = [array.isel({DIRECTION: i}) if DIRECTION in array.dims else array for i in range(len(directions))]
    note: str | None = None
    titles, found, empty = [], [], []
    for name, part in zip(directions, parts, strict=True):
        if SAMPLE not in part.dims or (samples == "mean" and part.sizes[SAMPLE] == 1):
            part, picked = part.squeeze(SAMPLE) if SAMPLE in part.dims else part, [-1]
        elif samples == "mean":
            padded = hidden(part)
            part = mean_of_real(part)
            if padded is not None:
                part = part.assign_coords(mask=~padded.all(SAMPLE))
            note, picked = f"mean over {array.sizes[SAMPLE]} samples", [-1]
        else:
            picked, note = choose(part.sizes[SAMPLE], most, "samples")
        for i in picked:
            one = part if i < 0 else part.isel({SAMPLE: i})
            titles.append(" · ".join(p for p in (name, f"sample {names_of(part, SAMPLE)[i]}" if i >= 0 else "") if p))
            found.append(np.asarray(without_padding(one).transpose(OUT_TIME, IN_TIME).values))
            nowhere = xr.zeros_like(one, dtype=bool)
            padded = hidden(one)
            padded = nowhere if padded is None else nowhere | padded
            empty.append(np.asarray(padded.transpose(OUT_TIME, IN_TIME).values))
    return titles, found, empty, note


def _draw(
    ax: Any,
    matrix: Numbers,
    padded: Numbers,
    array: xr.DataArray,
    top: float,
    keywords: dict[str, Any],
    *,
    log: bool,
) -> Any:
    """One panel; signed values on the diverging map, others from white up, padding grey."""
    with np.errstate(invalid="ignore"):
        signed = bool((matrix < 0).any())
    look: dict[str, Any] = {"cmap": DIVERGING if signed else POSITIVE}
    look["norm"] = around_zero(top, log=log) if signed else from_zero(matrix, top, log=log)
    look |= keywords
    ax.tick_params(labelsize="small")
    if len(matrix) == 1:
        return _draw_row(ax, matrix[0], padded[0], positions(array, IN_TIME), log=log)
    return draw_image(
        ax,
        Matrix(matrix, positions(array, IN_TIME), positions(array, OUT_TIME), padded),
        look=look,
        upward=True,
        limits=CELLS,
    )


def _draw_row(ax: Any, row: Numbers, padded: Numbers, steps: Numbers, *, log: bool) -> None:
    """The only output step there is, as a line; on a logarithmic axis where nothing is negative."""
    bad = ~np.isfinite(row)
    mark_steps(ax, steps[bad & ~padded])
    shade(ax, steps, padded)
    positive = log and not (row[~bad] < 0).any()
    shown = np.where(bad | ((row == 0) & positive), np.nan, row)
    ax.plot(steps, shown, color="#0072b2", linewidth=1.3, marker="." if len(steps) < 80 else None, gid="row")
    if positive:
        log_values(ax)
    else:
        zero_line(ax)
    whole_numbers(ax, "x")
