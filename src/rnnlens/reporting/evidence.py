"""Curves of a diagnosis as figures, and the assignment of figures to findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from ..results.diagnosis import Diagnosis, Finding
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, FORWARD
from . import draw
from .figures import Caption, ReportFigure
from .tracks import Track

#: Figure that supports each finding: memory, missed lags, a layer's state transfer, gradient or states, the input.
_SHOWN_BY = {
    "NO_SKILL": "memory",
    "MISSED_DEPENDENCY": "missed",
    "VANISHING": "transfer",
    "PATH_OPEN": "transfer",
    "EXPLODING": "transfer",
    "CHAOTIC": "transfer",
    "LAST_STEP_ONLY": "memory",
    "DEAD_UNITS": "states",
    "PADDING_DOMINATES": "input",
    "CONSTANT_INPUT": "input",
    "STATIC_INPUT": "input",
    "GRADIENT_MEMORY_DISAGREE": "memory",
    "NONFINITE": "states",
    "UNDERFLOW": "states",
    "UNEQUAL_LAYERS": "gradient",
    "FEW_SAMPLES": "memory",
}


def figures_of(diagnosis: Diagnosis) -> list[ReportFigure]:
    """Return the figures of memory in use, of missed lags and of each layer's state transfer, as far as measured."""
    model = diagnosis.dataset("model") if "model" in diagnosis else xr.Dataset()
    found = []
    if "use" in model and bool(model.attrs.get("known", True)) and model.sizes.get("context", 0) > 1:
        found.append(_memory(model))
    if "missed" in model:
        found.append(_missed(model))
    for place, layer in enumerate(layer for layer in diagnosis.layers if layer != "model"):
        found += _transfer(diagnosis.dataset(layer), layer, f"transfer-{place}")
    return found


def _memory(model: xr.Dataset) -> ReportFigure:
    """Draw use over the number of steps kept, with the memory in use and its 5 % threshold."""
    band = _numbers(model["use_interval"])
    low, high = band[:, 0], band[:, 1]
    drawn = [draw.StaticLine("this model", _numbers(model["context"]), _numbers(model["use"]), None, low, high)]
    if "use_before" in model:
        drawn.append(draw.StaticLine("baseline", _numbers(model["context_before"]), _numbers(model["use_before"])))
    memory = float(model["memory"])
    least = "≥ " if model.attrs.get("censored") else ""
    marks = [(memory, f"memory in use: {least}{memory:.0f}")] if np.isfinite(memory) else []
    words = (
        "The last k steps of each sample are kept, and all older ones are replaced by another sample's. Use: how far "
        "the prediction moves, as a share of its variance. Memory in use: the smallest k from which on use is <= 5 %."
    )
    head = Caption("memory", "Memory in use", words, "rl.plot.diagnosis(rl.diagnose(model, x, y))")
    return _curve(head, drawn, draw.CurveAxes("steps kept", "use", marks=marks, levels=[(0.05, "5 %")]))


def _missed(model: xr.Dataset) -> ReportFigure:
    """Draw the share of the residual that each lag of the input explains, with the threshold of the test."""
    values = _numbers(model["missed"])
    drawn = [draw.StaticLine("residual explained", np.arange(len(values), dtype=np.float64), values)]
    words = "Residual test: how much of the model's errors the input at each lag would explain."
    axes = draw.CurveAxes(
        "lag in steps", "share of Var y", levels=[(float(model["missed_threshold"]), "99 % of chance")]
    )
    return _curve(Caption("missed", "Do the errors depend on past inputs?", words), drawn, axes)


def _transfer(measures: xr.Dataset, layer: str, id: str) -> list[ReportFigure]:
    """Return the figure of a layer's state transfer by lag, in a list that is empty if it was not measured."""
    if "kappa" not in measures:
        return []
    drawn = []
    for place, direction in enumerate((FORWARD, BACKWARD) if DIRECTION in measures.dims else ("",)):
        part = measures.isel({DIRECTION: place}) if direction else measures
        values, low, high = (_numbers(part[key]) for key in ("kappa", "kappa_low", "kappa_high"))
        kept = np.isfinite(values)
        if kept.sum() > 1:
            x = np.arange(len(values), dtype=np.float64)[kept]
            drawn.append(draw.StaticLine(direction or "median", x, values[kept], None, low[kept], high[kept]))
    if not drawn:
        return []
    words = "Share of a gradient at the final state that survives k steps back; quartiles over samples."
    head = Caption(id, f"State transfer of {layer}", words, f"rl.diagnose(model, x, y)[{layer!r}].kappa")
    figure = _curve(
        head, drawn, draw.CurveAxes("lag in steps", "share left", log=True, levels=[(1e-4, "vanished: 1e-4")])
    )
    figure.spec["layer"] = layer
    return [figure]


def _curve(head: Caption, drawn: Sequence[draw.StaticLine], axes: draw.CurveAxes) -> ReportFigure:
    """Return a figure of curves over an axis other than time."""
    lines = [
        {"name": line.name, **{key: _short(values) for key, values in _values(line).items() if values is not None}}
        for line in drawn
    ]
    marks, levels = [list(mark) for mark in axes.marks], [list(level) for level in axes.levels]
    spec: dict[str, Any] = {"x": axes.x, "y": axes.y, "log": axes.log, "marks": marks, "levels": levels, "lines": lines}
    return ReportFigure(head, "curve", spec, draw.lines(drawn, axes))


def _numbers(array: xr.DataArray) -> Array:
    """Return values as float64."""
    return np.asarray(array.values, dtype=np.float64)


def _values(line: draw.StaticLine) -> dict[str, Array | None]:
    """Return the arrays of a line by name."""
    return {"x": line.x, "y": line.y, "low": line.low, "high": line.high}


def _short(values: Array) -> list[float | None]:
    """Round to 5 digits; None for values that are not finite."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values]


def anchor(finding: Finding, figures: Sequence[ReportFigure], tracks: Sequence[Track]) -> str:
    """Return the id of the figure that supports a finding; that of the table of measures if there is none."""
    ids = {figure.id for figure in figures}
    kind = _SHOWN_BY.get(finding.code, "")
    track = next((i for i, t in enumerate(tracks) if t.layer == finding.layer), len(tracks) - 1)
    transfer = next((f.id for f in figures if f.spec.get("layer") == finding.layer), "transfer-0")
    state = next((figure.id for figure in figures if figure.id.startswith(f"track-{track}-hidden")), "")
    wanted = {"transfer": transfer, "states": state, "gradient": f"track-{track}-gradient", "input": "input-size"}
    first = wanted.get(kind, kind)
    return first if first in ids else "measures"
