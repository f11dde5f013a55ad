"""Steps of the commands: run a public function on the data of a file, print its result, read what an option names.

``--json`` prints a result as one JSON document, made here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer
import xarray as xr
from rich.table import Table
from rich.text import Text

from ..diagnosis import diagnose
from ..diagnosis.findings import FIGURE_OF_CODE
from ..errors import FileError, InputError, RnnlensError, did_you_mean
from ..reporting import check_path as check_report_path
from ..reporting import report
from ..results.array import LabelledArray
from ..results.base import Part, Result
from ..results.diagnosis import Diagnosis
from ..results.encoding import to_strict_json
from ..results.opening import open
from ..results.page import curves_of
from ..results.saving import check_path
from ..results.schema import to_host
from ..results.training_run import TrainingRun
from ..verbs.trace import trace
from ..verbs.weights import layers
from . import console
from .data import Data, read_data
from .models import load_model, resolve

__all__ = [
    "check_path", "check_report_path", "diagnose", "layers", "load_model", "open", "read_data", "report", "trace",
]  # fmt: skip

_SAVED_SUFFIXES = (".nc", ".zarr")
#: Options that apply only to models.
_MODEL_OPTIONS = (
    *("loss", "layer_names", "samples", "tokens", "diagnosis"),
    *("jacobian", "seed", "weights", "imports", "unsafe"),
)


def run_on_data(function: Callable[..., Any], model: Any, batch: Data, **arguments: Any) -> Any:
    """Call ``function(model, x, y, ...)`` on the data of a file; convert framework errors to InputError with shapes."""
    weight_arguments = {} if batch.sample_weight is None else {"sample_weight": batch.sample_weight}
    try:
        with warnings.catch_warnings():
            # torch broadcasts targets of another shape, and only warns
            warnings.filterwarnings("error", message="Using a target size")
            return function(model, batch.x, batch.y, **weight_arguments, **arguments)
    except RnnlensError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        got = f"{batch}: {type(error).__name__}: {first_line}"
        hint = "look whether x and y have the shapes that the model and its loss expect; --debug shows where it failed"
        raise InputError("The model or its loss cannot be run on these data.", got=got, hint=hint) from error


def loss_of(spec: str | None) -> Any:
    """Return the function that ``package.module:function`` names; any other loss name unchanged."""
    return resolve(spec) if spec is not None and ":" in spec else spec


def print_summary(result: Any, *, as_json: bool = False) -> None:
    """Print heading, a row with a curve for each layer, checks and notes of a result; or its JSON."""
    if as_json:
        console.print_json(summary_of(result))
        return
    parts = parts_of(result)
    has_headline = isinstance(result, Result) and not result._notebook_findings()
    # Results with findings print them first; others print their heading and then their parts.
    console.print_plain(f"<rnnlens {type(result).__name__}> {result._headline()}" if has_headline else result)
    part_curves = [(name, description, curves_of(data)) for name, description, data in parts]
    if has_headline or any(curves_by_name for _, _, curves_by_name in part_curves):
        console.stdout_console().print(_curve_table(part_curves))
    other_rows = result._non_part_rows() if has_headline else []
    width = max((len(label) for label, _ in other_rows), default=0)
    for label, text in other_rows:
        console.print_plain(f"  {label:<{width}}  {text}")


def print_part(part: Any, *, as_json: bool) -> None:
    """Print a layer of a result or one of its variables; as JSON a layer's summary, or all values of the variable."""
    if not as_json:
        console.print_plain(part)
    elif isinstance(part, xr.DataArray):  # values that are not finite are None
        coords = {str(dim): to_host(part[dim].values).tolist() for dim in part.dims if dim in part.coords}
        values = to_strict_json(to_host(part.values).tolist())
        console.print_json({**_data_summary(part), "coords": coords, "values": values})
    else:
        console.print_json(summary_of(part.dataset))


def _curve_table(parts: list[tuple[str, str, dict[str, Any]]]) -> Table:
    """Return the table of ``rnnlens show``: one row for each layer and direction, with its curve over time."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)
    for column in ("name", "what", "curve", "of", "peak"):
        table.add_column(column, overflow="fold", no_wrap=column in ("curve", "peak"))
    for name, description, curves in parts:
        for curve_index, (direction, curve) in enumerate(curves.items() or [("", None)]):
            name_cells = (Text(name), Text(description)) if curve_index == 0 else ("", "")
            label = (
                "" if curve is None else f"{curve.label} over {curve.axis_label}{f', {direction}' if direction else ''}"
            )
            blocks, peak = ("", "") if curve is None else (curve.blocks(24), f"{curve.peak:.2g}")
            table.add_row(*name_cells, Text(blocks), Text(label), Text(peak))
    return table


def part_of(result: Any, name: str) -> Any:
    """Return a layer of a result, or one of its variables: ``lstm``, ``lstm.hidden_grad``."""
    if not hasattr(result, "layers"):
        expected = "no layer name: this file holds a single array"
        raise InputError("There are no layers in this result.", got=name, expected=expected)
    layer, separator, quantity = name.rpartition(".")
    if name in result or not separator:
        return result[name]
    if layer in result:
        return result[layer][quantity]
    raise InputError(f"Nothing named {name!r} in this result.", hint=did_you_mean(name, result.layers))


def finding_codes(names: Sequence[str] | None) -> list[str]:
    """Return codes of findings in capital letters; raise InputError for an unknown one."""
    codes = [code.upper() for code in names or ()]
    for code in codes:
        if code not in FIGURE_OF_CODE:
            raise InputError("There is no such finding.", got=code, hint=did_you_mean(code, FIGURE_OF_CODE))
    return codes


def refuse_options_of_models(context: typer.Context) -> None:
    """Raise InputError if an option that needs a model was given with a saved result."""
    model_options = [name for name in _MODEL_OPTIONS if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    for parameter in context.command.params:
        if parameter.name in model_options:
            got, hint = parameter.opts[0], "leave it out, or report on the model and its data"
            raise InputError("A saved result is shown as it is.", got=got, hint=hint)


def read_unweighted(path: Path | None) -> Data:
    """Read the samples of a file without sample weights, because a report counts every sample once."""
    if path is None:
        hint = "rnnlens report MODEL DATA.npz; or a saved result instead of a model"
        raise InputError("A report of a model needs data.", got="no DATA", hint=hint)
    batch = read_data(path)
    if batch.sample_weight is not None:
        console.print_remark("sample_weight is left out: a report counts every sample once")
    return replace(batch, sample_weight=None)


def is_saved(path: str) -> bool:
    """Return whether a path names a saved result."""
    return Path(path).suffix in _SAVED_SUFFIXES


def saved_results(path: str, data: Path | None, baseline: str | None) -> list[Any]:
    """Read saved results; raise InputError if one of the paths names anything else."""
    other_paths = [str(other_path) for other_path in (data, baseline) if other_path is not None]
    for other_path in other_paths:
        if not is_saved(other_path):
            raise InputError("Beside a saved result go saved results.", got=other_path, expected=".nc or .zarr")
    return [open(other_path) for other_path in (path, *other_paths)]


def baseline_of(spec: str, imports: list[str] | None, unsafe: bool) -> Any:
    """Return ``"init"``, a saved trace, or a model."""
    if spec == "init":
        return spec
    return open(spec) if is_saved(spec) else load_model(spec, imports=imports or (), unsafe=unsafe)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file: the texts of tokens."""
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError("The tokens cannot be read.", got=f"{path}: {error}", expected="UTF-8 text") from error


#: Version of the layout; increased when a field is renamed or removed.
SCHEMA = 1


def parts_of(result: Any) -> list[Part]:
    """Return name, description and data of each part of a result; an array is its own only part."""
    if isinstance(result, Result):
        return result._parts()
    return [(str(getattr(result, "name", None) or "values"), "", result)]


def summary_of(result: Any) -> dict[str, Any]:
    """Return ``schema``, ``kind``, ``headline``, ``layers`` with curves, ``checks``, ``certificate``, provenance.

    A run of a training has ``findings`` as well.
    """
    if isinstance(result, Diagnosis):
        return {"kind": "diagnosis", **json.loads(result.to_json())}
    parts = parts_of(result)
    profiles_by_name = {name: curves_of(data) for name, _, data in parts}
    curves_by_name = {
        name: {direction or "all": profile.to_json() for direction, profile in profiles.items()}
        for name, profiles in profiles_by_name.items()
    }
    if isinstance(result, Result):
        layers = [
            {"name": name, "words": description, "variables": _variables(data), "profiles": curves_by_name[name]}
            for name, description, data in parts
        ]
        loss = getattr(result, "loss", None)
        header = {"schema": SCHEMA, "kind": result.kind, "headline": result._headline()}
        loss_field = {"loss": to_strict_json(loss)} if isinstance(loss, float) else {}
        is_run = isinstance(result, TrainingRun)
        findings = {"findings": to_strict_json([asdict(f) for f in result.findings])} if is_run else {}
        return {**header, **loss_field, "layers": layers, **findings, **_check_summary(result), "notes": result.notes}
    array_summary = _data_summary(result)
    array_summary["attributes"].pop("record", None)
    return {
        **array_summary,
        "profiles": curves_by_name,
        **(_check_summary(result) if isinstance(result, LabelledArray) else {}),
    }


def _data_summary(data: Any) -> dict[str, Any]:
    """Return ``schema``, ``kind``, ``dims`` and ``attributes`` of an array or dataset, and the ``name`` of an array."""
    attrs = {
        str(key): to_strict_json(value) for key, value in data.attrs.items() if isinstance(value, str | int | float)
    }
    dims_and_attrs = {"dims": _sizes(data), "attributes": attrs}
    if isinstance(data, xr.DataArray):
        return {"schema": SCHEMA, "kind": "array", "name": str(data.name), **dims_and_attrs}
    return {"schema": SCHEMA, "kind": "dataset", **dims_and_attrs}


def _check_summary(result: Any) -> dict[str, Any]:
    certificate, stored_certificate = result.certificate, None
    if certificate is not None:
        stored_certificate = {**certificate.to_dict(), "checks": [_check_json(check) for check in certificate.checks]}
    self_checks = [check for check in result.checks if certificate is None or check not in certificate.checks]
    return {
        "checks": [_check_json(check) for check in self_checks],
        "certificate": stored_certificate,
        "provenance": dict(result.provenance),
    }


def _variables(data: xr.Dataset | xr.DataArray | None) -> dict[str, dict[str, int]]:
    if data is None:
        return {}
    if isinstance(data, xr.DataArray):
        return {str(data.name): _sizes(data)}
    return {str(name): _sizes(array) for name, array in data.data_vars.items()}


def _check_json(check: Any) -> dict[str, Any]:
    return {**to_strict_json(check.to_dict()), "ok": check.ok}


def _sizes(array: Any) -> dict[str, int]:
    return {str(dim): int(size) for dim, size in array.sizes.items()}
