"""``lag_profile``: how far back the outputs reach, as one curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..recurrence import measures
from ..vocabulary import BACKWARD, DIRECTION, IN_TIME, OUT_TIME, SAMPLE
from ._colour import line_colours
from ._data import Numbers, names_of, positions
from ._door import figure as figure_door
from ._jacobian import block_norms
from ._keywords import checked
from ._lines import log_limits
from ._padding import hidden, notes_of
from ._panels import Grid, log_values, open_panels, whole_numbers


@dataclass(frozen=True)
class _Curve:
    """One profile and what is written about it."""

    name: str
    mean: Numbers
    low: Numbers | None
    high: Numbers | None
    half_life: float
    horizon: int


@figure_door()
def lag_profile(
    jacobian: Any,
    *,
    dims: Sequence[str] | None = None,
    epsilon: float = 0.01,
    confidence: float = 0.95,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw m(lag), the mean norm of the time Jacobian at each lag, with its half-life and horizon.

    The band is a bootstrap interval of the mean over samples. The half-life (dotted) is the lag from the peak to half
    of it; the horizon (a triangle at the lower rim) is the largest lag at which the profile is at least ``epsilon`` of
    its peak.

    Parameters
    ----------
    jacobian
        As for :func:`time_jacobian`; with direction a curve for each; or a mapping from names to such, drawn together.
    dims
        Dimensions of a plain array where the guess does not fit.
    epsilon
        Share of the peak that counts as a reach.
    confidence
        Of the bootstrap interval; 0 draws none.
    title
        Instead of the one made from the labels.
    ax, figure
        One Axes, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D.

    Returns
    -------
    1-D array with one Axes

    Raises
    ------
    InputError
        If there is no input time, a keyword is unknown, or ``ax`` is not one Axes.

    Notes
    -----
    Padded steps (those that the layer's mask leaves out) do not count. Lags below 0 are left out, except for a backward
    direction, whose lag counts from the output to later inputs.
    """
    keywords = checked(line, Line2D, figure="lag_profile")
    given = {str(name): data for name, data in jacobian.items()} if isinstance(jacobian, Mapping) else {"": jacobian}
    curves: list[_Curve] = []
    notes: list[str | None] = []
    for name, data in given.items():
        array, _ = block_norms(data, "lag_profile", dims)
        notes += notes_of(array)[:1]
        padded = hidden(array)
        real = None if padded is None else ~(xr.zeros_like(array, dtype=bool) | padded)
        notes.append(None if real is None else "padding left out")
        ways = names_of(array, DIRECTION) if DIRECTION in array.dims else [""]
        for i, way in enumerate(ways):
            part = array.isel({DIRECTION: i}) if DIRECTION in array.dims else array
            lead = [d for d in part.dims if d == SAMPLE]
            norms = np.abs(part.transpose(*lead, OUT_TIME, IN_TIME).values)
            where = np.ones(norms.shape, dtype=bool)
            if real is not None:
                one = real.isel({DIRECTION: i}) if DIRECTION in real.dims else real
                where = one.transpose(*lead, OUT_TIME, IN_TIME).values
            times = (positions(part, OUT_TIME), positions(part, IN_TIME))
            if way == BACKWARD:  # it looks ahead: lag counts from the output step to later input steps
                norms, where, times = np.swapaxes(norms, -1, -2), np.swapaxes(where, -1, -2), times[::-1]
            curves.append(_curve(" ".join(p for p in (name, way) if p), norms, where, times, epsilon, confidence))
    panels = open_panels(1, name="lag_profile", grid=Grid((5.4, 3.4)), ax=ax, figure=figure)
    place = panels.axes[0]
    for curve, colour in zip(curves, line_colours(len(curves)), strict=True):
        _draw(place, curve, colour, epsilon, keywords)
    _scale(place, curves)
    panels.label("lag (output step - input step)", "mean norm of the time Jacobian")
    band = f"band: {confidence:.0%} bootstrap interval over samples" if any(c.low is not None for c in curves) else None
    panels.title(title or "lag profile", [band, *notes])
    return panels.result()


def _curve(
    name: str, norms: Numbers, where: Numbers, times: tuple[Numbers, Numbers], epsilon: float, confidence: float
) -> _Curve:
    """Profile of one Jacobian: mean over samples, interval, half-life, horizon."""
    pieces, counted = (a if a.ndim == 3 else a[None] for a in (norms, where))
    out_times, in_times = (None if _whole(t) else t.tolist() for t in times)
    if len(times[0]) != len(times[1]):
        out_times, in_times = (t.tolist() for t in times)
    rows = np.stack(
        [
            measures.lag_profile(piece, out_times=out_times, in_times=in_times, where=real, xp=np)
            for piece, real in zip(pieces, counted, strict=True)
        ]
    )
    mean = measures.finite_mean(rows, axis=0, xp=np)
    low = high = None
    if len(rows) > 1 and confidence > 0:
        low, high = measures.bootstrap_interval(rows, axis=0, confidence=confidence, xp=np)
    return _Curve(
        name,
        mean,
        low,
        high,
        float(measures.half_life(mean, xp=np)),
        int(measures.horizon(mean, epsilon=epsilon, xp=np)),
    )


def _whole(times: Numbers) -> bool:
    """Whether these are all steps from 0 on."""
    return bool(np.array_equal(times, np.arange(len(times))))


def _draw(ax: Any, curve: _Curve, colour: Any, epsilon: float, keywords: dict[str, Any]) -> None:
    """One profile with its band, half-life and horizon."""
    lags = np.arange(len(curve.mean))
    shown = np.where(curve.mean > 0, curve.mean, np.nan)
    life = "never falls to half" if math.isinf(curve.half_life) else f"half-life {curve.half_life:.3g}"
    label = f"{curve.name}: " if curve.name else ""
    label += (
        f"{life}, horizon {curve.horizon} ({100 * epsilon:g} % of the peak)" if curve.horizon >= 0 else "0 at every lag"
    )
    if curve.low is not None and curve.high is not None:
        ax.fill_between(lags, curve.low, curve.high, color=colour, alpha=0.25, linewidth=0, gid="band")
    look = {"label": label, "gid": f"profile {curve.name}".strip(), "color": colour, "linewidth": 1.4}
    ax.plot(lags, shown, **{**look, **keywords})
    if math.isfinite(curve.half_life):
        peak = int(np.nanargmax(np.where(np.isfinite(shown), shown, -1)))
        ax.axvline(peak + curve.half_life, color=colour, linewidth=0.9, linestyle=":", gid="half-life")
    if curve.horizon >= 0:
        ax.plot(
            [curve.horizon], [0.02], "^", color=colour, markersize=6, transform=ax.get_xaxis_transform(), gid="horizon"
        )


def _scale(ax: Any, curves: Sequence[_Curve]) -> None:
    """Logarithmic value axis over what is finite and positive."""
    values = np.concatenate([curve.mean[np.isfinite(curve.mean) & (curve.mean > 0)] for curve in curves])
    log_values(ax)
    log_limits(ax, values, room=2)
    longest = max(len(curve.mean) for curve in curves)
    ax.set_xlim(-0.5, longest - 0.5)
    whole_numbers(ax, "x")
    ax.legend(fontsize="small", loc="best")
    ax.tick_params(labelsize="small")
