"""``curves``: values over time, a panel per unit; ``points``: values without time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import LineCollection, PathCollection

from ..errors import InputError
from ..measures.profiles import far_out, finite_median
from ..vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ._axes import MOST_NAMED, limits_of, line_colours, log_scale, mark_below, mark_steps, step_axis, zero_line
from ._call import drawing
from ._data import (
    DirectionView,
    Numbers,
    axis_label,
    choose,
    halves,
    labelled,
    names_of,
    nonfinite_note,
    place_words,
    positions,
    refuse_places_of_others,
    require_dim,
    require_time,
    title_of,
    unit_dim,
    value_label,
)
from ._frame import Grid, Panels, open_panels
from ._images import slots_of
from ._samples import mark_resets, notes_of

#: Largest number of points of one line, by number of panels; longer lines are reduced to the lowest and highest value
#: of each run (about two points per pixel).
MOST_POINTS = {4: 1200, 16: 500, 10_000: 250}


@drawing(LineCollection)
def curves(
    data: Any,
    *,
    dims: Sequence[str] | None = None,
    panel: str | None = None,
    shared: bool = True,
    log: bool = False,
    max_panels: int = 36,
    page: int | None = None,
    max_lines: int = 64,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw values over time: a panel per unit, a line per sample; gates in rows, directions side by side.

    Parameters
    ----------
    data : (sample, time, unit), also with gate or direction, in any order
        A DataArray, or a plain array: rank 1 is (time), 2 (time, unit), 3 (sample, time, unit), 4 (sample, time, gate,
        unit).
    panel
        ``"unit"`` (default, whatever that dimension is called), or ``"sample"``: a panel per sample, a line per unit.
    shared
        Same value axis in all panels.
    log
        Logarithmic value axis if no value is negative; values below it are marked at its border. Otherwise a
        symmetric one, linear within 1e-4 of the largest magnitude.
    max_lines
        Largest number of lines per panel; more are thinned evenly.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward
    """
    array = labelled(data, "curves", dims=dims)
    require_time(array, "curves", hint="draw values without time with plot.points")
    refuse_places_of_others(array, panel, "curves", TIME, DIRECTION, GATE)
    by, along = _roles(array, panel)
    shown = halves(array, as_computed=as_computed)
    gates = names_of(array, GATE) if GATE in array.dims else [None]
    count = array.sizes[by] if by else 1
    picked, thinned = choose(count, max(1, max_panels // len(gates)), f"{by}s", page=page)
    lines, fewer = choose(array.sizes[along] if along else 1, max_lines, f"{along}s")
    shape = (len(gates), len(picked)) if len(gates) > 1 else None
    panels = open_panels("curves", len(gates) * len(picked), Grid(shape=shape), [h.name for h in shown], ax, figure)
    note = None
    for half, axes in zip(shown, panels.halves, strict=True):
        most = next(points for limit, points in MOST_POINTS.items() if len(gates) * len(picked) <= limit)
        slots = [(gate, index) for gate in range(len(gates)) for index in picked]
        for place, (gate, index) in zip(axes, slots, strict=True):
            values = _panel_values(half.data, by, along, index, gate, lines)
            note = _draw(place, half, values, line, most) or note
            mark_resets(place, half.data.coords.get("reset"), positions(half.data, TIME))
            place.set_title(_panel_title(array, by, index, gates[gate]), fontsize="small", pad=3)
    _finish(panels, array, shown, shared=shared, log=log)
    _name_lines(panels, array, along, lines, line)
    cloud = f"{len(lines)} {along}s, black: their median" if len(lines) > MOST_NAMED else None
    return panels.titled(title or title_of(array), [thinned, fewer, cloud, note, *notes_of(array)])


def _roles(array: xr.DataArray, panel: str | None) -> tuple[str | None, str | None]:
    """Return the dimension of the panels and the dimension of the lines."""
    unit = unit_dim(array)
    sample = SAMPLE if SAMPLE in array.dims else None
    wanted = unit if panel in (None, "unit") else panel
    if panel not in (None, "unit"):
        require_dim(array, str(panel), "curves")
    rest = [str(d) for d in array.dims if d not in (TIME, "direction", GATE, wanted)]
    along = sample if sample in rest else next(iter(rest), None)
    leftover = [d for d in rest if d != along]
    if leftover:
        raise InputError(
            "plot.curves has no place for that many dimensions.",
            got=f"dimensions ({', '.join(map(str, array.dims))})",
            expected="time, one for the panels, one for the lines, gate and direction",
            hint=f"select one, such as .isel({leftover[0]}=0)",
        )
    return wanted, along


def _panel_values(
    data: xr.DataArray, by: str | None, along: str | None, index: int, gate: int, lines: list[int]
) -> Numbers:
    """Return the values (line, time) of one panel."""
    chosen = data.isel({GATE: gate}) if GATE in data.dims else data
    chosen = chosen.isel({by: index}) if by else chosen
    if along is None:
        return np.asarray(chosen.values)[None, :]
    return np.asarray(chosen.isel({along: lines}).transpose(along, TIME).values)


def thin(values: Numbers, x: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Reduce runs of steps of (line, time) to their lowest and highest values, in their order."""
    run = 2 * -(-len(x) // most)
    if len(x) <= most:
        return values, x
    whole = len(x) // run * run
    blocks = values[:, :whole].reshape(len(values), -1, run)
    pair = np.sort(np.stack([np.argmin(blocks, axis=2), np.argmax(blocks, axis=2)], axis=2), axis=2)
    kept = np.take_along_axis(blocks, pair, axis=2).reshape(len(values), -1)
    middle = x[:whole].reshape(-1, run)[:, [0, run // 2]].reshape(-1)
    return np.concatenate([kept, values[:, whole:]], axis=1), np.concatenate([middle, x[whole:]])


def _draw(ax: Any, half: DirectionView, values: Numbers, keywords: dict[str, Any], most: int) -> str | None:
    """Draw the lines of one panel; return a note if steps were merged."""
    x, count = positions(half.data, TIME), len(values)
    bad = ~np.isfinite(values)
    clean = np.where(bad, np.nan, values)
    mark_steps(ax, x[bad.any(axis=0)])
    drawn, at = thin(clean, x, most)
    many = count > MOST_NAMED
    look: dict[str, Any] = {"linewidth": 0.6 if many else 1.1, "alpha": max(0.15, 4 / count) if many else 1.0}
    look["color"] = "#0072b2" if many else line_colours(count)
    segments = np.stack([np.broadcast_to(at, drawn.shape), drawn], axis=2)
    zero_line(ax)
    drawn_lines = LineCollection(list(segments), **{"gid": "lines", **look, **keywords})
    drawn_lines.set_in_layout(False)  # lies within the axes: measuring every path is the slowest part of the layout
    ax.add_collection(drawn_lines, autolim=False)
    if many:
        ax.plot(x, finite_median(clean), color="black", linewidth=1.0, gid="median")
    if len(x) == 1:
        dots = np.broadcast_to(x, clean.shape)
        colours = {"color": look["color"], "alpha": look["alpha"]} if not isinstance(look["color"], list) else {}
        for row, colour in zip(clean, look["color"] if not colours else [None] * count, strict=True):
            ax.plot(dots[0], row, "o", markersize=4, gid="point", **(colours or {"color": colour}))
    margin = 0.5 if len(x) == 1 else 0.0
    ax.set_xlim(x.min() - margin, x.max() + margin)
    if len(at) != len(x):
        return f"lowest and highest of every {2 * -(-len(x) // most)} steps"
    return None


def _panel_title(array: xr.DataArray, by: str | None, index: int, gate: str | None) -> str:
    parts = [gate, place_words(array, by, index) if by else None]
    return " · ".join(part for part in parts if part)


def _finish(panels: Panels, array: xr.DataArray, shown: list[DirectionView], *, shared: bool, log: bool) -> None:
    """Set value axes, labels and ticks."""
    everything = _drawn(panels.axes)
    for ax in panels.axes:
        mine = everything if shared else _drawn([ax])
        if log:
            log_scale(ax, mine)
            _mark_deep(ax)
        else:
            ax.set_ylim(*limits_of(mine, log=False))
        step_axis(ax, "x", positions(shown[0].data, TIME))
        ax.tick_params(labelsize="small")
    panels.label([half.time_label for half in shown], value_label(array) + (", log scale" if log else ""))
    if shared and panels.owners:
        panels.outer_ticks_only()


def _mark_deep(ax: Any) -> None:
    """Mark the values below a logarithmic axis, line by line."""
    if ax.get_yscale() != "log":
        return
    for collection in [c for c in ax.collections if c.get_gid() == "lines"]:
        colours = collection.get_colors()
        for i, path in enumerate(collection.get_paths()):
            x, values = np.asarray(path.vertices).T
            mark_below(ax, x, values, colours[i % len(colours)] if len(colours) else "0.3")


def _drawn(axes: list[Any]) -> Numbers:
    """Return all line values in these panels."""
    found = [
        np.concatenate([np.asarray(path.vertices[:, 1]) for path in collection.get_paths()])
        for ax in axes
        for collection in ax.collections
        if collection.get_gid() == "lines"
    ]
    return np.concatenate(found)


def _name_lines(
    panels: Panels, array: xr.DataArray, along: str | None, lines: list[int], keywords: dict[str, Any]
) -> None:
    """Draw a legend in the first panel if few lines have their own colours."""
    if along is None or not 1 < len(lines) <= MOST_NAMED or {"color", "colors", "array"} & set(keywords):
        return
    names = names_of(array, along)
    handles = [
        panels.axes[0].plot([], [], color=colour, label=names[i])[0]
        for i, colour in zip(lines, line_colours(len(lines)), strict=True)
    ]
    where = {"loc": "outside right upper"} if panels.owners and hasattr(panels.figure, "legend") else {"loc": "best"}
    target = panels.owners[-1] if panels.owners else panels.axes[0]
    target.legend(handles=handles, title=axis_label(array, along), fontsize="small", title_fontsize="small", **where)


#: Largest number of units that each have their own tick.
MOST_TICKS = 12

#: Keywords that set the colours of points.
_COLOURED = frozenset({"color", "facecolor", "array", "cmap", "norm", "clim"})


@drawing(PathCollection, extra=("marker", "s"))
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

    Up to 8 samples have a colour each, named in the legend; more are drawn in one colour.

    A single outlier is named: a value farther than three interquartile ranges from the quartiles (Tukey 1977).

    Parameters
    ----------
    data : (sample, unit), also with state, gate or direction
        A DataArray, or a plain array: rank 1 is (unit), 2 (sample, unit).
    panel
        None: all samples in one panel, units along x. ``"sample"``: a panel per sample. Dimensions other than sample,
        unit and direction always become panels.
    shared
        Same value axis in all panels.
    log
        Logarithmic value axis if no value is negative; values below it are marked at its border. Otherwise a
        symmetric one, linear within 1e-4 of the largest magnitude.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward
    """
    array = labelled(data, "points", dims=dims, guess={1: ("unit",), 2: (SAMPLE, "unit")})
    _refuse_time(array)
    unit = unit_dim(array)
    require_dim(array, unit or "unit", "points")
    refuse_places_of_others(array, panel, "points", DIRECTION, str(unit))
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
            _scatter(place, positions(array, unit), values, point)
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
    _legend(panels.axes[-1], array, samples, point)
    alike = f"{samples} samples in one colour" if samples > MOST_NAMED else None
    return panels.titled(title or title_of(array), [thinned, alike, nonfinite_note(array.values)])


def _open(array: xr.DataArray, halves: list[str | None], count: int, ax: Any, figure: Any) -> Panels:
    """Open the panels; a single panel is wider if it has more units."""
    alone = count == 1
    width = min(9.0, max(4.5, 0.06 * array.sizes[unit_dim(array)])) / len(halves) if alone else 2.6
    size = (width, 3.2 if alone else 1.7)
    return open_panels("points", count, Grid(size), halves, ax, figure)


def _refuse_time(array: xr.DataArray) -> None:
    if TIME in array.dims:
        raise InputError(
            "plot.points draws values without time.",
            got=f"dimensions ({', '.join(map(str, array.dims))})",
            expected="no time among them",
            hint="select a step, such as .isel(time=-1), or use plot.curves",
        )


def _scatter(ax: Any, x: Numbers, values: Numbers, keywords: dict[str, Any]) -> None:
    """Draw all samples of a panel as one collection; non-finite values as crosses at the lower border."""
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
    """Name the sample and unit of a single outlier, if there is one."""
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
