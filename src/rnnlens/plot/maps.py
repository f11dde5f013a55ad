"""``maps``: a quantity of a convolutional layer as pictures, a panel per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import as_numbers, integer
from ..errors import InputError
from ..recurrence.measures import safe_norm
from ..vocabulary import CHANNEL, DIRECTION, SAMPLE, SPACE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing

#: Dimensions of a plain array, as ConvLSTM layers of Keras order them.
_GUESS = {5: (SAMPLE, TIME, *SPACE[2], CHANNEL)}
#: Largest number of rows and columns of one map.
_CELLS = (200, 200)


@drawing(AxesImage, extra=_images.IMSHOW, sample=integer(least=0), channel=integer(least=0), steps=as_numbers)
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

    Examples
    --------
    >>> states = np.random.default_rng(0).normal(size=(2, 5, 8, 8, 3))  # (sample, time, row, column, channel)
    >>> axes = rl.plot.maps(states, channel=0)
    >>> len(axes)  # one per step
    5
    """
    whole_array = _data.label_array(array, "maps", dims=dims, guess=_GUESS)
    _data.require_time(whole_array, "maps")
    space_dims = _space_dims(whole_array)
    one_sample = _select_position(whole_array, SAMPLE, sample) if SAMPLE in whole_array.dims or sample else whole_array
    notes = _samples.notes_of(one_sample)
    pictures, reduction_text = _reduce_channels(one_sample, channel, space_dims)
    time_attrs = {"long_name": _data.axis_label(pictures, TIME)}
    pictures = all_pictures = pictures.assign_coords({TIME: (TIME, _data.positions(pictures, TIME), time_attrs)})
    time_indices, panel_indices, panel_note = _step_indices(pictures, steps), [0], None
    if len(space_dims) == 2:
        panel_indices, panel_note = (
            _data.select_evenly(len(time_indices), max_panels, "steps", page=page)
            if steps is None
            else (time_indices, None)
        )
    else:
        pictures = pictures.isel({TIME: time_indices})
    views = _data.direction_views(pictures)
    values = _samples.nan_at_padding(all_pictures).values
    common_limit = limit if limit is not None else _data.largest_magnitude(values)
    is_one_signed = channel is None and (_axes.is_positive(values) or bool(reduction_text))
    style: dict[str, Any] = {"aspect": "equal" if len(space_dims) == 2 else "auto"}
    style |= {**_axes.colour_scale(values, common_limit, log=log, positive=is_one_signed), **image}
    image_dims = _images.ImageDims(space_dims[1] if len(space_dims) == 2 else TIME, space_dims[0], is_stacked=False)
    sizes = _panel_sizes(len(panel_indices), [pictures.sizes[dim] for dim in space_dims], len(views))
    panels = _frame.open_panels(
        "maps", len(panel_indices), ax, figure, directions=[view.name for view in views], **sizes
    )
    images = []
    for view, direction_axes in zip(views, panels.axes_by_direction, strict=True):
        for panel_ax, step in zip(direction_axes, panel_indices, strict=True):
            picture = view.data if len(space_dims) == 1 else view.data.isel({TIME: step})
            images.append(_images.draw_image(panel_ax, image_dims.matrix(picture), style=style, cell_limits=_CELLS))
            if len(space_dims) == 2:
                panel_ax.set_title(f"step {_data.positions(view.data, TIME)[step]:g}", fontsize="small", pad=3)
    y_label, x_label = (_data.axis_label(pictures, dim) for dim in (image_dims.vertical, image_dims.horizontal))
    panels.label_axes(x_label, y_label)
    value_label = (
        f"norm of {_data.value_label(one_sample)}"
        if reduction_text and channel is None
        else _data.value_label(one_sample)
    )
    _images.colour_bars(panels, images, value_label, shared=True, enabled=colorbar)
    panels.hide_inner_ticks()
    merge_note = _images.merge_note(image_dims.shape(all_pictures), _CELLS, y_label, x_label)
    sample_title = _data.position_title(whole_array, SAMPLE, sample) if SAMPLE in whole_array.dims else ""
    default_title = " · ".join(filter(None, [_data.title_of(one_sample), reduction_text, sample_title]))
    return panels.with_title(
        title or default_title, [_data.zero_note(one_sample.values), panel_note, merge_note, *notes]
    )


def _space_dims(array: xr.DataArray) -> list[str]:
    """Return the axes of space, height before width; raise InputError for dimensions that the figure cannot draw."""
    space_dims = [name for space_axis in SPACE[3] for name in (space_axis, f"input_{space_axis}") if name in array.dims]
    received = f"dimensions ({', '.join(map(str, array.dims))})"
    if not space_dims:
        message, hint = "plot.maps needs axes of space.", "draw units by time with plot.heatmap; name axes with dims="
        raise InputError(message, got=received, expected="height and width, or width alone", hint=hint)
    if len(space_dims) > 2:
        message, depth_dim = "plot.maps draws at most two axes of space.", space_dims[0]
        hint = f"select a slice, array.isel({depth_dim}=0), or take the norm, (array**2).sum({depth_dim!r}) ** 0.5"
        raise InputError(message, got=received, expected=f"one value of {depth_dim!r}", hint=hint)
    known_dims = {SAMPLE, TIME, DIRECTION, _channel_dim(array), *space_dims}
    other_dims = [str(dim) for dim in array.dims if dim not in known_dims]
    if other_dims:
        message, hint = "plot.maps has no place for this dimension.", f"select one, array.isel({other_dims[0]}=0)"
        raise InputError(message, got=", ".join(other_dims), expected="sample, time, space and channel", hint=hint)
    return space_dims


def _channel_dim(array: xr.DataArray) -> str | None:
    """Return the dimension of channels; None if there is none."""
    return CHANNEL if CHANNEL in array.dims else _data.unit_dim(array)


def _select_position(array: xr.DataArray, dim: str | None, index: int) -> xr.DataArray:
    """Select one position along a dimension. Raise InputError if there is no such position."""
    count = 0 if dim is None else array.sizes.get(dim, 0)
    if index >= count:
        name = SAMPLE if dim == SAMPLE else CHANNEL
        available_text = f" of {count}" if count else f", dimensions ({', '.join(map(str, array.dims))})"
        received = f"{name}={index}{available_text}"
        expected = f"{name}=0 to {count - 1}" if count else f"an array with {name}s"
        raise InputError(f"There is no such {name}.", got=received, expected=expected)
    return array.isel({dim: index}, drop=True)


def _reduce_channels(array: xr.DataArray, channel: int | None, space_dims: list[str]) -> tuple[xr.DataArray, str]:
    """Return the values over time and space, with channels reduced, and text on how they were reduced."""
    channels = _channel_dim(array)
    if channel is not None:
        return _select_position(array, channels, channel), f"channel {channel}"
    if channels is None:
        return array, ""
    norms = safe_norm(array.values, axis=array.get_axis_num(channels))
    return array.isel({channels: 0}, drop=True).copy(data=norms), "norm over channels"


def _step_indices(array: xr.DataArray, steps: Any) -> list[int]:
    """Return the indices of the chosen time steps; all by default. Raise InputError if a step does not exist."""
    known_steps = _data.positions(array, TIME)
    if steps is None:
        return list(range(len(known_steps)))
    requested_steps = np.atleast_1d(steps).reshape(-1)
    missing_steps = [step for step in requested_steps.tolist() if step not in known_steps]
    if missing_steps or not requested_steps.size:
        received = f"steps={requested_steps.tolist()}"
        raise InputError(
            "There is no such step.", got=received, expected=f"steps from {known_steps[0]} to {known_steps[-1]}"
        )
    return [int(np.flatnonzero(known_steps == step)[0]) for step in requested_steps]


def _panel_sizes(count: int, picture_shape: list[int], direction_count: int) -> dict[str, Any]:
    """Return the size of a panel in the shape of the pictures, the margin, and rows and columns."""
    if len(picture_shape) == 1:
        return {"size": (6.0, 2.6), "margin": (1.6, 1.1), "ticks": "x-small"}
    ratio = float(np.clip(picture_shape[0] / picture_shape[1], 0.3, 3.0))
    width = (3.4 if count == 1 else 1.45) / max(1.0, ratio**0.5)
    shape = _frame.near_square(count, aspect=2.0 * ratio / direction_count)
    return {"size": (width, width * ratio + 0.3), "margin": (1.9, 1.1), "shape": shape, "ticks": "x-small"}
