"""``weights_histogram``: how the weights of each gate are distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import StepPatch

from ..arguments import either, one_of, switch
from ._bins import draw_panel, equal_bins, scale_counts
from ._data import Numbers, nonfinite_note
from ._door import figure as figure_door
from ._keywords import checked
from ._panels import Grid, Panels, open_panels
from ._weights import Kernel, kernels_of


@figure_door(shared=either(switch, one_of("row"), expected="True, False or 'row'"))
def weights_histogram(
    weights: Any,
    *,
    grad: bool = False,
    bins: int | None = None,
    shared: bool | str = "row",
    log: bool = False,
    clip_peaks: int = 0,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **step: Any,
) -> Any:
    """Draw a histogram for every kernel (rows) and gate (columns); directions side by side.

    Each panel's title gives the exact share of its values that are NaN or infinite; these are left out of the bars.

    Parameters
    ----------
    weights
        The weights of one layer, as for :func:`weights_heatmap`.
    grad
        Draw the gradients (variables ending in ``_grad``); those by time are summed over time.
    bins
        Number of equal bins; by default the square root of the number of values in a panel, 10 to 60.
    shared
        ``"row"`` (default): the gates of one kernel have the same bins and counts axis; True: all panels have; False:
        none.
    log
        Logarithmic counts.
    clip_peaks
        This many of the tallest bars of each panel are cut off, and their counts written.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per kernel and gate (all of forward, then all of backward), or a Figure or SubFigure to draw into.
    **step
        Properties of matplotlib's StepPatch.

    Returns
    -------
    1-D array of Axes, kernel by kernel and within it gate by gate, forward before backward

    Raises
    ------
    InputError
        If there is nothing to draw, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    kernels, attrs = kernels_of(weights, "weights_histogram", grad=grad)
    keywords = checked(step, StepPatch, figure="weights_histogram")
    directions = list(dict.fromkeys(kernel.direction for kernel in kernels))
    columns = [[kernel for kernel in kernels if kernel.direction == way] for way in directions]
    wide = max(len(kernel.gates) or 1 for kernel in kernels)
    panels, places = _open(columns, directions, wide, ax, figure)
    everything = equal_bins([kernel.values for kernel in kernels], bins)
    for column, axes in zip(columns, places, strict=True):
        for kernel, row in zip(column, axes, strict=True):
            _draw_row(row, kernel, everything if shared is True else None, bins, keywords, shared=bool(shared))
            if shared is not True:
                scale_counts(Panels([row], panels.figure, []), shared=bool(shared), log=log, clip_peaks=clip_peaks)
    if shared is True:
        scale_counts(panels, shared=True, log=log, clip_peaks=clip_peaks)
    what = "gradients of the weights" if grad else "weights"
    panels.label("gradient" if grad else "weight", "count" + (", log scale" if log else ""))
    clipped = f"tallest {clip_peaks} per panel cut off, with their count" if clip_peaks else None
    total = nonfinite_note(np.concatenate([kernel.values.reshape(-1) for kernel in kernels]))
    panels.title(title or " · ".join(p for p in (attrs.get("layer"), what) if p), [total, clipped])
    return panels.result()


def _open(
    columns: list[list[Kernel]], directions: list[str | None], wide: int, ax: Any, figure: Any
) -> tuple[Panels, list[list[list[Any]]]]:
    """A grid with a row per kernel; panels that a kernel without gates does not need are taken away."""
    per_kernel = [len(kernel.gates) or 1 for kernel in columns[0]]
    if ax is not None:
        panels = open_panels(sum(per_kernel), name="weights_histogram", halves=directions, ax=ax)
        return panels, [_deal(half, per_kernel) for half in panels.halves]
    panels = open_panels(
        len(per_kernel) * wide,
        name="weights_histogram",
        grid=Grid((2.3, 1.75), shape=(len(per_kernel), wide)),
        halves=directions,
        figure=figure,
    )
    places = []
    for half in panels.halves:
        rows = [half[i * wide : (i + 1) * wide] for i in range(len(per_kernel))]
        for row, used in zip(rows, per_kernel, strict=True):
            for unused in row[used:]:
                unused.remove()
        places.append([row[:used] for row, used in zip(rows, per_kernel, strict=True)])
    panels.halves = [[ax for row in rows for ax in row] for rows in places]
    return panels, places


def _deal(axes: list[Any], counts: list[int]) -> list[list[Any]]:
    """Axes in runs of the given lengths."""
    starts = np.cumsum([0, *counts])
    return [axes[starts[i] : starts[i + 1]] for i in range(len(counts))]


def _draw_row(
    row: list[Any], kernel: Kernel, edges: Numbers | None, bins: int | None, keywords: dict[str, Any], *, shared: bool
) -> None:
    """The gates of one kernel."""
    if edges is None and shared:
        edges = equal_bins([kernel.values], bins)
    for number, ax in enumerate(row):
        values = np.ascontiguousarray(kernel.values[:, number, :])
        draw_panel(ax, {"": values}, edges if edges is not None else equal_bins([values], bins), keywords)
        words = " · ".join(part for part in (kernel.title, kernel.gates[number] if kernel.gates else "") if part)
        ax.set_title("\n".join(part for part in (words, nonfinite_note(values)) if part), fontsize="small", pad=3)
        if number and shared:
            ax.tick_params(labelleft=False)
