"""Small curves: block characters for a terminal, inline SVG for a page."""

from __future__ import annotations

import html
import math

import numpy as np

from ..typing import Array

BLOCKS = "▁▂▃▄▅▆▇█"
#: Characters for values below the smallest block, and for values that are not finite.
BELOW, BROKEN = "·", "✗"


def blocks(values: Array, width: int = 32, *, decades: float | None = None) -> str:
    """Format a curve as block characters, scaled from 0 (or ``decades`` below the largest value) to the largest.

    Steps that share a character show their largest value.

    >>> blocks([0, 1, 2, 4])
    '▁▃▅█'
    >>> blocks([1, 1e-1, 1e-2, 1e-9, float("nan")], decades=4)
    '█▆▅·✗'
    """
    merged = _merged(np.asarray(values, dtype=np.float64), width)
    shares = _shares(merged, decades)
    last = len(BLOCKS) - 1
    return "".join(
        BROKEN if math.isnan(share) else BELOW if share < 0 else BLOCKS[min(last, round(share * last))]
        for share in shares
    )


def svg(values: Array, title: str, *, decades: float | None = None, width: int = 160, height: int = 28) -> str:
    """Format a curve as an inline SVG line; values that are not finite are gaps with a red mark at the bottom."""
    shares = _shares(_merged(np.asarray(values, dtype=np.float64), width), decades)
    room = width / max(len(shares) - 1, 1)
    commands, pen, feet = [], "M", []
    for place, share in enumerate(shares):
        if math.isnan(share):
            feet.append(f"M{place * room:.1f} {height}v-5")
            pen = "M"
            continue
        commands.append(f"{pen}{place * room:.1f} {1 + (1 - max(share, 0)) * (height - 2):.1f}")
        pen = "L"
    if len(commands) == 1:
        commands.append("h1")
    red = f'<path d="{"".join(feet)}" stroke="#e5484d" stroke-width="2"/>' if feet else ""
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" fill="none" '
        f'stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round">'
        f'<title>{html.escape(title)}</title><path d="{"".join(commands)}"/>{red}</svg>'
    )


def _merged(values: Array, width: int) -> Array:
    """Reduce values to at most ``width`` by the maximum of neighbours; NaN where one of them is not finite."""
    values = np.where(np.isfinite(values), values, np.nan)
    if len(values) <= width:
        return values
    return np.array([part.max() for part in np.array_split(values, width)])


def _shares(values: Array, decades: float | None) -> list[float]:
    """Scale values linearly or by decades to 0 ... 1; values below the lower end are negative."""
    finite = values[np.isfinite(values)]
    high = float(finite.max()) if finite.size else 0.0
    if decades is None:
        low = min(float(finite.min()) if finite.size else 0.0, 0.0)
        span = high - low or 1.0
        return [float(v) if math.isnan(v) else float((v - low) / span) for v in values]
    if high <= 0:
        return [float(v) if math.isnan(v) else -1.0 for v in values]
    return [v if math.isnan(v) else 1 + math.log10(v / high) / decades if v > 0 else -1.0 for v in map(float, values)]
