"""``rnnlens tail``: a training while it runs, as a live table, as lines in a pipe, or as a page on this machine."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import FileError, InputError, did_you_mean
from ..results.training_run import ALERT_FINDINGS, WRITTEN, TrainingRun, is_of_one_weight, is_run, read_run
from . import console

#: Exit code if an alert named with --until was raised.
ALERT_RAISED = 3

_BARS = "▁▂▃▄▅▆▇█"
#: Largest number of bars in a row, and of rows in the table.
_MAX_BARS, _MAX_ROWS = 32, 24


def states_of(path: Path, *, wait: bool, interval: float, once: bool) -> Iterator[TrainingRun]:
    """Yield the run repeatedly, until it has ended; raise FileError if there is none and ``wait`` is False."""
    while not is_run(path):
        if path.exists() and not path.is_dir():
            raise FileError("This is no run.", got=str(path), expected="a folder that a training writes")
        if not wait:
            hint = "--wait, if the training is yet to begin"
            raise FileError("There is no run here.", got=str(path), hint=hint)
        time.sleep(interval)
    while True:
        run = _read(path)
        if run is not None:
            yield run
            if once or run.ended is not None:
                return
        time.sleep(interval)


def _read(path: Path) -> TrainingRun | None:
    """Read the run in its current state; return None if its writer is replacing files."""
    for attempt in (1, 2, 3):
        try:
            return read_run(path)
        except (FileNotFoundError, KeyError, ValueError):
            if not path.is_dir():
                raise FileError("The run is gone.", got=str(path)) from None
            time.sleep(0.05 * attempt)
    return None


@dataclass(frozen=True)
class ChosenScalars:
    """Which scalars are shown: those whose name contains one of ``only``; of single weights only if ``everything``."""

    only: tuple[str, ...] = ()
    everything: bool = False

    def names(self, run: TrainingRun) -> list[str]:
        """Return names of scalars: the loss first, then how far gradients reach, then the others as recorded."""
        present = list(map(str, run.scalars.data_vars))
        if self.only:
            present = [name for name in present if any(word in name for word in self.only)]
        elif not self.everything:
            present = [name for name in present if not is_of_one_weight(name)]
        return sorted(present, key=lambda name: (name != "loss", not name.endswith("/reach")))


def print_lines(states: Iterator[TrainingRun], chosen_scalars: ChosenScalars) -> None:
    """Print one plain line per new record, and the reason of the end."""
    printed_count, last_run = 0, None
    for run in states:
        for i in range(printed_count, run.steps.size):
            values = ((name, float(run.scalars[name].values[i])) for name in chosen_scalars.names(run))
            numbers = (f"{name}={value:.6g}" for name, value in values if not math.isnan(value) or name == "loss")
            step_text = f"step={int(run.steps[i])} epoch={int(run.scalars['epoch'][i])}"
            console.print_plain(" ".join([step_text, *numbers]))
        printed_count, last_run = run.steps.size, run
    if last_run is not None and last_run.ended is not None:
        for finding in last_run.findings:
            console.print_plain(f"finding={finding}")
        console.print_plain(f"ended={last_run.ended} records={printed_count}")


def show_live(states: Iterator[TrainingRun], chosen_scalars: ChosenScalars) -> None:
    """Show a table that is redrawn as the run grows; the last state remains on the screen."""
    stdout_console = console.stdout_console()
    with Live(console=stdout_console, auto_refresh=False, transient=False) as live:
        try:
            for run in states:
                live.update(run_group(run, chosen_scalars, height=stdout_console.height), refresh=True)
        except KeyboardInterrupt:
            # one line up again: "interrupted" was printed, and the table overwrites it
            stdout_console.file.write("\x1b[1A")
            raise


def run_group(run: TrainingRun, chosen_scalars: ChosenScalars = ChosenScalars(), *, height: int = 40) -> Group:
    """Return the state of a run as text: current step, latest and first scalars, their course, and notes."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title, justification in (("", "left"), ("latest", "right"), ("first", "right"), ("over training", "left")):
        table.add_column(title, justify=justification, no_wrap=True)  # type: ignore[arg-type]
    scalar_names, row_limit = chosen_scalars.names(run), max(3, min(_MAX_ROWS, height - 6))
    for name in scalar_names[:row_limit]:
        values = [float(v) for v in run.scalars[name].values]
        if values:
            table.add_row(Text(name), _number(values[-1]), _number(values[0]), bars(values))
    parts: list[Any] = [_headline(run), table]
    if len(scalar_names) > row_limit:
        parts.append(Text(f"... and {len(scalar_names) - row_limit} more; --only NAME selects", style="dim"))
    parts += [Text(str(finding), style="yellow") for finding in run.findings]
    parts += [Text(note, style="yellow") for note in run.notes[-3:]]
    return Group(*parts)


def _headline(run: TrainingRun) -> Text:
    record_count = run.steps.size
    headline = Text("run" if run.path is None else run.path.name, style="bold", no_wrap=True, overflow="ellipsis")
    headline.append(f"  {record_count} {'record' if record_count == 1 else 'records'}", style="not bold")
    if record_count:
        headline.append(f", step {int(run.steps[-1])}, epoch {int(run.scalars['epoch'][-1])}", style="not bold")
    if run.ended is not None:
        headline.append(f"  {run.ended}", style="not bold green" if run.ended == "finished" else "not bold red")
    elif record_count:
        written_times = run.scalars[WRITTEN].values
        seconds = max(time.time() - float(written_times[-1]), 0)
        long_age = f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
        headline.append(f"  last record {f'{seconds:.0f} s' if seconds < 100 else long_age} ago", style="not bold dim")
    else:
        headline.append("  nothing recorded yet", style="not bold dim")
    return headline


def _number(value: float) -> Text:
    return Text(f"{value:.4g}", style="" if math.isfinite(value) else "bold red")


def bars(values: list[float], max_bars: int = _MAX_BARS) -> Text:
    """Format numbers over training as a row of bars, the latest at the right.

    A number that never changes is a row of dots; ``!`` marks numbers that are not finite.

    >>> bars([0.0, 1.0, 2.0, float("inf"), 7.0]).plain
    '▁▂▃!█'
    >>> bars([3.0, 3.0]).plain
    '··'
    """
    bar_count = min(max_bars, len(values))
    picked_values = [values[round(i * (len(values) - 1) / max(bar_count - 1, 1))] for i in range(bar_count)]
    finite_values = [value for value in picked_values if math.isfinite(value)]
    lowest, highest = (min(finite_values), max(finite_values)) if finite_values else (0.0, 0.0)
    span, bar_text = highest - lowest, Text()
    for value in picked_values:
        if math.isfinite(value) and not span:
            bar_text.append("·")
        elif math.isfinite(value):
            bar_text.append(_BARS[min(7, int(8 * (value - lowest) / span))])
        else:
            bar_text.append("!", style="bold red")
    return bar_text


def until(states: Iterator[TrainingRun], findings: Collection[str]) -> Iterator[TrainingRun]:
    """Yield the states of a run up to the first with an alert of the given kinds; then exit with code 3."""
    for run in states:
        yield run
        alert = next((alert for alert in run.alerts if alert.finding in findings), None)
        if alert is not None:
            console.print_error(alert.sentence)
            raise typer.Exit(ALERT_RAISED)


def alert_kinds(names: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of alerts named with --until; "any" stands for all of them."""
    for name in names:
        if name not in ("any", *ALERT_FINDINGS):
            hint = did_you_mean(name, ("any", *ALERT_FINDINGS))
            raise InputError("--until names no alert.", got=name, hint=hint)
    return ALERT_FINDINGS if "any" in names else tuple(names)


def serve(paths: Sequence[Path], states: Iterator[TrainingRun], port: int, *, wait: bool, interval: float) -> None:
    """Serve the page of one run, or of several to compare, until it is interrupted, also after the run has ended.

    Raises
    ------
    FileError
        If the port is taken, or if there is no run and ``wait`` is False.
    """
    from ..reporting.live import LiveServer  # a table in a terminal needs no page

    if not wait:
        next(states)
    server = LiveServer(_names_of(paths), port, interval=interval)
    try:
        console.print_remark(f"serving {server.address} on this machine only; Ctrl-C ends it")
        console.print_remark(f"from another machine: {server.tunnel}")
        for _ in states:  # which may end by an alert
            pass
        threading.Event().wait()  # the run has ended; the page stays
    finally:
        server.close()


def _names_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the runs by file name, or by path where two have the same."""
    names = [path.name for path in paths]
    return {path.name if names.count(path.name) == 1 else str(path): path for path in paths}
