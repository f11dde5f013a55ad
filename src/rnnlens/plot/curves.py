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

    Examples
    --------
    >>> axes = rl.plot.curves(trace["lstm"].hidden)
    >>> len(axes)  # one per unit
    4
    """
    array = _data.label_array(data, "curves", dims=dims)
    _data.require_time(array, "curves", hint="draw values without time with plot.points")
    _data.refuse_reserved_dim(array, panel, "curves", TIME, DIRECTION, GATE)
    panel_dim, line_dim = _panel_and_line_dims(array, panel)
    views = _data.direction_views(array, as_computed=as_computed)
    gates = _data.names_of(array, GATE) if GATE in array.dims else [None]
    count = array.sizes[panel_dim] if panel_dim else 1
    most_panels, items = max(1, max_panels // len(gates)), f"{panel_dim}s"
    if panel_dim and panel_dim == _data.unit_dim(array):
        panel_indices, panel_note = _data.select_largest(
            _data.rms_along(array, panel_dim), most_panels, items, page=page
        )
    else:
        panel_indices, panel_note = _data.select_evenly(count, most_panels, items, page=page)
    line_indices, line_note = _data.select_evenly(array.sizes[line_dim] if line_dim else 1, max_lines, f"{line_dim}s")
    gate_and_index = [(gate, index) for gate in range(len(gates)) for index in panel_indices]
    shape = (len(gates), len(panel_indices)) if len(gates) > 1 else None
    directions = [view.name for view in views]
    size = (2.4 if len(directions) == 1 else 1.8, 1.5)
    panels = _frame.open_panels(
        "curves", len(gate_and_index), ax, figure, directions=directions, shape=shape, size=size
    )
    most_points = next(
        point_limit for panel_limit, point_limit in MOST_POINTS.items() if len(gate_and_index) <= panel_limit
    )
    merge_note = None
    for view, direction_axes in zip(views, panels.axes_by_direction, strict=True):
        for panel_ax, (gate, index) in zip(direction_axes, gate_and_index, strict=True):
            values = view.data.isel({dim: i for dim, i in ((GATE, gate), (panel_dim, index)) if dim in view.data.dims})
            values = (
                values.isel({line_dim: line_indices}).transpose(line_dim, TIME)
                if line_dim
                else values.expand_dims("line")
            )
            merge_note = _draw_lines(panel_ax, view, np.asarray(values.values), line, most_points) or merge_note
            _samples.mark_resets(panel_ax, view.data.coords.get("reset"), _data.positions(view.data, TIME))
            title_parts = (gates[gate], _data.position_title(array, panel_dim, index) if panel_dim else None)
            panel_ax.set_title(
                " · ".join(title_part for title_part in title_parts if title_part), fontsize="small", pad=3
            )
    _finish_axes(panels, array, views, shared=shared, log=log)
    if line_dim and 1 < len(line_indices) <= _axes.MOST_NAMED and not {"color", "colors", "array"} & set(line):
        line_names, line_label = _data.names_of(array, line_dim), _data.axis_label(array, line_dim)
        if len(panels.axes) == 1 and panels.direction_figures:
            _name_lines(panels.axes[0], [f"{line_label} {line_names[i]}" for i in line_indices])
        else:
            panels.draw_legend(_legend_handles(panels.axes[0], [line_names[i] for i in line_indices]), title=line_label)
    median_note = (
        f"{len(line_indices)} {line_dim}s, black: their median" if len(line_indices) > _axes.MOST_NAMED else None
    )
    return panels.with_title(
        title or _data.title_of(array), [panel_note, line_note, median_note, merge_note, *_samples.notes_of(array)]
    )


def _panel_and_line_dims(array: xr.DataArray, panel: str | None) -> tuple[str | None, str | None]:
    """Return the dimension of the panels and the dimension of the lines."""
    unit = _data.unit_dim(array)
    sample = SAMPLE if SAMPLE in array.dims else None
    panel_dim = unit if panel in (None, "unit") else panel
    if panel not in (None, "unit"):
        _data.require_dim(array, str(panel), "curves")
    other_dims = [str(d) for d in array.dims if d not in (TIME, "direction", GATE, panel_dim)]
    line_dim = sample if sample in other_dims else next(iter(other_dims), None)
    unplaced_dims = [d for d in other_dims if d != line_dim]
    if unplaced_dims:
        raise InputError(
            "plot.curves has no place for that many dimensions.",
            got=f"dimensions ({', '.join(map(str, array.dims))})",
            expected="time, one for the panels, one for the lines, gate and direction",
            hint=f"select one, such as .isel({unplaced_dims[0]}=0)",
        )
    return panel_dim, line_dim


def thin(values: Numbers, x: Numbers, most_points: int) -> tuple[Numbers, Numbers]:
    """Reduce runs of steps of (line, time) to their lowest and highest values, in their order."""
    run = 2 * -(-len(x) // most_points)
    if len(x) <= most_points:
        return values, x
    whole_length = len(x) // run * run
    blocks = values[:, :whole_length].reshape(len(values), -1, run)
    extreme_indices = np.sort(np.stack([np.argmin(blocks, axis=2), np.argmax(blocks, axis=2)], axis=2), axis=2)
    extremes = np.take_along_axis(blocks, extreme_indices, axis=2).reshape(len(values), -1)
    extreme_x = x[:whole_length].reshape(-1, run)[:, [0, run // 2]].reshape(-1)
    return np.concatenate([extremes, values[:, whole_length:]], axis=1), np.concatenate([extreme_x, x[whole_length:]])


def _draw_lines(
    ax: Any, view: _data.DirectionView, values: Numbers, keywords: dict[str, Any], most_points: int
) -> str | None:
    """Draw the lines of one panel; return a note if steps were merged."""
    x, count = _data.positions(view.data, TIME), len(values)
    is_nonfinite = ~np.isfinite(values)
    finite_values = np.where(is_nonfinite, np.nan, values)
    _axes.mark_nonfinite(ax, x[is_nonfinite.any(axis=0)])
    thinned_values, thinned_x = thin(finite_values, x, most_points)
    has_many = count > _axes.MOST_NAMED
    style: dict[str, Any] = {"linewidth": 0.6 if has_many else 1.1, "alpha": max(0.15, 4 / count) if has_many else 1.0}
    style["color"] = _axes.BLUE if has_many else _axes.line_colours(count)
    segments = np.stack([np.broadcast_to(thinned_x, thinned_values.shape), thinned_values], axis=2)
    _axes.draw_zero_line(ax)
    collection = LineCollection(list(segments), **{"gid": "lines", **style, **keywords})
    collection.set_in_layout(False)  # lies within the axes: measuring every path is the slowest part of the layout
    ax.add_collection(collection, autolim=False)
    if has_many:
        ax.plot(x, finite_median(finite_values), color="black", linewidth=1.0, gid="median")
    if len(x) == 1:
        for row, colour in zip(finite_values, [style["color"]] * count if has_many else style["color"], strict=True):
            ax.plot(x, row, "o", markersize=4, gid="point", color=colour, alpha=style["alpha"])
    _axes.tick_steps(ax, "x", x, margin=0.5 if len(x) == 1 else 0.0)
    return None if len(thinned_x) == len(x) else f"lowest and highest of every {2 * -(-len(x) // most_points)} steps"


def _finish_axes(
    panels: _frame.Panels, array: xr.DataArray, views: list[_data.DirectionView], *, shared: bool, log: bool
) -> None:
    """Set limits, labels and ticks of all panels of a figure of curves."""
    values = [np.concatenate([line for _, line, _ in _drawn_lines(ax)]) for ax in panels.axes]
    for ax, panel_values in zip(panels.axes, values, strict=True):
        _axes.set_value_axis(ax, np.concatenate(values) if shared else panel_values, log=log)
        for x, line, colour in _drawn_lines(ax) if ax.get_yscale() == "log" else ():
            _axes.mark_below(ax, x, line, colour)
    panels.label_axes([view.time_label for view in views], _data.value_label(array) + (", log scale" if log else ""))
    if shared:
        panels.hide_inner_ticks()


def _drawn_lines(ax: Any) -> Iterator[tuple[Numbers, Numbers, Any]]:
    """Yield (steps, values, colour) of each curve that has been drawn in a panel, read from its artists."""
    for collection in ax.collections:
        if collection.get_gid() != "lines":
            continue
        colours = collection.get_colors()
        for i, path in enumerate(collection.get_paths()):
            x, values = np.asarray(path.vertices).T
            yield x, values, colours[i % len(colours)] if len(colours) else "0.3"


def _name_lines(ax: Any, names: Sequence[str]) -> None:
    """Write the name of each line beside its last finite value."""
    line_ends = []
    for name, (_, values, colour) in zip(names, _drawn_lines(ax), strict=True):
        finite_values = values[np.isfinite(values)]
        last_value = float(finite_values[-1]) if finite_values.size else float("nan")
        line_ends.append(_axes.LineEnd(last_value, name, colour))
    _axes.name_ends(ax, line_ends)


def _legend_handles(ax: Any, names: Sequence[str], marker: str = "-") -> list[Any]:
    """Return legend entries for lines or points in the colours of the colour cycle."""
    lines = zip(names, _axes.line_colours(len(names)), strict=True)
    return [ax.plot([], [], marker, color=colour, markersize=4, label=name)[0] for name, colour in lines]


#: Largest number of units that each have their own tick.
MOST_TICKS = 12

#: Keywords that set the colours of points.
_COLOUR_KEYWORDS = frozenset({"color", "facecolor", "array", "cmap", "norm", "clim"})


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

    Examples
    --------
    >>> axes = rl.plot.points(trace["lstm"].hidden.isel(time=-1))
    >>> len(axes)
    1
    """
    array = _data.label_array(data, "points", dims=dims, guess={1: ("unit",), 2: (SAMPLE, "unit")})
    if TIME in array.dims:
        raise InputError(
            "plot.points draws values without time.",
            got=f"dimensions ({', '.join(map(str, array.dims))})",
            expected="no time among them",
            hint="select a step, such as .isel(time=-1), or use plot.curves",
        )
    unit = _data.unit_dim(array)
    _data.require_dim(array, unit or "unit", "points")
    _data.refuse_reserved_dim(array, panel, "points", DIRECTION, str(unit))
    if panel is not None:
        _data.require_dim(array, panel, "points")
    panel_dims = [str(d) for d in array.dims if d not in (unit, DIRECTION, SAMPLE) or d == panel]
    views = _data.direction_views(array)
    selections = _images.panel_selections(array, panel_dims)
    panel_indices, panel_note = _data.select_evenly(
        len(selections), max_panels, " x ".join(f"{d}s" for d in panel_dims) or "panels", page=page
    )
    directions = [view.name for view in views]
    size = (2.6, 1.7)  # a single panel is wider if it has more units
    if len(panel_indices) == 1:
        size = (min(9.0, max(4.5, 0.06 * array.sizes[unit])) / len(directions), 3.2)
    panels = _frame.open_panels("points", len(panel_indices), ax, figure, directions=directions, size=size)
    samples = array.sizes[SAMPLE] if SAMPLE in array.dims and SAMPLE not in panel_dims else 1
    x = _data.positions(array, unit)
    for view, direction_axes in zip(views, panels.axes_by_direction, strict=True):
        for panel_ax, selection in zip(direction_axes, [selections[i] for i in panel_indices], strict=True):
            selected = view.data.isel(selection[0])
            values = selected.transpose(..., unit).values.reshape(samples, -1)
            _scatter(panel_ax, x, values, point)
            panel_ax.set_title(selection[1], fontsize="small", pad=3)
            _axes.set_value_axis(panel_ax, array.values if shared else values, log=log)
            if log:
                _axes.mark_below(panel_ax, np.tile(x, len(values)), values.reshape(-1))
            _name_outlier(panel_ax, x, values, _data.names_of(array, SAMPLE) if samples > 1 else None)
    panels.label_axes(_data.axis_label(array, unit), _data.value_label(array) + (", log scale" if log else ""))
    if shared:
        panels.hide_inner_ticks()
    if 1 < samples <= _axes.MOST_NAMED and not _COLOUR_KEYWORDS & set(point):
        legend_style = {
            "fontsize": "small",
            "title_fontsize": "small",
            "loc": "upper left",
            "bbox_to_anchor": (1.0, 1.0),
        }
        handles = _legend_handles(panels.axes[-1], _data.names_of(array, SAMPLE), "o")
        panels.axes[-1].legend(handles=handles, title=_data.axis_label(array, SAMPLE), **legend_style)
    colour_note = f"{samples} samples in one colour" if samples > _axes.MOST_NAMED else None
    return panels.with_title(
        title or _data.title_of(array), [panel_note, colour_note, _data.nonfinite_note(array.values)]
    )


def _scatter(ax: Any, x: Numbers, values: Numbers, keywords: dict[str, Any]) -> None:
    """Draw all samples of a panel as one collection; non-finite values as crosses at the lower border."""
    count, units = values.shape
    is_nonfinite = ~np.isfinite(values)
    _axes.mark_nonfinite(ax, x[is_nonfinite.any(axis=0)])
    has_many = count > _axes.MOST_NAMED
    style: dict[str, Any] = {"s": float(np.clip(1500 / units, 4, 28)), "linewidth": 0, "zorder": 2, "gid": "points"}
    finite_values = np.where(is_nonfinite, np.nan, values).reshape(-1)
    if {"cmap", "norm", "clim"} & set(keywords) and not {"color", "facecolor", "array"} & set(keywords):
        style["c"] = finite_values  # a colour map without values to map would be ignored
    elif not _COLOUR_KEYWORDS & set(keywords):
        point_colours = np.repeat(np.array(_axes.line_colours(count), dtype=object), units).tolist()
        style["color"] = [_axes.BLUE] if has_many else point_colours
        style["alpha"] = max(0.25, 6 / count) if has_many else 0.9
    _axes.draw_zero_line(ax)
    offsets = np.broadcast_to(x, values.shape).reshape(-1)
    ax.scatter(offsets, finite_values, plotnonfinite=False, **{**style, **keywords})
    ax.set_xlim(x.min() - 0.6, x.max() + 0.6)
    if units <= MOST_TICKS:
        ax.set_xticks(x)
    else:
        _axes.tick_steps(ax, "x", x, time=False)


def _name_outlier(ax: Any, x: Numbers, values: Numbers, names: list[str] | None) -> None:
    """Name the sample and unit of a single outlier, if there is one."""
    outlier_index = far_out(values.reshape(-1))
    if outlier_index is None:
        return
    sample, unit = divmod(outlier_index, values.shape[1])
    text = f"unit {x[unit]:g}" if names is None else f"sample {names[sample]}"
    offset, alignment = ((-6, 0), "right") if unit > values.shape[1] / 2 else ((6, 0), "left")
    _axes.write_text(ax, text, (float(x[unit]), float(values[sample, unit])), offset, ha=alignment, gid="outlier")
