"""Figures of a training, also while it is being written: recorded numbers over steps, and the film of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from ..results.training_run import STEP, TrainingRun, is_of_one_weight
from ..typing import Array
from ..vocabulary import DIRECTION, TIME
from . import draw
from .draw import ImageAxes, png_url, scale_of
from .figures import Caption, ReportFigure, curve_figure
from .tracks import merge_steps

#: Titles of the kinds of numbers that have their figure first, in this order.
_TITLES = {
    "loss": "Loss",
    "reach": "Reach of the gradient, in steps",
    "decay": "Share of the gradient that one step back keeps",
    "adjoint": "Size of the total gradient",
    "near_0": "Share of gate values below 0.1",
    "near_1": "Share of gate values above 0.9",
    "dead_units": "Share of dead units",
    "update_ratio": "Change of the weights by one step, by their norm",
}
#: Largest numbers of points of a curve, of records and of time steps in a film.
_MAX_POINTS, _MAX_RECORDS, _MAX_STEPS = 600, 160, 250
#: Largest number of lines of one figure.
_MAX_LINES = 6
#: Ratio of the largest to the smallest value from which on an axis is logarithmic.
_WIDE = 100.0


def default_scalars(run: TrainingRun) -> list[str]:
    """Return the names of a run's numbers that are shown unasked: all but those of single weights."""
    return [name for name in map(str, run.scalars.data_vars) if not is_of_one_weight(name)]


def figures_of_runs(runs: Mapping[str, TrainingRun]) -> list[ReportFigure]:
    """Return a figure for each kind of number, with a line for each layer and run, and a film for each layer."""
    lines_by_kind: dict[str, list[draw.StaticLine]] = {}
    marks_by_kind: dict[str, list[tuple[float, str]]] = {}
    for run_name, run in runs.items():
        suffix = f" · {run_name}" if len(runs) > 1 else ""
        for name in default_scalars(run):
            layer, _, kind = name.rpartition("/")
            steps, values = _thinned(run.steps.values, run.scalars[name].values)
            lines_by_kind.setdefault(kind, []).append(draw.StaticLine(f"{layer or kind}{suffix}", steps, values))
        for alert in run.alerts:
            kind = alert.name.rpartition("/")[2]
            marks_by_kind.setdefault(kind, []).append((float(alert.step), f"{alert.finding}{suffix}"))
    kinds = sorted(lines_by_kind, key=lambda kind: list(_TITLES).index(kind) if kind in _TITLES else len(_TITLES))
    figures = [_curves(kind, lines_by_kind[kind], marks_by_kind.get(kind, [])) for kind in kinds]
    return [*figures, *_films(runs)]


def _thinned(steps: Array, values: Array) -> tuple[Array, Array]:
    """Return at most ``_MAX_POINTS`` points of a curve, evenly chosen, the last included."""
    indices = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MAX_POINTS)).round().astype(int))
    return np.asarray(steps, dtype=np.float64)[indices], np.asarray(values, dtype=np.float64)[indices]


def _curves(kind: str, lines: list[draw.StaticLine], marks: list[tuple[float, str]]) -> ReportFigure:
    title = _TITLES.get(kind, kind.replace("_", " ").capitalize())
    values = np.concatenate([np.asarray(line.y) for line in lines])
    values = values[np.isfinite(values)]
    is_wide = bool(values.size) and values.min() > 0 and values.max() > _WIDE * values.min()
    axes = draw.CurveAxes("training step", kind.replace("_", " "), log=is_wide, marks=marks)
    figure = curve_figure(Caption(f"scalar-{_id_part(kind)}", title), lines[:_MAX_LINES], axes)
    if len(lines) > _MAX_LINES:
        figure.remarks.append(f"{_MAX_LINES} of {len(lines)} lines, the first.")
    return figure


def _films(runs: Mapping[str, TrainingRun]) -> list[ReportFigure]:
    """Return for each layer of each run the gradient at every time step (columns) of every record (rows)."""
    figures = []
    for run_index, (run_name, run) in enumerate(runs.items()):
        suffix = f" · {run_name}" if len(runs) > 1 else ""
        for layer_index, layer in enumerate(run.layers):
            dataset = run.dataset(layer)
            if "adjoint_profile" not in dataset or not dataset.sizes[STEP]:
                continue
            profile = dataset["adjoint_profile"]
            for direction in [str(d) for d in profile[DIRECTION].values] if DIRECTION in profile.dims else [""]:
                id = f"film-{run_index}-{layer_index}{direction and '-' + _id_part(direction)}"
                part = profile.sel({DIRECTION: direction}) if direction else profile
                title = f"Gradient at every time step: {layer}{direction and ' · ' + direction}{suffix}"
                figures.append(_film(Caption(id, title, "Each row is a record, the newest at the bottom."), part))
    return figures


def _film(caption: Caption, profile: xr.DataArray) -> ReportFigure:
    values = np.asarray(profile.transpose(STEP, TIME).values, dtype=np.float64)
    records = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_RECORDS)).round().astype(int))
    step_names = np.asarray(profile[STEP].values)[records]
    bin_width = max(1, -(-values.shape[1] // _MAX_STEPS))
    table = merge_steps(values[records], bin_width, as_rms=True)
    scale = scale_of(table, log=True)
    url = png_url(table, "size", scale)
    spec: dict[str, Any] = {
        "track": None,
        "row": "training step",
        "bin": bin_width,
        "columns": [],
        "names": [int(step) for step in step_names],
        "x": "time step",
        "steps": int(values.shape[1]),
        "rows": len(table),
        "choices": [{"name": "|dL/dh_t|", "palette": "size", "moments": [{"all": [url, scale.to_json()]}]}],
    }
    axes = ImageAxes("time step", "training step", len(table), int(values.shape[1]), (), step_names)
    drawing = draw.picture(url, f"{caption.id}-0", scale, axes, palette="size", label="|dL/dh_t|")
    return ReportFigure(caption, "map", spec, drawing)


def _id_part(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())
