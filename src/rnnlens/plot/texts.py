"""``input_map``: sensitivity to each input step; ``unit_over_text``: a unit's state over tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PatchCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ..arguments import anything, as_list, as_numbers, integer, text
from ..errors import InputError, short_repr
from ..measures.profiles import input_sensitivity, peak_band, shares_of_peak
from ..recurrence.measures import safe_norm
from ..results.schema import proposals_of
from ..vocabulary import FEATURE, GATE, IN_TIME, OUT_TIME, SAMPLE, TIME
from . import _axes, _data, _frame, _images, _samples
from ._call import drawing
from ._data import Numbers
from ._interactive import interactive, rounded
from .gates import gate_title

#: Letters per line, and size in inches of one letter and of one line.
WIDTH, LETTER, LINE = 72, 0.092, 0.21
#: Largest number of lines of one panel.
MOST_LINES = 40


def tokens_of(tokens: Any, count: int, figure: str) -> list[str]:
    """Return the tokens as a list of texts, a string as its letters; raise InputError unless there is one per step."""
    is_sequence = isinstance(tokens, str | Sequence) or (isinstance(tokens, np.ndarray) and tokens.ndim == 1)
    if not is_sequence or len(tokens) != count:
        received = f"{len(tokens)} tokens" if is_sequence else short_repr(tokens)
        raise InputError(f"plot.{figure} writes one token for each step.", got=received, expected=f"{count} of them")
    return [str(token).replace("\n", "↵").replace("\t", "→") or " " for token in tokens]


def token_positions(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return line and column of the first letter of each token, in lines of about equal length."""
    letter_count = sum(map(len, tokens))
    width = min(WIDTH, -(-letter_count // -(-letter_count // WIDTH)) + max(map(len, tokens)))
    positions, line, column = [], 0, 0
    for token in tokens:
        if column and column + len(token) > width:
            line, column = line + 1, 0
        positions.append((line, column))
        column += len(token)
        if token.endswith("↵"):
            line, column = line + 1, 0
    return positions


def text_size(tokens: Sequence[str]) -> tuple[int, int]:
    """Return the letters of the longest line, at least a sixth of a full line, and the number of lines shown."""
    positions = token_positions(tokens)
    longest = max(column + len(token) for (_, column), token in zip(positions, tokens, strict=True))
    return max(WIDTH // 6, longest), min(positions[-1][0] + 1, MOST_LINES)


def shade_text(
    ax: Any, tokens: Sequence[str], values: Numbers, style: dict[str, Any], *, around: int = 0
) -> tuple[Any, str | None]:
    """Draw each token of a text on a box whose colour shows its value; of a long text the lines about ``around``.

    Return the collection of boxes, and a note that says which tokens are drawn, or None.
    """
    positions = token_positions(tokens)
    last_line = min(max(MOST_LINES - 1, positions[around][0] + MOST_LINES // 2), positions[-1][0])
    first_line = max(0, last_line - MOST_LINES + 1)
    positions = [(line - first_line, column) for line, column in positions]
    shown_indices = [token_index for token_index, (line, _) in enumerate(positions) if 0 <= line < MOST_LINES]
    boxes = [
        Rectangle((positions[token_index][1], positions[token_index][0]), len(tokens[token_index]), 0.92)
        for token_index in shown_indices
    ]
    collection = PatchCollection(boxes, linewidth=0, gid="tokens", **style)
    shown_values = np.ma.masked_invalid(np.asarray(values, dtype=float)[shown_indices])
    collection.set_array(shown_values)
    ax.add_collection(collection)
    ax.set(xlim=(-0.5, text_size(tokens)[0] + 0.5), ylim=(positions[shown_indices[-1]][0] + 1.2, -0.3))
    colour_shares = collection.norm(shown_values)
    for token_index, colour_share in zip(shown_indices, np.ma.filled(colour_shares, np.nan), strict=True):
        line, column = positions[token_index]
        is_dark = np.isfinite(colour_share) and _is_dark(collection.cmap(float(colour_share)))
        for offset, letter in enumerate(tokens[token_index]):
            ax.text(
                column + offset + 0.5, line + 0.5, letter, ha="center", va="center", family="monospace",
                fontsize="small", color="white" if is_dark else "black", clip_on=True, parse_math=False,
            ).set_in_layout(False)  # fmt: skip
        if not np.isfinite(colour_share):
            ax.plot([column + 0.5 * len(tokens[token_index])], [line + 0.5], "x", color="black", gid="non-finite")
    ax.set_axis_off()
    if len(shown_indices) == len(tokens):
        return collection, None
    first, last = shown_indices[0], shown_indices[-1]
    note = f"first {last + 1} of" if not first else f"tokens {first} to {last} of"
    return collection, f"{note} {len(tokens)}{' tokens' * (not first)}"


def _is_dark(colour: Sequence[float]) -> bool:
    """Return whether white has more contrast than black on an RGB colour, by the relative luminance of WCAG 2."""
    return float(np.dot(np.asarray(colour[:3]) ** 2.2, (0.2126, 0.7152, 0.0722))) < 0.179


_SCALED = " × s.d. of the input"  # noqa: RUF001  a product in words
#: Long name of a gradient, from which the name of its target is read.
_TARGET = re.compile(r"gradient of (?P<of>.+) with respect to ")


@drawing(Line2D, shape=anything, tokens=anything, sample=integer(least=0))
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
    The figure shows median and quartiles over samples, each divided by its own peak; or one ``sample``. The title names
    the steps with at least half of the largest value, or the largest alone where these are many.

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
        Tokens of a text, each shaded by the value of its step; a string is split into letters. In a notebook, and in
        ``.save("words.html")``, a token shows its number when it is pointed at. Of a time Jacobian with several output
        steps the picture is of the last one, and a click on a token chooses another.
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

    Examples
    --------
    >>> gradient = rl.gradients(model, x, y, wrt="input", loss=mse_loss)
    >>> axes = rl.plot.input_map(gradient, x)
    >>> len(axes)
    1
    """
    whole_array = _data.label_array(gradient, "input_map", guess={2: (TIME, FEATURE), 3: (SAMPLE, TIME, FEATURE)})
    has_rows = tokens is not None and x is None and whole_array.sizes.get(OUT_TIME, 1) > 1
    array, output_step = _single_row(whole_array.isel({OUT_TIME: [-1]}) if has_rows else whole_array)
    _data.require_time(array, "input_map")
    values, spread_note = _sensitivity(array, x)
    is_real = _samples.real_step_mask(array)
    nonfinite_note = _data.nonfinite_note(np.where(is_real, values, 0.0))
    values = np.where(is_real, values, np.nan)
    sample = 0 if tokens is not None and sample is None else sample
    if sample is not None:
        refuse_missing_sample(sample, len(values))
        values = values[sample : sample + 1]
    if tokens is not None:
        values = shares_of_peak(values)
    target_match = _TARGET.match(str(array.attrs.get("long_name", "")))
    target = None if target_match is None or target_match["of"] == "loss" else target_match["of"]
    target = target if output_step is None else f"output step {output_step}"
    target_name = target if output_step is not None else f"the {target or 'loss'}"
    gradient_text = ("$|dL/dx_t|$" if target is None else f"|d {target} / $dx_t$|") + (_SCALED if x is not None else "")
    median, low, high, median_note = _typical_profile(values, is_real, sample)
    label = f"{gradient_text}, share of peak" if median_note or tokens is not None else gradient_text
    steps = _data.positions(array, TIME)
    style = _axes.colour_scale(median, _data.largest_magnitude(median), log=log, positive=True)
    size, least_height, image, extra_note = (5.2, 2.8), 2.6, None, None
    step_names = None
    token_texts = None if tokens is None else tokens_of(tokens, len(median), "input_map")
    if token_texts is not None:
        letters_per_line, rows = text_size(token_texts)
        size, least_height = (LETTER * letters_per_line, LINE * (rows + 0.4) + 0.1), 1.6
        step_names = [
            f"“{token.strip() or token}” (step {step})" for token, step in zip(token_texts, steps, strict=True)
        ]
    elif shape is not None:  # wide enough for the image to fill the height, like its colour bar
        rows, columns = _image_shape(shape, len(median))
        image_width = float(np.clip(3.0 * columns / rows, 1.5, 8.0))
        size = (image_width + 0.6, min(3.0, image_width * rows / columns))
        step_names = [f"row {row}, column {column}" for row in range(rows) for column in range(columns)]
    claim = _largest_steps(median, steps, step_names)
    default_title = f"{target_name} depends {claim}" if claim else f"no finite gradient of {target_name}"
    default_title = _data.layer_title(array.attrs, default_title)
    panels = _frame.open_panels("input_map", 1, ax, figure, size=size, ticks="medium", least_height=least_height)
    panel_ax = panels.axes[0]
    if token_texts is not None:
        largest_token = int(np.argmax(np.where(np.isfinite(median), median, -1.0)))
        image, extra_note = shade_text(panel_ax, token_texts, median, style, around=largest_token)
    elif shape is not None:
        panel_ax.set_anchor("E")
        image_matrix = _images.Matrix(
            median.reshape(rows, columns), np.arange(columns), np.arange(rows), over_time=False
        )
        image = _images.draw_image(panel_ax, image_matrix, style={**style, "aspect": "equal"})
        panel_ax.set(xlabel="column", ylabel="row")
    else:
        extra_note = "band: quartiles" if median_note else None
        _draw_line(panel_ax, steps, (median, low, high), line, log=log)
        panels.label_axes(_data.axis_label(array, TIME), label)
    if image is not None and colorbar:
        _images.colour_bar([panel_ax], image, label)
    sample_note = (
        f"sample {_data.names_of(array, SAMPLE)[sample]}" if sample is not None and SAMPLE in array.dims else None
    )
    drawn = panels.with_title(
        title or default_title, [sample_note, median_note, spread_note, extra_note, nonfinite_note]
    )
    if token_texts is None:
        return drawn
    rows_shown = {output_step or "": median}
    if has_rows:
        rows_shown = {str(step): row for step, row in _rows_of(whole_array, int(sample or 0))}
    scene = {
        "kind": "words",
        "title": title
        or (_data.layer_title(array.attrs, "words that an output depends on") if has_rows else default_title),
        "notes": [note for note in (sample_note, spread_note, nonfinite_note) if note],
        "label": "effect on output step {}" if output_step else "effect on the " + (target or "loss"),
        "log": log,
        "words": token_texts,
        "rows": [{"step": step, "values": [rounded(value) for value in row]} for step, row in rows_shown.items()],
    }
    return interactive(drawn, scene)


def _largest_steps(values: Numbers, steps: Numbers, names: Sequence[str] | None) -> str | None:
    """Return in words where ``values`` are largest: at some steps, a stretch, all or none; None if none is finite."""
    largest = _data.largest_magnitude(values)
    if not np.isfinite(values).any():
        return None
    if not largest:
        return "on no step"
    with np.errstate(invalid="ignore"):
        indices = np.flatnonzero(values >= 0.5 * largest)
        if len(values) > 1 and (values == largest).all():
            return f"equally on all {len(values)} steps"
    if names is not None or (len(indices) > 3 and (np.diff(indices) > 1).any()):
        index = int(np.nanargmax(np.where(np.isfinite(values), values, np.nan)))
        return f"most on {names[index] if names is not None else f'step {steps[index]:g}'}"
    texts = [f"{step:g}" for step in steps[indices]]
    if len(indices) > 3:
        return f"most on steps {texts[0]} to {texts[-1]}"
    return f"most on step{'s' * (len(texts) > 1)} {' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}"


def _rows_of(array: xr.DataArray, sample: int) -> Iterator[tuple[Any, Numbers]]:
    """Yield each output step of a time Jacobian and the size of its derivative by each input step, of one sample."""
    for position, step in enumerate(_data.positions(array, OUT_TIME).tolist()):
        row, _ = _single_row(array.isel({OUT_TIME: [position]}))
        values, _ = _sensitivity(row, None)
        is_real = _samples.real_step_mask(row)
        yield step, np.where(is_real, values, np.nan)[sample]


def _single_row(array: xr.DataArray) -> tuple[xr.DataArray, str | None]:
    """Return the only row of a time Jacobian over ``time``, and its output step; other arrays unchanged."""
    if IN_TIME not in array.dims or TIME in array.dims or array.sizes.get(OUT_TIME, 1) != 1:
        return array, None
    step = str(array[OUT_TIME].values.item()) if OUT_TIME in array.coords else "k"
    row_array = array.squeeze(OUT_TIME) if OUT_TIME in array.dims else array
    return row_array.drop_vars([OUT_TIME, TIME], errors="ignore").rename({IN_TIME: TIME}), step


def _sensitivity(array: xr.DataArray, x: Any) -> tuple[Numbers, str | None]:
    """Return the size of a gradient at each step, (sample, time), and None or a note on the standard deviations.

    The size is the norm over features; with the input ``x`` each feature's gradient is multiplied by its standard
    deviation first. The note says that these are over the steps of one sample, where there is only one.
    """
    gradient_values = _data.numpy_by_sample(array, TIME)
    gradient_values = gradient_values.reshape(*gradient_values.shape[:2], -1)
    if x is None:
        return np.asarray(safe_norm(gradient_values, axis=2), dtype=np.float64), None
    input_values = np.asarray(as_numbers("x", x))
    if input_values.size != gradient_values.size or (
        SAMPLE in array.dims and list(input_values.shape[:2]) != list(gradient_values.shape[:2])
    ):
        raise InputError(
            "x= is not the input of this gradient.", got=f"shape {input_values.shape}", expected=f"{array.shape}"
        )
    inputs: Numbers = input_values.reshape(gradient_values.shape)
    if len(inputs) > 1:
        return input_sensitivity(gradient_values, inputs), None
    step_deviations = np.broadcast_to(inputs[0].std(axis=0), gradient_values.shape[1:])
    # Two samples of that standard deviation.
    spread_samples = np.stack([inputs[0] - step_deviations, inputs[0] + step_deviations])
    return input_sensitivity(gradient_values, spread_samples), "one sample: s.d. over its steps"


def refuse_missing_sample(sample: int, count: int) -> None:
    """Raise InputError unless ``sample`` is one of ``count`` samples."""
    if sample >= count:
        raise InputError("There is no such sample.", got=f"sample={sample}", expected=f"0 to {count - 1}")


def _typical_profile(
    values: Numbers, is_real: Numbers, sample: int | None
) -> tuple[Numbers, Numbers, Numbers, str | None]:
    """Return median and quartiles over samples, each divided by its own peak; for one ``sample`` its own values."""
    if len(values) == 1:
        return values[0], values[0], values[0], None
    peak_profile = peak_band(values, is_real if sample is None else None)
    is_nonfinite = (~np.isfinite(values) & is_real).any(axis=0)
    median, low, high = (
        np.where(is_nonfinite, np.nan, profile_part)
        for profile_part in (peak_profile.median, peak_profile.low, peak_profile.high)
    )
    return median, low, high, f"median of {len(values)} samples, each by its own peak"


def _image_shape(shape: Any, count: int) -> tuple[int, int]:
    """Return height and width in pixels of an image whose steps are its ``count`` pixels."""
    shape_numbers = np.atleast_1d(as_numbers("shape", shape))
    sizes = shape_numbers.flat[:3].astype(int)
    if shape_numbers.size != 2 or int(sizes.prod()) != count or (sizes < 1).any():
        received = f"shape={tuple(sizes.tolist())} for {count} steps"
        raise InputError("shape= is not that of the image.", got=received, expected=f"rows x columns = {count}")
    return int(sizes[0]), int(sizes[1])


def _draw_line(
    ax: Any, steps: Numbers, bands: tuple[Numbers, Numbers, Numbers], keywords: dict[str, Any], *, log: bool
) -> None:
    """Draw values over steps as a line with its band."""
    median, low, high = ([np.where(band_part > 0, band_part, np.nan) for band_part in bands]) if log else bands
    largest = _data.largest_magnitude(*bands)
    style = {"color": _axes.BLUE, "linewidth": 1.3, "gid": "sensitivity", "marker": "o" if len(steps) == 1 else None}
    _axes.draw_band(ax, steps, low, high, _axes.BLUE)
    ax.plot(steps, median, **{**style, **keywords})
    _axes.mark_nonfinite(ax, steps[~np.isfinite(bands[0])])
    if log and largest:
        _axes.set_log_limits(ax, np.concatenate(bands), headroom=2)
        _axes.set_log_axis(ax)
        _axes.mark_below(ax, steps, bands[0], _axes.BLUE)
    elif not log:
        ax.fill_between(steps, median, color=_axes.BLUE, alpha=0.12, linewidth=0, gid="area")
        ax.set_ylim(0, None if largest else 1.0)
    _axes.tick_steps(ax, "x", steps, margin=max(0.5, 0.02 * len(steps)))  # a peak at an end is not the frame


@drawing(PatchCollection, tokens=anything, units=anything, gate=text, sample=integer(least=0))
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
        Units to draw; by default the ``max_panels`` of largest RMS.
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

    Examples
    --------
    >>> axes = rl.plot.unit_over_text(trace["lstm"].hidden, "recalled", units=[0, 2])
    >>> len(axes)
    2
    """
    array = _data.label_array(hidden, "unit_over_text", guess={2: (TIME, "unit"), 3: (SAMPLE, TIME, "unit")})
    _data.require_time(array, "unit_over_text")
    unit = _data.unit_dim(array)
    _data.require_dim(array, unit or "unit", "unit_over_text")
    array = _select_gate(array, gate)
    if SAMPLE in array.dims:
        refuse_missing_sample(sample, array.sizes[SAMPLE])
        array = array.isel({SAMPLE: sample})
    token_texts = tokens_of(tokens, array.sizes[TIME], "unit_over_text")
    unit_indices, unit_note = _selected_units(units, array, max_panels)
    view_and_unit = [(view, index) for view in _data.direction_views(array) for index in unit_indices]
    letters_per_line, line_count = text_size(token_texts)
    size, shape = (LETTER * letters_per_line + 0.4, LINE * (line_count + 0.4) + 0.3), (len(view_and_unit), 1)
    panels = _frame.open_panels(
        "unit_over_text", len(view_and_unit), ax, figure, size=size, margin=(1.2, 0.7), shape=shape
    )
    largest, notes = _data.largest_magnitude(array.values), [unit_note]
    for panel_ax, (view, index) in zip(panels.axes, view_and_unit, strict=True):
        values = np.asarray(view.data.isel({unit: index}).values)
        style = {
            **_axes.colour_scale(values, largest if shared else _data.largest_magnitude(values), positive=False),
            **patch,
        }
        image, note = shade_text(panel_ax, token_texts, values, style)
        notes += [note] if note not in notes else []
        unit_title = f"{_data.axis_label(array, unit)} {_data.names_of(array, unit)[index]}"
        panel_ax.set_title(
            " · ".join(title_part for title_part in (view.name, unit_title) if title_part),
            fontsize="small",
            loc="left",
            pad=2,
        )
        _images.colour_bar([panel_ax], image)
    default_title = title or _data.title_of(array) or "a unit over text"
    return panels.with_title(default_title, [*notes, _data.nonfinite_note(array.values)])


def _select_gate(array: xr.DataArray, gate: str | None) -> xr.DataArray:
    """Select a gate by name; return the array unchanged if it has no gates."""
    if GATE not in array.dims:
        if gate is not None:
            received = f"gate={gate!r} for dimensions ({', '.join(map(str, array.dims))})"
            raise InputError("This array has no gates.", got=received, hint='pass trace["lstm"].gates')
        return array
    gate_names = _data.names_of(array, GATE)
    if gate not in gate_names:
        message, received = "plot.unit_over_text draws one gate.", "all gates" if gate is None else f"gate={gate!r}"
        raise InputError(
            message, got=received, expected=f"one of {', '.join(gate_names)}", hint=f"gate={gate_names[0]!r}"
        )
    gate_label = gate_title(str(gate), gate in proposals_of(array))
    return array.isel({GATE: gate_names.index(gate)}, drop=True).assign_attrs(array.attrs, long_name=gate_label)


def _selected_units(units: Any, array: xr.DataArray, max_units: int) -> tuple[list[int], str | None]:
    """Select the units that are drawn; also return a note if some are left out."""
    unit = _data.unit_dim(array) or "unit"
    count = array.sizes[unit]
    if units is None:
        return _data.select_largest(_data.rms_along(array, unit), max_units, "units")
    requested_units = as_list(units, most=count) if not isinstance(units, int | np.integer) else [units]
    if not requested_units or not all(
        isinstance(index, int | np.integer) and 0 <= index < count for index in requested_units
    ):
        raise InputError("There is no such unit.", got=f"units={short_repr(units)}", expected=f"0 to {count - 1}")
    return [int(index) for index in requested_units], None
