"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: Largest seed that NumPy and Keras accept.
LARGEST_SEED = 2**32 - 1

#: Description of the exit codes in ``--help``.
EXIT_CODES = (
    "Exit codes: 0 success; 1 an error nobody foresaw; 2 wrong arguments, or something refused with a reason; "
    "3 a finding named with --fail-on; 130 interrupted."
)

Model = Annotated[str, typer.Argument(help="A .keras file, or package.module:factory.", metavar="MODEL")]
Weights = Annotated[Path | None, typer.Option(help="Weights file for the model of a factory.")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Module with custom layers to import first; may be repeated."),
]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Load also files whose content can run code.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Largest size of a file in memory, such as '4 GiB'.")]
Saved = Annotated[Path | None, typer.Option("--output", "-o", help="Save the result to this path: .nc or .zarr.")]
Loss = Annotated[
    str | None, typer.Option(help="Name of a loss, or package.module:function; default: the compiled loss.")
]
LayerNames = Annotated[
    list[str] | None, typer.Option("--layers", "-l", metavar="NAME", help="Only this layer; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def split(names: list[str] | None) -> list[str] | None:
    """Split names given one by one or separated by commas; None without names."""
    return [part.strip() for name in names for part in name.split(",") if part.strip()] if names else None
