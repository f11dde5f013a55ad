"""Matrices as images: merged to a limited number of cells, with separators, and with missing values marked."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import SymLogNorm
from matplotlib.ticker import NullLocator

from ..errors import InputError
from ..vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ._axes import Powers, decade_ticks, short_number, step_axis
from ._data import (
    OVER_TIME,
    Numbers,
    axis_label,
    finite_range,
    names_of,
    place_words,
    positions,
    refuse_places_of_others,
    require_dim,
    unit_dim,
)
from ._frame import LETTERS_PER_INCH, SEPARATOR, Panels
from ._samples import padding_of, without_padding

#: Largest number of cells (rows, columns) of an image; neighbours are merged beyond it.
MOST_CELLS = (400, 550)

#: Largest number of missing values marked by crosses; more are visible by their colour.
MOST_CROSSES = 400

#: Keywords of ``Axes.imshow`` that are not properties of the image.
IMSHOW = (
    *("aspect", "interpolation", "interpolation_stage", "resample", "filternorm", "filterrad"),
    *("vmin", "vmax", "origin"),
)


def steps_for(shape: Sequence[int], limits: tuple[int, int] = MOST_CELLS) -> tuple[int, int]:
    """Return how many rows and columns of an image to merge into one cell, for at most ``limits`` cells."""
    return -(-shape[0] // limits[0]), -(-shape[1] // limits[1])


def extreme_of_blocks(matrix: Numbers, steps: tuple[int, int]) -> Numbers:
    """Reduce each block of ``steps`` (rows, columns) to its value of largest magnitude; NaN if it has one."""
    if steps == (1, 1):
        return matrix
    pad = [(0, -size % step) for size, step in zip(matrix.shape, steps, strict=True)]
    padded = np.pad(matrix, pad, mode="edge")
    blocks = padded.reshape(padded.shape[0] // steps[0], steps[0], padded.shape[1] // steps[1], steps[1])
    highest, lowest = blocks.max(axis=(1, 3)), blocks.min(axis=(1, 3))
    return np.asarray(np.where(highest >= -lowest, highest, lowest))


def merge_note(shape: Sequence[int], limits: tuple[int, int], rows: str, columns: str) -> str | None:
    """Return a note on the dimensions whose cells are merged; None if no dimension is larger than ``limits``."""
    steps = steps_for(shape, limits)
    rows, columns = ("step" if word == "time" else word for word in (rows, columns))
    if steps == (1, 1):
        return None
    return f"one cell shows {steps[0]} {rows}s x {steps[1]} {columns}s, by their value of largest magnitude"


def edges(centres: Numbers) -> tuple[float, float]:
    """Return the lower and upper limit of an axis of cells whose centres are evenly spaced."""
    first, last = float(centres[0]), float(centres[-1])
    half = 0.5 * (last - first) / (len(centres) - 1) if len(centres) > 1 else 0.5
    return first - half, last + half


def evenly_spaced(centres: Numbers) -> bool:
    """Return whether positions are successive steps, so that they can be an axis."""
    gaps = np.diff(centres.astype(float))
    return bool(len(centres) < 2 or (abs(gaps[0]) == 1 and np.allclose(gaps, gaps[0])))


@dataclass(frozen=True)
class Matrix:
    """Values (row, column) at the positions ``x`` of columns and ``y`` of rows; ``empty`` is True where none exists."""

    values: Numbers
    x: Numbers
    y: Numbers
    empty: Numbers | None = None
    over_time: bool = True


def draw_image(
    ax: Any, matrix: Matrix, *, look: dict[str, Any], upward: bool = False, limits: tuple[int, int] = MOST_CELLS
) -> Any:
    """Draw a matrix as an image; return the AxesImage.

    ``look`` has properties of the image; limits in it replace its scale. Neighbouring cells are merged if there are
    more than ``limits`` (rows, columns). Non-finite cells have the colour of missing values and a cross, except where
    the matrix is empty. ``upward``: y increases upward.
    """
    values, x, y, empty = matrix.values, matrix.x, matrix.y, matrix.empty
    x_even, y_even = evenly_spaced(x), evenly_spaced(y)
    xs, ys = (x if x_even else np.arange(len(x))), (y if y_even else np.arange(len(y)))
    steps = steps_for((values.shape[0], values.shape[1]), limits)
    (left, right), (top, bottom) = edges(xs), edges(ys)
    far = left + (right - left) * (len(xs) + -len(xs) % steps[1]) / len(xs)  # the last cell may be incomplete
    low = top + (bottom - top) * (len(ys) + -len(ys) % steps[0]) / len(ys)
    extent = (left, far, top, low) if upward else (left, far, low, top)
    missing = ~np.isfinite(values)
    with np.errstate(invalid="ignore"):
        shown = np.ma.masked_invalid(extreme_of_blocks(np.where(missing, np.nan, values), steps), copy=False)
    keywords = {"aspect": "auto", "interpolation": "nearest", **look}
    if "vmin" in keywords or "vmax" in keywords:
        keywords["norm"] = None
    drawn = ax.imshow(shown, origin="lower" if upward else "upper", extent=extent, **keywords)
    rows, columns = np.nonzero(missing if empty is None else missing & ~empty)
    if 0 < len(rows) <= MOST_CROSSES:
        ax.plot(xs[columns], ys[rows], "x", color="black", markersize=5, markeredgewidth=1.1, gid="non-finite")
    ax.set(xlim=(left, right), ylim=(top, bottom) if upward else (bottom, top))
    for axis, even, places, centres in (("x", x_even, xs, x), ("y", y_even, ys, y)):
        if even:
            step_axis(ax, axis, centres, time=matrix.over_time)
        else:
            name_ticks(ax, axis, places, [f"{centre:g}" for centre in centres])
    return drawn


def name_ticks(ax: Any, axis: str, places: Sequence[float] | Numbers, names: Sequence[str], *, most: int = 12) -> None:
    """Set named ticks at positions; every n-th one if there are more than ``most``."""
    every = -(-len(names) // most)
    setter = ax.set_xticks if axis == "x" else ax.set_yticks
    setter(list(places)[::every], labels=list(names)[::every])


def separate(ax: Any, axis: str, size: int, names: Sequence[str]) -> None:
    """Draw lines between gates, blocks of ``size`` cells along ``axis``, and the name of each at its middle."""
    line = ax.axvline if axis == "x" else ax.axhline
    for number in range(1, len(names)):
        line(number * size - 0.5, gid="gate separator", **SEPARATOR)
    middles = [(number + 0.5) * size - 0.5 for number in range(len(names))]
    name_ticks(ax, axis, middles, names, most=len(names))
    ax.tick_params(axis=axis, length=0)


def colour_bar(axes: Sequence[Any], drawn: Any, label: str = "", *, among: Sequence[Any] = ()) -> Any:
    """Draw a labelled colour bar beside ``axes``, pointed where ``drawn`` or images ``among`` exceed the scale."""
    figure, boxes = axes[0].figure, [ax.get_window_extent() for ax in axes]
    width = max(1.0, max(box.x1 for box in boxes) - min(box.x0 for box in boxes))
    height = max(box.y1 for box in boxes) - min(box.y0 for box in boxes)
    share = float(np.clip(0.2 * figure.dpi / width, 0.08, 0.3))
    shape = {"fraction": share, "pad": 0.02, "aspect": max(20.0, height / (share * width))}
    bar = figure.colorbar(drawn, ax=list(axes), extend=beyond(drawn.norm, among or [drawn]), **shape)
    bar.ax.tick_params(labelsize="small" if label else "x-small")
    if label:
        specs = [(ax.get_subplotspec(), ax) for ax in axes]
        rows = {ax if spec is None else spec.rowspan.start: ax for spec, ax in specs}
        inches = sum(ax.get_position().height for ax in rows.values())
        bar.set_label(one_line(label, max(inches * figure.bbox.height / figure.dpi, 1.2)))
    if isinstance(drawn.norm, SymLogNorm):
        low, high, linear = drawn.norm.vmin or 0.0, drawn.norm.vmax or 0.0, drawn.norm.linthresh
        end = f"≤ {short_number(linear)}"
        if low < 0:
            ticks = [tick for tick in decade_ticks(max(-low, high), linear) if low <= tick <= high]
        else:
            ticks = [linear, *Powers(6).tick_values(2 * linear, high)]
        labels = [f"|x| {end}" if tick == 0 else end if tick == linear else short_number(tick) for tick in ticks]
        bar.set_ticks(ticks, labels=labels)
        bar.ax.yaxis.set_minor_locator(NullLocator())
    return bar


def one_line(words: str, inches: float) -> str:
    """Shorten a label to one line of ``inches``: drop the part before its first comma, or all but that part."""
    most = int(LETTERS_PER_INCH * inches)
    symbol, _, name = words.partition(", ")
    for part in (words, name, symbol):
        if part and len(re.sub(r"\$.*?\$", "dL/dh", part)) <= most:
            return part
    return textwrap.shorten(name or words, max(most, 12), placeholder="…")


def beyond(norm: Any, images: Sequence[Any]) -> str:
    """Return matplotlib's ``extend``: at which ends the images' values exceed the colour scale."""
    arrays: list[Any] = [np.ma.asarray(image.get_array(), dtype=float) for image in images if image is not None]
    ranges = [found for array in arrays if (found := finite_range(np.ma.filled(array, np.nan))) is not None]
    if not ranges or norm.vmin is None or norm.vmax is None:
        return "neither"
    slack = 1e-6 * (norm.vmax - norm.vmin)
    below = min(low for low, _ in ranges) < norm.vmin - slack
    above = max(high for _, high in ranges) > norm.vmax + slack
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[below, above]


def colour_bars(panels: Panels, drawn: list[Any], label: str, *, shared: bool, wanted: bool = True) -> None:
    """Draw one colour bar for all panels, or one for each; that of a second direction is invisible."""
    if not wanted or drawn[-1] is None:
        return
    if shared:
        bars = [colour_bar(half, drawn[-1], label, among=drawn) for half in panels.halves]
        for spacer in bars[:-1] if panels.owners else ():
            fade(spacer)
        if not panels.owners:
            for spare in bars[:-1]:
                spare.remove()
        return
    for ax, image in zip(panels.axes, drawn, strict=True):
        colour_bar([ax], image, label if len(drawn) == 1 else "")


def fade(bar: Any) -> None:
    """Make a colour bar invisible, but keep its space."""
    bar.solids.set_alpha(0.0)
    bar.outline.set_visible(False)
    bar.ax.tick_params(color="none", labelcolor="none")
    bar.ax.yaxis.label.set_alpha(0.0)
    bar.ax.patch.set_alpha(0.0)
    for part in getattr(bar, "_extend_patches", ()):
        part.set_alpha(0.0)
    bar.ax.set_gid("spacer")


#: Dimensions of a plain array by its rank.
GUESS = {rank: dims for rank, dims in OVER_TIME.items() if rank > 1}


@dataclass(frozen=True)
class ImageDims:
    """Dimensions of a labelled image: horizontal and vertical; with ``stacked`` gates are stacked into the rows."""

    across: str
    down: str
    stacked: bool

    @classmethod
    def of(cls, array: xr.DataArray, figure: str, x: str | None = None, y: str | None = None) -> ImageDims:
        """Choose the dimensions of an image: time across and units down, unless ``x`` and ``y`` name others."""
        for given in (x, y):
            if given is not None:
                refuse_places_of_others(array, given, figure, DIRECTION)
                require_dim(array, given, figure)
        free = [str(d) for d in array.dims if d not in (DIRECTION, x, y)]
        if len(free) + (x is not None) + (y is not None) < 2:
            raise InputError(
                f"plot.{figure} needs two dimensions.",
                got=f"dimensions ({', '.join(map(str, array.dims))})",
                expected="at least two besides direction",
                hint="draw it with plot.curves or plot.points",
            )
        if x is None:
            x = TIME if TIME in free else next(d for d in reversed(free) if d != GATE)
            free.remove(x)
        if y is None:
            unit = unit_dim(array)
            plain = [d for d in free if d not in (GATE, SAMPLE)] or [d for d in free if d != GATE] or free
            y = unit if unit in plain else plain[-1]
        return cls(x, y, GATE in array.dims and GATE not in (x, y))

    def slots(self, array: xr.DataArray) -> tuple[list[str], list[tuple[dict[str, int], str]]]:
        """Return the dimensions along which there are several panels, and the selection and title of each panel."""
        rest = [str(d) for d in array.dims if d not in (self.across, self.down, GATE, DIRECTION)]
        return rest, slots_of(array, rest)

    def shape(self, array: xr.DataArray) -> tuple[int, int]:
        """Return the numbers of rows and columns of the image."""
        return array.sizes[self.down] * (array.sizes[GATE] if self.stacked else 1), array.sizes[self.across]

    def label(self, array: xr.DataArray) -> str:
        """Return the label of the vertical axis."""
        return "gate, " * self.stacked + axis_label(array, self.down)

    def values(self, array: xr.DataArray) -> Numbers:
        """Return the values of the image, (row, column)."""
        if not self.stacked:
            return np.asarray(array.transpose(self.down, self.across).values)
        values = array.transpose(GATE, self.down, self.across).values
        return np.asarray(values.reshape(-1, values.shape[-1]))

    def matrix(self, array: xr.DataArray) -> Matrix:
        """Return the matrix of an image, empty where a step is padding."""
        values = self.values(without_padding(array))
        rows = np.arange(len(values)) if self.stacked else positions(array, self.down)
        empty = self.values(padding_of(array))
        return Matrix(values, positions(array, self.across), rows, empty, self.across == TIME)

    def draw(self, ax: Any, array: xr.DataArray, matrix: Matrix, title: str, **options: Any) -> Any:
        """Draw an image with its title and the names of stacked gates; ``options`` as for :func:`draw_image`."""
        image = draw_image(ax, matrix, **options)
        ax.set_title(title, fontsize="small", pad=3)
        if self.stacked:
            separate(ax, "y", array.sizes[self.down], names_of(array, GATE))
        return image


def slots_of(array: xr.DataArray, keep: list[str]) -> list[tuple[dict[str, int], str]]:
    """Return the selection and title of each panel, along all dimensions but ``keep``."""
    found: list[tuple[dict[str, int], str]] = [({}, "")]
    for dim in keep:
        found = [
            ({**where, dim: i}, f"{title} · {place_words(array, dim, i)}".removeprefix(" · "))
            for where, title in found
            for i in range(array.sizes[dim])
        ]
    return found
