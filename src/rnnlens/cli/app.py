"""The commands of ``rnnlens``; modules that load xarray or more are imported by the command that needs them."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..errors import FileError, InputError, RnnlensError, message
from ..settings import options
from . import console
from .interrupts import CODE as INTERRUPTED

#: Largest seed that NumPy and Keras accept.
LARGEST_SEED = 2**32 - 1
#: Exit code if the diagnosis has a finding named with --fail-on.
FINDING_PRESENT = 3
#: Description of the exit codes in ``--help``.
EXIT_CODES = (
    "Exit codes: 0 success; 1 an unexpected error; 2 wrong arguments, input that is refused, or an error of the model "
    "or its loss, with the reason; 3 a finding named with --fail-on, or a wrong gradient; 130 interrupted."
)

app = typer.Typer(
    name="rnnlens",
    help="See what a recurrent network learns through time.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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
HeldOut = Annotated[Path, typer.Argument(help="A .npz file with held-out arrays x and y.", metavar="DATA.npz")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed.")]


def run(arguments: Sequence[str] | None) -> int:
    """Run one command with the given arguments, or those of the process, and return its exit code."""
    argument_list = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_folder()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app(args=[argument for argument in argument_list if argument != "--debug"], prog_name="rnnlens")
        return 0
    except SystemExit as system_exit:
        return 0 if system_exit.code is None else system_exit.code if isinstance(system_exit.code, int) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if "--debug" in argument_list:
            traceback.print_exc()
        if isinstance(error, RnnlensError):
            console.print_error(console.in_command_line(str(error)))
            return 2
        got = f"{type(error).__name__}: {error}"
        console.print_error(message("An unexpected error.", got=got, hint="--debug shows where"))
        return 1


def _check_folder() -> None:
    """Raise FileError if the working directory was deleted: libraries then fail with unclear errors."""
    try:
        os.getcwd()
    except OSError as error:
        raise FileError("The current folder is gone.", got=str(error), hint="cd to one that exists") from error


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one yellow line, without the file and line that raised it."""
    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | ResourceWarning):
        console.stderr_console().print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)


def _print_version(is_requested: bool) -> None:
    if is_requested:
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


@app.command()
def layers(
    model: Model, weights: Weights = None, imports: Imports = None, unsafe: Unsafe = False, as_json: AsJson = False
) -> None:
    """List the recurrent layers of a model."""
    from . import steps

    layer_table = steps.layers(steps.load_model(model, weights=weights, imports=imports or (), unsafe=unsafe))
    if as_json:
        console.print_json([dict(zip(layer_table.columns, row, strict=True)) for row in layer_table.rows()])
    else:
        title = f"{len(layer_table)} recurrent {'layer' if len(layer_table) == 1 else 'layers'}"
        printed_table = Table(title=title, title_justify="left")
        for column in layer_table.columns:
            printed_table.add_column(column, overflow="fold")
        for cells in layer_table.rows():
            printed_table.add_row(*map(Text, cells))
        console.stdout_console().print(printed_table)


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
    from . import steps

    options(memory=memory)
    if output is not None:
        steps.check_path(output)
    batch = steps.read_data(data, x, y, sample_weight).head(samples)
    loaded_model = steps.load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
    selection = {"layers": split_names(layer_names), "quantities": split_names(quantities)}
    loss_function = steps.loss_of(loss)
    result = steps.run_on_data(
        steps.trace, loaded_model, batch, loss=loss_function, training=training, seed=seed, **selection
    )
    steps.print_summary(result, as_json=as_json)
    if output is not None:
        result.save(output)
        console.print_remark(f"wrote {output}")


@app.command()
def verify(
    function: Annotated[
        str, typer.Argument(help="A scan function or a model, package.module:name.", metavar="FUNCTION")
    ],
    recurrence: Annotated[
        str,
        typer.Argument(
            help="Of a scan function diagonal, gated_delta, ...: see rl.verify. Of a model a .npz file with x.",
            metavar="RECURRENCE|DATA.npz",
        ),
    ],
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="NAME", help="Array of an initial state; may be repeated.")
    ] = None,
    step: Annotated[bool, typer.Option("--step", help="The model is a cell, called at every step.")] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the tensors.")] = "float32",
    chunk: Annotated[int, typer.Option(min=2, help="Chunk size of the kernel.")] = 64,
    initial: Annotated[bool, typer.Option("--initial", help="The function takes an initial state, too.")] = False,
    framework: Annotated[str | None, typer.Option(help="torch, jax or tensorflow; default: a loaded one.")] = None,
    seed: Seed = 0,
) -> None:
    """Verify the gradient of a scan function, cell, layer or model; exit with code 3 if it is wrong."""
    from ..testing.scan_gradients import verify as verify_function
    from . import steps
    from .models import resolve

    options_given: dict[str, Any] = {"dtype": dtype, "chunk": chunk, "seed": seed}
    if recurrence.endswith(".npz"):
        batch = steps.read_data(Path(recurrence), None, state)
        options_given |= {"state": batch.y if state else None, "step": step}
        verification = verify_function(steps.load_model(function), batch.x, **options_given)
    else:
        verification = verify_function(
            resolve(function), recurrence, framework=framework, initial=initial, **options_given
        )
    console.print_plain(verification)
    if not verification.ok:
        raise typer.Exit(FINDING_PRESENT)


@app.command()
def diagnose(
    model: Model,
    data: HeldOut,
    output: Saved = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="CODE", help="Exit with code 3 on this finding; may be repeated."),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also measure the memory of the re-initialised model.")
    ] = False,
    loss: Loss = None,
    as_json: AsJson = False,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Largest number of samples.")] = 512,
    seed: Seed = 0,
    weights: Weights = None,
    imports: Imports = None,
    unsafe: Unsafe = False,
) -> None:
    """Diagnose a trained network: how much of its past it uses, what it misses, and why."""
    from . import steps

    fail_codes = steps.finding_codes(split_names(fail_on))
    if output is not None:
        steps.check_path(output)
    batch = steps.read_data(data)
    loaded_model = steps.load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
    result = steps.diagnose(
        loaded_model,
        batch.x,
        batch.y,
        baseline="init" if baseline else None,
        loss=steps.loss_of(loss),
        samples=samples,
        seed=seed,
    )
    console.print_plain(result.to_json() if as_json else result)
    if output is not None:
        result.save(output)
        console.print_remark(f"wrote {output}")
    if present_codes := [code for code in fail_codes if code in result.codes]:
        console.print_error(f"found: {', '.join(present_codes)}")
        raise typer.Exit(FINDING_PRESENT)


@app.command()
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
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print path and size of the report as JSON.")] = False,
    memory: Memory = None,
    weights: Weights = None,
    imports: Imports = None,
    unsafe: Unsafe = False,
) -> None:
    """Write an HTML report: findings, their evidence, and every step of every layer."""
    from . import steps

    options(memory=memory)
    steps.check_report_path(output)
    if steps.is_saved(model):
        steps.refuse_options_of_models(context)
        report_path = steps.report(steps.saved_results(model, data, baseline), path=output, title=title)
    else:
        batch = steps.read_unweighted(data)
        loaded_model = steps.load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
        options_given: dict[str, Any] = {"layers": split_names(layer_names), "title": title or Path(model).name}
        options_given |= {"samples": samples, "diagnosis": diagnosis, "jacobian": jacobian, "seed": seed}
        if baseline is not None:
            options_given["baseline"] = steps.baseline_of(baseline, imports, unsafe)
        if tokens is not None:
            options_given["tokens"] = steps.lines_of(tokens)
        report_path = steps.run_on_data(
            steps.report, loaded_model, batch, loss=steps.loss_of(loss), path=output, **options_given
        )
    if as_json:
        console.print_json({"report": str(report_path), "bytes": report_path.stat().st_size})
    else:
        console.print_remark(f"wrote {report_path}")


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A saved result.", metavar="RUN.nc")],
    name: Annotated[str | None, typer.Argument(help="A layer, or layer.quantity.", metavar="[LAYER]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; for one quantity with all its values.")] = False,
    memory: Memory = None,
) -> None:
    """Print a saved result, or one layer or quantity of it."""
    from . import steps

    options(memory=memory)
    result = steps.open(path)
    if name is None:
        steps.print_summary(result, as_json=as_json)
    else:
        steps.print_part(steps.part_of(result, name), as_json=as_json)


@app.command()
def tail(
    path: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN.zarr")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait if the run does not exist yet.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Seconds between two reads of the run.")
    ] = 1.0,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Only scalars with this text in their name; may be repeated."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the norm of each weight and of its gradient.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Show the current state once, and exit.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a live page of the run to a browser: alerts, curves, film.")
    ] = False,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="RUN.zarr", help="Another run on the same page; may be repeated."),
    ] = None,
    until: Annotated[
        list[str] | None,
        typer.Option(
            "--until",
            metavar="ALERT",
            help="Exit with code 3 at this alert: exploding, vanishing, saturated, any; may be repeated.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for any that is free.")] = 8787,
) -> None:
    """Show a training while it runs in another process; Ctrl-C does not stop the training.

    Example: rnnlens tail runs/a.zarr --only reach
    """
    from . import tail as tail_module

    states = tail_module.states_of(path, wait=wait, interval=every, once=once)
    if until:
        states = tail_module.until(states, tail_module.alert_kinds(until))
    chosen_scalars = tail_module.ChosenScalars(tuple(only or ()), everything)
    if against and not serve:
        raise InputError("--against compares runs on a page.", got="no --serve", hint="--serve --against RUN.zarr")
    if serve:
        tail_module.serve([path, *(against or ())], states, port, wait=wait, interval=every)
    elif sys.stdout.isatty():
        tail_module.show_live(states, chosen_scalars)
    else:
        tail_module.print_lines(states, chosen_scalars)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures.")] = Path("demo-output"),
    epochs: Annotated[int | None, typer.Option(help="Number of passes over the training digits.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed of split, initial weights and batches.")
    ] = 0,
) -> None:
    """Train three networks on handwritten digits, and show what they learn through time."""
    from .demo import run as run_demo

    run_demo(output, epochs=epochs, seed=seed)


def split_names(names: list[str] | None) -> list[str] | None:
    """Split command-line names that are given one by one or separated by commas; None if no names are given."""
    return [part.strip() for name in names for part in name.split(",") if part.strip()] if names else None
