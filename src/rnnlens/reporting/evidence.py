"""What the findings rest on: the curves of a diagnosis as figures, and which figure bears which finding out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ..results.diagnosis import Diagnosis, Finding
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, FORWARD
from . import draw
from .figures import Figure, Head
from .tracks import Track

#: By finding, what shows it: the memory, what is missed, the transfer of a layer, its gradient, its states, the input.
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


def figures_of(diagnosis: Diagnosis) -> list[Figure]:
    """Memory in use, what is missed by lag, and what the state of each layer transfers; those that were measured."""
    model = diagnosis.dataset("model") if "model" in diagnosis else xr.Dataset()
    found = []
    if "use" in model and bool(model.attrs.get("known", True)) and model.sizes.get("context", 0) > 1:
        found.append(_memory(model))
    if "missed" in model:
        found.append(_missed(model))
    for place, layer in enumerate(layer for layer in diagnosis.layers if layer != "model"):
        found += _transfer(diagnosis.dataset(layer), layer, f"transfer-{place}")
    return found


def _memory(model: xr.Dataset) -> Figure:
    band = _numbers(model["use_interval"])
    drawn = [draw.Line("this model", _numbers(model["context"]), _numbers(model["use"]), None, band[:, 0], band[:, 1])]
    if "use_before" in model:
        drawn.append(draw.Line("baseline", _numbers(model["context_before"]), _numbers(model["use_before"])))
    memory = float(model["memory"])
    marks = [(memory, f"memory in use: {memory:.0f}")] if np.isfinite(memory) else []
    head = Head(
        "memory",
        "Memory in use",
        "Each sample's last k steps are kept, and all before them are another sample's: how far the prediction moves, "
        "as a share of its variance. The memory in use is the smallest k from which on that is at most 5 %.",
        "rl.plot.diagnosis(rl.diagnose(model, x, y))",
    )
    return _curve(head, drawn, _Axes("steps kept", "use of what is older", marks=marks))


def _missed(model: xr.Dataset) -> Figure:
    values = _numbers(model["missed"])
    lags = np.arange(len(values), dtype=np.float64)
    level = np.full(len(values), float(model["missed_threshold"]))
    drawn = [draw.Line("residual explained", lags, values), draw.Line("99 % of what chance gives", lags, level)]
    words = "How much of what the model gets wrong the input so many steps back would explain."
    return _curve(Head("missed", "What is missed", words), drawn, _Axes("steps back", "share of Var y"))


def _transfer(measures: xr.Dataset, layer: str, id: str) -> list[Figure]:
    if "kappa" not in measures:
        return []
    drawn = []
    for place, direction in enumerate((FORWARD, BACKWARD) if DIRECTION in measures.dims else ("",)):
        part = measures.isel({DIRECTION: place}) if direction else measures
        values, low, high = (_numbers(part[key]) for key in ("kappa", "kappa_low", "kappa_high"))
        kept = np.isfinite(values)
        if kept.sum() > 1:
            x = np.arange(len(values), dtype=np.float64)[kept]
            drawn.append(draw.Line(direction or "median", x, values[kept], None, low[kept], high[kept]))
    if not drawn:
        return []
    words = "Share of a training signal on the final state that is left so many steps back; quartiles over samples."
    head = Head(id, f"State transfer of {layer}", words, f"rl.diagnose(model, x, y)[{layer!r}].kappa")
    figure = _curve(head, drawn, _Axes("steps back", "share left", log=True))
    figure.spec["layer"] = layer
    return [figure]


@dataclass(frozen=True)
class _Axes:
    """Labels, and vertical marks with a word."""

    x: str
    y: str
    log: bool = False
    marks: Sequence[tuple[float, str]] = ()


def _curve(head: Head, drawn: Sequence[draw.Line], axes: _Axes) -> Figure:
    lines = [
        {"name": line.name, **{key: _short(values) for key, values in _values(line).items() if values is not None}}
        for line in drawn
    ]
    marks = [list(mark) for mark in axes.marks]
    spec: dict[str, Any] = {"x": axes.x, "y": axes.y, "log": axes.log, "marks": marks, "lines": lines}
    drawing = draw.lines(drawn, x=axes.x, y=axes.y, log=axes.log, marks=axes.marks)
    return Figure(head, "curve", spec, drawing)


def _numbers(array: xr.DataArray) -> Array:
    return np.asarray(array.values, dtype=np.float64)


def _values(line: draw.Line) -> dict[str, Array | None]:
    return {"x": line.x, "y": line.y, "low": line.low, "high": line.high}


def _short(values: Array) -> list[float | None]:
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values]


def anchor(finding: Finding, figures: Sequence[Figure], tracks: Sequence[Track]) -> str:
    """The id of the figure that bears a finding out; of its numbers, where there is none."""
    ids = {figure.id for figure in figures}
    kind = _SHOWN_BY.get(finding.code, "")
    track = next((i for i, t in enumerate(tracks) if t.layer == finding.layer), len(tracks) - 1)
    transfer = next((f.id for f in figures if f.spec.get("layer") == finding.layer), "transfer-0")
    state = next((figure.id for figure in figures if figure.id.startswith(f"track-{track}-hidden")), "")
    wanted = {"transfer": transfer, "states": state, "gradient": f"track-{track}-gradient", "input": "input-size"}
    first = wanted.get(kind, kind)
    return first if first in ids else "measures"
