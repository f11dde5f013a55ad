"""``weight_lags``: which steps the gradient of a weight is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..errors import InputError, message
from ..measures.lags import lag_shares
from ..recurrence.measures import safe_norm
from ..vocabulary import BACKWARD, DIRECTION, GATE, TIME, UNIT
from ._colour import line_colours
from ._data import Numbers, labelled, names_of, nonfinite_note
from ._door import figure as figure_door
from ._keywords import checked
from ._layers import dataset_of
from ._marks import step_axis
from ._panels import Grid, open_panels
from ._weights import drawing_order


@figure_door()
def weight_lags(
    weights: Any,
    *,
    delays: Any = (),
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw from how far back dL/dW comes: its cumulative share against the lag, a line per gate, a panel per weight.

    What a step adds to the gradient is measured by its norm. A line that is near 1 at once says that the weight learns
    from the last steps only, whatever the states remember.

    Parameters
    ----------
    weights
        One layer of ``rl.weights(model, x, y, by_time=True)``, also with ``measure="norm"``: variables such as
        ``recurrent_kernel_grad (time, unit_in, gate, unit)`` or ``recurrent_kernel_grad_norm (time, gate)``.
    delays : int or sequence of int
        Lags at which the task is known to need its input, marked.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per weight and direction, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D.

    Returns
    -------
    1-D array of Axes, weight by weight, forward before backward

    Raises
    ------
    InputError
        If no gradient has a time axis, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    keywords = checked(line, Line2D, figure="weight_lags")
    dataset = dataset_of(weights)
    given = [] if dataset is None else [(name, _by_time(dataset, name)) for name in _weights_of(dataset)]
    found = {name: array for name, array in given if array is not None}
    if dataset is None or not found:
        raise InputError(
            message(
                "plot.weight_lags needs gradients of the weights by time.",
                got=type(weights).__name__
                if dataset is None
                else f"variables {', '.join(map(str, dataset.data_vars))}",
                expected="recurrent_kernel_grad (time, unit_in, gate, unit), or its norm (time, gate)",
                hint='pass rl.weights(model, x, y, by_time=True)["lstm"]',
            )
        )
    first = next(iter(found.values()))
    ways = names_of(first, DIRECTION) if DIRECTION in first.dims else [None]
    size = (4.6, 3.0) if len(found) == 1 else (3.0, 2.3)
    panels = open_panels(len(found), name="weight_lags", grid=Grid(size), halves=ways, ax=ax, figure=figure)
    for number, (places, way) in enumerate(zip(panels.halves, ways, strict=True)):
        for place, (name, array) in zip(places, found.items(), strict=True):
            one = array.isel({DIRECTION: number}) if way else array
            _draw(place, one, way == BACKWARD or dataset.attrs.get("direction") == BACKWARD, delays, keywords)
            place.set_title(name.replace("_", " "), fontsize="small", pad=3)
    panels.label("lag (steps before the last)", "share of dL/dW, cumulative")
    if panels.owners:
        panels.outer_ticks_only()
    _legend(panels.axes, panels.owners)
    everything = np.concatenate([array.values.reshape(-1) for array in found.values()])
    head = " · ".join(str(part) for part in (dataset.attrs.get("layer"), "where dL/dW comes from") if part)
    panels.title(title or head, [nonfinite_note(everything)])
    return panels.result()


def _weights_of(dataset: xr.Dataset) -> list[str]:
    """Names of the weights that have a gradient here, in drawing order."""
    gradients = [str(name).removesuffix("_norm") for name in dataset.data_vars]
    found = {name.removesuffix("_grad") for name in gradients if name.endswith("_grad")}
    order = drawing_order()
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))


def _by_time(dataset: xr.Dataset, name: str) -> xr.DataArray | None:
    """(direction, time, gate) norms of what each step adds, of a weight; None where it has no gradient by time."""
    for key in (f"{name}_grad_norm", f"{name}_grad"):
        if key in dataset and TIME in dataset[key].dims:
            array = labelled(dataset[key], "weight_lags")
            rows = [str(d) for d in array.dims if d not in (TIME, GATE, DIRECTION)]
            kept = [d for d in array.dims if d not in rows]
            if rows and not (rows == [UNIT] and GATE not in array.dims and key.endswith("_norm")):
                axes = tuple(array.get_axis_num(d) for d in rows)
                norms = safe_norm(array.values, axis=axes, xp=np)
                coords = {d: array.coords[d] for d in kept if d in array.coords}
                array = xr.DataArray(norms, dims=kept, coords=coords)
            return array if GATE in array.dims else array.expand_dims({GATE: [""]})
    return None


def _draw(ax: Any, norms: xr.DataArray, runs_back: bool, delays: Numbers, keywords: dict[str, Any]) -> None:
    """The gates of one weight."""
    names = names_of(norms, GATE)
    shares = lag_shares(norms.transpose(TIME, GATE).values, runs_back=runs_back)
    lag = np.arange(shares.shape[1])
    for name, share, colour in zip(names, shares, line_colours(len(names)), strict=True):
        look = {"color": colour, "linewidth": 1.3, "label": name or "all", "gid": f"share {name}".strip()}
        look["marker"] = "o" if len(lag) == 1 else None
        ax.plot(lag, share, **{**look, **keywords})
    if not np.isfinite(shares).all():
        silent = [name for name, share in zip(names, shares, strict=True) if not np.isfinite(share).all()]
        words = "no share: " + ", ".join(silent)
        ax.annotate(words, (0.97, 0.05), xycoords="axes fraction", ha="right", fontsize="x-small", gid="silent")
    for delay in delays:
        ax.axvline(delay, color="#111111", linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.8, gid="delay")
    ax.axhline(1, color="#909090", linewidth=0.6, zorder=0.5)
    ax.set(xlim=(-0.5, len(lag) - 0.5), ylim=(-0.03, 1.05))
    step_axis(ax, "x", lag, time=False)
    ax.tick_params(labelsize="small")


def _legend(axes: list[Any], owners: list[Any]) -> None:
    handles, names = axes[0].get_legend_handles_labels()
    if names != ["all"]:
        where = {"loc": "outside right center"} if owners else {"loc": "best"}
        (owners[-1] if owners else axes[0]).legend(handles, names, fontsize="small", **where)
