"""Figures of a followed training: ``film`` (gradient over time steps and training) and ``timeline`` (scalars)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D

from ..arguments import anything, as_numbers, names, number
from ..errors import InputError, did_you_mean, has_attribute, short_repr
from ..measures.profiles import share_of_peak
from ..vocabulary import DIRECTION, TIME
from . import _axes, _data, _frame
from ._call import drawing
from ._data import Numbers

#: Ratio of late to early distances between records from which on the training axis is logarithmic.
_DENSER = 8.0


def cell_edges(centres: Numbers) -> Numbers:
    """Return the edges of cells from their centres: half-way between neighbours."""
    centres = np.asarray(centres, dtype=float)
    if len(centres) < 2:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middles[0]], middles, [2 * centres[-1] - middles[-1]]])


def set_training_axis(ax: Any, steps: Numbers) -> None:
    """Set limits and ticks of the training axis: logarithmic if late records are much farther apart than early ones."""
    gaps = np.diff(np.asarray(steps, dtype=float))
    third_of_records = max(1, len(gaps) // 3)
    if (
        len(gaps) > 3
        and (gaps > 0).all()
        and np.median(gaps[-third_of_records:]) >= _DENSER * np.median(gaps[:third_of_records])
    ):
        first_step, last_step = float(steps[steps > 0].min()), float(steps.max())
        ax.set_xscale("symlog", linthresh=first_step, linscale=0.5)
        decades = range(math.floor(math.log10(first_step)), math.ceil(math.log10(last_step)) + 1)
        factors = (1, 2, 5) if len(decades) < 5 else (1,)
        ticks = [factor * 10.0**k for k in decades for factor in factors]
        shown_ticks = [0.0, *(tick for tick in ticks if first_step <= tick <= last_step)]
        ax.set_xticks(shown_ticks, [f"{tick:g}" for tick in shown_ticks])
        ax.minorticks_off()
    else:
        _axes.tick_whole_numbers(ax.xaxis)
    ax.set_xlim(*cell_edges(steps)[[0, -1]])


def draw_scalar(ax: Any, scalar: xr.DataArray, *, label: str | None = None, colour: Any = None) -> None:
    """Draw one scalar over training, on a logarithmic axis if it is positive and spans more than a decade."""
    steps, values = _data.positions(scalar, "step"), np.asarray(scalar.values, dtype=float)
    is_nonfinite = ~np.isfinite(values)
    scalar_name = str(scalar.name)
    style = {"color": colour or _axes.line_colours(1)[0], "linewidth": 1.3, "marker": "o" if len(steps) < 12 else None}
    finite_values = np.where(is_nonfinite, np.nan, values)
    ax.plot(steps, finite_values, label=label or scalar_name, gid=f"scalar {scalar_name}", markersize=3, **style)
    _axes.mark_nonfinite(ax, steps[is_nonfinite])
    if label is None:
        ax.set_ylabel(scalar_name.rpartition("/")[2].replace("_", " "), fontsize="small")
        set_log_if_wide(ax, [values])


def set_log_if_wide(ax: Any, lines: Sequence[Numbers]) -> None:
    """Set a logarithmic value axis if all finite values are positive and span a factor of ten."""
    low, high = _data.finite_range(np.concatenate(lines)) or (0.0, 0.0)
    if low > 0 and high >= 10 * low:
        _axes.set_log_axis(ax)


def check_moments(moments: Mapping[str, float] | None, steps: Numbers) -> dict[str, float]:
    """Check named moments of training, a mapping from names to steps within the run; else raise InputError."""
    if moments is None:
        return {}
    if not isinstance(moments, Mapping):
        expected = 'names by step: {"the first digit is right": 300}'
        raise InputError("moments= names moments of training.", got=short_repr(moments), expected=expected)
    step_by_name = {str(name): float(as_numbers("moments", [step])[0]) for name, step in moments.items()}
    for name, step in step_by_name.items():
        if not steps.min() <= step <= steps.max():
            expected = f"{steps.min():g} to {steps.max():g}"
            raise InputError(f"The moment {name!r} is not in this run.", got=f"step {step:g}", expected=expected)
    return dict(sorted(step_by_name.items(), key=lambda moment: moment[1]))  # numbered by time


def mark_moments(axes: Sequence[Any], moments: Mapping[str, float], *, with_names: bool = False) -> None:
    """Draw a line through every panel at each moment; its number, or number and name, beside it in the first."""
    names: dict[float, list[str]] = {}
    for moment_number, (name, step) in enumerate(moments.items(), start=1):
        names.setdefault(step, []).append(f"{moment_number} {name}" if with_names else str(moment_number))
    left, right = axes[0].transData.transform([(limit, 1.0) for limit in axes[0].get_xlim()])[:, 0]
    for step, moment_texts in names.items():
        for ax in axes:
            ax.axvline(step, **_axes.DOTTED, gid="moment")
        is_late = with_names and axes[0].transData.transform((step, 1.0))[0] > left + 0.93 * (right - left)
        style = (
            {"rotation": 90, "ha": "right" if is_late else "left"}
            if with_names
            else {"ha": "center", "fontweight": "bold"}
        )
        style |= {"over": axes[0].get_xaxis_transform(), "va": "top", "bbox": _axes.TEXT_BOX, "gid": "moment"}
        _axes.write_text(
            axes[0], ", ".join(moment_texts), (step, 1.0), ((-3 if is_late else 3) if with_names else 0, -3), **style
        )


STEP = "step"
#: Scalars for the panel below, in the order of preference.
_SCALARS_BELOW = ("accuracy", "val_accuracy", "val_loss", "loss")


@drawing(
    QuadMesh,
    extra=("cmap", "norm"),
    layers=names,
    quantity=anything,
    below=anything,
    decades=number(above=0),
    moments=anything,
)
def film(
    run: Any,
    *,
    layers: Any = None,
    quantity: str = "adjoint_profile",
    below: str | xr.DataArray | None = None,
    decades: float = 4.0,
    moments: Mapping[str, float] | None = None,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **mesh: Any,
) -> Any:
    """Draw the size of the gradient at every time step (down) over training (across), a panel per layer.

    Each record is divided by its own peak, so the figure shows *where in time* the gradient is, not its size, which
    changes with the loss. A panel below has the accuracy or the loss of the same records. Between two records the
    colour is that of the nearer one. The training axis is logarithmic if records are denser early, as at powers of two.

    Parameters
    ----------
    run
        A followed training, as returned by ``rl.open``.
    layers
        Names of layers; by default all that have such a profile.
    quantity
        ``"adjoint_profile"``, over time, or ``"lag_profile"``, over steps back from the end of each sample.
    below
        Name of the scalar in the panel below: ``"loss"``, ``"lstm/reach"``; or one number for each record as a
        DataArray with the dimension ``step``. By default the accuracy if it was recorded, else the loss; ``""`` for no
        panel.
    decades
        Range of the colours below the peak, in powers of ten; smaller values are drawn like 0.

    Returns
    -------
    1-D array of Axes: one per layer (and direction), then that of the scalar

    Examples
    --------
    >>> axes = rl.plot.film(run)
    >>> len(axes)  # two layers, and the loss
    3
    """
    profiles = _profiles_by_panel(run, layers, quantity)
    scalar_below = _scalar_below(run, below)
    count = len(profiles) + (scalar_below is not None)
    heights = [3.0] * len(profiles) + [1.2] * (scalar_below is not None)
    sizes: dict[str, Any] = {"size": (6.6, 2.3), "margin": (1.0, 0.9), "shape": (count, 1), "heights": heights}
    panels = _frame.open_panels("film", count, ax, figure, **sizes)
    steps = _data.positions(next(iter(profiles.values())), STEP)
    checked_moments = check_moments(moments, steps)
    norm = LogNorm(10.0**-decades, 1.0)
    for panel_ax, (panel_title, profile) in zip(panels.axes, profiles.items(), strict=False):
        mesh_drawn = _draw_film(panel_ax, profile, {"norm": norm, "cmap": _axes.POSITIVE, **mesh})
        panel_ax.set_title(panel_title, fontsize="small", pad=3)
        set_training_axis(panel_ax, steps)
    if scalar_below is not None:
        draw_scalar(panels.axes[-1], scalar_below)
        set_training_axis(panels.axes[-1], steps)
    if panels.direction_figures:
        for panel_ax in panels.axes[:-1]:
            panel_ax.tick_params(labelbottom=False)
        colour_bar = panels.direction_figures[0].colorbar(
            mesh_drawn, ax=panels.axes, pad=0.02, fraction=0.05, aspect=30
        )
        colour_bar.set_label(f"share of the record's own peak, white below 1e-{decades:g}", fontsize="small")
        colour_bar.ax.tick_params(labelsize="small")
    mark_moments(panels.axes, checked_moments, with_names=True)
    panels.axes[-1].set_xlabel("training step", fontsize="small")
    values = np.concatenate([profile.values.reshape(-1) for profile in profiles.values()])
    long_name = next(iter(profiles.values())).attrs.get("long_name", quantity)
    return panels.with_title(title or f"{long_name} over training", [_data.nonfinite_note(values[~np.isnan(values)])])


def _refuse_no_run(run: Any, figure: str) -> None:
    is_mapping = isinstance(run, Mapping)
    if not (is_mapping and has_attribute(run, "scalars") and isinstance(run.scalars, xr.Dataset)):
        expected = 'a followed training: rl.open("runs/a.zarr")'
        raise InputError(f"plot.{figure} draws a run.", got=short_repr(run), expected=expected)


def _profiles_by_panel(run: Any, layers: Any, quantity: str) -> dict[str, xr.DataArray]:
    """Return the profiles (step, time) to draw by the name of their panel."""
    _refuse_no_run(run, "film")
    layers_by_name = {name: run[name] for name in run}
    layer_names = list(layers_by_name) if layers is None else [layers] if isinstance(layers, str) else list(layers)
    for name in layer_names:
        if name not in layers_by_name:
            raise InputError(f"No layer {name!r} in this run.", hint=did_you_mean(name, layers_by_name))
    profiles: dict[str, xr.DataArray] = {}
    for name in layer_names:
        if quantity not in layers_by_name[name]:
            continue
        profile = layers_by_name[name].dataset[quantity]
        if DIRECTION not in profile.dims:
            profiles[name] = profile
            continue
        for i, direction in enumerate(_data.names_of(profile, DIRECTION)):
            profiles[f"{name} ({direction})"] = profile.isel({DIRECTION: i})
    if not profiles or not next(iter(profiles.values())).sizes[STEP]:
        raise InputError(
            f"No {quantity} was recorded in this run.",
            got=f"{len(layers_by_name)} layers: {', '.join(layers_by_name) or 'none'}",
            hint="records need a loss; see run.notes",
        )
    return profiles


def _scalar_below(run: Any, below: Any) -> xr.DataArray | None:
    if isinstance(below, xr.DataArray):
        if below.dims != (STEP,) or STEP not in below.coords:
            expected = f"one dimension, {STEP!r}, with the steps of the records"
            raise InputError("below= goes over training.", got=str(below.dims), expected=expected)
        return below
    if isinstance(below, str) and not below:
        return None
    scalar_names = list(map(str, run.scalars.data_vars))
    scalar_name = below if below is not None else next((name for name in _SCALARS_BELOW if name in scalar_names), None)
    if scalar_name is None:
        return None
    if scalar_name not in scalar_names:
        raise InputError(f"No scalar {scalar_name!r} in this run.", hint=did_you_mean(scalar_name, scalar_names))
    scalar: xr.DataArray = run.scalars[scalar_name]
    return scalar


def _draw_film(ax: Any, profile: xr.DataArray, keywords: Mapping[str, Any]) -> Any:
    """Draw one panel: training steps across, time steps down, the first on top."""
    time_dim = next(str(dim) for dim in profile.dims if dim != STEP)
    shares: Numbers = share_of_peak(profile.transpose(STEP, time_dim).values)
    # Values below the scale have its lowest colour, white; NaN is grey.
    lowest_share = keywords["norm"].vmin if hasattr(keywords["norm"], "vmin") else 0.0
    shown_shares = np.where(np.isnan(shares), np.nan, np.maximum(shares, lowest_share)).T
    step_edges, time_edges = cell_edges(_data.positions(profile, STEP)), cell_edges(_data.positions(profile, time_dim))
    mesh = ax.pcolormesh(step_edges, time_edges, shown_shares, gid="film", rasterized=True, **keywords)
    ax.set_facecolor(_axes.POSITIVE.get_bad())
    ax.set_ylim(time_edges[-1], time_edges[0])
    _axes.tick_whole_numbers(ax.yaxis)
    ax.set_ylabel("time step" if time_dim == TIME else "steps back from the end", fontsize="small")
    return mesh


#: Panels in their order: the last part of a name, and the title.
_PANELS = {
    "loss": "loss",
    "accuracy": "accuracy",
    "adjoint": "size of the gradient at the states",
    "reach": "steps that the gradient reaches",
    "decay": "gradient kept per step back",
    "near_0": "share of gates near 0",
    "near_1": "share of gates near 1",
    "dead_units": "share of dead units",
    "weight_norm": "norm of weights",
    "direct": "size of the direct gradient",
    "weight_grad_norm": "norm of the gradient of weights",
    "grad_norm": "norm of the gradient of all weights",
    "update_ratio": "change of a weight by one step, by its norm",
    "update_gradient": "norm of the gradient of a weight at a step",
    "backward_passes": "backward passes accumulated",
}
#: Scalars of one step of the optimizer, by their panel; those of single weights are drawn only if selected.
_UPDATE = re.compile(r"(?P<kind>update_ratio|update_gradient)/(?P<weight>.+)")
#: Parts of names such as ``lstm/weight_norm/kernel``, ``grad_norm_clipped``: layer, kind, after clipping, weight.
_NORM = re.compile(
    r"(?:(?P<layer>.+)/)?(?P<kind>weight_norm|weight_grad_norm|grad_norm)(?P<after>_clipped)?(?:/(?P<weight>\w+))?"
)
#: Scalars that may be NaN without a fault: a gradient that is largest at its far end has no decay; no step led to the
#: record before training.
_MAY_BE_NONE = {"decay": "does not fade", "update_ratio": "not measured", "update_gradient": "not measured"}
#: Largest number of names in a panel, and in one column beside it.
_MOST_INSIDE, _MOST_BESIDE = 4, 12
_SHARES = ("near_0", "near_1", "dead_units", "accuracy")


@drawing(Line2D, select=names, moments=anything)
def timeline(
    run: Any,
    select: Any = None,
    *,
    moments: Mapping[str, float] | None = None,
    max_panels: int = 16,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw the scalars of a run over training: a panel for each kind, a line for each layer, gate or weight.

    Parameters
    ----------
    run
        A followed training, as returned by ``rl.open``.
    select
        Names of scalars, or patterns of them: ``"loss"``, ``"lstm/*"``, ``"*/reach"``, ``"update_ratio/*"``; by
        default all but the updates of single weights.
    max_panels
        Largest number of kinds; more are an error that explains how to select.

    Returns
    -------
    1-D array of Axes, one per kind of number

    Examples
    --------
    >>> axes = rl.plot.timeline(run)
    >>> len(axes)
    1
    """
    groups = _group_by_kind(_selected_scalars(run, select))
    if len(groups) > max_panels:
        received, hint = f"{len(groups)} panels", 'select="*/reach", or raise max_panels='
        raise InputError("Too many kinds of numbers for one figure.", got=received, hint=hint)
    columns = 1 if len(groups) < 4 else 2
    sizes: dict[str, Any] = {"size": (4.6, 1.6), "margin": (1.0, 0.9), "shape": (-(-len(groups) // columns), columns)}
    panels = _frame.open_panels("timeline", len(groups), ax, figure, **sizes)
    steps = _data.positions(next(iter(next(iter(groups.values())).values())), "step")
    checked_moments = check_moments(moments, steps)
    for panel_ax, (kind, lines) in zip(panels.axes, groups.items(), strict=True):
        _draw_timeline(panel_ax, kind, lines, line)
        _draw_legend(panel_ax, lines, is_beside=bool(panels.direction_figures) and len(lines) > _MOST_INSIDE)
        set_training_axis(panel_ax, steps)
    mark_moments(panels.axes, checked_moments)
    moment_text = "; ".join(
        f"{moment_number} {name} (step {step:g})"
        for moment_number, (name, step) in enumerate(checked_moments.items(), start=1)
    )
    width_inches = panels.figure.bbox.width / panels.figure.dpi
    panels.label_axes(
        "\n".join(["training step"] + [_frame.wrap_label(moment_text, 0.9 * width_inches)] * bool(moment_text)), ""
    )
    values = np.concatenate([scalar.values for lines in groups.values() for scalar in lines.values()])
    return panels.with_title(title or "training, record by record", [_data.nonfinite_note(values[~np.isnan(values)])])


def _selected_scalars(run: Any, select: Any) -> dict[str, xr.DataArray]:
    _refuse_no_run(run, "timeline")
    scalars = run.scalars
    scalar_names = list(map(str, scalars.data_vars))
    if select is None:
        scalar_names = [name for name in scalar_names if _UPDATE.fullmatch(name) is None]
    patterns = ["*"] if select is None else [select] if isinstance(select, str) else list(select)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in scalar_names):
            hint = did_you_mean(pattern, scalar_names) if scalar_names else "nothing was recorded in this run yet"
            raise InputError(f"No scalar of this run is called {pattern!r}.", hint=hint)
    selected_names = [name for name in scalar_names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return {name: scalars[name] for name in selected_names}


def _group_by_kind(scalars: Mapping[str, xr.DataArray]) -> dict[str, dict[str, xr.DataArray]]:
    """Group scalars by kind, in the order of the panels."""
    groups: dict[str, dict[str, xr.DataArray]] = {}
    for name, scalar in scalars.items():
        kind, line_label = _split_name(name)
        groups.setdefault(kind, {})[line_label] = scalar
    known_kinds = [kind for kind in _PANELS if kind in groups]
    return {kind: groups[kind] for kind in [*known_kinds, *(kind for kind in groups if kind not in known_kinds)]}


def _split_name(name: str) -> tuple[str, str]:
    """Split the name of a recorded scalar, ``lstm/weight_norm/kernel``, into its kind and the label of its line."""
    if name == "update_by_initial_norm":
        return "update_ratio", "by the norm at initialisation"
    update = _UPDATE.fullmatch(name)
    if update is not None:
        return update["kind"], update["weight"]
    norm = _NORM.fullmatch(name)
    if norm is not None:
        label_parts = (norm["layer"], norm["weight"], norm["after"] and "clipped")
        return norm["kind"], " ".join(label_part for label_part in label_parts if label_part)
    prefix, _, kind = name.rpartition("/")
    return kind, prefix.replace("/", " ")


def _draw_timeline(ax: Any, kind: str, lines: Mapping[str, xr.DataArray], keywords: Mapping[str, Any]) -> None:
    for (line_label, scalar), colour in zip(lines.items(), _axes.line_colours(len(lines)), strict=True):
        scalar_drawn = scalar.dropna("step") if kind in _MAY_BE_NONE else scalar
        empty_note = "" if scalar_drawn.sizes["step"] else f" ({_MAY_BE_NONE[kind]})"
        draw_scalar(ax, scalar_drawn, label=(line_label or kind.replace("_", " ")) + empty_note, colour=colour)
        ax.lines[-1].set(**keywords)
    if kind in _SHARES:
        ax.set_ylim(-0.03, 1.03)
    else:
        set_log_if_wide(ax, [scalar.values for scalar in lines.values()])
    ax.set_title(_PANELS.get(kind, kind.replace("_", " ")), fontsize="small", pad=3)


def _draw_legend(ax: Any, lines: Mapping[str, xr.DataArray], *, is_beside: bool) -> None:
    """Draw a legend if there is more than one line; a long one is beside the panel."""
    if len(lines) > 1 or next(iter(lines)):
        legend_place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.05)} if is_beside else {"loc": "best"}
        columns = 1 + len(lines) // _MOST_BESIDE if is_beside else 1 if len(lines) <= _MOST_INSIDE else 2
        ax.legend(fontsize="x-small", frameon=False, ncols=columns, **legend_place)
