"""The command line: ``rnnlens layers``, ``rnnlens trace``, ``rnnlens show``, ``rnnlens demo``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TextIO


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Errors of ours are printed in red, without a traceback, and end the process with code 2; an interrupt with 130.
    """
    from ..errors import RnnlensError
    from .app import app
    from .console import print_error

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app(args=None if arguments is None else list(arguments), prog_name="rnnlens")
    except RnnlensError as error:
        print_error(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        print_error("interrupted")
        sys.exit(130)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings as one yellow line; where in our code they arose does not help a user of the command line."""
    from .console import print_warning

    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | ResourceWarning):
        print_warning(str(message))
