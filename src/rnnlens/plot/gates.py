"""Figures of gates: ``gates`` (activity and saturation), ``gates_over_time``, ``saturation_arrows``."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection
from matplotlib.lines import Line2D
from matplotlib.quiver import Quiver

from ..arguments import as_numbers
from ..errors import InputError
from ..measures.profiles import finite_quartiles
from ..recurrence.measures import finite_mean, masked_mean, quantiles, saturation_share
from ..vocabulary import GATE, SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers

#: Largest number of cells of one map.
CELLS = (120, 160)


@drawing(PathCollection, extra=("marker", "s"))
def gates(
    layer: Any,
    *,
    mask: Any = None,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **point: Any,
) -> Any:
    """Draw, for each gate in a row: its activity over time, a map of unit by time, and the saturation of its units.

    The activity is the mean over samples of each unit; the line is its mean, the band holds 80 % of the units. The
    saturation map has a point per unit: the share of (sample, time) at which the gate is near 0 (below 0.1) against the
    share at which it is near 1 (above 0.9); a candidate is near -1 (below -0.9) or near +1.

    Parameters
    ----------
    layer : (sample, time, gate, unit), also with direction
        A layer of a trace (its mask is then applied), or its ``gates``, or a plain array.
    mask : (sample, time) of bool
        True where a step counts; by default the layer's own mask, if it has one.

    Returns
    -------
    1-D array of Axes, three per gate, forward before backward

    References
    ----------
    Saturation map: Karpathy, Johnson, Li 2015, arXiv:1506.02078, fig. 4.
    """
    array = _gates_of(layer, "gates")
    _data.require_time(array, "gates")
    if mask is not None and SAMPLE in array.dims:
        array = array.assign_coords(mask=((SAMPLE, TIME), _mask_of(mask, array)))
    shown = _data.halves(array, as_computed=as_computed)
    count = array.sizes[GATE]
    sizes: dict[str, Any] = {"size": (2.6, 1.7), "margin": (1.0, 1.2), "shape": (count, 3), "widths": (1.3, 1.3, 1)}
    panels = _frame.open_panels("gates", 3 * count, ax, figure, ways=[half.name for half in shown], **sizes)
    for half, axes in zip(shown, panels.halves, strict=True):
        for number in range(count):
            one, name = half.data.isel({GATE: number}), _data.names_of(half.data, GATE)[number]
            _draw_row(axes[3 * number : 3 * number + 3], one, name, point)
        for place in axes[:-3]:
            place.tick_params(labelbottom=False)
        _name_columns(axes, half, _data.axis_label(array, _data.unit_dim(array)))
    merged = _images.merge_note([array.sizes[_data.unit_dim(array)], array.sizes[TIME]], CELLS, "unit", "step")
    masked = "masked steps left out, grey where no sample has one" if _samples.hidden(array) is not None else None
    head = _data.layer_title(array.attrs, "gate activity and saturation")
    return panels.titled(title or head, [_data.nonfinite_note(array.values), merged, masked])


def _gates_of(layer: Any, figure: str) -> xr.DataArray:
    """Return the gates of a layer, with its mask as a coordinate."""
    found = _data.variable(layer, "gates", figure, masked=True)
    array = _data.labelled(found, figure, guess={4: (SAMPLE, TIME, GATE, "unit")})
    for dim in (GATE, _data.unit_dim(array) or "unit"):
        _data.require_dim(array, dim, figure)
    return array


def _mask_of(mask: Any, array: xr.DataArray) -> Numbers:
    """Return the user's mask, (sample, time) of bool. Raise InputError if it has another shape."""
    values = as_numbers("mask", mask.values if isinstance(mask, xr.DataArray) else mask)
    wanted = (array.sizes[SAMPLE], array.sizes[TIME])
    if values.shape != wanted:
        raise InputError("mask= does not fit the gates.", got=f"shape {values.shape}", expected=f"{wanted}")
    return np.asarray(values != 0)


def _draw_row(axes: list[Any], gate: xr.DataArray, name: str, keywords: dict[str, Any]) -> None:
    """Draw activity over time, map of units by time, and saturation of one gate in a row of panels."""
    activity, picture, saturation = axes
    values, steps, real = _data.of_samples(gate, TIME), _data.positions(gate, TIME), _samples.real_steps(gate)
    where = None if real.all() else real[:, :, None]
    nowhere = ~real.any(axis=0)
    mean = (values.mean(axis=0) if where is None else masked_mean(values, where, axis=0)).T
    low, high = quantiles(mean, q=(0.1, 0.9), axis=0)
    _axes.draw_band(activity, steps, low, high, "#56b4e9", alpha=0.45)
    activity.plot(steps, finite_mean(mean, axis=0), color="#0072b2", linewidth=1.2, gid="mean")
    _axes.mark_steps(activity, steps[~np.isfinite(values).all(axis=(0, 2)) & ~nowhere])
    top = max(1.0, _data.largest_magnitude(values))
    bottom = -top if name == "candidate" or top > 1 else 0.0
    activity.set_ylim(bottom - 0.03 * (top - bottom), top + 0.03 * (top - bottom))
    activity.set_ylabel(_words(name))
    _axes.step_axis(activity, "x", steps, room=0.5 if len(steps) == 1 else 0)
    look = {"cmap": _axes.POSITIVE if bottom == 0 else _axes.DIVERGING, "vmin": bottom, "vmax": top}
    matrix = _images.Matrix(mean, steps, np.arange(len(mean)), np.broadcast_to(nowhere, mean.shape))
    _images.colour_bar([picture], _images.draw_image(picture, matrix, look=look, limits=CELLS))
    shut, opened = saturation_share(values, axis=(0, 1), low=_ends(name)[0], high=0.9, where=where)
    look = {"s": float(np.clip(2500 / len(mean), 6, 30)), "color": "#d55e00", "alpha": 0.55, "linewidth": 0}
    saturation.plot([0, 1], [1, 0], color="#909090", linewidth=0.8, gid="limit")
    saturation.scatter(opened, shut, **{"gid": "saturation", "clip_on": False, **look, **keywords})
    saturation.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))


def _words(gate: str) -> str:
    return gate if gate == "candidate" else f"{gate} gate"


def _ends(gate: str) -> tuple[float, str, str]:
    """Return the value below which a gate is near its lower end, and labels of the shares near either end."""
    if gate == "candidate":
        return -0.9, "share near -1 (< -0.9)", "share near +1 (> 0.9)"
    return 0.1, "share near 0 (< 0.1)", "share near 1 (> 0.9)"


def _name_columns(axes: list[Any], half: _data.DirectionView, unit: str) -> None:
    """Write titles above the first row and labels below the last."""
    titles = ("mean of units, 80 % band", "mean over samples", "share of steps, per unit")
    for ax, words in zip(axes, titles, strict=False):
        ax.set_title(words, fontsize="small", pad=3)
    axes[-3].set_xlabel(half.time_label)
    axes[-2].set_xlabel(half.time_label)
    names = _data.names_of(half.data, GATE)
    for number, name in enumerate(names):
        _, low, high = _ends(name)
        axes[3 * number + 1].set_ylabel(unit, fontsize="small")
        axes[3 * number + 2].set_ylabel(low, fontsize="small")
        if name in ("candidate", names[-1]):
            axes[3 * number + 2].set_xlabel(high, fontsize="small")


@drawing(Line2D)
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
    """Draw the gates of a unit over time: a panel per unit, a line per gate, median and quartiles over samples.

    Parameters
    ----------
    layer : (sample, time, gate, unit), also with direction
        A layer of a trace (masked steps are grey), or its ``gates``, or a plain array.

    Returns
    -------
    1-D array of Axes, forward before backward
    """
    array = _gates_of(layer, "gates_over_time")
    _data.require_time(array, "gates_over_time")
    unit = _data.unit_dim(array)
    picked, thinned = _data.choose(array.sizes[unit], max_panels, "units", page=page)
    shown = _data.halves(array, as_computed=as_computed)
    ways = [half.name for half in shown]
    panels = _frame.open_panels("gates_over_time", len(picked), ax, figure, ways=ways, size=(2.9, 1.8))
    top = _data.largest_magnitude(array.values)
    low = -1.0 if "candidate" in _data.names_of(array, GATE) else 0.0
    limits = (low, 1.0) if top <= 1 else (-top if low else 0.0, top)
    for half, places in zip(shown, panels.halves, strict=True):
        for place, index in zip(places, picked, strict=True):
            _draw_gate_lines(place, half, half.data.isel({unit: index}), line)
            room = 0.03 * (limits[1] - limits[0])
            place.set_ylim(limits[0] - room, limits[1] + room)
            place.set_title(_data.place_words(array, unit or "unit", index), fontsize="small", pad=3)
    panels.label([half.time_label for half in shown], "gate value")
    panels.outer_ticks_only()
    panels.legend(panels.axes[0].get_legend_handles_labels()[0], beside="right center")
    many = array.sizes.get(SAMPLE, 1)
    note = f"median of {many} samples, band: quartiles" if many > 1 else None
    head = _data.layer_title(array.attrs, "gates over time")
    return panels.titled(title or head, [note, thinned, *_samples.notes_of(array)])


def _draw_gate_lines(ax: Any, half: _data.DirectionView, data: xr.DataArray, keywords: dict[str, Any]) -> None:
    """Draw the gates of one unit."""
    steps, real = _data.positions(half.data, TIME), _samples.real_steps(data)
    names = _data.names_of(half.data, GATE)
    for number, colour in enumerate(_axes.line_colours(len(names))):
        values = _data.of_samples(data.isel({GATE: number}), TIME)
        bad = np.asarray((~np.isfinite(values) & real).any(axis=0))
        low, middle, high = finite_quartiles(np.where(real, values, np.nan))
        look = {"color": colour, "linewidth": 1.2, "linestyle": "--" if names[number] == "candidate" else "-"}
        look |= {"label": names[number], "gid": f"gate {names[number]}", "marker": "o" if len(steps) == 1 else None}
        ax.plot(steps, np.where(bad, np.nan, middle), **{**look, **keywords})
        if len(values) > 1:
            _axes.draw_band(ax, steps, low, high, colour, alpha=0.15, gid=f"band {names[number]}")
        _axes.mark_steps(ax, steps[bad])
    _samples.shade(ax, steps, np.asarray(~real.any(axis=0)))
    _axes.step_axis(ax, "x", steps, room=0.5)


@drawing(Quiver, extra=("width", "headwidth", "headlength", "pivot"))
def saturation_arrows(
    before: Any,
    after: Any,
    *,
    names: tuple[str, str] = ("before", "after"),
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **arrow: Any,
) -> Any:
    """Draw how the saturation of each unit's gates changed: a panel per gate, an arrow per unit.

    An arrow leads from the shares of (sample, time) at which the gate was near 1 (horizontal) and near 0 (vertical)
    before, to those after. A unit on the hypotenuse is always near one end, a unit at the origin never.

    Parameters
    ----------
    before, after : (sample, time, gate, unit), also with direction
        Two layers of traces (their masks are applied), or their ``gates``, of the same gates and units.
    names
        Names of the two moments.

    Returns
    -------
    1-D array of Axes, one per gate, forward before backward

    References
    ----------
    Karpathy, Johnson, Li 2015, arXiv:1506.02078, fig. 4.
    """
    pair = [_samples.without_padding(_gates_of(one, "saturation_arrows")) for one in (before, after)]
    _refuse_others(*pair)
    gates = _data.names_of(pair[0], GATE)
    shown = [_data.halves(one) for one in pair]
    ways = [half.name for half in shown[0]]
    panels = _frame.open_panels("saturation_arrows", len(gates), ax, figure, ways=ways, size=(2.5, 2.4))
    for number, places in enumerate(panels.halves):
        for place, gate in zip(places, gates, strict=True):
            first, last = (_shares(half[number].data.isel({GATE: gates.index(gate)}), gate) for half in shown)
            _draw_saturation(place, first, last, gate, arrow)
    head = _data.layer_title(pair[0].attrs, "saturation of the gates, per unit")
    missing = _data.nonfinite_by_name(names, [one.values for one in pair])
    return panels.titled(title or head, [f"from {names[0]} (ring) to {names[1]} (arrow head)", *missing])


def _refuse_others(before: xr.DataArray, after: xr.DataArray) -> None:
    unit = _data.unit_dim(before)
    kinds = [(_data.names_of(one, GATE), one.sizes.get(unit), one.sizes.get("direction")) for one in (before, after)]
    if kinds[0] != kinds[1]:
        raise InputError(
            "plot.saturation_arrows compares the same gates and units.",
            got=" and ".join(f"{count} units with gates {', '.join(gates)}" for gates, count, _ in kinds),
            hint="trace the same layer of the model twice",
        )


def _shares(gate: xr.DataArray, name: str) -> Numbers:
    """Return for each unit the shares of its gate values near 1 and near 0, (unit, 2)."""
    unit = _data.unit_dim(gate)
    values = gate.transpose(..., unit).values.reshape(-1, gate.sizes[unit])
    shut, opened = saturation_share(values, axis=0, low=_ends(name)[0], high=0.9)
    return np.stack([opened, shut], axis=1)


def _draw_saturation(ax: Any, before: Numbers, after: Numbers, gate: str, keywords: dict[str, Any]) -> None:
    """Draw an arrow per unit, with a ring at its start."""
    ax.plot([0, 1], [1, 0], color="#909090", linewidth=0.8, gid="limit")
    size = float(np.clip(900 / len(before), 3, 18))
    ax.scatter(*before.T, s=size, facecolor="none", edgecolor="#0072b2", linewidth=0.7, clip_on=False, gid="before")
    way = after - before
    look = {"color": "#d55e00", "alpha": 0.75 if len(before) <= 64 else 0.4, "width": 0.007, "zorder": 3}
    look |= {"angles": "xy", "scale_units": "xy", "scale": 1.0, "gid": "after"}
    arrows = ax.quiver(*before.T, *way.T, **{**look, **keywords})
    arrows.set_clip_on(False)
    arrows.set_in_layout(False)  # a unit without a share has no position
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    ax.set_title(_words(gate), fontsize="small", pad=3)
    _, low, high = _ends(gate)
    ax.set_xlabel(high, fontsize="small")
    ax.set_ylabel(low, fontsize="small")
