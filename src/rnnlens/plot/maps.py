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
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing

#: Dimensions of a plain array, as ConvLSTM layers of Keras order them.
_GUESS = {5: (SAMPLE, TIME, *SPACE[2], CHANNEL)}
#: Largest number of rows and columns of one map.
_CELLS = (200, 200)


@drawing(AxesImage, extra=_images.IMSHOW, sample=whole(least=0), channel=whole(least=0), steps=as_numbers)
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

    Returns
    -------
    1-D array of Axes, step by step, forward before backward
    """
    whole_array = _data.labelled(array, "maps", dims=dims, guess=_GUESS)
    _data.require_time(whole_array, "maps")
    space = _space(whole_array)
    one_sample = _place(whole_array, SAMPLE, sample) if SAMPLE in whole_array.dims or sample else whole_array
    missing = _samples.notes_of(one_sample)
    pictures, words = _pictures(one_sample, channel, space)
    words_of_time = {"long_name": _data.axis_label(pictures, TIME)}
    pictures = whole_pictures = pictures.assign_coords({TIME: (TIME, _data.positions(pictures, TIME), words_of_time)})
    times, picked, thinned = _steps(pictures, steps), [0], None
    if len(space) == 2:
        picked, thinned = _data.choose(len(times), max_panels, "steps", page=page) if steps is None else (times, None)
    else:
        pictures = pictures.isel({TIME: times})
    shown = _data.halves(pictures)
    values = _samples.without_padding(whole_pictures).values
    top = limit if limit is not None else _data.largest_magnitude(values)
    positive = channel is None and (_axes.is_positive(values) or bool(words))
    look: dict[str, Any] = {"aspect": "equal" if len(space) == 2 else "auto"}
    look |= {**_axes.colours(values, top, log=log, positive=positive), **image}
    dims_of = _images.ImageDims(space[1] if len(space) == 2 else TIME, space[0], stacked=False)
    sizes = _sizes(len(picked), [pictures.sizes[dim] for dim in space], len(shown))
    panels = _frame.open_panels("maps", len(picked), ax, figure, ways=[half.name for half in shown], **sizes)
    drawn = []
    for half, axes in zip(shown, panels.halves, strict=True):
        for place, step in zip(axes, picked, strict=True):
            one = half.data if len(space) == 1 else half.data.isel({TIME: step})
            drawn.append(_images.draw_image(place, dims_of.matrix(one), look=look, limits=_CELLS))
            if len(space) == 2:
                place.set_title(f"step {_data.positions(half.data, TIME)[step]:g}", fontsize="small", pad=3)
    down, across = (_data.axis_label(pictures, dim) for dim in (dims_of.down, dims_of.across))
    panels.label(across, down)
    value = f"norm of {_data.value_label(one_sample)}" if words and channel is None else _data.value_label(one_sample)
    _images.colour_bars(panels, drawn, value, shared=True, wanted=colorbar)
    panels.outer_ticks_only()
    merged = _images.merge_note(dims_of.shape(whole_pictures), _CELLS, down, across)
    number = _data.place_words(whole_array, SAMPLE, sample) if SAMPLE in whole_array.dims else ""
    head = " · ".join(filter(None, [_data.title_of(one_sample), words, number]))
    return panels.titled(title or head, [thinned, merged, *missing])


def _space(array: xr.DataArray) -> list[str]:
    """Return the axes of space, height before width; raise InputError for dimensions that the figure cannot draw."""
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
    return CHANNEL if CHANNEL in array.dims else _data.unit_dim(array)


def _place(array: xr.DataArray, dim: str | None, index: int) -> xr.DataArray:
    """Select one position along a dimension. Raise InputError if there is no such position."""
    count = 0 if dim is None else array.sizes.get(dim, 0)
    if index >= count:
        name = SAMPLE if dim == SAMPLE else CHANNEL
        there = f" of {count}" if count else f", dimensions ({', '.join(map(str, array.dims))})"
        got = f"{name}={index}{there}"
        expected = f"{name}=0 to {count - 1}" if count else f"an array with {name}s"
        raise InputError(f"There is no such {name}.", got=got, expected=expected)
    return array.isel({dim: index}, drop=True)


def _pictures(one: xr.DataArray, channel: int | None, space: list[str]) -> tuple[xr.DataArray, str]:
    """Return the values over time and space, with channels reduced, and text on how they were reduced."""
    channels = _channels(one)
    if channel is not None:
        return _place(one, channels, channel), f"channel {channel}"
    if channels is None:
        return one, ""
    norms = safe_norm(one.values, axis=one.get_axis_num(channels))
    return one.isel({channels: 0}, drop=True).copy(data=norms), "norm over channels"


def _steps(array: xr.DataArray, steps: Any) -> list[int]:
    """Return the indices of the chosen time steps; all by default. Raise InputError if a step does not exist."""
    known = _data.positions(array, TIME)
    if steps is None:
        return list(range(len(known)))
    wanted = np.atleast_1d(steps).reshape(-1)
    absent = [step for step in wanted.tolist() if step not in known]
    if absent or not wanted.size:
        got = f"steps={wanted.tolist()}"
        raise InputError("There is no such step.", got=got, expected=f"steps from {known[0]} to {known[-1]}")
    return [int(np.flatnonzero(known == step)[0]) for step in wanted]


def _sizes(count: int, sizes: list[int], ways: int) -> dict[str, Any]:
    """Return the size of a panel in the shape of the pictures, the margin, and rows and columns."""
    if len(sizes) == 1:
        return {"size": (6.0, 2.6), "margin": (1.6, 1.1), "ticks": "x-small"}
    ratio = float(np.clip(sizes[0] / sizes[1], 0.3, 3.0))
    width = (3.4 if count == 1 else 1.45) / max(1.0, ratio**0.5)
    shape = _frame.near_square(count, aspect=2.0 * ratio / ways)
    return {"size": (width, width * ratio + 0.3), "margin": (1.9, 1.1), "shape": shape, "ticks": "x-small"}
