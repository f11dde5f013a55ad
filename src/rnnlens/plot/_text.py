"""Text as a picture: tokens in lines, each shaded by a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from ..errors import InputError, message, shown
from ._data import Numbers

#: Letters of a line, and inches of one letter and of one line.
WIDTH, LETTER, LINE = 72, 0.092, 0.21
#: Lines that one panel can hold.
MOST_LINES = 40


def tokens_of(tokens: Any, count: int, figure: str) -> list[str]:
    """The tokens as text, one for each step; a string is its letters.

    Raises
    ------
    InputError
        If there are not as many as steps.
    """
    several = isinstance(tokens, str | Sequence) or (isinstance(tokens, np.ndarray) and tokens.ndim == 1)
    if not several or len(tokens) != count:
        raise InputError(
            message(
                f"plot.{figure} writes one token for each step.",
                got=f"{len(tokens)} tokens" if several else shown(tokens),
                expected=f"{count} of them",
            )
        )
    return [str(token).replace("\n", "↵").replace("\t", "→") or " " for token in tokens]


def places_of(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Line and column at which each token begins."""
    places, line, column = [], 0, 0
    for token in tokens:
        if column and column + len(token) > WIDTH:
            line, column = line + 1, 0
        places.append((line, column))
        column += len(token)
        if token.endswith("↵"):
            line, column = line + 1, 0
    return places


def height_of(tokens: Sequence[str]) -> float:
    """Inches that the text takes."""
    return LINE * (min(places_of(tokens)[-1][0] + 1, MOST_LINES) + 0.4)


def width_of(tokens: Sequence[str]) -> int:
    """Letters of the longest line, a third of a full one at least."""
    longest = max(column + len(token) for (_, column), token in zip(places_of(tokens), tokens, strict=True))
    return max(WIDTH // 3, longest)


def shade_text(ax: Any, tokens: Sequence[str], values: Numbers, look: dict[str, Any]) -> tuple[Any, str | None]:
    """Write the tokens, each on the colour of its value; the colours drawn, and the note on what is left out."""
    places = places_of(tokens)
    kept = [i for i, (line, _) in enumerate(places) if line < MOST_LINES]
    boxes = [Rectangle((places[i][1], places[i][0]), len(tokens[i]), 0.92) for i in kept]
    drawn = PatchCollection(boxes, linewidth=0, gid="tokens", **look)
    shown = np.ma.masked_invalid(np.asarray(values, dtype=float)[kept])
    drawn.set_array(shown)
    ax.add_collection(drawn)
    ax.set(xlim=(-0.5, width_of(tokens) + 0.5), ylim=(places[kept[-1]][0] + 1.2, -0.3))
    colours = drawn.norm(shown)
    for i, share in zip(kept, np.ma.filled(colours, np.nan), strict=True):
        line, column = places[i]
        dark = np.isfinite(share) and (share > 0.85 or (share < 0.15 and look.get("both")))
        for offset, letter in enumerate(tokens[i]):
            ax.text(
                column + offset + 0.5, line + 0.5, letter, ha="center", va="center", family="monospace",
                fontsize="small", color="white" if dark else "black", clip_on=True, parse_math=False,
            ).set_in_layout(False)  # fmt: skip
        if not np.isfinite(share):
            ax.plot([column + 0.5 * len(tokens[i])], [line + 0.5], "x", color="black", gid="non-finite")
    ax.set_axis_off()
    note = None if len(kept) == len(tokens) else f"first {len(kept)} of {len(tokens)} tokens"
    return drawn, note
