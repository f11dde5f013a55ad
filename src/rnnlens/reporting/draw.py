"""Numbers of a figure as compact text, and its static drawing as inline SVG for printing and without scripts.

A map is stored as a PNG whose palette is its colour scale: browsers display it directly, and the script decodes the
numbers from the colours, since all colours of a palette differ. Curves are 16-bit codes. The static drawings have the
colours of the page's style sheet; with scripts, the page draws the same figures again, in the width of the window.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from ..plot._axes import DIVERGING, POSITIVE
from ..typing import Array

#: Codes of a map: the last code of the scale, the code of padding, the code of non-finite values.
LEVELS, PADDING, BROKEN = 250, 254, 255
#: The same codes for curves, in 16 bits.
FINE_LEVELS, FINE_PADDING, FINE_BROKEN = 65_000, 65_534, 65_535
#: Decades of a logarithmic scale below the largest value.
DECADES = 12

#: Colour maps of figures: white is 0, dark is large; a gate half open is white, too.
_COLORMAPS = {"size": POSITIVE, "signed": DIVERGING, "gate": DIVERGING}
_PADDING_COLOUR, _BROKEN_COLOUR = (154, 160, 166), (255, 0, 60)
#: Changes of a colour that another code has, the smallest first.
_COLOUR_SHIFTS = sorted(product((0, 1, -1, 2), (0, 1, -1), (0, 1, -1, 2)), key=lambda step: sum(map(abs, step)))


@dataclass(frozen=True)
class Scale:
    """Linear map from codes to values, or to their logarithm (base 10): ``low`` at code 0, ``high`` at the last code.

    On a logarithmic scale, code 0 means any value below ``low``, zero included.
    """

    low: float
    high: float
    log: bool = False

    def codes(self, values: Array, levels: int) -> Array:
        """Map values to codes 0 to ``levels``; values that are not finite get 0, and the caller marks them."""
        value_range = self.high - self.low or 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled_values = np.log10(values) if self.log else np.asarray(values, dtype=np.float64)
        share = np.nan_to_num((scaled_values - self.low) / value_range, nan=0.0, posinf=0.0, neginf=0.0)
        return np.clip(np.rint(share * levels), 0, levels)

    def to_json(self) -> list[Any]:
        """Return ``[low, high, log]``: the limits of an axis, and whether it is logarithmic."""
        return [float(f"{self.low:.7g}"), float(f"{self.high:.7g}"), self.log]


def scale_of(values: Array, *, log: bool = False, signed: bool = False) -> Scale:
    """Return the scale that spans all finite values; symmetric about 0 if ``signed``."""
    finite_values = np.asarray(values, dtype=np.float64)
    finite_values = finite_values[np.isfinite(finite_values)]
    if log:
        positive_values = finite_values[finite_values > 0]
        if not positive_values.size:
            return Scale(-1.0, 0.0, log=True)
        high = float(np.log10(positive_values.max()))
        low = float(np.log10(positive_values.min()))
        low = max(low - 0.6 * (high - low) / LEVELS, high - DECADES)  # code 0 means 0, so values start above it
        return Scale(low if low < high else high - 1, high, log=True)
    if not finite_values.size:
        return Scale(-1.0 if signed else 0.0, 1.0)
    if signed:
        largest = float(np.abs(finite_values).max()) or 1.0
        return Scale(-largest, largest)
    low, high = float(finite_values.min()), float(finite_values.max())
    return Scale(low, high if high > low else low + 1)


def png_url(values: Array, palette: str, scale: Scale, padded: Array | None = None) -> str:
    """Return a map (row, column) as the data URL of an indexed PNG; ``padded`` (column,) marks padding."""
    codes = scale.codes(values, LEVELS)
    codes[~np.isfinite(values)] = BROKEN
    if padded is not None:
        codes[:, padded] = PADDING
    png = Image.fromarray(codes.astype(np.uint8))
    png.putpalette(bytes(palette_colours(palette).ravel()))
    stream = io.BytesIO()
    png.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def row_codes(values: Array, scale: Scale, padded: Array | None = None) -> str:
    """Return the curves (row, step) as base64 of little-endian 16-bit codes; ``padded`` has their shape."""
    codes = scale.codes(values, FINE_LEVELS)
    codes[~np.isfinite(values)] = FINE_BROKEN
    if padded is not None:
        codes[padded] = FINE_PADDING
    return base64.b64encode(codes.astype("<u2").tobytes()).decode()


@cache
def palette_colours(palette: str) -> Array:
    """Return a colour for each code, (256, 3) of uint8, all different."""
    shades = _COLORMAPS[palette](np.linspace(0, 1, LEVELS + 1))[:, :3]
    table = np.zeros((256, 3), dtype=np.int64)
    table[: LEVELS + 1] = np.rint(shades * 255)
    table[PADDING], table[BROKEN] = _PADDING_COLOUR, _BROKEN_COLOUR
    used_colours = {tuple(table[PADDING]), tuple(table[BROKEN])}
    for code in range(LEVELS + 1):
        colour = table[code].copy()
        for shift in _COLOUR_SHIFTS:
            candidate = tuple(int(channel) for channel in np.clip(colour + shift, 0, 255))
            if candidate not in used_colours:
                table[code] = candidate
                used_colours.add(candidate)
                break
    return table.astype(np.uint8)


#: Function from a value to pixels.
ToPixel = Callable[[float], float]

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 62, 12, 8, 34
_PLOT = WIDTH - LEFT - RIGHT
#: Decades below the largest value; smaller values are drawn at the lower border, with a mark.
_DECADES = 8


@dataclass(frozen=True)
class StaticLine:
    """A curve and a band around a median; each (point,), or None."""

    name: str
    x: Array
    y: Array | None = None
    median: Array | None = None
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True)
class CurveAxes:
    """Labels and range of the axes of curves; ``marks`` and ``levels`` are lines with a text, ``padded`` is hatched."""

    x: str
    y: str
    log: bool = False
    unit_range: bool = False
    marks: Sequence[tuple[float, str]] = ()
    levels: Sequence[tuple[float, str]] = ()
    padded: Sequence[int] = ()


def lines(static_lines: Sequence[StaticLine], axes: CurveAxes, height: int = 190) -> Markup:
    """Draw curves with bands, legend and axes."""
    log = axes.log
    all_values = [v for line in static_lines for v in (line.y, line.median, line.low, line.high) if v is not None]
    low, high = (
        (0.0, 1.0)
        if axes.unit_range
        else _value_range([*all_values, *(np.array([level]) for level, _ in axes.levels)], log)
    )
    bottom = height - BOTTOM
    mark_xs = [x for x, _ in axes.marks]
    last_x = max([*(float(line.x[-1]) for line in static_lines if len(line.x)), *mark_xs], default=1.0)
    first_x = min((float(line.x[0]) for line in static_lines if len(line.x)), default=0.0)

    def x_pixel(value: float) -> float:
        return LEFT + (value - first_x) / ((last_x - first_x) or 1.0) * _PLOT

    def y_pixel(value: float) -> float:
        scaled_value = math.log10(value) if log and value > 0 else low if log else value
        share = min(max((scaled_value - low) / ((high - low) or 1.0), 0.0), 1.0)
        return bottom - share * (bottom - TOP)

    elements = [_hatch_column(x_pixel(step - 0.5), x_pixel(step + 0.5), TOP, bottom) for step in axes.padded]
    elements += [*_value_ticks(low, high, log, y_pixel), *_time_ticks(first_x, last_x, x_pixel, bottom, axes.x)]
    for line_index, line in enumerate(static_lines):
        colour = f"l{line_index % 6}"
        if line.low is not None and line.high is not None:
            band_indices = np.flatnonzero(np.isfinite(line.low) & np.isfinite(line.high))
            band_corners = [*zip(line.x[band_indices], line.high[band_indices], strict=True)]
            band_corners += [*zip(line.x[band_indices], line.low[band_indices], strict=True)][::-1]
            outline = "L".join(f"{x_pixel(x):.1f} {y_pixel(y):.1f}" for x, y in band_corners)
            elements += [Markup('<path class="band {}" d="M{}Z"/>').format(colour, outline)] * (len(band_indices) > 1)
        if line.median is not None:
            elements.append(_path(line.x, line.median, f"median {colour}", x_pixel, y_pixel))
        if line.y is not None:
            elements.append(_path(line.x, line.y, f"line {colour}", x_pixel, y_pixel))
    if log and any((line.y < 10**low * 0.999).any() for line in static_lines if line.y is not None):
        below_markup = Markup('<text class="below" x="{}" y="{}">▾ below {:.0e}</text>')
        elements.append(below_markup.format(LEFT + 4, bottom - 4, 10**low))
    label_markup = Markup('<text class="word" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    for x_value, text in axes.marks:
        pixel = x_pixel(x_value)
        elements.append(Markup('<path class="mark" d="M{:.1f} {}V{}"/>').format(pixel, TOP, bottom))
        shift, anchor = (-4, "end") if pixel > WIDTH / 2 else (4, "start")
        elements.append(label_markup.format(pixel + shift, TOP + 11, anchor, text))
    for value, text in axes.levels:
        pixel = y_pixel(value)
        elements.append(Markup('<path class="level" d="M{} {:.1f}H{}"/>').format(LEFT, pixel, WIDTH - RIGHT))
        elements.append(
            label_markup.format(WIDTH - RIGHT - 4, pixel - 4 if pixel > TOP + 14 else pixel + 12, "end", text)
        )
    axis_title = Markup('<text class="axis" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>')
    elements.append(axis_title.format((TOP + bottom) / 2, axes.y))
    legend = Markup("").join(
        Markup('<span class="key l{}">{}</span>').format(i % 6, line.name) for i, line in enumerate(static_lines)
    )
    return Markup('{}<p class="legend">{}</p>').format(_svg(height, elements, f"{axes.y} by {axes.x}"), legend)


def _hatch_column(left: float, right: float, top: float, bottom: float) -> Markup:
    """Return SVG that hatches a column: a padded step."""
    left, right = max(left, LEFT), min(right, WIDTH - RIGHT)
    shape = Markup('<rect class="hatched" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>')
    return shape.format(left, top, max(right - left, 0.0), bottom - top)


@dataclass(frozen=True)
class ImageAxes:
    """Labels of the axes of an image; ``columns`` and ``names`` replace numbers, ``hatched`` marks future inputs.

    ``upward``: the first row is the lowest.
    """

    x: str
    y: str
    rows: int
    steps: int
    columns: Sequence[str] = ()
    names: Array | None = None
    hatched: bool = False
    padded: Sequence[int] = ()
    upward: bool = False


def picture(url: str, id: str, scale: Scale, axes: ImageAxes, *, palette: str, label: str = "") -> Markup:
    """Draw an image between axes, with its colour scale below."""
    height = TOP + int(min(max(axes.rows * 6, 72), 260)) + BOTTOM
    bottom = height - BOTTOM
    shape = Markup('<image id="{}" href="{}" x="{}" y="{}" width="{}" height="{}" preserveAspectRatio="none"{}/>')
    turned = Markup(' transform="matrix(1 0 0 -1 0 {})"').format(TOP + bottom) if axes.upward else ""
    elements = [shape.format(id, url, LEFT, TOP, _PLOT, bottom - TOP, turned)]
    if axes.hatched:  # inputs after their output: below the diagonal, which goes up to the right
        corner = Markup('<path class="hatched" d="M{} {}H{}V{}Z"/>')
        elements.append(corner.format(LEFT, bottom, WIDTH - RIGHT, TOP))
    step_width = _PLOT / axes.steps
    elements += [
        _hatch_column(LEFT + step * step_width, LEFT + (step + 1) * step_width, TOP, bottom) for step in axes.padded
    ]
    for row in sorted({0, axes.rows - 1}):
        share = (row + 0.5) / axes.rows
        y_pixel = TOP + (1 - share if axes.upward else share) * (bottom - TOP) + 4
        name = row if axes.names is None else int(axes.names[row])
        elements.append(Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(LEFT - 6, y_pixel, name))
    axis_title = Markup('<text class="axis" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>')
    elements.append(axis_title.format((TOP + bottom) / 2, axes.y))
    if axes.columns:
        column_width = _PLOT / len(axes.columns)
        column_label = Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
        for column, text in enumerate(axes.columns):
            elements.append(
                column_label.format(LEFT + (column + 0.5) * column_width, bottom + 14 + column % 2 * 13, text)
            )
    else:
        steps = axes.steps
        elements += _time_ticks(0, steps - 1, lambda v: LEFT + (v + 0.5) / steps * _PLOT, bottom, axes.x)
    low, high = (10**scale.low, 10**scale.high) if scale.log else (scale.low, scale.high)
    legend = Markup('<p class="legend"><span>{}</span><span class="ramp {}">{} <i></i> {}</span></p>')
    lowest_text = f"≤ {low:.2g}" if scale.log else f"{low:.2g}"
    description = f"{label or 'values'}: {axes.y} by {axes.x}"
    return Markup("{}{}").format(
        _svg(height, elements, description), legend.format(label, palette, lowest_text, f"{high:.2g}")
    )


def _svg(height: int, elements: Sequence[Markup], description: str) -> Markup:
    opening_tag = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="static">').format(
        WIDTH, height, description
    )
    return opening_tag + Markup("").join(elements) + Markup("</svg>")


def _value_range(arrays: Sequence[Array], log: bool) -> tuple[float, float]:
    values = np.concatenate([np.ravel(v) for v in arrays]) if arrays else np.zeros(0)
    values = values[np.isfinite(values)]
    if log:
        values = values[values > 0]
        if not values.size:
            return -1.0, 0.0
        high = float(np.log10(values.max()))
        low = max(float(np.log10(values.min())), high - _DECADES)
        return math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def ticks(low: float, high: float, max_count: int = 5) -> list[float]:
    """Return about ``max_count`` round numbers between two bounds, evenly spaced."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / max_count))
    step *= next((m for m in (1, 2, 5, 10) if span / (step * m) <= max_count), 10)
    return [round(step * k, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _value_ticks(low: float, high: float, log: bool, y_pixel: ToPixel) -> list[Markup]:
    if log:
        decade_step = max(1, math.ceil((high - low) / 6))
        labelled_values = [
            (10.0**k, f"1e{k}" if abs(k) > 3 else f"{10.0**k:g}") for k in range(int(low), int(high) + 1, decade_step)
        ]
    else:
        labelled_values = [(v, f"{v:g}") for v in ticks(low, high, 4)]
    elements = []
    for value, text in labelled_values:
        pixel = y_pixel(value)
        elements.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, pixel, WIDTH - RIGHT))
        elements.append(Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(LEFT - 6, pixel + 4, text))
    return elements


def _time_ticks(first_x: float, last_x: float, x_pixel: ToPixel, bottom: float, label: str) -> list[Markup]:
    tick_values = [v for v in ticks(first_x, last_x, 8) if v == int(v)]
    # the last step always has a number
    tick_values = [v for v in tick_values if last_x - v > (last_x - first_x) * 0.06] + [last_x]
    number_markup = Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{:g}</text>')
    title_markup = Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>')
    elements = [number_markup.format(x_pixel(value), bottom + 14, value) for value in dict.fromkeys(tick_values)]
    return [*elements, title_markup.format(LEFT + _PLOT / 2, bottom + 29, label)]


def _path(x: Array, y: Array, css_class: str, x_pixel: ToPixel, y_pixel: ToPixel) -> Markup:
    commands: list[str] = []
    pen = "M"
    for x_value, value in zip(x, y, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        commands.append(f"{pen}{x_pixel(x_value):.1f} {y_pixel(value):.1f}")
        pen = "L"
    if commands and commands[-1].startswith("M"):  # an isolated point is drawn as a round cap
        commands.append("h0")
    return Markup('<path class="{}" d="{}"/>').format(css_class, "".join(commands))
