"""``curves``: values over time, a panel per unit; ``points``: values without time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import LineCollection, PathCollection

from ..errors import InputError
from ..measures.profiles import far_out, finite_median
from ..vocabulary import DIRECTION, GATE, SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers

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
    log
        Logarithmic value axis if no value is negative; values below it are marked at its border. Otherwise a
        symmetric one, linear within 1e-4 of the largest magnitude.
    max_lines
        Largest number of lines per panel; more are thinned evenly.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward
    """
    array = _data.labelled(data, "curves", dims=dims)
    _data.require_time(array, "curves", hint="draw values without time with plot.points")
    _data.refuse_places_of_others(array, panel, "curves", TIME, DIRECTION, GATE)
    by, along = _roles(array, panel)
    shown = _data.halves(array, as_computed=as_computed)
    gates = _data.names_of(array, GATE) if GATE in array.dims else [None]
    count = array.sizes[by] if by else 1
    picked, thinned = _data.choose(count, max(1, max_panels // len(gates)), f"{by}s", page=page)
    lines, fewer = _data.choose(array.sizes[along] if along else 1, max_lines, f"{along}s")
    slots = [(gate, index) for gate in range(len(gates)) for index in picked]
    shape = (len(gates), len(picked)) if len(gates) > 1 else None
    ways = [half.name for half in shown]
    panels = _frame.open_panels("curves", len(slots), ax, figure, ways=ways, shape=shape)
    most = next(points for limit, points in MOST_POINTS.items() if len(slots) <= limit)
    note = None
    for half, axes in zip(shown, panels.halves, strict=True):
        for place, (gate, index) in zip(axes, slots, strict=True):
            values = half.data.isel({dim: i for dim, i in ((GATE, gate), (by, index)) if dim in half.data.dims})
            values = values.isel({along: lines}).transpose(along, TIME) if along else values.expand_dims("line")
            note = _draw(place, half, np.asarray(values.values), line, most) or note
            _samples.mark_resets(place, half.data.coords.get("reset"), _data.positions(half.data, TIME))
            words = (gates[gate], _data.place_words(array, by, index) if by else None)
            place.set_title(" · ".join(part for part in words if part), fontsize="small", pad=3)
    _finish(panels, array, shown, shared=shared, log=log)
    if along and 1 < len(lines) <= _axes.MOST_NAMED and not {"color", "colors", "array"} & set(line):
        names = _data.names_of(array, along)
        panels.legend(_handles(panels.axes[0], [names[i] for i in lines]), title=_data.axis_label(array, along))
    cloud = f"{len(lines)} {along}s, black: their median" if len(lines) > _axes.MOST_NAMED else None
    return panels.titled(title or _data.title_of(array), [thinned, fewer, cloud, note, *_samples.notes_of(array)])


def _roles(array: xr.DataArray, panel: str | None) -> tuple[str | None, str | None]:
    """Return the dimension of the panels and the dimension of the lines."""
    unit = _data.unit_dim(array)
    sample = SAMPLE if SAMPLE in array.dims else None
    wanted = unit if panel in (None, "unit") else panel
    if panel not in (None, "unit"):
        _data.require_dim(array, str(panel), "curves")
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


def _draw(ax: Any, half: _data.DirectionView, values: Numbers, keywords: dict[str, Any], most: int) -> str | None:
    """Draw the lines of one panel; return a note if steps were merged."""
    x, count = _data.positions(half.data, TIME), len(values)
    bad = ~np.isfinite(values)
    clean = np.where(bad, np.nan, values)
    _axes.mark_steps(ax, x[bad.any(axis=0)])
    drawn, at = thin(clean, x, most)
    many = count > _axes.MOST_NAMED
    look: dict[str, Any] = {"linewidth": 0.6 if many else 1.1, "alpha": max(0.15, 4 / count) if many else 1.0}
    look["color"] = "#0072b2" if many else _axes.line_colours(count)
    segments = np.stack([np.broadcast_to(at, drawn.shape), drawn], axis=2)
    _axes.zero_line(ax)
    drawn_lines = LineCollection(list(segments), **{"gid": "lines", **look, **keywords})
    drawn_lines.set_in_layout(False)  # lies within the axes: measuring every path is the slowest part of the layout
    ax.add_collection(drawn_lines, autolim=False)
    if many:
        ax.plot(x, finite_median(clean), color="black", linewidth=1.0, gid="median")
    if len(x) == 1:
        for row, colour in zip(clean, [look["color"]] * count if many else look["color"], strict=True):
            ax.plot(x, row, "o", markersize=4, gid="point", color=colour, alpha=look["alpha"])
    _axes.step_axis(ax, "x", x, room=0.5 if len(x) == 1 else 0.0)
    return None if len(at) == len(x) else f"lowest and highest of every {2 * -(-len(x) // most)} steps"


def _finish(
    panels: _frame.Panels, array: xr.DataArray, shown: list[_data.DirectionView], *, shared: bool, log: bool
) -> None:
    """Set limits, labels and ticks of all panels of a figure of curves."""
    values = [np.concatenate([line for _, line, _ in _lines(ax)]) for ax in panels.axes]
    for ax, own in zip(panels.axes, values, strict=True):
        _axes.value_axis(ax, np.concatenate(values) if shared else own, log=log)
        for x, line, colour in _lines(ax) if ax.get_yscale() == "log" else ():
            _axes.mark_below(ax, x, line, colour)
    panels.label([half.time_label for half in shown], _data.value_label(array) + (", log scale" if log else ""))
    if shared:
        panels.outer_ticks_only()


def _lines(ax: Any) -> Iterator[tuple[Numbers, Numbers, Any]]:
    """Yield steps, values and colour of each line in a panel."""
    for collection in (one for one in ax.collections if one.get_gid() == "lines"):
        colours = collection.get_colors()
        for i, path in enumerate(collection.get_paths()):
            x, values = np.asarray(path.vertices).T
            yield x, values, colours[i % len(colours)] if len(colours) else "0.3"


def _handles(ax: Any, names: Sequence[str], marker: str = "-") -> list[Any]:
    """Return legend entries for lines or points in the colours of the colour cycle."""
    lines = zip(names, _axes.line_colours(len(names)), strict=True)
    return [ax.plot([], [], marker, color=colour, markersize=4, label=name)[0] for name, colour in lines]


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
    log
        Logarithmic value axis if no value is negative; values below it are marked at its border. Otherwise a
        symmetric one, linear within 1e-4 of the largest magnitude.

    Returns
    -------
    1-D array of Axes, in panel order, forward before backward
    """
    array = _data.labelled(data, "points", dims=dims, guess={1: ("unit",), 2: (SAMPLE, "unit")})
    if TIME in array.dims:
        raise InputError(
            "plot.points draws values without time.",
            got=f"dimensions ({', '.join(map(str, array.dims))})",
            expected="no time among them",
            hint="select a step, such as .isel(time=-1), or use plot.curves",
        )
    unit = _data.unit_dim(array)
    _data.require_dim(array, unit or "unit", "points")
    _data.refuse_places_of_others(array, panel, "points", DIRECTION, str(unit))
    if panel is not None:
        _data.require_dim(array, panel, "points")
    keep = [str(d) for d in array.dims if d not in (unit, DIRECTION, SAMPLE) or d == panel]
    shown = _data.halves(array)
    slots = _images.slots_of(array, keep)
    picked, thinned = _data.choose(len(slots), max_panels, " x ".join(f"{d}s" for d in keep) or "panels", page=page)
    ways = [half.name for half in shown]
    size = (2.6, 1.7)  # a single panel is wider if it has more units
    if len(picked) == 1:
        size = (min(9.0, max(4.5, 0.06 * array.sizes[unit])) / len(ways), 3.2)
    panels = _frame.open_panels("points", len(picked), ax, figure, ways=ways, size=size)
    samples = array.sizes[SAMPLE] if SAMPLE in array.dims and SAMPLE not in keep else 1
    x = _data.positions(array, unit)
    for half, axes in zip(shown, panels.halves, strict=True):
        for place, slot in zip(axes, [slots[i] for i in picked], strict=True):
            chosen = half.data.isel(slot[0])
            values = chosen.transpose(..., unit).values.reshape(samples, -1)
            _scatter(place, x, values, point)
            place.set_title(slot[1], fontsize="small", pad=3)
            _axes.value_axis(place, array.values if shared else values, log=log)
            if log:
                _axes.mark_below(place, np.tile(x, len(values)), values.reshape(-1))
            _name_outlier(place, x, values, _data.names_of(array, SAMPLE) if samples > 1 else None)
    panels.label(_data.axis_label(array, unit), _data.value_label(array) + (", log scale" if log else ""))
    if shared:
        panels.outer_ticks_only()
    if 1 < samples <= _axes.MOST_NAMED and not _COLOURED & set(point):
        look = {"fontsize": "small", "title_fontsize": "small", "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        handles = _handles(panels.axes[-1], _data.names_of(array, SAMPLE), "o")
        panels.axes[-1].legend(handles=handles, title=_data.axis_label(array, SAMPLE), **look)
    alike = f"{samples} samples in one colour" if samples > _axes.MOST_NAMED else None
    return panels.titled(title or _data.title_of(array), [thinned, alike, _data.nonfinite_note(array.values)])


def _scatter(ax: Any, x: Numbers, values: Numbers, keywords: dict[str, Any]) -> None:
    """Draw all samples of a panel as one collection; non-finite values as crosses at the lower border."""
    count, units = values.shape
    bad = ~np.isfinite(values)
    _axes.mark_steps(ax, x[bad.any(axis=0)])
    many = count > _axes.MOST_NAMED
    look: dict[str, Any] = {"s": float(np.clip(1500 / units, 4, 28)), "linewidth": 0, "zorder": 2, "gid": "points"}
    shown = np.where(bad, np.nan, values).reshape(-1)
    if {"cmap", "norm", "clim"} & set(keywords) and not {"color", "facecolor", "array"} & set(keywords):
        look["c"] = shown  # a colour map without values to map would be ignored
    elif not _COLOURED & set(keywords):
        each = np.repeat(np.array(_axes.line_colours(count), dtype=object), units).tolist()
        look["color"] = ["#0072b2"] if many else each
        look["alpha"] = max(0.25, 6 / count) if many else 0.9
    _axes.zero_line(ax)
    offsets = np.broadcast_to(x, values.shape).reshape(-1)
    ax.scatter(offsets, shown, plotnonfinite=False, **{**look, **keywords})
    ax.set_xlim(x.min() - 0.6, x.max() + 0.6)
    if units <= MOST_TICKS:
        ax.set_xticks(x)
    else:
        _axes.step_axis(ax, "x", x, time=False)


def _name_outlier(ax: Any, x: Numbers, values: Numbers, names: list[str] | None) -> None:
    """Name the sample and unit of a single outlier, if there is one."""
    at = far_out(values.reshape(-1))
    if at is None:
        return
    sample, unit = divmod(at, values.shape[1])
    words = f"unit {x[unit]:g}" if names is None else f"sample {names[sample]}"
    offset, side = ((-6, 0), "right") if unit > values.shape[1] / 2 else ((6, 0), "left")
    _axes.write(ax, words, (float(x[unit]), float(values[sample, unit])), offset, ha=side, gid="outlier")
