"""``rnnlens tail``: shows a training while it runs, as a live table in a terminal or as lines in a pipe."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import FileError
from . import console

if TYPE_CHECKING:
    from ..results.training_run import TrainingRun

_BARS = "▁▂▃▄▅▆▇█"
#: Largest number of bars in a row, and of rows in the table.
_WIDE, _LONG = 32, 24


def tail(
    path: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN.zarr")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait if the run does not exist yet.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Seconds between two reads of the run.")
    ] = 1.0,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Only scalars with this text in their name; may be repeated."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the norm of each weight and of its gradient.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Show the current state once, and exit.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page of the run's figures to a browser on this machine.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for any that is free.")] = 8787,
) -> None:
    """Show a training while it runs in another process; Ctrl-C does not stop the training.

    Example: rnnlens tail runs/a.zarr --only reach
    """
    states = _states(path, wait=wait, every=every, once=once)
    names = Chosen(tuple(only or ()), everything)
    if serve:
        _serve(states, port)
    elif sys.stdout.isatty():
        _live(states, names)
    else:
        _lines(states, names)


def _states(path: Path, *, wait: bool, every: float, once: bool) -> Iterator[TrainingRun]:
    """Yield the run repeatedly, until it has ended.

    Raises
    ------
    FileError
        If the run does not exist and ``wait`` is False, or the path is no folder.
    """
    from ..results.training_run import is_run

    while not is_run(path):
        if path.exists() and not path.is_dir():
            raise FileError("This is no run.", got=str(path), expected="a folder that a training writes")
        if not wait:
            hint = "--wait, if the training is yet to begin"
            raise FileError("There is no run here.", got=str(path), hint=hint)
        time.sleep(every)
    while True:
        run = _read(path)
        if run is not None:
            yield run
            if once or run.ended is not None:
                return
        time.sleep(every)


def _read(path: Path) -> TrainingRun | None:
    """Read the run in its current state; return None if its writer is replacing files."""
    from ..results.training_run import read_run

    for attempt in (1, 2, 3):
        try:
            return read_run(path)
        except (FileNotFoundError, KeyError, ValueError):
            if not path.is_dir():
                raise FileError("The run is gone.", got=str(path)) from None
            time.sleep(0.05 * attempt)
    return None


def _serve(states: Iterator[TrainingRun], port: int) -> None:
    from .serve import serve

    try:
        serve(states, port)
    except OSError as error:
        raise FileError("The port cannot be used.", got=f"{port} ({error})", hint="--port 0") from error


@dataclass(frozen=True)
class Chosen:
    """Which scalars are shown: those whose name contains one of ``only``; norms of weights only if ``everything``."""

    only: tuple[str, ...] = ()
    everything: bool = False

    def names(self, run: TrainingRun) -> list[str]:
        """Return names of scalars: the loss first, then how far gradients reach, then the others as recorded."""
        present = list(map(str, run.scalars.data_vars))
        if self.only:
            present = [name for name in present if any(word in name for word in self.only)]
        elif not self.everything:
            present = [name for name in present if "/weight_norm/" not in name and "/weight_grad_norm/" not in name]
        return sorted(present, key=lambda name: (name != "loss", not name.endswith("/reach")))


def _lines(states: Iterator[TrainingRun], chosen: Chosen) -> None:
    """Print one plain line per new record, and the reason of the end."""
    told, last = 0, None
    for run in states:
        for i in range(told, run.steps.size):
            numbers = (f"{name}={value:.6g}" for name, value in _numbers(run, i, chosen))
            head = f"step={int(run.steps[i])} epoch={int(run.scalars['epoch'][i])}"
            console.print_plain(" ".join([head, *numbers]))
        told, last = run.steps.size, run
    if last is not None and last.ended is not None:
        console.print_plain(f"ended={last.ended} records={told}")


def _numbers(run: TrainingRun, i: int, chosen: Chosen) -> Iterator[tuple[str, float]]:
    for name in chosen.names(run):
        value = float(run.scalars[name].values[i])
        if not math.isnan(value) or name == "loss":
            yield name, value


def _live(states: Iterator[TrainingRun], chosen: Chosen) -> None:
    """Show a table that is redrawn as the run grows; the last state remains on the screen."""
    out = console.out()
    with Live(console=out, auto_refresh=False, transient=False) as live:
        try:
            for run in states:
                live.update(picture(run, chosen, height=out.height), refresh=True)
        except KeyboardInterrupt:
            out.file.write("\x1b[1A")  # one line up again: "interrupted" was printed, and the table overwrites it
            raise


def picture(run: TrainingRun, chosen: Chosen = Chosen(), *, height: int = 40) -> Group:
    """Return the state of a run: current step, latest and first numbers, their course, and notes."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title, side in (("", "left"), ("latest", "right"), ("first", "right"), ("over training", "left")):
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    names, room = chosen.names(run), max(3, min(_LONG, height - 6))
    for name in names[:room]:
        values = [float(v) for v in run.scalars[name].values]
        if values:
            table.add_row(Text(name), _number(values[-1]), _number(values[0]), bars(values))
    parts: list[Any] = [_headline(run), table]
    if len(names) > room:
        parts.append(Text(f"... and {len(names) - room} more; --only NAME selects", style="dim"))
    parts += [Text(note, style="yellow") for note in run.notes[-3:]]
    return Group(*parts)


def _headline(run: TrainingRun) -> Text:
    from ..results.training_run import age

    count = run.steps.size
    words = Text("run" if run.path is None else run.path.name, style="bold", no_wrap=True, overflow="ellipsis")
    words.append(f"  {count} {'record' if count == 1 else 'records'}", style="not bold")
    if count:
        words.append(f", step {int(run.steps[-1])}, epoch {int(run.scalars['epoch'][-1])}", style="not bold")
    if run.ended is not None:
        words.append(f"  {run.ended}", style="not bold green" if run.ended == "finished" else "not bold red")
    elif count:
        words.append(f"  last record {_ago(age(run))} ago", style="not bold dim")
    else:
        words.append("  nothing recorded yet", style="not bold dim")
    return words


def _ago(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _number(value: float) -> Text:
    return Text(f"{value:.4g}", style="" if math.isfinite(value) else "bold red")


def bars(values: list[float], wide: int = _WIDE) -> Text:
    """Format numbers over training as a row of bars, the latest at the right.

    A number that never changes is a row of dots; ``!`` marks numbers that are not finite.

    >>> bars([0.0, 1.0, 2.0, float("inf"), 7.0]).plain
    '▁▂▃!█'
    >>> bars([3.0, 3.0]).plain
    '··'
    """
    count = min(wide, len(values))
    picked = [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]
    finite = [value for value in picked if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span, drawn = high - low, Text()
    for value in picked:
        if math.isfinite(value) and not span:
            drawn.append("·")
        elif math.isfinite(value):
            drawn.append(_BARS[min(7, int(8 * (value - low) / span))])
        else:
            drawn.append("!", style="bold red")
    return drawn
