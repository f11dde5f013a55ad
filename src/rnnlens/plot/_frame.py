"""Figures, grids of panels and titles: on a new figure, without pyplot, or on the user's Axes or figure."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any
from weakref import WeakSet

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from ..arguments import as_list, as_numbers
from ..arguments import path as path_of
from ..errors import FileError, InputError, missing_attribute
from ._axes import DOTTED, OVER_TIME, mark_top, write_text
from ._style import Style, current_style, exchange_greys

#: Colour of titles and frames with non-finite values; unlike both ends of the maps, also for colour-blind readers.
ALARM = "#c00000"
SEPARATOR: dict[str, Any] = {"color": "#404040", "linewidth": 1.2, "linestyle": "-"}


def letters_per_inch(size: float = 1.0) -> float:
    """Return how many letters of a line of text fit an inch, at ``size`` times the font size of the style."""
    return 120 / (float(mpl.rcParams["font.size"]) * size)


class Picture(Figure):
    """A matplotlib Figure that a notebook displays if it is the last value of a cell: ``axes[0].figure``.

    It is drawn in the style in which it was made, also after the ``with`` block of the style.
    """

    def __init__(self, *args: Any, style: Style | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._style = style or Style()
        self._exchanged: WeakSet[Any] = WeakSet()

    def draw(self, renderer: Any) -> None:
        """Draw the figure with the settings of its style."""
        with mpl.rc_context(self._style.settings):
            if self._style.is_dark:
                exchange_greys(self, self._exchanged)
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        return _png_bytes(self)


def _png_bytes(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


class Drawing(np.ndarray[Any, Any]):
    """Result of every plotting function: a 1-D array of Axes that a notebook displays and that can be saved.

    >>> rl.plot.heatmap(trace["lstm"].hidden_grad).save("gradient.png")  # doctest: +SKIP
    """

    @property
    def figure(self) -> Any:
        """The whole figure of the Axes, also if each direction is in its own subfigure."""
        figure = self.reshape(-1)[0].figure
        while isinstance(figure, SubFigure):
            figure = figure.figure
        return figure

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self.size:
            raise AttributeError(f"'Drawing' object has no attribute {name!r}")
        other = None
        if name == "savefig":
            other = "drawing.save(path)"
        elif hasattr(self.reshape(-1)[0], name):
            other = f"drawing[0].{name}, of the first Axes"
        elif hasattr(self.figure, name):
            other = f"drawing.figure.{name}"
        names = [known for known in vars(Drawing) if not known.startswith("_")]
        raise AttributeError(missing_attribute("Drawing", name, names, "drawing.", other))

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
        target_path = path_of("path", path)
        try:
            self.figure.savefig(target_path, **options)
        except OSError as error:
            raise FileError("The picture cannot be written.", got=f"{target_path}: {error}") from error
        except Exception as error:
            known_formats = ", ".join(sorted(self.figure.canvas.get_supported_filetypes()))
            if target_path.lower().endswith((".html", ".htm")):
                raise InputError(
                    "This figure is a picture, and has no page.",
                    got=target_path,
                    expected=known_formats,
                    hint=f".save({target_path.rpartition('.')[0] + '.svg'!r}); words (tokens=) and three components "
                    "(rl.plot.trajectories) have a page, a whole trace has rl.report",
                ) from error
            raise InputError("matplotlib cannot save this.", got=str(error), expected=known_formats) from error

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
        time_axes = [ax for ax in self.reshape(-1) if ax.get_gid() == OVER_TIME]
        if not time_axes:
            raise InputError("No panel of this figure has time across.", hint="mark the Axes by themselves")
        time_steps = np.atleast_1d(as_numbers("steps", list(steps)))
        for ax in time_axes:
            for step in time_steps:
                ax.axvline(step, **DOTTED, zorder=3, gid="mark")
                mark_top(ax, float(step), "mark")
        if label:
            text_point = (float(time_steps[0]), 1.0)
            write_text(
                time_axes[0], label, text_point, (-4, -3), over=time_axes[0].get_xaxis_transform(), va="top", gid="mark"
            )
        return self

    def _repr_png_(self) -> bytes | None:
        """Return the whole figure as PNG; None for an empty selection of its Axes."""
        return _png_bytes(self.figure) if self.size else None


@dataclass
class Panels:
    """Axes to draw into by direction, and ``direction_figures``, one for each; none if the user passed Axes."""

    axes_by_direction: list[list[Any]]
    figure: Any
    direction_figures: list[Any]

    @property
    def axes(self) -> list[Any]:
        """All matplotlib Axes of the panels in drawing order."""
        return [ax for direction_axes in self.axes_by_direction for ax in direction_axes]

    def with_title(self, title: str, notes: Iterable[str | None] = ()) -> Drawing:
        """Set the common title with the notes below it, wrapped; return a 1-D array of Axes in drawing order."""
        for ax in self.axes:
            if _mentions_nonfinite(ax.get_title()) or any(line.get_gid() == "non-finite" for line in ax.lines):
                ax.title.set_color(ALARM)
                draw_alarm_frame(ax)
        note_parts = [part for note in notes if note for part in note.split("; ")]
        colour_option = {"color": ALARM} if any(map(_mentions_nonfinite, note_parts)) else {}
        first_ax, width_inches = self.axes[0], _size_in_inches(self.figure)[0]
        if self.direction_figures and (title or note_parts):  # an array without labels has no title
            self._write_title(title, note_parts, width_inches, colour_option)
        elif not self.direction_figures:
            width_inches *= first_ax.get_position().width
            title_parts = [
                _wrap_title(title, note_parts, width_inches),
                _wrap_title(first_ax.get_title(), (), width_inches),
            ]
            first_ax.set_title("\n".join(part for part in title_parts if part), fontsize="medium", **colour_option)
        axes_array = np.empty(len(self.axes), dtype=object)
        axes_array[:] = self.axes
        return axes_array.view(Drawing)

    def _write_title(self, title: str, notes: Sequence[str], inches: float, colour: dict[str, Any]) -> None:
        """Write the title in bold, and the notes small and grey into empty lines kept below it."""
        heading = _wrap(title, letters_per_inch(_BOLD) * inches)
        note_text = _wrap("; ".join(notes), letters_per_inch(_NOTE) * inches)
        empty_lines = "\n" * (note_text.count("\n") + bool(note_text) - (not heading))
        lines = heading + empty_lines or " "  # an empty text takes no space
        suptitle = self.figure.suptitle(lines, fontsize="medium", fontweight="bold", **colour)
        if note_text:
            style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": "small", "color": "0.35"}
            style |= {"gid": "note", **colour}
            self.figure.add_artist(Annotation(note_text, (0.5, 0.0), xycoords=suptitle, **style)).set_in_layout(False)

    def label_axes(self, x_labels: Sequence[str] | str, y_label: str) -> None:
        """Label axes: common labels for each direction with several panels, else labels on the Axes."""
        direction_labels = [x_labels] * len(self.axes_by_direction) if isinstance(x_labels, str) else list(x_labels)
        for number, (direction_axes, label) in enumerate(zip(self.axes_by_direction, direction_labels, strict=True)):
            if self.direction_figures and len(direction_axes) > 1:
                self.direction_figures[number].supxlabel(label, fontsize="medium")
                # The second direction has an invisible label, so that both are equally wide.
                height_inches = _size_in_inches(self.figure)[1]
                self.direction_figures[number].supylabel(
                    wrap_label(y_label, height_inches), fontsize="medium", alpha=None if number == 0 else 0.0
                )
                continue
            for ax in direction_axes:
                ax.set_xlabel(label)
            height_inches = _size_in_inches(direction_axes[0].figure)[1] * direction_axes[0].get_position().height
            direction_axes[0].set_ylabel(
                wrap_label(y_label, height_inches), alpha=None if number == 0 or not self.direction_figures else 0.0
            )

    def label_value_axis(self, label: str) -> None:
        """Label the value axis: once at the left of a new figure, or on the first of the user's Axes."""
        for direction_figure in self.direction_figures[:1]:
            direction_figure.supylabel(label, fontsize="small")
        if not self.direction_figures:
            self.axes[0].set_ylabel(label, fontsize="small")

    def draw_legend(self, handles: Sequence[Any], *, location: str = "right upper", title: str | None = None) -> None:
        """Draw a legend beside the panels of a new figure, or in the first of the user's Axes."""
        holder, legend_location = (
            (self.direction_figures[-1], f"outside {location}") if self.direction_figures else (self.axes[0], "best")
        )
        holder.legend(handles=handles, title=title, fontsize="small", title_fontsize="small", loc=legend_location)

    def hide_inner_ticks(self) -> None:
        """Show tick labels at the left and lower border of a new figure only, for panels with common limits."""
        for direction_axes in self.axes_by_direction if self.direction_figures else ():
            grid_positions = {_grid_position(ax) for ax in direction_axes if ax.get_subplotspec() is not None}
            for ax in direction_axes:
                if ax.get_subplotspec() is None:
                    continue
                row, column = _grid_position(ax)
                ax.tick_params(labelbottom=(row + 1, column) not in grid_positions, labelleft=column == 0)


def _grid_position(ax: Any) -> tuple[int, int]:
    spec = ax.get_subplotspec()
    return spec.rowspan.start, spec.colspan.start


def _mentions_nonfinite(text: str) -> bool:
    return "NaN:" in text or "Inf:" in text


def draw_alarm_frame(ax: Any) -> None:
    """Draw a red frame around a panel, to mark NaN or infinite values."""
    for spine in ax.spines.values():
        spine.set(edgecolor=ALARM, linewidth=1.4)


def wrap_label(label: str, inches: float) -> str:
    """Wrap an axis label into lines that fit an axis of this length in inches."""
    return _wrap(label, max(16, letters_per_inch() * inches))


def _size_in_inches(figure: Any) -> tuple[float, float]:
    """Return width and height of a figure."""
    return figure.bbox.width / figure.dpi, figure.bbox.height / figure.dpi


#: Width of a letter of the title, and size of the notes, relative to plain text.
_BOLD, _NOTE = 1.13, 0.833


def _wrap(text: str, letters: float) -> str:
    """Wrap text into lines of at most ``letters`` letters."""
    return textwrap.fill(text, max(16, int(letters)), break_long_words=True)


def _wrap_title(title: str, notes: Sequence[str], inches: float) -> str:
    """Wrap the title of the user's Axes, with the notes below it."""
    return "\n".join(_wrap(line, letters_per_inch() * inches) for line in (title, "; ".join(notes)) if line)


def near_square(count: int, *, aspect: float = 1.5) -> tuple[int, int]:
    """Return rows and columns for ``count`` panels, near the ratio ``aspect`` of columns to rows; there may be gaps."""
    ideal = math.sqrt(count * aspect)
    candidates = range(max(1, math.ceil(0.7 * ideal)), max(1, math.floor(1.5 * ideal)) + 1)

    def cost(columns: int) -> float:
        gaps = -count % columns
        return 3 * gaps / count + abs(math.log(columns / ideal))

    columns = min(count, min(candidates, key=cost, default=1))
    return math.ceil(count / columns), columns


@dataclass(frozen=True)
class PanelGrid:
    """Size and arrangement of the panels of one direction."""

    #: Width and height of one panel, and of the space for labels and title, in inches.
    size: tuple[float, float] = (2.4, 1.5)
    margin: tuple[float, float] = (0.9, 1.1)
    #: Rows and columns; nearly square by default.
    shape: tuple[int, int] | None = None
    #: Ratios of the columns, and of the rows; equal by default.
    widths: Sequence[float] | None = None
    heights: Sequence[float] | None = None
    #: Least height of a new figure.
    least_height: float = 2.6
    #: Font size of the tick labels.
    ticks: str = "small"


#: Least share of its own height that a figure keeps where a style makes it narrower: labels do not shrink with it.
_LEAST_HEIGHT = 0.65


def open_panels(
    name: str, count: int, ax: Any, figure: Any, *, directions: Sequence[str | None] = (None,), **sizes: Any
) -> Panels:
    """Open ``count`` panels of plot.``name`` for each direction in ``directions``, on a new figure or on the user's."""
    grid = PanelGrid(**sizes)
    panels = _user_panels(name, count, len(directions), ax, figure)
    if panels is None:
        rows, columns = grid.shape or near_square(count, aspect=1.5 / len(directions))
        if figure is None:
            width = min(18.0, columns * grid.size[0] * len(directions) + grid.margin[0])
            height = min(22.0, max(grid.least_height, rows * grid.size[1] + grid.margin[1]))
            figure_style, width = current_style(), max(4.2, width)
            if figure_style.width is not None:
                height *= min(1.0, max(figure_style.width / width, _LEAST_HEIGHT))
                width = figure_style.width
            figure = Picture(figsize=(width, height), layout="constrained", style=figure_style)
        direction_figures = (
            [figure] if len(directions) == 1 else list(figure.subfigures(1, len(directions), wspace=0.02))
        )
        panels = Panels([], figure, direction_figures)
        for direction_figure, direction in zip(direction_figures, directions, strict=True):
            if not hasattr(direction_figure, "savefig"):  # a subfigure has no savefig of its own: save the whole figure
                direction_figure.savefig = figure.get_figure(root=True).savefig
            size_ratios = {"width_ratios": grid.widths, "height_ratios": grid.heights}
            grid_axes = direction_figure.subplots(rows, columns, squeeze=False, **size_ratios).reshape(-1)
            for unused_ax in grid_axes[count:]:
                unused_ax.remove()
            panels.axes_by_direction.append(list(grid_axes[:count]))
            if direction is not None:
                direction_figure.suptitle(direction, fontsize="medium", fontstyle="italic")
        for number in range(1, len(directions)):
            x, style = number / len(directions), {"gid": "direction separator", **SEPARATOR}
            figure.add_artist(Line2D([x, x], [0.02, 0.86], transform=figure.transSubfigure, **style))
    for panel_ax in panels.axes:
        panel_ax.tick_params(labelsize=grid.ticks)
    return panels


def _user_panels(name: str, count: int, direction_count: int, ax: Any, figure: Any) -> Panels | None:
    """Return the user's Axes ``ax`` as panels, None without ``ax``; raise InputError if there are more or fewer."""
    if figure is not None and not isinstance(figure, Figure | SubFigure):
        expected = "a matplotlib Figure or SubFigure"
        raise InputError(f"plot.{name} got a figure= that is none.", got=type(figure).__name__, expected=expected)
    if ax is None:
        return None
    expected_count = count * direction_count
    if isinstance(ax, np.ndarray):
        ax = list(ax.flat[: expected_count + 1]) if ax.dtype == object else []
    axes_found = [ax] if isinstance(ax, Axes) else as_list(ax, most=expected_count + 1) or []
    axes_found = [
        item for part in axes_found for item in (part if isinstance(part, list | tuple | np.ndarray) else [part])
    ]
    if len(axes_found) != expected_count or not all(isinstance(item, Axes) for item in axes_found):
        raise InputError(
            f"plot.{name} needs one Axes per panel in ax=.",
            got=f"{len(axes_found)} of type {type(axes_found[0]).__name__ if axes_found else 'nothing'}",
            expected=f"{expected_count} matplotlib Axes",
            hint="pass figure= (a Figure or SubFigure) and let the panels be made, or select fewer panels",
        )
    return Panels([axes_found[i * count : (i + 1) * count] for i in range(direction_count)], axes_found[0].figure, [])
