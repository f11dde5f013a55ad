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
from matplotlib import colormaps
from PIL import Image

from ..typing import Array

#: Codes of a map: the last code of the scale, the code of padding, the code of non-finite values.
LEVELS, PADDING, BROKEN = 250, 254, 255
#: The same codes for curves, in 16 bits.
FINE, FINE_PADDING, FINE_BROKEN = 65_000, 65_534, 65_535
#: Decades of a logarithmic scale below the largest value.
DECADES = 12

_MAPS = {"size": "magma", "signed": "RdBu_r", "gate": "viridis"}
_PADDING_COLOUR, _BROKEN_COLOUR = (154, 160, 166), (255, 0, 60)
#: Changes of a colour that another code has, the smallest first.
_NUDGES = sorted(product((0, 1, -1, 2), (0, 1, -1), (0, 1, -1, 2)), key=lambda step: sum(map(abs, step)))


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
        span = self.high - self.low or 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            measured = np.log10(values) if self.log else np.asarray(values, dtype=np.float64)
        share = np.nan_to_num((measured - self.low) / span, nan=0.0, posinf=0.0, neginf=0.0)
        return np.clip(np.rint(share * levels), 0, levels)

    def to_json(self) -> list[Any]:
        """Return ``[low, high, log]``: the limits of an axis, and whether it is logarithmic."""
        return [float(f"{self.low:.7g}"), float(f"{self.high:.7g}"), self.log]


def scale_of(values: Array, *, log: bool = False, signed: bool = False) -> Scale:
    """Return the scale that spans all finite values; symmetric about 0 if ``signed``."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if log:
        positive = finite[finite > 0]
        if not positive.size:
            return Scale(-1.0, 0.0, log=True)
        high = float(np.log10(positive.max()))
        low = float(np.log10(positive.min()))
        low = max(low - 0.6 * (high - low) / LEVELS, high - DECADES)  # code 0 means 0, so values start above it
        return Scale(low if low < high else high - 1, high, log=True)
    if not finite.size:
        return Scale(-1.0 if signed else 0.0, 1.0)
    if signed:
        most = float(np.abs(finite).max()) or 1.0
        return Scale(-most, most)
    low, high = float(finite.min()), float(finite.max())
    return Scale(low, high if high > low else low + 1)


def image(values: Array, palette: str, scale: Scale, padded: Array | None = None) -> str:
    """Return a map (row, column) as the data URL of an indexed PNG; ``padded`` (column,) marks padding."""
    codes = scale.codes(values, LEVELS)
    codes[~np.isfinite(values)] = BROKEN
    if padded is not None:
        codes[:, padded] = PADDING
    picture = Image.fromarray(codes.astype(np.uint8))
    picture.putpalette(bytes(colours(palette).ravel()))
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def row_codes(values: Array, scale: Scale, padded: Array | None = None) -> str:
    """Return the curves (row, step) as base64 of little-endian 16-bit codes; ``padded`` has their shape."""
    codes = scale.codes(values, FINE)
    codes[~np.isfinite(values)] = FINE_BROKEN
    if padded is not None:
        codes[padded] = FINE_PADDING
    return base64.b64encode(codes.astype("<u2").tobytes()).decode()


@cache
def colours(palette: str) -> Array:
    """Return a colour for each code, (256, 3) of uint8, all different."""
    shades = colormaps[_MAPS[palette]](np.linspace(0, 1, LEVELS + 1))[:, :3]
    table = np.zeros((256, 3), dtype=np.int64)
    table[: LEVELS + 1] = np.rint(shades * 255)
    table[PADDING], table[BROKEN] = _PADDING_COLOUR, _BROKEN_COLOUR
    taken = {tuple(table[PADDING]), tuple(table[BROKEN])}
    for code in range(LEVELS + 1):
        colour = table[code].copy()
        for nudge in _NUDGES:
            tried = tuple(int(c) for c in np.clip(colour + nudge, 0, 255))
            if tried not in taken:
                table[code] = tried
                taken.add(tried)
                break
    return table.astype(np.uint8)


#: Function from a value to pixels.
Place = Callable[[float], float]

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
    middle: Array | None = None
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


def lines(drawn: Sequence[StaticLine], frame: CurveAxes, height: int = 190) -> Markup:
    """Draw curves with bands, legend and axes."""
    log = frame.log
    every = [v for line in drawn for v in (line.y, line.middle, line.low, line.high) if v is not None]
    low, high = (0.0, 1.0) if frame.unit_range else _range([*every, *(np.array([v]) for v, _ in frame.levels)], log)
    bottom = height - BOTTOM
    last = max((float(line.x[-1]) for line in drawn if len(line.x)), default=1.0)
    first = min((float(line.x[0]) for line in drawn if len(line.x)), default=0.0)

    def across(value: float) -> float:
        return LEFT + (value - first) / ((last - first) or 1.0) * _PLOT

    def down(value: float) -> float:
        measured = math.log10(value) if log and value > 0 else low if log else value
        share = min(max((measured - low) / ((high - low) or 1.0), 0.0), 1.0)
        return bottom - share * (bottom - TOP)

    parts = [_hatched(across(step - 0.5), across(step + 0.5), TOP, bottom) for step in frame.padded]
    parts += [*_value_ticks(low, high, log, down), *_ticks_below(first, last, across, bottom, frame.x)]
    for number, line in enumerate(drawn):
        colour = f"l{number % 6}"
        if line.low is not None and line.high is not None:
            kept = np.flatnonzero(np.isfinite(line.low) & np.isfinite(line.high))
            ends = [*zip(line.x[kept], line.high[kept], strict=True)]
            ends += [*zip(line.x[kept], line.low[kept], strict=True)][::-1]
            outline = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in ends)
            parts += [Markup('<path class="band {}" d="M{}Z"/>').format(colour, outline)] * (len(kept) > 1)
        if line.middle is not None:
            parts.append(_path(line.x, line.middle, f"median {colour}", across, down))
        if line.y is not None:
            parts.append(_path(line.x, line.y, f"line {colour}", across, down))
    if log and any((line.y < 10**low * 0.999).any() for line in drawn if line.y is not None):
        below = Markup('<text class="below" x="{}" y="{}">▾ below {:.0e}</text>')
        parts.append(below.format(LEFT + 4, bottom - 4, 10**low))
    word = Markup('<text class="word" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    for place, text in frame.marks:
        spot = across(place)
        parts.append(Markup('<path class="mark" d="M{:.1f} {}V{}"/>').format(spot, TOP, bottom))
        shift, anchor = (-4, "end") if spot > WIDTH / 2 else (4, "start")
        parts.append(word.format(spot + shift, TOP + 11, anchor, text))
    for value, text in frame.levels:
        spot = down(value)
        parts.append(Markup('<path class="level" d="M{} {:.1f}H{}"/>').format(LEFT, spot, WIDTH - RIGHT))
        parts.append(word.format(WIDTH - RIGHT - 4, spot - 4 if spot > TOP + 14 else spot + 12, "end", text))
    label = Markup('<text class="axis" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>')
    parts.append(label.format((TOP + bottom) / 2, frame.y))
    legend = Markup("").join(
        Markup('<span class="key l{}">{}</span>').format(i % 6, line.name) for i, line in enumerate(drawn)
    )
    return Markup('{}<p class="legend">{}</p>').format(_svg(height, parts, f"{frame.y} by {frame.x}"), legend)


def _hatched(left: float, right: float, top: float, bottom: float) -> Markup:
    """Return SVG that hatches a column: a padded step."""
    left, right = max(left, LEFT), min(right, WIDTH - RIGHT)
    shape = Markup('<rect class="hatched" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>')
    return shape.format(left, top, max(right - left, 0.0), bottom - top)


@dataclass(frozen=True)
class ImageAxes:
    """Labels of the axes of an image; ``columns`` and ``names`` replace numbers, ``hatched`` marks future inputs."""

    x: str
    y: str
    rows: int
    steps: int
    columns: Sequence[str] = ()
    names: Array | None = None
    hatched: bool = False
    padded: Sequence[int] = ()


def picture(url: str, id: str, scale: Scale, axes: ImageAxes, *, palette: str, label: str = "") -> Markup:
    """Draw an image between axes, rows from the top, with its colour scale below."""
    height = TOP + int(min(max(axes.rows * 6, 72), 260)) + BOTTOM
    bottom = height - BOTTOM
    shape = Markup('<image id="{}" href="{}" x="{}" y="{}" width="{}" height="{}" preserveAspectRatio="none"/>')
    parts = [shape.format(id, url, LEFT, TOP, _PLOT, bottom - TOP)]
    if axes.hatched:
        parts.append(Markup('<path class="hatched" d="M{} {}H{}V{}Z"/>').format(LEFT, TOP, WIDTH - RIGHT, bottom))
    wide = _PLOT / axes.steps
    parts += [_hatched(LEFT + step * wide, LEFT + (step + 1) * wide, TOP, bottom) for step in axes.padded]
    for row in sorted({0, axes.rows - 1}):
        spot = TOP + (row + 0.5) / axes.rows * (bottom - TOP) + 4
        name = row if axes.names is None else int(axes.names[row])
        parts.append(Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(LEFT - 6, spot, name))
    side = Markup('<text class="axis" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>')
    parts.append(side.format((TOP + bottom) / 2, axes.y))
    if axes.columns:
        room, word = _PLOT / len(axes.columns), Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>')
        for place, text in enumerate(axes.columns):
            parts.append(word.format(LEFT + (place + 0.5) * room, bottom + 14 + place % 2 * 13, text))
    else:
        steps = axes.steps
        parts += _ticks_below(0, steps - 1, lambda v: LEFT + (v + 0.5) / steps * _PLOT, bottom, axes.x)
    low, high = (10**scale.low, 10**scale.high) if scale.log else (scale.low, scale.high)
    key = Markup('<p class="legend"><span>{}</span><span class="ramp {}">{} <i></i> {}</span></p>')
    least = f"≤ {low:.2g}" if scale.log else f"{low:.2g}"
    words = f"{label or 'values'}: {axes.y} by {axes.x}"
    return Markup("{}{}").format(_svg(height, parts, words), key.format(label, palette, least, f"{high:.2g}"))


def _svg(height: int, parts: Sequence[Markup], words: str) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="static">').format(WIDTH, height, words)
    return head + Markup("").join(parts) + Markup("</svg>")


def _range(every: Sequence[Array], log: bool) -> tuple[float, float]:
    values = np.concatenate([np.ravel(v) for v in every]) if every else np.zeros(0)
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


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about ``about`` round numbers between two bounds, evenly spaced."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / about))
    step *= next((m for m in (1, 2, 5, 10) if span / (step * m) <= about), 10)
    return [round(step * k, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _value_ticks(low: float, high: float, log: bool, down: Place) -> list[Markup]:
    if log:
        every = max(1, math.ceil((high - low) / 6))
        marked = [(10.0**k, f"1e{k}" if abs(k) > 3 else f"{10.0**k:g}") for k in range(int(low), int(high) + 1, every)]
    else:
        marked = [(v, f"{v:g}") for v in ticks(low, high, 4)]
    parts = []
    for value, text in marked:
        spot = down(value)
        parts.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, spot, WIDTH - RIGHT))
        parts.append(Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(LEFT - 6, spot + 4, text))
    return parts


def _ticks_below(first: float, last: float, across: Place, bottom: float, label: str) -> list[Markup]:
    marked = [v for v in ticks(first, last, 8) if v == int(v)]
    marked = [v for v in marked if last - v > (last - first) * 0.06] + [last]  # the last step always has a number
    number = Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{:g}</text>')
    name = Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>')
    parts = [number.format(across(value), bottom + 14, value) for value in dict.fromkeys(marked)]
    return [*parts, name.format(LEFT + _PLOT / 2, bottom + 29, label)]


def _path(x: Array, y: Array, kind: str, across: Place, down: Place) -> Markup:
    commands: list[str] = []
    pen = "M"
    for place, value in zip(x, y, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        commands.append(f"{pen}{across(place):.1f} {down(value):.1f}")
        pen = "L"
    if commands and commands[-1].startswith("M"):  # an isolated point is drawn as a round cap
        commands.append("h0")
    return Markup('<path class="{}" d="{}"/>').format(kind, "".join(commands))
