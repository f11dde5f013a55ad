"""Figures of diagnoses and dynamics: ``diagnosis``, ``eigenvalues``, ``fixed_points``, ``gradient_carriers``."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D

from ..arguments import as_numpy, refuse_large
from ..errors import InputError, short_repr
from ..measures.profiles import carriers, lorenz, typical_first
from ..recurrence.measures import safe_norm
from ..results.diagnosis import Diagnosis, FixedPoints
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, SAMPLE, TIME
from . import _axes, _data, _frame, _samples
from ._call import drawing
from ._data import Numbers
from .trajectories import axes_of, draw_fixed_points, set_equal_limits

#: Lower end of the axis as a share of the gradient; smaller shares are marked by an arrow.
FLOOR = 1e-5
_THRESHOLD = {"color": "0.45", "linewidth": 0.9, "linestyle": ":"}


@drawing(Line2D)
def diagnosis(
    d: Diagnosis, *, layer: str | None = None, title: str | None = None, ax: Any = None, figure: Any = None, **line: Any
) -> Any:
    """Draw the measurements of a diagnosis, a panel for each that was made.

    Use of older steps over the number of steps kept, with the memory in use; the benefit of these steps; the residual
    test by lag; the gradient that survives k steps back, of any final state and of a random projection of the output,
    median and quartiles; time constants of the gates.

    Parameters
    ----------
    d
        Result of ``rl.diagnose``.
    layer
        Layer of the panels on gradient and gates; the first by default.

    Returns
    -------
    1-D array of Axes: use, benefit, residual test, gradient, time constants, without those that were not measured;
    gradient and time constants of a bidirectional layer are two panels each, of the forward and the backward half

    Examples
    --------
    >>> axes = rl.plot.diagnosis(rl.diagnose(model, x, y, loss=mse_loss))
    >>> axes.save("diagnosis.png")
    """
    if not isinstance(d, Diagnosis):
        hint = "rl.plot.diagnosis(rl.diagnose(model, x, y))"
        raise InputError("plot.diagnosis draws a diagnosis.", got=type(d).__name__, hint=hint)
    if all(name == "model" for name in d):
        reason = d["model"].attrs.get("why", "")
        raise InputError("This diagnosis measured no layer.", got=reason, expected="a diagnosis without that finding")
    model = d["model"]
    layer_data = d[layer or next(name for name in d if name != "model")]
    halves = (
        [layer_data.sel({DIRECTION: direction}) for direction in (FORWARD, BACKWARD)]
        if DIRECTION in layer_data.dims
        else [layer_data]
    )
    drawings: list[tuple[Callable[[Any, xr.Dataset, dict[str, Any]], None], xr.Dataset]] = [(_draw_use, model)]
    drawings += [(_draw_benefit, model)] * _is_measured(model, "benefit")
    drawings += [(_draw_residual_test, model)] * ("missed" in model)
    drawings += [(_draw_gradient, half) for half in halves if "kappa" in half or "adjoint" in half]
    drawings += [(_draw_time_constants, half) for half in halves if "timescale" in half]
    columns = len(drawings) if len(drawings) < 4 else 2 if len(drawings) == 4 else 3
    shape = (-(-len(drawings) // columns), columns)
    panels = _frame.open_panels("diagnosis", len(drawings), ax, figure, size=(4.0, 2.8), margin=(0.6, 1.0), shape=shape)
    for panel_ax, (draw_panel, panel_data) in zip(panels.axes, drawings, strict=True):
        draw_panel(panel_ax, panel_data, line)
        if DIRECTION in panel_data.coords:
            panel_ax.set_title(f"{panel_ax.get_title()}, {panel_data[DIRECTION].item()} half")
        panel_ax.title.set_fontsize("medium")
    sentence = next(iter(d.sentences.values()))
    headline, *other_sentences = re.split(r"(?<=\.)\s+(?=[A-Z])", sentence, maxsplit=1)
    drawing_result = panels.with_title(title or headline)
    for direction_figure in panels.direction_figures:
        direction_figure._suptitle.set_fontweight("bold")
        if other_sentences and title is None:
            width = int(13 * direction_figure.bbox.width / direction_figure.dpi)
            direction_figure.supxlabel(
                textwrap.fill(other_sentences[0][:1].upper() + other_sentences[0][1:], width),
                fontsize="small",
                color="0.25",
            )
    return drawing_result


def _is_measured(model: xr.Dataset, name: str) -> bool:
    """Return whether a curve over the number of steps kept was measured."""
    return name in model and bool(model[name].size) and bool(np.isfinite(model[name].values).any())


def _draw_over_context(ax: Any, model: xr.Dataset, name: str, colour: str, keywords: dict[str, Any]) -> None:
    """Draw a measure over the number of steps kept, with its confidence interval."""
    context, values, interval = model["context"].values, model[name].values, model[f"{name}_interval"].values
    style = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.6}
    ax.plot(context, values, **{"gid": name, **style, **keywords})
    _axes.draw_band(ax, context, interval[:, 0], interval[:, 1], colour, alpha=0.15, gid=None)
    ax.set_xlim(0, float(model["steps"]) + 0.5)
    ax.set_xlabel("steps kept, counted back from the last")
    _axes.tick_whole_numbers(ax.xaxis)


def _draw_use(ax: Any, model: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the use of older steps, with the 5 % threshold and the memory in use."""
    if _is_measured(model, "use"):
        _draw_over_context(ax, model, "use", _axes.BLUE, keywords)
        ax.axhline(0.05, **_THRESHOLD)
        _axes.write_text(ax, "5 %", (0, 0.05), (3, 2), over=ax.get_yaxis_transform(), ha="left", va="baseline")
    ax.set(ylabel="use (share of the variance)", title="Use of older steps")
    ax.set_ylim(0, max(1.0, float(np.nanmax(model["use"].values, initial=0.0))) * 1.08)
    memory_length = float(model["memory"])
    if not (bool(model.attrs["known"]) and np.isfinite(memory_length)):
        ax.annotate("memory unknown", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.4")
        return
    text = f"memory in use: {'≥ ' if model.attrs['censored'] else ''}{memory_length:.0f}"
    ax.axvline(memory_length, color="0.3", linewidth=0.9, gid="memory")
    alignment, offset = ("left", 4) if 2 * memory_length < float(model["steps"]) else ("right", -4)
    _axes.write_text(
        ax,
        text,
        (memory_length, 0.97),
        (offset, 0),
        over=ax.get_xaxis_transform(),
        ha=alignment,
        va="top",
        fontsize="small",
    )


def _draw_benefit(ax: Any, model: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the performance lost when older steps are exchanged."""
    _draw_over_context(ax, model, "benefit", _axes.GREEN, keywords)
    ax.set(ylabel="benefit (share of the score)", title="Performance lost when older steps are replaced")
    top = float(np.nanmax(model["benefit"].values))
    ax.set_ylim(-0.05, min(max(top, 1.0), 1.5) * 1.1)
    if top > 1.5:  # the benefit can exceed 1 if predictions are overconfident
        _axes.write_text(ax, f"up to {top:.1f}", (0.02, 0.97), over="axes fraction", ha="left", va="top")


def _draw_residual_test(ax: Any, model: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the covariance of errors and past inputs by lag, relative to the threshold of the test."""
    threshold = float(model["missed_threshold"])  # 0 where the model makes no errors
    shares = model["missed"].values / (threshold or 1.0)
    ax.vlines(np.arange(shares.size), 0, shares, color=_axes.ORANGE, linewidth=1.4, gid="missed")
    ax.axhline(1, **_THRESHOLD)
    _axes.write_text(ax, "threshold: 99 % of chance", (1, 1), (-2, 2), over=ax.get_yaxis_transform(), va="baseline")
    if shares.max() > 1:
        text = f"inputs explain {100 * max(float(model['missed_effect']), 0.0):.1f} % of the target's variance"
        _axes.write_text(ax, text, (0.98, 0.97), over="axes fraction", ha="right", va="top", fontsize="small")
    ax.set_ylim(0, max(float(shares.max()), 1.0) * 1.2)
    ax.set(xlabel="lag in steps", ylabel="share of the threshold", title="Do the errors depend on past inputs?")
    _axes.tick_steps(ax, "x", np.arange(shares.size), time=False)


def _draw_gradient(ax: Any, layer_data: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the gradient surviving k steps back: of any final state, and of a random projection of the output."""
    curves = (
        ("kappa", _axes.BLUE, "of any final state (state transfer)"),
        ("adjoint", _axes.PINK, "of the output, by own peak"),
    )
    for name, colour, label in curves:
        if name in layer_data:
            style = {"label": label, "gid": name, "color": colour, "linewidth": 1.8, **keywords}
            values = layer_data[name].values
            lag = np.arange(values.size)
            ax.plot(lag, np.where(values > 0, np.maximum(values, FLOOR * 1e-2), np.nan), **style)
            low, high = (
                np.maximum(layer_data[f"{name}_{quartile}"].values, FLOOR * 1e-2) for quartile in ("low", "high")
            )
            _axes.draw_band(ax, lag, low, high, style["color"], alpha=0.15, gid=None)
            below_lags = np.flatnonzero(~(values > FLOOR))
            if below_lags.size:
                marker_style = {"marker": "v", "markersize": 6, "linestyle": "", "clip_on": False, "gid": "below"}
                ax.plot(below_lags[:1], [FLOOR], color=style["color"], **marker_style)
                text, point = f"below {_axes.short_number(FLOOR)}", (float(below_lags[0]), FLOOR)
                _axes.write_text(ax, text, point, (0, 9), ha="center", va="baseline", gid="below")
    ax.axhline(1e-4, **_THRESHOLD)
    _axes.write_text(ax, "vanished: 1e-4", (1, 1e-4), (-2, 2), over=ax.get_yaxis_transform(), va="baseline")
    _axes.set_log_axis(ax)
    ax.set_ylim(bottom=FLOOR)
    ax.set(xlabel="k, steps back", ylabel="share of the gradient", title="Gradient surviving k steps back")
    ax.legend(fontsize="x-small", loc="best")
    _axes.tick_whole_numbers(ax.xaxis)


def _draw_time_constants(ax: Any, layer_data: xr.Dataset, keywords: dict[str, Any]) -> None:
    """Draw the time constant of each unit's keeping gate, in ascending order."""
    values = np.sort(layer_data["timescale"].values)
    finite_values = np.where(np.isfinite(values), values, np.nan)
    style = {"color": _axes.BLUE, "marker": ".", "markersize": 5, "linewidth": 0.8}
    ax.plot(np.arange(values.size), finite_values, **{"gid": "timescale", **style, **keywords})
    _axes.set_log_axis(ax)
    ax.set(xlabel="unit, in ascending order", ylabel="steps", title="Time constants of the gates")
    _axes.tick_whole_numbers(ax.xaxis)


_TIME_COLOURS = LinearSegmentedColormap.from_list("rnnlens.order", (_axes.LIGHT_BLUE, _axes.BLUE, "#08306b"))


@drawing(PathCollection, extra=("marker", "s"))
def eigenvalues(values: Any, *, title: str | None = None, ax: Any = None, figure: Any = None, **point: Any) -> Any:
    """Draw the eigenvalues of step Jacobians in the complex plane, with the unit circle.

    A mode on the circle is kept from step to step, one at 0 is forgotten at once, one outside grows. Later steps are
    darker. The plane is drawn as far as the eigenvalues reach. The title names the largest modulus, and the period of
    a complex pair, 2 pi / angle: the number of steps after which the mode has turned once. A second panel has the
    moduli of all modes, largest first: median and range over samples and steps. Both
    directions of a bidirectional layer are drawn together; ``values.sel(direction="backward")`` is one of them.

    Parameters
    ----------
    values
        Result of ``rl.step_eigenvalues(model, x)``; the fixed points of ``rl.fixed_points``; or a complex array
        whose last axis counts modes.

    Returns
    -------
    1-D array of two Axes

    Examples
    --------
    >>> axes = rl.plot.eigenvalues(rl.step_eigenvalues(model, x[:4]))
    >>> len(axes)  # the complex plane, and the moduli
    2
    """
    eigenvalue_rows, row_times, time_label, layer_name = _read_eigenvalues(values)
    panels = _frame.open_panels("eigenvalues", 2, ax, figure, size=(3.7, 3.2), shape=(1, 2), widths=(1.25, 1))
    _draw_complex_plane(panels.axes[0], eigenvalue_rows, row_times, time_label, point)
    _draw_moduli(panels.axes[1], eigenvalue_rows)
    _name_leading_mode(panels.axes[0], eigenvalue_rows)
    finite_values = eigenvalue_rows[np.isfinite(eigenvalue_rows)]
    outside_note = f"{int((np.abs(finite_values) > 1).sum()):,} of {finite_values.size:,} outside the unit circle"
    nonfinite_note = _data.nonfinite_note(np.where(np.isfinite(eigenvalue_rows), 0.0, np.nan))
    default_title = _data.layer_title({"layer": layer_name}, _leading_mode_text(eigenvalue_rows))
    return panels.with_title(title or default_title, [outside_note, nonfinite_note])


def _leading_mode_text(values: Numbers) -> str:
    """Return a title: the median of the largest modulus, and the median period of these modes if they are complex."""
    leading = _leading_modes(values)
    if not leading.size:
        return "eigenvalues of the step Jacobian"
    text = f"the slowest mode keeps {np.median(np.abs(leading)):.2g} of itself per step"
    return f"{text}, and turns once in {_axes.short_number(_period(leading))} steps" if _is_turning(leading) else text


def _leading_modes(values: Numbers) -> Numbers:
    """Return the eigenvalue of largest modulus of each row whose eigenvalues are all finite."""
    rows = values[np.isfinite(values).all(axis=1)]
    return np.asarray(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])


def _is_turning(leading: Numbers) -> bool:
    """Return whether most of the leading modes are complex."""
    return bool(np.mean(np.abs(leading.imag) > 1e-3 * np.abs(leading)) > 0.5)


def _period(leading: Numbers) -> float:
    """Return the median number of steps in which a complex mode turns once."""
    return float(2 * np.pi / np.median(np.abs(np.angle(leading))))


def _name_leading_mode(ax: Any, values: Numbers) -> None:
    """Point at the upper one of the leading complex pair, with its period, if it is in one place at most steps."""
    leading = _leading_modes(values)
    if not leading.size or not _is_turning(leading):
        return
    upper = leading.real + 1j * np.abs(leading.imag)
    middle = complex(np.median(upper.real), np.median(upper.imag))
    if np.median(np.abs(upper - middle)) > 0.2 * abs(middle):
        return
    point = middle.real, middle.imag
    text = f"slowest mode,\nturns in {_axes.short_number(_period(leading))} steps"
    is_right = ax.transLimits.transform(point)[0] > 0.5
    style: dict[str, Any] = {"ha": "right" if is_right else "left", "va": "bottom", "gid": "leading", "zorder": 5}
    arrow = {"arrowstyle": "-", "color": "0.3", "linewidth": 0.7}
    _axes.write_text(ax, text, point, (-16 if is_right else 16, 26), arrowprops=arrow, bbox=_axes.TEXT_BOX, **style)


def _read_eigenvalues(values: Any) -> tuple[Numbers, Numbers, str, str]:
    """Read eigenvalues: return (row, mode), a time for each row, the label of these times, and the layer name."""
    if isinstance(values, FixedPoints):
        array = values.eigenvalues.values
        return array, np.zeros(len(array)), "", str(values.layers[0])
    if isinstance(values, xr.Dataset) and "eigenvalue_real" in values:
        all_eigenvalues = values["eigenvalue_real"] + 1j * values["eigenvalue_imag"]
        all_eigenvalues = all_eigenvalues.transpose(..., "mode")
        row_times = np.zeros(all_eigenvalues.shape[:-1])
        if all_eigenvalues.dims[-2:-1] == (TIME,):
            row_times = np.broadcast_to(_data.positions(all_eigenvalues, TIME), row_times.shape)
        rows = all_eigenvalues.values.reshape(-1, all_eigenvalues.shape[-1])
        layer_name = str(values.attrs.get("layer", ""))
        if DIRECTION in values.coords:
            layer_name = f"{layer_name} ({' and '.join(np.atleast_1d(values[DIRECTION].values))})"
        return rows, row_times.reshape(-1), "time step", layer_name
    array = as_numpy(values.values if isinstance(values, xr.DataArray) else values)
    refuse_large("values", array, "fewer samples or steps", share=16 / max(array.itemsize, 1))
    if array.dtype.kind not in "cf" or array.ndim == 0 or array.size == 0:
        expected, hint = "numbers, the last axis counting modes", "rl.step_eigenvalues(model, x)"
        raise InputError("plot.eigenvalues draws eigenvalues.", got=short_repr(values), expected=expected, hint=hint)
    rows = array.reshape(-1, array.shape[-1]).astype(complex)
    return rows, np.zeros(len(rows)), "", ""


def _draw_complex_plane(
    ax: Any, values: Numbers, row_times: Numbers, time_label: str, keywords: dict[str, Any]
) -> None:
    """Draw all eigenvalues in the complex plane, later ones darker."""
    angle = np.linspace(0, 2 * np.pi, 200)
    ax.plot(np.cos(angle), np.sin(angle), color="0.4", linewidth=0.9, gid="unit circle")
    for draw_line in (ax.axhline, ax.axvline):
        draw_line(0, color="0.8", linewidth=0.6, zorder=0.5)
    value_times = np.broadcast_to(row_times[:, None], values.shape)
    is_finite = np.isfinite(values)
    size = float(np.clip(9000 / max(1, values.size), 3, 18))
    style: dict[str, Any] = {"s": size, "alpha": 0.6, "linewidth": 0, "zorder": 2, "gid": "eigenvalues"}
    style["rasterized"] = values.size > 2000  # a vector file would list them one by one
    style |= {"c": value_times[is_finite], "cmap": _TIME_COLOURS} if time_label else {"color": _axes.BLUE}
    scatter = ax.scatter(values.real[is_finite], values.imag[is_finite], **{**style, **keywords})
    if time_label and len(np.unique(row_times)) > 1:
        ax.figure.colorbar(scatter, ax=[ax], fraction=0.08, pad=0.02).set_label(time_label)
    ax.set(aspect="equal", xlabel="real part", ylabel="imaginary part")
    finite_values = np.append(values[is_finite], 1.0)  # the circle is always in view
    half = 0.55 * max(float(np.ptp(finite_values.real)), 2 * float(np.abs(finite_values.imag).max()), 0.2)
    middle = (float(finite_values.real.min()) + float(finite_values.real.max())) / 2
    ax.set(xlim=(middle - half, middle + half), ylim=(-half, half))
    if not is_finite.all():
        _frame.draw_alarm_frame(ax)


def _draw_moduli(ax: Any, values: Numbers) -> None:
    """Draw the modulus of the eigenvalues by rank: median and range."""
    is_finite = np.isfinite(values).all(axis=1)
    moduli = -np.sort(-np.abs(values[is_finite]), axis=1)
    rank = np.arange(1, values.shape[1] + 1)
    ax.axhline(1, color="0.4", linewidth=0.9)
    if len(moduli):
        _axes.draw_band(ax, rank, moduli.min(axis=0), moduli.max(axis=0), _axes.BLUE, gid="range")
        style = {"marker": "." if len(rank) < 40 else None, "linewidth": 1.2, "gid": "moduli"}
        ax.plot(rank, np.median(moduli, axis=0), color=_axes.BLUE, **style)
    ax.set(xlabel="mode, largest first", ylabel="modulus")
    ax.set_ylim(0, None)
    ax.set_xlim(0.5, len(rank) + 0.5)


@drawing(Line2D)
def fixed_points(
    points: FixedPoints, *, title: str | None = None, ax: Any = None, figure: Any = None, **line: Any
) -> Any:
    """Draw fixed points in the first two principal components of the states that the search started from.

    Parameters
    ----------
    points
        Result of ``rl.fixed_points``.
    title
        Title; by default the number of points, and of inputs if there are several.

    Returns
    -------
    1-D array of one Axes, with one scale on both axes. Bars through saddles show their unstable modes, as long as
    their eigenvalue exceeds 1. Of several inputs the number of its own is beside each point.

    Examples
    --------
    >>> points = rl.fixed_points(model, x, layer="lstm")
    >>> len(rl.plot.fixed_points(points))
    1
    """
    if not isinstance(points, FixedPoints):
        raise InputError(
            "plot.fixed_points draws fixed points.", got=type(points).__name__, hint="rl.fixed_points(model, x)"
        )
    panels = _frame.open_panels("fixed_points", 1, ax, figure, size=(5.2, 4.4), ticks="medium")
    panel_ax = panels.axes[0]
    data = points.data
    trajectory = data["trajectory"].values
    mean = trajectory.mean(axis=0)
    axes, shares = axes_of(trajectory - mean)
    projected_states = (trajectory - mean) @ axes
    panel_ax.plot(
        *projected_states.T,
        linestyle="",
        marker=".",
        markersize=1.5,
        color="0.8",
        zorder=1,
        gid="states",
    )
    entries = draw_fixed_points(panel_ax, points, mean, axes, float(np.ptp(projected_states, axis=0).max()), line)
    labels = [f"component {i} ({share:.0%} of the variance)" for i, share in enumerate(shares, 1)]
    panel_ax.set(xlabel=labels[0], ylabel=labels[1])
    places = (data["states"].values - mean) @ axes
    set_equal_limits(panel_ax, np.concatenate([projected_states, places]))
    parts, count = [points._headline()], data.sizes.get("input", 1)
    if count > 1:
        parts.append(f"{count} inputs")
        for place, index in zip(places, data["input_index"].values, strict=True):
            style = {
                "ha": "left",
                "zorder": 6,
                "bbox": {"facecolor": "white", "alpha": 0.7, "pad": 0.4, "linewidth": 0},
            }
            _axes.write_text(panel_ax, str(index), tuple(place), (6, 0), gid="input", **style)
        entries.append(Line2D([], [], linestyle="", label="number: its input"))
    if data.attrs.get("direction") == "backward":
        parts.append("backward half")
    panel_ax.legend(handles=entries, fontsize="x-small", loc="best")
    return panels.with_title(title or ", ".join(parts))


@drawing(PathCollection, extra=("marker", "s"))
def gradient_carriers(
    gradient: Any, losses: Any, *, title: str | None = None, ax: Any = None, figure: Any = None, **point: Any
) -> Any:
    """Draw how the gradient is distributed over samples: loss against gradient norm, and a Lorenz curve.

    If the curve is far below the diagonal, a few samples make up most of the gradient, and of any mean over samples.

    Parameters
    ----------
    gradient : (sample, ...)
        Gradient of the loss by sample: ``trace["lstm"].hidden_grad``, or any other with a sample dimension.
    losses : (sample,)
        The loss of each sample.

    Returns
    -------
    1-D array of two Axes

    References
    ----------
    Lorenz 1905, doi:10.2307/2276207.

    Examples
    --------
    >>> losses = [0.7, 0.2]  # one per sample
    >>> axes = rl.plot.gradient_carriers(trace["lstm"].hidden_grad, losses)
    >>> len(axes)
    2
    """
    array = _data.label_array(gradient, "gradient_carriers")
    values = _samples.losses_of(array, losses, "gradient_carriers")
    sample_gradients = array.transpose(SAMPLE, ...).values.reshape(len(values), -1)
    norms = np.asarray(safe_norm(sample_gradients.astype(np.float64), axis=1))
    panels = _frame.open_panels("gradient_carriers", 2, ax, figure, size=(3.5, 3.1), shape=(1, 2))
    _scatter(panels.axes[0], values, norms, _data.names_of(array, SAMPLE), point)
    _draw_lorenz_curve(panels.axes[1], norms)
    share, count = carriers(norms), len(norms)
    carrier_note = (
        None if math.isnan(share) else f"{round(share * count)} of {count} samples carry half of the gradient"
    )
    nonfinite_note = " and ".join(
        note for note in (_data.nonfinite_note(array.values), _data.nonfinite_note(values)) if note
    )
    default_title = _data.layer_title(array.attrs, "samples that make up the gradient")
    return panels.with_title(title or default_title, [carrier_note, nonfinite_note])


def _scatter(ax: Any, losses: Numbers, norms: Numbers, names: list[str], keywords: dict[str, Any]) -> None:
    """Draw loss against gradient norm, a point per sample; label the sample of median loss and that of largest norm."""
    is_finite = np.isfinite(losses) & np.isfinite(norms)
    limits = [_log_limits(values[is_finite]) for values in (losses, norms)]
    clipped = [np.maximum(values[is_finite], low) for values, (low, _) in zip((losses, norms), limits, strict=True)]
    style = {"s": float(np.clip(1200 / max(1, len(norms)), 6, 30)), "color": _axes.BLUE, "alpha": 0.6, "linewidth": 0}
    ax.scatter(*clipped, **{"gid": "samples", "clip_on": False, **style, **keywords})
    ax.set(xlim=limits[0], ylim=limits[1], xlabel="loss of the sample", ylabel="norm of its gradient")
    for axis in ("x", "y"):
        _axes.set_log_axis(ax, axis, most_ticks=6)
    if is_finite.any():
        largest = int(np.where(is_finite, norms, -1.0).argmax())
        for sample_index, role in {int(typical_first(losses)[0]): "typical", largest: "largest"}.items():
            point = tuple(
                max(values[sample_index], low) for values, (low, _) in zip((losses, norms), limits, strict=True)
            )
            ring_style = {
                "s": 45,
                "facecolor": "none",
                "edgecolor": "black",
                "linewidth": 0.9,
                "clip_on": False,
                "zorder": 3,
            }
            ax.scatter([point[0]], [point[1]], gid=f"ring {role}", **ring_style)
            text = f"sample {names[sample_index]} ({role})"
            is_left = ax.transLimits.transform(ax.transScale.transform(point))[0] < 0.4
            offset, alignment = ((4, -8), "left") if is_left else ((-4, 4), "right")
            _axes.write_text(ax, text, point, offset, ha=alignment, va="baseline", gid=role)
    if (~is_finite).any():
        x, y = np.full((~is_finite).sum(), 0.03), np.linspace(0.05, 0.4, (~is_finite).sum())
        ax.plot(x, y, "x", color="black", transform=ax.transAxes, gid="non-finite")
    for axis, values, (low, _) in zip("xy", (losses, norms), limits, strict=True):
        if (values[is_finite] < low).any():
            axis_name, text_height = ("loss", 0.02) if axis == "x" else ("norm", 0.08)
            role = f"{axis_name} below {_axes.short_number(low)} at the border"
            _axes.write_text(ax, role, (0.02, text_height), over="axes fraction", ha="left", va="baseline", gid="below")


def _log_limits(values: Numbers) -> tuple[float, float]:
    """Return axis limits around the positive values, at most twelve decades."""
    positive = values[values > 0]
    if not positive.size:
        return 0.1, 10.0
    high = float(positive.max())
    return max(float(positive.min()), high * 1e-12) / 2, high * 2


def _draw_lorenz_curve(ax: Any, norms: Numbers) -> None:
    """Draw the Lorenz curve: share of the gradient against the share of samples, smallest first."""
    gradient_shares = lorenz(norms)
    sample_shares = np.linspace(0, 1, len(gradient_shares))
    ax.plot([0, 1], [0, 1], color="0.5", linewidth=0.8, linestyle="--", gid="equal")
    ax.plot(sample_shares, gradient_shares, color=_axes.ORANGE, linewidth=1.5, gid="lorenz")
    _axes.draw_band(ax, sample_shares, gradient_shares, sample_shares, _axes.ORANGE, alpha=0.12, gid=None)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="share of the samples, least first", ylabel="share of the gradient")
