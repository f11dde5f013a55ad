"""``weight_norms`` and ``norm_history``: norms of weights and gradients over training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from ..errors import InputError
from ..measures.profiles import peak_band, quartiles, sample_peaks
from ..recurrence.measures import safe_norm
from ..vocabulary import DIRECTION, SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers

#: Names of the dimension that counts training steps.
ROWS = ("step", "epoch", "batch", "update", "row", "time")


@drawing(Line2D)
def weight_norms(
    history: Any,
    *,
    log: bool = True,
    shared: bool = True,
    max_panels: int = 24,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw how the norms of weights change over training: a panel per layer, a line per weight.

    Parameters
    ----------
    history
        Result of :func:`rnnlens.weight_norms` after one or more calls: a DataArray or Dataset whose training dimension
        is named ``step``, ``epoch``, ``batch``, ``update`` or ``row`` (or comes first); or a mapping from names to one
        number per training step. ``layer/weight`` names make the panels.
    log
        Logarithmic value axis if the norms span a factor of ten or more; otherwise linear.
    max_panels
        Largest number of layers; more are an error that explains how to select.

    Returns
    -------
    1-D array of Axes, one per layer
    """
    lines, steps, words = _lines_of(history)
    layers: dict[str, dict[str, Numbers]] = {}
    for (layer, weight), values in lines.items():
        layers.setdefault(layer, {})[weight] = values
    if len(layers) > max_panels:
        raise InputError(
            "Too many layers for one figure.",
            got=f"{len(layers)} layers",
            expected=f"at most {max_panels}",
            hint="select layers, or raise max_panels=",
        )
    size = (5.0, 3.0) if len(layers) == 1 else (3.4, 2.1)
    panels = _frame.open_panels("weight_norms", len(layers), ax, figure, size=size, margin=(1.4, 1.0))
    everything = np.concatenate(list(lines.values()))
    for place, (layer, members) in zip(panels.axes, layers.items(), strict=True):
        drawn = _draw_norms(place, steps, members, line)
        place.set_title(layer, fontsize="small", pad=3)
        _scale(place, everything if shared else np.concatenate(list(members.values())), log=log)
        _name(place, steps, members, drawn, outside=bool(panels.owners))
    panels.label(words, "norm, log scale" if any(place.get_yscale() == "log" for place in panels.axes) else "norm")
    if shared:
        panels.outer_ticks_only()
    return panels.titled(title or "norms of weights while training", [_data.nonfinite_note(everything)])


def _lines_of(history: Any) -> tuple[dict[tuple[str, str], Numbers], Numbers, str]:
    """Read a history of norms: return values by (layer, weight), training steps, and the label of the axis."""
    dataset = _data.dataset_of(history)
    history = history if dataset is None else dataset
    if isinstance(history, xr.Dataset | xr.DataArray):
        return _labelled_lines(history)
    if isinstance(history, Mapping) and history:
        arrays = {_parted(str(name)): _data.labelled(values, "weight_norms") for name, values in history.items()}
        found = {parts: np.atleast_1d(array.values) for parts, array in arrays.items()}
        shape, *others = {values.shape for values in found.values()}
        if not others and len(shape) == 1:
            return found, np.arange(shape[0]), "training step"
    raise InputError(
        "plot.weight_norms draws a history of norms.",
        got=type(history).__name__,
        expected="a DataArray or Dataset over training steps, or a mapping from names to equally long sequences",
        hint="history = rl.weight_norms(model, history=history) after every epoch",
    )


def _parted(name: str) -> tuple[str, str]:
    """Split the name of a weight, ``outer/lstm/kernel``, into layer and weight."""
    layer, _, weight = name.rpartition("/")
    return layer, weight


def _labelled_lines(history: xr.Dataset | xr.DataArray) -> tuple[dict[tuple[str, str], Numbers], Numbers, str]:
    arrays = {str(n): a for n, a in history.data_vars.items()} if isinstance(history, xr.Dataset) else {"": history}
    first = next(iter(arrays.values()), xr.DataArray(0.0))
    dims = [str(d) for d in first.dims]
    if not dims:
        got = "norms without a training dimension" if arrays else "nothing in it"
        raise InputError("plot.weight_norms draws a history of norms.", got=got)
    along = next((name for name in ROWS if name in dims), dims[0])
    found: dict[tuple[str, str], Numbers] = {}
    for name, array in arrays.items():
        flat = _data.labelled(array, "weight_norms")
        if along not in flat.dims:
            got = f"{name!r} with dimensions ({', '.join(map(str, flat.dims))})"
            expected = f"{along!r} among them, as in the others"
            raise InputError("plot.weight_norms draws a history of norms.", got=got, expected=expected)
        others = [d for d in flat.dims if d != along]
        names = [""]
        for dim in others:
            names = [f"{before} {label}".strip() for before in names for label in _data.names_of(flat, dim)]
        values = flat.transpose(*others, along).values.reshape(len(names), -1)
        kept = [
            (label, row) for label, row in zip(names, values, strict=True) if not np.isnan(row).all() or len(names) == 1
        ]
        layer, weight = _parted(name)
        found |= {(layer, f"{weight} {label}".strip()): row for label, row in kept}
    return found, _data.positions(first, along), _data.axis_label(first, along)


def _draw_norms(ax: Any, steps: Numbers, members: dict[str, Numbers], keywords: dict[str, Any]) -> dict[str, Any]:
    """Draw the lines of one layer, by name."""
    drawn = {}
    for (name, values), colour in zip(members.items(), _axes.line_colours(len(members)), strict=True):
        bad = ~np.isfinite(values)
        look = {"color": colour, "linewidth": 1.3, "marker": "o" if len(steps) < 12 else None, "markersize": 3}
        label = name.replace("_", " ")
        look |= {"label": label, "gid": f"norm {name}"}
        (drawn[name],) = ax.plot(steps, np.where(bad, np.nan, values), **{**look, **keywords})
        _axes.mark_steps(ax, steps[bad])
    room = 0.02 * float(np.ptp(steps)) or 0.5
    ax.set_xlim(float(steps.min()) - room, float(steps.max()) + room)
    if steps.dtype.kind in "iu":
        _axes.step_axis(ax, "x", steps, time=False)
    return drawn


def _scale(ax: Any, values: Numbers, *, log: bool) -> None:
    """Set limits and scale, linear or logarithmic, of the value axis."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if log and positive.size and positive.max() >= 10 * positive.min():
        _axes.log_axis(ax)
        _axes.log_limits(ax, finite, room=1.3)
    elif finite.size:
        low, high = float(finite.min()), float(finite.max())
        room = high - low or high
        # The axis starts at 0 if the values are close to it; small changes of a large norm need a narrow range.
        ax.set_ylim(min(0.0, low) if low < 0.5 * high else low - 0.15 * room, high + 0.08 * room)


def _name(ax: Any, steps: Numbers, members: dict[str, Numbers], drawn: dict[str, Any], *, outside: bool) -> None:
    """Label lines at their ends if they are few, else in a legend; mark values below a logarithmic axis."""
    if ax.get_yscale() == "log":
        for name, values in members.items():
            _axes.mark_below(ax, steps, values, drawn[name].get_color())
    named = {name: values for name, values in members.items() if name}
    if not 0 < len(named) <= _axes.MOST_NAMED:
        if named:
            ax.legend(fontsize="x-small", loc="best")
        return
    found = []
    for name, values in named.items():
        at = np.flatnonzero(np.isfinite(values))
        y = float(values[at[-1]]) if at.size else float("nan")
        found.append(_axes.End(y, name.replace("_", " "), drawn[name].get_color()))
    _axes.name_ends(ax, found, outside=outside)


@drawing(AxesImage, extra=_images.IMSHOW)
def norm_history(
    history: Any,
    *,
    quantity: str = "hidden_grad",
    log: bool = True,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw the gradient over time steps (across) and training (upward), and its size beside.

    A row of the map has, for one training step, the median over samples of the norm over units at each time step, each
    sample divided by its own peak. The size beside it is the median of these peaks, with quartiles.

    Parameters
    ----------
    history
        A mapping from training steps (or names) to layers of traces or arrays (sample, time, unit); or one array with a
        training dimension named ``step``, ``epoch``, ``batch`` or ``update``.

    Returns
    -------
    1-D array of Axes: map and size, forward before backward
    """
    moments = _moments(history, quantity)
    names, first = list(moments), next(iter(moments.values()))
    shown = [_data.halves(array, as_computed=as_computed) for array in moments.values()]
    ways = [half.name for half in shown[0]]
    sizes: dict[str, Any] = {"size": (3.4, 3.0), "margin": (1.0, 0.9), "shape": (1, 2), "widths": (4, 1.1)}
    panels = _frame.open_panels("norm_history", 2, ax, figure, ways=ways, ticks="medium", **sizes)
    for number, places in enumerate(panels.halves):
        rows = [_row(halves_of[number].data) for halves_of in shown]
        _draw_history(places, names, _data.positions(shown[0][number].data, TIME), rows, log=log, keywords=image)
        places[0].set_xlabel(shown[0][number].time_label)
    several = first.sizes.get(SAMPLE, 1)
    note = f"median of {several} samples, each by its own peak" if several > 1 else "each moment by its own peak"
    padding = _samples.NOTE if any(_samples.hidden(array) is not None for array in moments.values()) else None
    missing = _data.nonfinite_note(np.concatenate([array.values.reshape(-1) for array in moments.values()]))
    head = _data.layer_title(first.attrs, _data.value_label(first).split(" [")[0], "while training")
    return panels.titled(title or head, [note, padding, missing])


def _moments(history: Any, quantity: str) -> dict[Any, xr.DataArray]:
    """Return the recorded arrays of a quantity by training step."""
    if isinstance(history, xr.DataArray):
        along = next((name for name in ROWS if name in history.dims and name != TIME), None)
        if along is None:
            got, expected = f"dimensions ({', '.join(map(str, history.dims))})", f"one of {', '.join(ROWS[:-1])}"
            raise InputError("plot.norm_history needs a training dimension.", got=got, expected=expected)
        steps = _data.positions(history, along).tolist()
        found = {step: history.isel({along: i}, drop=True) for i, step in enumerate(steps)}
    elif isinstance(history, Mapping) and history and _data.dataset_of(history) is None:
        found = {name: _data.variable(one, quantity, "norm_history", masked=True) for name, one in history.items()}
    else:
        raise InputError(
            "plot.norm_history draws one moment after the other.",
            got=type(history).__name__,
            expected="a mapping from training steps to layers of traces, or an array with such a dimension",
        )
    arrays = {name: _data.labelled(array, "norm_history") for name, array in found.items()}
    for array in arrays.values():
        _data.require_time(array, "norm_history")
        _data.require_dim(array, _data.unit_dim(array) or "unit", "norm_history")
    lengths = {array.sizes[TIME] for array in arrays.values()}
    ways = {array.sizes.get(DIRECTION) for array in arrays.values()}
    if len(lengths) > 1 or len(ways) > 1:
        got = f"{', '.join(str(length) for length in sorted(lengths))} time steps"
        raise InputError("The moments differ in their steps or directions.", got=got)
    return arrays


def _row(array: xr.DataArray) -> tuple[Numbers, Numbers, tuple[float, float, float]]:
    """Return the profile (time,) in units of its peak, the mask of padding, and the quartiles of the peaks."""
    values, real = _data.of_samples(array, TIME), _samples.real_steps(array)
    norms = np.asarray(safe_norm(values, axis=tuple(range(2, values.ndim))), dtype=float)
    bad = (~np.isfinite(norms) & real).any(axis=0)
    shape = np.where(bad, np.nan, peak_band(norms, real).median)
    return shape, np.asarray(~real.any(axis=0)), quartiles(sample_peaks(np.where(real, norms, 0.0)))


def _draw_history(
    places: list[Any], names: list[Any], steps: Numbers, rows: list[Any], *, log: bool, keywords: dict[str, Any]
) -> None:
    """Draw the map of gradient shapes, and the sizes beside it."""
    shapes, empty = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
    at = np.arange(len(rows))
    colours = {"cmap": _axes.POSITIVE, "norm": _axes.from_zero(shapes, 1.0, log=log), **keywords}
    drawn = _images.draw_image(places[0], _images.Matrix(shapes, steps, at, empty), look=colours, upward=True)
    numeric = all(isinstance(name, int | float | np.number) for name in names)
    _images.name_ticks(places[0], "y", at, [f"{name:g}" if numeric else str(name) for name in names])
    places[0].set_ylabel("training step" if numeric else "moment")
    low, middle, high = np.array([row[2] for row in rows]).T
    size = places[1]
    size.tick_params(labelsize="small")
    size.fill_betweenx(at, low, high, color="#0072b2", alpha=0.2, linewidth=0, gid="band")
    size.plot(middle, at, "o-", color="#0072b2", markersize=3, linewidth=1.2, gid="size")
    size.set(ylim=places[0].get_ylim(), yticks=[], xlabel="peak")
    positive = np.array([low, middle, high])
    positive = positive[np.isfinite(positive) & (positive > 0)]
    if positive.size:
        size.set_xlim(float(positive.min()) / 1.5, float(positive.max()) * 1.5)
        _axes.log_axis(size, "x", most=3)
    _images.colour_bar([size], drawn, "share of the sample's peak")
