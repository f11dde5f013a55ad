"""Output of the command line: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import re
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


#: What to type in Python -> what to type on the command line, as regular expressions of lines of messages.
_COMMAND_LINE_WORDS = (
    (r"loss=callable\(output, target\)", "--loss NAME, or --loss package.module:function"),
    (r"model\.compile\(loss=\.\.\.\), or pass loss=, such as loss=\"mse\"", "--loss mse"),
    (r"loss=torch\.nn\.functional\.(\w+?)(_loss)?$", r"--loss \1"),
    (r"loss=lambda (.*?), where (\w+) is .*$", r"--loss my_module:loss, in which loss = lambda \1"),
    (r"loss=lambda (.*)$", r"--loss my_module:loss, in which loss = lambda \1"),
    (r"rl\.trace\(model, x, y, loss=\.\.\.\) or a compiled model", "--loss NAME"),
    (r" in place of y\b", ", saved as y of the data file"),
    (r"^(  try:      )layers=\[", r"\1--layers ["),
)


def in_command_line(text: str) -> str:
    """Return a message with what to type on the command line in place of what to type in Python."""
    lines = text.split("\n")
    for pattern, words in _COMMAND_LINE_WORDS:
        lines = [re.sub(pattern, words, line) if line.startswith(("  expected:", "  try:")) else line for line in lines]
    return "\n".join(lines)


def print_remark(text: str) -> None:
    """Print a remark on standard error, such as the name of a written file."""
    stderr_console().print(Text(text, style="dim"), soft_wrap=True)


def print_plain(value: Any) -> None:
    """Print the text of a result; lines longer than the terminal are not wrapped."""
    stdout_console().print(Text(str(value)), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output. Raises ValueError for numbers that are not finite."""
    stdout_console().print(Text(json.dumps(value, indent=2, allow_nan=False)), soft_wrap=True)
