"""``film``: the gradient over time steps, record after record of a training: when memory is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from ..arguments import anything, names, number
from ..errors import InputError, did_you_mean, message, shown
from ..measures.profiles import share_of_peak
from ..vocabulary import DIRECTION, TIME
from ._colour import POSITIVE
from ._data import Numbers, names_of, nonfinite_note, positions
from ._door import figure as figure_door
from ._keywords import checked
from ._panels import Grid, Panels, open_panels
from ._training import edges_of, mark_moments, moments_of, scalar_line, training_axis, under_training

STEP = "step"
#: What is drawn below, the first that was recorded.
_BELOW = ("accuracy", "val_accuracy", "val_loss", "loss")


@figure_door(layers=names, quantity=anything, below=anything, decades=number(above=0), moments=anything)
def film(
    run: Any,
    *,
    layers: Any = None,
    quantity: str = "adjoint_profile",
    below: str | xr.DataArray | None = None,
    decades: float = 4.0,
    moments: Mapping[str, float] | None = None,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **mesh: Any,
) -> Any:
    """Draw the size of the gradient at every time step (down) over training (across), a panel per layer.

    Each record is divided by its own peak: the picture shows *where in time* the gradient is, not how large it is,
    which changes with the loss. Below, on the same axis, the accuracy or the loss of the same records. Between two
    records the colour is that of the nearer one. Records that are
    denser early, as at powers of two, lie on a logarithmic axis.

    Parameters
    ----------
    run
        A followed training: what ``rl.open`` returns for it.
    layers
        Names of layers; all that have such a profile by default.
    quantity
        ``"adjoint_profile"``, over time, or ``"lag_profile"``, over steps back from the end of each sample.
    below
        Name of the scalar below: ``"loss"``, ``"lstm/reach"``; or a number of your own for each record, a DataArray
        with the dimension ``step``. Default: the accuracy where one was recorded, else the loss; ``""`` for none.
    decades
        How far below its peak a gradient is still told from 0, in powers of ten.
    moments
        Names of moments of training, by step: ``{"the first digit is right": 300}``; marked in every panel.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per panel, or a Figure or SubFigure to draw into.
    **mesh
        Properties of matplotlib's QuadMesh.

    Returns
    -------
    1-D array of Axes: one per layer (and direction), then the one below

    Raises
    ------
    InputError
        If the run holds no such profile or scalar, a keyword is unknown, or ``ax`` has not one Axes per panel.
    """
    keywords = checked(mesh, QuadMesh, figure="film", extra=("cmap", "norm"))
    strips = _strips(run, layers, quantity)
    under = _under(run, below)
    count = len(strips) + (under is not None)
    heights = [3.0] * len(strips) + [1.2] * (under is not None)
    grid = Grid((6.6, 2.3), margin=(1.0, 0.9), shape=(count, 1), heights=heights)
    panels = open_panels(count, name="film", grid=grid, ax=ax, figure=figure)
    steps = positions(next(iter(strips.values())), STEP)
    marks = moments_of(moments, steps)
    norm = LogNorm(10.0**-decades, 1.0)
    for place, (name, strip) in zip(panels.axes, strips.items(), strict=False):
        last = _draw(place, strip, {"norm": norm, "cmap": POSITIVE, **keywords})
        place.set_title(name, fontsize="small", pad=3)
        training_axis(place, steps)
    if under is not None:
        scalar_line(panels.axes[-1], under)
        training_axis(panels.axes[-1], steps)
    for place in panels.axes:
        place.set_xlim(*edges_of(steps)[[0, -1]])
    _finish(panels, last, decades, str(strips[name].dims[-1]))
    mark_moments(panels.axes, marks)
    panels.axes[-1].set_xlabel(under_training(panels.axes[-1].figure, marks), fontsize="small")
    values = np.concatenate([strip.values.reshape(-1) for strip in strips.values()])
    long_name = next(iter(strips.values())).attrs.get("long_name", quantity)
    panels.title(title or f"{long_name} over training", [nonfinite_note(values[~np.isnan(values)])])
    return panels.result()


def _strips(run: Any, layers: Any, quantity: str) -> dict[str, xr.DataArray]:
    """Profiles (step, time) by what their panels are called."""
    held = {name: run[name] for name in run} if isinstance(run, Mapping) and hasattr(run, "scalars") else None
    if held is None:
        expected = 'a followed training: rl.open("runs/a.zarr")'
        raise InputError(message("plot.film draws a run.", got=shown(run), expected=expected))
    wanted = list(held) if layers is None else [layers] if isinstance(layers, str) else list(layers)
    for name in wanted:
        if name not in held:
            raise InputError(message(f"No layer {name!r} in this run.", hint=did_you_mean(name, held)))
    found: dict[str, xr.DataArray] = {}
    for name in wanted:
        if quantity not in held[name]:
            continue
        profile = held[name].dataset[quantity]
        if DIRECTION not in profile.dims:
            found[name] = profile
            continue
        for i, way in enumerate(names_of(profile, DIRECTION)):
            found[f"{name} ({way})"] = profile.isel({DIRECTION: i})
    if not found or not next(iter(found.values())).sizes[STEP]:
        raise InputError(
            message(
                f"No {quantity} was recorded in this run.",
                got=f"{len(held)} layers: {', '.join(held) or 'none'}",
                hint="records need a loss; see run.notes",
            )
        )
    return found


def _under(run: Any, below: Any) -> xr.DataArray | None:
    if isinstance(below, xr.DataArray):
        if below.dims != (STEP,) or STEP not in below.coords:
            expected = f"one dimension, {STEP!r}, with the steps of the records"
            raise InputError(message("below= goes over training.", got=str(below.dims), expected=expected))
        return below
    if isinstance(below, str) and not below:
        return None
    present = list(map(str, run.scalars.data_vars))
    chosen = below if below is not None else next((name for name in _BELOW if name in present), None)
    if chosen is None:
        return None
    if chosen not in present:
        raise InputError(message(f"No scalar {chosen!r} in this run.", hint=did_you_mean(chosen, present)))
    scalar: xr.DataArray = run.scalars[chosen]
    return scalar


def _draw(ax: Any, strip: xr.DataArray, keywords: Mapping[str, Any]) -> Any:
    """One panel: training steps across, time steps down, the first on top."""
    down = next(str(dim) for dim in strip.dims if dim != STEP)
    shares: Numbers = share_of_peak(strip.transpose(STEP, down).values)
    # What is below the scale has its lowest colour, which is white; what is not a number is grey.
    floor = keywords["norm"].vmin if hasattr(keywords["norm"], "vmin") else 0.0
    shown_shares = np.where(np.isnan(shares), np.nan, np.maximum(shares, floor)).T
    across, along = edges_of(positions(strip, STEP)), edges_of(positions(strip, down))
    drawn = ax.pcolormesh(across, along, shown_shares, gid="film", rasterized=True, **keywords)
    ax.set_facecolor(POSITIVE.get_bad())
    ax.set_ylim(along[-1], along[0])
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.set_ylabel("time step" if down == TIME else "steps back from the end", fontsize="small")
    return drawn


def _finish(panels: Panels, drawn: Any, decades: float, down: str) -> None:
    """One colour bar for all, and ticks of training at the bottom only."""
    for place in panels.axes[:-1]:
        if panels.owners:
            place.tick_params(labelbottom=False)
    if panels.owners:
        bar = panels.owners[0].colorbar(drawn, ax=panels.axes, pad=0.02, fraction=0.05, aspect=30)
        bar.set_label(f"share of the record's own peak, white below 1e-{decades:g}", fontsize="small")
        bar.ax.tick_params(labelsize="small")
