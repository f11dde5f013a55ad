"""Measures side by side: ``how_far_back`` those of a diagnosis, ``scorecard`` those of several models."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.collections import PathCollection
from matplotlib.patches import Rectangle

from ..errors import InputError
from ..results.diagnosis import Comparison, Diagnosis
from . import _axes, _frame
from ._call import drawing

#: Colour of each measure; an ablation is blue or green, a gradient pink or orange.
_COLOURS = {
    "prediction depends on": _axes.BLUE,
    "state carries": _axes.GREEN,
    "training signal reaches": _axes.PINK,
    "gradient in use": _axes.ORANGE,
}
#: Values of a measure that span more than this factor, and are all above 0, are drawn on a logarithmic axis.
_WIDE = 30.0


@drawing(Rectangle)
def how_far_back(d: Diagnosis, *, title: str | None = None, ax: Any = None, figure: Any = None, **bar: Any) -> Any:
    """Draw how far back a model looks, a bar for each measure, with a sentence each and why they differ.

    The steps on which the prediction depends, those over which the state of each layer carries information, those that
    the training signal reaches, and those that hold 95 % of the gradient.

    Parameters
    ----------
    d
        Result of ``rl.diagnose``.

    Returns
    -------
    1-D array of one Axes

    Examples
    --------
    >>> axes = rl.plot.how_far_back(rl.diagnose(model, x, y, loss=mse_loss))
    >>> len(axes)
    1
    """
    if not isinstance(d, Diagnosis) or not d.how_far_back:
        expected = "a diagnosis with measures of memory or of the gradient"
        hint = "rl.plot.how_far_back(rl.diagnose(model, x, y))"
        raise InputError("plot.how_far_back draws a diagnosis.", got=type(d).__name__, expected=expected, hint=hint)
    rows = d.how_far_back
    panels = _frame.open_panels("how_far_back", 1, ax, figure, size=(5.6, 0.82 * len(rows)), margin=(0.4, 1.3))
    (panel_ax,) = panels.axes
    total = max(row.of for row in rows)
    width_inches = panel_ax.get_position().width * panels.figure.bbox.width / panels.figure.dpi
    for position, row in enumerate(rows):
        bar_style = {"color": _COLOURS.get(row.measure, _axes.BLUE), "gid": row.label, **bar}
        panel_ax.barh(position, row.steps, height=0.2, zorder=2, **bar_style)
        if row.low is not None and row.high is not None:
            panel_ax.plot([row.low, row.high], [position, position], color="black", linewidth=1.2, gid="interval")
        over, label = panel_ax.get_yaxis_transform(), f"{row.label}: {row.text}"
        style = {"over": over, "ha": "left"}
        _axes.write_text(panel_ax, label, (0, position - 0.13), (2, 0), va="bottom", fontsize="small", **style)
        sentence = textwrap.fill(row.sentence, max(30, int(_frame.letters_per_inch(0.7) * width_inches)))
        _axes.write_text(panel_ax, sentence, (0, position + 0.13), (2, 0), va="top", color="0.3", **style)
    panel_ax.set(xlim=(0, total), ylim=(len(rows) - 0.3, -0.45), yticks=[], xlabel="steps back from the last")
    _axes.tick_whole_numbers(panel_ax.xaxis)
    reasons = [] if title is not None else d.why_they_differ
    for direction_figure in panels.direction_figures:
        if reasons:
            width = int(_frame.letters_per_inch(0.87) * panels.figure.bbox.width / panels.figure.dpi)
            lines = "\n".join(textwrap.fill(reason, width) for reason in reasons)
            direction_figure.supxlabel(lines, fontsize="small", color="0.25")
    return panels.with_title(title or f"How far back the model looks, of {total} steps")


@drawing(PathCollection)
def scorecard(c: Comparison, *, title: str | None = None, ax: Any = None, figure: Any = None, **point: Any) -> Any:
    """Draw the scorecard of several models, a panel for each measure and a row for each model.

    A line is the 95 % interval, where there is one. A model for which a measure is not defined has a dash; measures
    that are defined for no model have no panel.

    Parameters
    ----------
    c
        Result of ``rl.compare(..., scorecard=True)``.

    Returns
    -------
    1-D array of Axes, one for each measure

    Examples
    --------
    >>> comparison = rl.compare({"one": model, "other": other}, x, y, loss=mse_loss, scorecard=True)
    >>> axes = rl.plot.scorecard(comparison)
    >>> axes.save("scorecard.png")
    """
    if not isinstance(c, Comparison):
        hint = "rl.plot.scorecard(rl.compare(models, x, y, scorecard=True))"
        raise InputError("plot.scorecard draws a comparison.", got=type(c).__name__, expected="its result", hint=hint)
    card = c.scorecard
    defined = [str(m) for m in card["measure"].values if np.isfinite(card["value"].sel(measure=m)).any()]
    if not defined:
        raise InputError("No measure of this scorecard is defined.", got=str(card["reason"].values.ravel()[0]))
    names = [str(name) for name in card["name"].values]
    columns = min(4, len(defined))
    panels = _frame.open_panels(
        "scorecard", len(defined), ax, figure, size=(2.5, 0.6 + 0.22 * len(names)), margin=(0.6, 0.6)
    )
    for i, (panel_ax, measure) in enumerate(zip(panels.axes, defined, strict=True)):
        values = card["value"].sel(measure=measure).values
        intervals = card["interval"].sel(measure=measure).values
        rows = np.arange(len(names))
        is_known = np.isfinite(values)
        panel_ax.scatter(
            values[is_known], rows[is_known], **{"color": _axes.BLUE, "s": 22, "zorder": 3, "gid": measure, **point}
        )
        for row in rows[np.isfinite(intervals).all(axis=1)]:
            panel_ax.plot(intervals[row], [row, row], color="black", linewidth=1.2, gid="interval")
        over = panel_ax.get_yaxis_transform()
        for row in rows[~is_known]:
            _axes.write_text(panel_ax, "-", (0.5, row), over=over, ha="center", color="0.4", gid="not defined")
        drawn = values[is_known]
        if (drawn > 0).all() and drawn.max() > _WIDE * drawn.min():
            panel_ax.set_xscale("log")
        elif (drawn >= 0).all():
            panel_ax.set_xlim(left=0)
        unit = str(card["units"].sel(measure=measure).values)
        panel_ax.set(ylim=(len(names) - 0.5, -0.5), title=measure, xlabel="" if unit == "1" else unit)
        panel_ax.set_yticks(rows, names if i % columns == 0 or ax is not None else [""] * len(names))
        panel_ax.title.set_fontsize("small")
        panel_ax.grid(axis="y", color="0.9", zorder=0)
    return panels.with_title("Scorecard" if title is None else title)
