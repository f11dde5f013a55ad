"""``rnnlens report``: one HTML file about a model on data, or about saved results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import FileError, InputError, message
from ..settings import options
from . import console

_SAVED = (".nc", ".zarr")


def report(
    model: Annotated[
        str,
        typer.Argument(help="A .keras file, package.module:factory, or a saved result (.nc, .zarr).", metavar="MODEL"),
    ],
    data: Annotated[
        Path | None, typer.Argument(help="A .npz file with held-out arrays x and y.", metavar="[DATA.npz]")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    baseline: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="'init' for fresh weights, another model, or a saved trace, to switch to."),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Name of a loss, or package.module:function. Default: the compiled one.")
    ] = None,
    layer_names: Annotated[
        list[str] | None, typer.Option("--layers", "-l", metavar="NAME", help="Only this layer; repeat.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="At most so many samples are shown.")] = 64,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="A text file that has the text of token i in its line i.", metavar="FILE")
    ] = None,
    diagnosis: Annotated[bool, typer.Option("--diagnosis/--no-diagnosis", help="Say what was found.")] = True,
    jacobian: Annotated[bool, typer.Option("--jacobian/--no-jacobian", help="Show the time Jacobian.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of everything that draws random numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest size that a file may take in memory, such as '4 GiB'.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights for a factory's model: a torch state dict.")] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Module to import first, where custom layers are defined."),
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Load also what could run code that the file contains.")
    ] = False,
) -> None:
    """Write one HTML file with the findings, their evidence, and every step of every layer."""
    from ..reporting import check_path
    from ..reporting import report as run

    options(memory=memory)
    check_path(output)
    if Path(model).suffix in _SAVED:
        written = run(_saved(model, data, baseline), path=output, title=title)
    else:
        from .data import read_data
        from .models import load_model
        from .on_data import loss_of, on_data

        if data is None:
            hint = "rnnlens report MODEL DATA.npz; or a saved result instead of a model"
            raise InputError(message("A report of a model needs data.", got="no DATA", hint=hint))
        batch = replace(read_data(data), sample_weight=None)
        loaded = load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
        given: dict[str, Any] = {"layers": layer_names or None, "title": title or Path(model).name}
        given |= {"samples": samples, "diagnosis": diagnosis, "jacobian": jacobian, "seed": seed}
        if baseline is not None:
            given["baseline"] = _baseline(baseline, imports, unsafe)
        if tokens is not None:
            given["tokens"] = _lines(tokens)
        written = on_data(run, loaded, batch, loss=loss_of(loss), path=output, **given)
    if as_json:
        console.print_json({"report": str(written), "bytes": written.stat().st_size})
    else:
        console.say(f"wrote {written}")


def _saved(path: str, data: Path | None, baseline: str | None) -> list[Any]:
    from ..results.files import open as read

    others = [str(one) for one in (data, baseline) if one is not None]
    for one in others:
        if Path(one).suffix not in _SAVED:
            raise InputError(message("Beside a saved result go saved results.", got=one, expected=".nc or .zarr"))
    return [read(one) for one in (path, *others)]


def _baseline(text: str, imports: list[str] | None, unsafe: bool) -> Any:
    from ..results.files import open as read
    from .models import load_model

    if text == "init":
        return text
    return read(text) if Path(text).suffix in _SAVED else load_model(text, imports=imports or (), unsafe=unsafe)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(message("The tokens cannot be read.", got=f"{path}: {error}", expected="UTF-8 text")) from error
