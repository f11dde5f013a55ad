"""``weights_heatmap``: every weight of a layer in its place, gates side by side."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.image import AxesImage

from ..recurrence.measures import quantiles
from ._colour import DIVERGING, POSITIVE, around_zero, from_zero
from ._data import largest_magnitude, nonfinite_note
from ._door import figure as figure_door
from ._images import IMSHOW, Matrix, colour_bars, draw_image, merge_note, separate, steps_for
from ._keywords import checked
from ._panels import Grid, Panels, open_panels
from ._weights import Kernel, kernels_of

#: Rows and columns that one kernel can show.
CELLS = (256, 800)


@figure_door()
def weights_heatmap(
    weights: Any,
    *,
    grad: bool = False,
    absolute: bool = False,
    shared: bool = True,
    limit: float | None = None,
    log: bool = False,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw kernel, recurrent kernel and bias of a layer above each other, so that the columns of a unit line up.

    Gates are side by side with separators and names, the backward direction is beside the forward one. Missing values
    are grey and crossed out, and counted for each kernel; nothing is set to zero.

    Parameters
    ----------
    weights
        The weights of one layer: a Dataset with kernel (feature, gate, unit), recurrent_kernel (unit_in, gate, unit),
        bias (gate, unit), any of them with direction, in any order; or a mapping from names to such arrays. Weights of
        layers that are not recurrent are drawn with their last dimension across.
    grad
        Draw the gradients (variables ending in ``_grad``); those by time are summed over time.
    absolute
        Draw magnitudes, on a scale from white at 0.
    shared
        One colour scale for all kernels; else each has its own scale and colour bar.
    limit
        Colour scale up to this magnitude. By default the largest of all. Where that is more than twice the largest
        within the kernels (a forget bias of 1) or the 99.5 % quantile of their magnitudes (a few outliers), these
        decide, so that the rest can be seen, and the figure says so.
    log
        Logarithmic colours over 4 decades.
    colorbar
        Draw the colour bar.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per kernel (all of forward, then all of backward), or a Figure or SubFigure to draw into.
    **image
        Properties of matplotlib's AxesImage and keywords of ``Axes.imshow``.

    Returns
    -------
    1-D array of Axes, kernel by kernel, forward before backward

    Raises
    ------
    InputError
        If there is nothing to draw, a keyword is unknown, or ``ax`` has not one Axes per kernel.
    """
    kernels, attrs = kernels_of(weights, "weights_heatmap", grad=grad)
    keywords = checked(image, AxesImage, figure="weights_heatmap", extra=IMSHOW)
    directions = list(dict.fromkeys(kernel.direction for kernel in kernels))
    columns = [[kernel for kernel in kernels if kernel.direction == way] for way in directions]
    panels = _open(columns, directions, ax, figure)
    top, clipped = (limit, None) if limit is not None else _common_limit(kernels)
    drawn = []
    for column, axes in zip(columns, panels.halves, strict=True):
        for kernel, place in zip(column, axes, strict=True):
            own = top if shared or limit is not None else largest_magnitude(kernel.values)
            drawn.append(_draw(place, kernel, own, keywords, absolute=absolute, log=log))
    label = kernels[0].words if len(kernels) == 1 else "gradient" if grad else "weight"
    colour_bars(panels, drawn, f"|{label}|" if absolute else label, shared=shared, wanted=colorbar)
    panels.label("gate, unit" if any(kernel.gates for kernel in kernels) else "unit", "")
    what = "gradients of the weights" if grad else "weights"
    merged = dict.fromkeys(f"{k.title}: {note}" for k in kernels if (note := merge_note(_steps(k), "row", "unit")))
    panels.title(title or " · ".join(p for p in (attrs.get("layer"), what) if p), [*merged, clipped])
    return panels.result()


def _open(columns: list[list[Kernel]], directions: list[str | None], ax: Any, figure: Any) -> Panels:
    """One row per kernel, as tall as it has rows, within reason."""
    count = max(len(column) for column in columns)
    tall = [0.1 + 2.6 * min(1.0, max(c.values.shape[0] for c in row) / 64) ** 0.6 for row in zip(*columns, strict=True)]
    wide = max(kernel.values.shape[1] * kernel.values.shape[2] for kernel in columns[0])
    width = float(np.clip(wide / 60, 4.5, 10.0 / len(columns) + 1.5))
    return open_panels(
        count,
        name="weights_heatmap",
        grid=Grid((width, sum(tall) / count + 0.35), (1.9, 1.0), (count, 1), heights=tall),
        halves=directions,
        ax=ax,
        figure=figure,
    )


def _common_limit(kernels: list[Kernel]) -> tuple[float, str | None]:
    """Colour limit for all kernels, and the note where something is beyond it."""
    matrices = [kernel.values for kernel in kernels if len(kernel.values) > 1] or [kernel.values for kernel in kernels]
    largest, limit = largest_magnitude(*(kernel.values for kernel in kernels)), largest_magnitude(*matrices)
    words = "the largest of the kernels"
    magnitudes = np.abs(np.concatenate([values.reshape(-1) for values in matrices]))
    (bulk,) = quantiles(magnitudes[np.isfinite(magnitudes)], q=(0.995,), axis=0, xp=np) if limit else (0.0,)
    if bulk and limit > 2 * bulk:
        limit, words = float(bulk), "the 99.5 % quantile of magnitudes in the kernels"
    if not limit or largest <= 2 * limit:
        return largest, None
    return limit, f"colours end at {limit:.2g}, {words}; largest of all {largest:.3g}"


def _steps(kernel: Kernel) -> tuple[int, int]:
    rows, gates, units = kernel.values.shape
    return steps_for((rows, units), (CELLS[0], max(1, CELLS[1] // gates)))


def _draw(ax: Any, kernel: Kernel, top: float, keywords: dict[str, Any], *, absolute: bool, log: bool) -> Any:
    """One kernel with its separators and its count of missing values."""
    rows, gates, units = kernel.values.shape
    matrix = kernel.values.reshape(rows, gates * units)
    matrix = np.abs(matrix) if absolute else matrix
    norm = from_zero(matrix, top, log=log) if absolute else around_zero(top, log=log)
    look = {"cmap": POSITIVE if absolute else DIVERGING, "norm": norm, **keywords}
    steps = _steps(kernel)
    limits = (-(-rows // steps[0]), -(-gates * units // steps[1]))
    drawn = draw_image(
        ax, Matrix(matrix, np.arange(gates * units), np.arange(rows), over_time=False), look=look, limits=limits
    )
    missing = nonfinite_note(kernel.values)
    ax.set_title(" · ".join(part for part in (kernel.title, missing) if part), fontsize="small", pad=3)
    ax.set_ylabel(textwrap.fill(kernel.row_label, 12), fontsize="small")
    ax.tick_params(labelsize="small")
    if kernel.gates:
        separate(ax, "x", units, kernel.gates)
    if rows == 1:
        ax.set_yticks([])
    return drawn
