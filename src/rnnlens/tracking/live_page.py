"""``serve``: the method of every watch that serves a live page of its run."""

from __future__ import annotations

from os import PathLike
from typing import Any, Protocol

from ..results.training_run import serve_run


class WritesRun(Protocol):
    """A watch, with the path of its run; None if it writes nothing to disk."""

    _path: str | PathLike[str] | None


def serve(self: WritesRun, port: int = 8787) -> Any:
    """Serve a live page of the run from threads of this process; the return value prints the address.

    Parameters
    ----------
    port
        Port of the page; 0 for any that is free.

    Raises
    ------
    InputError
        If the watch writes nothing to disk.
    FileError
        If the port cannot be used.
    """
    return serve_run(self._path, port)
