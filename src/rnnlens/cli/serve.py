"""``rnnlens tail --serve``: a page of a run's figures on this machine, redrawn as the run grows."""

from __future__ import annotations

import html
import io
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from . import console

if TYPE_CHECKING:
    from ..results.training_run import TrainingRun

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
            f'<h2>{html.escape(title)}</h2><figure><img src="{name}.png?{version}" alt="{html.escape(words)}"></figure>'
            for name, (title, words, _) in pictures.items()
        )
        title = html.escape("run" if run.path is None else run.path.name)
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
            '<link rel="stylesheet" href="style.css">'
            f'</head><body><main data-version="{html.escape(version)}"><h1>{title}</h1>'
            f"<p>{html.escape(_state(run))}</p>{sections}</main>"
            '<script src="script.js"></script></body></html>'
        ).encode()
        self.files = {
            **dict.fromkeys(("/", "/state"), ("text/html; charset=utf-8", page)),
            "/style.css": ("text/css", _STYLE.encode()),
            "/script.js": ("text/javascript", _SCRIPT.encode()),
            **{f"/{name}.png": ("image/png", content) for name, (_, _, content) in pictures.items()},
        }


def serve(states: Iterable[TrainingRun], port: int) -> None:
    """Serve the page of a run until it is interrupted, also after the run has ended.

    Raises
    ------
    OSError
        If the port is in use.
    """
    page = RunPage()
    with ThreadingHTTPServer((HOST, port), handler_of(page)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address, drawn = f"http://{HOST}:{server.server_port}/", None
        try:
            for run in states:
                if (state := (run.steps.size, run.ended)) != drawn:
                    page.draw(run)
                    if drawn is None:
                        console.say(f"serving {address} on this machine only; Ctrl-C ends it")
                    drawn = state
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
            kind, content = page.files.get(self.path.partition("?")[0], ("", b""))
            if host not in (HOST, "localhost"):
                self.send_error(403)
            elif not kind:
                self.send_error(404)
            else:
                self.send_response(200)
                for name, value in (("Content-Type", kind), ("Content-Length", str(len(content)))):
                    self.send_header(name, value)
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: the terminal is the user's."""

    return Handler


def _state(run: TrainingRun) -> str:
    """Return one line on how far the run is."""
    count = run.steps.size
    if not count:
        return "Nothing recorded yet."
    words = f"{count} {'record' if count == 1 else 'records'}, step {int(run.steps[-1])}"
    if "loss" in run.scalars:
        words += f", loss {float(run.scalars['loss'].values[-1]):.4g}"
    return f"{words}. {'Being recorded.' if run.ended is None else f'Ended: {run.ended}.'}"


def _pictures(run: TrainingRun) -> Iterable[tuple[str, tuple[str, str, bytes]]]:
    """Yield name, and title, description and PNG of each figure that this run has data for."""
    import matplotlib.pyplot as plt

    from .. import plot
    from ..errors import RnnlensError

    names = [str(name) for name in run.scalars.data_vars]
    chosen = [name for name in names if name == "loss" or name.endswith(("/reach", "/decay", "/adjoint"))] or names[:4]
    figures: dict[str, tuple[str, Callable[[], Any]]] = {
        "numbers": ("Numbers over training", lambda: plot.timeline(run, chosen)),
        "film": ("Gradient at every time step over training", lambda: plot.film(run)),
    }
    for name, (title, draw) in figures.items():
        try:
            figure = draw()[0].figure
        except RnnlensError:
            continue  # no profiles recorded, or too many kinds for one figure
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=150)
            yield name, (title, f"{title}: {_state(run)}", file.getvalue())
        plt.close(figure)
