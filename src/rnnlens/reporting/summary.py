"""What the page says in words: findings, how sure the numbers are, how they were made, what is not shown."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..results.base import Result
from ..results.certificate import Certificate
from ..results.checks import Check
from ..results.diagnosis import Diagnosis
from ..results.schema import with_version
from . import evidence
from .figures import Figure, Shown
from .layer_figures import LARGEST
from .material import Material


def findings(diagnosis: Diagnosis | None, every: Sequence[Figure], tracks: Sequence[Any]) -> list[dict[str, Any]]:
    """Each finding, with the figure that bears it out."""
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
    """All results that the page shows."""
    every = [material.trace, material.diagnosis, material.weights, *material.others]
    return [result for result in every if isinstance(result, Result)]


@dataclass(frozen=True)
class Badge:
    """One word on how sure the numbers are: ``good``, ``bad`` or ``open``, with the residual."""

    state: str
    word: str
    detail: str


def badges(material: Material) -> list[Badge]:
    """Self-checks, and the certificate: what was compared, and by how much it differs."""
    every = results(material)
    checks = [check for result in every for check in result._self_checks]
    badges = [_checked(checks)] if checks else []
    certificates = [result.certificate for result in every if result.certificate is not None]
    return badges + [_certified(certificate) for certificate in certificates if certificate.state != "off"]


def _checked(checks: Sequence[Check]) -> Badge:
    failed = [check for check in checks if not check.ok]
    worst = max(
        failed or checks, key=lambda check: math.inf if math.isnan(check.residual) else check.residual / check.bound
    )
    detail = f"largest residual {worst.residual:.1g}, rounding explains {worst.bound:.1g}"
    if failed:
        return Badge("bad", f"{len(failed)} of {len(checks)} self-checks failed", detail)
    return Badge("good", f"{len(checks)} self-checks passed", detail)


def _certified(certificate: Certificate) -> Badge:
    if certificate.state == "could not":
        return Badge("open", "could not certify", certificate.why)
    worst = certificate.worst
    detail = "" if worst is None else f"largest residual {worst.residual:.1g}, rounding explains {worst.bound:.1g}"
    if certificate.state == "failed":
        return Badge("bad", f"NOT certified against {certificate.against}", detail)
    return Badge("good", f"certified against {certificate.against}", detail)


def facts(material: Material) -> list[tuple[str, str]]:
    """The report in numbers, for its head."""
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
    """Where the numbers come from."""
    known: dict[str, str] = {}
    for result in results(material):
        known = {**result.provenance, **known}
    known = with_version(known)
    own = {"python": platform.python_version(), "numpy": np.__version__, "platform": platform.platform(terse=True)}
    return [(name.replace("_", " "), text) for name, text in {**known, **own}.items()]


def measures(diagnosis: Diagnosis | None) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """By layer: name, value and unit of every measure that is one number."""
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


def left_out(material: Material, shown: Shown | None) -> list[str]:
    """What the reader does not get to see."""
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
