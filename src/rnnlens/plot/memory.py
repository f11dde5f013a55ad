"""``lag_profile``: dependence of outputs on inputs by lag.

``memory_lifetime``: product of forget gates against dc_t/dc_0. ``decay_by_lag``: share of a state left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from ..arguments import one_of, whole
from ..errors import InputError
from ..measures.intervention import bootstrap_interval
from ..measures.profiles import finite_median, kept_by_gates, own_diagonal, peak_band
from ..measures.transfer import half_life_of, logarithms
from ..recurrence import measures
from ..vocabulary import BACKWARD, DIRECTION, GATE, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers
from .time_jacobian import block_norms


@dataclass(frozen=True)
class _Curve:
    """One lag profile with its mean lag and horizon."""

    name: str
    mean: Numbers
    low: Numbers | None
    high: Numbers | None
    mean_lag: float
    horizon: int
    colour: str

    @property
    def words(self) -> str:
        """Mean lag and horizon as text; a horizon at the last lag is marked as a lower bound."""
        if self.horizon < 0:
            return "0 at every lag"
        last = int(np.flatnonzero(np.isfinite(self.mean))[-1])
        return f"mean lag {self.mean_lag:.3g}\nhorizon {'≥ ' if self.horizon == last else ''}{self.horizon}"


@drawing(Line2D, samples=one_of("median", "mean"))
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

    A sample's profile is the mean over its steps, divided by its own peak. The line is the median over samples, the
    band has the quartiles. The mean lag (dotted) is weighted by the profile. The horizon (a triangle at the lower
    border) is the largest lag at which the profile is at least ``epsilon`` of its peak, with "≥" if that is the last
    lag.

    Parameters
    ----------
    jacobian
        As for :func:`time_jacobian`, with a curve for each direction; or a mapping from names to such arrays.
    samples
        ``"median"``: as above; ``"mean"``: the mean over samples of the values themselves, with a bootstrap interval.
    epsilon
        Share of the peak that defines the horizon.
    confidence
        Level of the bootstrap interval, such as 0.95; 0 draws no band, quartiles neither.

    Returns
    -------
    1-D array with one Axes

    Notes
    -----
    Masked steps do not count. Lags below 0 are left out. For a backward direction the lag counts from
    the output to later inputs.
    """
    given = {str(name): data for name, data in jacobian.items()} if isinstance(jacobian, Mapping) else {"": jacobian}
    if not given:
        raise InputError(
            "plot.lag_profile got no time Jacobian.",
            got="an empty mapping",
            expected='one that rl.jacobian returned, or several by name: {"LSTM": one, "GRU": other}',
        )
    curves: list[_Curve] = []
    notes: list[str | None] = []
    for name, data in given.items():
        array, _ = block_norms(data, "lag_profile", dims)
        notes += _samples.notes_of(array)[:1]
        notes.append(None if _samples.hidden(array) is None else "padding left out")
        for half in _data.halves(array):
            norms = np.abs(_data.of_samples(half.data, OUT_TIME, IN_TIME))
            where = ~_data.of_samples(_samples.padding_of(half.data), OUT_TIME, IN_TIME)
            times = (_data.positions(array, OUT_TIME), _data.positions(array, IN_TIME))
            if half.name == BACKWARD:  # lag counts from the output step to later input steps
                norms, where, times = np.swapaxes(norms, -1, -2), np.swapaxes(where, -1, -2), times[::-1]
            words = " ".join(part for part in (name, half.name) if part)
            colour = _axes.line_colours(len(curves) + 1)[-1]
            curves.append(_curve(words, colour, _rows(norms, where, times), samples, epsilon, confidence))
    panels = _frame.open_panels("lag_profile", 1, ax, figure, size=(6.2, 3.4))
    for curve in curves:
        _draw_lags(panels.axes[0], curve, line)
    _scale(panels.axes[0], curves, delays, outside=bool(panels.owners))
    of_peaks = samples == "median" and any(curve.low is not None for curve in curves)
    words = "mean norm of the time Jacobian" + (", share of the sample's peak" if of_peaks else "")
    panels.label("lag (output step - input step)", words)
    band = "quartiles of the samples" if samples == "median" else f"{confidence:.0%} bootstrap interval over samples"
    shown = f"band: {band}" if confidence > 0 and any(c.low is not None for c in curves) else None
    marks = f"dotted: mean lag; triangle: horizon, {100 * epsilon:g} % of the peak"
    return panels.titled(title or "lag profile", [shown, marks, *notes])


def _rows(norms: Numbers, where: Numbers, times: tuple[Numbers, Numbers]) -> Numbers:
    """Compute the lag profile of each sample, (sample, lag), from norms of a time Jacobian."""
    whole = len(times[0]) == len(times[1])
    out_times, in_times = (None if whole and np.array_equal(t, np.arange(len(t))) else t.tolist() for t in times)
    return np.stack(
        [
            measures.lag_profile(piece, out_times=out_times, in_times=in_times, where=real)
            for piece, real in zip(norms, where, strict=True)
        ]
    )


def _curve(name: str, colour: str, rows: Numbers, samples: str, epsilon: float, confidence: float) -> _Curve:
    """Summarise the lag profiles of all samples: line, band, mean lag and horizon."""
    several, low, high = len(rows) > 1, None, None
    band = peak_band(rows) if several and samples == "median" else None
    middle = measures.finite_mean(rows, axis=0) if band is None else band.median
    if several and confidence > 0:
        low, high = (band.low, band.high) if band else bootstrap_interval(rows, axis=0, confidence=confidence)
    lag, reach = measures.mean_lag(middle), measures.horizon(middle, epsilon=epsilon)
    return _Curve(name, middle, low, high, float(lag), int(reach), colour)


def _draw_lags(ax: Any, curve: _Curve, keywords: dict[str, Any]) -> None:
    """Draw one profile with its band, mean lag and horizon."""
    lags = np.arange(len(curve.mean))
    shown = np.where(curve.mean > 0, curve.mean, np.nan)
    if curve.low is not None and curve.high is not None:
        _axes.draw_band(ax, lags, curve.low, curve.high, curve.colour, alpha=0.25)
    look = {"label": curve.name, "gid": f"profile {curve.name}".strip(), "color": curve.colour, "linewidth": 1.4}
    ax.plot(lags, shown, **{**look, **keywords})
    if math.isfinite(curve.mean_lag):
        ax.axvline(curve.mean_lag, color=curve.colour, linewidth=0.9, linestyle=":", gid="mean lag")
    if curve.horizon >= 0:
        look = {"color": curve.colour, "markersize": 6, "transform": ax.get_xaxis_transform(), "gid": "horizon"}
        ax.plot([curve.horizon], [0.02], "^", **look)


def _scale(ax: Any, curves: Sequence[_Curve], delays: Numbers, *, outside: bool) -> None:
    """Set a logarithmic value axis, mark the delays, and name the lines at their ends."""
    _axes.log_axis(ax)
    _axes.log_limits(ax, np.concatenate([curve.mean for curve in curves]), room=2)
    _axes.step_axis(ax, "x", np.arange(max(len(curve.mean) for curve in curves)), time=False, room=0.5)
    _axes.mark_delays(ax, delays)
    for delay in delays:
        _axes.mark_top(ax, float(delay), "delay")
    for curve in curves:
        _axes.mark_below(ax, np.arange(len(curve.mean)), curve.mean, curve.colour)
    ends = []
    for curve in curves:
        shown = np.flatnonzero(curve.mean > 0)
        y = float(curve.mean[shown[-1]]) if shown.size else float("nan")
        words = "\n".join(part for part in (curve.name, curve.words) if part)
        ends.append(_axes.End(y, words, curve.colour))
    _axes.name_ends(ax, ends, outside=outside)


#: Gates that keep a state, in the order of preference.
KEEPING = ("forget", "update")
#: Shares below this one are drawn at the border.
_DEEPEST = 1e-12


@drawing(PathCollection, extra=("marker", "s"))
def memory_lifetime(
    layer: Any,
    jacobian: Any,
    *,
    max_lines: int = 3,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **point: Any,
) -> Any:
    """Draw, unit by unit, the product of its forget gates against the measured dc_t/dc_0.

    The product is the share of the initial state that the gates alone would keep. On the dashed line the measured
    derivative equals the product. Points above or below it show the effect of the gates' own dependence on the state.
    Points are medians over samples, with one colour per time step t.

    Parameters
    ----------
    layer : (sample, time, gate, unit), also with direction
        A layer of a trace with a ``forget`` gate (LSTM) or an ``update`` gate (GRU); its mask is applied.
    jacobian : (sample, out_time, out_unit, in_feature)
        ``rl.jacobian(model, x, of="lstm.cell", wrt="lstm.initial_cell")`` of the same batch; of a GRU ``hidden`` and
        ``initial_hidden``. ``at={"out_time": [...]}`` restricts it to some steps.
    max_lines
        Largest number of time steps, evenly spaced, the last included.

    Returns
    -------
    1-D array of Axes, forward before backward
    """
    gates = _data.labelled(_data.variable(layer, "gates", "memory_lifetime", masked=True), "memory_lifetime")
    _data.require_dim(gates, GATE, "memory_lifetime")
    keep = next((name for name in KEEPING if name in _data.names_of(gates, GATE)), None)
    if keep is None:
        expected = "a forget gate (LSTM) or an update gate (GRU)"
        got = f"gates {', '.join(_data.names_of(gates, GATE))}"
        raise InputError("No gate of this cell keeps its state.", got=got, expected=expected)
    array = _data.labelled(jacobian, "memory_lifetime", guess={4: (SAMPLE, OUT_TIME, OUT_UNIT, IN_FEATURE)})
    ways = [half.name for half in _data.halves(gates)]
    panels = _frame.open_panels("memory_lifetime", 1, ax, figure, ways=ways, size=(3.6, 3.5))
    for number, (place, way) in enumerate(zip(panels.axes, ways, strict=True)):
        kept, arrived, steps = _values(gates, array, keep, number if way else None, most=max_lines)
        _draw_lifetime(place, kept, arrived, steps, point)
    symbol = "c" if keep == "forget" else "h"
    words = f"product of the {keep} gates up to t"
    panels.label(words, f"$|\\partial{{}}{symbol}_t/\\partial{{}}{symbol}_0|$ of the same unit")
    head = _data.layer_title(gates.attrs, "memory lifetime")
    count = gates.sizes.get(SAMPLE, 1)
    note = f"median over {count} samples, a point per unit" if count > 1 else "a point per unit"
    missing = [_data.nonfinite_note(values) for values in (array.values, gates.sel({GATE: keep}).values)]
    return panels.titled(title or head, [note, *missing])


def _values(
    gates: xr.DataArray, array: xr.DataArray, keep: str, half: int | None, *, most: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the products of forget gates and the measured derivatives, (step, unit) each, and the steps."""
    backward = half is not None and _data.names_of(gates, DIRECTION)[half] == BACKWARD
    backward = backward or (half is None and gates.attrs.get("direction") == BACKWARD)
    if half is not None:
        gates = gates.isel({DIRECTION: half})
        own = {dim: half for dim in (DIRECTION, f"in_{DIRECTION}") if dim in array.dims}
        array = array.isel(own)
    forget, real = _data.of_samples(gates.sel({GATE: keep}), TIME), _samples.real_steps(gates)
    against = slice(None, None, -1) if backward else slice(None)
    kept = kept_by_gates(forget[:, against], real[:, against])[:, against]
    sources = [str(d) for d in array.dims if d not in (SAMPLE, OUT_TIME, OUT_UNIT)]
    if OUT_TIME not in array.dims or OUT_UNIT not in array.dims or len(sources) != 1:
        _refuse(array)
    arrived = np.abs(own_diagonal(_data.of_samples(array, OUT_TIME, OUT_UNIT, sources[0])))
    steps = _data.positions(array, OUT_TIME)
    if arrived.shape[2] != kept.shape[2] or arrived.shape[0] != kept.shape[0] or steps.max() >= kept.shape[1]:
        _refuse(array)
    places = np.linspace(-1, len(steps) - 1, min(most, len(steps)) + 1)[1:]
    at = np.array(sorted({round(place) for place in places}))
    kept, arrived = (
        np.where(np.isfinite(values).all(axis=0), finite_median(values), np.nan)
        for values in (kept[:, steps[at].astype(int)], arrived[:, at])
    )
    return kept, arrived, steps[at]


def _refuse(array: xr.DataArray) -> None:
    raise InputError(
        "The Jacobian does not fit the gates.",
        got=f"dimensions {dict(array.sizes)}",
        expected="(sample, out_time, out_unit, in_feature) of one state and the same batch",
        hint='rl.jacobian(model, x, of="lstm.cell", wrt="lstm.initial_cell")',
    )


def _draw_lifetime(ax: Any, kept: Numbers, arrived: Numbers, steps: Numbers, keywords: dict[str, Any]) -> None:
    """Draw the points of all units, a colour per step; values that are too small are at the border."""
    values = np.concatenate([kept.reshape(-1), arrived.reshape(-1)])
    positive = values[np.isfinite(values) & (values > 0)]
    low = max(float(positive.min(initial=1.0)), _DEEPEST) / 3
    high = max(float(positive.max(initial=1.0)), 1.0) * 3
    size, deep = float(np.clip(1500 / kept.shape[1], 4, 26)), False
    for x, y, step, colour in zip(kept, arrived, steps, _axes.line_colours(len(steps)), strict=True):
        seen = np.isfinite(x) & np.isfinite(y)
        deep = deep or bool((np.minimum(x, y)[seen] < low).any())
        look = {"s": size, "color": colour, "alpha": 0.7, "linewidth": 0, "label": f"t = {step:g}", "zorder": 3}
        points = np.maximum(x[seen], low), np.maximum(y[seen], low)
        ax.scatter(*points, **{"gid": f"units {step:g}", "clip_on": False, **look, **keywords})
        if not seen.all():
            ax.plot(np.maximum(x[~seen], low), np.full((~seen).sum(), low), "x", color="black", gid="non-finite")
    ax.plot([low, high], [low, high], color="0.4", linewidth=0.9, linestyle="--", zorder=1, gid="identity")
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in ("x", "y"):
        _axes.log_axis(ax, axis, most=5)
    if deep:
        words = f"at the border: below {_axes.short_number(low)}"
        _axes.write(ax, words, (0.97, 0.02), over="axes fraction", va="bottom", gid="below")
    ax.legend(fontsize="x-small", loc="upper left")


#: Largest number of rows and columns of the picture of decays, and largest lag.
_ROWS, _LAGS = (200, 400), 10_000


@drawing(AxesImage, extra=_images.IMSHOW, lags=whole(least=1, most=_LAGS))
def decay_by_lag(
    decay: Any,
    *,
    lags: int | None = None,
    dims: Sequence[str] | None = None,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw the share of a state that the decay leaves, heads or channels by lag, with the half-life of each row.

    The share after k steps is the k-th power of the geometric mean of the decays over samples and steps. Rows are
    sorted by their half-life, drawn as a line; a half-life beyond the last lag is at the border.

    Parameters
    ----------
    decay : (sample, time, head), (sample, time, channel, state_unit) or the like
        ``trace["mixer"].decay``, or a plain array with ``dims=``.
    lags
        Largest lag; the number of steps by default.

    Returns
    -------
    1-D array with one Axes

    References
    ----------
    Half-life of the mean decay: Mahto et al. 2021, arXiv:2009.12727, eq. 3.
    """
    array = _data.labelled(decay, "decay_by_lag", dims=dims, guess={3: (SAMPLE, TIME, "head")})
    _data.require_time(array, "decay_by_lag")
    values = _data.of_samples(array, TIME)
    if (values < 0).any() or not np.isfinite(values).all():
        got, expected = "negative or non-finite values", "numbers from 0 on"
        raise InputError("plot.decay_by_lag draws decays.", got=got, expected=expected)
    total, count = (np.ravel(part) for part in logarithms(values))
    half_life = half_life_of(total, count)
    order = np.argsort(half_life)
    last = lags or int(array.sizes[TIME])
    steps = np.arange(last + 1)
    mean = np.where(count > 0, total / np.maximum(count, 1), -np.inf)[order]
    with np.errstate(invalid="ignore"):
        shares = np.where(steps > 0, np.exp(mean[:, None] * np.maximum(steps, 1)), 1.0)
    others = [f"{dim}s".replace("_", " ") for dim in array.dims if dim not in (SAMPLE, TIME)]
    rows = " × ".join(others) or "state"  # noqa: RUF001
    panels = _frame.open_panels("decay_by_lag", 1, ax, figure, size=(4.6, 3.0), margin=(1.2, 0.9), ticks="medium")
    look = {"cmap": _axes.POSITIVE, "vmin": 0.0, "vmax": 1.0, **image}
    place = panels.axes[0]
    grid = _images.Matrix(shares, steps, np.arange(len(order)), over_time=False)
    drawn = _images.draw_image(place, grid, look=look, limits=_ROWS)
    limits = place.get_xlim(), place.get_ylim()
    at = np.minimum(half_life[order], last)
    place.step(np.r_[at, at[-1]], np.arange(len(order) + 1) - 0.5, where="post", color="black", lw=1.2, gid="half-life")
    place.set(xlim=limits[0], ylim=limits[1])
    if colorbar:
        _images.colour_bar([place], drawn, "share of the state left")
    panels.label("lag [step]", f"{rows}, fastest first")
    merged = _images.merge_note(shares.shape, _ROWS, "row", "lag")
    return panels.titled(title or _data.layer_title(array.attrs, _half_lives(half_life)), ["line: half-life", merged])


def _half_lives(half_life: Numbers) -> str:
    """Return a title with the fastest, the median and the slowest half-life."""
    low, middle, high = (
        "for ever" if np.isinf(v) else f"{v:.2g} steps" if v < 10 else f"{v:.0f} steps"
        for v in (half_life.min(), np.median(half_life), half_life.max())
    )
    if low == high:
        return f"half-life of the state: {low}"
    return f"half-life of the state: {low} to {high}, median {middle}"
