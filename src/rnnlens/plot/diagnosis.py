"""``diagnosis``: figure of the measurements behind a diagnosis."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..errors import InputError
from ..results.diagnosis import Diagnosis
from . import _axes, _frame
from ._call import drawing
from ._data import Numbers

_BLUE, _GREEN, _ORANGE, _PINK = "#0072b2", "#009e73", "#d55e00", "#cc79a7"
#: Lower end of the axis as a share of the gradient; smaller shares are marked by an arrow.
FLOOR = 1e-5
_THRESHOLD = {"color": "0.45", "linewidth": 0.9, "linestyle": ":"}


@drawing(Line2D)
def diagnosis(
    d: Diagnosis, *, layer: str | None = None, title: str | None = None, ax: Any = None, figure: Any = None, **line: Any
) -> Any:
    """Draw the measurements of a diagnosis, a panel for each that was made.

    Use of older steps over the number of steps kept, with the memory in use; the benefit of these steps; the residual
    test by lag; the gradient that survives k steps back, median and quartiles; time constants of the gates.

    Parameters
    ----------
    d
        Result of ``rl.diagnose``.
    layer
        Layer of the panels on gradient and gates; the first by default.

    Returns
    -------
    1-D array of Axes: use, benefit, residual test, gradient, time constants, without those that were not measured
    """
    if not isinstance(d, Diagnosis):
        hint = "rl.plot.diagnosis(rl.diagnose(model, x, y))"
        raise InputError("plot.diagnosis draws a diagnosis.", got=type(d).__name__, hint=hint)
    model = d["model"]
    node = d[layer or next(name for name in d if name != "model")]
    node = node.isel(direction=0) if "direction" in node.dims else node
    drawings: list[tuple[Callable[[Any, xr.Dataset, dict[str, Any]], None], xr.Dataset]] = [(_use, model)]
    drawings += [(_benefit, model)] * _measured(model, "benefit")
    drawings += [(_residual_test, model)] * ("missed" in model)
    drawings += [(_gradient, node)] * any(name in node for name in ("kappa", "adjoint"))
    drawings += [(_time_constants, node)] * ("timescale" in node)
    columns = len(drawings) if len(drawings) < 4 else 2 if len(drawings) == 4 else 3
    shape = (-(-len(drawings) // columns), columns)
    panels = _frame.open_panels("diagnosis", len(drawings), ax, figure, size=(4.0, 2.8), margin=(0.6, 1.0), shape=shape)
    for place, (draw, data) in zip(panels.axes, drawings, strict=True):
        draw(place, data, line)
        place.title.set_fontsize("medium")
    sentence = next(iter(d.sentences.values()))
    headline, *rest = re.split(r"(?<=\.)\s+(?=[A-Z])", sentence, maxsplit=1)
    drawn = panels.titled(title or headline)
    for owner in panels.owners:
        owner._suptitle.set_fontweight("bold")
        if rest and title is None:
            width = int(13 * owner.bbox.width / panels.figure.dpi)
            owner.supxlabel(textwrap.fill(rest[0][:1].upper() + rest[0][1:], width), fontsize="small", color="0.25")
    return drawn


def _measured(model: xr.Dataset, name: str) -> bool:
    """Return whether a curve over the context was measured."""
    return name in model and bool(model[name].size) and bool(np.isfinite(model[name].values).any())


def _over_context(ax: Any, model: xr.Dataset, name: str, colour: str, keywords: dict[str, Any]) -> None:
    """Draw a measure over the number of steps kept, with its confidence interval."""
    context, values, band = model["context"].values, model[name].values, model[f"{name}_interval"].values
    look = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.6}
    ax.plot(context, values, **{"gid": name, **look, **keywords})
    _axes.draw_band(ax, context, band[:, 0], band[:, 1], colour, alpha=0.15, gid=None)
    ax.set_xlim(0, float(model["steps"]) + 0.5)
    ax.set_xlabel("steps kept, counted back from the last")
    _axes.whole_numbers(ax, "x")


def _use(ax: Any, model: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the use of older steps, with the 5 % threshold and the memory in use."""
    if _measured(model, "use"):
        _over_context(ax, model, "use", _BLUE, keywords)
        ax.axhline(0.05, **_THRESHOLD)
        _axes.write(ax, "5 %", (0, 0.05), (3, 2), over=ax.get_yaxis_transform(), ha="left", va="baseline")
    ax.set(ylabel="use (share of the variance)", title="Use of older steps")
    ax.set_ylim(0, max(1.0, float(np.nanmax(model["use"].values, initial=0.0))) * 1.08)
    n = float(model["memory"])
    if not (bool(model.attrs["known"]) and np.isfinite(n)):
        ax.annotate("memory unknown", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.4")
        return
    words = f"memory in use: {'≥ ' if model.attrs['censored'] else ''}{n:.0f}"
    ax.axvline(n, color="0.3", linewidth=0.9, gid="memory")
    side, offset = ("left", 4) if 2 * n < float(model["steps"]) else ("right", -4)
    _axes.write(ax, words, (n, 0.97), (offset, 0), over=ax.get_xaxis_transform(), ha=side, va="top", fontsize="small")


def _benefit(ax: Any, model: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the performance lost when older steps are exchanged."""
    _over_context(ax, model, "benefit", _GREEN, keywords)
    ax.set(ylabel="benefit (share of the score)", title="Performance lost when older steps are replaced")
    top = float(np.nanmax(model["benefit"].values))
    ax.set_ylim(-0.05, min(max(top, 1.0), 1.5) * 1.1)
    if top > 1.5:  # the benefit can exceed 1 if predictions are overconfident
        _axes.write(ax, f"up to {top:.1f}", (0.02, 0.97), over="axes fraction", ha="left", va="top")


def _residual_test(ax: Any, model: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the covariance of errors and past inputs by lag, relative to the threshold of the test."""
    shares = model["missed"].values / float(model["missed_threshold"])
    ax.vlines(np.arange(shares.size), 0, shares, color=_ORANGE, linewidth=1.4, gid="missed")
    ax.axhline(1, **_THRESHOLD)
    _axes.write(ax, "threshold: 99 % of chance", (1, 1), (-2, 2), over=ax.get_yaxis_transform(), va="baseline")
    ax.set_ylim(0, max(float(shares.max()), 1.0) * 1.2)
    ax.set(xlabel="lag in steps", ylabel="share of the threshold", title="Do the errors depend on past inputs?")
    _axes.step_axis(ax, "x", np.arange(shares.size), time=False)


def _gradient(ax: Any, node: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the gradient surviving k steps back: of a random cotangent of the final state, and of the loss."""
    curves = (("kappa", _BLUE, "of any final state (state transfer)"), ("adjoint", _PINK, "of the loss, by own peak"))
    for name, colour, label in curves:
        if name in node:
            look = {"label": label, "gid": name, "color": colour, "linewidth": 1.8, **keywords}
            _share_line(ax, node[name].values, (node[f"{name}_low"].values, node[f"{name}_high"].values), look)
    ax.axhline(1e-4, **_THRESHOLD)
    _axes.write(ax, "vanished: 1e-4", (1, 1e-4), (-2, 2), over=ax.get_yaxis_transform(), va="baseline")
    ax.set_yscale("log")
    ax.set_ylim(bottom=FLOOR)
    _axes.log_ticks(ax)
    ax.set(xlabel="k, steps back", ylabel="share of the gradient", title="Gradient surviving k steps back")
    ax.legend(fontsize="x-small", loc="best")
    _axes.whole_numbers(ax, "x")


def _share_line(ax: Any, values: Numbers, band: tuple[Numbers, Numbers], look: dict[str, Any]) -> None:
    """Draw one curve over lag with its band, and an arrow where it falls below the axis."""
    lag = np.arange(values.size)
    ax.plot(lag, np.where(values > 0, np.maximum(values, FLOOR * 1e-2), np.nan), **look)
    low, high = (np.maximum(end, FLOOR * 1e-2) for end in band)
    _axes.draw_band(ax, lag, low, high, look["color"], alpha=0.15, gid=None)
    below = np.flatnonzero(~(values > FLOOR))
    if below.size:
        marks = {"marker": "v", "markersize": 6, "linestyle": "", "clip_on": False, "gid": "below"}
        ax.plot(below[:1], [FLOOR], color=look["color"], **marks)
        at = (float(below[0]), FLOOR)
        _axes.write(ax, f"below {_axes.short_number(FLOOR)}", at, (0, 9), ha="center", va="baseline", gid="below")


def _time_constants(ax: Any, node: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the time constant of each unit's keeping gate, in ascending order."""
    values = np.sort(node["timescale"].values)
    finite = np.where(np.isfinite(values), values, np.nan)
    look = {"color": _BLUE, "marker": ".", "markersize": 5, "linewidth": 0.8}
    ax.plot(np.arange(values.size), finite, **{"gid": "timescale", **look, **keywords})
    _axes.log_values(ax)
    ax.set(xlabel="unit, in ascending order", ylabel="steps", title="Time constants of the gates")
    _axes.whole_numbers(ax, "x")
