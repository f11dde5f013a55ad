"""Compact encoding of numbers as text: quantised, as an indexed PNG or as base64.

A map is stored as a PNG whose palette is its colour scale. Browsers display it directly, and the script decodes the
numbers from the colours, since all colours of a palette differ.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
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


@dataclass(frozen=True)
class Scale:
    """Linear map from codes to values, or to their logarithm (base 10): ``low`` at code 0, ``high`` at the last code.

    On a logarithmic scale, code 0 means any value below ``low``, zero included.
    """

    low: float
    high: float
    log: bool = False

    def codes(self, values: Array, levels: int) -> Array:
        """Return codes 0 to ``levels``; values that are not finite get 0, and the caller marks them."""
        span = self.high - self.low or 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            measured = np.log10(values) if self.log else np.asarray(values, dtype=np.float64)
        share = np.nan_to_num((measured - self.low) / span, nan=0.0, posinf=0.0, neginf=0.0)
        return np.clip(np.rint(share * levels), 0, levels)

    def to_json(self) -> list[Any]:
        """Return ``[low, high, log]``."""
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
    picture = Image.fromarray(codes.astype(np.uint8), mode=None).convert("L")
    picture = Image.frombytes("P", picture.size, picture.tobytes())
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
        for nudge in _nudges():
            tried = tuple(int(c) for c in np.clip(colour + nudge, 0, 255))
            if tried not in taken:
                table[code] = tried
                taken.add(tried)
                break
    return table.astype(np.uint8)


def hex_colours(palette: str) -> str:
    """Return all colours of a palette as one string of six digits each."""
    return bytes(colours(palette).ravel()).hex()


def _nudges() -> list[tuple[int, int, int]]:
    steps = [(r, g, b) for r in (0, 1, -1, 2) for g in (0, 1, -1) for b in (0, 1, -1, 2)]
    return sorted(steps, key=lambda step: sum(map(abs, step)))
