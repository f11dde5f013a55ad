"""``rl.report``: one HTML file with the findings, their evidence and every step of every layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import xarray as xr

from ..arguments import Check, anything, as_list, checked, data_set, either, integer, loss, names, seed, switch, text
from ..arguments import path as path_of
from ..errors import FileError, InputError, short_repr
from ..results.base import Result
from ..results.diagnosis import Diagnosis
from ..verbs.axes import an_axes_table
from ..verbs.request import in_turn
from .contents import ReportContents, contents_of_model, contents_of_results
from .notebook import ReportFile
from .page import ReportOrigin, render
from .samples import ReportRequest

__all__ = ["check_path", "report"]


def _check_switch_or(kind: type, expected: str) -> Check:
    """Return a check that accepts True, False, or a finished result of the class ``kind``."""

    def check_result(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise InputError(f"{name}= is not understood.", got=short_repr(value))
        return value

    return either(switch, check_result, expected=expected)


def _check_data(name: str, value: Any) -> Any:
    """Check one batch of arrays or a source of batches; None is accepted."""
    return None if value is None else data_set(name, value)


def _check_tokens(name: str, value: Any) -> Any:
    """Check the texts of tokens: a list, or a mapping or function from number to text."""
    if not (callable(value) or isinstance(value, Mapping | Sequence)) or isinstance(value, str):
        expected = "a list or mapping from number to text, or a function"
        raise InputError(f"{name}= gives no text.", got=short_repr(value), expected=expected)
    first_word = next(iter(value), "") if isinstance(value, Sequence) else ""
    if isinstance(first_word, tuple | list):
        message, expected = f"{name}= has a list in place of a text.", "the vocabulary: the text of token 0, 1, 2, ..."
        hint = f"{name}=tokenizer.convert_ids_to_tokens, or a list such as ['<pad>', 'the', ...]"
        raise InputError(message, got=short_repr(first_word), expected=expected, hint=hint)
    return value


@checked(
    model=anything,
    x=_check_data,
    y=_check_data,
    path=path_of,
    baseline=anything,
    loss=loss,
    layers=names,
    samples=integer(least=1),
    diagnosis=_check_switch_or(Diagnosis, "True, False, or what rl.diagnose returned"),
    jacobian=_check_switch_or(xr.DataArray, "True, False, or what rl.jacobian returned"),
    tokens=_check_tokens,
    title=text,
    seed=seed,
    axes=an_axes_table,
)
@in_turn
def report(
    model: Any,
    x: Any = None,
    y: Any = None,
    path: str | PathLike[str] = "report.html",
    *,
    baseline: Any = None,
    loss: str | Callable[..., Any] | None = None,
    layers: str | Iterable[str] | None = None,
    samples: int = 64,
    diagnosis: Any = True,
    jacobian: Any = True,
    tokens: Sequence[str] | Mapping[int, str] | Callable[[int], str] | None = None,
    title: str | None = None,
    seed: int = 0,
    axes: Mapping[str, Any] | None = None,
) -> Path:
    """Write one HTML file with the findings, their evidence and every step of every layer.

    The file needs no other file and can be read without scripts. It has at most 2 MB: steps and samples that do not fit
    are merged or left out, which the page states.

    Parameters
    ----------
    model
        A Keras model (any engine) or ``torch.nn.Module``; it is not changed. Or a finished result, such as a
        :class:`~rnnlens.results.trace.Trace` or a diagnosis, or a list of them, without ``x``.
    x, y
        Held-out samples; or a data set whose batches are (x, y). Without y, and without a ``loss`` that needs none,
        there are no gradients and no findings, which the page states.
    path
        File to write, ending in ``.html``; an existing file is replaced.
    baseline
        Model that the page compares with: ``"init"``, the same model re-initialised; another model with the same
        layers, such as this one before training; or a trace of one.
    loss
        As for :func:`rnnlens.trace`.
    layers
        Names of the layers to show; all recurrent layers by default.
    samples
        Largest number of samples to show, from the first on. The diagnosis uses all samples.
    diagnosis
        True: call :func:`rnnlens.diagnose`. False: no findings. Or its result, to save time.
    jacobian
        True: the time Jacobian of a few samples. False: none. Or a result of :func:`rnnlens.jacobian`.
    tokens
        Texts of integer inputs: a sequence or mapping by number, or a function of the number.
    title
        Heading of the page; kind and units of the layers by default: "GRU, 12 units".
    seed
        Seed of all random numbers.
    axes
        As in :func:`rnnlens.trace`.

    Returns
    -------
    Path
        The file that was written; a notebook shows the page.

    Raises
    ------
    FileError
        If the file cannot be written; raised before the computation.
    InputError
        If the data or the baseline does not fit.

    Examples
    --------
    >>> import torch
    >>> import rnnlens as rl
    >>> class Reader(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gru, self.head = torch.nn.GRU(2, 4, batch_first=True), torch.nn.Linear(4, 1)
    ...     def forward(self, x):
    ...         return self.head(self.gru(x)[0][:, -1])
    >>> x = torch.randn(128, 12, 2)
    >>> path = rl.report(Reader(), x, x[:, -1, :1], loss=torch.nn.functional.mse_loss, path="report.html")
    >>> path.name
    'report.html'
    """
    target = check_path(Path(path))
    named_arguments = {"baseline": baseline, "loss": loss, "layers": layers, "tokens": tokens, "axes": axes}
    results = _results_in(model)
    if results is not None:
        if x is not None or y is not None:
            raise InputError("A finished result takes no data.", got="x or y beside it", hint="leave them out")
        contents, code = contents_of_results(results), f"rl.report(result, path={str(path)!r})"
    else:
        if x is None:
            raise InputError("A report of a model needs data.", got="x=None", hint="rl.report(model, x, y)")
        names = (layers,) if isinstance(layers, str) else None if layers is None else tuple(layers)
        contents = contents_of_model(
            model,
            ReportRequest(x, y, baseline, loss, names, samples, diagnosis, jacobian, tokens, seed, axes),
        )
        code = _call_code(path, y is not None, samples, seed, named_arguments, diagnosis, jacobian)
    class_names = dict.fromkeys(type(result).__name__ for result in ([model] if results is None else results))
    page_title = title or _default_title(contents) or ", ".join(class_names)
    argument_texts = {key: _argument_code(value, key) for key, value in named_arguments.items() if value is not None}
    arguments = {**argument_texts, "samples": str(samples), "seed": str(seed)}
    write(target, contents, ReportOrigin(page_title, code, arguments, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    return ReportFile(target)


def write(target: Path, contents: ReportContents, origin: ReportOrigin) -> None:
    """Render the report and write it to the file ``target``; an existing file is replaced in one step."""
    text = render(contents, origin)
    partial_file = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial_file.write_text(text, "utf-8")
        os.replace(partial_file, target)
    except OSError as error:
        raise FileError("The report cannot be written.", got=f"{target}: {error}") from error
    finally:
        partial_file.unlink(missing_ok=True)


def check_path(path: Path) -> Path:
    """Raise FileError unless a path ends in ``.html`` and its folder exists and can be written to."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise FileError("A report is an HTML file.", got=str(path), expected="a path ending in .html")
    if not path.parent.is_dir():
        raise FileError("There is no such folder.", got=str(path.parent), hint="create it first")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise FileError("The report cannot be written.", got=str(path), expected="a file in a writable folder")
    return path


def _results_in(model: Any) -> list[Any] | None:
    """Return the finished results passed in place of a model; None for a model."""
    if isinstance(model, Result | xr.DataArray):
        return [model]
    results = as_list(model) if isinstance(model, list | tuple) else None
    if results is None:
        return None
    if not results or not all(isinstance(result, Result | xr.DataArray) for result in results):
        raise InputError("This is neither a model nor results.", got=short_repr(model), expected="results of rnnlens")
    return results


def _default_title(contents: ReportContents) -> str:
    """Return a title with kind and units of the layers, such as "GRU, 12 units"; "" without layers."""
    tracks = contents.moments[0].tracks if contents.moments else []
    layers = list(
        dict.fromkeys(
            (
                track.layer,
                f"{track.description.partition(',')[0]}, {track.units} {track.row_name}{'s' * (track.units != 1)}",
            )
            for track in tracks
        )
    )
    layer_texts = [text for _, text in layers]
    names_shown = layer_texts if len(layer_texts) <= 3 else [*layer_texts[:2], f"{len(layer_texts) - 2} more layers"]
    return " → ".join(names_shown)


def _call_code(
    path: Any,
    has_target: bool,
    samples: int,
    seed: int,
    named_arguments: Mapping[str, Any],
    diagnosis: Any,
    jacobian: Any,
) -> str:
    """Return the user's call of ``rl.report`` as Python code."""
    argument_texts = [f"path={str(path)!r}"]
    argument_texts += [
        f"{name}={_argument_code(value, name)}" for name, value in named_arguments.items() if value is not None
    ]
    argument_texts += [f"samples={samples}"] * (samples != 64) + [f"seed={seed}"]
    for name, value in (("diagnosis", diagnosis), ("jacobian", jacobian)):
        argument_texts += [f"{name}={value!r}" if isinstance(value, bool) else f"{name}={name}"] * (value is not True)
    return f"rl.report(model, x{', y' if has_target else ''}, {', '.join(argument_texts)})"


def _argument_code(value: Any, name: str) -> str:
    """Return Python code for an argument: a plain value, a function's name, or the argument's own name."""
    if isinstance(value, str | int | float | tuple | list):
        return short_repr(value) if not isinstance(value, str) else repr(value)
    function_name = str(getattr(value, "__name__", ""))
    return function_name if function_name.isidentifier() else name
