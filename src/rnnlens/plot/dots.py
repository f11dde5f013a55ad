"""``points``: one value per sample and unit, for quantities without time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection

from ..errors import InputError, message
from ..measures.samples import far_out
from ..vocabulary import DIRECTION, SAMPLE, TIME
from ._colour import line_colours
from ._data import (
    Numbers,
    axis_label,
    choose,
    halves,
    labelled,
    names_of,
    nonfinite_note,
    positions,
    refuse_places_of_others,
    require_dim,
    title_of,
    unit_dim,
    value_label,
)
from ._door import figure as figure_door
from ._keywords import checked
from ._lines import MOST_NAMED, limits_of, log_scale
from ._marks import mark_below, step_axis
from ._matrices import slots_of
from ._panels import Grid, Panels, mark_steps, open_panels, zero_line

#: So many units each have a tick of their own.
MOST_TICKS = 12

#: Keywords that give the points colours of their own.
_COLOURED = frozenset({"color", "facecolor", "array", "cmap", "norm", "clim"})


@figure_door()
def points(
    data: Any,
    *,
    dims: Sequence[str] | None = None,
    panel: str | None = None,
    shared: bool = True,
    log: bool = False,
    max_panels: int = 36,
    page: int | None = None,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **point: Any,
) -> Any:
    """Draw one point per sample and unit: for the last step, a final state, an initial-state gradient.

    A value that lies far out (Tukey 1977: three times the distance of the quartiles beyond them) is named.

    Parameters
    ----------
    data : (sample, unit), also with state, gate or direction
        A DataArray, or a plain array: rank 1 is (unit), 2 (sample, unit).
    dims
        Dimensions of a plain array where the guess does not fit.
    panel
        None: all samples in one panel, units along x. ``"sample"``: a panel per sample. Dimensions other than sample,
        unit and direction always become panels.
    shared
        Same value axis in all panels.
    log
        Logarithmic value axis where no value is negative; what is below it is marked at its border. Else a symmetric
        one, linear within 1e-4 of the largest magnitude.
    max_panels, page
        More panels are thinned evenly; ``page`` shows the page-th run of them instead. The figure says so.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per panel, or a Figure or SubFigure to draw into.
    **point
        Properties of matplotlib's PathCollection, and ``marker`` and ``s`` of ``Axes.scatter``. With ``cmap`` or
        ``norm`` the points are coloured by their value.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward

    Raises
    ------
    InputError
        If the data run over time, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    array = labelled(data, "points", dims=dims, guess={1: ("unit",), 2: (SAMPLE, "unit")})
    _refuse_time(array)
    unit = unit_dim(array)
    require_dim(array, unit or "unit", "points")
    refuse_places_of_others(array, panel, "points", DIRECTION, str(unit))
    keywords = checked(point, PathCollection, figure="points", extra=("marker", "s"))
    if panel is not None:
        require_dim(array, panel, "points")
    keep = [str(d) for d in array.dims if d not in (unit, DIRECTION, SAMPLE) or (d == panel and d != unit)]
    shown = halves(array)
    slots = slots_of(array, keep)
    picked, thinned = choose(len(slots), max_panels, " x ".join(f"{d}s" for d in keep) or "panels", page=page)
    panels = _open(array, [half.name for half in shown], len(picked), ax, figure)
    samples = array.sizes[SAMPLE] if SAMPLE in array.dims and SAMPLE not in keep else 1
    for half, axes in zip(shown, panels.halves, strict=True):
        for place, slot in zip(axes, [slots[i] for i in picked], strict=True):
            chosen = half.data.isel(slot[0])
            values = chosen.transpose(..., unit).values.reshape(samples, -1)
            _scatter(place, positions(array, unit), values, keywords)
            place.set_title(slot[1], fontsize="small", pad=3)
            mine = array.values if shared else values
            if log:
                log_scale(place, mine)
                mark_below(place, np.tile(positions(array, unit), len(values)), values.reshape(-1))
            else:
                place.set_ylim(*limits_of(mine, log=False))
            _name_outlier(place, positions(array, unit), values, names_of(array, SAMPLE) if samples > 1 else None)
    panels.label(axis_label(array, unit), value_label(array) + (", log scale" if log else ""))
    if shared and panels.owners:
        panels.outer_ticks_only()
    _legend(panels.axes[-1], array, samples, keywords)
    alike = f"{samples} samples" if samples > MOST_NAMED else None
    panels.title(title or title_of(array), [thinned, alike, nonfinite_note(array.values)])
    return panels.result()


def _open(array: xr.DataArray, halves: list[str | None], count: int, ax: Any, figure: Any) -> Panels:
    """Alone a panel is as wide as it has units."""
    alone = count == 1
    width = min(9.0, max(4.5, 0.06 * array.sizes[unit_dim(array)])) / len(halves) if alone else 2.6
    size = (width, 3.2 if alone else 1.7)
    return open_panels(count, name="points", grid=Grid(size), halves=halves, ax=ax, figure=figure)


def _refuse_time(array: xr.DataArray) -> None:
    if TIME in array.dims:
        raise InputError(
            message(
                "plot.points draws values without time.",
                got=f"dimensions ({', '.join(map(str, array.dims))})",
                expected="no time among them",
                hint="select a step, such as .isel(time=-1), or use plot.curves",
            )
        )


def _scatter(ax: Any, x: Numbers, values: Numbers, keywords: dict[str, Any]) -> None:
    """All samples of a panel as one collection, sample by sample; non-finite ones as crosses at the rim."""
    count, units = values.shape
    bad = ~np.isfinite(values)
    mark_steps(ax, x[bad.any(axis=0)])
    many = count > MOST_NAMED
    look: dict[str, Any] = {"s": float(np.clip(1500 / units, 4, 28)), "linewidth": 0, "zorder": 2, "gid": "points"}
    shown = np.where(bad, np.nan, values).reshape(-1)
    if {"cmap", "norm", "clim"} & set(keywords) and not {"color", "facecolor", "array"} & set(keywords):
        look["c"] = shown  # a colour map without values to map would be ignored
    elif not _COLOURED & set(keywords):
        look["color"] = ["#0072b2"] if many else np.repeat(np.array(line_colours(count), dtype=object), units).tolist()
        look["alpha"] = max(0.25, 6 / count) if many else 0.9
    zero_line(ax)
    offsets = np.broadcast_to(x, values.shape).reshape(-1)
    ax.scatter(offsets, shown, plotnonfinite=False, **{**look, **keywords})
    ax.set_xlim(x.min() - 0.6, x.max() + 0.6)
    if units <= MOST_TICKS:
        ax.set_xticks(x)
    else:
        step_axis(ax, "x", x, time=False)
    ax.tick_params(labelsize="small")


def _name_outlier(ax: Any, x: Numbers, values: Numbers, names: list[str] | None) -> None:
    """The sample and unit of the one value that lies far out, if there is one."""
    at = far_out(values.reshape(-1))
    if at is None:
        return
    sample, unit = divmod(at, values.shape[1])
    words = f"unit {x[unit]:g}" if names is None else f"sample {names[sample]}"
    left = unit > values.shape[1] / 2
    ax.annotate(
        words,
        (float(x[unit]), float(values[sample, unit])),
        xytext=(-6 if left else 6, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize="x-small",
        gid="outlier",
    )


def _legend(ax: Any, array: xr.DataArray, samples: int, keywords: dict[str, Any]) -> None:
    if not 1 < samples <= MOST_NAMED or _COLOURED & set(keywords):
        return
    names = names_of(array, SAMPLE)
    handles = [
        ax.plot([], [], "o", color=colour, markersize=4, label=name)[0]
        for name, colour in zip(names, line_colours(samples), strict=True)
    ]
    ax.legend(
        handles=handles,
        title=axis_label(array, SAMPLE),
        fontsize="small",
        title_fontsize="small",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
