"""``lag_profile``: how far back the outputs reach, as one curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..arguments import one_of
from ..measures.samples import peak_band
from ..recurrence import measures
from ..vocabulary import BACKWARD, DIRECTION, IN_TIME, OUT_TIME, SAMPLE
from ._colour import line_colours
from ._data import Numbers, names_of, positions
from ._door import figure as figure_door
from ._jacobian import block_norms
from ._keywords import checked
from ._lines import log_limits
from ._marks import End, mark_below, name_ends, step_axis
from ._padding import hidden, notes_of
from ._panels import Grid, log_values, mark_top, open_panels


@dataclass(frozen=True)
class _Curve:
    """One profile and what is written about it."""

    name: str
    mean: Numbers
    low: Numbers | None
    high: Numbers | None
    mean_lag: float
    horizon: int
    colour: Any = "#0072b2"

    @property
    def words(self) -> str:
        """Mean lag and horizon; a horizon at the last lag is only known to be no shorter."""
        if self.horizon < 0:
            return "0 at every lag"
        last = int(np.flatnonzero(np.isfinite(self.mean))[-1])
        return f"mean lag {self.mean_lag:.3g}\nhorizon {'≥ ' if self.horizon == last else ''}{self.horizon}"


@figure_door(samples=one_of("median", "mean"))
def lag_profile(
    jacobian: Any,
    *,
    dims: Sequence[str] | None = None,
    samples: str = "median",
    delays: Any = (),
    epsilon: float = 0.01,
    confidence: float = 0.95,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw m(lag), the mean norm of the time Jacobian at each lag, with its mean lag and horizon.

    Of each sample the mean over its steps, divided by its own peak: the line is the median over samples, the band its
    quartiles. The mean lag (dotted) is that of the profile's weight, which one tall lag does not decide; the horizon (a
    triangle at the lower rim) is the largest lag at which the profile is at least ``epsilon`` of its peak, "≥" where
    that is the last lag there is.

    Parameters
    ----------
    jacobian
        As for :func:`time_jacobian`; with direction a curve for each; or a mapping from names to such, drawn together.
    dims
        Dimensions of a plain array where the guess does not fit.
    samples
        ``"median"``: as above; ``"mean"``: the mean over samples of the values themselves, with a bootstrap interval.
    delays : int or sequence of int
        Lags at which the task is known to need its input, marked.
    epsilon
        Share of the peak that counts as a reach.
    confidence
        Of the bootstrap interval, 0.95 for 95 %; 0 draws no band, of the median neither.
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
            curves.append(
                _curve(" ".join(p for p in (name, way) if p), _rows(norms, where, times), samples, epsilon, confidence)
            )
    panels = open_panels(1, name="lag_profile", grid=Grid((6.2, 3.4)), ax=ax, figure=figure)
    place = panels.axes[0]
    curves = [replace(curve, colour=colour) for curve, colour in zip(curves, line_colours(len(curves)), strict=True)]
    for curve in curves:
        _draw(place, curve, keywords)
    _scale(place, curves, delays, outside=bool(panels.owners))
    of_peaks = samples == "median" and any(curve.low is not None for curve in curves)
    words = "mean norm of the time Jacobian" + (", share of the sample's peak" if of_peaks else "")
    panels.label("lag (output step - input step)", words)
    band = "quartiles of the samples" if samples == "median" else f"{confidence:.0%} bootstrap interval over samples"
    shown = f"band: {band}" if confidence > 0 and any(c.low is not None for c in curves) else None
    panels.title(
        title or "lag profile", [shown, f"dotted: mean lag; triangle: horizon, {100 * epsilon:g} % of the peak", *notes]
    )
    return panels.result()


def _rows(norms: Numbers, where: Numbers, times: tuple[Numbers, Numbers]) -> Numbers:
    """(sample, lag): the profile of each sample."""
    pieces, counted = (a if a.ndim == 3 else a[None] for a in (norms, where))
    out_times, in_times = (None if _whole(t) else t.tolist() for t in times)
    if len(times[0]) != len(times[1]):
        out_times, in_times = (t.tolist() for t in times)
    return np.stack(
        [
            measures.lag_profile(piece, out_times=out_times, in_times=in_times, where=real, xp=np)
            for piece, real in zip(pieces, counted, strict=True)
        ]
    )


def _curve(name: str, rows: Numbers, samples: str, epsilon: float, confidence: float) -> _Curve:
    """One line for all samples, its band, mean lag and horizon."""
    low = high = None
    if len(rows) > 1 and samples == "median":
        found = peak_band(rows)
        middle, low, high = found.median, found.low, found.high
    else:
        middle = measures.finite_mean(rows, axis=0, xp=np)
        if len(rows) > 1 and confidence > 0:
            low, high = measures.bootstrap_interval(rows, axis=0, confidence=confidence, xp=np)
    if confidence == 0:
        low = high = None
    lag, reach = measures.mean_lag(middle, xp=np), measures.horizon(middle, epsilon=epsilon, xp=np)
    return _Curve(name, middle, low, high, float(lag), int(reach))


def _whole(times: Numbers) -> bool:
    """Whether these are all steps from 0 on."""
    return bool(np.array_equal(times, np.arange(len(times))))


def _draw(ax: Any, curve: _Curve, keywords: dict[str, Any]) -> None:
    """One profile with its band, mean lag and horizon."""
    lags = np.arange(len(curve.mean))
    shown = np.where(curve.mean > 0, curve.mean, np.nan)
    if curve.low is not None and curve.high is not None:
        ax.fill_between(lags, curve.low, curve.high, color=curve.colour, alpha=0.25, linewidth=0, gid="band")
    look = {"label": curve.name, "gid": f"profile {curve.name}".strip(), "color": curve.colour, "linewidth": 1.4}
    ax.plot(lags, shown, **{**look, **keywords})
    if math.isfinite(curve.mean_lag):
        ax.axvline(curve.mean_lag, color=curve.colour, linewidth=0.9, linestyle=":", gid="mean lag")
    if curve.horizon >= 0:
        look = {"color": curve.colour, "markersize": 6, "transform": ax.get_xaxis_transform(), "gid": "horizon"}
        ax.plot([curve.horizon], [0.02], "^", **look)


def _scale(ax: Any, curves: Sequence[_Curve], delays: Numbers, *, outside: bool) -> None:
    """Logarithmic value axis over what is finite and positive; delays, names at the ends."""
    log_values(ax)
    log_limits(ax, np.concatenate([curve.mean for curve in curves]), room=2)
    longest = max(len(curve.mean) for curve in curves)
    ax.set_xlim(-0.5, longest - 0.5)
    step_axis(ax, "x", np.arange(longest), time=False)
    ax.tick_params(labelsize="small")
    for delay in delays:
        ax.axvline(delay, color="#111111", linewidth=0.9, linestyle=(0, (1, 2)), zorder=0.8, gid="delay")
        mark_top(ax, float(delay), "delay")
    for curve in curves:
        mark_below(ax, np.arange(len(curve.mean)), curve.mean, curve.colour)
    name_ends(ax, [_end(curve) for curve in curves], outside=outside)


def _end(curve: _Curve) -> End:
    shown = np.flatnonzero(curve.mean > 0)
    y = float(curve.mean[shown[-1]]) if shown.size else float("nan")
    words = "\n".join(part for part in (curve.name, curve.words) if part)
    return End(float(len(curve.mean) - 1), y, words, curve.colour)
