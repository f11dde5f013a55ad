"""``rnnlens diagnose``: prints sentences and findings; its exit code is for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError, did_you_mean
from . import console
from .words import AsJson, Imports, Model, Saved, Unsafe, Weights, split

#: Exit code if the diagnosis has a finding named with --fail-on.
FOUND = 3

CODES = (
    "NO_SKILL",
    "MISSED_DEPENDENCY",
    "VANISHING",
    "PATH_OPEN",
    "EXPLODING",
    "CHAOTIC",
    "LAST_STEP_ONLY",
    "DEAD_UNITS",
    "PADDING_DOMINATES",
    "CONSTANT_INPUT",
    "STATIC_INPUT",
    "GRADIENT_MEMORY_DISAGREE",
    "NONFINITE",
    "UNDERFLOW",
    "UNEQUAL_LAYERS",
    "FEW_SAMPLES",
)


def diagnose(
    model: Model,
    data: Annotated[Path, typer.Argument(help="A .npz file with held-out arrays x and y.", metavar="DATA.npz")],
    output: Saved = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="CODE", help="Exit with code 3 on this finding; may be repeated."),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also measure the memory of the re-initialised model.")
    ] = False,
    as_json: AsJson = False,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Largest number of samples.")] = 512,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    weights: Weights = None,
    imports: Imports = None,
    unsafe: Unsafe = False,
) -> None:
    """Diagnose a trained network: how much of its past it uses, what it misses, and why."""
    from ..diagnosis import diagnose as run
    from ..results.saving import check_path
    from .data import read_data
    from .models import load_model

    named = _codes(fail_on)
    if output is not None:
        check_path(output)
    batch = read_data(data)
    loaded = load_model(model, weights=weights, imports=imports or (), unsafe=unsafe)
    result = run(loaded, batch.x, batch.y, baseline="init" if baseline else None, samples=samples, seed=seed)
    console.print_plain(result.to_json() if as_json else result)
    if output is not None:
        result.save(output)
        console.say(f"wrote {output}")
    if found := [code for code in named if code in result.codes]:
        console.print_error(f"found: {', '.join(found)}")
        raise typer.Exit(FOUND)


def _codes(named: list[str] | None) -> list[str]:
    asked = [code.upper() for code in split(named) or ()]
    for code in asked:
        if code not in CODES:
            raise InputError("There is no such finding.", got=code, hint=did_you_mean(code, CODES))
    return asked
