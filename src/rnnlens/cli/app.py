"""The commands. Each reads top to bottom: load, call the public function, print or save."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FileError, InputError, RnnlensError, did_you_mean, message
from ..settings import options
from . import EXIT_CODES, console
from .diagnose import diagnose

if TYPE_CHECKING:
    from .data import Data

app = typer.Typer(
    name="rnnlens",
    help="What a recurrent network learns through time.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="A .keras file, or package.module:factory.", metavar="MODEL")]
Weights = Annotated[Path | None, typer.Option(help="Weights for a factory's model: a torch state dict.")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Module to import first, where custom layers are defined."),
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Largest size that a file may take in memory, such as '4 GiB'.")
]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Load also what could run code that the file contains.")]


#: NumPy's and Keras' own bound.
_LARGEST_SEED = 2**32 - 1


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        console.print_plain(f"rnnlens {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error arose, with a traceback.")] = False,
) -> None:
    """What a recurrent network learns through time."""


def check_folder() -> None:
    """Refuse to start in a folder that is gone: every library below fails on it in words of its own.

    Raises
    ------
    FileError
        If the working directory was deleted.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise FileError(message("The current folder is gone.", got=str(error), hint="cd to one that exists")) from error


@app.command()
def layers(model: Model, weights: Weights = None, imports: Imports = None, unsafe: Unsafe = False) -> None:
    """List what is recurrent in a model."""
    from ..verbs.layers import layers as find
    from .models import load_model

    found = find(load_model(model, weights=weights, imports=imports or (), unsafe=unsafe))
    console.out().print(console.layer_table(found))


@app.command()
def trace(
    model: Model,
    data: Annotated[Path, typer.Argument(help="A .npz file with arrays x and, for gradients, y.", metavar="DATA.npz")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to save: .nc or .zarr.")] = None,
    loss: Annotated[
        str | None, typer.Option(help="Name of a loss, or package.module:function. Default: the compiled one.")
    ] = None,
    layer_names: Annotated[
        list[str] | None, typer.Option("--layers", "-l", metavar="NAME", help="Only this layer; repeat.")
    ] = None,
    quantities: Annotated[
        list[str] | None,
        typer.Option("--quantities", "-q", metavar="NAME", help="Only this variable, such as hidden_grad; repeat."),
    ] = None,
    x: Annotated[
        list[str] | None, typer.Option("--x", metavar="NAME", help="Name of the input array; repeat for more inputs.")
    ] = None,
    y: Annotated[list[str] | None, typer.Option("--y", metavar="NAME", help="Name of the target array.")] = None,
    sample_weight: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the array of sample weights.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", "-n", help="Only the first so many samples.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Run in training mode: dropout acts.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=_LARGEST_SEED, help="Seed of the dropout.")] = 0,
    memory: Memory = None,
    weights: Weights = None,
    imports: Imports = None,
    unsafe: Unsafe = False,
) -> None:
    """Trace a model on one batch: states, gates, and the gradient of every timestep."""
    from ..results.files import check_path
    from .data import read_data
    from .models import load_model

    options(memory=memory)
    if output is not None:
        check_path(output)
    batch = read_data(data, x, y, sample_weight).head(samples)
    loaded = load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
    wanted = {"layers": _split(layer_names), "quantities": _split(quantities)}
    result = _traced(loaded, batch, loss=_loss(loss), training=training, seed=seed, **wanted)
    console.print_plain(result)
    if output is not None:
        result.save(output)
        console.say(f"wrote {output}")


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A saved result.", metavar="RUN.nc")],
    name: Annotated[str | None, typer.Argument(help="A layer, or layer.quantity.", metavar="[LAYER]")] = None,
    memory: Memory = None,
) -> None:
    """Print what is in a saved result."""
    from ..results.files import open as read

    options(memory=memory)
    result = read(path)
    console.print_plain(result if name is None else _part(result, name))


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures.")] = Path("demo-output"),
    epochs: Annotated[int | None, typer.Option(help="Passes over the training digits.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=_LARGEST_SEED, help="Of the split, the initial weights and the batches.")
    ] = 0,
) -> None:
    """Train three networks on real digits, and see what they learn through time."""
    from .demo import run

    run(output, epochs=epochs, seed=seed)


app.command()(diagnose)


def _traced(model: Any, batch: Data, **options: Any) -> Any:
    """The trace; what the framework says about data that do not fit the model becomes one error of ours."""
    from ..verbs.trace import trace as run

    try:
        with warnings.catch_warnings():
            # torch stretches targets of another shape over the output, and only mentions it
            warnings.filterwarnings("error", message="Using a target size")
            return run(model, batch.x, batch.y, sample_weight=batch.sample_weight, **options)
    except RnnlensError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        got = f"{batch}: {type(error).__name__}: {reason}"
        hint = "look whether x and y have the shapes that the model and its loss expect; --debug shows where it failed"
        raise InputError(message("The model or its loss cannot be run on these data.", got=got, hint=hint)) from error


def _loss(text: str | None) -> Any:
    """A name that the framework knows, as it is; or the function that ``package.module:function`` stands for."""
    from .models import resolve

    return resolve(text) if text is not None and ":" in text else text


def _split(names: list[str] | None) -> list[str] | None:
    """Names that were given one by one, or with commas between."""
    return [part.strip() for name in names for part in name.split(",") if part.strip()] if names else None


def _part(result: Any, name: str) -> Any:
    """A layer of a result, or one of its variables: ``lstm``, ``lstm.hidden_grad``."""
    if not hasattr(result, "layers"):
        expected = "no layer name: this file holds a single array"
        raise InputError(message("There are no layers in this result.", got=name, expected=expected))
    layer, dot, quantity = name.rpartition(".")
    if name in result or not dot:
        return result[name]
    if layer in result:
        return result[layer][quantity]
    raise InputError(message(f"Nothing named {name!r} in this result.", hint=did_you_mean(name, result.layers)))
