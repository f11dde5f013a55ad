"""``gates_over_time``: every gate of a unit over time, in one panel."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..measures.samples import finite_median, spread_of
from ..results.schema import with_mask
from ..vocabulary import GATE, SAMPLE, TIME
from ._colour import line_colours
from ._data import (
    DirectionView,
    Numbers,
    choose,
    halves,
    labelled,
    largest_magnitude,
    names_of,
    place_words,
    positions,
    require_dim,
    require_time,
    unit_dim,
)
from ._door import figure as figure_door
from ._keywords import checked
from ._layers import dataset_of, variable
from ._marks import step_axis
from ._padding import hidden, notes_of, shade
from ._panels import Grid, mark_steps, open_panels


@figure_door()
def gates_over_time(
    layer: Any,
    *,
    max_panels: int = 6,
    page: int | None = None,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw the gates of a unit over time: a panel per unit, a line per gate, median and quartiles of the samples.

    Parameters
    ----------
    layer : (sample, time, gate, unit), also with direction
        A layer of a trace (steps that its mask leaves out are grey), or its ``gates``, or a plain array.
    max_panels, page
        More units are thinned evenly; ``page`` shows the page-th run of them instead. The figure says so.
    as_computed
        Turn the backward half of a bidirectional layer round, into the order in which it was computed.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per unit, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D.

    Returns
    -------
    1-D array of Axes, forward before backward

    Raises
    ------
    InputError
        If there are no gates or no time, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    keywords = checked(line, Line2D, figure="gates_over_time")
    dataset = dataset_of(layer)
    found = variable(layer, "gates", "gates_over_time")
    found = found if dataset is None else with_mask(found, dataset)
    array = labelled(found, "gates_over_time", guess={4: (SAMPLE, TIME, GATE, "unit")})
    require_dim(array, GATE, "gates_over_time")
    require_time(array, "gates_over_time")
    unit = unit_dim(array)
    require_dim(array, unit or "unit", "gates_over_time")
    picked, thinned = choose(array.sizes[unit], max_panels, "units", page=page)
    shown = halves(array, as_computed=as_computed)
    panels = open_panels(
        len(picked),
        name="gates_over_time",
        grid=Grid((2.9, 1.8)),
        halves=[half.name for half in shown],
        ax=ax,
        figure=figure,
    )
    top = largest_magnitude(array.values)
    low = -1.0 if "candidate" in names_of(array, GATE) else 0.0
    limits = (low, 1.0) if top <= 1 else (-top if low else 0.0, top)
    for half, places in zip(shown, panels.halves, strict=True):
        for place, index in zip(places, picked, strict=True):
            _draw(place, half, half.data.isel({unit: index}), keywords)
            room = 0.03 * (limits[1] - limits[0])
            place.set_ylim(limits[0] - room, limits[1] + room)
            place.set_title(place_words(array, unit or "unit", index), fontsize="small", pad=3)
    panels.label([half.time_label for half in shown], "gate value")
    if panels.owners:
        panels.outer_ticks_only()
    _legend(panels.owners[-1] if panels.owners else panels.axes[0], panels.axes[0], bool(panels.owners))
    many = array.sizes.get(SAMPLE, 1)
    note = f"median of {many} samples, band: quartiles" if many > 1 else None
    head = " · ".join(str(part) for part in (array.attrs.get("layer"), "gates over time") if part)
    panels.title(title or head, [note, thinned, *notes_of(array)])
    return panels.result()


def _draw(ax: Any, half: DirectionView, data: xr.DataArray, keywords: dict[str, Any]) -> None:
    """The gates of one unit."""
    steps = positions(half.data, TIME)
    names = names_of(half.data, GATE)
    padded = hidden(data)
    for number, colour in enumerate(line_colours(len(names))):
        values = _by_sample(data.isel({GATE: number}))
        real = np.ones(values.shape, bool) if padded is None else np.asarray(~_by_sample(padded))
        bad: Numbers = (~np.isfinite(values) & real).any(axis=0)
        values = np.where(real, values, np.nan)
        middle = np.where(bad, np.nan, finite_median(values))
        look = {"color": colour, "linewidth": 1.2, "linestyle": "--" if names[number] == "candidate" else "-"}
        look |= {"label": names[number], "gid": f"gate {names[number]}", "marker": "o" if len(steps) == 1 else None}
        ax.plot(steps, middle, **{**look, **keywords})
        if len(values) > 1:
            low, high = spread_of(values)
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0, gid=f"band {names[number]}")
        mark_steps(ax, steps[bad])
    if padded is not None:
        shade(ax, steps, np.asarray(_by_sample(padded).all(axis=0)))
    ax.set_xlim(steps.min() - 0.5, steps.max() + 0.5)
    step_axis(ax, "x", steps)
    ax.tick_params(labelsize="small")


def _by_sample(data: xr.DataArray) -> Numbers:
    """(sample, time)."""
    return np.asarray(data.transpose(SAMPLE, TIME).values if SAMPLE in data.dims else data.values[None])


def _legend(owner: Any, ax: Any, outside: bool) -> None:
    handles, names = ax.get_legend_handles_labels()
    where = {"loc": "outside right center"} if outside else {"loc": "best"}
    owner.legend(handles, names, fontsize="small", **where)
