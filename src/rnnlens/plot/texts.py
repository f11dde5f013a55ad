"""``input_map``: sensitivity to each input step; ``unit_over_text``: a unit's state over tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PatchCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ..arguments import anything, as_numbers, listed, text, whole
from ..errors import InputError, shown
from ..measures.profiles import by_own_peak, input_sensitivity, peak_band
from ..recurrence.measures import safe_norm
from ..vocabulary import FEATURE, GATE, IN_TIME, OUT_TIME, SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers

#: Letters per line, and size in inches of one letter and of one line.
WIDTH, LETTER, LINE = 72, 0.092, 0.21
#: Largest number of lines of one panel.
MOST_LINES = 40


def tokens_of(tokens: Any, count: int, figure: str) -> list[str]:
    """Return the tokens as a list of texts, a string as its letters; raise InputError unless there is one per step."""
    several = isinstance(tokens, str | Sequence) or (isinstance(tokens, np.ndarray) and tokens.ndim == 1)
    if not several or len(tokens) != count:
        got = f"{len(tokens)} tokens" if several else shown(tokens)
        raise InputError(f"plot.{figure} writes one token for each step.", got=got, expected=f"{count} of them")
    return [str(token).replace("\n", "↵").replace("\t", "→") or " " for token in tokens]


def places_of(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return line and column of the first letter of each token, in lines of about equal length."""
    total = sum(map(len, tokens))
    width = min(WIDTH, -(-total // -(-total // WIDTH)) + max(map(len, tokens)))
    places, line, column = [], 0, 0
    for token in tokens:
        if column and column + len(token) > width:
            line, column = line + 1, 0
        places.append((line, column))
        column += len(token)
        if token.endswith("↵"):
            line, column = line + 1, 0
    return places


def text_size(tokens: Sequence[str]) -> tuple[int, int]:
    """Return the letters of the longest line, at least a third of a full line, and the number of lines shown."""
    places = places_of(tokens)
    longest = max(column + len(token) for (_, column), token in zip(places, tokens, strict=True))
    return max(WIDTH // 3, longest), min(places[-1][0] + 1, MOST_LINES)


def shade_text(ax: Any, tokens: Sequence[str], values: Numbers, look: dict[str, Any]) -> tuple[Any, str | None]:
    """Write the tokens on colours of their values; return the collection of boxes and the note on omitted tokens."""
    places = places_of(tokens)
    kept = [i for i, (line, _) in enumerate(places) if line < MOST_LINES]
    boxes = [Rectangle((places[i][1], places[i][0]), len(tokens[i]), 0.92) for i in kept]
    drawn = PatchCollection(boxes, linewidth=0, gid="tokens", **look)
    shown = np.ma.masked_invalid(np.asarray(values, dtype=float)[kept])
    drawn.set_array(shown)
    ax.add_collection(drawn)
    ax.set(xlim=(-0.5, text_size(tokens)[0] + 0.5), ylim=(places[kept[-1]][0] + 1.2, -0.3))
    colours = drawn.norm(shown)
    for i, share in zip(kept, np.ma.filled(colours, np.nan), strict=True):
        line, column = places[i]
        dark = np.isfinite(share) and (share > 0.85 or (share < 0.15 and look.get("both")))
        for offset, letter in enumerate(tokens[i]):
            ax.text(
                column + offset + 0.5, line + 0.5, letter, ha="center", va="center", family="monospace",
                fontsize="small", color="white" if dark else "black", clip_on=True, parse_math=False,
            ).set_in_layout(False)  # fmt: skip
        if not np.isfinite(share):
            ax.plot([column + 0.5 * len(tokens[i])], [line + 0.5], "x", color="black", gid="non-finite")
    ax.set_axis_off()
    note = None if len(kept) == len(tokens) else f"first {len(kept)} of {len(tokens)} tokens"
    return drawn, note


_SCALED = " × s.d. of the input"  # noqa: RUF001  a product in words
#: Long name of a gradient, from which the name of its target is read.
_TARGET = re.compile(r"gradient of (?P<of>.+) with respect to ")


@drawing(Line2D, shape=anything, tokens=anything, sample=whole(least=0))
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
    """Draw |dL/dx_t| times the standard deviation of the input at each step.

    This is the effect of a change of typical size. Without the factor, inputs that never vary could have large values.
    The figure shows median and quartiles over samples, each divided by its own peak; or one ``sample``.

    Parameters
    ----------
    gradient : (sample, time, feature)
        ``rl.gradients(model, x, y, wrt="input")``, ``trace["lstm"].input_grad``, or a plain array; for text the
        gradient of the embeddings. Or a time Jacobian with one output step, such as ``rl.jacobian(model, ids,
        wrt="embedding.output", measure="norm", at={"out_time": [-1]})``: the effect of each token on that step.
    x : (sample, time, feature), optional
        The input, for the standard deviation of each feature at each step over samples (for one sample, over all
        steps). Without it the gradient itself is drawn.
    shape : (rows, columns), optional
        Shape of an image whose pixels, row by row, are the steps.
    tokens : one for each step, optional
        Tokens of a text, each shaded by the value of its step; a string is split into letters.
    sample
        Number of the only sample to draw; for a text the first by default.
    log
        Logarithmic values.

    Returns
    -------
    1-D array with one Axes

    References
    ----------
    Sobol, Kucherenko 2009, doi:10.1016/j.matcom.2009.01.023.
    """
    array = _data.labelled(gradient, "input_map", guess={2: (TIME, FEATURE), 3: (SAMPLE, TIME, FEATURE)})
    array, output_step = _row_of_jacobian(array)
    _data.require_time(array, "input_map")
    values, note = _sensitivity(array, x)
    real = _samples.real_steps(array)
    missing = _data.nonfinite_note(np.where(real, values, 0.0))
    values = np.where(real, values, np.nan)
    sample = 0 if tokens is not None and sample is None else sample
    if sample is not None:
        refuse_no_sample(sample, len(values))
        values = values[sample : sample + 1]
    if tokens is not None:
        values = by_own_peak(values)
    differentiated = _TARGET.match(str(array.attrs.get("long_name", "")))
    target = None if differentiated is None or differentiated["of"] == "loss" else differentiated["of"]
    target = target if output_step is None else f"output step {output_step}"
    words = ("$|dL/dx_t|$" if target is None else f"|d {target} / $dx_t$|") + (_SCALED if x is not None else "")
    middle, low, high, said = _shape_of(values, real, sample)
    label = f"{words}, share of peak" if said or tokens is not None else words
    head = _data.layer_title(array.attrs, f"input steps that the {target or 'loss'} depends on")
    look = _axes.colours(middle, _data.largest_magnitude(middle), log=log, positive=True)
    size, drawn, extra = (5.2, 2.8), None, None
    words_of = None if tokens is None else tokens_of(tokens, len(middle), "input_map")
    if words_of is not None:
        letters, rows = text_size(words_of)
        size = (LETTER * letters, LINE * (rows + 0.4) + 0.1)
    elif shape is not None:  # wide enough for the image to fill the height, like its colour bar
        rows, columns = _sides(shape, len(middle))
        wide = float(np.clip(3.0 * columns / rows, 1.5, 8.0))
        size = (wide + 0.6, min(3.0, wide * rows / columns))
    panels = _frame.open_panels("input_map", 1, ax, figure, size=size, ticks="medium")
    place = panels.axes[0]
    if words_of is not None:
        drawn, extra = shade_text(place, words_of, middle, look)
    elif shape is not None:
        place.set_anchor("E")
        grid = _images.Matrix(middle.reshape(rows, columns), np.arange(columns), np.arange(rows), over_time=False)
        drawn = _images.draw_image(place, grid, look={**look, "aspect": "equal"})
        place.set(xlabel="column", ylabel="row")
    else:
        extra = "band: quartiles" if said else None
        _line(place, _data.positions(array, TIME), (middle, low, high), line, log=log)
        panels.label(_data.axis_label(array, TIME), label)
    if drawn is not None and colorbar:
        _images.colour_bar([place], drawn, label)
    whose = f"sample {_data.names_of(array, SAMPLE)[sample]}" if sample is not None and SAMPLE in array.dims else None
    return panels.titled(title or head, [whose, said, note, extra, missing])


def _row_of_jacobian(array: xr.DataArray) -> tuple[xr.DataArray, str | None]:
    """Return the only row of a time Jacobian over ``time``, and its output step; other arrays unchanged."""
    if IN_TIME not in array.dims or TIME in array.dims or array.sizes.get(OUT_TIME, 1) != 1:
        return array, None
    step = str(array[OUT_TIME].values.item()) if OUT_TIME in array.coords else "k"
    row = array.squeeze(OUT_TIME) if OUT_TIME in array.dims else array
    return row.drop_vars([OUT_TIME, TIME], errors="ignore").rename({IN_TIME: TIME}), step


def _sensitivity(array: xr.DataArray, x: Any) -> tuple[Numbers, str | None]:
    """Return the size of a gradient at each step, (sample, time), and None or a note on the standard deviations.

    The size is the norm over features; with the input ``x`` each feature's gradient is multiplied by its standard
    deviation first. The note says that these are over the steps of one sample, where there is only one.
    """
    ordered = _data.of_samples(array, TIME)
    ordered = ordered.reshape(*ordered.shape[:2], -1)
    if x is None:
        return np.asarray(safe_norm(ordered, axis=2), dtype=np.float64), None
    given = np.asarray(as_numbers("x", x))
    if given.size != ordered.size or (SAMPLE in array.dims and list(given.shape[:2]) != list(ordered.shape[:2])):
        raise InputError("x= is not the input of this gradient.", got=f"shape {given.shape}", expected=f"{array.shape}")
    whole: Numbers = given.reshape(ordered.shape)
    if len(whole) > 1:
        return input_sensitivity(ordered, whole), None
    spread = np.broadcast_to(whole[0].std(axis=0), ordered.shape[1:])
    with_spread = np.stack([whole[0] - spread, whole[0] + spread])  # two samples of that standard deviation
    return input_sensitivity(ordered, with_spread), "one sample: s.d. over its steps"


def refuse_no_sample(sample: int, count: int) -> None:
    """Raise InputError unless ``sample`` is one of ``count`` samples."""
    if sample >= count:
        raise InputError("There is no such sample.", got=f"sample={sample}", expected=f"0 to {count - 1}")


def _shape_of(values: Numbers, real: Numbers, sample: int | None) -> tuple[Numbers, Numbers, Numbers, str | None]:
    """Return median and quartiles over samples, each divided by its own peak; for one ``sample`` its own values."""
    if len(values) == 1:
        return values[0], values[0], values[0], None
    found = peak_band(values, real if sample is None else None)
    bad = (~np.isfinite(values) & real).any(axis=0)
    median, low, high = (np.where(bad, np.nan, part) for part in (found.median, found.low, found.high))
    return median, low, high, f"median of {len(values)} samples, each by its own peak"


def _sides(shape: Any, count: int) -> tuple[int, int]:
    """Return height and width in pixels of an image whose steps are its ``count`` pixels."""
    given = np.atleast_1d(as_numbers("shape", shape))
    sizes = given.flat[:3].astype(int)
    if given.size != 2 or int(sizes.prod()) != count or (sizes < 1).any():
        got = f"shape={tuple(sizes.tolist())} for {count} steps"
        raise InputError("shape= is not that of the image.", got=got, expected=f"rows x columns = {count}")
    return int(sizes[0]), int(sizes[1])


def _line(
    ax: Any, steps: Numbers, bands: tuple[Numbers, Numbers, Numbers], keywords: dict[str, Any], *, log: bool
) -> None:
    """Draw values over steps as a line with its band."""
    middle, low, high = ([np.where(part > 0, part, np.nan) for part in bands]) if log else bands
    look = {"color": "#0072b2", "linewidth": 1.3, "gid": "sensitivity", "marker": "o" if len(steps) == 1 else None}
    _axes.draw_band(ax, steps, low, high, "#0072b2")
    ax.plot(steps, middle, **{**look, **keywords})
    _axes.mark_steps(ax, steps[~np.isfinite(bands[0])])
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, None)
    _axes.step_axis(ax, "x", steps, room=0.5)


@drawing(PatchCollection, tokens=anything, units=anything, gate=text, sample=whole(least=0))
def unit_over_text(
    hidden: Any,
    tokens: Any,
    *,
    units: Any = None,
    gate: str | None = None,
    sample: int = 0,
    max_panels: int = 4,
    shared: bool = False,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **patch: Any,
) -> Any:
    """Draw a text with each token shaded by the state of a unit after reading it: a panel per unit.

    White is 0, blue negative, orange positive.

    Parameters
    ----------
    hidden : (sample, time, unit), also with direction
        ``trace["lstm"].hidden``, ``.cell``, or a plain array; (time, unit) too. ``.gates``, with ``gate``.
    tokens
        One for each step; a string is split into letters.
    units : int or sequence of int, optional
        Units to draw; by default ``max_panels`` evenly spaced ones.
    gate
        Gate to draw, if ``hidden`` has all gates.
    sample
        The sample that the tokens belong to.
    shared
        One colour scale for all units.

    Returns
    -------
    1-D array of Axes, forward before backward

    References
    ----------
    Karpathy, Johnson, Li 2015, arXiv:1506.02078, fig. 2.
    """
    array = _data.labelled(hidden, "unit_over_text", guess={2: (TIME, "unit"), 3: (SAMPLE, TIME, "unit")})
    _data.require_time(array, "unit_over_text")
    unit = _data.unit_dim(array)
    _data.require_dim(array, unit or "unit", "unit_over_text")
    array = _one_gate(array, gate)
    if SAMPLE in array.dims:
        refuse_no_sample(sample, array.sizes[SAMPLE])
        array = array.isel({SAMPLE: sample})
    names = tokens_of(tokens, array.sizes[TIME], "unit_over_text")
    picked, thinned = _picked_unit_text(units, array.sizes[unit], max_panels)
    rows = [(half, index) for half in _data.halves(array) for index in picked]
    letters, lines = text_size(names)
    size, shape = (LETTER * letters + 0.4, LINE * (lines + 0.4) + 0.3), (len(rows), 1)
    panels = _frame.open_panels("unit_over_text", len(rows), ax, figure, size=size, margin=(1.2, 0.7), shape=shape)
    top, notes = _data.largest_magnitude(array.values), [thinned]
    for place, (half, index) in zip(panels.axes, rows, strict=True):
        values = np.asarray(half.data.isel({unit: index}).values)
        look = {**_axes.colours(values, top if shared else _data.largest_magnitude(values), positive=False), **patch}
        drawn, note = shade_text(place, names, values, look)
        notes += [note] if note not in notes else []
        words = f"{_data.axis_label(array, unit)} {_data.names_of(array, unit)[index]}"
        place.set_title(" · ".join(part for part in (half.name, words) if part), fontsize="small", loc="left", pad=2)
        _images.colour_bar([place], drawn)
    head = title or _data.title_of(array) or "a unit over text"
    return panels.titled(head, [*notes, _data.nonfinite_note(array.values)])


def _one_gate(array: xr.DataArray, gate: str | None) -> xr.DataArray:
    """Select a gate by name; return the array unchanged if it has no gates."""
    if GATE not in array.dims:
        if gate is not None:
            got = f"gate={gate!r} for dimensions ({', '.join(map(str, array.dims))})"
            raise InputError("This array has no gates.", got=got, hint='pass trace["lstm"].gates')
        return array
    known = _data.names_of(array, GATE)
    if gate not in known:
        what, got = "plot.unit_over_text draws one gate.", "all gates" if gate is None else f"gate={gate!r}"
        raise InputError(what, got=got, expected=f"one of {', '.join(known)}", hint=f"gate={known[0]!r}")
    label = gate if gate == "candidate" else f"{gate} gate"
    return array.isel({GATE: known.index(gate)}, drop=True).assign_attrs(array.attrs, long_name=label)


def _picked_unit_text(units: Any, count: int, most: int) -> tuple[list[int], str | None]:
    """Select the units that are drawn; also return a note if some are left out."""
    if units is None:
        return _data.choose(count, most, "units")
    given = listed(units, most=count) if not isinstance(units, int | np.integer) else [units]
    if not given or not all(isinstance(index, int | np.integer) and 0 <= index < count for index in given):
        raise InputError("There is no such unit.", got=f"units={shown(units)}", expected=f"0 to {count - 1}")
    return [int(index) for index in given], None
