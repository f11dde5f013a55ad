"""``rnnlens report``: one HTML file about a model on data, or about saved results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FileError, InputError
from ..settings import options
from . import console
from .words import LARGEST_SEED, Imports, LayerNames, Loss, Memory, Unsafe, Weights, split

if TYPE_CHECKING:
    from .data import Data

_SAVED = (".nc", ".zarr")
#: Options that apply only to models.
_OF_MODELS = (
    "loss",
    "layer_names",
    "samples",
    "tokens",
    "diagnosis",
    "jacobian",
    "seed",
    "weights",
    "imports",
    "unsafe",
)


def report(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="A .keras file, package.module:factory, or a saved result (.nc, .zarr).", metavar="MODEL"),
    ],
    data: Annotated[
        Path | None, typer.Argument(help="A .npz file with held-out arrays x and y.", metavar="[DATA.npz]")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model to compare with: 'init' (re-initialised), a model, or a saved trace."
        ),
    ] = None,
    loss: Loss = None,
    layer_names: LayerNames = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Largest number of samples shown.")] = 64,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="A text file whose line i is the text of token i.", metavar="FILE")
    ] = None,
    diagnosis: Annotated[bool, typer.Option("--diagnosis/--no-diagnosis", help="Include the diagnosis.")] = True,
    jacobian: Annotated[bool, typer.Option("--jacobian/--no-jacobian", help="Include the time Jacobian.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print path and size of the report as JSON.")] = False,
    memory: Memory = None,
    weights: Weights = None,
    imports: Imports = None,
    unsafe: Unsafe = False,
) -> None:
    """Write an HTML report: findings, their evidence, and every step of every layer."""
    from ..reporting import check_path
    from ..reporting import report as run

    options(memory=memory)
    check_path(output)
    if Path(model).suffix in _SAVED:
        _refuse_of_models(context)
        written = run(_saved(model, data, baseline), path=output, title=title)
    else:
        from .models import load_model
        from .on_data import loss_of, on_data

        batch = _data(data)
        loaded = load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
        given: dict[str, Any] = {"layers": split(layer_names), "title": title or Path(model).name}
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


def _refuse_of_models(context: typer.Context) -> None:
    """Raise InputError if an option that needs a model was given with a saved result."""
    told = [name for name in _OF_MODELS if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    for parameter in context.command.params:
        if parameter.name in told:
            got, hint = parameter.opts[0], "leave it out, or report on the model and its data"
            raise InputError("A saved result is shown as it is.", got=got, hint=hint)


def _data(path: Path | None) -> Data:
    """Read the samples of a file without sample weights, because a report counts every sample once."""
    from .data import read_data

    if path is None:
        hint = "rnnlens report MODEL DATA.npz; or a saved result instead of a model"
        raise InputError("A report of a model needs data.", got="no DATA", hint=hint)
    batch = read_data(path)
    if batch.sample_weight is not None:
        console.say("sample_weight is left out: a report counts every sample once")
    return replace(batch, sample_weight=None)


def _saved(path: str, data: Path | None, baseline: str | None) -> list[Any]:
    from ..results.opening import open as read

    others = [str(one) for one in (data, baseline) if one is not None]
    for one in others:
        if Path(one).suffix not in _SAVED:
            raise InputError("Beside a saved result go saved results.", got=one, expected=".nc or .zarr")
    return [read(one) for one in (path, *others)]


def _baseline(text: str, imports: list[str] | None, unsafe: bool) -> Any:
    from ..results.opening import open as read
    from .models import load_model

    if text == "init":
        return text
    return read(text) if Path(text).suffix in _SAVED else load_model(text, imports=imports or (), unsafe=unsafe)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError("The tokens cannot be read.", got=f"{path}: {error}", expected="UTF-8 text") from error
