"""What the command line prints, and where: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns of a table that goes to a file or a pipe, which has no width of its own.
PIPE_WIDTH = 160


def out() -> Console:
    """Standard output; numbers and names as they are, without highlighting."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else PIPE_WIDTH)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


def print_error(text: str) -> None:
    """Red; the first line, which says what went wrong, in bold."""
    first, _, rest = text.partition("\n")
    styled = Text(first, style="bold red")
    if rest:
        styled.append(f"\n{rest}", style="not bold red")
    err().print(styled, soft_wrap=True)


def print_warning(text: str) -> None:
    """Yellow, one line."""
    err().print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


def say(text: str) -> None:
    """Mention a choice made on the way, or a file written."""
    err().print(Text(text, style="dim"), soft_wrap=True)


def print_plain(value: Any) -> None:
    """The text of a result, wider than the terminal if it is."""
    out().print(Text(str(value)), soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output, for scripts; numbers that are not finite are null."""
    out().print(Text(json.dumps(value, indent=2, allow_nan=False)), soft_wrap=True)


def layer_table(found: Any) -> Table:
    """A Rich table of ``rl.layers(model)``."""
    table = Table(title=f"{len(found)} recurrent {'layer' if len(found) == 1 else 'layers'}", title_justify="left")
    for column in found.columns:
        table.add_column(column, overflow="fold")
    for row in found.rows():
        table.add_row(*(Text(cell) for cell in row))
    return table
