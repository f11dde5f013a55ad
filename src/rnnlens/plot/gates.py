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
from ..results.schema import proposals_of
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

    Examples
    --------
    >>> axes = rl.plot.gates(trace["lstm"])
    >>> len(axes)  # three per gate
    12
    """
    array = _gates_of(layer, "gates")
    _data.require_time(array, "gates")
    if mask is not None and SAMPLE in array.dims:
        array = array.assign_coords(mask=((SAMPLE, TIME), _mask_of(mask, array)))
    views = _data.direction_views(array, as_computed=as_computed)
    count = array.sizes[GATE]
    sizes: dict[str, Any] = {"size": (2.6, 1.7), "margin": (1.0, 1.2), "shape": (count, 3), "widths": (1.3, 1.3, 1)}
    panels = _frame.open_panels("gates", 3 * count, ax, figure, directions=[view.name for view in views], **sizes)
    for view, direction_axes in zip(views, panels.axes_by_direction, strict=True):
        for number in range(count):
            gate_array, gate_name = view.data.isel({GATE: number}), _data.names_of(view.data, GATE)[number]
            _draw_row(direction_axes[3 * number : 3 * number + 3], gate_array, gate_name, point)
        for panel_ax in direction_axes[:-3]:
            panel_ax.tick_params(labelbottom=False)
        _name_columns(direction_axes, view, _data.axis_label(array, _data.unit_dim(array)))
    merge_note = _images.merge_note([array.sizes[_data.unit_dim(array)], array.sizes[TIME]], CELLS, "unit", "step")
    mask_note = (
        "masked steps left out, grey where no sample has one" if _samples.padding_mask(array) is not None else None
    )
    default_title = _data.layer_title(array.attrs, "gate activity and saturation")
    return panels.with_title(title or default_title, [_data.nonfinite_note(array.values), merge_note, mask_note])


def _gates_of(layer: Any, figure: str) -> xr.DataArray:
    """Return the gates of a layer, with its mask as a coordinate."""
    gate_data = _data.layer_variable(layer, "gates", figure, masked=True)
    array = _data.label_array(gate_data, figure, guess={4: (SAMPLE, TIME, GATE, "unit")})
    for dim in (GATE, _data.unit_dim(array) or "unit"):
        _data.require_dim(array, dim, figure)
    return array


def _mask_of(mask: Any, array: xr.DataArray) -> Numbers:
    """Return the user's mask, (sample, time) of bool. Raise InputError if it has another shape."""
    values = as_numbers("mask", mask.values if isinstance(mask, xr.DataArray) else mask)
    expected_shape = (array.sizes[SAMPLE], array.sizes[TIME])
    if values.shape != expected_shape:
        raise InputError("mask= does not fit the gates.", got=f"shape {values.shape}", expected=f"{expected_shape}")
    return np.asarray(values != 0)


def _draw_row(axes: list[Any], gate: xr.DataArray, name: str, keywords: dict[str, Any]) -> None:
    """Draw one gate in a row of three axes: its mean over time, a heatmap (unit, time), and saturation of each unit."""
    activity_ax, map_ax, saturation_ax = axes
    values = _data.numpy_by_sample(gate, TIME)
    steps = _data.positions(gate, TIME)
    is_real = _samples.real_step_mask(gate)
    real_mask = None if is_real.all() else is_real[:, :, None]
    is_padding = ~is_real.any(axis=0)
    mean = (values.mean(axis=0) if real_mask is None else masked_mean(values, real_mask, axis=0)).T
    low, high = quantiles(mean, q=(0.1, 0.9), axis=0)
    _axes.draw_band(activity_ax, steps, low, high, _axes.LIGHT_BLUE, alpha=0.45)
    style: dict[str, Any] = {"linewidth": 1.2, "marker": "o" if len(steps) == 1 else None, "markersize": 4}
    activity_ax.plot(steps, finite_mean(mean, axis=0), color=_axes.BLUE, gid="mean", **style)
    _axes.mark_nonfinite(activity_ax, steps[~np.isfinite(values).all(axis=(0, 2)) & ~is_padding])
    top = max(1.0, _data.largest_magnitude(values))
    is_proposal = name in proposals_of(gate)
    bottom = -top if is_proposal or top > 1 else 0.0
    activity_ax.set_ylim(bottom - 0.03 * (top - bottom), top + 0.03 * (top - bottom))
    activity_ax.set_ylabel(gate_title(name, is_proposal))
    _axes.tick_steps(activity_ax, "x", steps, margin=0.5 if len(steps) == 1 else 0)
    style = {"cmap": _axes.DIVERGING, "vmin": bottom, "vmax": top}  # white: a gate half open, a candidate of 0
    matrix = _images.Matrix(mean, steps, np.arange(len(mean)), np.broadcast_to(is_padding, mean.shape))
    _images.colour_bar([map_ax], _images.draw_image(map_ax, matrix, style=style, cell_limits=CELLS))
    low_end, _, _ = _saturation_ends(is_proposal)
    shut, opened = saturation_share(values, axis=(0, 1), low=low_end, high=0.9, where=real_mask)
    style = {"s": float(np.clip(2500 / len(mean), 6, 30)), "color": _axes.ORANGE, "alpha": 0.55, "linewidth": 0}
    saturation_ax.plot([0, 1], [1, 0], color=_axes.REFERENCE_GREY, linewidth=0.8, gid="limit")
    saturation_ax.scatter(opened, shut, **{"gid": "saturation", "clip_on": False, **style, **keywords})
    saturation_ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))


def gate_title(gate: str, is_proposal: bool) -> str:
    """Return the name of a gate in titles; a proposal for the new state is not called a gate."""
    return gate if is_proposal else f"{gate} gate"


def _saturation_ends(is_proposal: bool) -> tuple[float, str, str]:
    """Return the value below which a gate is near its lower end, and labels of the shares near either end."""
    if is_proposal:
        return -0.9, "share near -1 (< -0.9)", "share near +1 (> 0.9)"
    return 0.1, "share near 0 (< 0.1)", "share near 1 (> 0.9)"


def _name_columns(axes: list[Any], view: _data.DirectionView, unit_label: str) -> None:
    """Write titles above the first row and labels below the last."""
    titles = ("mean of units, 80 % band", "mean over samples", "share of steps, per unit")
    for ax, column_title in zip(axes, titles, strict=False):
        ax.set_title(column_title, fontsize="small", pad=3)
    axes[-3].set_xlabel(view.time_label)
    axes[-2].set_xlabel(view.time_label)
    names, proposals = _data.names_of(view.data, GATE), proposals_of(view.data)
    for number, name in enumerate(names):
        _, low_label, high_label = _saturation_ends(name in proposals)
        axes[3 * number + 1].set_ylabel(unit_label, fontsize="small")
        axes[3 * number + 2].set_ylabel(low_label, fontsize="small")
        if name in (*proposals, names[-1]):
            axes[3 * number + 2].set_xlabel(high_label, fontsize="small")


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

    Of many units those whose gates change most from step to step are drawn.

    Parameters
    ----------
    layer : (sample, time, gate, unit), also with direction
        A layer of a trace (masked steps are grey), or its ``gates``, or a plain array.

    Returns
    -------
    1-D array of Axes, forward before backward

    Examples
    --------
    >>> axes = rl.plot.gates_over_time(trace["lstm"])
    >>> len(axes)  # one per gate
    4
    """
    array = _gates_of(layer, "gates_over_time")
    _data.require_time(array, "gates_over_time")
    unit = _data.unit_dim(array)
    changes = _data.rms_along(array, unit or "unit", changes=True)
    unit_indices, unit_note = _data.select_largest(changes, max_panels, "units", page=page)
    views = _data.direction_views(array, as_computed=as_computed)
    directions = [view.name for view in views]
    panels = _frame.open_panels(
        "gates_over_time", len(unit_indices), ax, figure, directions=directions, size=(2.9, 1.8)
    )
    largest = _data.largest_magnitude(array.values)
    lower_limit = 0.0 if set(proposals_of(array)).isdisjoint(_data.names_of(array, GATE)) else -1.0
    limits = (lower_limit, 1.0) if largest <= 1 else (-largest if lower_limit else 0.0, largest)
    for view, direction_axes in zip(views, panels.axes_by_direction, strict=True):
        for panel_ax, index in zip(direction_axes, unit_indices, strict=True):
            _draw_gate_lines(panel_ax, view, view.data.isel({unit: index}), line)
            margin = 0.03 * (limits[1] - limits[0])
            panel_ax.set_ylim(limits[0] - margin, limits[1] + margin)
            panel_ax.set_title(_data.position_title(array, unit or "unit", index), fontsize="small", pad=3)
    panels.label_axes([view.time_label for view in views], "gate value")
    panels.hide_inner_ticks()
    panels.draw_legend(panels.axes[0].get_legend_handles_labels()[0], location="right center")
    sample_count = array.sizes.get(SAMPLE, 1)
    median_note = f"median of {sample_count} samples, band: quartiles" if sample_count > 1 else None
    default_title = _data.layer_title(array.attrs, "gates over time")
    return panels.with_title(title or default_title, [median_note, unit_note, *_samples.notes_of(array)])


def _draw_gate_lines(ax: Any, view: _data.DirectionView, data: xr.DataArray, keywords: dict[str, Any]) -> None:
    """Draw the gates of one unit."""
    steps, is_real = _data.positions(view.data, TIME), _samples.real_step_mask(data)
    gate_names, proposals = _data.names_of(view.data, GATE), proposals_of(view.data)
    for gate_index, colour in enumerate(_axes.line_colours(len(gate_names))):
        values = _data.numpy_by_sample(data.isel({GATE: gate_index}), TIME)
        is_nonfinite = np.asarray((~np.isfinite(values) & is_real).any(axis=0))
        low, median, high = finite_quartiles(np.where(is_real, values, np.nan))
        style = {"color": colour, "linewidth": 1.2, "linestyle": "--" if gate_names[gate_index] in proposals else "-"}
        style |= {
            "label": gate_names[gate_index],
            "gid": f"gate {gate_names[gate_index]}",
            "marker": "o" if len(steps) == 1 else None,
        }
        ax.plot(steps, np.where(is_nonfinite, np.nan, median), **{**style, **keywords})
        if len(values) > 1:
            _axes.draw_band(ax, steps, low, high, colour, alpha=0.15, gid=f"band {gate_names[gate_index]}")
        _axes.mark_nonfinite(ax, steps[is_nonfinite])
    _samples.shade_padding(ax, steps, np.asarray(~is_real.any(axis=0)))
    _axes.tick_steps(ax, "x", steps, margin=0.5)


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

    Examples
    --------
    >>> axes = rl.plot.saturation_arrows(before["lstm"], trace["lstm"])
    >>> len(axes)  # one per gate
    4
    """
    pair = [_samples.nan_at_padding(_gates_of(layer_gates, "saturation_arrows")) for layer_gates in (before, after)]
    _refuse_mismatch(*pair)
    gate_names = _data.names_of(pair[0], GATE)
    views = [_data.direction_views(layer_gates) for layer_gates in pair]
    directions = [view.name for view in views[0]]
    panels = _frame.open_panels(
        "saturation_arrows", len(gate_names), ax, figure, directions=directions, size=(2.5, 2.4)
    )
    for number, direction_axes in enumerate(panels.axes_by_direction):
        for panel_ax, gate in zip(direction_axes, gate_names, strict=True):
            is_proposal = gate in proposals_of(pair[0])
            shares_before, shares_after = (
                _saturation_shares(view[number].data.isel({GATE: gate_names.index(gate)}), is_proposal)
                for view in views
            )
            _draw_saturation(panel_ax, shares_before, shares_after, is_proposal, arrow)
            panel_ax.set_title(gate_title(gate, is_proposal), fontsize="small", pad=3)
    default_title = _data.layer_title(pair[0].attrs, "saturation of the gates, per unit")
    nonfinite_notes = _data.nonfinite_by_name(names, [layer_gates.values for layer_gates in pair])
    return panels.with_title(
        title or default_title, [f"from {names[0]} (ring) to {names[1]} (arrow head)", *nonfinite_notes]
    )


def _refuse_mismatch(before: xr.DataArray, after: xr.DataArray) -> None:
    unit = _data.unit_dim(before)
    kinds = [
        (_data.names_of(gate_array, GATE), gate_array.sizes.get(unit), gate_array.sizes.get("direction"))
        for gate_array in (before, after)
    ]
    if kinds[0] != kinds[1]:
        raise InputError(
            "plot.saturation_arrows compares the same gates and units.",
            got=" and ".join(f"{count} units with gates {', '.join(gates)}" for gates, count, _ in kinds),
            hint="trace the same layer of the model twice",
        )


def _saturation_shares(gate: xr.DataArray, is_proposal: bool) -> Numbers:
    """Return for each unit the shares of its gate values near 1 and near 0, (unit, 2)."""
    unit = _data.unit_dim(gate)
    values = gate.transpose(..., unit).values.reshape(-1, gate.sizes[unit])
    shut, opened = saturation_share(values, axis=0, low=_saturation_ends(is_proposal)[0], high=0.9)
    return np.stack([opened, shut], axis=1)


def _draw_saturation(ax: Any, before: Numbers, after: Numbers, is_proposal: bool, keywords: dict[str, Any]) -> None:
    """Draw an arrow per unit, with a ring at its start."""
    ax.plot([0, 1], [1, 0], color=_axes.REFERENCE_GREY, linewidth=0.8, gid="limit")
    size = float(np.clip(900 / len(before), 3, 18))
    ax.scatter(*before.T, s=size, facecolor="none", edgecolor=_axes.BLUE, linewidth=0.7, clip_on=False, gid="before")
    change = after - before
    style = {"color": _axes.ORANGE, "alpha": 0.75 if len(before) <= 64 else 0.4, "width": 0.007, "zorder": 3}
    style |= {"angles": "xy", "scale_units": "xy", "scale": 1.0, "gid": "after"}
    arrows = ax.quiver(*before.T, *change.T, **{**style, **keywords})
    arrows.set_clip_on(False)
    arrows.set_in_layout(False)  # a unit without a share has no position
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    _, low_label, high_label = _saturation_ends(is_proposal)
    ax.set_xlabel(high_label, fontsize="small")
    ax.set_ylabel(low_label, fontsize="small")
