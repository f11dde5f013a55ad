"""Findings, certificate, versions and measures in words; the curves of a diagnosis, and the figure of each finding."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xarray as xr

from ..diagnosis.findings import SHOWN_BY
from ..results.base import Result
from ..results.checks import Check, worst_of
from ..results.diagnosis import Diagnosis, Finding
from ..results.schema import with_version
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, FORWARD
from . import draw
from .figures import LARGEST, Caption, PagePlan, ReportFigure
from .material import Material
from .tracks import Track


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
    """Return the figure of the use of older steps by the number of steps kept, with the memory in use."""
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
    """Return the figure of the share of the residual that each lag of the input explains, with the test's threshold."""
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
    lines = []
    for line in drawn:
        known = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
        short = {key: [float(f"{v:.5g}") for v in values] for key, values in known.items() if values is not None}
        lines.append({"name": line.name, **short})
    marks, levels = [list(mark) for mark in axes.marks], [list(level) for level in axes.levels]
    spec: dict[str, Any] = {"x": axes.x, "y": axes.y, "log": axes.log, "marks": marks, "levels": levels, "lines": lines}
    return ReportFigure(head, "curve", spec, draw.lines(drawn, axes))


def _numbers(array: xr.DataArray) -> Array:
    """Return values as float64."""
    return np.asarray(array.values, dtype=np.float64)


def anchor(finding: Finding, figures: Sequence[ReportFigure], tracks: Sequence[Track]) -> str:
    """Return the id of the figure that supports a finding; that of the table of measures if there is none."""
    ids = {figure.id for figure in figures}
    kind = SHOWN_BY.get(finding.code, "")
    track = next((i for i, t in enumerate(tracks) if t.layer == finding.layer), len(tracks) - 1)
    transfer = next((f.id for f in figures if f.spec.get("layer") == finding.layer), "transfer-0")
    state = next((figure.id for figure in figures if figure.id.startswith(f"track-{track}-hidden")), "")
    wanted = {"transfer": transfer, "states": state, "gradient": f"track-{track}-gradient", "input": "input-size"}
    first = wanted.get(kind, kind)
    return first if first in ids else "measures"


def findings(diagnosis: Diagnosis | None, every: Sequence[ReportFigure], tracks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each finding with the id of the figure that supports it."""
    if diagnosis is None:
        return []
    return [
        {
            **asdict(finding),
            "anchor": anchor(finding, every, tracks),
            "evidence": [(name.replace("_", " "), _text(value)) for name, value in finding.evidence.items()],
        }
        for finding in diagnosis.findings
    ]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def results(material: Material) -> list[Result]:
    """Return all results of rnnlens that the page shows, for their checks and certificates."""
    every = [material.trace, material.diagnosis, material.weights, *material.others]
    return [result for result in every if isinstance(result, Result)]


@dataclass(frozen=True)
class Badge:
    """Summary of all checks: state ``good``, ``bad`` or ``open``, a text, and the largest residual."""

    state: str
    word: str
    detail: str


def badge(material: Material) -> Badge | None:
    """Summarise self-checks and certificates: failed if any failed, open if any could not be made."""
    every = results(material)
    checks = [check for result in every for check in result._self_checks]
    failed = [check for check in checks if not check.ok]
    certificates = [result.certificate for result in every if result.certificate is not None]
    states = {one.state: one for one in reversed(certificates) if one.state != "off"}
    if "failed" in states:
        refuted = states["failed"]
        return Badge("bad", f"NOT certified against {refuted.against}", _residual(refuted.worst))
    if failed:
        return Badge("bad", f"{len(failed)} of {len(checks)} self-checks failed", _residual(worst_of(failed)))
    if "could not" in states:
        return Badge("open", "could not certify", states["could not"].why)
    passed = f"{len(checks)} self-checks passed" if checks else ""
    if states:
        certificate = next(iter(states.values()))
        parts = [_residual(certificate.worst), passed]
        return Badge("good", f"certified against {certificate.against}", "; ".join(part for part in parts if part))
    return Badge("good", passed, _residual(worst_of(checks))) if checks else None


def _residual(check: Check | None) -> str:
    return "" if check is None else check.figures


def facts(material: Material) -> list[tuple[str, str]]:
    """Return labels and values for the head of the page: counts of samples and steps, and losses."""
    if not material.moments or not material.moments[0].tracks:
        return []
    first = material.moments[0]
    facts = [("layers", str(len({track.layer for track in first.tracks})))]
    total = material.total
    shown = len(material.numbers)
    facts.append(("samples", f"{shown} of {total}" if total not in (None, shown) else str(shown)))
    facts.append(("time steps", str(first.tracks[0].steps)))
    several = len(material.moments) > 1
    known = [found for found in material.moments if found.loss is not None]
    return facts + [(f"loss {found.name}" if several else "loss", f"{found.loss:.4g}") for found in known]


def versions(material: Material) -> list[tuple[str, str]]:
    """Return the versions of framework, engine, Python and rnnlens."""
    known: dict[str, str] = {}
    for result in results(material):
        known = {**result.provenance, **known}
    known = with_version(known)
    own = {"python": platform.python_version(), "numpy": np.__version__, "platform": platform.platform(terse=True)}
    return [(name.replace("_", " "), text) for name, text in {**known, **own}.items()]


def measures(diagnosis: Diagnosis | None) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return name, value and unit of every scalar measure, by layer."""
    if diagnosis is None:
        return []
    found = []
    for layer in diagnosis.layers:
        rows = [
            (str(v.attrs.get("long_name", name)), _text(v.item()), str(v.attrs.get("units", "")))
            for name, v in diagnosis.dataset(layer).data_vars.items()
            if v.ndim == 0
        ]
        found.append((layer, rows))
    return found


def left_out(material: Material, plan: PagePlan | None) -> list[str]:
    """List the contents of the report that the page leaves out or merges, as text."""
    said = list(material.left_out)
    if plan is None:
        return said
    samples, tracks = len(material.numbers), material.moments[0].tracks
    if plan.curve_count < samples:
        said.append(f"{plan.curve_count} of {samples} samples can be picked; all count in medians and bands.")
    if plan.map_count < min(samples, plan.curve_count):
        said.append(
            f"Maps of single units are of {plan.map_count} samples: typical, hardest, easiest, and some between."
        )
    if len(material.moments) > 1 and min(plan.map_count, 2) < samples:
        said.append(f"Maps of {material.moments[1].name} are of {min(plan.map_count, 2)} samples.")
    if plan.curve_bin > 1 or plan.map_bin > 1:
        merged = f"{plan.curve_bin} steps are one point of a curve, {plan.map_bin} one column of a map"
        said.append(f"Of {tracks[0].steps} steps, {merged}: sizes as root mean square, others as mean.")
    said.append("Numbers are rounded: maps to 251 levels of their scale, curves to 65001.")
    if any(track.units > LARGEST for track in tracks):
        said.append(f"Recurrent kernels of more than {LARGEST} units are left out.")
    return said
