"""Figure of a scorecard: ``scorecard``, the measures of several models side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.collections import PathCollection

from ..errors import InputError
from ..results.diagnosis import Comparison
from . import _axes, _frame
from ._call import drawing

#: Values of a measure that span more than this factor, and are all above 0, are drawn on a logarithmic axis.
_WIDE = 30.0


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
