"""Histograms: bins, counts, bars, and the axis that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import StepPatch
from matplotlib.ticker import MaxNLocator

from ._colour import line_colours
from ._data import Numbers, chunks, finite_range
from ._panels import Panels


def equal_bins(arrays: Sequence[Numbers], bins: int | None) -> Numbers:
    """Equal bins from the lowest to the highest finite value of all arrays; see :func:`histogram` for their number."""
    if bins is None:
        bins = int(np.clip(np.sqrt(max(array.size for array in arrays)), 10, 60))
    ranges = [found for found in map(finite_range, arrays) if found is not None]
    low = min((low for low, _ in ranges), default=0.0)
    high = max((high for _, high in ranges), default=0.0)
    if low == high:
        room = abs(low) * 0.1 or 0.5
        low, high = low - room, high + room
    return np.linspace(low, high, bins + 1)


def count_in_bins(values: Numbers, edges: Numbers) -> Numbers:
    """Finite values per bin, in pieces, so that memory does not grow with the data."""
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    span = (np.float64(edges[0]), np.float64(edges[-1]))  # Python floats would put the bin edges into float32
    for piece in chunks(values):
        finite = np.isfinite(piece)
        counts += np.histogram(piece if finite.all() else piece[finite], bins=len(counts), range=span)[0]
    return counts


def draw_panel(ax: Any, content: Mapping[str, Numbers], edges: Numbers, keywords: Mapping[str, Any]) -> None:
    """One step per layer: filled where it is alone, lightly filled where there are two, outlines where there are more.

    A panel whose values are all the same has no distribution: it says how many there are of it.
    """
    several = len(content) > 1
    same = None if several else one_value(next(iter(content.values())))
    if same is not None:
        count, value = same
        ax.axvline(value, color="#0072b2", linewidth=1.4, gid="constant")
        words = f"{count:,} x {value:g}"
        place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        ax.annotate(words, (value, 0.5), (4, 0), va="center", fontsize="small", gid="constant", **place)
        ax.set_xlim(*((edges[0], edges[-1]) if edges[0] < value < edges[-1] else (value - 0.5, value + 0.5)))
        ax.set_yticks([])
        ax.set_xticks([value])
        ax.tick_params(labelsize="small")
        return
    for (name, values), colour in zip(content.items(), line_colours(len(content)), strict=True):
        counts = count_in_bins(values, edges)
        outlined = len(content) > 2
        look: dict[str, Any] = {"fill": not outlined, "edgecolor": colour, "linewidth": 0.2}
        look |= {} if outlined else {"facecolor": colour}
        look |= {"linewidth": 1.3 if outlined else 0.9} if several else {}
        look["alpha"] = 1.0 if outlined or not several else 0.35
        if "color" in keywords:
            look = {key: look[key] for key in ("fill", "linewidth", "alpha")}
        ax.stairs(counts, edges, **{"gid": f"histogram {name}".strip(), **look, **keywords})
    ax.set_xlim(edges[0], edges[-1])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
    ax.tick_params(labelsize="small")


def one_value(values: Numbers) -> tuple[int, float] | None:
    """How many finite values there are, and which, where all are the same and more than one; else None."""
    found = finite_range(values)
    if found is None or found[0] != found[1] or values.size < 2:
        return None
    return int(np.isfinite(values).sum()), found[0]


def _steps_of(ax: Any) -> list[Any]:
    return [patch for patch in ax.patches if isinstance(patch, StepPatch)]


def scale_counts(panels: Panels, *, shared: bool, log: bool, clip_peaks: int) -> None:
    """Counts axes; tallest bars cut off and labelled."""
    drawn = [ax for ax in panels.axes if _steps_of(ax)]
    tops = [_top([s.get_data().values for s in _steps_of(ax)], clip_peaks) for ax in drawn]
    for ax, own in zip(drawn, tops, strict=True):
        top = max(tops) if shared else own
        if log:
            ax.set_yscale("log")
            ax.set_ylim(0.6, top * 2)
        else:
            ax.set_ylim(0, top * 1.12)
        if clip_peaks:
            _write_counts(ax, own, clip_peaks)


def _top(counts: Sequence[Numbers], clip_peaks: int) -> float:
    """Height of the tallest bar that is not cut off; at least 1."""
    ordered = np.sort(np.concatenate(list(counts)))
    kept = ordered[: len(ordered) - clip_peaks]
    return float(max(1, kept.max() if kept.size else 1))


def _write_counts(ax: Any, top: float, clip_peaks: int) -> None:
    """The counts of the bars that reach beyond ``top``, at the upper rim."""
    beyond = [
        (count, 0.5 * (left + right))
        for step in _steps_of(ax)
        for count, left, right in zip(
            step.get_data().values, step.get_data().edges[:-1], step.get_data().edges[1:], strict=True
        )
        if count > top
    ]
    for row, (count, middle) in enumerate(sorted(beyond, reverse=True)[:clip_peaks]):
        centre = 0.5 * sum(ax.get_xlim())
        ax.annotate(
            f"{int(count):,} ↑",
            (middle, 0.97 - 0.1 * row),
            xycoords=ax.get_xaxis_transform(),
            xytext=(4 if middle < centre else -4, 0),
            textcoords="offset points",
            ha="left" if middle < centre else "right",
            va="top",
            fontsize="x-small",
            gid="clipped peak",
        )
