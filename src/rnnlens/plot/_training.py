"""The axis that counts training steps, which figures of a run share, and what is drawn along it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from ..arguments import as_numbers
from ..errors import InputError, message, shown
from ._colour import line_colours
from ._data import Numbers, positions
from ._marks import log_ticks
from ._panels import mark_steps, whole_numbers, wrapped_label

#: Values of a line that span this factor are drawn on a logarithmic axis.
_RANGE = 10.0
#: How many times as far apart late records lie for training to be drawn on one.
_DENSER = 8.0


def edges_of(places: Numbers) -> Numbers:
    """Where cells meet whose middles these are: half-way between neighbours."""
    places = np.asarray(places, dtype=float)
    if len(places) < 2:
        return np.array([places[0] - 0.5, places[0] + 0.5])
    middles = (places[1:] + places[:-1]) / 2
    return np.concatenate([[2 * places[0] - middles[0]], middles, [2 * places[-1] - middles[-1]]])


def is_denser_early(steps: Numbers) -> bool:
    """Whether records at the end lie many times as far apart as at the start, as those at powers of two do."""
    gaps = np.diff(np.asarray(steps, dtype=float))
    if len(gaps) < 4 or np.any(gaps <= 0):
        return False
    third = max(1, len(gaps) // 3)
    return bool(np.median(gaps[-third:]) >= _DENSER * np.median(gaps[:third]))


def training_axis(ax: Any, steps: Numbers) -> None:
    """Linear, or logarithmic where records are denser early (step 0, before training, has room at its left end)."""
    if is_denser_early(steps):
        first, last = float(steps[steps > 0].min()), float(steps.max())
        ax.set_xscale("symlog", linthresh=first, linscale=0.5)
        decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        some = (1, 2, 5) if len(decades) < 5 else (1,)
        ticks = [factor * 10.0**k for k in decades for factor in some]
        shown_ticks = [0.0, *(tick for tick in ticks if first <= tick <= last)]
        ax.set_xticks(shown_ticks, [f"{tick:g}" for tick in shown_ticks])
        ax.minorticks_off()
    else:
        whole_numbers(ax, "x")
    ax.tick_params(labelsize="small")


def scalar_line(ax: Any, scalar: xr.DataArray, *, label: str | None = None, colour: Any = None) -> None:
    """One number over training; positive ones that span more than a decade on a logarithmic axis."""
    steps, values = positions(scalar, "step"), np.asarray(scalar.values, dtype=float)
    bad = ~np.isfinite(values)
    name = str(scalar.name)
    look = {"color": colour or line_colours(1)[0], "linewidth": 1.3, "marker": "o" if len(steps) < 12 else None}
    line = np.where(bad, np.nan, values)
    ax.plot(steps, line, label=label or name, gid=f"scalar {name}", markersize=3, **look)
    mark_steps(ax, steps[bad])
    if label is None:
        ax.set_ylabel(name.rpartition("/")[2].replace("_", " "), fontsize="small")
        log_where_it_helps(ax, [values])


def log_where_it_helps(ax: Any, lines: Sequence[Numbers], *, most: float = _RANGE) -> bool:
    """A logarithmic value axis where all that is finite is positive and spans a decade."""
    values = np.concatenate([np.ravel(line) for line in lines])
    values = values[np.isfinite(values)]
    if not values.size or values.min() <= 0 or values.max() < most * values.min():
        return False
    ax.set_yscale("log")
    log_ticks(ax)
    return True


def moments_of(moments: Mapping[str, float] | None, steps: Numbers) -> dict[str, float]:
    """Named moments of training, each within the run.

    Raises
    ------
    InputError
        If it is no mapping from names to steps of this run.
    """
    if moments is None:
        return {}
    if not isinstance(moments, Mapping):
        expected = 'names by step: {"the first digit is right": 300}'
        raise InputError(message("moments= names moments of training.", got=shown(moments), expected=expected))
    found = {str(name): float(as_numbers("moments", [step])[0]) for name, step in moments.items()}
    for name, step in found.items():
        if not steps.min() <= step <= steps.max():
            expected = f"{steps.min():g} to {steps.max():g}"
            raise InputError(
                message(f"The moment {name!r} is not in this run.", got=f"step {step:g}", expected=expected)
            )
    return found


def mark_moments(axes: Sequence[Any], moments: Mapping[str, float]) -> None:
    """A line through every panel at each moment; its number at the top of the first."""
    numbers: dict[float, list[str]] = {}
    for number, step in enumerate(moments.values(), start=1):
        numbers.setdefault(step, []).append(str(number))
    for step, some in numbers.items():
        for ax in axes:
            ax.axvline(step, color="#111111", linewidth=0.9, linestyle=(0, (1, 2)), gid="moment")
        axes[0].annotate(
            ", ".join(some),
            (step, 1.0),
            xycoords=axes[0].get_xaxis_transform(),
            xytext=(0, -3),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize="x-small",
            fontweight="bold",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            gid="moment",
        )


def under_training(figure: Any, moments: Mapping[str, float]) -> str:
    """What stands below the axis of training: its name, and the numbered moments, in lines that fit the figure."""
    named = "; ".join(f"{n} {name} (step {step:g})" for n, (name, step) in enumerate(moments.items(), start=1))
    lines = wrapped_label(named, 0.9 * float(figure.bbox.width / figure.dpi))
    return f"training step\n{lines}" if named else "training step"
