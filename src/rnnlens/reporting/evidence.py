"""Findings, certificate, versions and measures in words; the curves of a diagnosis, and the figure of each finding."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xarray as xr

from ..diagnosis.findings import FIGURE_OF_CODE
from ..results.base import Result
from ..results.checks import Check, worst_of
from ..results.diagnosis import Diagnosis, Finding
from ..results.schema import with_version
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, FORWARD
from . import draw
from .contents import ReportContents
from .figures import MAX_KERNEL_UNITS, Caption, PagePlan, ReportFigure, curve_figure
from .tracks import Track

#: Codes that say what is *not* the cause of a fault; they are not shown as faults of their own.
_ACQUITTALS = ("PATH_OPEN",)


def figures_of(diagnosis: Diagnosis) -> list[ReportFigure]:
    """Return the figures of memory in use, of missed lags and of each layer's state transfer, as far as measured."""
    model = diagnosis.dataset("model") if "model" in diagnosis else xr.Dataset()
    figures = []
    if "use" in model and bool(model.attrs.get("known", True)) and model.sizes.get("context", 0) > 1:
        figures.append(_memory_figure(model))
    if "missed" in model:
        figures.append(_missed_figure(model))
    for layer_index, layer in enumerate(layer for layer in diagnosis.layers if layer != "model"):
        figures += _transfer_figures(diagnosis.dataset(layer), layer, f"transfer-{layer_index}")
    return figures


def _memory_figure(model: xr.Dataset) -> ReportFigure:
    """Return the figure of the use of older steps by the number of steps kept, with the memory in use."""
    interval = _float_values(model["use_interval"])
    low, high = interval[:, 0], interval[:, 1]
    static_lines = [
        draw.StaticLine("this model", _float_values(model["context"]), _float_values(model["use"]), None, low, high)
    ]
    if "use_before" in model:
        static_lines.append(
            draw.StaticLine("baseline", _float_values(model["context_before"]), _float_values(model["use_before"]))
        )
    memory = float(model["memory"])
    bound_sign = "≥ " if model.attrs.get("censored") else ""
    marks = [(memory, f"memory in use: {bound_sign}{memory:.0f}")] if np.isfinite(memory) else []
    sentence = (
        "The last k steps of each sample are kept, and all older ones are replaced by another sample's. Use: how far "
        "the prediction moves, as a share of its variance. Memory in use: the smallest k from which on use is <= 5 %."
    )
    caption = Caption("memory", "Memory in use", sentence, "rl.plot.diagnosis(rl.diagnose(model, x, y))")
    return curve_figure(caption, static_lines, draw.CurveAxes("steps kept", "use", marks=marks, levels=[(0.05, "5 %")]))


def _missed_figure(model: xr.Dataset) -> ReportFigure:
    """Return the figure of the association of the errors with the input at each lag, relative to the threshold."""
    threshold = float(model["missed_threshold"]) or 1.0  # 0 where the model makes no errors
    values = _float_values(model["missed"]) / threshold
    static_lines = [draw.StaticLine("association with the errors", np.arange(len(values), dtype=np.float64), values)]
    sentence = (
        "Residual test: how strongly the errors of the model go with the input at each lag; above 1 chance alone comes "
        "in 1 of 100 cases. In all, inputs explain "
        f"{100 * max(float(model['missed_effect']), 0.0):.1f} % of the target's variance."
    )
    axes = draw.CurveAxes("lag in steps", "share of the threshold", levels=[(1.0, "99 % of chance")])
    return curve_figure(Caption("missed", "Do the errors depend on past inputs?", sentence), static_lines, axes)


def _transfer_figures(measures: xr.Dataset, layer: str, id: str) -> list[ReportFigure]:
    """Return the figure of a layer's state transfer by lag, in a list that is empty if it was not measured."""
    if "kappa" not in measures:
        return []
    static_lines = []
    for direction_index, direction in enumerate((FORWARD, BACKWARD) if DIRECTION in measures.dims else ("",)):
        direction_measures = measures.isel({DIRECTION: direction_index}) if direction else measures
        values, low, high = (_float_values(direction_measures[key]) for key in ("kappa", "kappa_low", "kappa_high"))
        is_finite = np.isfinite(values)
        if is_finite.sum() > 1:
            x = np.arange(len(values), dtype=np.float64)[is_finite]
            static_lines.append(
                draw.StaticLine(direction or "median", x, values[is_finite], None, low[is_finite], high[is_finite])
            )
    if not static_lines:
        return []
    sentence = "Share of a gradient at the final state that survives k steps back; quartiles over samples."
    caption = Caption(id, f"State transfer of {layer}", sentence, f"rl.diagnose(model, x, y)[{layer!r}].kappa")
    figure = curve_figure(
        caption, static_lines, draw.CurveAxes("lag in steps", "share left", log=True, levels=[(1e-4, "vanished: 1e-4")])
    )
    figure.spec["layer"] = layer
    return [figure]


def _float_values(array: xr.DataArray) -> Array:
    """Return values as float64."""
    return np.asarray(array.values, dtype=np.float64)


def anchor(finding: Finding, figures: Sequence[ReportFigure], tracks: Sequence[Track]) -> str:
    """Return the HTML id to which a finding links: that of its figure in the report, or of the table of measures."""
    ids = {figure.id for figure in figures}
    shown_by = FIGURE_OF_CODE.get(finding.code, "")
    track_number = next((i for i, t in enumerate(tracks) if t.layer == finding.layer), len(tracks) - 1)
    transfer_id = next((f.id for f in figures if f.spec.get("layer") == finding.layer), "transfer-0")
    state_id = next((figure.id for figure in figures if figure.id.startswith(f"track-{track_number}-hidden")), "")
    id_by_kind = {
        "transfer": transfer_id,
        "states": state_id,
        "gradient": f"track-{track_number}-gradient",
        "input": "input-size",
    }
    figure_id = id_by_kind.get(shown_by, shown_by)
    return figure_id if figure_id in ids else "measures"


def findings(contents: ReportContents, figures: Sequence[ReportFigure], tracks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each finding of the diagnosis and of the training, with the id of the figure that supports it."""
    of_diagnosis = [] if contents.diagnosis is None else contents.diagnosis.findings
    of_training = [] if contents.run is None else contents.run.findings
    anchors = [
        *(anchor(finding, figures, tracks) for finding in of_diagnosis),
        *("scalar-update-ratio" if "ratio" in finding.evidence else "training" for finding in of_training),
    ]
    return [
        {
            **asdict(finding),
            "anchor": figure_id,
            "tone": "ruled out" if finding.code in _ACQUITTALS else finding.severity,
            "evidence": [(name.replace("_", " "), _value_text(value)) for name, value in finding.evidence.items()],
        }
        for finding, figure_id in zip([*of_diagnosis, *of_training], anchors, strict=True)
    ]


def _value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def results(contents: ReportContents) -> list[Result]:
    """Return all results of rnnlens that the page shows, for their checks and certificates."""
    candidates = [contents.trace, contents.diagnosis, contents.weights, *contents.other_results]
    return [result for result in candidates if isinstance(result, Result)]


@dataclass(frozen=True)
class Badge:
    """Summary of all checks: state ``good``, ``bad`` or ``open``, a text, and the largest residual."""

    state: str
    summary: str
    detail: str


def badge(contents: ReportContents) -> Badge | None:
    """Summarise self-checks and certificates: failed if any failed, open if any could not be made."""
    all_results = results(contents)
    checks = [check for result in all_results for check in result._self_checks]
    failed_checks = [check for check in checks if not check.ok]
    certificates = [result.certificate for result in all_results if result.certificate is not None]
    by_state = {certificate.state: certificate for certificate in reversed(certificates) if certificate.state != "off"}
    if "failed" in by_state:
        failed_certificate = by_state["failed"]
        return Badge(
            "bad", f"NOT certified against {failed_certificate.against}", _residual_text(failed_certificate.worst)
        )
    if failed_checks:
        return Badge(
            "bad", f"{len(failed_checks)} of {len(checks)} self-checks failed", _residual_text(worst_of(failed_checks))
        )
    if "could not" in by_state:
        return Badge("open", "could not certify", by_state["could not"].why)
    passed_text = f"{len(checks)} self-checks passed" if checks else ""
    if by_state:
        certificate = next(iter(by_state.values()))
        parts = [_residual_text(certificate.worst), passed_text]
        return Badge("good", f"certified against {certificate.against}", "; ".join(part for part in parts if part))
    return Badge("good", passed_text, _residual_text(worst_of(checks))) if checks else None


def _residual_text(check: Check | None) -> str:
    return "" if check is None else check.figures


def purpose(contents: ReportContents) -> str:
    """Return the first line of the page: what it shows, for readers who do not know rnnlens."""
    if contents.run is not None:
        return "This page shows a training of a recurrent network: its numbers and its gradient, record by record."
    if contents.moments and contents.moments[0].tracks:
        tracks = contents.moments[0].tracks
        layer_count, sample_count = len({track.layer for track in tracks}), len(contents.sample_positions)
        size_text = f"{sample_count} {'sequence' if sample_count == 1 else 'sequences'} of {tracks[0].steps} steps"
        layer_text = "a recurrent layer does" if layer_count == 1 else f"{layer_count} recurrent layers do"
        return f"This page shows what {layer_text} at every step of {size_text}{_purpose_end(contents)}."
    if contents.diagnosis is not None:
        return "This page shows how far back a recurrent network uses its input, and what keeps it from using more."
    if contents.time_map is not None:
        return "This page shows how much each input step of a recurrent network moves each of its output steps."
    return "This page shows measurements of a recurrent network."


def _purpose_end(contents: ReportContents) -> str:
    if contents.diagnosis is not None:
        return ", how far back the network uses its input, and what keeps it from using more"
    return ", and the gradient with which it learns" if contents.moments[0].tracks[0].gradients else ""


def facts(contents: ReportContents) -> list[tuple[str, str]]:
    """Return labels and values for the head of the page: counts of samples and steps, and losses."""
    if not contents.moments or not contents.moments[0].tracks:
        return []
    first_moment = contents.moments[0]
    rows = [("layers", str(len({track.layer for track in first_moment.tracks})))]
    total_samples = contents.total_samples
    shown_count = len(contents.sample_positions)
    rows.append(
        (
            "samples",
            f"{shown_count} of {total_samples}" if total_samples not in (None, shown_count) else str(shown_count),
        )
    )
    rows.append(("time steps", str(first_moment.tracks[0].steps)))
    has_baseline = len(contents.moments) > 1
    moments_with_loss = [moment for moment in contents.moments if moment.loss is not None]
    return rows + [
        (f"loss {moment.name}" if has_baseline else "loss", f"{moment.loss:.4g}") for moment in moments_with_loss
    ]


def versions(contents: ReportContents) -> list[tuple[str, str]]:
    """Return the versions of framework, engine, Python and rnnlens."""
    provenance: dict[str, str] = {}
    for result in results(contents):
        provenance = {**result.provenance, **provenance}
    provenance = with_version(provenance)
    platform_versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(terse=True),
    }
    return [(name.replace("_", " "), text) for name, text in {**provenance, **platform_versions}.items()]


def measures(diagnosis: Diagnosis | None) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return name, value and unit of every scalar measure, by layer."""
    if diagnosis is None:
        return []
    rows_by_layer = []
    for layer in diagnosis.layers:
        rows = [
            (str(v.attrs.get("long_name", name)), _value_text(v.item()), str(v.attrs.get("units", "")))
            for name, v in diagnosis.dataset(layer).data_vars.items()
            if v.ndim == 0
        ]
        rows_by_layer.append((layer, rows))
    return rows_by_layer


def omissions_of(contents: ReportContents, plan: PagePlan | None) -> list[str]:
    """List the contents of the report that the page leaves out or merges, as text."""
    omissions = list(contents.left_out)
    if plan is None:
        return omissions
    sample_count, tracks = len(contents.sample_positions), contents.moments[0].tracks
    if plan.curve_count < sample_count:
        omissions.append(f"{plan.curve_count} of {sample_count} samples can be picked; all count in medians and bands.")
    if plan.map_count < min(sample_count, plan.curve_count):
        omissions.append(
            f"Maps of single units are of {plan.map_count} samples: typical, hardest, easiest, and some between."
        )
    if len(contents.moments) > 1 and min(plan.map_count, 2) < sample_count:
        omissions.append(f"Maps of {contents.moments[1].name} are of {min(plan.map_count, 2)} samples.")
    if plan.curve_bin > 1 or plan.map_bin > 1:
        merged_text = f"{plan.curve_bin} steps are one point of a curve, {plan.map_bin} one column of a map"
        omissions.append(f"Of {tracks[0].steps} steps, {merged_text}: sizes as root mean square, others as mean.")
    omissions.append("Numbers are rounded: maps to 251 levels of their scale, curves to 65001.")
    if any(track.units > MAX_KERNEL_UNITS for track in tracks):
        omissions.append(f"Recurrent kernels of more than {MAX_KERNEL_UNITS} units are left out.")
    return omissions
