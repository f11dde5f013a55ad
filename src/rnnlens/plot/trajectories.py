"""Trajectories of hidden states in their principal components, with fixed points and the direction of a readout.

Along three components they are the picture of one view, and a scene that a notebook turns by dragging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex, to_rgba
from matplotlib.lines import Line2D

from ..arguments import as_list, as_numbers, integer, text
from ..errors import InputError, short_repr
from ..results.diagnosis import FixedPoints
from ..vocabulary import DIRECTION, SAMPLE, TIME
from . import _axes, _data, _frame
from ._call import drawing
from ._data import Numbers
from ._interactive import interactive

#: Colour, marker and size of each kind of fixed point.
_KINDS = {
    "stable": (_axes.BLUE, "o", 7),
    "saddle": (_axes.ORANGE, "X", 8),
    "repeller": (_axes.PINK, "D", 6),
    "marginal": (_axes.GREEN, "s", 6),
    "slow": ("0.45", "o", 4),
}
_PLACES = ("first", "second", "third")
#: Most samples drawn, and most conditions named in the legend.
_MOST_SAMPLES, _MOST_CONDITIONS = 200, 8
#: Colours of ordered conditions: of both signs, and of one sign.
_BOTH_SIGNS = LinearSegmentedColormap.from_list("conditions", [_axes.BLUE, "0.7", _axes.ORANGE])
_ONE_SIGN = LinearSegmentedColormap.from_list("conditions", ["#8fd0f0", _axes.BLUE, "#08203f"])
#: Azimuth and elevation of the picture, in degrees; matplotlib's own 3-D axes begin at the same view.
_AZIMUTH, _ELEVATION = -60.0, 30.0
#: Largest number of points that a scene keeps; longer paths are thinned evenly.
_MOST_POINTS = 20_000
#: Coordinate of the point farthest from the middle along an axis, in the whole numbers of a scene.
_REACH = 1000


def _check_states(name: str, value: Any) -> list[Any]:
    """Check one array of states, or the states (h, c) of a cell."""
    return list(value) if isinstance(value, tuple | list) and len(value) and np.ndim(value[0]) >= 2 else [value]


def _check_components(name: str, value: Any) -> tuple[int, ...]:
    """Check two or three different numbers of principal components, from 1 on."""
    numbers = as_list(value)
    if numbers is None or len(numbers) not in (2, 3) or len(set(map(str, numbers))) != len(numbers):
        expected = "different numbers, such as (1, 2) or (1, 2, 3)"
        raise InputError(f"{name}= are two or three principal components.", got=short_repr(value), expected=expected)
    return tuple(integer(least=1)(name, number) for number in numbers)


def _check_basis(name: str, value: Any) -> Numbers:
    """Check two or three linearly independent axes, (state, 2) or (state, 3), and return them orthonormal."""
    basis = np.asarray(as_numbers(name, value), np.float64)
    if basis.ndim != 2 or basis.shape[1] not in (2, 3) or np.linalg.matrix_rank(basis) < basis.shape[1]:
        expected = "shape (state, 2) or (state, 3), no column made of the others"
        raise InputError(f"{name}= are two or three axes.", got=short_repr(value), expected=expected)
    orthonormal, upper = np.linalg.qr(basis)
    return np.asarray(orthonormal * np.sign(np.diag(upper)))


@drawing(
    LineCollection,
    states=_check_states,
    color=lambda name, value: as_numbers(name, value) if not isinstance(as_list(value), list) else as_list(value),
    fixed_points=lambda name, value: value,
    readout=as_numbers,
    components=_check_components,
    basis=_check_basis,
    color_label=text,
)
def trajectories(
    states: Any,
    *,
    color: Any = None,
    color_label: str = "condition",
    fixed_points: FixedPoints | None = None,
    readout: Any = None,
    components: Any = (1, 2),
    basis: Any = None,
    dims: Sequence[str] | None = None,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw each sample's states as a path in two principal components: pale at its first step, dark at its last.

    The components are those of all samples and steps together. All axes have one scale, so that lengths and angles
    can be compared; a component without variance stays flat. Of three components a notebook shows a view that is
    turned by dragging, or with the arrow keys, and ``.save("states.html")`` writes it; the picture is one view of them.

    Parameters
    ----------
    states : (sample, time, unit)
        Hidden states, such as ``trace["lstm"].hidden``; or ``(h, c)`` of an LSTM, whose units are joined.
    color : (sample,)
        Condition of each sample: integers and words, such as its class or its context, have a colour each; floats,
        such as a coherence, are coloured by size.
    color_label
        Name of the condition, for the legend.
    fixed_points
        Result of ``rl.fixed_points`` of the same layer: fixed and slow points, with bars along their unstable modes.
    readout : (state,) or (state, outputs)
        Weights of a linear output of the states. The direction of each output is drawn as an arrow from the mean.
    components
        The principal components to draw, from 1 on: two, or three such as ``(1, 2, 3)``.
    basis : (state, 2) or (state, 3)
        Axes to draw in place of principal components, such as a readout and a choice axis; they are made orthonormal.

    Returns
    -------
    1-D array of one Axes

    References
    ----------
    Mante et al. 2013, doi:10.1038/nature12742 (states of a network by condition); Sussillo & Barak 2013,
    doi:10.1162/NECO_a_00409 (fixed points in principal components of the states).

    Examples
    --------
    >>> axes = rl.plot.trajectories(trace["lstm"].hidden, color=["left", "right"])
    >>> len(axes)
    1
    """
    arrays = [_state_array(part) for part in (states if isinstance(states, tuple | list) else [states])]
    values = np.concatenate([array.transpose(SAMPLE, TIME, ...).values for array in arrays], axis=-1)
    if values.ndim != 3 or any(array.sizes[SAMPLE] != arrays[0].sizes[SAMPLE] for array in arrays):
        has_directions = any(DIRECTION in array.dims for array in arrays)
        hint = 'one direction: .sel(direction="forward"), or .stack(unit_of_both=("direction", "unit"))'
        raise InputError(
            "plot.trajectories draws vectors.",
            got=f"dimensions {', '.join(map(str, arrays[0].dims))}, shape {values.shape}",
            expected="sample, time, unit",
            hint=hint if has_directions else None,
        )
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise InputError(
            "plot.trajectories draws finite states.", got="NaN or infinity", hint="rl.find_nonfinite(model, x, y)"
        )
    mean = values.mean(axis=(0, 1))
    centred = values - mean
    axes, shares = axes_of(centred.reshape(-1, values.shape[-1]), components, basis)
    paths = centred @ axes
    colours, legend_entries, legend_title = _colours(color, color_label, len(values))
    panels = _frame.open_panels("trajectories", 1, ax, figure, size=(5.2, 4.6), ticks="medium")
    panel_ax = panels.axes[0]
    shown, note = _data.select_evenly(len(values), _MOST_SAMPLES, "samples")
    in_space = axes.shape[1] == 3
    plane = axes @ view() if in_space else axes
    flat = centred @ plane
    _draw_paths(panel_ax, flat[shown], [colours[i] for i in shown], line)
    span = float(np.ptp(paths, axis=(0, 1)).max())
    marks = None if fixed_points is None else _marks_of(fixed_points, mean, axes, span)
    if marks is not None:
        legend_entries += _draw_marks(panel_ax, marks.projected(view()) if in_space else marks)
    reach = float(np.abs(paths).max())
    if readout is not None:
        _draw_readout(panel_ax, _directions(readout, plane) * reach)
    names = (
        [f"{place} given axis" for place in _PLACES] if basis is not None else [f"component {i}" for i in components]
    )
    words = "" if in_space else " of the variance"
    labels = [f"{name} ({share:.0%}{words})" for name, share in zip(names, shares, strict=False)]
    if in_space:
        flat = np.concatenate([flat.reshape(-1, 2), draw_axes(panel_ax, 0.6 * span, labels)])
    else:
        panel_ax.set(xlabel=labels[0], ylabel=labels[1])
    set_equal_limits(panel_ax, flat)
    if legend_entries:
        outside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0, "frameon": False}
        panel_ax.legend(
            handles=legend_entries, fontsize="x-small", title=legend_title, title_fontsize="x-small", **outside
        )
    steps = values.shape[1]
    trajectories_text = "1 trajectory" if len(values) == 1 else f"{len(values)} trajectories"
    title = title or _data.layer_title(arrays[0].attrs, f"{trajectories_text} of {steps} step{'s' * (steps != 1)}")
    notes = ["pale: first step, dark: last step", "shares of the variance" if in_space else None, note]
    drawing_ = panels.with_title(title, notes)
    if not in_space:
        return drawing_
    conditions = [""] * len(values) if color is None else [f", {color_label} {value}" for value in np.ravel(color)]
    names = [f"sample {name}{conditions[i]}" for i, name in enumerate(_data.names_of(arrays[0], SAMPLE))]
    scene = scene_of(paths[shown], reach, [to_hex(colours[i]) for i in shown], [names[i] for i in shown])
    scene |= {
        "title": title,
        "notes": [part for part in notes if part],
        "labels": labels,
        "axis": whole(np.array(0.6 * span), reach),
        "marks": [] if marks is None else marks.of_scene(reach),
        "arrows": [] if readout is None else _arrows(_directions(readout, axes)),
        "legend_title": legend_title or "",
        "legend": [{"name": entry.get_label(), "colour": to_hex(entry.get_color())} for entry in legend_entries],
    }
    return interactive(drawing_, scene)


def _state_array(states: Any) -> Any:
    array = _data.label_array(states, "trajectories")
    for dim in (SAMPLE, TIME):
        _data.require_dim(array, dim, "trajectories")
    return array


def axes_of(points: Numbers, components: tuple[int, ...] = (1, 2), basis: Any = None) -> tuple[Numbers, Numbers]:
    """Return two or three axes (state, axis) and the share of the variance of centred ``points`` along each."""
    size = points.shape[1]
    if basis is not None:
        axes = np.asarray(basis)
        if len(axes) != size:
            raise InputError("basis= has another number of states.", got=f"{len(axes)}", expected=f"{size}")
    else:
        if max(components) > max(size, len(components)):
            expected = f"at most {size}, the number of units"
            raise InputError("There are not as many components.", got=f"{max(components)}", expected=expected)
        vectors = np.linalg.eigh(points.T @ points)[1][:, ::-1]
        # The sign of a component is arbitrary: its largest entry is positive.
        vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(size)])
        vectors = np.pad(vectors, [(0, 0), (0, max(0, len(components) - size))])
        axes = vectors[:, [component - 1 for component in components]]
    total = float((points**2).sum())
    variances = ((points @ axes) ** 2).sum(axis=0)
    return axes, variances / total if total else np.zeros(axes.shape[1])


def _colours(color: Any, label: str, count: int) -> tuple[list[Any], list[Any], str | None]:
    """Return a colour for each sample, the entries of the legend, and its title."""
    if color is None:
        return [_axes.BLUE] * count, [], None
    conditions = np.asarray(color).reshape(-1)
    if len(conditions) != count:
        got, expected = f"{len(conditions)} values", f"{count}, one per sample"
        raise InputError("color= has another number of samples.", got=got, expected=expected)
    distinct_values = np.unique(conditions)
    count = len(distinct_values)
    if conditions.dtype.kind == "f" or (conditions.dtype.kind in "iu" and count > _MOST_CONDITIONS):
        low, high = float(distinct_values[0]), float(distinct_values[-1])
        low, high = (-max(-low, high), max(-low, high)) if low < 0 < high else (low, high)
        scale = Normalize(low, high)
        colour_map = _BOTH_SIGNS if low < 0 < high else _ONE_SIGN
        marks = distinct_values if count <= _MOST_CONDITIONS else np.linspace(low, high, 5)
        entries = [_line_entry(colour_map(scale(v)), _axes.short_number(v)) for v in map(float, marks)]
        return [colour_map(scale(value)) for value in conditions.tolist()], entries, label
    by_value = dict(zip(distinct_values.tolist(), _axes.line_colours(count), strict=True))
    entries = [_line_entry(colour, str(value)) for value, colour in by_value.items()]
    return [by_value[value] for value in conditions.tolist()], entries, label


def _line_entry(colour: Any, name: str) -> Line2D:
    return Line2D([], [], color=colour, linewidth=2, label=name)


def _draw_paths(ax: Any, paths: Numbers, colours: list[Any], line: dict[str, Any]) -> None:
    """Draw a path per sample, whose steps become opaque with time, and a dot at its last step."""
    steps = paths.shape[1]
    opacity = np.linspace(0.15, 0.95, max(steps - 1, 1))
    for path, colour in zip(paths, colours, strict=True):
        segments = np.stack([path[:-1], path[1:]], axis=1)
        shades = [to_rgba(colour, alpha) for alpha in opacity[: len(segments)]]
        style = {"linewidth": 1.1, "gid": "trajectory"}
        ax.add_collection(LineCollection(list(segments), colors=shades, **{**style, **line}))
        ax.plot(*path[-1], marker=".", markersize=5, color=colour, gid="last step")


@dataclass
class Marks:
    """Fixed and slow points in the axes that are drawn: places (point, axis), kinds, and bars along unstable modes."""

    places: Numbers
    kinds: Numbers
    bars: list[Numbers]

    def projected(self, view: Numbers) -> Marks:
        """Return the marks in the plane of a view (axis, 2)."""
        return Marks(self.places @ view, self.kinds, [bar @ view for bar in self.bars])

    def of_scene(self, reach: float) -> list[dict[str, Any]]:
        """Return the marks as plain numbers and words: points by kind, bars by their two ends."""
        points = [
            {"at": whole(place, reach), "name": f"{kind} point", "colour": to_hex(_KINDS[kind][0])}
            for place, kind in zip(self.places, self.kinds, strict=True)
        ]
        return [*({"bar": whole(bar, reach)} for bar in self.bars), *points]


def _marks_of(points: FixedPoints, mean: Numbers, axes: Numbers, span: float) -> Marks:
    if not isinstance(points, FixedPoints):
        hint = "rl.fixed_points(model, x)"
        if isinstance(points, list | tuple) and points and all(isinstance(each, FixedPoints) for each in points):
            hint = "a figure for each input: fixed_points=points[0]"
        raise InputError(
            "fixed_points= are those of one input.", got=type(points).__name__, expected="FixedPoints", hint=hint
        )
    locations = points.data["states"].values
    if locations.shape[1] != len(mean):
        raise InputError(
            "The fixed points are of another state.",
            got=f"{locations.shape[1]} numbers per point, {len(mean)} per step of the trajectories",
            hint="states=(h, c), such as (trace[layer].hidden, trace[layer].cell), if the points are of an LSTM",
        )
    places, kinds = (locations - mean) @ axes, np.array(points.kinds, dtype=object)
    values, vectors, bars = points.eigenvalues.values, points.eigenvectors.values, []
    for i in np.flatnonzero(np.isin(kinds, ("saddle", "repeller", "slow"))):
        for mode in np.flatnonzero(np.abs(values[i]) > 1):
            bar = (vectors[i, :, mode].real @ axes) * 0.06 * span * min(float(np.abs(values[i, mode])), 3.0)
            bars.append(np.stack([places[i] - bar, places[i] + bar]))
    return Marks(places, kinds, bars)


def draw_fixed_points(
    ax: Any, points: FixedPoints, mean: Numbers, axes: Numbers, span: float, line: Mapping[str, Any] | None = None
) -> list[Any]:
    """Draw fixed and slow points, and bars along their unstable modes; return the entries of the legend."""
    return _draw_marks(ax, _marks_of(points, mean, axes, span), line)


def _draw_marks(ax: Any, marks: Marks, line: Mapping[str, Any] | None = None) -> list[Any]:
    for ends in marks.bars:
        ax.plot(*ends.T, color="black", linewidth=1.2, zorder=4, gid="mode")
    entries = []
    for kind, (colour, marker, size) in _KINDS.items():
        if (chosen := marks.places[marks.kinds == kind]).size:
            style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": size, "color": colour}
            edge = {"markeredgecolor": "white", "markeredgewidth": 0.8, "zorder": 5}
            ax.plot(*chosen.T, **{**style, **edge, "gid": kind, **(line or {})})
            entries.append(Line2D([], [], **style, label=f"{kind} point ({len(chosen)})"))
    return entries


def _directions(readout: Any, axes: Numbers) -> Numbers:
    """Return the direction of each output in the axes (output, axis); short if it lies outside of them."""
    weights = np.asarray(readout, np.float64).reshape(len(readout), -1)
    if len(weights) != len(axes):
        got, expected = f"{len(weights)} rows", f"{len(axes)}, one per state"
        raise InputError("readout= has another number of states.", got=got, expected=expected)
    return np.asarray((weights / np.maximum(np.linalg.norm(weights, axis=0), 1e-300)).T @ axes)


def _names_of_outputs(count: int) -> list[str]:
    return ["readout"] if count == 1 else [f"output {index}" for index in range(count)]


def _arrows(directions: Numbers) -> list[dict[str, Any]]:
    """Return the arrows of outputs as plain numbers and words."""
    names = _names_of_outputs(len(directions))
    return [{"to": whole(to, 1.0), "name": name} for to, name in zip(directions, names, strict=True)]


def _draw_readout(ax: Any, ends: Numbers) -> None:
    """Draw the direction of each output as an arrow from the mean."""
    for end, name in zip(ends, _names_of_outputs(len(ends)), strict=True):
        arrow = {"arrowstyle": "-|>", "color": "0.25", "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", end, (0, 0), arrowprops=arrow, gid="readout", zorder=4)
        _axes.write_text(ax, name, tuple(end), (4, 4), va="bottom", gid="readout")


def set_equal_limits(ax: Any, points: Numbers) -> None:
    """Set one scale and one width on both axes, so that a component without variance stays flat."""
    points = points.reshape(-1, 2)
    low, high = points.min(axis=0), points.max(axis=0)
    half = 0.575 * (float((high - low).max()) or 1.0)
    for axis, middle in zip("xy", (low + high) / 2, strict=True):
        getattr(ax, f"set_{axis}lim")(middle - half, middle + half)
    ax.set_aspect("equal", adjustable="box")


def view() -> Numbers:
    """Return the two directions (axis, 2), to the right and upward, of the picture."""
    azimuth, elevation = np.deg2rad([_AZIMUTH, _ELEVATION])
    right = [-np.sin(azimuth), np.cos(azimuth), 0.0]
    up = [-np.sin(elevation) * np.cos(azimuth), -np.sin(elevation) * np.sin(azimuth), np.cos(elevation)]
    return np.array([right, up]).T


def draw_axes(ax: Any, length: float, labels: Sequence[str]) -> Numbers:
    """Draw the three axes through the mean in place of the frame, named at their ends; return their ends."""
    ends = length * view()
    for end, label in zip(ends, labels, strict=True):
        ax.plot([-end[0], end[0]], [-end[1], end[1]], color="0.7", linewidth=0.8, zorder=0, gid="axis")
        side = "left" if end[0] >= 0 else "right"
        _axes.write_text(ax, label, (float(end[0]), float(end[1])), (3, 0), ha=side, va="bottom", gid="axis name")
    ax.set_axis_off()
    return np.concatenate([ends, -ends])


def scene_of(paths: Numbers, half: float, colours: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the scene of paths (sample, time, 3), whose farthest coordinate is ``half``, each by colour and name."""
    samples, steps, _ = paths.shape
    kept = np.unique(np.linspace(0, steps - 1, max(2, min(steps, _MOST_POINTS // max(samples, 1)))).astype(int))
    return {
        "kind": "space",
        "azimuth": _AZIMUTH,
        "elevation": _ELEVATION,
        "reach": _REACH,
        "steps": kept.tolist(),
        "paths": [
            {"at": whole(path[kept], half), "colour": colour, "name": name}
            for path, colour, name in zip(paths, colours, names, strict=True)
        ],
    }


def whole(points: Numbers, half: float) -> list[Any]:
    """Return coordinates as whole numbers, of which ``_REACH`` is ``half``."""
    numbers: list[Any] = np.rint(points * (_REACH / (half or 1.0))).astype(int).tolist()
    return numbers
