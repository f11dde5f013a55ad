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

from ..arguments import integer, one_of
from ..errors import InputError
from ..measures.intervention import bootstrap_interval
from ..measures.profiles import finite_median, kept_by_gates, own_diagonal, peak_band
from ..measures.transfer import half_life_from_sums, log_decay_sums
from ..recurrence import measures
from ..vocabulary import BACKWARD, DIRECTION, GATE, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers
from .time_jacobian import block_norms


@dataclass(frozen=True)
class _LagProfile:
    """One lag profile with its mean lag and horizon."""

    name: str
    mean: Numbers
    low: Numbers | None
    high: Numbers | None
    mean_lag: float
    horizon: int
    colour: str

    @property
    def summary(self) -> str:
        """Mean lag and horizon as text; a horizon at the last lag is marked as a lower bound."""
        if self.horizon < 0:
            return "0 at every lag"
        last_lag = int(np.flatnonzero(np.isfinite(self.mean))[-1])
        return f"mean lag {self.mean_lag:.3g}\nhorizon {'≥ ' if self.horizon == last_lag else ''}{self.horizon}"


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

    Examples
    --------
    >>> jacobian = rl.jacobian(model, x, of="lstm.hidden", wrt="input", measure="norm")
    >>> len(rl.plot.lag_profile(jacobian))
    1
    """
    jacobians = (
        {str(name): data for name, data in jacobian.items()} if isinstance(jacobian, Mapping) else {"": jacobian}
    )
    if not jacobians:
        raise InputError(
            "plot.lag_profile got no time Jacobian.",
            got="an empty mapping",
            expected='one that rl.jacobian returned, or several by name: {"LSTM": one, "GRU": other}',
        )
    profiles: list[_LagProfile] = []
    notes: list[str | None] = []
    for name, data in jacobians.items():
        array, _ = block_norms(data, "lag_profile", dims)
        notes += _samples.notes_of(array)[:1]
        notes.append(None if _samples.padding_mask(array) is None else "padding left out")
        for view in _data.direction_views(array):
            norms = np.abs(_data.numpy_by_sample(view.data, OUT_TIME, IN_TIME))
            is_real = ~_data.numpy_by_sample(_samples.full_padding_mask(view.data), OUT_TIME, IN_TIME)
            times = (_data.positions(array, OUT_TIME), _data.positions(array, IN_TIME))
            if view.name == BACKWARD:  # lag counts from the output step to later input steps
                norms, is_real, times = np.swapaxes(norms, -1, -2), np.swapaxes(is_real, -1, -2), times[::-1]
            profile_name = " ".join(part for part in (name, view.name) if part)
            colour = _axes.line_colours(len(profiles) + 1)[-1]
            profiles.append(
                _summarise_profiles(
                    profile_name, colour, _sample_profiles(norms, is_real, times), samples, epsilon, confidence
                )
            )
    panels = _frame.open_panels("lag_profile", 1, ax, figure, size=(6.2, 3.4))
    for profile in profiles:
        _draw_lags(panels.axes[0], profile, line)
    _set_axes(panels.axes[0], profiles, delays, outside=bool(panels.direction_figures))
    is_peak_share = samples == "median" and any(profile.low is not None for profile in profiles)
    profile_name = "mean norm of the time Jacobian" + (", share of the sample's peak" if is_peak_share else "")
    panels.label_axes("lag (output step - input step)", profile_name)
    band_text = (
        "quartiles of the samples" if samples == "median" else f"{confidence:.0%} bootstrap interval over samples"
    )
    band_note = (
        f"band: {band_text}" if confidence > 0 and any(profile.low is not None for profile in profiles) else None
    )
    mark_note = f"dotted: mean lag; triangle: horizon, {100 * epsilon:g} % of the peak"
    return panels.with_title(title or "lag profile", [band_note, mark_note, *notes])


def _sample_profiles(norms: Numbers, is_real: Numbers, times: tuple[Numbers, Numbers]) -> Numbers:
    """Compute the lag profile of each sample, (sample, lag), from norms of a time Jacobian."""
    is_square = len(times[0]) == len(times[1])
    out_times, in_times = (None if is_square and np.array_equal(t, np.arange(len(t))) else t.tolist() for t in times)
    return np.stack(
        [
            measures.lag_profile(sample_norms, out_times=out_times, in_times=in_times, where=sample_is_real)
            for sample_norms, sample_is_real in zip(norms, is_real, strict=True)
        ]
    )


def _summarise_profiles(
    name: str, colour: str, sample_profiles: Numbers, samples: str, epsilon: float, confidence: float
) -> _LagProfile:
    """Summarise the lag profiles of all samples: line, band, mean lag and horizon."""
    has_several, low, high = len(sample_profiles) > 1, None, None
    band = peak_band(sample_profiles) if has_several and samples == "median" else None
    mean_profile = measures.finite_mean(sample_profiles, axis=0) if band is None else band.median
    if has_several and confidence > 0:
        low, high = (
            (band.low, band.high) if band else bootstrap_interval(sample_profiles, axis=0, confidence=confidence)
        )
    mean_lag, horizon = measures.mean_lag(mean_profile), measures.horizon(mean_profile, epsilon=epsilon)
    return _LagProfile(name, mean_profile, low, high, float(mean_lag), int(horizon), colour)


def _draw_lags(ax: Any, profile: _LagProfile, keywords: dict[str, Any]) -> None:
    """Draw one profile with its band, mean lag and horizon."""
    lags = np.arange(len(profile.mean))
    positive_values = np.where(profile.mean > 0, profile.mean, np.nan)
    if profile.low is not None and profile.high is not None:
        _axes.draw_band(ax, lags, profile.low, profile.high, profile.colour, alpha=0.25)
    style = {"label": profile.name, "gid": f"profile {profile.name}".strip(), "color": profile.colour, "linewidth": 1.4}
    style["marker"] = "o" if len(lags) == 1 else None
    ax.plot(lags, positive_values, **{**style, **keywords})
    if math.isfinite(profile.mean_lag):
        ax.axvline(profile.mean_lag, color=profile.colour, linewidth=0.9, linestyle=":", gid="mean lag")
    if profile.horizon >= 0:
        style = {"color": profile.colour, "markersize": 6, "transform": ax.get_xaxis_transform(), "gid": "horizon"}
        ax.plot([profile.horizon], [0.02], "^", **style)


def _set_axes(ax: Any, profiles: Sequence[_LagProfile], delays: Numbers, *, outside: bool) -> None:
    """Set a logarithmic value axis, mark the delays, and name the lines at their ends."""
    _axes.set_log_axis(ax)
    _axes.set_log_limits(ax, np.concatenate([profile.mean for profile in profiles]), headroom=2)
    _axes.tick_steps(ax, "x", np.arange(max(len(profile.mean) for profile in profiles)), time=False, margin=0.5)
    _axes.mark_delays(ax, delays)
    for delay in delays:
        _axes.mark_top(ax, float(delay), "delay")
    for profile in profiles:
        _axes.mark_below(ax, np.arange(len(profile.mean)), profile.mean, profile.colour)
    line_ends = []
    for profile in profiles:
        positive_lags = np.flatnonzero(profile.mean > 0)
        y = float(profile.mean[positive_lags[-1]]) if positive_lags.size else float("nan")
        text = "\n".join(part for part in (profile.name, profile.summary) if part)
        line_ends.append(_axes.LineEnd(y, text, profile.colour))
    _axes.name_ends(ax, line_ends, outside=outside)


#: Shares below this one are drawn at the border.
_DEEPEST = 1e-12
#: Symbols of the two ends of a Jacobian between states, by the name of the state.
_STATE_SYMBOLS = {"cell": "c", "initial_cell": "c", "hidden": "h", "initial_hidden": "h"}


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
    """Draw, unit by unit, the product of the gates that keep a state against the measured dc_t/dc_0.

    Of a GRU, whose update gate keeps the hidden state, it is dh_t/dh_0.

    The product is the share of the initial state that the gates alone would keep. On the dashed line the measured
    derivative equals the product. Points above or below it show the effect of the gates' own dependence on the state.
    Points are medians over samples, with one colour per time step t.

    Parameters
    ----------
    layer : (sample, time, gate, unit), also with direction
        A layer of a trace, whose cell has a gate that is the share of the state that a step keeps: ``forget`` of an
        LSTM, ``update`` of a GRU. The attribute ``keeping`` of the gates names it. The mask is applied.
    jacobian : (sample, out_time, out_unit, in_feature)
        ``rl.jacobian(model, x, of="lstm.cell", wrt="lstm.initial_cell")`` of the same batch; of a GRU ``hidden`` and
        ``initial_hidden``. ``at={"out_time": [...]}`` restricts it to some steps.
    max_lines
        Largest number of time steps, evenly spaced, the last included.

    Returns
    -------
    1-D array of Axes, forward before backward

    Examples
    --------
    >>> kept = rl.jacobian(model, x[:2], of="lstm.cell", wrt="lstm.initial_cell")
    >>> axes = rl.plot.memory_lifetime(trace["lstm"], kept)
    >>> len(axes)
    1
    """
    gates = _data.label_array(_data.layer_variable(layer, "gates", "memory_lifetime", masked=True), "memory_lifetime")
    _data.require_dim(gates, GATE, "memory_lifetime")
    keeping_gate = gates.attrs.get("keeping")
    if keeping_gate not in _data.names_of(gates, GATE):
        expected = "a forget gate (LSTM), an update gate (GRU), or the gate that a cell of yours names in `keeping`"
        received = f"gates {', '.join(_data.names_of(gates, GATE))}"
        problem = "No gate of this cell keeps its state."
        if keeping_gate is not None:
            problem = f"The {keeping_gate} gate, which keeps the state, was not selected."
        raise InputError(problem, got=received, expected=expected)
    jacobian_array = _data.label_array(jacobian, "memory_lifetime", guess={4: (SAMPLE, OUT_TIME, OUT_UNIT, IN_FEATURE)})
    directions = [view.name for view in _data.direction_views(gates)]
    panels = _frame.open_panels("memory_lifetime", 1, ax, figure, directions=directions, size=(4.4, 3.5))
    for direction_index, (panel_ax, direction) in enumerate(zip(panels.axes, directions, strict=True)):
        products, derivatives, steps = _kept_and_measured(
            gates, jacobian_array, keeping_gate, direction_index if direction else None, max_steps=max_lines
        )
        last_step_text = _draw_lifetime(panel_ax, products, derivatives, steps, point)
    states = [str(jacobian_array.attrs.get(end, "")).rpartition(".")[2] for end in ("of", "wrt")]
    upper, lower = (_STATE_SYMBOLS.get(state, "s") for state in states)
    x_label = f"product of the {keeping_gate} gates up to t"
    panels.label_axes(x_label, f"$|\\partial{{}}{upper}_t/\\partial{{}}{lower}_0|$ of the same unit")
    claim = f"{keeping_gate} gates explain {last_step_text}" if len(panels.axes) == 1 else "memory lifetime"
    default_title = _data.layer_title(gates.attrs, claim)
    count = gates.sizes.get(SAMPLE, 1)
    median_note = (
        f"{f'median of {count} samples' if count > 1 else 'a point per unit'}; explained: within a factor of 2"
    )
    nonfinite_notes = [
        _data.nonfinite_note(values) for values in (jacobian_array.values, gates.sel({GATE: keeping_gate}).values)
    ]
    return panels.with_title(title or default_title, [median_note, *nonfinite_notes])


def _kept_and_measured(
    gates: xr.DataArray, jacobian_array: xr.DataArray, keeping_gate: str, direction_index: int | None, *, max_steps: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the products of the keeping gate and the measured derivatives, (step, unit) each, and the steps."""
    is_backward = direction_index is not None and _data.names_of(gates, DIRECTION)[direction_index] == BACKWARD
    is_backward = is_backward or (direction_index is None and gates.attrs.get("direction") == BACKWARD)
    if direction_index is not None:
        gates = gates.isel({DIRECTION: direction_index})
        direction_selection = {
            dim: direction_index for dim in (DIRECTION, f"in_{DIRECTION}") if dim in jacobian_array.dims
        }
        jacobian_array = jacobian_array.isel(direction_selection)
    gate_values = _data.numpy_by_sample(gates.sel({GATE: keeping_gate}), TIME)
    is_real = _samples.real_step_mask(gates)
    recurrence_order = slice(None, None, -1) if is_backward else slice(None)
    products = kept_by_gates(gate_values[:, recurrence_order], is_real[:, recurrence_order])[:, recurrence_order]
    source_dims = [str(d) for d in jacobian_array.dims if d not in (SAMPLE, OUT_TIME, OUT_UNIT)]
    if OUT_TIME not in jacobian_array.dims or OUT_UNIT not in jacobian_array.dims or len(source_dims) != 1:
        _refuse_mismatch(jacobian_array)
    derivatives = np.abs(own_diagonal(_data.numpy_by_sample(jacobian_array, OUT_TIME, OUT_UNIT, source_dims[0])))
    steps = _data.positions(jacobian_array, OUT_TIME)
    if (
        derivatives.shape[2] != products.shape[2]
        or derivatives.shape[0] != products.shape[0]
        or steps.max() >= products.shape[1]
    ):
        _refuse_mismatch(jacobian_array)
    spaced_indices = np.linspace(-1, len(steps) - 1, min(max_steps, len(steps)) + 1)[1:]
    step_indices = np.array(sorted({round(spaced_index) for spaced_index in spaced_indices}))
    products, derivatives = (
        np.where(np.isfinite(values).all(axis=0), finite_median(values), np.nan)
        for values in (products[:, steps[step_indices].astype(int)], derivatives[:, step_indices])
    )
    return products, derivatives, steps[step_indices]


def _refuse_mismatch(jacobian_array: xr.DataArray) -> None:
    raise InputError(
        "The Jacobian does not fit the gates.",
        got=f"dimensions {dict(jacobian_array.sizes)}",
        expected="(sample, out_time, out_unit, in_feature) of one state and the same batch",
        hint='rl.jacobian(model, x, of="lstm.cell", wrt="lstm.initial_cell")',
    )


def _draw_lifetime(ax: Any, products: Numbers, derivatives: Numbers, steps: Numbers, keywords: dict[str, Any]) -> str:
    """Draw the points of all units, a colour per step; values that are too small are at the border.

    Return in words how many units lie on the line at the last step.
    """
    all_values = np.concatenate([products.reshape(-1), derivatives.reshape(-1)])
    positive_values = all_values[np.isfinite(all_values) & (all_values > 0)]
    low = max(float(positive_values.min(initial=1.0)), _DEEPEST) / 3
    high = max(float(positive_values.max(initial=1.0)), 1.0) * 3
    size, has_values_below = float(np.clip(1500 / products.shape[1], 4, 26)), False
    for x, y, step, colour in zip(products, derivatives, steps, _axes.line_colours(len(steps)), strict=True):
        is_finite = np.isfinite(x) & np.isfinite(y)
        has_values_below = has_values_below or bool((np.minimum(x, y)[is_finite] < low).any())
        point_positions = np.maximum(x[is_finite], low), np.maximum(y[is_finite], low)
        is_near = np.abs(np.log2(point_positions[0] / point_positions[1])) <= 1
        count_text = f"{is_near.sum()} of {len(x)}"
        label = f"step {step:g}: {count_text}"
        style = {"s": size, "color": colour, "alpha": 0.7, "linewidth": 0, "label": label, "zorder": 3}
        ax.scatter(*point_positions, **{"gid": f"units {step:g}", "clip_on": False, **style, **keywords})
        if not is_finite.all():
            ax.plot(
                np.maximum(x[~is_finite], low), np.full((~is_finite).sum(), low), "x", color="black", gid="non-finite"
            )
    ax.plot([low, high], [low, high], color="0.4", linewidth=0.9, linestyle="--", zorder=1, gid="identity")
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in ("x", "y"):
        _axes.set_log_axis(ax, axis, most_ticks=5)
    if has_values_below:
        text = f"at the border: below {_axes.short_number(low)}"
        _axes.write_text(ax, text, (0.97, 0.02), over="axes fraction", va="bottom", gid="below")
    legend_style: dict[str, Any] = {"fontsize": "x-small", "title_fontsize": "x-small", "alignment": "left"}
    ax.legend(title="units on the line", loc="upper left", **legend_style)
    return f"{count_text} units at step {steps[-1]:g}"


#: Largest number of rows and columns of the picture of decays, and largest lag.
_CELLS, _LAGS = (200, 400), 10_000


@drawing(AxesImage, extra=_images.IMSHOW, lags=integer(least=1, most=_LAGS))
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
    """Draw the share of a state that the decay leaves: heads or channels across, lag upward, with their half-lives.

    The share after k steps is the k-th power of the geometric mean of the decays over samples and steps. Columns are
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

    Examples
    --------
    >>> axes = rl.plot.decay_by_lag(trace["lstm"].gates.sel(gate="forget"))
    >>> len(axes)
    1
    """
    array = _data.label_array(decay, "decay_by_lag", dims=dims, guess={3: (SAMPLE, TIME, "head")})
    _data.require_time(array, "decay_by_lag")
    values = _data.numpy_by_sample(array, TIME)
    if (values < 0).any() or not np.isfinite(values).all():
        received, expected = "negative or non-finite values", "numbers from 0 on"
        raise InputError("plot.decay_by_lag draws decays.", got=received, expected=expected)
    log_sums, step_counts = (np.ravel(statistic) for statistic in log_decay_sums(values))
    half_life = half_life_from_sums(log_sums, step_counts)
    order = np.argsort(half_life)
    last_lag = lags or int(array.sizes[TIME])
    lags_drawn = np.arange(last_lag + 1)
    mean_logs = np.where(step_counts > 0, log_sums / np.maximum(step_counts, 1), -np.inf)[order]
    with np.errstate(invalid="ignore"):
        shares = np.where(lags_drawn > 0, np.exp(mean_logs[:, None] * np.maximum(lags_drawn, 1)), 1.0)
    row_dims = [f"{dim}s".replace("_", " ") for dim in array.dims if dim not in (SAMPLE, TIME)]
    row_label = " × ".join(row_dims) or "state"  # noqa: RUF001
    panels = _frame.open_panels("decay_by_lag", 1, ax, figure, size=(4.6, 3.0), margin=(1.2, 0.9), ticks="medium")
    style = {"cmap": _axes.POSITIVE, "vmin": 0.0, "vmax": 1.0, **image}
    panel_ax = panels.axes[0]
    share_matrix = _images.Matrix(shares.T, np.arange(len(order)), lags_drawn, over_time=False)
    drawn_image = _images.draw_image(panel_ax, share_matrix, style=style, upward=True, cell_limits=_CELLS)
    limits = panel_ax.get_xlim(), panel_ax.get_ylim()
    clipped_half_lives = np.minimum(half_life[order], last_lag)
    panel_ax.step(
        np.arange(len(order) + 1) - 0.5,
        np.r_[clipped_half_lives, clipped_half_lives[-1]],
        where="post",
        color="black",
        lw=1.2,
        gid="half-life",
    )
    panel_ax.set(xlim=limits[0], ylim=limits[1])
    if colorbar:
        _images.colour_bar([panel_ax], drawn_image, "share of the state left")
    panels.label_axes(f"{row_label}, fastest first", "lag [step]")
    merge_note = _images.merge_note(shares.T.shape, _CELLS, "lag", "column")
    return panels.with_title(
        title or _data.layer_title(array.attrs, _half_life_title(half_life)), ["line: half-life", merge_note]
    )


def _half_life_title(half_life: Numbers) -> str:
    """Return a title with the median half-life, the fastest and the slowest."""
    fastest, median, slowest = (
        "endless" if np.isinf(value) else f"{value:.2g}" if value < 10 else f"{value:.0f}"
        for value in (half_life.min(), np.median(half_life), half_life.max())
    )
    unit = "" if median == "endless" else " step" if median == "1" else " steps"
    spread = "" if fastest == slowest else f" ({fastest} to {slowest})"
    return f"half-life: {median}{unit}{spread}"
