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
from matplotlib.ticker import MaxNLocator, NullLocator

from ..errors import InputError
from ..vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ._axes import PowerLocator, decade_ticks, short_number, tick_steps
from ._data import (
    OVER_TIME,
    Numbers,
    axis_label,
    finite_range,
    names_of,
    position_title,
    positions,
    refuse_reserved_dim,
    require_dim,
    unit_dim,
)
from ._frame import SEPARATOR, Panels, letters_per_inch
from ._samples import full_padding_mask, nan_at_padding

#: Largest number of cells (rows, columns) of an image; neighbours are merged beyond it.
MOST_CELLS = (400, 550)

#: Largest number of missing values marked by crosses; more are visible by their colour.
MOST_CROSSES = 400

#: Keywords of ``Axes.imshow`` that are not properties of the image.
IMSHOW = (
    *("aspect", "interpolation", "interpolation_stage", "resample", "filternorm", "filterrad"),
    *("vmin", "vmax", "origin"),
)


def merge_factors(shape: Sequence[int], cell_limits: tuple[int, int] = MOST_CELLS) -> tuple[int, int]:
    """Return how many rows and columns of an image to merge into one cell, for at most ``cell_limits`` cells."""
    return -(-shape[0] // cell_limits[0]), -(-shape[1] // cell_limits[1])


def extreme_of_blocks(matrix: Numbers, block_shape: tuple[int, int]) -> Numbers:
    """Reduce each block of ``block_shape`` (rows, columns) to its value of largest magnitude; NaN if it has one."""
    if block_shape == (1, 1):
        return matrix
    pad = [(0, -size % step) for size, step in zip(matrix.shape, block_shape, strict=True)]
    padded = np.pad(matrix, pad, mode="edge")
    blocks = padded.reshape(
        padded.shape[0] // block_shape[0], block_shape[0], padded.shape[1] // block_shape[1], block_shape[1]
    )
    highest, lowest = blocks.max(axis=(1, 3)), blocks.min(axis=(1, 3))
    return np.asarray(np.where(highest >= -lowest, highest, lowest))


def merge_note(shape: Sequence[int], cell_limits: tuple[int, int], rows: str, columns: str) -> str | None:
    """Return a note on the dimensions whose cells are merged; None if no dimension is larger than ``cell_limits``."""
    merged = merge_factors(shape, cell_limits)
    rows, columns = ("step" if dim_name == "time" else dim_name for dim_name in (rows, columns))
    if merged == (1, 1):
        return None
    return f"one cell shows {merged[0]} {rows}s x {merged[1]} {columns}s, by their value of largest magnitude"


def outer_edges(centres: Numbers) -> tuple[float, float]:
    """Return the lower and upper limit of an axis of cells whose centres are evenly spaced."""
    first_centre, last_centre = float(centres[0]), float(centres[-1])
    half_gap = 0.5 * (last_centre - first_centre) / (len(centres) - 1) if len(centres) > 1 else 0.5
    return first_centre - half_gap, last_centre + half_gap


def is_evenly_spaced(centres: Numbers) -> bool:
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
    ax: Any, matrix: Matrix, *, style: dict[str, Any], upward: bool = False, cell_limits: tuple[int, int] = MOST_CELLS
) -> Any:
    """Draw a matrix as an image; return the AxesImage.

    ``style`` has properties of the image; limits in it replace its scale. Neighbouring cells are merged if there are
    more than ``cell_limits`` (rows, columns). Non-finite cells have the colour of missing values and a cross, except
    where the matrix is empty. ``upward``: y increases upward.
    """
    values, x, y, empty = matrix.values, matrix.x, matrix.y, matrix.empty
    x_even, y_even = is_evenly_spaced(x), is_evenly_spaced(y)
    xs, ys = (x if x_even else np.arange(len(x))), (y if y_even else np.arange(len(y)))
    merged = merge_factors((values.shape[0], values.shape[1]), cell_limits)
    (left, right), (top, bottom) = outer_edges(xs), outer_edges(ys)
    right_edge = left + (right - left) * (len(xs) + -len(xs) % merged[1]) / len(xs)  # the last cell may be incomplete
    lower_edge = top + (bottom - top) * (len(ys) + -len(ys) % merged[0]) / len(ys)
    extent = (left, right_edge, top, lower_edge) if upward else (left, right_edge, lower_edge, top)
    missing = ~np.isfinite(values)
    with np.errstate(invalid="ignore"):
        merged_values = np.ma.masked_invalid(extreme_of_blocks(np.where(missing, np.nan, values), merged), copy=False)
    keywords = {"aspect": "auto", "interpolation": "nearest", **style}
    if "vmin" in keywords or "vmax" in keywords:
        keywords["norm"] = None
    image = ax.imshow(merged_values, origin="lower" if upward else "upper", extent=extent, **keywords)
    rows, columns = np.nonzero(missing if empty is None else missing & ~empty)
    if 0 < len(rows) <= MOST_CROSSES:
        ax.plot(xs[columns], ys[rows], "x", color="black", markersize=5, markeredgewidth=1.1, gid="non-finite")
    ax.set(xlim=(left, right), ylim=(top, bottom) if upward else (bottom, top))
    for axis, is_even, positions_along, centres in (("x", x_even, xs, x), ("y", y_even, ys, y)):
        if is_even:
            tick_steps(ax, axis, centres, time=matrix.over_time)
        else:
            set_named_ticks(ax, axis, positions_along, [f"{centre:g}" for centre in centres])
    return image


def set_named_ticks(
    ax: Any, axis: str, tick_positions: Sequence[float] | Numbers, names: Sequence[str], *, most_ticks: int = 12
) -> None:
    """Set named ticks at positions; every n-th one if there are more than ``most_ticks``."""
    tick_stride = -(-len(names) // most_ticks)
    set_ticks = ax.set_xticks if axis == "x" else ax.set_yticks
    set_ticks(list(tick_positions)[::tick_stride], labels=list(names)[::tick_stride])


def draw_separators(ax: Any, axis: str, size: int, names: Sequence[str]) -> None:
    """Draw lines between gates, blocks of ``size`` cells along ``axis``, and the name of each at its middle."""
    draw_line = ax.axvline if axis == "x" else ax.axhline
    for number in range(1, len(names)):
        draw_line(number * size - 0.5, gid="gate separator", **SEPARATOR)
    middles = [(number + 0.5) * size - 0.5 for number in range(len(names))]
    set_named_ticks(ax, axis, middles, names, most_ticks=len(names))
    ax.tick_params(axis=axis, length=0)


def colour_bar(axes: Sequence[Any], image: Any, label: str = "", *, images: Sequence[Any] = ()) -> Any:
    """Draw a labelled colour bar beside ``axes``, pointed where ``image``, or one of ``images``, exceeds the scale."""
    figure, boxes = axes[0].figure, [ax.get_window_extent() for ax in axes]
    width = max(1.0, max(box.x1 for box in boxes) - min(box.x0 for box in boxes))
    height = max(box.y1 for box in boxes) - min(box.y0 for box in boxes)
    bar_share = float(np.clip(0.2 * figure.dpi / width, 0.08, 0.3))
    bar_shape = {"fraction": bar_share, "pad": 0.02, "aspect": max(20.0, height / (bar_share * width))}
    bar = figure.colorbar(image, ax=list(axes), extend=extended_ends(image.norm, images or [image]), **bar_shape)
    bar.ax.tick_params(labelsize="small" if label else "x-small")
    if height < 1.3 * figure.dpi and not isinstance(image.norm, SymLogNorm):  # beside a line of text: two ticks fit
        bar.locator = MaxNLocator(nbins=2)
        bar.update_ticks()
    if label:
        cells = [(ax.get_subplotspec(), ax) for ax in axes]
        rows = {ax if cell is None else cell.rowspan.start: ax for cell, ax in cells}
        inches = sum(ax.get_position().height for ax in rows.values())
        bar.set_label(shorten_to_line(label, max(inches * figure.bbox.height / figure.dpi, 1.2)))
    if isinstance(image.norm, SymLogNorm):
        low, high, linear = image.norm.vmin or 0.0, image.norm.vmax or 0.0, image.norm.linthresh
        linear_end = f"≤ {short_number(linear)}"
        if low < 0:
            ticks = [tick for tick in decade_ticks(max(-low, high), linear) if low <= tick <= high]
        else:
            ticks = [linear, *PowerLocator(6).tick_values(2 * linear, high)]
        labels = [
            f"|x| {linear_end}" if tick == 0 else linear_end if tick == linear else short_number(tick) for tick in ticks
        ]
        bar.set_ticks(ticks, labels=labels)
        bar.ax.yaxis.set_minor_locator(NullLocator())
    return bar


def shorten_to_line(label: str, inches: float) -> str:
    """Shorten a label to one line of ``inches``: drop the part before its first comma, or all but that part."""
    max_letters = int(letters_per_inch() * inches)
    symbol, _, name = label.partition(", ")
    for candidate in (label, name, symbol):
        if candidate and len(re.sub(r"\$.*?\$", "dL/dh", candidate)) <= max_letters:
            return candidate
    return textwrap.shorten(name or label, max(max_letters, 12), placeholder="…")


def extended_ends(norm: Any, images: Sequence[Any]) -> str:
    """Return matplotlib's ``extend``: at which ends the images' values exceed the colour scale."""
    arrays: list[Any] = [np.ma.asarray(image.get_array(), dtype=float) for image in images if image is not None]
    ranges = [value_range for array in arrays if (value_range := finite_range(np.ma.filled(array, np.nan))) is not None]
    if not ranges or norm.vmin is None or norm.vmax is None:
        return "neither"
    slack = 1e-6 * (norm.vmax - norm.vmin)
    is_below = min(low for low, _ in ranges) < norm.vmin - slack
    is_above = max(high for _, high in ranges) > norm.vmax + slack
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[
        is_below, is_above
    ]


def colour_bars(panels: Panels, images: list[Any], label: str, *, shared: bool, enabled: bool = True) -> None:
    """Draw one colour bar for all panels, or one for each; that of a second direction is invisible."""
    if not enabled or images[-1] is None:
        return
    if shared:
        bars = [
            colour_bar(direction_axes, images[-1], label, images=images) for direction_axes in panels.axes_by_direction
        ]
        for spacer in bars[:-1] if panels.direction_figures else ():
            hide_colour_bar(spacer)
        if not panels.direction_figures:
            for extra_bar in bars[:-1]:
                extra_bar.remove()
        return
    for ax, image in zip(panels.axes, images, strict=True):
        colour_bar([ax], image, label if len(images) == 1 else "")


def hide_colour_bar(bar: Any) -> None:
    """Make a colour bar invisible, but keep its space."""
    bar.solids.set_alpha(0.0)
    bar.outline.set_visible(False)
    bar.ax.tick_params(color="none", labelcolor="none")
    bar.ax.yaxis.label.set_alpha(0.0)
    bar.ax.patch.set_alpha(0.0)
    for patch in getattr(bar, "_extend_patches", ()):
        patch.set_alpha(0.0)
    bar.ax.set_gid("spacer")


#: Dimensions of a plain array by its rank.
GUESS = {rank: dims for rank, dims in OVER_TIME.items() if rank > 1}


@dataclass(frozen=True)
class ImageDims:
    """Dimensions of a labelled image: horizontal and vertical; if ``is_stacked``, gates are stacked into the rows."""

    horizontal: str
    vertical: str
    is_stacked: bool

    @classmethod
    def of(cls, array: xr.DataArray, figure: str, x: str | None = None, y: str | None = None) -> ImageDims:
        """Choose the dimensions of an image: time across and units down, unless ``x`` and ``y`` name others."""
        for requested_dim in (x, y):
            if requested_dim is not None:
                refuse_reserved_dim(array, requested_dim, figure, DIRECTION)
                require_dim(array, requested_dim, figure)
        free_dims = [str(d) for d in array.dims if d not in (DIRECTION, x, y)]
        if len(free_dims) + (x is not None) + (y is not None) < 2:
            raise InputError(
                f"plot.{figure} needs two dimensions.",
                got=f"dimensions ({', '.join(map(str, array.dims))})",
                expected="at least two besides direction",
                hint="draw it with plot.curves or plot.points",
            )
        if x is None:
            x = TIME if TIME in free_dims else next(d for d in reversed(free_dims) if d != GATE)
            free_dims.remove(x)
        if y is None:
            unit = unit_dim(array)
            vertical_dims = (
                [d for d in free_dims if d not in (GATE, SAMPLE)] or [d for d in free_dims if d != GATE] or free_dims
            )
            y = unit if unit in vertical_dims else vertical_dims[-1]
        return cls(x, y, GATE in array.dims and GATE not in (x, y))

    def panel_selections(self, array: xr.DataArray) -> tuple[list[str], list[tuple[dict[str, int], str]]]:
        """Return the dimensions along which there are several panels, and the selection and title of each panel."""
        panel_dims = [str(d) for d in array.dims if d not in (self.horizontal, self.vertical, GATE, DIRECTION)]
        return panel_dims, panel_selections(array, panel_dims)

    def shape(self, array: xr.DataArray) -> tuple[int, int]:
        """Return the numbers of rows and columns of the image."""
        return array.sizes[self.vertical] * (array.sizes[GATE] if self.is_stacked else 1), array.sizes[self.horizontal]

    def label(self, array: xr.DataArray) -> str:
        """Return the label of the vertical axis."""
        return "gate, " * self.is_stacked + axis_label(array, self.vertical)

    def values(self, array: xr.DataArray) -> Numbers:
        """Return the values of the image, (row, column)."""
        if not self.is_stacked:
            return np.asarray(array.transpose(self.vertical, self.horizontal).values)
        values = array.transpose(GATE, self.vertical, self.horizontal).values
        return np.asarray(values.reshape(-1, values.shape[-1]))

    def matrix(self, array: xr.DataArray) -> Matrix:
        """Return the matrix of an image, empty where a step is padding."""
        values = self.values(nan_at_padding(array))
        rows = np.arange(len(values)) if self.is_stacked else positions(array, self.vertical)
        empty = self.values(full_padding_mask(array))
        return Matrix(values, positions(array, self.horizontal), rows, empty, self.horizontal == TIME)

    def draw(self, ax: Any, array: xr.DataArray, matrix: Matrix, title: str, **options: Any) -> Any:
        """Draw an image with its title and the names of stacked gates; ``options`` as for :func:`draw_image`."""
        image = draw_image(ax, matrix, **options)
        ax.set_title(title, fontsize="small", pad=3)
        if self.is_stacked:
            draw_separators(ax, "y", array.sizes[self.vertical], names_of(array, GATE))
        return image


def panel_selections(array: xr.DataArray, panel_dims: list[str]) -> list[tuple[dict[str, int], str]]:
    """Return the selection and title of each panel, along the dimensions ``panel_dims``."""
    selections: list[tuple[dict[str, int], str]] = [({}, "")]
    for dim in panel_dims:
        selections = [
            ({**selection, dim: i}, f"{title} · {position_title(array, dim, i)}".removeprefix(" · "))
            for selection, title in selections
            for i in range(array.sizes[dim])
        ]
    return selections
