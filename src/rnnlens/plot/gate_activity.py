"""``gates``: how open each gate is over time, and which units stay near 0 or near 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection

from ..arguments import as_numbers
from ..errors import InputError, message
from ..recurrence.measures import finite_mean, masked_mean, quantiles, saturation_share
from ..vocabulary import GATE, SAMPLE, TIME
from ._colour import DIVERGING, POSITIVE
from ._data import (
    DirectionView,
    Numbers,
    axis_label,
    halves,
    labelled,
    largest_magnitude,
    names_of,
    nonfinite_note,
    positions,
    require_dim,
    require_time,
    unit_dim,
)
from ._door import figure as figure_door
from ._images import Matrix, colour_bar, draw_image, merge_note, steps_for
from ._keywords import checked
from ._layers import dataset_of, variable
from ._marks import step_axis
from ._panels import Grid, mark_steps, open_panels

#: Cells of one map.
CELLS = (120, 160)


@dataclass(frozen=True)
class _Gate:
    """What one row of the figure draws."""

    name: str
    steps: Numbers
    mean: Numbers
    low_share: Numbers
    high_share: Numbers
    bounds: tuple[float, float]
    bad_steps: Numbers
    empty_steps: Numbers


@figure_door()
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
        A layer of a trace (its mask is then obeyed), or its ``gates``, or a plain array.
    mask : (sample, time) of bool
        True where a step counts. Default: the layer's own, if it has one.
    as_computed
        Turn the backward half of a bidirectional layer round, into the order in which it was computed.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, three per gate, or a Figure or SubFigure to draw into.
    **point
        Properties of matplotlib's PathCollection, for the points of the saturation map.

    Returns
    -------
    1-D array of Axes, three per gate, forward before backward

    Raises
    ------
    InputError
        If there are no gates or no time, a keyword is unknown, or ``ax`` has not three Axes per gate.

    References
    ----------
    Saturation map: Karpathy, Johnson, Li 2015, arXiv:1506.02078, fig. 4.
    """
    keywords = checked(point, PathCollection, figure="gates", extra=("marker", "s"))
    array = labelled(variable(layer, "gates", "gates"), "gates", guess={4: (SAMPLE, TIME, GATE, "unit")})
    require_dim(array, GATE, "gates")
    require_time(array, "gates")
    require_dim(array, unit_dim(array) or "unit", "gates")
    valid = _mask_of(layer, mask, array)
    shown = halves(array, as_computed=as_computed)
    count = array.sizes[GATE]
    panels = open_panels(
        3 * count,
        name="gates",
        grid=Grid((2.6, 1.7), (1.0, 1.2), (count, 3), widths=(1.3, 1.3, 1)),
        halves=[half.name for half in shown],
        ax=ax,
        figure=figure,
    )
    for half, axes in zip(shown, panels.halves, strict=True):
        for number in range(count):
            turned = valid if valid is None or half.time_label == shown[0].time_label else valid[:, ::-1]
            row = _summary(half, number, turned)
            _draw_row(
                axes[3 * number : 3 * number + 3], row, positions(half.data, TIME), keywords, last=number == count - 1
            )
        _name_columns(axes, half, axis_label(array, unit_dim(array)))
    merged = merge_note(steps_for((array.sizes[unit_dim(array)], array.sizes[TIME]), CELLS), "unit", "step")
    notes = [
        nonfinite_note(array.values),
        merged,
        "masked steps left out, grey where no sample has one" if valid is not None and not valid.all() else None,
    ]
    head = " · ".join(str(part) for part in (array.attrs.get("layer"), "gate activity and saturation") if part)
    panels.title(title or head, notes)
    return panels.result()


def _mask_of(layer: Any, mask: Any, array: Any) -> Numbers | None:
    """(sample, time) of bool, or None."""
    if mask is None:
        dataset = dataset_of(layer)
        mask = dataset["mask"] if dataset is not None and "mask" in dataset else None
    if mask is None or SAMPLE not in array.dims:
        return None
    values = as_numbers("mask", mask.values if isinstance(mask, xr.DataArray) else mask) != 0
    wanted = tuple(array.sizes.get(dim, 1) for dim in (SAMPLE, TIME))
    if values.shape != wanted:
        raise InputError(message("mask= does not fit the gates.", got=f"shape {values.shape}", expected=f"{wanted}"))
    return np.asarray(values)


def _summary(half: DirectionView, number: int, valid: Numbers | None) -> _Gate:
    """Numbers of one gate of one direction."""
    array = half.data.isel({GATE: number})
    unit = unit_dim(array)
    order = [d for d in (SAMPLE, TIME) if d in array.dims]
    values = np.asarray(array.transpose(*order, unit).values)
    values = values if SAMPLE in array.dims else values[None]
    name = names_of(half.data, GATE)[number]
    low = -0.9 if name == "candidate" else 0.1
    where = None if valid is None else valid[:, :, None]
    shut, opened = saturation_share(values, axis=(0, 1), low=low, high=0.9, where=where, xp=np)
    bad: Numbers = np.asarray(~np.isfinite(values).all(axis=(0, 2)))
    mean = (values.mean(axis=0) if where is None else masked_mean(values, where, axis=0, xp=np)).T
    nowhere = np.zeros(len(bad), dtype=bool) if valid is None else np.asarray(~valid.any(axis=0))
    top = largest_magnitude(values)
    bounds = (0.0, 1.0) if name != "candidate" and top <= 1 else (-max(1.0, top), max(1.0, top))
    return _Gate(name, positions(half.data, TIME), mean, shut, opened, bounds, bad & ~nowhere, nowhere)


def _draw_row(axes: list[Any], row: _Gate, steps: Numbers, keywords: dict[str, Any], *, last: bool) -> None:
    """Activity, map, saturation of one gate."""
    activity, picture, saturation = axes
    low, high = quantiles(row.mean, q=(0.1, 0.9), axis=0, xp=np)
    activity.fill_between(steps, low, high, color="#56b4e9", alpha=0.45, linewidth=0, gid="band")
    activity.plot(steps, finite_mean(row.mean, axis=0, xp=np), color="#0072b2", linewidth=1.2, gid="mean")
    mark_steps(activity, steps[row.bad_steps])
    room = 0.03 * (row.bounds[1] - row.bounds[0])
    activity.set_ylim(row.bounds[0] - room, row.bounds[1] + room)
    margin = 0.5 if len(steps) == 1 else 0
    activity.set_xlim(steps.min() - margin, steps.max() + margin)
    activity.set_ylabel("candidate" if row.name == "candidate" else f"{row.name} gate")
    image = draw_image(
        picture,
        Matrix(row.mean, steps, np.arange(len(row.mean)), np.broadcast_to(row.empty_steps, row.mean.shape)),
        look={"cmap": POSITIVE if row.bounds[0] == 0 else DIVERGING, "vmin": row.bounds[0], "vmax": row.bounds[1]},
        limits=CELLS,
    )
    colour_bar([picture], image)
    look = {"s": float(np.clip(2500 / len(row.mean), 6, 30)), "color": "#d55e00", "alpha": 0.55, "linewidth": 0}
    saturation.plot([0, 1], [1, 0], color="#909090", linewidth=0.8, gid="limit")
    saturation.scatter(row.high_share, row.low_share, **{"gid": "saturation", "clip_on": False, **look, **keywords})
    saturation.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    step_axis(activity, "x", steps)
    for ax in axes:
        ax.tick_params(labelsize="small", labelbottom=last)


def near_low(gate: str) -> str:
    """The words for the share of values at the lower end: a candidate lies between -1 and 1."""
    return "share near -1 (< -0.9)" if gate == "candidate" else "share near 0 (< 0.1)"


def near_high(gate: str) -> str:
    """The words for the share of values at the upper end."""
    return "share near +1 (> 0.9)" if gate == "candidate" else "share near 1 (> 0.9)"


def _name_columns(axes: list[Any], half: DirectionView, unit: str) -> None:
    """Titles above the first row, labels below the last."""
    for ax, words in zip(
        axes[:3], ("mean of units, 80 % band", "mean over samples", "share of steps, per unit"), strict=True
    ):
        ax.set_title(words, fontsize="small", pad=3)
    axes[-3].set_xlabel(half.time_label)
    axes[-2].set_xlabel(half.time_label)
    axes[-1].set_xlabel(near_high(names_of(half.data, GATE)[-1]), fontsize="small")
    names = names_of(half.data, GATE)
    for number in range(len(axes) // 3):
        axes[3 * number + 1].set_ylabel(unit, fontsize="small")
        axes[3 * number + 2].set_ylabel(near_low(names[number]), fontsize="small")
        if names[number] == "candidate":
            axes[3 * number + 2].set_xlabel(near_high(names[number]), fontsize="small")
