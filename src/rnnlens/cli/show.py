"""``rnnlens show``, and printing of results for ``rnnlens trace``: a table with curves, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError, did_you_mean
from ..settings import options
from . import console
from .words import Memory


def show(
    path: Annotated[Path, typer.Argument(help="A saved result.", metavar="RUN.nc")],
    name: Annotated[str | None, typer.Argument(help="A layer, or layer.quantity.", metavar="[LAYER]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; for one quantity with all its values.")] = False,
    memory: Memory = None,
) -> None:
    """Print a saved result, or one layer or quantity of it."""
    from ..results.opening import open as read

    options(memory=memory)
    result = read(path)
    if name is None:
        print_summary(result, as_json=as_json)
    elif as_json:
        console.print_json(_json(_part(result, name)))
    else:
        console.print_plain(_part(result, name))


def print_summary(result: Any, *, as_json: bool = False) -> None:
    """Print heading, a row with a curve for each layer, checks and notes of a result; or its JSON."""
    from ..results.base import Result
    from ..results.profiles import of
    from ..results.summary import parts_of, summary_of

    if as_json:
        console.print_json(summary_of(result))
        return
    parts = parts_of(result)
    known = isinstance(result, Result) and not result._said()
    # Results with findings print them first; others print their heading and then their parts.
    console.print_plain(f"<rnnlens {type(result).__name__}> {result._headline()}" if known else result)
    curves = [(name, words, of(data)) for name, words, data in parts]
    if known or any(found for _, _, found in curves):
        console.out().print(_table(curves))
    rest = result._beside() if known else []
    width = max((len(label) for label, _ in rest), default=0)
    for label, text in rest:
        console.print_plain(f"  {label:<{width}}  {text}")


def _table(parts: list[tuple[str, str, dict[str, Any]]]) -> Table:
    """Return the table of ``rnnlens show``: one row for each layer and direction, with its curve over time."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)
    for column in ("name", "what", "curve", "of", "peak"):
        table.add_column(column, overflow="fold", no_wrap=column in ("curve", "peak"))
    for name, words, curves in parts:
        for place, (direction, curve) in enumerate(curves.items() or [("", None)]):
            said = (Text(name), Text(words)) if place == 0 else ("", "")
            label = "" if curve is None else f"{curve.label} over {curve.over}{f', {direction}' if direction else ''}"
            blocks, peak = ("", "") if curve is None else (curve.blocks(24), f"{curve.peak:.2g}")
            table.add_row(*said, Text(blocks), Text(label), Text(peak))
    return table


def _json(part: Any) -> Any:
    import xarray as xr

    from ..results.summary import summary_of, values_of

    return values_of(part) if isinstance(part, xr.DataArray) else summary_of(part.dataset)


def _part(result: Any, name: str) -> Any:
    """Return a layer of a result, or one of its variables: ``lstm``, ``lstm.hidden_grad``."""
    if not hasattr(result, "layers"):
        expected = "no layer name: this file holds a single array"
        raise InputError("There are no layers in this result.", got=name, expected=expected)
    layer, dot, quantity = name.rpartition(".")
    if name in result or not dot:
        return result[name]
    if layer in result:
        return result[layer][quantity]
    raise InputError(f"Nothing named {name!r} in this result.", hint=did_you_mean(name, result.layers))
