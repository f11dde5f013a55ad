"""``hidden_attention``: what each output step of a Mamba channel takes from each input step, held and in total."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.image import AxesImage

from ..arguments import anything, integer
from ..errors import InputError
from ..vocabulary import CHANNEL, IN_TIME, OUT_TIME, SAMPLE
from . import _axes, _data, _frame, _images
from ._call import drawing
from ._data import Numbers
from ._interactive import interactive, rounded
from .texts import tokens_of
from .time_jacobian import draw_matrix

#: Coordinate of the maps, and the titles of their panels.
_MAP, _TITLES = "map", {"frozen": "coefficients held", "total": "total"}
#: Number of tokens that are written along an axis.
_TOKENS = 40
#: Largest number of cells of a page, in both maps of a channel: about 2 MB.
_MOST_CELLS = 300_000


@drawing(AxesImage, extra=_images.IMSHOW, sample=integer(least=0), tokens=anything)
def hidden_attention(
    attention: Any,
    *,
    sample: int = 0,
    tokens: Any = None,
    max_rows: int = 4,
    page: int | None = None,
    log: bool = False,
    limit: float | None = None,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **image: Any,
) -> Any:
    """Draw the hidden attention of channels of a Mamba layer: coefficients held at the left, total at the right.

    ``.save("attention.html")`` and a notebook show it as a page that says the numbers of the cell that is pointed at,
    up to 387 steps.

    Input steps across, output steps upward. White is 0, and both signs have a colour. Both maps of a channel are
    divided by their largest magnitude. The title says how much of the total maps the held ones leave out: the norm of
    the difference relative to that of the total, over all channels as drawn.

    Parameters
    ----------
    attention : (map, sample, channel, out_time, in_time)
        Result of :func:`rnnlens.hidden_attention`.
    sample
        Sample to draw.
    tokens : one for each step, optional
        Words of the sample, written along both axes in place of the steps.

    Returns
    -------
    1-D array of Axes, channel by channel: held, total

    References
    ----------
    Ali, Zimerman, Wolf 2024, arXiv:2403.01590.

    Examples
    --------
    >>> attention = rl.hidden_attention(mamba, ids, "layers.0.mixer", at={"channel": [0, 1]})
    >>> axes = rl.plot.hidden_attention(attention, tokens=list("recall"))
    >>> axes.save("attention.html")
    """
    array = _data.label_array(attention, "hidden_attention", dims=None, guess={})
    maps = _maps_of_sample(array, sample)
    channels, note = _data.select_evenly(maps.sizes[CHANNEL], max_rows, "channels", page=page)
    shown = maps.isel({CHANNEL: channels})
    largest = [_data.largest_magnitude(shown.isel({CHANNEL: row}).values) or 1.0 for row in range(len(channels))]
    shares = shown / xr.DataArray(largest, dims=CHANNEL)
    steps = [_data.positions(array, dim) for dim in (IN_TIME, OUT_TIME)]
    token_texts = None if tokens is None else tokens_of(tokens, max(len(along) for along in steps), "hidden_attention")
    panels = _frame.open_panels(
        "hidden_attention", 2 * len(channels), ax, figure, size=(3.0, 2.4), margin=(1.6, 1.0), shape=(len(channels), 2)
    )
    pairs = [list(panels.axes[2 * row : 2 * row + 2]) for row in range(len(channels))]
    images = []
    for row, pair in enumerate(pairs):
        one = shares.isel({CHANNEL: row})
        for panel_ax, kind in zip(pair, _TITLES, strict=True):
            matrix = np.asarray(one.sel({_MAP: kind}).values)
            padding = np.zeros(matrix.shape, bool)
            images.append(draw_matrix(panel_ax, matrix, padding, array, limit or 1.0, _signed(image, log), log=log))
            panel_ax.set_title(
                f"{_data.position_title(shown, CHANNEL, row)} · {_TITLES[kind]}", fontsize="small", pad=3
            )
            if token_texts is not None:
                for axis, along in zip("xy", steps, strict=True):
                    _write_tokens(panel_ax, axis, along, token_texts)
    _images.colour_bars(panels, images, "share of the channel's largest", shared=True, enabled=colorbar)
    panels.label_axes(_data.axis_label(array, IN_TIME), _data.axis_label(array, OUT_TIME))
    if token_texts is None:
        panels.hide_inner_ticks()
    sample_title = _data.position_title(array, SAMPLE, sample) if array.sizes[SAMPLE] > 1 else None
    left_out = _left_out(*(shares.sel({_MAP: kind}).values for kind in _TITLES))
    default_title = _data.layer_title(array.attrs, left_out)
    drawn = panels.with_title(title or default_title, [sample_title, note])
    cell_count = 2 * steps[0].size * steps[1].size
    if cell_count > _MOST_CELLS:
        return drawn
    scene = {
        "kind": "attention",
        "title": title or default_title,
        "notes": [text for text in (sample_title, note) if text],
        "titles": list(_TITLES.values()),
        "in": [int(step) for step in steps[0]],
        "out": [int(step) for step in steps[1]],
        "words": token_texts,
        "channels": [
            {
                "name": str(shown[CHANNEL].values[row]) if CHANNEL in shown.coords else str(channels[row]),
                "largest": rounded(largest[row]),
                "maps": [
                    [rounded(value) for value in np.ravel(shown.isel({CHANNEL: row}).sel({_MAP: kind}).values)]
                    for kind in _TITLES
                ],
            }
            for row in range(min(len(channels), _MOST_CELLS // cell_count))
        ],
    }
    return interactive(drawn, scene)


def _maps_of_sample(array: xr.DataArray, sample: int) -> xr.DataArray:
    """Return the maps of one sample, (map, channel, out_time, in_time); raise InputError for another array."""
    expected = (_MAP, SAMPLE, CHANNEL, OUT_TIME, IN_TIME)
    if set(array.dims) != set(expected) or _MAP not in array.coords or set(_TITLES) != set(array[_MAP].values.tolist()):
        raise InputError(
            "plot.hidden_attention draws the maps of channels of a Mamba layer.",
            got=f"dimensions ({', '.join(map(str, array.dims))})",
            expected=", ".join(expected),
            hint="rl.plot.hidden_attention(rl.hidden_attention(model, x))",
        )
    if sample >= array.sizes[SAMPLE]:
        raise InputError("There is no such sample.", got=f"sample={sample}", expected=f"0 to {array.sizes[SAMPLE] - 1}")
    return array.transpose(*expected).isel({SAMPLE: sample}, drop=True)


def _signed(image: dict[str, Any], log: bool) -> dict[str, Any]:
    """Return the properties of an image with the colours of signed values, also where a map has one sign."""
    return {**_axes.colour_scale(np.zeros(1), 1.0, log=log, positive=False), **image}


def _write_tokens(ax: Any, axis: str, steps: Numbers, tokens: list[str]) -> None:
    """Write the tokens of the steps along an axis, every n-th one if there are many."""
    _images.set_named_ticks(ax, axis, steps, [tokens[int(step)] for step in steps], most_ticks=_TOKENS)
    ax.tick_params(axis, labelsize="x-small", labelrotation=90 if axis == "x" and max(map(len, tokens)) > 2 else 0)


def _left_out(frozen: Numbers, total: Numbers) -> str:
    """Return text on the norm of what the held maps leave out, relative to the total ones."""
    norm = float(np.linalg.norm(total.astype(float)))
    if not norm > 0 or not np.isfinite(frozen).all():
        return "hidden attention"
    share = np.linalg.norm((total - frozen).astype(float)) / norm
    return f"held coefficients leave out {100 * share:.0f} % of the total"
