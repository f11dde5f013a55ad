"""``histogram``: how values are distributed; in a grid, overlaid, with clipped peaks or logarithmic counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr
from matplotlib.patches import StepPatch

from ..errors import InputError, message
from ._bins import draw_panel, equal_bins, scale_counts
from ._colour import line_colours
from ._data import (
    Numbers,
    axis_label,
    choose,
    labelled,
    names_of,
    nonfinite_note,
    require_dim,
    title_of,
    value_label,
)
from ._door import figure as figure_door
from ._keywords import checked
from ._layers import dataset_of
from ._matrices import slots_of
from ._panels import Grid, Panels, open_panels

#: Dimensions of a plain array by its rank.
GUESS = {
    1: ("value",),
    2: ("time", "unit"),
    3: ("sample", "time", "unit"),
    4: ("sample", "time", "gate", "unit"),
    5: ("sample", "out_time", "out_unit", "in_time", "in_feature"),
}


@figure_door()
def histogram(
    data: Any,
    *,
    dims: Sequence[str] | None = None,
    panel: str | Sequence[str] | None = None,
    overlay: str | None = None,
    bins: int | None = None,
    shared: bool = True,
    log: bool = False,
    clip_peaks: int = 0,
    max_panels: int = 36,
    page: int | None = None,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **step: Any,
) -> Any:
    """Draw the distribution of values; values that are NaN or infinite are left out and counted in the panel's title.

    Parameters
    ----------
    data
        A DataArray or array of any rank, or a mapping from names to such arrays, which are overlaid.
    dims
        Dimensions of a plain array. Default by rank: 1 (value), 2 (time, unit), 3 (sample, time, unit), 4 with gate.
    panel
        A dimension with a panel for each of its positions (``"unit"``), or two: rows and columns. None: one panel.
    overlay
        A dimension whose positions are overlaid in each panel, in colours (``"gate"``).
    bins
        Number of equal bins between the lowest and the highest finite value; by default the square root of the number
        of values in a panel, 10 at least and 60 at most.
    shared
        Same bins and same counts axis in all panels.
    log
        Logarithmic counts: gradients are otherwise one spike at 0.
    clip_peaks
        This many of the tallest bars of each panel are cut off just above the next one; their counts are written there.
    max_panels, page
        More panels are thinned evenly; ``page`` shows the page-th run of them instead. The figure says so.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per panel, or a Figure or SubFigure to draw into.
    **step
        Properties of matplotlib's StepPatch.

    Returns
    -------
    1-D array of Axes, in panel order

    Raises
    ------
    InputError
        If a dimension or keyword is unknown, ``bins`` is below 1, or ``ax`` has not one Axes per panel.
    """
    if (bins is not None and bins < 1) or clip_peaks < 0:
        raise InputError(
            message(
                "A histogram needs bins.",
                got=f"bins={bins}, clip_peaks={clip_peaks}",
                expected="bins >= 1, clip_peaks >= 0",
            )
        )
    layers = _layers(data, dims, overlay)
    first = next(iter(layers.values()))
    keywords = checked(step, StepPatch, figure="histogram")
    by = [panel] if isinstance(panel, str) else list(panel or ())
    for dim in by:
        require_dim(first, dim, "histogram")
    slots = slots_of(first, by)
    picked, thinned = choose(len(slots), max_panels, " x ".join(f"{d}s" for d in by) or "panels", page=page)
    grid = (first.sizes[by[0]], first.sizes[by[1]]) if len(by) == 2 and not thinned else None
    size = (5.0, 3.2) if len(picked) == 1 else (2.4, 1.7)
    panels = open_panels(len(picked), name="histogram", grid=Grid(size, shape=grid), ax=ax, figure=figure)
    contents = [{name: array.isel(slots[i][0]).values for name, array in layers.items()} for i in picked]
    common = equal_bins([values for content in contents for values in content.values()], bins) if shared else None
    for place, content, i in zip(panels.axes, contents, picked, strict=True):
        draw_panel(place, content, common if common is not None else equal_bins(list(content.values()), bins), keywords)
        place.set_title(_with_missing(slots[i][1], list(content.values())), fontsize="small", pad=3)
    scale_counts(panels, shared=shared, log=log, clip_peaks=clip_peaks)
    panels.label(value_label(first), "count" + (", log scale" if log else ""))
    if len(layers) > 1:
        name_layers(panels, list(layers), axis_label(first, overlay) if overlay else None)
    if shared and panels.owners:
        panels.outer_ticks_only()
    everything = None if len(layers) > 1 else nonfinite_note(first.values)
    clipped = f"tallest {clip_peaks} per panel cut off, with their count" if clip_peaks else None
    panels.title(title or title_of(first), [thinned, everything, clipped])
    return panels.result()


def _layers(data: Any, dims: Sequence[str] | None, overlay: str | None) -> dict[str, xr.DataArray]:
    """What is overlaid, by name."""
    if isinstance(data, Mapping) and dataset_of(data) is None:
        if overlay is not None:
            raise InputError(
                message(
                    "A mapping is overlaid already.", got=f"overlay={overlay!r} and a mapping", expected="one of them"
                )
            )
        found = {str(name): labelled(array, "histogram", dims=dims, guess=GUESS) for name, array in data.items()}
        if not found:
            raise InputError(
                message("plot.histogram got nothing to draw.", got="an empty mapping", expected="arrays by name")
            )
        return found
    array = labelled(data, "histogram", dims=dims, guess=GUESS)
    if overlay is None:
        return {"": array}
    require_dim(array, overlay, "histogram")
    return {name: array.isel({overlay: i}) for i, name in enumerate(names_of(array, overlay))}


def _with_missing(title: str, arrays: Sequence[Numbers]) -> str:
    """Panel title with the exact share of NaN and Inf, where there are any."""
    notes = [note for note in map(nonfinite_note, arrays) if note]
    return "\n".join([part for part in [title, *notes] if part])


def name_layers(panels: Panels, names: Sequence[str], title: str | None) -> None:
    """Legend beside the panels."""
    pairs = list(zip(names, line_colours(len(names)), strict=True))
    if len(pairs) > 2:
        handles: list[Any] = [panels.axes[0].plot([], [], color=colour, label=name)[0] for name, colour in pairs]
    else:
        handles = [panels.axes[0].fill_between([], [], color=colour, alpha=0.6, label=name) for name, colour in pairs]
    owner, where = (panels.owners[-1], "outside right upper") if panels.owners else (panels.axes[0], "best")
    owner.legend(handles=handles, title=title, fontsize="small", title_fontsize="small", loc=where)
