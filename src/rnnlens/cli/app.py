"""The commands of ``rnnlens``: each one loads its arguments, calls a public function, prints or saves the result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FileError
from ..settings import options
from . import console
from .diagnose import diagnose
from .report import report
from .show import print_summary, show
from .tail import tail
from .words import (
    EXIT_CODES,
    LARGEST_SEED,
    AsJson,
    Imports,
    LayerNames,
    Loss,
    Memory,
    Model,
    Saved,
    Unsafe,
    Weights,
    split,
)

app = typer.Typer(
    name="rnnlens",
    help="See what a recurrent network learns through time.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback after an error.")] = False,
) -> None:
    """See what a recurrent network learns through time."""


def check_folder() -> None:
    """Refuse to start if the current folder was deleted, because other libraries then fail with unclear errors.

    Raises
    ------
    FileError
        If the working directory was deleted.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise FileError("The current folder is gone.", got=str(error), hint="cd to one that exists") from error


@app.command()
def layers(
    model: Model, weights: Weights = None, imports: Imports = None, unsafe: Unsafe = False, as_json: AsJson = False
) -> None:
    """List the recurrent layers of a model."""
    from ..verbs.weights import layers as find
    from .models import load_model

    found = find(load_model(model, weights=weights, imports=imports or (), unsafe=unsafe))
    if as_json:
        console.print_json([dict(zip(found.columns, row, strict=True)) for row in found.rows()])
    else:
        console.out().print(console.layer_table(found))


@app.command()
def trace(
    model: Model,
    data: Annotated[Path, typer.Argument(help="A .npz file with arrays x and, for gradients, y.", metavar="DATA.npz")],
    output: Saved = None,
    loss: Loss = None,
    layer_names: LayerNames = None,
    quantities: Annotated[
        list[str] | None,
        typer.Option(
            "--quantities", "-q", metavar="NAME", help="Only this variable, such as hidden_grad; may be repeated."
        ),
    ] = None,
    x: Annotated[
        list[str] | None, typer.Option("--x", metavar="NAME", help="Name of the input array; may be repeated.")
    ] = None,
    y: Annotated[list[str] | None, typer.Option("--y", metavar="NAME", help="Name of the target array.")] = None,
    sample_weight: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the array of sample weights.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", help="Number of samples, the first of the file; default: all.")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Run in training mode, with dropout.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed of the dropout.")] = 0,
    as_json: AsJson = False,
    memory: Memory = None,
    weights: Weights = None,
    imports: Imports = None,
    unsafe: Unsafe = False,
) -> None:
    """Trace a model on one batch: states, gates, and gradients of every time step."""
    from ..results.saving import check_path
    from ..verbs.trace import trace as run
    from .data import read_data
    from .models import load_model
    from .on_data import loss_of, on_data

    options(memory=memory)
    if output is not None:
        check_path(output)
    batch = read_data(data, x, y, sample_weight).head(samples)
    loaded = load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
    wanted = {"layers": split(layer_names), "quantities": split(quantities)}
    result = on_data(run, loaded, batch, loss=loss_of(loss), training=training, seed=seed, **wanted)
    print_summary(result, as_json=as_json)
    if output is not None:
        result.save(output)
        console.say(f"wrote {output}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures.")] = Path("demo-output"),
    epochs: Annotated[int | None, typer.Option(help="Number of passes over the training digits.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed of split, initial weights and batches.")
    ] = 0,
) -> None:
    """Train three networks on handwritten digits, and show what they learn through time."""
    from .demo import run

    run(output, epochs=epochs, seed=seed)


app.command()(diagnose)
app.command()(report)
app.command()(show)
app.command()(tail)
