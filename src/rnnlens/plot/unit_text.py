"""``unit_over_text``: what a unit does while a text is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection

from ..arguments import anything, listed, whole
from ..errors import InputError, message, shown
from ..vocabulary import DIRECTION, SAMPLE, TIME
from ._colour import DIVERGING, around_zero
from ._data import (
    axis_label,
    choose,
    labelled,
    largest_magnitude,
    names_of,
    nonfinite_note,
    require_dim,
    require_time,
    title_of,
    unit_dim,
)
from ._door import figure as figure_door
from ._images import colour_bar
from ._keywords import checked
from ._panels import Grid, open_panels
from ._text import LETTER, height_of, shade_text, tokens_of, width_of


@figure_door(tokens=anything, units=anything, sample=whole(least=0))
def unit_over_text(
    hidden: Any,
    tokens: Any,
    *,
    units: Any = None,
    sample: int = 0,
    max_panels: int = 4,
    shared: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **patch: Any,
) -> Any:
    """Draw a text of which each token is shaded by the state of a unit after reading it: a panel per unit.

    White is 0, blue negative, orange positive.

    Parameters
    ----------
    hidden : (sample, time, unit), also with direction
        ``trace["lstm"].hidden``, ``.cell``, or a plain array; (time, unit) too.
    tokens
        One for each step; a string is its letters.
    units : int or sequence of int, optional
        Which units; the first ``max_panels``, evenly spaced, by default.
    sample
        Of which sample the tokens are.
    max_panels
        More units are thinned evenly; the figure says so.
    shared
        One colour scale for all units.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per unit, or a Figure or SubFigure to draw into.
    **patch
        Properties of matplotlib's PatchCollection, the shades.

    Returns
    -------
    1-D array of Axes, forward before backward

    Raises
    ------
    InputError
        If the tokens are not as many as the steps, there is no such unit or sample, or a keyword is unknown.

    References
    ----------
    Karpathy, Johnson, Li 2015, arXiv:1506.02078, fig. 2.
    """
    keywords = checked(patch, PatchCollection, figure="unit_over_text")
    array = labelled(hidden, "unit_over_text", guess={2: (TIME, "unit"), 3: (SAMPLE, TIME, "unit")})
    require_time(array, "unit_over_text")
    unit = unit_dim(array)
    require_dim(array, unit or "unit", "unit_over_text")
    if SAMPLE in array.dims:
        if sample >= array.sizes[SAMPLE]:
            got, expected = f"sample={sample}", f"0 to {array.sizes[SAMPLE] - 1}"
            raise InputError(message("There is no such sample.", got=got, expected=expected))
        array = array.isel({SAMPLE: sample})
    names = tokens_of(tokens, array.sizes[TIME], "unit_over_text")
    picked, thinned = _picked(units, array.sizes[unit], max_panels)
    ways: Sequence[str | None] = names_of(array, DIRECTION) if DIRECTION in array.dims else [None]
    rows = [(way, index) for way in range(len(ways)) for index in picked]
    grid = Grid((LETTER * width_of(names) + 0.4, height_of(names) + 0.3), (1.2, 0.7), (len(rows), 1))
    panels = open_panels(len(rows), name="unit_over_text", grid=grid, ax=ax, figure=figure)
    top, notes = largest_magnitude(array.values), [thinned]
    for place, (way, index) in zip(panels.axes, rows, strict=True):
        one = array.isel({DIRECTION: way}) if DIRECTION in array.dims else array
        values = np.asarray(one.isel({unit: index}).values)
        look = {"cmap": DIVERGING, "norm": around_zero(top if shared else largest_magnitude(values)), **keywords}
        drawn, note = shade_text(place, names, values, look)
        notes += [note] if note not in notes else []
        words = f"{axis_label(array, unit)} {names_of(array, unit)[index]}"
        place.set_title(" · ".join(part for part in (ways[way], words) if part), fontsize="small", loc="left", pad=2)
        colour_bar([place], drawn)
    panels.title(title or title_of(array) or "a unit over text", [*notes, nonfinite_note(array.values)])
    return panels.result()


def _picked(units: Any, count: int, most: int) -> tuple[list[int], str | None]:
    """Which units are drawn."""
    if units is None:
        return choose(count, most, "units")
    given = listed(units, most=count) if not isinstance(units, int | np.integer) else [units]
    if not given or not all(isinstance(index, int | np.integer) and 0 <= index < count for index in given):
        raise InputError(message("There is no such unit.", got=f"units={shown(units)}", expected=f"0 to {count - 1}"))
    return [int(index) for index in given], None
