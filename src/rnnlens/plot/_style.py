"""``style``: size, type and background of the figures that are made within a block, for papers and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import rgb_to_hsv, to_rgba

from ..arguments import checked, number, one_of
from ..errors import InputError, short_repr

#: Widths in inches of a column and of the text of common two-column journals.
WIDTHS = {"column": 3.4, "page": 7.0}
_DARK_GROUND, _DARK_INK = "#14171b", "#e6e9ed"
#: matplotlib's settings of each style.
_SETTINGS: dict[str, dict[str, Any]] = {
    "screen": {},
    "paper": {
        "font.size": 7.0,
        "axes.linewidth": 0.6,
        **{f"{axis}tick.major.{name}": value for axis in "xy" for name, value in (("width", 0.6), ("size", 2.5))},
        **{f"{axis}tick.minor.{name}": value for axis in "xy" for name, value in (("width", 0.4), ("size", 1.5))},
        "savefig.dpi": 300,
        "pdf.fonttype": 42,  # fonts that journals accept and drawing programs can edit
        "svg.fonttype": "none",
    },
    "dark": {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), _DARK_GROUND),
        **dict.fromkeys(("xtick.color", "ytick.color"), _DARK_INK),  # ticks are made while a figure is drawn
    },
}


@dataclass(frozen=True)
class Style:
    """Width in inches of new figures (None: the figure's own), and the settings of matplotlib that hold for them."""

    width: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    is_dark: bool = False


_CURRENT: ContextVar[Style | None] = ContextVar("rnnlens.plot.style", default=None)


def current_style() -> Style:
    """Return the style of the innermost ``with rl.plot.style(...)``."""
    return _CURRENT.get() or Style()


@checked()
@contextmanager
def style(name: str = "paper", *, width: float | str | None = None) -> Iterator[None]:
    """Make the figures of a ``with`` block in a style; matplotlib's own settings are as before after it.

    Parameters
    ----------
    name
        ``"paper"``: type of 7 points, thin axes, 300 dots per inch, fonts embedded as text. ``"dark"``: light text and
        lines on a dark ground, for slides and dark pages; maps keep their colours. ``"screen"``: the usual figures.
    width
        Width of each figure: ``"column"`` (3.4 inches), ``"page"`` (7 inches), or a number of inches. By default a
        figure is as wide as its panels need.

    Raises
    ------
    InputError
        If there is no such style or width.

    Examples
    --------
    >>> with rl.plot.style("paper", width="column"):
    ...     rl.plot.heatmap(trace["lstm"].hidden).save("figure.pdf")
    """
    name = one_of(*_SETTINGS)("name", name)
    inches = WIDTHS.get(width, width) if isinstance(width, str) else width
    if inches is not None:
        try:
            inches = number(least=1, below=50)("width", inches)
        except InputError as error:
            expected = '"column", "page", or 1 to 50 inches'
            raise InputError("width= is a width of a figure.", got=short_repr(width), expected=expected) from error
    settings = _SETTINGS[name]
    token = _CURRENT.set(Style(inches, settings, name == "dark"))
    try:
        with mpl.rc_context(settings):
            yield
    finally:
        _CURRENT.reset(token)


def exchange_greys(figure: Any, done: WeakSet[Any]) -> None:
    """Exchange dark and light in the greys of artists that are not ``done``; they were chosen for a white ground."""
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = [tick for axis in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    done.update(artist for tick in ticks for artist in tick.findobj())
    for artist in set(figure.findobj(include_self=False)) - set(done):
        if not isinstance(artist, Axes | Axis):
            _exchange_greys(artist)
        done.add(artist)


def _exchange_greys(artist: Any) -> None:
    for name in ("color", "facecolor", "edgecolor", "markeredgecolor", "markerfacecolor"):
        getter, setter = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
        if getter is None or setter is None:
            continue
        try:
            red, green, blue, alpha = to_rgba(getter())
        except ValueError:  # several colours, which are data
            continue
        _, saturation, value = rgb_to_hsv((red, green, blue))
        if saturation < 0.1 and alpha > 0:
            ink, ground = to_rgba(_DARK_INK), to_rgba(_DARK_GROUND)
            mixed = [light + (dark - light) * value for light, dark in zip(ink[:3], ground[:3], strict=True)]
            setter((*mixed, alpha))
