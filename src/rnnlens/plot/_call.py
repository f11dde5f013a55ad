"""Arguments that figures share: their checks, their documentation, and keywords passed on to matplotlib."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
from matplotlib.artist import ArtistInspector
from matplotlib.cbook import normalize_kwargs

from ..arguments import Check, anything, as_list, as_numbers, integer, names, number, one_of, switch, text
from ..arguments import checked as check_arguments
from ..errors import InputError, RnnlensError, has_attribute, short_repr

P = ParamSpec("P")
R = TypeVar("R")

#: Keywords of See RNN's figures -> what to type instead.
_OTHER_KEYWORDS = {
    "n_rows": "ax=matplotlib.figure.Figure().subplots(n_rows, n_columns).ravel()",
    "share_xy": "shared=True, in the figures that have it; time is always shared",
    "show_title": 'title=""',
    "show_xy_ticks": "ax.tick_params(...), of the returned Axes",
    "show_borders": "ax.set_frame_on(...), of the returned Axes",
    "show_colorbar": "colorbar=",
    "timesteps_xaxis": 'x="time", in the figures that have it',
    "max_timesteps": "array.isel(time=slice(n)), of what is drawn",
    "reflect_half": "as_computed=True",
    "absolute_value": "absolute=True",
    "mode": "grad=True, of rl.weights(model, x, y)[layer]; else a gradient itself, such as trace[layer].hidden_grad",
    "annotations": "array.assign_coords(unit=names), of what is drawn",
    "subplot_samples": 'panel="sample", or samples="panels"',
    "peaks_to_clip": "clip_peaks=",
    "equate_axes": "shared=",
    "channel_axis": "dims=, or x= and y=",
    "savepath": "rl.plot.figure(...).save(path)",
    "configs": "matplotlib's own keywords, such as color=; or methods of the returned Axes",
    **dict.fromkeys(("colour", "colours", "colors"), "color=, of lines and points; cmap=, of images"),
    **dict.fromkeys(("colormap", "colourmap", "palette"), 'cmap="viridis", of images; color=, of lines and points'),
    "w": "figure=matplotlib.figure.Figure(figsize=(width, height))",
    "h": "figure=matplotlib.figure.Figure(figsize=(width, height))",
    "figsize": "figure=matplotlib.figure.Figure(figsize=(width, height))",
    "ylims": "axes[0].set_ylim(...), of the returned Axes",
    "xlims": "axes[0].set_xlim(...), of the returned Axes",
    "tight": "nothing: the layout adapts itself",
}

#: Largest accepted numbers of panels, lines, bins and delays; more would be slow and unreadable.
_PANELS, _LINES, _BINS, _DELAYS = 1000, 100_000, 100_000, 1000


def _check_dims(name: str, value: Any) -> tuple[str, ...]:
    """Check names of dimensions, in order; a name may occur twice."""
    dims = as_list(value)
    for dim in dims or ():
        text(name, dim)
    checked_names = names(name, list(dict.fromkeys(dims)) if dims else value)
    return (checked_names,) if isinstance(checked_names, str) else tuple(dims or checked_names)


def _check_text(name: str, value: Any) -> str:
    """Check that a value is a string, which may be empty."""
    if not isinstance(value, str):
        raise InputError(f"{name}= is text.", got=short_repr(value), expected="a string")
    return value


def check_title_pair(name: str, value: Any) -> tuple[str, str]:
    """Check that a value is a pair of titles."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(isinstance(title, str) for title in value):
        raise InputError(f"{name}= is two titles.", got=short_repr(value), expected='such as ("before", "after")')
    return (value[0], value[1])


def _check_delays(name: str, value: Any) -> Any:
    """Check lags of a task: a number, or several."""
    is_single = isinstance(value, int | float) or (has_attribute(value, "ndim") and value.ndim == 0)
    values = [value] if is_single else as_list(value, most=_DELAYS)
    delays = np.empty(0) if values == [] else None if values is None else np.asarray(as_numbers(name, values))
    if delays is None or delays.ndim > 1 or delays.dtype.kind not in "fiu" or not (delays >= 0).all():
        raise InputError(f"{name}= are lags.", got=short_repr(value), expected="a few numbers from 0 on")
    return delays.astype(float)


#: Checks of the parameters that mean the same in every figure that has them.
COMMON: dict[str, Check] = {
    "dims": _check_dims,
    "x": text,
    "y": text,
    "panel": names,
    "overlay": text,
    "quantity": text,
    "layer": text,
    "names": check_title_pair,
    "samples": one_of("mean", "panels"),
    "shared": switch,
    "log": switch,
    "grad": switch,
    "absolute": switch,
    "as_computed": switch,
    "colorbar": switch,
    "limit": number(above=0, below=1e300),
    "delays": _check_delays,
    "losses": anything,
    "epsilon": number(above=0, below=1, what="is a share"),
    "confidence": number(least=0, below=1, what="is a share"),
    "bins": integer(least=1, most=_BINS),
    "clip_peaks": integer(least=0),
    "max_panels": integer(least=1, most=_PANELS),
    "max_rows": integer(least=1, most=_PANELS),
    "max_lines": integer(least=1, most=_LINES),
    "page": integer(least=0),
    "title": _check_text,
    "ax": anything,
    "figure": anything,
    "mask": anything,
}


#: Documentation of the parameters that mean the same in every figure that has them.
DOCUMENTATION = {
    "dims": "Dimensions of a plain array where the guess from its rank does not fit.",
    "max_panels": "Most panels; of more units the largest are drawn, other panels are thinned evenly: the title "
    "states it.",
    "max_rows": "Most rows of panels; more are thinned evenly, which the title states.",
    "page": "Show this run of ``max_panels`` panels (``max_rows`` rows) instead of a selection; 0 is the first.",
    "as_computed": "Reverse the backward direction of a bidirectional layer into the order in which it was computed.",
    "colorbar": "Draw the colour bar.",
    "delays": "One or several lags at which the task is known to need its input; they are marked.",
    "grad": "Draw the gradients (variables ending in ``_grad``); those by time are summed over time.",
    "limit": "Largest magnitude of the colour scale, by default that of the data; larger values have the end colours.",
    "log": "Logarithmic colours over 4 decades, linear below.",
    "moments": 'Names of moments of training, by step: ``{"the first digit is right": 300}``; marked in every panel.',
    "quantity": "Variable to draw, if layers are passed.",
    "shared": "Same value axis in all panels.",
    "title": "Title instead of the one made from the labels.",
    "ax": "Axes to draw into: as many as are returned, in that order.",
    "figure": "Figure or SubFigure in which the panels are made, instead of a new figure.",
}
#: Section of every figure's documentation, after what it returns.
RAISES = """Raises
------
InputError
    If the data do not fit this figure, a keyword is unknown, or ``ax`` has not as many Axes as are returned. The
    message has what was given and what is expected."""
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)


def drawing(artist: type, *, extra: Sequence[str] = (), **table: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a figure and complete its docstring.

    Parameters
    ----------
    artist
        The matplotlib class whose properties the figure's ``**keywords`` set; an unknown one is an error.
    extra
        Further keywords of the drawing call.
    **table
        Checks of the figure's own parameters, besides :data:`COMMON`. The data are checked in the figure.

    Raises
    ------
    InputError
        At the call, also if matplotlib rejects the value of a keyword that is passed on to it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
        checks = {name: check for name, check in {**COMMON, **table}.items() if name in options}

        @functools.wraps(function)
        def draw(*args: P.args, **kwargs: P.kwargs) -> R:
            artist_properties = {name: value for name, value in kwargs.items() if name not in parameters}
            own_arguments: dict[str, Any] = {name: value for name, value in kwargs.items() if name in parameters}
            _refuse_unknown(artist_properties, artist, extra, function.__name__, list(parameters)[1:-1])
            try:
                return function(*args, **own_arguments, **normalize_kwargs(artist_properties, artist))
            except RnnlensError:
                raise
            except Exception as error:
                if not artist_properties:
                    raise
                received = ", ".join(f"{name}={short_repr(value)}" for name, value in artist_properties.items())
                message = f"matplotlib cannot draw plot.{function.__name__} like this: {error}"
                hint = "limit=v for a scale from -v to v" if isinstance(kwargs.get("norm"), tuple | list) else None
                raise InputError(message, got=received, expected="values that matplotlib knows", hint=hint) from error

        draw.__doc__ = _complete_docstring(function, artist, extra)
        return check_arguments(**checks)(draw)

    return decorate


def _complete_docstring(function: Callable[..., Any], artist: type, extra: Sequence[str]) -> str:
    """Return the docstring with the common parameters, in the order of the signature, and the common errors."""
    summary, heading_text, body = inspect.cleandoc(function.__doc__ or "").partition("Parameters\n----------\n")
    own_parameters, blank_line, tail = body.partition("\n\n")
    own_entries = [entry for entry in _ENTRY.split(own_parameters) if entry.strip()]
    entries = {entry.split("\n")[0].partition(":")[0].strip(): entry for entry in own_entries}
    ordered: dict[str, str] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        key = next((names for names in entries if name in names.split(", ")), "")
        if key:
            ordered[key] = entries[key].rstrip("\n")
        elif parameter.kind is parameter.VAR_KEYWORD:
            has_many_extras = len(extra) > 4
            extra_text = (
                " and keywords of ``Axes.imshow``" if has_many_extras else "".join(f", {keyword}" for keyword in extra)
            )
            ordered[f"**{name}"] = f"**{name}\n    Properties of matplotlib's {artist.__name__}{extra_text}."
        elif name in DOCUMENTATION:
            ordered[name] = f"{name}\n    {DOCUMENTATION[name]}"
    returns, *last_sections = re.split(r"(?=\n\n(?:References|Examples)\n)", tail, maxsplit=1)
    return (
        f"{summary}{heading_text}{chr(10).join(ordered.values())}{blank_line}{returns}\n\n"
        f"{RAISES}{''.join(last_sections)}"
    )


@functools.cache
def _properties_of(artist: type) -> frozenset[str]:
    """Return the settable properties of a matplotlib artist class, with their aliases."""
    inspector = ArtistInspector(artist)
    return frozenset(inspector.get_setters()).union(*inspector.aliasd.values())


def _refuse_unknown(
    keywords: Mapping[str, Any], artist: type, extra: Iterable[str], figure: str, own_names: Sequence[str]
) -> None:
    """Raise InputError for a keyword that is no property of ``artist`` and no further one of the drawing call."""
    known_names = _properties_of(artist).union(extra)
    for name in keywords:
        if name not in known_names:
            closest = difflib.get_close_matches(name, [*own_names, *known_names], n=1, cutoff=0.7)
            others = f"leave it out; plot.{figure} has {', '.join(own_names)}"
            hint = f"did you mean {closest[0]!r}?" if closest else others
            raise InputError(
                f"plot.{figure} has no keyword {name}=.",
                got=f"{name}={short_repr(keywords[name])}",
                expected=f"a parameter of plot.{figure}, or a property of matplotlib's {artist.__name__}",
                hint=_OTHER_KEYWORDS.get(name, hint),
            )
