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
from ..errors import InputError, did_you_mean, has_attribute, shown
from ..measures.profiles import share_of_peak
from ..vocabulary import DIRECTION, TIME
from . import _axes, _data, _frame
from ._call import drawing
from ._data import Numbers

#: Ratio of late to early distances between records from which on the training axis is logarithmic.
_DENSER = 8.0


def edges_of(places: Numbers) -> Numbers:
    """Return the edges of cells from their centres: half-way between neighbours."""
    places = np.asarray(places, dtype=float)
    if len(places) < 2:
        return np.array([places[0] - 0.5, places[0] + 0.5])
    middles = (places[1:] + places[:-1]) / 2
    return np.concatenate([[2 * places[0] - middles[0]], middles, [2 * places[-1] - middles[-1]]])


def training_axis(ax: Any, steps: Numbers) -> None:
    """Set limits and ticks of the training axis: logarithmic if late records are much farther apart than early ones."""
    gaps = np.diff(np.asarray(steps, dtype=float))
    third = max(1, len(gaps) // 3)
    if len(gaps) > 3 and (gaps > 0).all() and np.median(gaps[-third:]) >= _DENSER * np.median(gaps[:third]):
        first, last = float(steps[steps > 0].min()), float(steps.max())
        ax.set_xscale("symlog", linthresh=first, linscale=0.5)
        decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        some = (1, 2, 5) if len(decades) < 5 else (1,)
        ticks = [factor * 10.0**k for k in decades for factor in some]
        shown_ticks = [0.0, *(tick for tick in ticks if first <= tick <= last)]
        ax.set_xticks(shown_ticks, [f"{tick:g}" for tick in shown_ticks])
        ax.minorticks_off()
    else:
        _axes.whole_numbers(ax.xaxis)
    ax.set_xlim(*edges_of(steps)[[0, -1]])


def scalar_line(ax: Any, scalar: xr.DataArray, *, label: str | None = None, colour: Any = None) -> None:
    """Draw one scalar over training, on a logarithmic axis if it is positive and spans more than a decade."""
    steps, values = _data.positions(scalar, "step"), np.asarray(scalar.values, dtype=float)
    bad = ~np.isfinite(values)
    name = str(scalar.name)
    look = {"color": colour or _axes.line_colours(1)[0], "linewidth": 1.3, "marker": "o" if len(steps) < 12 else None}
    line = np.where(bad, np.nan, values)
    ax.plot(steps, line, label=label or name, gid=f"scalar {name}", markersize=3, **look)
    _axes.mark_steps(ax, steps[bad])
    if label is None:
        ax.set_ylabel(name.rpartition("/")[2].replace("_", " "), fontsize="small")
        log_where_it_helps(ax, [values])


def log_where_it_helps(ax: Any, lines: Sequence[Numbers]) -> None:
    """Set a logarithmic value axis if all finite values are positive and span a factor of ten."""
    low, high = _data.finite_range(np.concatenate(lines)) or (0.0, 0.0)
    if low > 0 and high >= 10 * low:
        _axes.log_axis(ax)


def moments_of(moments: Mapping[str, float] | None, steps: Numbers) -> dict[str, float]:
    """Check named moments of training, a mapping from names to steps within the run; else raise InputError."""
    if moments is None:
        return {}
    if not isinstance(moments, Mapping):
        expected = 'names by step: {"the first digit is right": 300}'
        raise InputError("moments= names moments of training.", got=shown(moments), expected=expected)
    found = {str(name): float(as_numbers("moments", [step])[0]) for name, step in moments.items()}
    for name, step in found.items():
        if not steps.min() <= step <= steps.max():
            expected = f"{steps.min():g} to {steps.max():g}"
            raise InputError(f"The moment {name!r} is not in this run.", got=f"step {step:g}", expected=expected)
    return dict(sorted(found.items(), key=lambda moment: moment[1]))  # numbered by time


def mark_moments(axes: Sequence[Any], moments: Mapping[str, float], *, words: bool = False) -> None:
    """Draw a line through every panel at each moment; its number, or number and name, beside it in the first."""
    names: dict[float, list[str]] = {}
    for place, (name, step) in enumerate(moments.items(), start=1):
        names.setdefault(step, []).append(f"{place} {name}" if words else str(place))
    left, right = axes[0].transData.transform([(limit, 1.0) for limit in axes[0].get_xlim()])[:, 0]
    for step, some in names.items():
        for ax in axes:
            ax.axvline(step, **_axes.DOTTED, gid="moment")
        late = words and axes[0].transData.transform((step, 1.0))[0] > left + 0.93 * (right - left)
        look = {"rotation": 90, "ha": "right" if late else "left"} if words else {"ha": "center", "fontweight": "bold"}
        look |= {"over": axes[0].get_xaxis_transform(), "va": "top", "bbox": _axes.PAPER, "gid": "moment"}
        _axes.write(axes[0], ", ".join(some), (step, 1.0), ((-3 if late else 3) if words else 0, -3), **look)


STEP = "step"
#: Scalars for the panel below, in the order of preference.
_BELOW = ("accuracy", "val_accuracy", "val_loss", "loss")


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
    """
    strips = _strips(run, layers, quantity)
    under = _under(run, below)
    count = len(strips) + (under is not None)
    heights = [3.0] * len(strips) + [1.2] * (under is not None)
    sizes: dict[str, Any] = {"size": (6.6, 2.3), "margin": (1.0, 0.9), "shape": (count, 1), "heights": heights}
    panels = _frame.open_panels("film", count, ax, figure, **sizes)
    steps = _data.positions(next(iter(strips.values())), STEP)
    marks = moments_of(moments, steps)
    norm = LogNorm(10.0**-decades, 1.0)
    for place, (name, strip) in zip(panels.axes, strips.items(), strict=False):
        last = _draw_film(place, strip, {"norm": norm, "cmap": _axes.POSITIVE, **mesh})
        place.set_title(name, fontsize="small", pad=3)
        training_axis(place, steps)
    if under is not None:
        scalar_line(panels.axes[-1], under)
        training_axis(panels.axes[-1], steps)
    if panels.owners:
        for place in panels.axes[:-1]:
            place.tick_params(labelbottom=False)
        bar = panels.owners[0].colorbar(last, ax=panels.axes, pad=0.02, fraction=0.05, aspect=30)
        bar.set_label(f"share of the record's own peak, white below 1e-{decades:g}", fontsize="small")
        bar.ax.tick_params(labelsize="small")
    mark_moments(panels.axes, marks, words=True)
    panels.axes[-1].set_xlabel("training step", fontsize="small")
    values = np.concatenate([strip.values.reshape(-1) for strip in strips.values()])
    long_name = next(iter(strips.values())).attrs.get("long_name", quantity)
    return panels.titled(title or f"{long_name} over training", [_data.nonfinite_note(values[~np.isnan(values)])])


def _refuse_no_run(run: Any, figure: str) -> None:
    is_mapping = isinstance(run, Mapping)
    if not (is_mapping and has_attribute(run, "scalars") and isinstance(run.scalars, xr.Dataset)):
        expected = 'a followed training: rl.open("runs/a.zarr")'
        raise InputError(f"plot.{figure} draws a run.", got=shown(run), expected=expected)


def _strips(run: Any, layers: Any, quantity: str) -> dict[str, xr.DataArray]:
    """Return the profiles (step, time) to draw by the name of their panel."""
    _refuse_no_run(run, "film")
    held = {name: run[name] for name in run}
    wanted = list(held) if layers is None else [layers] if isinstance(layers, str) else list(layers)
    for name in wanted:
        if name not in held:
            raise InputError(f"No layer {name!r} in this run.", hint=did_you_mean(name, held))
    found: dict[str, xr.DataArray] = {}
    for name in wanted:
        if quantity not in held[name]:
            continue
        profile = held[name].dataset[quantity]
        if DIRECTION not in profile.dims:
            found[name] = profile
            continue
        for i, way in enumerate(_data.names_of(profile, DIRECTION)):
            found[f"{name} ({way})"] = profile.isel({DIRECTION: i})
    if not found or not next(iter(found.values())).sizes[STEP]:
        raise InputError(
            f"No {quantity} was recorded in this run.",
            got=f"{len(held)} layers: {', '.join(held) or 'none'}",
            hint="records need a loss; see run.notes",
        )
    return found


def _under(run: Any, below: Any) -> xr.DataArray | None:
    if isinstance(below, xr.DataArray):
        if below.dims != (STEP,) or STEP not in below.coords:
            expected = f"one dimension, {STEP!r}, with the steps of the records"
            raise InputError("below= goes over training.", got=str(below.dims), expected=expected)
        return below
    if isinstance(below, str) and not below:
        return None
    present = list(map(str, run.scalars.data_vars))
    chosen = below if below is not None else next((name for name in _BELOW if name in present), None)
    if chosen is None:
        return None
    if chosen not in present:
        raise InputError(f"No scalar {chosen!r} in this run.", hint=did_you_mean(chosen, present))
    scalar: xr.DataArray = run.scalars[chosen]
    return scalar


def _draw_film(ax: Any, strip: xr.DataArray, keywords: Mapping[str, Any]) -> Any:
    """Draw one panel: training steps across, time steps down, the first on top."""
    down = next(str(dim) for dim in strip.dims if dim != STEP)
    shares: Numbers = share_of_peak(strip.transpose(STEP, down).values)
    # Values below the scale have its lowest colour, white; NaN is grey.
    floor = keywords["norm"].vmin if hasattr(keywords["norm"], "vmin") else 0.0
    shown_shares = np.where(np.isnan(shares), np.nan, np.maximum(shares, floor)).T
    across, along = edges_of(_data.positions(strip, STEP)), edges_of(_data.positions(strip, down))
    drawn = ax.pcolormesh(across, along, shown_shares, gid="film", rasterized=True, **keywords)
    ax.set_facecolor(_axes.POSITIVE.get_bad())
    ax.set_ylim(along[-1], along[0])
    _axes.whole_numbers(ax.yaxis)
    ax.set_ylabel("time step" if down == TIME else "steps back from the end", fontsize="small")
    return drawn


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
    "backward_passes": "backward passes accumulated",
}
#: Parts of names such as ``lstm/weight_norm/kernel``, ``grad_norm_clipped``: layer, kind, after clipping, weight.
_NORM = re.compile(
    r"(?:(?P<layer>.+)/)?(?P<kind>weight_norm|weight_grad_norm|grad_norm)(?P<after>_clipped)?(?:/(?P<weight>\w+))?"
)
#: Scalars that may be NaN without a fault: a gradient that is largest at its far end has no decay.
_MAY_BE_NONE = {"decay": "does not fade"}
#: Largest number of names in a panel, and in one column beside it.
_INSIDE, _BESIDE = 4, 12
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
        Names of scalars, or patterns of them: ``"loss"``, ``"lstm/*"``, ``"*/reach"``; all by default.
    max_panels
        Largest number of kinds; more are an error that explains how to select.

    Returns
    -------
    1-D array of Axes, one per kind of number
    """
    groups = _groups(_selected(run, select))
    if len(groups) > max_panels:
        got, hint = f"{len(groups)} panels", 'select="*/reach", or raise max_panels='
        raise InputError("Too many kinds of numbers for one figure.", got=got, hint=hint)
    columns = 1 if len(groups) < 4 else 2
    sizes: dict[str, Any] = {"size": (4.6, 1.6), "margin": (1.0, 0.9), "shape": (-(-len(groups) // columns), columns)}
    panels = _frame.open_panels("timeline", len(groups), ax, figure, **sizes)
    steps = _data.positions(next(iter(next(iter(groups.values())).values())), "step")
    marks = moments_of(moments, steps)
    for place, (kind, lines) in zip(panels.axes, groups.items(), strict=True):
        _draw_timeline(place, kind, lines, line)
        _name(place, lines, beside=bool(panels.owners) and len(lines) > _INSIDE)
        training_axis(place, steps)
    mark_moments(panels.axes, marks)
    named = "; ".join(f"{n} {name} (step {step:g})" for n, (name, step) in enumerate(marks.items(), start=1))
    inches = panels.figure.bbox.width / panels.figure.dpi
    panels.label("\n".join(["training step"] + [_frame.wrapped_label(named, 0.9 * inches)] * bool(named)), "")
    values = np.concatenate([one.values for lines in groups.values() for one in lines.values()])
    return panels.titled(title or "training, record by record", [_data.nonfinite_note(values[~np.isnan(values)])])


def _selected(run: Any, select: Any) -> dict[str, xr.DataArray]:
    _refuse_no_run(run, "timeline")
    scalars = run.scalars
    present = list(map(str, scalars.data_vars))
    patterns = ["*"] if select is None else [select] if isinstance(select, str) else list(select)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in present):
            hint = did_you_mean(pattern, present) if present else "nothing was recorded in this run yet"
            raise InputError(f"No scalar of this run is called {pattern!r}.", hint=hint)
    chosen = [name for name in present if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return {name: scalars[name] for name in chosen}


def _groups(chosen: Mapping[str, xr.DataArray]) -> dict[str, dict[str, xr.DataArray]]:
    """Group scalars by kind, in the order of the panels."""
    found: dict[str, dict[str, xr.DataArray]] = {}
    for name, scalar in chosen.items():
        kind, rest = _parted(name)
        found.setdefault(kind, {})[rest] = scalar
    known = [kind for kind in _PANELS if kind in found]
    return {kind: found[kind] for kind in [*known, *(kind for kind in found if kind not in known)]}


def _parted(name: str) -> tuple[str, str]:
    """Split the name of a recorded scalar, ``lstm/weight_norm/kernel``, into its kind and the label of its line."""
    norm = _NORM.fullmatch(name)
    if norm is not None:
        words = (norm["layer"], norm["weight"], norm["after"] and "clipped")
        return norm["kind"], " ".join(word for word in words if word)
    rest, _, kind = name.rpartition("/")
    return kind, rest.replace("/", " ")


def _draw_timeline(ax: Any, kind: str, lines: Mapping[str, xr.DataArray], keywords: Mapping[str, Any]) -> None:
    for (rest, scalar), colour in zip(lines.items(), _axes.line_colours(len(lines)), strict=True):
        drawn = scalar.dropna("step") if kind in _MAY_BE_NONE else scalar
        none = "" if drawn.sizes["step"] else f" ({_MAY_BE_NONE[kind]})"
        scalar_line(ax, drawn, label=(rest or kind.replace("_", " ")) + none, colour=colour)
        ax.lines[-1].set(**keywords)
    if kind in _SHARES:
        ax.set_ylim(-0.03, 1.03)
    else:
        log_where_it_helps(ax, [scalar.values for scalar in lines.values()])
    ax.set_title(_PANELS.get(kind, kind.replace("_", " ")), fontsize="small", pad=3)


def _name(ax: Any, lines: Mapping[str, xr.DataArray], *, beside: bool) -> None:
    """Draw a legend if there is more than one line; a long one is beside the panel."""
    if len(lines) > 1 or next(iter(lines)):
        where = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.05)} if beside else {"loc": "best"}
        columns = 1 + len(lines) // _BESIDE if beside else 1 if len(lines) <= _INSIDE else 2
        ax.legend(fontsize="x-small", frameon=False, ncols=columns, **where)
