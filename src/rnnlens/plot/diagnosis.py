"""``diagnosis``: four panels that bear out the sentence of a diagnosis."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..errors import InputError, message
from ..results.diagnosis import Diagnosis
from ._axes import log_ticks, power_of_ten, whole_numbers
from ._call import drawing
from ._data import Numbers
from ._frame import Grid, open_panels

_USE, _BENEFIT, _MISSED, _KAPPA, _ADJOINT = "#0072b2", "#009e73", "#d55e00", "#0072b2", "#cc79a7"
#: Decades below 1 that the panel of the state transfer shows.
_DEEPEST = 12


@drawing(Line2D)
def diagnosis(
    d: Diagnosis, *, layer: str | None = None, title: str | None = None, ax: Any = None, figure: Any = None, **line: Any
) -> Any:
    """Draw what a diagnosis rests on.

    Use and benefit of older inputs over the context kept, with the memory n; what is missed, by lag; the state transfer
    and the output's adjoint by lag, median and quartiles; time constants of the gates.

    Parameters
    ----------
    d
        What ``rl.diagnose`` returns.
    layer
        Of which layer the lower panels are; the first by default.
    title
        Instead of the sentence of the diagnosis.

    Returns
    -------
    1-D array of four Axes

    Raises
    ------
    InputError
        If ``d`` is no diagnosis, a keyword is unknown, or ``ax`` has not four Axes.
    """
    if not isinstance(d, Diagnosis):
        raise InputError(
            message(
                "plot.diagnosis draws a diagnosis.",
                got=type(d).__name__,
                hint="rl.plot.diagnosis(rl.diagnose(model, x, y))",
            )
        )
    panels = open_panels(4, name="diagnosis", grid=Grid((4.6, 3.0), shape=(2, 2)), ax=ax, figure=figure)
    names = [name for name in d if name != "model"]
    node = d[layer or names[0]]
    node = node.isel(direction=0) if "direction" in node.dims else node
    _memory(panels.axes[0], d["model"], line)
    _missed(panels.axes[1], d["model"])
    _transfer(panels.axes[2], node, line)
    _gates(panels.axes[3], node, line)
    panels.title(title or _folded(next(iter(d.sentences.values()))))
    return panels.result()


def _folded(sentence: str, width: int = 110) -> str:
    words, lines = sentence.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _memory(ax: Any, model: xr.Dataset, keywords: dict[str, Any]) -> None:
    context = model["context"].values
    for name, colour, label in (
        ("use", _USE, "use (of the variance)"),
        ("benefit", _BENEFIT, "benefit (of what was learned)"),
    ):
        values, band = model[name].values, model[f"{name}_interval"].values
        if values.size and np.isfinite(values).any():
            look = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.2}
            ax.plot(context, values, **{"label": label, "gid": name, **look, **keywords})
            ax.fill_between(context, band[:, 0], band[:, 1], color=colour, alpha=0.15, linewidth=0)
    ax.axhline(0.05, color="0.6", linewidth=0.7, linestyle=":")
    _mark_memory(ax, model)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    if context.size:
        ax.set_xlim(0.9, float(model["steps"]) * 1.1)
    _benefit_beyond(ax, model)
    ax.set(xlabel="steps kept, from the last one back (k)", ylabel="lost without what is older", title="memory in use")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="x-small", loc="best")


def _mark_memory(ax: Any, model: xr.Dataset) -> None:
    """A line at n, and n in words, inside the axes."""
    n = float(model["memory"])
    if not (bool(model.attrs["known"]) and np.isfinite(n)):
        ax.annotate("memory unknown", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.4")
        return
    words = f"n >= {n:.0f}" if model.attrs["censored"] else f"n = {n:.0f}"
    ax.axvline(n, color="0.3", linewidth=0.9, gid="memory")
    right = n**2 < float(model["steps"])  # the left half of a logarithmic axis
    ax.annotate(
        words,
        (n, 0.97),
        xycoords=ax.get_xaxis_transform(),
        xytext=(3 if right else -3, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        fontsize="small",
    )


def _benefit_beyond(ax: Any, model: xr.Dataset) -> None:
    """A network that is sure of itself loses more than it learned: the axis ends where nothing more is told."""
    values = np.concatenate([model["benefit"].values, model["use"].values, [1.0]])
    top = float(np.nanmax(values))
    ax.set_ylim(-0.05, min(top, 1.5) * 1.1)
    if top > 1.5:
        ax.annotate(f"benefit up to {top:.1f}", (0.02, 0.97), xycoords="axes fraction", va="top", fontsize="x-small")


def _missed(ax: Any, model: xr.Dataset) -> None:
    ax.set(xlabel="lag in steps", ylabel="squared covariance / Var y", title="what the errors would still follow from")
    if "missed" not in model:
        ax.annotate("no target", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.4")
        return
    missed = model["missed"].values
    ax.vlines(np.arange(missed.size), 0, missed, color=_MISSED, linewidth=1.2, gid="missed")
    ax.axhline(float(model["missed_threshold"]), color="0.4", linewidth=0.8, linestyle="--", label="99 % of chance")
    # Less than the rule asks for is nothing to look at: the axis does not zoom in on it.
    ax.set_ylim(0, max(float(missed.max()) * 1.15, float(model["missed_threshold"]) * 1.15, 0.05))
    ax.legend(fontsize="x-small", loc="best")
    whole_numbers(ax, "x")


def _transfer(ax: Any, node: xr.Dataset, keywords: dict[str, Any]) -> None:
    floor = 10.0**-_DEEPEST
    curves = (
        ("kappa", _KAPPA, "state transfer"),
        ("adjoint", _ADJOINT, "adjoint, own peak"),
    )
    for name, colour, label in curves:
        if name in node:
            look = {"label": label, "gid": name, "color": colour, "linewidth": 1.2, **keywords}
            _draw_share(ax, node[name].values, (node[f"{name}_low"].values, node[f"{name}_high"].values), look, floor)
    ax.axhline(1e-4, color="0.6", linewidth=0.7, linestyle=":")
    ax.set_yscale("log")
    ax.set_ylim(bottom=floor)
    ax.set(xlabel="lag in steps", ylabel="share left", title="what a training signal keeps on its way back")
    ax.legend(fontsize="x-small", loc="best")
    whole_numbers(ax, "x")


def _draw_share(ax: Any, values: Numbers, band: tuple[Numbers, Numbers], look: dict[str, Any], floor: float) -> None:
    """One curve over lag with its band; triangles at the floor where it is below."""
    lag, colour = np.arange(values.size), look["color"]
    ax.plot(lag, np.where(values > floor, values, np.nan), **look)
    low, high = (np.maximum(end, floor) for end in band)
    ax.fill_between(lag, low, high, color=colour, alpha=0.15, linewidth=0)
    below = np.flatnonzero(~(values > floor))
    if below.size:
        marks = {"marker": "v", "markersize": 2, "linestyle": "", "clip_on": False, "gid": "below"}
        ax.plot(below, np.full(below.size, floor), color=colour, **marks)
        words, place = f"below {power_of_ten(floor)}", (float(below.mean()), floor)
        ax.annotate(words, place, (0, 4), textcoords="offset points", ha="center", fontsize="x-small", gid="below")


def _gates(ax: Any, node: xr.Dataset, keywords: dict[str, Any]) -> None:
    ax.set(xlabel="unit, by time constant", ylabel="steps", title="time constants of the gates")
    if "timescale" not in node:
        ax.annotate("this cell has no keeping gate", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.4")
        return
    values = np.sort(node["timescale"].values)
    finite = np.where(np.isfinite(values), values, np.nan)
    look = {"color": _USE, "marker": ".", "markersize": 4, "linewidth": 0.8}
    ax.plot(np.arange(values.size), finite, **{"gid": "timescale", **look, **keywords})
    ax.set_yscale("log")
    log_ticks(ax)
    whole_numbers(ax, "x")
