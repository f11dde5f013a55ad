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


def stdout_console() -> Console:
    """Return a console for standard output, without highlighting."""
    knows_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if knows_width else PIPE_WIDTH)


def stderr_console() -> Console:
    """Return a console for standard error, without highlighting."""
    return Console(stderr=True, highlight=False)


def print_error(text: str) -> None:
    """Print an error in red on standard error; the first line is bold."""
    first_line, _, other_lines = text.partition("\n")
    styled_text = Text(first_line, style="bold red")
    if other_lines:
        styled_text.append(f"\n{other_lines}", style="not bold red")
    stderr_console().print(styled_text, soft_wrap=True)


def print_remark(text: str) -> None:
    """Print a remark on standard error, such as the name of a written file."""
    stderr_console().print(Text(text, style="dim"), soft_wrap=True)


def print_plain(value: Any) -> None:
    """Print the text of a result; lines longer than the terminal are not wrapped."""
    stdout_console().print(Text(str(value)), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output. Raises ValueError for numbers that are not finite."""
    stdout_console().print(Text(json.dumps(value, indent=2, allow_nan=False)), soft_wrap=True)
