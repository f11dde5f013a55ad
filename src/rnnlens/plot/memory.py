"""``lag_profile``: dependence of outputs on inputs by lag.

``memory_lifetime``: product of forget gates against dc_t/dc_0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection
from matplotlib.lines import Line2D

from ..arguments import one_of
from ..errors import InputError
from ..measures.profiles import finite_median, kept_by_gates, own_diagonal, peak_band
from ..recurrence import measures
from ..vocabulary import BACKWARD, DIRECTION, GATE, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE, TIME
from ._axes import (
    End,
    line_colours,
    log_limits,
    log_ticks,
    log_values,
    mark_below,
    mark_top,
    name_ends,
    power_of_ten,
    step_axis,
)
from ._call import drawing
from ._data import (
    Numbers,
    dataset_of,
    labelled,
    layer_title,
    names_of,
    nonfinite_note,
    positions,
    require_dim,
    variable,
)
from ._frame import Grid, open_panels
from ._samples import hidden, notes_of
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
    colour: Any = "#0072b2"

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
    delays : int or sequence of int
        Lags, to be marked, at which the task is known to need its input.
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
            if way == BACKWARD:  # lag counts from the output step to later input steps
                norms, where, times = np.swapaxes(norms, -1, -2), np.swapaxes(where, -1, -2), times[::-1]
            curves.append(
                _curve(" ".join(p for p in (name, way) if p), _rows(norms, where, times), samples, epsilon, confidence)
            )
    panels = open_panels("lag_profile", 1, Grid((6.2, 3.4)), (None,), ax, figure)
    place = panels.axes[0]
    curves = [replace(curve, colour=colour) for curve, colour in zip(curves, line_colours(len(curves)), strict=True)]
    for curve in curves:
        _draw_lags(place, curve, line)
    _scale(place, curves, delays, outside=bool(panels.owners))
    of_peaks = samples == "median" and any(curve.low is not None for curve in curves)
    words = "mean norm of the time Jacobian" + (", share of the sample's peak" if of_peaks else "")
    panels.label("lag (output step - input step)", words)
    band = "quartiles of the samples" if samples == "median" else f"{confidence:.0%} bootstrap interval over samples"
    shown = f"band: {band}" if confidence > 0 and any(c.low is not None for c in curves) else None
    return panels.titled(
        title or "lag profile", [shown, f"dotted: mean lag; triangle: horizon, {100 * epsilon:g} % of the peak", *notes]
    )


def _rows(norms: Numbers, where: Numbers, times: tuple[Numbers, Numbers]) -> Numbers:
    """Return the lag profile of each sample, (sample, lag)."""
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
    """Summarise all samples: line, band, mean lag and horizon."""
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
    """Return whether the times are all steps from 0 on."""
    return bool(np.array_equal(times, np.arange(len(times))))


def _draw_lags(ax: Any, curve: _Curve, keywords: dict[str, Any]) -> None:
    """Draw one profile with its band, mean lag and horizon."""
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
    """Set a logarithmic value axis, mark the delays, and name the lines at their ends."""
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
    gates = labelled(variable(layer, "gates", "memory_lifetime"), "memory_lifetime")
    require_dim(gates, GATE, "memory_lifetime")
    keep = next((name for name in KEEPING if name in names_of(gates, GATE)), None)
    if keep is None:
        expected = "a forget gate (LSTM) or an update gate (GRU)"
        got = f"gates {', '.join(names_of(gates, GATE))}"
        raise InputError("No gate of this cell keeps its state.", got=got, expected=expected)
    array = labelled(jacobian, "memory_lifetime", guess={4: (SAMPLE, OUT_TIME, OUT_UNIT, IN_FEATURE)})
    ways = names_of(gates, DIRECTION) if DIRECTION in gates.dims else [None]
    mask = _mask(layer, gates)
    panels = open_panels("memory_lifetime", 1, Grid((3.6, 3.5)), ways, ax, figure)
    for number, (place, way) in enumerate(zip(panels.axes, ways, strict=True)):
        kept, arrived, steps = _values(gates, array, keep, number if way else None, mask, most=max_lines)
        _draw_lifetime(place, kept, arrived, steps, point)
    symbol = "c" if keep == "forget" else "h"
    words = f"product of the {keep} gates up to t"
    panels.label(words, f"$|\\partial{{}}{symbol}_t/\\partial{{}}{symbol}_0|$ of the same unit")
    head = layer_title(gates.attrs, "memory lifetime")
    count = gates.sizes.get(SAMPLE, 1)
    note = f"median over {count} samples, a point per unit" if count > 1 else "a point per unit"
    return panels.titled(
        title or head, [note, nonfinite_note(array.values), nonfinite_note(gates.sel({GATE: keep}).values)]
    )


def _mask(layer: Any, gates: xr.DataArray) -> Numbers | None:
    dataset = dataset_of(layer)
    if dataset is None or "mask" not in dataset or SAMPLE not in gates.dims:
        return None
    return np.asarray(dataset["mask"].transpose(SAMPLE, TIME).values != 0)


def _values(
    gates: xr.DataArray, array: xr.DataArray, keep: str, half: int | None, mask: Numbers | None, *, most: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the product of the gates and the measured derivative, (step, unit) each, and the steps."""
    backward = half is not None and names_of(gates, DIRECTION)[half] == BACKWARD
    backward = backward or (half is None and gates.attrs.get("direction") == BACKWARD)
    if half is not None:
        gates = gates.isel({DIRECTION: half})
        own = {dim: half for dim in (DIRECTION, f"in_{DIRECTION}") if dim in array.dims}
        array = array.isel(own)
    unit = next(str(d) for d in gates.dims if d not in (SAMPLE, TIME, GATE))
    lead = [SAMPLE] if SAMPLE in gates.dims else []
    forget = gates.sel({GATE: keep}).transpose(*lead, TIME, unit).values
    forget = forget if lead else forget[None]
    against = slice(None, None, -1) if backward else slice(None)
    kept = kept_by_gates(forget[:, against], None if mask is None else mask[:, against])[:, against]
    sources = [str(d) for d in array.dims if d not in (SAMPLE, OUT_TIME, OUT_UNIT)]
    if OUT_TIME not in array.dims or OUT_UNIT not in array.dims or len(sources) != 1:
        _refuse(array)
    lead = [SAMPLE] if SAMPLE in array.dims else []
    whole = array.transpose(*lead, OUT_TIME, OUT_UNIT, sources[0]).values
    arrived = np.abs(own_diagonal(whole if lead else whole[None]))
    steps = positions(array, OUT_TIME)
    if arrived.shape[2] != kept.shape[2] or arrived.shape[0] != kept.shape[0] or steps.max() >= kept.shape[1]:
        _refuse(array)
    places = np.linspace(-1, len(steps) - 1, min(most, len(steps)) + 1)[1:]
    chosen = sorted({round(place) for place in places})
    at = np.array(chosen)
    found = _median(kept[:, steps[at].astype(int)]), _median(arrived[:, at])
    return *found, steps[at]


def _median(values: Numbers) -> Numbers:
    """Return the median over samples, NaN where any sample is not finite."""
    return np.where(np.isfinite(values).all(axis=0), finite_median(values), np.nan)


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
    size = float(np.clip(1500 / kept.shape[1], 4, 26))
    deep = False
    for x, y, step, colour in zip(kept, arrived, steps, line_colours(len(steps)), strict=True):
        seen = np.isfinite(x) & np.isfinite(y)
        deep = deep or bool((np.minimum(x, y)[seen] < low).any())
        look = {"s": size, "color": colour, "alpha": 0.7, "linewidth": 0, "label": f"t = {step:g}", "zorder": 3}
        points = np.maximum(x[seen], low), np.maximum(y[seen], low)
        ax.scatter(*points, **{"gid": f"units {step:g}", "clip_on": False, **look, **keywords})
        if not seen.all():
            ax.plot(np.maximum(x[~seen], low), np.full((~seen).sum(), low), "x", color="black", gid="non-finite")
    ax.plot([low, high], [low, high], color="0.4", linewidth=0.9, linestyle="--", zorder=1, gid="identity")
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in ("x", "y"):
        log_ticks(ax, axis, most=5)
    if deep:
        ax.annotate(f"at the border: below {power_of_ten(low)}", (0.97, 0.02), xycoords="axes fraction",
                    ha="right", va="bottom", fontsize="x-small", gid="below")  # fmt: skip
    ax.legend(fontsize="x-small", loc="upper left")
    ax.tick_params(labelsize="small")
