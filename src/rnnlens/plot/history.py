"""``norm_history``: the gradient by time step while training, a row per moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..errors import InputError, message
from ..measures.samples import peak_band, quartiles, sample_peaks
from ..recurrence.measures import safe_norm
from ..results.schema import with_mask
from ..vocabulary import DIRECTION, SAMPLE, TIME
from ._colour import POSITIVE, from_zero
from ._data import (
    Numbers,
    halves,
    labelled,
    nonfinite_note,
    positions,
    require_dim,
    require_time,
    unit_dim,
    value_label,
)
from ._door import figure as figure_door
from ._images import IMSHOW, Matrix, colour_bar, draw_image, name_ticks
from ._keywords import checked
from ._layers import dataset_of, variable
from ._marks import log_ticks
from ._padding import NOTE, hidden
from ._panels import Grid, open_panels
from .norms import ROWS


@figure_door()
def norm_history(
    history: Any,
    *,
    quantity: str = "hidden_grad",
    log: bool = True,
    as_computed: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw how the reach of a gradient grows while training: time steps across, training upward, and its size beside.

    Each row is the norm over units at each step, each sample by its own peak, median over samples. The size is the
    median of these peaks, with their quartiles.

    Parameters
    ----------
    history
        A mapping from training steps (or names) to layers of traces or arrays (sample, time, unit); or one array with a
        training dimension named ``step``, ``epoch``, ``batch`` or ``update``.
    quantity
        Which variable is drawn when layers are given.
    log
        Logarithmic colours over 4 decades, linear below.
    as_computed
        Turn the backward half of a bidirectional layer round, into the order in which it was computed.
    title
        Instead of the one made from the labels.
    ax, figure
        Two Axes per direction, or a Figure or SubFigure to draw into.
    **image
        Properties of matplotlib's AxesImage and keywords of ``Axes.imshow``.

    Returns
    -------
    1-D array of Axes: map and size, forward before backward

    Raises
    ------
    InputError
        If the moments differ in their steps, there is no training dimension, or a keyword is unknown.
    """
    keywords = checked(image, AxesImage, figure="norm_history", extra=IMSHOW)
    moments = _moments(history, quantity)
    names, first = list(moments), next(iter(moments.values()))
    shown = [halves(array, as_computed=as_computed) for array in moments.values()]
    ways = [half.name for half in shown[0]]
    grid = Grid((3.4, 3.0), (1.0, 0.9), (1, 2), widths=(4, 1.1))
    panels = open_panels(2, name="norm_history", grid=grid, halves=ways, ax=ax, figure=figure)
    for number, places in enumerate(panels.halves):
        rows = [_row(halves_of[number].data) for halves_of in shown]
        _draw(places, names, positions(shown[0][number].data, TIME), rows, {"log": log, "keywords": keywords})
        places[0].set_xlabel(shown[0][number].time_label)
    several = first.sizes.get(SAMPLE, 1)
    note = f"median of {several} samples, each by its own peak" if several > 1 else "each moment by its own peak"
    padding = NOTE if any(hidden(array) is not None for array in moments.values()) else None
    missing = nonfinite_note(np.concatenate([array.values.reshape(-1) for array in moments.values()]))
    head = " · ".join(
        str(p) for p in (first.attrs.get("layer"), value_label(first).split(" [")[0], "while training") if p
    )
    panels.title(title or head, [note, padding, missing])
    return panels.result()


def _moments(history: Any, quantity: str) -> dict[Any, xr.DataArray]:
    """Arrays by training step."""
    if isinstance(history, xr.DataArray):
        along = next((name for name in ROWS if name in history.dims and name != TIME), None)
        if along is None:
            raise InputError(
                message(
                    "plot.norm_history needs a training dimension.",
                    got=f"dimensions ({', '.join(map(str, history.dims))})",
                    expected=f"one of {', '.join(name for name in ROWS if name != TIME)}",
                )
            )
        found = {step: history.isel({along: i}, drop=True) for i, step in enumerate(positions(history, along).tolist())}
    elif isinstance(history, Mapping) and history and dataset_of(history) is None:
        found = {name: _variable(one, quantity) for name, one in history.items()}
    else:
        raise InputError(
            message(
                "plot.norm_history draws one moment after the other.",
                got=type(history).__name__,
                expected="a mapping from training steps to layers of traces, or an array with such a dimension",
            )
        )
    arrays = {name: labelled(array, "norm_history") for name, array in found.items()}
    for array in arrays.values():
        require_time(array, "norm_history")
        require_dim(array, unit_dim(array) or "unit", "norm_history")
    lengths = {array.sizes[TIME] for array in arrays.values()}
    ways = {array.sizes.get(DIRECTION) for array in arrays.values()}
    if len(lengths) > 1 or len(ways) > 1:
        got = f"{', '.join(str(length) for length in sorted(lengths))} time steps"
        raise InputError(message("The moments differ in their steps or directions.", got=got))
    return arrays


def _variable(one: Any, quantity: str) -> Any:
    found, dataset = variable(one, quantity, "norm_history"), dataset_of(one)
    return found if dataset is None else with_mask(found, dataset)


def _row(array: xr.DataArray) -> tuple[Numbers, Numbers, tuple[float, float, float]]:
    """Shape (time,), where it is padding, and the quartiles of the peaks."""
    lead = [SAMPLE] if SAMPLE in array.dims else []
    ordered = array.transpose(*lead, TIME, ...)
    norms = np.asarray(safe_norm(ordered.values, axis=tuple(range(len(lead) + 1, ordered.ndim)), xp=np), dtype=float)
    norms = norms if lead else norms[None]
    padded = hidden(ordered)
    real = (
        np.ones(norms.shape, bool)
        if padded is None
        else np.broadcast_to(~padded.transpose(*lead, TIME).values, norms.shape)
    )
    bad = (~np.isfinite(norms) & real).any(axis=0)
    shape = np.where(bad, np.nan, peak_band(norms, real).median)
    return shape, np.asarray(~real.any(axis=0)), quartiles(sample_peaks(np.where(real, norms, 0.0)))


def _draw(places: list[Any], names: list[Any], steps: Numbers, rows: list[Any], look: dict[str, Any]) -> None:
    """The map of shapes, and the sizes beside it."""
    shapes, empty = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
    at = np.arange(len(rows))
    colours = {"cmap": POSITIVE, "norm": from_zero(shapes, 1.0, log=look["log"]), **look["keywords"]}
    drawn = draw_image(places[0], Matrix(shapes, steps, at, empty), look=colours, upward=True)
    numeric = all(isinstance(name, int | float | np.number) for name in names)
    name_ticks(places[0], "y", at, [f"{name:g}" if numeric else str(name) for name in names])
    places[0].set_ylabel("training step" if numeric else "moment")
    low, middle, high = np.array([row[2] for row in rows]).T
    places[1].fill_betweenx(at, low, high, color="#0072b2", alpha=0.2, linewidth=0, gid="band")
    places[1].plot(middle, at, "o-", color="#0072b2", markersize=3, linewidth=1.2, gid="size")
    places[1].set_ylim(places[0].get_ylim())
    places[1].set_yticks([])
    positive = np.array([low, middle, high])
    positive = positive[np.isfinite(positive) & (positive > 0)]
    if positive.size:
        places[1].set_xlim(float(positive.min()) / 1.5, float(positive.max()) * 1.5)
        places[1].set_xscale("log")
        log_ticks(places[1], "x", most=3)
    places[1].set_xlabel("peak")
    places[1].tick_params(labelsize="small")
    colour_bar([places[1]], drawn, "share of the sample's peak")
