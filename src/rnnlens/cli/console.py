"""Output of the command line: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

#: Width in characters of a table printed to a file or a pipe.
PIPE_WIDTH = 160


def out() -> Console:
    """Return a console for standard output, without highlighting."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else PIPE_WIDTH)


def err() -> Console:
    """Return a console for standard error, without highlighting."""
    return Console(stderr=True, highlight=False)


def print_error(text: str) -> None:
    """Print an error in red on standard error; the first line is bold."""
    first, _, rest = text.partition("\n")
    styled = Text(first, style="bold red")
    if rest:
        styled.append(f"\n{rest}", style="not bold red")
    err().print(styled, soft_wrap=True)


def say(text: str) -> None:
    """Print a remark on standard error, such as the name of a written file."""
    err().print(Text(text, style="dim"), soft_wrap=True)


def print_plain(value: Any) -> None:
    """Print the text of a result; lines longer than the terminal are not wrapped."""
    out().print(Text(str(value)), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output. Raises ValueError for numbers that are not finite."""
    out().print(Text(json.dumps(value, indent=2, allow_nan=False)), soft_wrap=True)
