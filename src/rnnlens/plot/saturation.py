"""``saturation_arrows``: each unit's gates from before to after, in the triangle of saturation."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.quiver import Quiver

from ..errors import InputError, message
from ..recurrence.measures import saturation_share
from ..vocabulary import GATE, SAMPLE, TIME
from ._data import Numbers, halves, labelled, names_of, nonfinite_note, require_dim, unit_dim
from ._door import figure as figure_door
from ._keywords import checked
from ._layers import dataset_of, variable
from ._panels import Grid, open_panels
from .gate_activity import near_high, near_low


@figure_door()
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
    """Draw how the saturation of each unit's gates moved: a panel per gate, an arrow per unit.

    An arrow leads from the shares of (sample, time) at which the gate was near 1 (across) and near 0 (upward) before to
    those after. On the hypotenuse a unit is always at one end; at the origin it never is.

    Parameters
    ----------
    before, after : (sample, time, gate, unit), also with direction
        Two layers of traces (their masks are obeyed), or their ``gates``, of the same gates and units.
    names
        What the two moments are called.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per gate, or a Figure or SubFigure to draw into.
    **arrow
        Properties of matplotlib's Quiver, the arrows.

    Returns
    -------
    1-D array of Axes, one per gate, forward before backward

    Raises
    ------
    InputError
        If the gates or units of the two differ, a keyword is unknown, or ``ax`` has not one Axes per gate.

    References
    ----------
    Karpathy, Johnson, Li 2015, arXiv:1506.02078, fig. 4.
    """
    keywords = checked(arrow, Quiver, figure="saturation_arrows", extra=("width", "headwidth", "headlength", "pivot"))
    pair = [_gates(one) for one in (before, after)]
    _refuse_others(*pair)
    gates = names_of(pair[0], GATE)
    shown = [halves(one) for one in pair]
    panels = open_panels(
        len(gates),
        name="saturation_arrows",
        grid=Grid((2.5, 2.4)),
        halves=[half.name for half in shown[0]],
        ax=ax,
        figure=figure,
    )
    for number, places in enumerate(panels.halves):
        for place, gate in zip(places, gates, strict=True):
            first, last = (_shares(half[number].data.isel({GATE: gates.index(gate)}), gate) for half in shown)
            _draw(place, first, last, gate, keywords)
    head = " · ".join(str(part) for part in (pair[0].attrs.get("layer"), "saturation of the gates, per unit") if part)
    missing = [f"{name}: {note}" for name, one in zip(names, pair, strict=True) if (note := nonfinite_note(one.values))]
    panels.title(title or head, [f"from {names[0]} (ring) to {names[1]} (arrow head)", *missing])
    return panels.result()


def _gates(layer: Any) -> xr.DataArray:
    """The gates, NaN where the layer's mask says that a step is padding."""
    guess = {4: (SAMPLE, TIME, GATE, "unit")}
    array = labelled(variable(layer, "gates", "saturation_arrows"), "saturation_arrows", guess=guess)
    for dim in (GATE, unit_dim(array) or "unit"):
        require_dim(array, dim, "saturation_arrows")
    dataset = dataset_of(layer)
    if dataset is not None and "mask" in dataset and set(dataset["mask"].dims) <= set(array.dims):
        array = array.where(dataset["mask"] != 0)
    return array


def _refuse_others(before: xr.DataArray, after: xr.DataArray) -> None:
    unit = unit_dim(before)
    kinds = [(names_of(one, GATE), one.sizes.get(unit), one.sizes.get("direction")) for one in (before, after)]
    if kinds[0] != kinds[1]:
        raise InputError(
            message(
                "plot.saturation_arrows compares the same gates and units.",
                got=" and ".join(f"{count} units with gates {', '.join(gates)}" for gates, count, _ in kinds),
                hint="trace the same layer of the model twice",
            )
        )


def _shares(gate: xr.DataArray, name: str) -> Numbers:
    """(unit, 2): share near 1, share near 0."""
    unit = unit_dim(gate)
    values = gate.transpose(..., unit).values.reshape(-1, gate.sizes[unit])
    low = -0.9 if name == "candidate" else 0.1
    shut, opened = saturation_share(values, axis=0, low=low, high=0.9, xp=np)
    return np.stack([opened, shut], axis=1)


def _draw(ax: Any, before: Numbers, after: Numbers, gate: str, keywords: dict[str, Any]) -> None:
    """An arrow per unit, a ring where it begins."""
    ax.plot([0, 1], [1, 0], color="#909090", linewidth=0.8, gid="limit")
    size = float(np.clip(900 / len(before), 3, 18))
    ax.scatter(*before.T, s=size, facecolor="none", edgecolor="#0072b2", linewidth=0.7, clip_on=False, gid="before")
    way = after - before
    look = {
        "color": "#d55e00",
        "alpha": 0.75 if len(before) <= 64 else 0.4,
        "width": 0.007,
        "zorder": 3,
        "gid": "after",
    }
    arrows = ax.quiver(*before.T, *way.T, **{"angles": "xy", "scale_units": "xy", "scale": 1.0, **look, **keywords})
    arrows.set_clip_on(False)
    arrows.set_in_layout(False)  # a unit without a share has no place
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    ax.set_title(gate if gate == "candidate" else f"{gate} gate", fontsize="small", pad=3)
    ax.set_xlabel(near_high(gate), fontsize="small")
    ax.set_ylabel(near_low(gate), fontsize="small")
    ax.tick_params(labelsize="small")
