"""``fixed_points``: fixed points in the plane of most variance, with their unstable directions."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from ..errors import InputError, message
from ..results.dynamics import FixedPoints
from ._door import figure as figure_door
from ._keywords import checked
from ._panels import Grid, open_panels

_KINDS = (("stable", "#0072b2", "o"), ("saddle", "#d55e00", "X"), ("slow", "0.5", "."))


@figure_door()
def fixed_points(
    points: FixedPoints, *, title: str | None = None, ax: Any = None, figure: Any = None, **line: Any
) -> Any:
    """Draw fixed points in the first two principal components of the states that the search started from.

    Parameters
    ----------
    points
        What ``rl.fixed_points`` returns.
    title
        Instead of the count of points.
    ax, figure
        An Axes, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D, of the points.

    Returns
    -------
    1-D array of one Axes. Bars through saddles show their unstable modes, as long as their eigenvalue exceeds 1.

    Raises
    ------
    InputError
        If ``points`` are none, or a keyword is unknown.
    """
    keywords = checked(line, Line2D, figure="fixed_points")
    if not isinstance(points, FixedPoints):
        raise InputError(
            message(
                "plot.fixed_points draws fixed points.", got=type(points).__name__, hint="rl.fixed_points(model, x)"
            )
        )
    panels = open_panels(1, name="fixed_points", grid=Grid((5.2, 4.4)), ax=ax, figure=figure)
    place = panels.axes[0]
    data = points.data
    cloud = data["trajectory"].values
    mean, axes, shares = _components(cloud)
    flat = (cloud - mean) @ axes
    place.plot(*flat.T, linestyle="", marker=".", markersize=1.5, color="0.8", zorder=1, label="states", gid="states")
    where = (data["states"].values - mean) @ axes
    fixed, stable = data["fixed"].values, data["stable"].values
    groups = {"stable": stable, "saddle": fixed & ~stable, "slow": ~fixed}
    for kind, colour, marker in _KINDS:
        chosen = where[groups[kind]]
        if len(chosen):
            look = {"linestyle": "", "marker": marker, "markersize": 7, "color": colour, "zorder": 3}
            place.plot(*chosen.T, **{"label": f"{kind} ({len(chosen)})", "gid": kind, **look, **keywords})
    _modes(place, points, where, axes, float(np.ptp(flat, axis=0).max()))
    place.set(xlabel=f"first component ({shares[0]:.0%} of variance)", ylabel=f"second component ({shares[1]:.0%})")
    place.legend(fontsize="x-small", loc="best")
    panels.title(title or points._headline())
    return panels.result()


def _components(cloud: Any) -> tuple[Any, Any, Any]:
    """Mean, first two principal axes (state, 2), and their shares of the variance."""
    mean = cloud.mean(axis=0)
    _, sizes, axes = np.linalg.svd(cloud - mean, full_matrices=False)
    axes = axes[:2].T if len(axes) > 1 else np.concatenate([axes[:1].T, np.zeros_like(axes[:1].T)], axis=1)
    shares = np.zeros(2)
    total = float((sizes**2).sum()) or 1.0
    shares[: min(2, len(sizes))] = (sizes[:2] ** 2) / total
    return mean, axes, shares


def _modes(ax: Any, points: FixedPoints, where: Any, axes: Any, span: float) -> None:
    values, vectors = points.eigenvalues.values, points.eigenvectors.values
    for i in np.flatnonzero(~points.stable.values):
        for mode in np.flatnonzero(np.abs(values[i]) > 1):
            way = (vectors[i, :, mode].real @ axes) * 0.05 * span * min(float(np.abs(values[i, mode])), 3.0)
            ends = np.stack([where[i] - way, where[i] + way])
            ax.plot(*ends.T, color="#d55e00", linewidth=0.9, alpha=0.7, zorder=2, gid="mode")
