"""``maps``: a quantity of a convolutional layer as pictures, a panel per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import as_numbers, whole
from ..errors import InputError
from ..recurrence.measures import safe_norm
from ..vocabulary import CHANNEL, DIRECTION, SAMPLE, SPACE, TIME
from ._axes import DIVERGING, POSITIVE, around_zero, from_zero, is_positive
from ._call import drawing
from ._data import (
    DirectionView,
    axis_label,
    choose,
    halves,
    labelled,
    largest_magnitude,
    place_words,
    positions,
    require_time,
    title_of,
    unit_dim,
    value_label,
)
from ._frame import Grid, near_square, open_panels
from ._images import IMSHOW, Matrix, colour_bars, draw_image, merge_note, steps_for
from ._samples import hidden, notes_of, without_padding

#: Dimensions of a plain array, as ConvLSTM layers of Keras order them.
_GUESS = {5: (SAMPLE, TIME, *SPACE[2], CHANNEL)}
#: Largest number of rows and columns of one map.
_CELLS = (200, 200)


@drawing(AxesImage, extra=IMSHOW, sample=whole(least=0), channel=whole(least=0), steps=as_numbers)
def maps(
    array: Any,
    *,
    sample: int = 0,
    channel: int | None = None,
    steps: Sequence[int] | None = None,
    dims: Sequence[str] | None = None,
    limit: float | None = None,
    log: bool = False,
    max_panels: int = 12,
    page: int | None = None,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw a quantity of one sample of a convolutional layer as pictures over space, a panel per step.

    The colours are the Euclidean norm over channels, from white at 0, or one channel with its signs, white at 0. All
    panels have one scale, from the largest finite value of the sample at any step, drawn or not. A layer with one axis
    of space is one picture, its width by time. Masked steps are grey.

    Parameters
    ----------
    array : (sample, time, height, width, channel) or (sample, time, width, channel), in any order, also with direction
        A DataArray, such as ``trace["conv"].hidden_grad``; or a plain array of rank 5, in that order without ``dims``.
    sample
        Sample to draw.
    channel
        Channel to draw instead of the norm over channels.
    steps
        Time steps to draw; by default ``max_panels`` of them, evenly spaced, with the first and the last.
    limit
        Largest magnitude of the colour scale. Values beyond it have the end colours.
    log
        Logarithmic colours over 4 decades.

    Returns
    -------
    1-D array of Axes, step by step, forward before backward
    """
    whole_array = labelled(array, "maps", dims=dims, guess=_GUESS)
    require_time(whole_array, "maps")
    space = _space(whole_array)
    one = _place(whole_array, SAMPLE, sample) if SAMPLE in whole_array.dims or sample else whole_array
    missing = notes_of(one)
    pictures, words = _pictures(one, channel, space)
    words_of_time = {"long_name": axis_label(pictures, TIME)}
    pictures = pictures.assign_coords({TIME: (TIME, positions(pictures, TIME), words_of_time)})
    times = _steps(pictures, steps)
    if len(space) == 2:
        picked, thinned = choose(len(times), max_panels, "steps", page=page) if steps is None else (times, None)
    else:
        picked, thinned = [0], None
    shown = halves(pictures.isel({TIME: times}) if len(space) == 1 else pictures)
    values = without_padding(pictures).values
    top = limit if limit is not None else largest_magnitude(values)
    look: dict[str, Any] = {"cmap": DIVERGING, "norm": around_zero(top, log=log)}
    if channel is None and (is_positive(values) or words):
        look = {"cmap": POSITIVE, "norm": from_zero(values, top, log=log)}
    grid = _grid(len(picked), [pictures.sizes[dim] for dim in space], len(shown))
    ways = [half.name for half in shown]
    panels = open_panels("maps", len(picked), grid, ways, ax, figure)
    drawn = [
        _draw(place, half, step, space, {**look, **image})
        for half, axes in zip(shown, panels.halves, strict=True)
        for place, step in zip(axes, picked, strict=True)
    ]
    down, across = (axis_label(pictures, dim) for dim in (space if len(space) == 2 else (space[0], TIME)))
    panels.label(across, down)
    value = value_label(one)
    colour_bars(panels, drawn, f"norm of {value}" if words and channel is None else value, shared=True, wanted=colorbar)
    if panels.owners:
        panels.outer_ticks_only()
    size = [pictures.sizes[dim] for dim in (space if len(space) == 2 else (space[0], TIME))]
    merged = merge_note(steps_for((size[0], size[1]), _CELLS), down, across)
    number = [place_words(whole_array, SAMPLE, sample)] if SAMPLE in whole_array.dims else []
    return panels.titled(
        title or " · ".join([*filter(None, [title_of(one), words]), *number]), [thinned, merged, *missing]
    )


def _space(array: xr.DataArray) -> list[str]:
    """Return the axes of space, height before width.

    Raise InputError if there is none, if there are three, or if a dimension has no place in the figure.
    """
    found = [name for axis in SPACE[3] for name in (axis, f"input_{axis}") if name in array.dims]
    got = f"dimensions ({', '.join(map(str, array.dims))})"
    if not found:
        what, hint = "plot.maps needs axes of space.", "draw units by time with plot.heatmap; name axes with dims="
        raise InputError(what, got=got, expected="height and width, or width alone", hint=hint)
    if len(found) > 2:
        what, depth = "plot.maps draws at most two axes of space.", found[0]
        hint = f"select a slice, array.isel({depth}=0), or take the norm, (array**2).sum({depth!r}) ** 0.5"
        raise InputError(what, got=got, expected=f"one value of {depth!r}", hint=hint)
    known = {SAMPLE, TIME, DIRECTION, _channels(array), *found}
    others = [str(dim) for dim in array.dims if dim not in known]
    if others:
        what, hint = "plot.maps has no place for this dimension.", f"select one, array.isel({others[0]}=0)"
        raise InputError(what, got=", ".join(others), expected="sample, time, space and channel", hint=hint)
    return found


def _channels(array: xr.DataArray) -> str | None:
    """Return the dimension of channels; None if there is none."""
    return CHANNEL if CHANNEL in array.dims else unit_dim(array)


def _place(array: xr.DataArray, dim: str | None, index: int) -> xr.DataArray:
    """Select one position along a dimension. Raise InputError if there is no such position."""
    count = 0 if dim is None else array.sizes.get(dim, 0)
    if index >= count:
        name = SAMPLE if dim == SAMPLE else CHANNEL
        got = (
            f"{name}={index} of {count}" if count else f"{name}={index}, dimensions ({', '.join(map(str, array.dims))})"
        )
        expected = f"{name}=0 to {count - 1}" if count else f"an array with {name}s"
        raise InputError(f"There is no such {name}.", got=got, expected=expected)
    return array.isel({dim: index}, drop=True)


def _pictures(one: xr.DataArray, channel: int | None, space: list[str]) -> tuple[xr.DataArray, str]:
    """Return the values over time and space, and the words for what became of the channels."""
    channels = _channels(one)
    if channel is not None:
        return _place(one, channels, channel), f"channel {channel}"
    if channels is None:
        return one, ""
    norms = safe_norm(one.values, axis=one.get_axis_num(channels), xp=np)
    return one.isel({channels: 0}, drop=True).copy(data=norms), "norm over channels"


def _steps(array: xr.DataArray, steps: Any) -> list[int]:
    """Return the indices of the chosen time steps; all by default. Raise InputError if a step does not exist."""
    known = positions(array, TIME)
    if steps is None:
        return list(range(len(known)))
    wanted = np.atleast_1d(steps).reshape(-1)
    absent = [step for step in wanted.tolist() if step not in known]
    if absent or not wanted.size:
        got = f"steps={wanted.tolist()}"
        raise InputError("There is no such step.", got=got, expected=f"steps from {known[0]} to {known[-1]}")
    return [int(np.flatnonzero(known == step)[0]) for step in wanted]


def _grid(count: int, sizes: list[int], ways: int) -> Grid:
    """Return the size of a panel in the shape of the pictures, and rows and columns."""
    if len(sizes) == 1:
        return Grid((6.0, 2.6), margin=(1.6, 1.1))
    ratio = float(np.clip(sizes[0] / sizes[1], 0.3, 3.0))
    width = (3.4 if count == 1 else 1.45) / max(1.0, ratio**0.5)
    shape = near_square(count, aspect=2.0 * ratio / ways)
    return Grid((width, width * ratio + 0.3), margin=(1.9, 1.1), shape=shape)


def _draw(ax: Any, half: DirectionView, step: int, space: list[str], look: dict[str, Any]) -> Any:
    """Draw the picture of one step; of a layer with one axis of space, all steps."""
    strip = len(space) == 1
    one = half.data if strip else half.data.isel({TIME: step})
    down, across = (space[0], TIME) if strip else space
    padded = hidden(one)
    empty = xr.zeros_like(one, dtype=bool) | (False if padded is None else padded)
    values, nowhere = (np.asarray(part.transpose(down, across).values) for part in (without_padding(one), empty))
    matrix = Matrix(values, positions(one, across), positions(one, down), nowhere, strip)
    drawn = draw_image(ax, matrix, look={"aspect": "auto" if strip else "equal", **look}, limits=_CELLS)
    if not strip:
        ax.set_title(f"step {positions(half.data, TIME)[step]:g}", fontsize="small", pad=3)
    ax.tick_params(labelsize="x-small")
    return drawn
