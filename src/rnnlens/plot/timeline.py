"""``timeline``: the numbers of a run over training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..arguments import anything, names
from ..errors import InputError, did_you_mean, message, shown
from ._colour import line_colours
from ._data import nonfinite_note, positions
from ._door import figure as figure_door
from ._keywords import checked
from ._panels import Grid, open_panels
from ._training import (
    edges_of,
    log_where_it_helps,
    mark_moments,
    moments_of,
    scalar_line,
    training_axis,
    under_training,
)

#: Panels in their order: the last part of a name, and what it is called.
_PANELS = {
    "loss": "loss",
    "accuracy": "accuracy",
    "adjoint": "size of the gradient at the states",
    "reach": "steps that the gradient reaches",
    "decay": "gradient kept per step back",
    "near_0": "share of gates near 0",
    "near_1": "share of gates near 1",
    "dead_units": "share of dead units",
    "weight_norm": "norm of weights",
    "direct": "size of the direct gradient",
    "weight_grad_norm": "norm of the gradient of weights",
    "grad_norm": "norm of the gradient of all weights",
    "backward_passes": "backward passes accumulated",
}
#: ``lstm/weight_norm/kernel``, ``grad_norm_clipped``: layer, kind, whether it is after clipping, weight.
_NORM = re.compile(
    r"(?:(?P<layer>.+)/)?(?P<kind>weight_norm|weight_grad_norm|grad_norm)(?P<after>_clipped)?(?:/(?P<weight>\w+))?"
)
#: What is no number (NaN) without anything being wrong: a gradient that is largest at its far end has no fall.
_MAY_BE_NONE = {"decay": "does not fade"}
#: The most names that a panel has room for, and one column beside it.
_INSIDE, _BESIDE = 4, 12
_SHARES = ("near_0", "near_1", "dead_units", "accuracy")


@figure_door(select=names, moments=anything)
def timeline(
    run: Any,
    select: Any = None,
    *,
    moments: Mapping[str, float] | None = None,
    max_panels: int = 16,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw the numbers of a run over training: a panel for each kind, a line for each layer, gate or weight.

    Parameters
    ----------
    run
        A followed training: what ``rl.open`` returns for it.
    select
        Names of scalars, or patterns of them: ``"loss"``, ``"lstm/*"``, ``"*/reach"``; all by default.
    moments
        Names of moments of training, by step; marked in every panel.
    max_panels
        More kinds than this are an error that says how to select.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per panel, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D.

    Returns
    -------
    1-D array of Axes, one per kind of number

    Raises
    ------
    InputError
        If nothing is selected, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    keywords = checked(line, Line2D, figure="timeline")
    groups = _groups(_selected(run, select))
    if len(groups) > max_panels:
        got, hint = f"{len(groups)} panels", 'select="*/reach", or raise max_panels='
        raise InputError(message("Too many kinds of numbers for one figure.", got=got, hint=hint))
    columns = 1 if len(groups) < 4 else 2
    shape = (-(-len(groups) // columns), columns)
    panels = open_panels(len(groups), name="timeline", grid=Grid((4.6, 1.6), (1.0, 0.9), shape), ax=ax, figure=figure)
    steps = positions(next(iter(next(iter(groups.values())).values())), "step")
    marks = moments_of(moments, steps)
    for place, (kind, lines) in zip(panels.axes, groups.items(), strict=True):
        _draw(place, kind, lines, keywords)
        _name(place, lines, beside=bool(panels.owners) and len(lines) > _INSIDE)
        training_axis(place, steps)
        place.set_xlim(*edges_of(steps)[[0, -1]])
    mark_moments(panels.axes, marks)
    panels.label(under_training(panels.axes[0].figure, marks), "")
    values = np.concatenate([one.values for lines in groups.values() for one in lines.values()])
    panels.title(title or "training, record by record", [nonfinite_note(values[~np.isnan(values)])])
    return panels.result()


def _selected(run: Any, select: Any) -> dict[str, xr.DataArray]:
    scalars = getattr(run, "scalars", None)
    if not isinstance(scalars, xr.Dataset):
        expected = 'a followed training: rl.open("runs/a.zarr")'
        raise InputError(message("plot.timeline draws a run.", got=shown(run), expected=expected))
    present = list(map(str, scalars.data_vars))
    patterns = ["*"] if select is None else [select] if isinstance(select, str) else list(select)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in present):
            hint = did_you_mean(pattern, present) if present else "nothing was recorded in this run yet"
            raise InputError(message(f"No scalar of this run is called {pattern!r}.", hint=hint))
    chosen = [name for name in present if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return {name: scalars[name] for name in chosen}


def _groups(chosen: Mapping[str, xr.DataArray]) -> dict[str, dict[str, xr.DataArray]]:
    """By kind, in the order of the panels; within a kind by what is left of the name."""
    found: dict[str, dict[str, xr.DataArray]] = {}
    for name, scalar in chosen.items():
        kind, rest = _parted(name)
        found.setdefault(kind, {})[rest] = scalar
    known = [kind for kind in _PANELS if kind in found]
    return {kind: found[kind] for kind in [*known, *(kind for kind in found if kind not in known)]}


def _parted(name: str) -> tuple[str, str]:
    """``lstm/weight_norm/kernel``: a kind, and what tells its lines apart."""
    norm = _NORM.fullmatch(name)
    if norm is not None:
        words = (norm["layer"], norm["weight"], norm["after"] and "clipped")
        return norm["kind"], " ".join(word for word in words if word)
    rest, _, kind = name.rpartition("/")
    return kind, rest.replace("/", " ")


def _draw(ax: Any, kind: str, lines: Mapping[str, xr.DataArray], keywords: Mapping[str, Any]) -> None:
    for (rest, scalar), colour in zip(lines.items(), line_colours(len(lines)), strict=True):
        drawn = scalar.dropna("step") if kind in _MAY_BE_NONE else scalar
        none = "" if drawn.sizes["step"] else f" ({_MAY_BE_NONE[kind]})"
        scalar_line(ax, drawn, label=(rest or kind.replace("_", " ")) + none, colour=colour)
        ax.lines[-1].set(**keywords)
    if kind in _SHARES:
        ax.set_ylim(-0.03, 1.03)
    else:
        log_where_it_helps(ax, [scalar.values for scalar in lines.values()])
    ax.set_title(_PANELS.get(kind, kind.replace("_", " ")), fontsize="small", pad=3)


def _name(ax: Any, lines: Mapping[str, xr.DataArray], *, beside: bool) -> None:
    """A legend where there is more than one line, or one of a layer; many names stand beside the panel."""
    if len(lines) > 1 or next(iter(lines)):
        where = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.05)} if beside else {"loc": "best"}
        columns = 1 + len(lines) // _BESIDE if beside else 1 if len(lines) <= _INSIDE else 2
        ax.legend(fontsize="x-small", frameon=False, ncols=columns, **where)
