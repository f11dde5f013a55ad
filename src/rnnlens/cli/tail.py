"""``rnnlens tail``: a training while it runs, as a live table, as lines in a pipe, or as a page on this machine."""

from __future__ import annotations

import html
import io
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import FileError, RnnlensError
from ..results.training_run import WRITTEN, TrainingRun, is_run, read_run
from . import console

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


#: Only this machine can open the page.
HOST = "127.0.0.1"
#: Nothing is loaded from elsewhere, and nothing but the script of the page runs.
POLICY = (
    "default-src 'none'; img-src 'self' data:; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'"
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --soft: #595959; --line: #ddd }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181c; --soft: #a8a8a8; --line: #3a3d42 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem;
  max-width: 62rem }
h1 { font-size: 1.3rem; margin: 0 } p { margin: .3rem 0; color: var(--soft) }
figure { margin: 1.2rem 0; padding: .5rem; background: #fff; border: 1px solid var(--line); border-radius: 6px }
figure img { display: block; width: 100%; height: auto } h2 { font-size: 1rem; margin: 1.2rem 0 0 }
"""
#: Replaces the contents of the page where the run has grown; leaves it as it is where the server has ended.
_SCRIPT = """
const main = document.querySelector("main");
setInterval(async () => {
  try {
    const text = await (await fetch("state")).text();
    const next = new DOMParser().parseFromString(text, "text/html").querySelector("main");
    if (next.dataset.version !== main.dataset.version) {
      main.dataset.version = next.dataset.version;
      main.replaceChildren(...next.childNodes);
    }
  } catch (error) {}
}, 1000);
"""


class RunPage:
    """The page of a run and its pictures, as bytes by path; replaced as a whole when the run has grown."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, bytes]] = {}

    def draw(self, run: TrainingRun) -> None:
        """Draw the figures of the run in its current state."""
        version = f"{run.steps.size}-{run.ended}"
        pictures = dict(_pictures(run)) if run.steps.size else {}
        sections = "".join(
            f'<h2>{html.escape(title)}</h2><figure><img src="{name}.png?{version}" alt="{html.escape(alt)}"></figure>'
            for name, (title, alt, _) in pictures.items()
        )
        title = html.escape("run" if run.path is None else run.path.name)
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
            '<link rel="stylesheet" href="style.css">'
            f'</head><body><main data-version="{html.escape(version)}"><h1>{title}</h1>'
            f"<p>{html.escape(_state_text(run))}</p>{sections}</main>"
            '<script src="script.js"></script></body></html>'
        ).encode()
        self.files = {
            **dict.fromkeys(("/", "/state"), ("text/html; charset=utf-8", page)),
            "/style.css": ("text/css", _STYLE.encode()),
            "/script.js": ("text/javascript", _SCRIPT.encode()),
            **{f"/{name}.png": ("image/png", content) for name, (_, _, content) in pictures.items()},
        }


def serve(states: Iterable[TrainingRun], port: int) -> None:
    """Serve the page of a run until it is interrupted, also after the run has ended; FileError if the port is taken."""
    page = RunPage()
    try:
        server = ThreadingHTTPServer((HOST, port), handler_of(page))
    except OSError as error:
        raise FileError("The port cannot be used.", got=f"{port} ({error})", hint="--port 0") from error
    with server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address, drawn_state = f"http://{HOST}:{server.server_port}/", None
        try:
            for run in states:
                if (state := (run.steps.size, run.ended)) != drawn_state:
                    page.draw(run)
                    if drawn_state is None:
                        console.print_remark(f"serving {address} on this machine only; Ctrl-C ends it")
                    drawn_state = state
            threading.Event().wait()  # the run has ended; the page stays
        finally:
            server.shutdown()


def handler_of(page: RunPage) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests for the files of a page."""

    class Handler(BaseHTTPRequestHandler):
        """Answers GET with a file of the page; requests under another host name are refused."""

        timeout = 10

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            content_type, content = page.files.get(self.path.partition("?")[0], ("", b""))
            if host not in (HOST, "localhost"):
                self.send_error(403)
            elif not content_type:
                self.send_error(404)
            else:
                self.send_response(200)
                for name, value in (("Content-Type", content_type), ("Content-Length", str(len(content)))):
                    self.send_header(name, value)
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: the terminal is the user's."""

    return Handler


def _state_text(run: TrainingRun) -> str:
    """Return one line of text with the last step and loss of a run, and how it ended."""
    record_count = run.steps.size
    if not record_count:
        return "Nothing recorded yet."
    state_text = f"{record_count} {'record' if record_count == 1 else 'records'}, step {int(run.steps[-1])}"
    if "loss" in run.scalars:
        state_text += f", loss {float(run.scalars['loss'].values[-1]):.4g}"
    return f"{state_text}. {'Being recorded.' if run.ended is None else f'Ended: {run.ended}.'}"


def _pictures(run: TrainingRun) -> Iterable[tuple[str, tuple[str, str, bytes]]]:
    """Yield name, and title, description and PNG of each figure that this run has data for."""
    from .. import plot  # a table in a terminal needs no matplotlib

    names = [str(name) for name in run.scalars.data_vars]
    timeline_names = [
        name for name in names if name == "loss" or name.endswith(("/reach", "/decay", "/adjoint"))
    ] or names[:4]
    figures: dict[str, tuple[str, Callable[[], Any]]] = {
        "numbers": ("Numbers over training", lambda: plot.timeline(run, timeline_names)),
        "film": ("Gradient at every time step over training", lambda: plot.film(run)),
    }
    for name, (title, draw) in figures.items():
        try:
            figure = draw()[0].figure
        except RnnlensError:
            continue  # no profiles recorded, or too many kinds for one figure
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=150)
            yield name, (title, f"{title}: {_state_text(run)}", file.getvalue())
