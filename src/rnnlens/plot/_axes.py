"""Scales: colour maps with white at 0; ticks, limits and marks of axes, names at the ends of lines.

Blue and orange can be told apart with protanopia, deuteranopia and tritanopia. The maps are not registered with
matplotlib, and rcParams are not changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, SymLogNorm
from matplotlib.markers import CARETDOWNBASE
from matplotlib.ticker import FixedLocator, Formatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from ._data import Numbers, finite_range

#: Colour of NaN and infinite values. Neither map contains this grey.
MISSING = "#7a7a7a"

#: Colours of lines: Okabe and Ito 2008, "Color Universal Design", without its yellow. A single line is ``BLUE``.
BLUE, ORANGE, GREEN, PINK, LIGHT_BLUE = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"
CYCLE = (BLUE, ORANGE, GREEN, PINK, LIGHT_BLUE, "#e69f00", "#000000", "#7f5fa8")
#: Colour of lines at 0, at 1 or at a limit, which are no data.
REFERENCE_GREY = "#909090"

_BLUE_WHITE_ORANGE = ("#08306b", "#1f6fb4", "#8fc1e3", "#ffffff", "#fdb978", "#dd6b10", "#7f2704")


def _colour_map(name: str, map_colours: tuple[str, ...]) -> Colormap:
    colour_map = LinearSegmentedColormap.from_list(name, map_colours, N=257)  # odd: one entry is exactly the middle
    return colour_map.with_extremes(bad=MISSING)


DIVERGING = _colour_map("rnnlens.diverging", _BLUE_WHITE_ORANGE)
#: For values >= 0: the upper half of the diverging map, so that white is 0 here as well.
POSITIVE = _colour_map("rnnlens.positive", _BLUE_WHITE_ORANGE[3:])

#: Decades of a logarithmic scale below the largest magnitude; smaller values are drawn like 0.
DECADES = 4


def line_colours(count: int) -> list[str]:
    """Return colours for ``count`` lines that a legend names."""
    return list(islice(cycle(CYCLE), count))


def linear_threshold(limit: float) -> float:
    """Return the value below which a symmetric logarithmic scale is linear, for values up to ``limit``; never 0."""
    return max(limit * 10.0**-DECADES, float(np.finfo(float).tiny))


def colour_scale(values: Numbers, limit: float, *, log: bool = False, positive: bool | None = None) -> dict[str, Any]:
    """Return colour map and scale of an image: from white up if ``values`` are ``positive``, else white at 0."""
    if is_positive(values) if positive is None else positive:
        return {"cmap": POSITIVE, "norm": scale_from_zero(values, limit, log=log)}
    limit = limit if limit > 0 and math.isfinite(limit) else 1.0
    linear_part: dict[str, Any] = {"linthresh": linear_threshold(limit), "linscale": 0.5, "base": 10}
    norm = SymLogNorm(vmin=-limit, vmax=limit, **linear_part) if log else Normalize(-limit, limit)
    return {"cmap": DIVERGING, "norm": norm}


def scale_from_zero(values: Numbers, limit: float, *, log: bool = False) -> Normalize:
    """Return a colour scale for values >= 0; a logarithmic one is linear below the smallest value."""
    limit = limit if limit > 0 and math.isfinite(limit) else 1.0
    if not log:
        return Normalize(0, limit)
    with np.errstate(invalid="ignore"):
        positive_values = values[(values > 0) & np.isfinite(values)]
    lowest = min(float(positive_values.min()), limit / 10) if positive_values.size else limit / 10
    return SymLogNorm(linthresh=max(lowest, linear_threshold(limit)), linscale=0.3, vmin=0, vmax=limit, base=10)


def write_text(
    ax: Any,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float] = (0, 0),
    *,
    over: Any = "data",
    **style: Any,
) -> None:
    """Write small text ``offset`` points away from ``point``; ``over`` is the coordinate system of the point."""
    style = {"ha": "right", "va": "center", "fontsize": "x-small", **style}
    ax.annotate(text, point, offset, over, "offset points", **style)


#: Look of a dotted line that marks a step, a lag or a moment.
DOTTED: dict[str, Any] = {"color": "#111111", "linewidth": 0.9, "linestyle": (0, (1, 2))}


#: Light box behind text that crosses lines.
TEXT_BOX: dict[str, Any] = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def mark_delays(ax: Any, delays: Numbers) -> None:
    """Draw lines at the lags at which a task is known to need its input."""
    for delay in delays:
        ax.axvline(delay, **DOTTED, zorder=0.8, gid="delay")


def draw_band(ax: Any, x: Numbers, low: Numbers, high: Numbers, colour: Any, **style: Any) -> None:
    """Fill the space between two lines, such as quartiles."""
    ax.fill_between(x, low, high, **{"color": colour, "alpha": 0.2, "linewidth": 0, "gid": "band", **style})


#: Group id of an Axes whose horizontal axis is time; ``Drawing.mark`` searches for it.
OVER_TIME = "over time"
#: Width in inches of one letter of a name at a line's end.
_LETTER = 0.058
_LINE = 0.125


@dataclass(frozen=True)
class LineEnd:
    """Last value of a line, with the text written there."""

    y: float
    text: str
    colour: Any


def name_ends(ax: Any, line_ends: Sequence[LineEnd], *, outside: bool = True) -> None:
    """Write the name of each line beside its end, without overlaps; call it when the axis limits are final."""
    low, high = ax.get_xlim()
    window, dpi = ax.get_window_extent(), ax.figure.dpi
    text_lines = [end.text.split("\n") for end in line_ends]
    if not outside:
        letters = max(len(re.sub(r"\$.*?\$", "dL/dh", line)) for end_lines in text_lines for line in end_lines)
        gutter_share = min(0.55, (_LETTER * letters + 0.12) / max(window.width / dpi, 0.5))
        ax.set_xlim(low, high + (high - low) * gutter_share / (1 - gutter_share))
        ax.xaxis.set_major_locator(FixedLocator([tick for tick in ax.get_xticks() if low <= tick <= high]))
    label_height = _LINE * max(map(len, text_lines)) / max(window.height / dpi, 0.5)
    heights = _spread_labels(
        [float(np.clip(_axis_position(ax, end.y), 0.6 * label_height, 1 - 0.6 * label_height)) for end in line_ends],
        label_height,
    )
    for end, height in zip(line_ends, heights, strict=True):
        style = {"color": end.colour, "linespacing": 1.05, "ha": "left", "gid": "end"}
        write_text(ax, end.text, (high, height), (4, 0), over=ax.get_xaxis_transform(), **style)


def _axis_position(ax: Any, y: float) -> float:
    """Return the position of a value on the axis, 0.02 to 0.98; 0.02 if the axis cannot show it."""
    if not math.isfinite(y) or (ax.get_yscale() == "log" and y <= 0):
        return 0.02
    low, high = ax.transData.transform([(0, limit) for limit in ax.get_ylim()])[:, 1]
    return float(np.clip((ax.transData.transform((0, y))[1] - low) / (high - low), 0.02, 0.98))


def _spread_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Shift label positions so that neighbours are at least ``gap`` apart if they fit, in the order of ``heights``."""
    order = np.argsort(heights, kind="stable")
    gap = min(gap, 0.96 / max(1, len(heights) - 1))
    sorted_heights = np.asarray(heights, dtype=float)[order]
    for i in range(1, len(sorted_heights)):
        sorted_heights[i] = max(sorted_heights[i], sorted_heights[i - 1] + gap)
    excess = sorted_heights[-1] - 0.98
    if excess > 0:
        sorted_heights[-1] -= excess
        for i in range(len(sorted_heights) - 2, -1, -1):
            sorted_heights[i] = min(sorted_heights[i], sorted_heights[i + 1] - gap)
    shifted = np.empty(len(sorted_heights))
    shifted[order] = sorted_heights
    return shifted.tolist()


def mark_below(ax: Any, x: Numbers, values: Numbers, colour: Any = "0.3") -> None:
    """Draw triangles at the lower border for finite values below it, with the values; call it when limits are final."""
    floor = ax.get_ylim()[0]
    is_below = np.isfinite(values) & (values < floor)
    if not is_below.any():
        return
    below_x = np.asarray(x)[is_below]
    style: dict[str, Any] = {"marker": "v", "markersize": 3, "linestyle": "", "clip_on": False, "zorder": 4}
    limits = ax.get_xlim()
    ax.plot(below_x, np.zeros(len(below_x)), transform=ax.get_xaxis_transform(), color=colour, gid="below", **style)
    ax.set_xlim(*limits)
    if not any(text.get_gid() == "below" for text in ax.texts):
        middle = float(below_x.mean())
        middle_share = (middle - limits[0]) / (limits[1] - limits[0])
        alignment = "left" if middle_share < 0.2 else "right" if middle_share > 0.8 else "center"
        transform = ax.get_xaxis_transform()
        text = f"below {short_number(floor)}"
        write_text(ax, text, (middle, 0), (0, 4), over=transform, ha=alignment, va="bottom", color=colour, gid="below")


def short_number(value: float) -> str:
    """Write a number with at most two digits, as short as possible: ``1e-10``, ``-0.01``, ``100``."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{float(f'{value:.2g}'):g}"
    number, _, exponent = f"{value:.1e}".partition("e")
    return f"{number.removesuffix('.0')}e{int(exponent)}"


def tick_steps(ax: Any, axis: str, steps: Numbers, *, time: bool = True, margin: float | None = None) -> None:
    """Tick whole steps, always including the last; with ``margin``, also set the limits, that far beyond the steps."""
    steps = np.asarray(steps, dtype=float)
    if not steps.size:
        return
    first_step, last_step = float(steps.min()), float(steps.max())
    if margin is not None:
        ax.set(**{f"{axis}lim": (first_step - margin, last_step + margin)})
    most_ticks = 9 if first_step >= 0 and last_step <= 9 else 6  # labels of one digit are narrow
    ticks = list(MaxNLocator(nbins=most_ticks, integer=True, min_n_ticks=1).tick_values(first_step, last_step))
    gap = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    inner_ticks = [tick for tick in ticks if first_step <= tick <= last_step - 0.6 * gap]
    getattr(ax, f"{axis}axis").set_major_locator(FixedLocator([*inner_ticks, last_step]))
    if axis == "x" and time:
        ax.set_gid(OVER_TIME)


class PowerLocator(Locator):
    """Ticks of a logarithmic axis, at most ``most_ticks``: powers of ten; 2 and 5 or more between them if few fit."""

    def __init__(self, most_ticks: int) -> None:
        self.most_ticks = most_ticks

    def __call__(self) -> list[float]:
        axis: Any = self.axis
        low, high = axis.get_view_interval()
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Return the ticks within the limits."""
        low, high = sorted((vmin, vmax))
        if not 0 < low < high < math.inf:
            return []
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        fewer_ticks: list[float] = []
        for factors in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
            if len(fewer_ticks) == 2 and len(ticks) > self.most_ticks:
                return fewer_ticks
            if len(ticks) > 2:
                return ticks[:: -max(1, -(-len(ticks) // self.most_ticks))][::-1]  # always include the highest
            fewer_ticks = ticks
        if len(fewer_ticks) == 2:
            return fewer_ticks
        return [float(tick) for tick in MaxNLocator(3).tick_values(low, high) if low <= tick <= high]


class ShortFormatter(Formatter):
    """Tick labels: ``0.01`` if an axis spans few decades, a power of ten if it spans many."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        axis: Any = self.axis
        low, high = axis.get_view_interval()
        exponent = round(math.log10(x)) if x > 0 else 0
        spans_decades = 0 < low < high and math.log10(high / low) >= 3
        if (spans_decades or not -3 <= exponent <= 3) and x > 0 and math.isclose(x, 10.0**exponent):
            return f"$\\mathdefault{{10^{{{exponent}}}}}$"
        return f"{x:g}"


def set_log_axis(ax: Any, axis: str = "y", *, most_ticks: int = 7) -> None:
    """Make an axis logarithmic, with tick labels that do not overlap."""
    ax.set(**{f"{axis}scale": "log"})
    axis_object = getattr(ax, f"{axis}axis")
    axis_object.set_major_locator(PowerLocator(most_ticks))
    axis_object.set_major_formatter(ShortFormatter())
    axis_object.set_minor_locator(LogLocator(subs="auto"))
    axis_object.set_minor_formatter(NullFormatter())


#: Largest number of lines with their own legend entries; more are drawn alike, with their mean.
MOST_NAMED = 8
#: Largest number of decades of the axis below the largest norm.
DEEPEST = 12


def set_value_axis(ax: Any, values: Numbers, *, log: bool) -> None:
    """Set limits of the value axis with a margin of 5 %, also for constant values; or make it logarithmic."""
    if log and is_positive(values):
        set_log_limits(ax, values, headroom=2)
        set_log_axis(ax)
        return
    low, high = finite_range(values) or (0.0, 0.0)
    if log:  # of both signs: linear around 0, which is within the limits
        limit = max(-low, high) or 1.0
        ax.set_yscale("symlog", linthresh=linear_threshold(limit), linscale=0.5)
        ax.yaxis.set_major_locator(FixedLocator(decade_ticks(limit)))
        ax.yaxis.set_minor_locator(NullLocator())
        low, high = min(low, 0.0), max(high, 0.0)
    margin = abs(low) * 0.1 or 1.0 if low == high else 0.05 * (high - low)
    ax.set_ylim(low - margin, high + margin)


def is_positive(values: Numbers) -> bool:
    """Return whether no finite value is negative and some is not 0, which allows a true logarithmic axis."""
    value_range = finite_range(values)
    return value_range is not None and value_range[0] >= 0 and value_range[1] > 0


def set_log_limits(ax: Any, values: Numbers, *, headroom: float, axis: str = "y") -> None:
    """Set limits of the value axis: at most ``DEEPEST`` decades of positive values, to ``headroom`` times the top."""
    positive_values = values[np.isfinite(values) & (values > 0)]
    if not positive_values.size:
        return
    top, bottom = float(positive_values.max()), float(positive_values.min())
    floor = max(top * 10.0**-DEEPEST, float(np.finfo(float).tiny))
    if bottom < floor or (values == 0).any():
        bottom = 2 * 10.0 ** math.floor(math.log10(max(bottom, floor)) - 0.01)
    ax.set(**{f"{axis}lim": (bottom / 2, top * headroom)})
    if getattr(ax, f"get_{axis}scale")() == "log":
        set_log_axis(ax, axis)


def tick_whole_numbers(axis: Any) -> None:
    """Tick whole numbers only, for an axis that counts steps or units."""
    axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def decade_ticks(limit: float, linear_limit: float = 0.0) -> list[float]:
    """Return 0 and powers of ten beyond ``linear_limit`` up to ``limit``, both signs: all, or every other if many."""
    top = 10.0 ** math.floor(math.log10(limit))
    spans_few = linear_limit > 0 and top < 200 * linear_limit
    powers = [top * 10.0**-k for k in range(0, DECADES, 1 if spans_few else 2)]
    return sorted([0.0] + [sign * power for power in powers if power >= 1.5 * linear_limit for sign in (1, -1)])


def mark_nonfinite(ax: Any, steps: Any) -> None:
    """Draw crosses at the lower border at the x positions of NaN or infinite values."""
    if len(steps):
        style = {"color": "black", "markersize": 4, "gid": "non-finite", "clip_on": False}
        ax.plot(steps, np.full(len(steps), 0.03), "x", transform=ax.get_xaxis_transform(), **style)


def mark_top(ax: Any, x: float, gid: str) -> None:
    """Draw a triangle with a light edge at ``x``, below the upper border so that no title crosses it."""
    style = {"marker": CARETDOWNBASE, "markersize": 6, "color": "#111111", "markeredgecolor": "white", "zorder": 4}
    ax.plot([x], [1.0], transform=ax.get_xaxis_transform(), gid=gid, markeredgewidth=0.5, **style)


def draw_zero_line(ax: Any) -> None:
    """Draw a thin line at 0 behind the data."""
    ax.axhline(0, color=REFERENCE_GREY, linewidth=0.6, zorder=0.5, gid="zero")
