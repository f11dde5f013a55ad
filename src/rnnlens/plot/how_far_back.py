"""Figure of how far back a model looks: ``how_far_back``, the measures of a diagnosis side by side."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.patches import Rectangle

from ..errors import InputError
from ..results.diagnosis import Diagnosis
from . import _axes, _frame
from ._call import drawing

#: Colour of each measure; an ablation is blue or green, a gradient pink or orange.
_COLOURS = {
    "prediction depends on": _axes.BLUE,
    "state carries": _axes.GREEN,
    "training signal reaches": _axes.PINK,
    "gradient in use": _axes.ORANGE,
}


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
