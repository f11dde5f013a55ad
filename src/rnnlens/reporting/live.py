"""The live page of a training: alerts, curves and film that grow while the run is written, served on this machine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..errors import FileError, RnnlensError
from ..results.encoding import to_strict_json
from ..results.training_run import TrainingRun, is_run, read_run
from .draw import palette_colours
from .page import asset
from .training import figures_of_runs

#: Only this machine can open the page.
HOST = "127.0.0.1"
#: Nothing is loaded from elsewhere, and nothing but the script of the page runs.
POLICY = (
    "default-src 'none'; img-src 'self' data: blob:; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'"
)
#: Parts of the script: those of a report without its bar of samples, and the one that asks for news.
_SCRIPTS = ("base", "values", "panel", "lines", "maps", "downloads", "theme", "live")


class LivePage:
    """The files of the page by path: the page, its script and style sheet, and the state of the runs as JSON."""

    def __init__(self, title: str) -> None:
        script = "\n".join(["'use strict';", "(function () {", *(asset(f"{name}.js") for name in _SCRIPTS), "})();"])
        data = {
            "figures": [],
            "palettes": {"size": bytes(palette_colours("size").ravel()).hex()},
            "moments": [],
            "steps": 0,
            "samples": [],
            "tracks": [],
        }
        page = Markup(asset("live.html")).format(title=title, data=Markup(json.dumps(data)))
        self.files: dict[str, tuple[str, bytes]] = {
            "/": ("text/html; charset=utf-8", page.encode()),
            "/style.css": ("text/css", asset("report.css").encode()),
            "/script.js": ("text/javascript", script.encode()),
        }
        self.show({})

    def show(self, runs: Mapping[str, TrainingRun]) -> None:
        """Replace the state by that of the runs; without runs the page waits for the first record."""
        figures = figures_of_runs({name: run for name, run in runs.items() if run.steps.size})
        suffixes = {name: f" ({name})" if len(runs) > 1 else "" for name in runs}
        state = {
            "version": "; ".join(f"{name} {run.steps.size} {run.ended}" for name, run in runs.items()),
            "lines": [f"{name}: {state_sentence(run)}" for name, run in runs.items()] or ["Waiting for the run."],
            "alerts": [
                f"{sentence}{suffixes[name]}"
                for name, run in runs.items()
                for sentence in [*map(str, run.findings), *(alert.sentence for alert in run.alerts)]
            ],
            "figures": [figure.to_json() | {"words": figure.caption.sentence} for figure in figures],
        }
        self.files["/state"] = ("application/json", json.dumps(to_strict_json(state)).encode())


def state_sentence(run: TrainingRun) -> str:
    """Return one line of text with the last step and loss of a run, and how it ended."""
    record_count = run.steps.size
    if not record_count:
        return "Nothing recorded yet."
    state_text = f"{record_count} {'record' if record_count == 1 else 'records'}, step {int(run.steps[-1])}"
    if "loss" in run.scalars:
        state_text += f", loss {float(run.scalars['loss'].values[-1]):.4g}"
    return f"{state_text}. {'Being recorded.' if run.ended is None else f'Ended: {run.ended}.'}"


def handler_of(page: LivePage) -> type[BaseHTTPRequestHandler]:
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


class LiveServer:
    """A server of the live page of runs, in threads of its own; runs may not exist yet.

    Attributes
    ----------
    address
        Address of the page on this machine.
    """

    def __init__(self, paths: Mapping[str, Path], port: int, *, interval: float = 1.0) -> None:
        self.paths, self.interval, self.page = dict(paths), interval, LivePage(", ".join(paths))
        try:
            self._server = ThreadingHTTPServer((HOST, port), handler_of(self.page))
        except OSError as error:
            raise FileError("The port cannot be used.", got=f"{port} ({error})", hint="--port 0") from error
        self._server.daemon_threads = True
        self._ended = threading.Event()
        for target in (self._server.serve_forever, self._follow):
            threading.Thread(target=target, daemon=True).start()

    @property
    def port(self) -> int:
        """Port of the page."""
        return int(self._server.server_port)

    @property
    def address(self) -> str:
        """Address of the page on this machine."""
        return f"http://{HOST}:{self.port}/"

    @property
    def tunnel(self) -> str:
        """Command, for another machine, after which the same address opens the page there."""
        return f"ssh -N -L {self.port}:{HOST}:{self.port} {socket.gethostname()}"

    def close(self) -> None:
        """Stop serving."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _follow(self) -> None:
        """Show the runs whenever one of them has grown."""
        shown_state: Any = None
        while not self._ended.is_set():
            runs = {name: run for name, path in self.paths.items() if (run := _read_if_possible(path)) is not None}
            state = [(name, run.steps.size, run.ended) for name, run in runs.items()]
            if state != shown_state:
                self.page.show(runs)
                shown_state = state
            self._ended.wait(self.interval)

    def __repr__(self) -> str:
        return f"<rnnlens live page> {self.address}\n  from another machine: {self.tunnel}"


def _read_if_possible(path: Path) -> TrainingRun | None:
    """Read a run; None while it does not exist or its writer replaces files."""
    try:
        return read_run(path) if is_run(path) else None
    except (RnnlensError, OSError, KeyError, ValueError):
        return None
