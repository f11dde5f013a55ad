"""Figures, grids of panels and titles: on a new figure, without pyplot, or on the user's Axes or figure."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from ..arguments import as_numbers, listed
from ..arguments import path as path_of
from ..errors import FileError, InputError
from ._axes import DOTTED, OVER_TIME, mark_top, write

LETTERS_PER_INCH = 12
#: Colour of titles and frames with non-finite values; unlike both ends of the maps, also for colour-blind readers.
ALARM = "#c00000"
SEPARATOR: dict[str, Any] = {"color": "#404040", "linewidth": 1.2, "linestyle": "-"}


class Picture(Figure):
    """A matplotlib Figure that a notebook displays if it is the last value of a cell: ``axes[0].figure``."""

    def _repr_png_(self) -> bytes:
        return _png(self)


def _png(figure: Any) -> bytes:
    stored = io.BytesIO()
    figure.savefig(stored, format="png")
    return stored.getvalue()


class Drawing(np.ndarray[Any, Any]):
    """Result of every plotting function: a 1-D array of Axes that a notebook displays and that can be saved.

    >>> rl.plot.heatmap(trace["lstm"].hidden_grad).save("gradient.png")  # doctest: +SKIP
    """

    @property
    def figure(self) -> Any:
        """The whole figure of the Axes, also if each direction is in its own subfigure."""
        found = self.reshape(-1)[0].figure
        while isinstance(found, SubFigure):
            found = found.figure
        return found

    def save(self, path: str | PathLike[str], **options: Any) -> None:
        """Write the figure to a file; the ending sets the format: ``.png``, ``.pdf``, ``.svg``.

        Parameters
        ----------
        path
            File to write.
        **options
            As for ``savefig`` of matplotlib's Figure, such as ``dpi``.

        Raises
        ------
        InputError
            If matplotlib does not know the format or an option.
        FileError
            If the file cannot be written.
        """
        to = path_of("path", path)
        try:
            self.figure.savefig(to, **options)
        except OSError as error:
            raise FileError("The picture cannot be written.", got=f"{to}: {error}") from error
        except Exception as error:
            known = ", ".join(sorted(self.figure.canvas.get_supported_filetypes()))
            raise InputError("matplotlib cannot save this.", got=str(error), expected=known) from error

    def mark(self, *steps: float, label: str | None = None) -> Drawing:
        """Draw a thin vertical line at each given time step, in every panel with a horizontal time axis.

        Parameters
        ----------
        *steps
            Positions on the time axis.
        label
            Text above the first of the lines.

        Returns
        -------
        This drawing, so that ``.mark(60, 90).save("run.png")`` can be written.

        Raises
        ------
        InputError
            If no panel has a horizontal time axis, or a step is not a number.
        """
        places = [ax for ax in self.reshape(-1) if ax.get_gid() == OVER_TIME]
        if not places:
            raise InputError("No panel of this figure has time across.", hint="mark the Axes by themselves")
        numbers = np.atleast_1d(as_numbers("steps", list(steps)))
        for ax in places:
            for step in numbers:
                ax.axvline(step, **DOTTED, zorder=3, gid="mark")
                mark_top(ax, float(step), "mark")
        if label:
            at = (float(numbers[0]), 1.0)
            write(places[0], label, at, (-4, -3), over=places[0].get_xaxis_transform(), va="top", gid="mark")
        return self

    def _repr_png_(self) -> bytes | None:
        """Return the whole figure as PNG; None for an empty selection of its Axes."""
        return _png(self.figure) if self.size else None


@dataclass
class Panels:
    """Axes to draw into by direction, and ``owners``, the figure of each direction; none if the user passed Axes."""

    halves: list[list[Any]]
    figure: Any
    owners: list[Any]

    @property
    def axes(self) -> list[Any]:
        """All matplotlib Axes of the panels in drawing order."""
        return [ax for half in self.halves for ax in half]

    def titled(self, words: str, notes: Iterable[str | None] = ()) -> Drawing:
        """Set the common title with the notes below it, wrapped; return a 1-D array of Axes in drawing order."""
        for ax in self.axes:
            if _missing(ax.get_title()) or any(line.get_gid() == "non-finite" for line in ax.lines):
                ax.title.set_color(ALARM)
                redden(ax)
        said = [part for note in notes if note for part in note.split("; ")]
        colour = {"color": ALARM} if any(map(_missing, said)) else {}
        first, inches = self.axes[0], _inches(self.figure)[0]
        if self.owners and (words or said):  # an array without labels has no title
            self.figure.suptitle(_wrapped(words, said, inches), fontsize="medium", **colour)
        elif not self.owners:
            inches *= first.get_position().width
            whole = [_wrapped(words, said, inches), _wrapped(first.get_title(), (), inches)]
            first.set_title("\n".join(part for part in whole if part), fontsize="medium", **colour)
        found = np.empty(len(self.axes), dtype=object)
        found[:] = self.axes
        return found.view(Drawing)

    def label(self, x: Sequence[str] | str, y: str) -> None:
        """Label axes: common labels for each direction with several panels, else labels on the Axes."""
        words = [x] * len(self.halves) if isinstance(x, str) else list(x)
        for number, (half, label) in enumerate(zip(self.halves, words, strict=True)):
            if self.owners and len(half) > 1:
                self.owners[number].supxlabel(label, fontsize="medium")
                # The second direction has an invisible label, so that both are equally wide.
                tall = _inches(self.figure)[1]
                self.owners[number].supylabel(
                    wrapped_label(y, tall), fontsize="medium", alpha=None if number == 0 else 0.0
                )
                continue
            for ax in half:
                ax.set_xlabel(label)
            tall = _inches(half[0].figure)[1] * half[0].get_position().height
            half[0].set_ylabel(wrapped_label(y, tall), alpha=None if number == 0 or not self.owners else 0.0)

    def value_label(self, words: str) -> None:
        """Label the value axis: once at the left of a new figure, or on the first of the user's Axes."""
        for owner in self.owners[:1]:
            owner.supylabel(words, fontsize="small")
        if not self.owners:
            self.axes[0].set_ylabel(words, fontsize="small")

    def legend(self, handles: Sequence[Any], *, beside: str = "right upper", title: str | None = None) -> None:
        """Draw a legend beside the panels of a new figure, or in the first of the user's Axes."""
        owner, where = (self.owners[-1], f"outside {beside}") if self.owners else (self.axes[0], "best")
        owner.legend(handles=handles, title=title, fontsize="small", title_fontsize="small", loc=where)

    def outer_ticks_only(self) -> None:
        """Show tick labels at the left and lower border of a new figure only, for panels with common limits."""
        for half in self.halves if self.owners else ():
            cells = {_cell(ax) for ax in half if ax.get_subplotspec() is not None}
            for ax in half:
                if ax.get_subplotspec() is None:
                    continue
                row, column = _cell(ax)
                ax.tick_params(labelbottom=(row + 1, column) not in cells, labelleft=column == 0)


def _cell(ax: Any) -> tuple[int, int]:
    spec = ax.get_subplotspec()
    return spec.rowspan.start, spec.colspan.start


def _missing(words: str) -> bool:
    return "NaN:" in words or "Inf:" in words


def redden(ax: Any) -> None:
    """Draw a red frame around a panel, to mark NaN or infinite values."""
    for spine in ax.spines.values():
        spine.set(edgecolor=ALARM, linewidth=1.4)


def wrapped_label(words: str, inches: float) -> str:
    """Wrap an axis label into lines that fit an axis of this length in inches."""
    return textwrap.fill(words, max(16, int(LETTERS_PER_INCH * inches)))


def _inches(figure: Any) -> tuple[float, float]:
    """Return width and height of a figure."""
    return figure.bbox.width / figure.dpi, figure.bbox.height / figure.dpi


def _wrapped(words: str, notes: Iterable[str], inches: float) -> str:
    """Wrap a title, and below it the notes, several to a line if they fit into the width."""
    lines: list[str] = []
    width = max(24, int(LETTERS_PER_INCH * inches))
    for note in notes:
        joined = f"{lines[-1]}; {note}" if lines else note
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, note]
    return "\n".join(textwrap.fill(part, width, break_long_words=True) for part in [words, *lines] if part)


def near_square(count: int, *, aspect: float = 1.5) -> tuple[int, int]:
    """Return rows and columns for ``count`` panels, near the ratio ``aspect`` of columns to rows; there may be gaps."""
    ideal = math.sqrt(count * aspect)
    near = range(max(1, math.ceil(0.7 * ideal)), max(1, math.floor(1.5 * ideal)) + 1)

    def cost(columns: int) -> float:
        gaps = -count % columns
        return 3 * gaps / count + abs(math.log(columns / ideal))

    columns = min(count, min(near, key=cost, default=1))
    return math.ceil(count / columns), columns


@dataclass(frozen=True)
class Grid:
    """Size and arrangement of the panels of one direction."""

    #: Width and height of one panel, and of the space for labels and title, in inches.
    size: tuple[float, float] = (2.4, 1.5)
    margin: tuple[float, float] = (0.9, 1.1)
    #: Rows and columns; nearly square by default.
    shape: tuple[int, int] | None = None
    #: Ratios of the columns, and of the rows; equal by default.
    widths: Sequence[float] | None = None
    heights: Sequence[float] | None = None
    #: Font size of the tick labels.
    ticks: str = "small"


def open_panels(
    name: str, count: int, ax: Any, figure: Any, *, ways: Sequence[str | None] = (None,), **sizes: Any
) -> Panels:
    """Open ``count`` panels of plot.``name`` for each direction in ``ways``, on a new figure or on the user's."""
    grid = Grid(**sizes)
    panels = _given_panels(name, count, len(ways), ax, figure)
    if panels is None:
        rows, columns = grid.shape or near_square(count, aspect=1.5 / len(ways))
        if figure is None:
            width = min(18.0, columns * grid.size[0] * len(ways) + grid.margin[0])
            height = min(22.0, max(2.6, rows * grid.size[1] + grid.margin[1]))
            figure = Picture(figsize=(max(4.2, width), height), layout="constrained")
        owners = [figure] if len(ways) == 1 else list(figure.subfigures(1, len(ways), wspace=0.02))
        panels = Panels([], figure, owners)
        for owner, way in zip(owners, ways, strict=True):
            if not hasattr(owner, "savefig"):  # a subfigure has no savefig of its own: save the whole figure
                owner.savefig = figure.get_figure(root=True).savefig
            ratios = {"width_ratios": grid.widths, "height_ratios": grid.heights}
            cells = owner.subplots(rows, columns, squeeze=False, **ratios).reshape(-1)
            for unused in cells[count:]:
                unused.remove()
            panels.halves.append(list(cells[:count]))
            if way is not None:
                owner.suptitle(way, fontsize="medium", fontstyle="italic")
        for number in range(1, len(ways)):
            x, look = number / len(ways), {"gid": "direction separator", **SEPARATOR}
            figure.add_artist(Line2D([x, x], [0.02, 0.86], transform=figure.transSubfigure, **look))
    for one in panels.axes:
        one.tick_params(labelsize=grid.ticks)
    return panels


def _given_panels(name: str, count: int, ways: int, ax: Any, figure: Any) -> Panels | None:
    """Return the user's Axes ``ax`` as panels, None without ``ax``; raise InputError if there are more or fewer."""
    if figure is not None and not isinstance(figure, Figure | SubFigure):
        expected = "a matplotlib Figure or SubFigure"
        raise InputError(f"plot.{name} got a figure= that is none.", got=type(figure).__name__, expected=expected)
    if ax is None:
        return None
    most = count * ways
    if isinstance(ax, np.ndarray):
        ax = list(ax.flat[: most + 1]) if ax.dtype == object else []
    found = [ax] if isinstance(ax, Axes) else listed(ax, most=most + 1) or []
    found = [one for part in found for one in (part if isinstance(part, list | tuple | np.ndarray) else [part])]
    if len(found) != most or not all(isinstance(one, Axes) for one in found):
        raise InputError(
            f"plot.{name} needs one Axes per panel in ax=.",
            got=f"{len(found)} of type {type(found[0]).__name__ if found else 'nothing'}",
            expected=f"{most} matplotlib Axes",
            hint="pass figure= (a Figure or SubFigure) and let the panels be made, or select fewer panels",
        )
    return Panels([found[i * count : (i + 1) * count] for i in range(ways)], found[0].figure, [])
