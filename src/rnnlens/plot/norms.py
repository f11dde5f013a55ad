"""``weight_norms``: the norms of weights while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..errors import InputError, message
from ._colour import line_colours
from ._data import Numbers, axis_label, labelled, names_of, nonfinite_note, positions
from ._door import figure as figure_door
from ._keywords import checked
from ._lines import MOST_NAMED, log_limits
from ._marks import End, mark_below, name_ends, step_axis
from ._panels import Grid, mark_steps, open_panels

#: Names of the dimension that counts training steps.
ROWS = ("step", "epoch", "batch", "update", "row", "time")


@figure_door()
def weight_norms(
    history: Any,
    *,
    log: bool = True,
    shared: bool = True,
    max_panels: int = 24,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw how the norms of weights change over training: a panel per layer, a line per weight.

    Parameters
    ----------
    history
        What :func:`rnnlens.weight_norms` gave, called once or often: a DataArray or Dataset whose training dimension is
        named ``step``, ``epoch``, ``batch``, ``update`` or ``row`` (or comes first); or a mapping from names to one
        number per training step. ``layer/weight`` names make the panels.
    log
        Logarithmic value axis where the norms span a factor of ten or more; linear below that, where its labels would
        say nothing.
    shared
        Same value axis in all panels.
    max_panels
        More layers than this are an error that says how to select.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per layer, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D.

    Returns
    -------
    1-D array of Axes, one per layer

    Raises
    ------
    InputError
        If there is no history in ``history``, a keyword is unknown, or ``ax`` has not one Axes per layer.
    """
    keywords = checked(line, Line2D, figure="weight_norms")
    lines, steps, words = _lines_of(history)
    layers: dict[str, dict[str, Numbers]] = {}
    for (layer, weight), values in lines.items():
        layers.setdefault(layer, {})[weight] = values
    if len(layers) > max_panels:
        raise InputError(
            message(
                "Too many layers for one figure.",
                got=f"{len(layers)} layers",
                expected=f"at most {max_panels}",
                hint="select layers, or raise max_panels=",
            )
        )
    size = (5.0, 3.0) if len(layers) == 1 else (3.4, 2.1)
    drawn: dict[str, dict[str, Any]] = {}
    panels = open_panels(len(layers), name="weight_norms", grid=Grid(size, margin=(1.4, 1.0)), ax=ax, figure=figure)
    for place, (layer, members) in zip(panels.axes, layers.items(), strict=True):
        drawn[layer] = _draw(place, steps, members, keywords)
        place.set_title(layer, fontsize="small", pad=3)
    everything = np.concatenate(list(lines.values()))
    used = False
    for place, (layer, members) in zip(panels.axes, layers.items(), strict=True):
        mine = everything if shared else np.concatenate(list(members.values()))
        used = _scale(place, mine, log=log) or used
        _name(place, steps, members, drawn[layer], outside=bool(panels.owners))
    panels.label(words, "norm" + (", log scale" if used else ""))
    if shared and panels.owners:
        panels.outer_ticks_only()
    panels.title(title or "norms of weights while training", [nonfinite_note(everything)])
    return panels.result()


def _lines_of(history: Any) -> tuple[dict[tuple[str, str], Numbers], Numbers, str]:
    """Values over training by layer and weight, the steps, and the words for them."""
    if hasattr(history, "dataset") and isinstance(history.dataset, xr.Dataset):
        history = history.dataset
    if isinstance(history, xr.Dataset | xr.DataArray):
        return _labelled_lines(history)
    if isinstance(history, Mapping) and history:
        found = {str(name): np.atleast_1d(labelled(values, "weight_norms").values) for name, values in history.items()}
        lengths = {values.shape for values in found.values()}
        if len(lengths) == 1 and len(next(iter(lengths))) == 1:
            return (
                {_parted(name): values for name, values in found.items()},
                np.arange(next(iter(lengths))[0]),
                "training step",
            )
    raise InputError(
        message(
            "plot.weight_norms draws a history of norms.",
            got=type(history).__name__,
            expected="a DataArray or Dataset over training steps, or a mapping from names to equally long sequences",
            hint="history = rl.weight_norms(model, history=history) after every epoch",
        )
    )


def _parted(name: str) -> tuple[str, str]:
    """``outer/lstm/kernel``: layer and weight."""
    layer, _, weight = name.rpartition("/")
    return layer, weight


def _labelled_lines(history: xr.Dataset | xr.DataArray) -> tuple[dict[tuple[str, str], Numbers], Numbers, str]:
    arrays = {str(n): a for n, a in history.data_vars.items()} if isinstance(history, xr.Dataset) else {"": history}
    if not arrays:
        raise InputError(message("plot.weight_norms draws a history of norms.", got="nothing in it"))
    first = next(iter(arrays.values()))
    dims = [str(d) for d in first.dims]
    if not dims:
        raise InputError(
            message("plot.weight_norms draws a history of norms.", got="norms without a training dimension")
        )
    along = next((name for name in ROWS if name in dims), dims[0])
    found: dict[tuple[str, str], Numbers] = {}
    for name, array in arrays.items():
        flat = labelled(array, "weight_norms")
        if along not in flat.dims:
            got = f"{name!r} with dimensions ({', '.join(map(str, flat.dims))})"
            expected = f"{along!r} among them, as in the others"
            raise InputError(message("plot.weight_norms draws a history of norms.", got=got, expected=expected))
        others = [d for d in flat.dims if d != along]
        names = [""]
        for dim in others:
            names = [f"{before} {label}".strip() for before in names for label in names_of(flat, dim)]
        values = flat.transpose(*others, along).values.reshape(len(names), -1)
        kept = [
            (label, row) for label, row in zip(names, values, strict=True) if not np.isnan(row).all() or len(names) == 1
        ]
        layer, weight = _parted(name)
        found |= {(layer, f"{weight} {label}".strip()): row for label, row in kept}
    return found, positions(first, along), axis_label(first, along)


def _draw(ax: Any, steps: Numbers, members: dict[str, Numbers], keywords: dict[str, Any]) -> dict[str, Any]:
    """Lines of one layer, by name."""
    drawn = {}
    for (name, values), colour in zip(members.items(), line_colours(len(members)), strict=True):
        bad = ~np.isfinite(values)
        look = {"color": colour, "linewidth": 1.3, "marker": "o" if len(steps) < 12 else None, "markersize": 3}
        label = name.replace("_", " ")
        look |= {"label": label, "gid": f"norm {name}"}
        (drawn[name],) = ax.plot(steps, np.where(bad, np.nan, values), **{**look, **keywords})
        mark_steps(ax, steps[bad])
    room = 0.02 * float(np.ptp(steps)) or 0.5
    ax.set_xlim(float(steps.min()) - room, float(steps.max()) + room)
    if steps.dtype.kind in "iu":
        step_axis(ax, "x", steps, time=False)
    ax.tick_params(labelsize="small")
    return drawn


def _scale(ax: Any, values: Numbers, *, log: bool) -> bool:
    """Value axis; whether it is logarithmic."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if not finite.size:
        return False
    if log and positive.size and positive.max() >= 10 * positive.min():
        ax.set_ylim(float(positive.min()) / 1.3, float(positive.max()) * 1.3)
        ax.set_yscale("log")
        log_limits(ax, finite, room=1.3)
        return True
    low, high = float(finite.min()), float(finite.max())
    # From 0 where 0 is near; a norm that changes by a little is looked at from near by.
    ax.set_ylim(
        min(0.0, low) if low < 0.5 * high else low - 0.15 * (high - low or high), high + 0.08 * (high - low or high)
    )
    return False


def _name(ax: Any, steps: Numbers, members: dict[str, Numbers], drawn: dict[str, Any], *, outside: bool) -> None:
    """Names at the ends of few lines, a legend for many; what is below a logarithmic axis."""
    if ax.get_yscale() == "log":
        for name, values in members.items():
            mark_below(ax, steps, values, drawn[name].get_color())
    named = {name: values for name, values in members.items() if name}
    if not 0 < len(named) <= MOST_NAMED:
        if named:
            ax.legend(fontsize="x-small", loc="best")
        return
    found = []
    for name, values in named.items():
        at = np.flatnonzero(np.isfinite(values))
        y = float(values[at[-1]]) if at.size else float("nan")
        found.append(End(float(steps[-1]), y, name.replace("_", " "), drawn[name].get_color()))
    name_ends(ax, found, outside=outside)
