"""Texts of the page: findings, certificate, versions, measures, and omitted contents."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..results.base import Result
from ..results.checks import Check
from ..results.diagnosis import Diagnosis
from ..results.schema import with_version
from . import evidence
from .figures import ReportFigure, ShownSamples
from .material import Material
from .sections import LARGEST


def findings(diagnosis: Diagnosis | None, every: Sequence[ReportFigure], tracks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each finding with the id of the figure that supports it."""
    if diagnosis is None:
        return []
    return [
        {**asdict(finding), "anchor": evidence.anchor(finding, every, tracks), "evidence": _evidence(finding.evidence)}
        for finding in diagnosis.findings
    ]


def _evidence(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _text(value)) for name, value in numbers.items()]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def results(material: Material) -> list[Result]:
    """Return all results that the page shows."""
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
        return Badge("bad", f"{len(failed)} of {len(checks)} self-checks failed", _residual(_worst(failed)))
    if "could not" in states:
        return Badge("open", "could not certify", states["could not"].why)
    passed = f"{len(checks)} self-checks passed" if checks else ""
    if states:
        certificate = next(iter(states.values()))
        parts = [_residual(certificate.worst), passed]
        return Badge("good", f"certified against {certificate.against}", "; ".join(part for part in parts if part))
    return Badge("good", passed, _residual(_worst(checks))) if checks else None


def _worst(checks: Sequence[Check]) -> Check:
    """Return the check with the largest residual relative to its bound."""
    return max(checks, key=lambda check: math.inf if math.isnan(check.residual) else check.residual / check.bound)


def _residual(check: Any) -> str:
    """Return a residual with its bound as text; "" for None."""
    return "" if check is None else f"largest residual {check.residual:.1g}, rounding explains {check.bound:.1g}"


def facts(material: Material) -> list[tuple[str, str]]:
    """Return counts and losses for the head of the page."""
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


def left_out(material: Material, shown: ShownSamples | None) -> list[str]:
    """List the contents that the page leaves out or merges."""
    said = list(material.left_out)
    if shown is None:
        return said
    found = shown.plan
    samples, tracks = len(material.numbers), material.moments[0].tracks
    if found.curves < samples:
        said.append(f"{found.curves} of {samples} samples can be picked; all count in medians and bands.")
    if found.maps < min(samples, found.curves):
        said.append(f"Maps of single units are of {found.maps} samples: typical, hardest, easiest, and some between.")
    if len(material.moments) > 1 and min(found.maps, 2) < samples:
        said.append(f"Maps of {material.moments[1].name} are of {min(found.maps, 2)} samples.")
    if found.curve_bin > 1 or found.map_bin > 1:
        merged = f"{found.curve_bin} steps are one point of a curve, {found.map_bin} one column of a map"
        said.append(f"Of {tracks[0].steps} steps, {merged}: sizes as root mean square, others as mean.")
    said.append("Numbers are rounded: maps to 251 levels of their scale, curves to 65001.")
    if any(track.units > LARGEST for track in tracks):
        said.append(f"Recurrent kernels of more than {LARGEST} units are left out.")
    return said
