"""``input_map``: which inputs a prediction hangs on, as a line over time, on an image, or in a text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from ..arguments import anything, as_numbers, whole
from ..errors import InputError, message
from ..measures.profiles import input_sensitivity
from ..measures.samples import peak_band
from ..recurrence.measures import safe_norm
from ..vocabulary import FEATURE, SAMPLE, TIME
from ._colour import POSITIVE, from_zero
from ._data import Numbers, axis_label, labelled, largest_magnitude, names_of, nonfinite_note, positions, require_time
from ._door import figure as figure_door
from ._images import Matrix, colour_bar, draw_image
from ._keywords import checked
from ._marks import step_axis
from ._padding import hidden
from ._panels import Grid, mark_steps, open_panels
from ._text import LETTER, height_of, shade_text, tokens_of, width_of

_SCALED = " × s.d. of the input"  # noqa: RUF001  a product in words
#: What ``rl.gradients`` says that it differentiated.
_TARGET = re.compile(r"gradient of (?P<of>.+) with respect to ")


@figure_door(shape=anything, tokens=anything, sample=whole(least=0))
def input_map(
    gradient: Any,
    x: Any = None,
    *,
    shape: Any = None,
    tokens: Any = None,
    sample: int | None = None,
    log: bool = False,
    colorbar: bool = True,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **line: Any,
) -> Any:
    """Draw |dL/dx_t| times the standard deviation of the input: what a change of usual size at each step does.

    A gradient at an input that never varies means nothing, however large it is. Each sample by its own peak, median and
    quartiles over samples; or one ``sample``.

    Parameters
    ----------
    gradient : (sample, time, feature)
        ``rl.gradients(model, x, y, wrt="input")``, ``trace["lstm"].input_grad``, or a plain array; for text the
        gradient of the embeddings.
    x : (sample, time, feature), optional
        The input: the standard deviation of each feature at each step over samples (over all steps, where there is one
        sample). Without it the gradient is drawn as it is.
    shape : (rows, columns), optional
        The steps are the pixels of an image, row by row.
    tokens : one for each step, optional
        The steps are a text, of which each token is shaded; a string is its letters.
    sample
        Only this one; of a text the first by default.
    log
        Logarithmic values.
    colorbar
        Draw the colour bar.
    title
        Instead of the one made from the labels.
    ax, figure
        One Axes, or a Figure or SubFigure to draw into.
    **line
        Properties of matplotlib's Line2D, where steps are neither pixels nor tokens.

    Returns
    -------
    1-D array with one Axes

    Raises
    ------
    InputError
        If the two, ``shape`` or ``tokens`` do not fit, or a keyword is unknown.

    References
    ----------
    Sobol, Kucherenko 2009, doi:10.1016/j.matcom.2009.01.023.
    """
    keywords = checked(line, Line2D, figure="input_map")
    array = labelled(gradient, "input_map", guess={2: (TIME, FEATURE), 3: (SAMPLE, TIME, FEATURE)})
    require_time(array, "input_map")
    values, note = _sensitivity(array, x)
    real = _real(array, values)
    values = np.where(real, values, np.nan)
    if tokens is not None and sample is None:
        sample = 0
    one = _picked(values, sample)
    target = _target(array)
    words = ("$|dL/dx_t|$" if target is None else f"|d {target} / $dx_t$|") + (_SCALED if x is not None else "")
    missing = nonfinite_note(np.where(real, values, 0.0))
    middle, low, high, said = _shape_of(one, real, sample)
    label = f"{words}, share of peak" if said else words
    head = " · ".join(str(part) for part in (array.attrs.get("layer"), f"what the {target or 'loss'} hangs on") if part)
    size = (5.2, 2.8)
    words_of = None if tokens is None else tokens_of(tokens, len(middle), "input_map")
    if shape is not None:  # so wide that the image fills the height, as its colour bar does
        rows, columns = _sides(shape, len(middle))
        wide = float(np.clip(3.0 * columns / rows, 1.5, 8.0))
        size = (wide + 0.6, min(3.0, wide * rows / columns))
    size = size if words_of is None else (LETTER * width_of(words_of), height_of(words_of) + 0.1)
    panels = open_panels(1, name="input_map", grid=Grid(size), ax=ax, figure=figure)
    place, extra = panels.axes[0], None
    look = {"cmap": POSITIVE, "norm": from_zero(middle, largest_magnitude(middle), log=log)}
    if words_of is not None:
        drawn, extra = shade_text(place, words_of, middle, look)
    elif shape is not None:
        drawn = _image(place, middle, _sides(shape, len(middle)), look)
    else:
        extra = "band: quartiles" if said else None
        _line(place, positions(array, TIME), (middle, low, high), keywords, log=log)
        panels.label(axis_label(array, TIME), label)
    if (words_of is not None or shape is not None) and colorbar:
        colour_bar([place], drawn, label)
    whose = f"sample {names_of(array, SAMPLE)[sample]}" if sample is not None and SAMPLE in array.dims else None
    panels.title(title or head, [whose, said, note, extra, missing])
    return panels.result()


def _sensitivity(array: xr.DataArray, x: Any) -> tuple[Numbers, str | None]:
    """(sample, time), and the note on what the standard deviation is of."""
    lead = [SAMPLE] if SAMPLE in array.dims else []
    rest = [d for d in array.dims if d not in (SAMPLE, TIME)]
    ordered = array.transpose(*lead, TIME, *rest).values
    ordered = ordered if lead else ordered[None]
    ordered = ordered.reshape(*ordered.shape[:2], -1)
    if x is None:
        return np.asarray(safe_norm(ordered, axis=2, xp=np), dtype=np.float64), None
    given = np.asarray(as_numbers("x", x))
    if given.size != ordered.size or (lead and list(given.shape[:2]) != list(ordered.shape[:2])):
        raise InputError(
            message("x= is not the input of this gradient.", got=f"shape {given.shape}", expected=f"{array.shape}")
        )
    whole: Numbers = given.reshape(ordered.shape)
    if len(whole) > 1:
        return input_sensitivity(ordered, whole), None
    spread = np.broadcast_to(whole[0].std(axis=0), ordered.shape[1:])
    with_spread = np.stack([whole[0] - spread, whole[0] + spread])  # two samples of that standard deviation
    return input_sensitivity(ordered, with_spread), "one sample: s.d. over its steps"


def _real(array: xr.DataArray, values: Numbers) -> Numbers:
    """(sample, time): True where a step is no padding."""
    padded = hidden(array)
    if padded is None:
        return np.ones(values.shape, dtype=bool)
    lead = [SAMPLE] if SAMPLE in padded.dims else []
    return np.broadcast_to(~padded.transpose(*lead, TIME).values, values.shape)


def _picked(values: Numbers, sample: int | None) -> Numbers:
    if sample is None:
        return values
    if sample >= len(values):
        raise InputError(
            message("There is no such sample.", got=f"sample={sample}", expected=f"0 to {len(values) - 1}")
        )
    return values[sample : sample + 1]


def _shape_of(values: Numbers, real: Numbers, sample: int | None) -> tuple[Numbers, Numbers, Numbers, str | None]:
    """Median and quartiles over samples, each by its own peak; of one sample its values."""
    if len(values) == 1:
        return values[0], values[0], values[0], None
    found = peak_band(values, real if sample is None else None)
    bad = (~np.isfinite(values) & real).any(axis=0)
    median, low, high = (np.where(bad, np.nan, part) for part in (found.median, found.low, found.high))
    return median, low, high, f"median of {len(values)} samples, each by its own peak"


def _target(array: xr.DataArray) -> str | None:
    """What was differentiated, by its name; None for the loss."""
    found = _TARGET.match(str(array.attrs.get("long_name", "")))
    return None if found is None or found["of"] == "loss" else found["of"]


def _sides(shape: Any, count: int) -> tuple[int, int]:
    """Rows and columns of an image of so many pixels."""
    sizes = np.atleast_1d(as_numbers("shape", shape)).astype(int)
    if sizes.size != 2 or int(sizes.prod()) != count or (sizes < 1).any():
        got = f"shape={tuple(sizes.tolist())} for {count} steps"
        raise InputError(message("shape= is not that of the image.", got=got, expected=f"rows x columns = {count}"))
    return int(sizes[0]), int(sizes[1])


def _image(ax: Any, values: Numbers, sides: tuple[int, int], look: dict[str, Any]) -> Any:
    """The steps as pixels, close to their colour bar."""
    rows, columns = sides
    ax.set_anchor("E")
    grid = Matrix(values.reshape(rows, columns), np.arange(columns), np.arange(rows), over_time=False)
    drawn = draw_image(ax, grid, look={**look, "aspect": "equal"})
    ax.set(xlabel="column", ylabel="row")
    return drawn


def _line(
    ax: Any, steps: Numbers, bands: tuple[Numbers, Numbers, Numbers], keywords: dict[str, Any], *, log: bool
) -> None:
    """The steps as they are, with the band."""
    middle, low, high = ([np.where(part > 0, part, np.nan) for part in bands]) if log else bands
    look = {"color": "#0072b2", "linewidth": 1.3, "gid": "sensitivity", "marker": "o" if len(steps) == 1 else None}
    ax.fill_between(steps, low, high, color="#0072b2", alpha=0.2, linewidth=0, gid="band")
    ax.plot(steps, middle, **{**look, **keywords})
    mark_steps(ax, steps[~np.isfinite(bands[0])])
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, None)
    ax.set_xlim(steps.min() - 0.5, steps.max() + 0.5)
    step_axis(ax, "x", steps)
