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
from ._panels import Grid, log_values, mark_steps, open_panels, whole_numbers

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
        Logarithmic value axis.
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
    panels = open_panels(len(layers), name="weight_norms", grid=Grid(size, margin=(1.4, 1.0)), ax=ax, figure=figure)
    for place, (layer, members) in zip(panels.axes, layers.items(), strict=True):
        _draw(place, steps, members, keywords, log=log)
        place.set_title(layer, fontsize="small", pad=3)
    everything = np.concatenate(list(lines.values()))
    if shared:
        _share(panels.axes, everything, log=log)
    panels.label(words, "norm" + (", log scale" if log else ""))
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


def _draw(ax: Any, steps: Numbers, members: dict[str, Numbers], keywords: dict[str, Any], *, log: bool) -> None:
    """Lines of one layer."""
    for (name, values), colour in zip(members.items(), line_colours(len(members)), strict=True):
        bad = ~np.isfinite(values)
        look = {"color": colour, "linewidth": 1.3, "marker": "o" if len(steps) < 12 else None, "markersize": 3}
        ax.plot(steps, np.where(bad, np.nan, values), **{"label": name, "gid": f"norm {name}", **look, **keywords})
        mark_steps(ax, steps[bad])
    if log:
        log_values(ax)
    if steps.dtype.kind in "iu":
        whole_numbers(ax, "x")
    ax.tick_params(labelsize="small")
    if any(members):
        ax.legend(fontsize="x-small", loc="best")


def _share(axes: list[Any], values: Numbers, *, log: bool) -> None:
    usable = values[np.isfinite(values) & ((values > 0) | (not log))]
    if usable.size:
        low, high = float(usable.min()), float(usable.max())
        limits = (low / 1.3, high * 1.3) if log else (min(0.0, low), high * 1.05 or 1.0)
        for ax in axes:
            ax.set_ylim(*limits)
