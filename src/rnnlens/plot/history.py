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

    Examples
    --------
    >>> axes = rl.plot.weight_norms({"lstm/kernel": [1.0, 1.5], "lstm/bias": [0.1, 0.2], "head/kernel": [1.0, 1.2]})
    >>> len(axes)  # one per layer
    2
    """
    lines, steps, step_label = _read_history(history)
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
    all_norms = np.concatenate(list(lines.values()))
    for panel_ax, (layer, norms_by_weight) in zip(panels.axes, layers.items(), strict=True):
        lines_by_weight = _draw_norms(panel_ax, steps, norms_by_weight, line)
        panel_ax.set_title(layer, fontsize="small", pad=3)
        _set_value_axis(panel_ax, all_norms if shared else np.concatenate(list(norms_by_weight.values())), log=log)
        _label_lines(panel_ax, steps, norms_by_weight, lines_by_weight, outside=bool(panels.direction_figures))
    panels.label_axes(
        step_label, "norm, log scale" if any(panel_ax.get_yscale() == "log" for panel_ax in panels.axes) else "norm"
    )
    if shared:
        panels.hide_inner_ticks()
    return panels.with_title(title or "norms of weights while training", [_data.nonfinite_note(all_norms)])


def _read_history(history: Any) -> tuple[dict[tuple[str, str], Numbers], Numbers, str]:
    """Read a history of norms: return values by (layer, weight), training steps, and the label of the axis."""
    dataset = _data.dataset_of(history)
    history = history if dataset is None else dataset
    if isinstance(history, xr.Dataset | xr.DataArray):
        return _read_labelled_history(history)
    if isinstance(history, Mapping) and history:
        arrays = {_split_name(str(name)): _data.label_array(values, "weight_norms") for name, values in history.items()}
        lines = {layer_and_weight: np.atleast_1d(array.values) for layer_and_weight, array in arrays.items()}
        common_shape, *other_shapes = {values.shape for values in lines.values()}
        if not other_shapes and len(common_shape) == 1:
            return lines, np.arange(common_shape[0]), "training step"
    raise InputError(
        "plot.weight_norms draws a history of norms.",
        got=type(history).__name__,
        expected="a DataArray or Dataset over training steps, or a mapping from names to equally long sequences",
        hint="history = rl.weight_norms(model, history=history) after every epoch",
    )


def _split_name(name: str) -> tuple[str, str]:
    """Split the name of a weight, ``outer/lstm/kernel``, into layer and weight."""
    layer, _, weight = name.rpartition("/")
    return layer, weight


def _read_labelled_history(history: xr.Dataset | xr.DataArray) -> tuple[dict[tuple[str, str], Numbers], Numbers, str]:
    arrays = (
        {str(variable_name): variable_array for variable_name, variable_array in history.data_vars.items()}
        if isinstance(history, xr.Dataset)
        else {"": history}
    )
    first_array = next(iter(arrays.values()), xr.DataArray(0.0))
    dims = [str(d) for d in first_array.dims]
    if not dims:
        received = "norms without a training dimension" if arrays else "nothing in it"
        raise InputError("plot.weight_norms draws a history of norms.", got=received)
    step_dim = next((name for name in ROWS if name in dims), dims[0])
    lines: dict[tuple[str, str], Numbers] = {}
    for name, array in arrays.items():
        norm_array = _data.label_array(array, "weight_norms")
        if step_dim not in norm_array.dims:
            received = f"{name!r} with dimensions ({', '.join(map(str, norm_array.dims))})"
            expected = f"{step_dim!r} among them, as in the others"
            raise InputError("plot.weight_norms draws a history of norms.", got=received, expected=expected)
        other_dims = [d for d in norm_array.dims if d != step_dim]
        names = [""]
        for dim in other_dims:
            names = [f"{prefix} {label}".strip() for prefix in names for label in _data.names_of(norm_array, dim)]
        values = norm_array.transpose(*other_dims, step_dim).values.reshape(len(names), -1)
        finite_rows = [
            (label, row) for label, row in zip(names, values, strict=True) if not np.isnan(row).all() or len(names) == 1
        ]
        layer, weight = _split_name(name)
        lines |= {(layer, f"{weight} {label}".strip()): row for label, row in finite_rows}
    return lines, _data.positions(first_array, step_dim), _data.axis_label(first_array, step_dim)


def _draw_norms(
    ax: Any, steps: Numbers, norms_by_weight: dict[str, Numbers], keywords: dict[str, Any]
) -> dict[str, Any]:
    """Draw the lines of one layer, by name."""
    lines_by_weight = {}
    for (name, values), colour in zip(norms_by_weight.items(), _axes.line_colours(len(norms_by_weight)), strict=True):
        is_nonfinite = ~np.isfinite(values)
        style = {"color": colour, "linewidth": 1.3, "marker": "o" if len(steps) < 12 else None, "markersize": 3}
        label = name.replace("_", " ")
        style |= {"label": label, "gid": f"norm {name}"}
        (lines_by_weight[name],) = ax.plot(steps, np.where(is_nonfinite, np.nan, values), **{**style, **keywords})
        _axes.mark_nonfinite(ax, steps[is_nonfinite])
    margin = 0.02 * float(np.ptp(steps)) or 0.5
    ax.set_xlim(float(steps.min()) - margin, float(steps.max()) + margin)
    if steps.dtype.kind in "iu":
        _axes.tick_steps(ax, "x", steps, time=False)
    return lines_by_weight


def _set_value_axis(ax: Any, values: Numbers, *, log: bool) -> None:
    """Set limits and scale, linear or logarithmic, of the value axis."""
    finite_values = values[np.isfinite(values)]
    positive_values = finite_values[finite_values > 0]
    if log and positive_values.size and positive_values.max() >= 10 * positive_values.min():
        _axes.set_log_axis(ax)
        _axes.set_log_limits(ax, finite_values, headroom=1.3)
    elif finite_values.size:
        low, high = float(finite_values.min()), float(finite_values.max())
        value_span = high - low or high or 1.0
        # The axis starts at 0 if the values are close to it; small changes of a large norm need a narrow range.
        ax.set_ylim(min(0.0, low) if low < 0.5 * high else low - 0.15 * value_span, high + 0.08 * value_span)


def _label_lines(
    ax: Any, steps: Numbers, norms_by_weight: dict[str, Numbers], lines_by_weight: dict[str, Any], *, outside: bool
) -> None:
    """Label lines at their ends if they are few, else in a legend; mark values below a logarithmic axis."""
    if ax.get_yscale() == "log":
        for name, values in norms_by_weight.items():
            _axes.mark_below(ax, steps, values, lines_by_weight[name].get_color())
    named_norms = {name: values for name, values in norms_by_weight.items() if name}
    if not 0 < len(named_norms) <= _axes.MOST_NAMED:
        if named_norms:
            ax.legend(fontsize="x-small", loc="best")
        return
    line_ends = []
    for name, values in named_norms.items():
        finite_indices = np.flatnonzero(np.isfinite(values))
        y = float(values[finite_indices[-1]]) if finite_indices.size else float("nan")
        line_ends.append(_axes.LineEnd(y, name.replace("_", " "), lines_by_weight[name].get_color()))
    _axes.name_ends(ax, line_ends, outside=outside)


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

    Examples
    --------
    >>> axes = rl.plot.norm_history({0: before["lstm"].hidden_grad, 100: trace["lstm"].hidden_grad})
    >>> len(axes)  # the map, and the size beside it
    2
    """
    arrays_by_moment = _arrays_by_moment(history, quantity)
    names, first_array = list(arrays_by_moment), next(iter(arrays_by_moment.values()))
    views_by_moment = [_data.direction_views(array, as_computed=as_computed) for array in arrays_by_moment.values()]
    directions = [view.name for view in views_by_moment[0]]
    sizes: dict[str, Any] = {"size": (3.4, 3.0), "margin": (1.0, 0.9), "shape": (1, 2), "widths": (4, 1.1)}
    panels = _frame.open_panels("norm_history", 2, ax, figure, directions=directions, ticks="medium", **sizes)
    for number, direction_axes in enumerate(panels.axes_by_direction):
        rows = [_history_row(views[number].data) for views in views_by_moment]
        _draw_history(
            direction_axes, names, _data.positions(views_by_moment[0][number].data, TIME), rows, log=log, keywords=image
        )
        direction_axes[0].set_xlabel(views_by_moment[0][number].time_label)
    sample_count = first_array.sizes.get(SAMPLE, 1)
    note = (
        f"median of {sample_count} samples, each by its own peak" if sample_count > 1 else "each moment by its own peak"
    )
    padding_note = (
        _samples.PADDING_NOTE
        if any(_samples.padding_mask(array) is not None for array in arrays_by_moment.values())
        else None
    )
    nonfinite_note = _data.nonfinite_note(
        np.concatenate([array.values.reshape(-1) for array in arrays_by_moment.values()])
    )
    default_title = _data.layer_title(
        first_array.attrs, _data.value_label(first_array).split(" [")[0], "while training"
    )
    return panels.with_title(title or default_title, [note, padding_note, nonfinite_note])


def _arrays_by_moment(history: Any, quantity: str) -> dict[Any, xr.DataArray]:
    """Return the recorded arrays of a quantity by training step."""
    if isinstance(history, xr.DataArray):
        step_dim = next((name for name in ROWS if name in history.dims and name != TIME), None)
        if step_dim is None:
            received, expected = f"dimensions ({', '.join(map(str, history.dims))})", f"one of {', '.join(ROWS[:-1])}"
            raise InputError("plot.norm_history needs a training dimension.", got=received, expected=expected)
        steps = _data.positions(history, step_dim).tolist()
        data_by_moment = {step: history.isel({step_dim: i}, drop=True) for i, step in enumerate(steps)}
    elif isinstance(history, Mapping) and history and _data.dataset_of(history) is None:
        data_by_moment = {
            name: _data.layer_variable(moment_data, quantity, "norm_history", masked=True)
            for name, moment_data in history.items()
        }
    else:
        raise InputError(
            "plot.norm_history draws one moment after the other.",
            got=type(history).__name__,
            expected="a mapping from training steps to layers of traces, or an array with such a dimension",
        )
    arrays = {name: _data.label_array(array, "norm_history") for name, array in data_by_moment.items()}
    for array in arrays.values():
        _data.require_time(array, "norm_history")
        _data.require_dim(array, _data.unit_dim(array) or "unit", "norm_history")
    lengths = {array.sizes[TIME] for array in arrays.values()}
    direction_counts = {array.sizes.get(DIRECTION) for array in arrays.values()}
    if len(lengths) > 1 or len(direction_counts) > 1:
        received = f"{', '.join(str(length) for length in sorted(lengths))} time steps"
        raise InputError("The moments differ in their steps or directions.", got=received)
    return arrays


def _history_row(array: xr.DataArray) -> tuple[Numbers, Numbers, tuple[float, float, float]]:
    """Return the profile (time,) in units of its peak, the mask of padding, and the quartiles of the peaks."""
    values, is_real = _data.numpy_by_sample(array, TIME), _samples.real_step_mask(array)
    norms = np.asarray(safe_norm(values, axis=tuple(range(2, values.ndim))), dtype=float)
    is_nonfinite = (~np.isfinite(norms) & is_real).any(axis=0)
    profile = np.where(is_nonfinite, np.nan, peak_band(norms, is_real).median)
    return profile, np.asarray(~is_real.any(axis=0)), quartiles(sample_peaks(np.where(is_real, norms, 0.0)))


def _draw_history(
    axes: list[Any], names: list[Any], steps: Numbers, rows: list[Any], *, log: bool, keywords: dict[str, Any]
) -> None:
    """Draw the map of gradient shapes, and the sizes beside it."""
    profiles, is_padding = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
    row_positions = np.arange(len(rows))
    map_style = {"cmap": _axes.POSITIVE, "norm": _axes.scale_from_zero(profiles, 1.0, log=log), **keywords}
    image = _images.draw_image(
        axes[0], _images.Matrix(profiles, steps, row_positions, is_padding), style=map_style, upward=True
    )
    is_numeric = all(isinstance(name, int | float | np.number) for name in names)
    _images.set_named_ticks(axes[0], "y", row_positions, [f"{name:g}" if is_numeric else str(name) for name in names])
    axes[0].set_ylabel("training step" if is_numeric else "moment")
    low, middle, high = np.array([row[2] for row in rows]).T
    size_ax = axes[1]
    size_ax.tick_params(labelsize="small")
    size_ax.fill_betweenx(row_positions, low, high, color=_axes.BLUE, alpha=0.2, linewidth=0, gid="band")
    size_ax.plot(middle, row_positions, "o-", color=_axes.BLUE, markersize=3, linewidth=1.2, gid="size")
    size_ax.set(ylim=axes[0].get_ylim(), yticks=[], xlabel="peak")
    positive_sizes = np.array([low, middle, high])
    positive_sizes = positive_sizes[np.isfinite(positive_sizes) & (positive_sizes > 0)]
    if positive_sizes.size:
        size_ax.set_xlim(float(positive_sizes.min()) / 1.5, float(positive_sizes.max()) * 1.5)
        _axes.set_log_axis(size_ax, "x", most_ticks=3)
    _images.colour_bar([size_ax], image, "share of the sample's peak")
