"""Rendering of a report's material to one HTML page."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from . import evidence
from .draw import hex_colours
from .figures import ReportFigure, ShownSamples
from .material import Material
from .samples import Ranking
from .sections import LEAVING, Section, sections_of, shown_of, weight_norms
from .tracks import sort_keys

_SCRIPTS = ("base", "values", "panel", "lines", "maps", "controls", "downloads", "main")


@dataclass(frozen=True)
class ReportOrigin:
    """Title of a report, and the call that reproduces it."""

    title: str
    code: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    when: str = ""


def render(material: Material, made: ReportOrigin) -> str:
    """Return the page as text that needs no other file."""
    shown = shown_of(material)
    sections: list[Section] = sections_of(material, shown)
    every = [figure for section in sections for figure in section.figures]
    script = "\n".join(["'use strict';", "(function () {", *(_asset(f"{name}.js") for name in _SCRIPTS), "})();"])
    tracks = material.moments[0].tracks if material.moments else []
    context = {
        "made": made,
        "material": material,
        "sections": sections,
        "findings": evidence.findings(material.diagnosis, every, tracks),
        "sentences": {} if material.diagnosis is None else material.diagnosis.sentences,
        "badge": evidence.badge(material),
        "facts": evidence.facts(material),
        "versions": evidence.versions(material),
        "measures": evidence.measures(material.diagnosis),
        "checks": [check for result in evidence.results(material) for check in result.checks],
        "notes": list(dict.fromkeys(note for result in evidence.results(material) for note in result.notes)),
        "left_out": evidence.left_out(material, shown),
        "interactive": shown is not None,
        "data": _clean(_data(material, shown, every)),
        "style": Markup(_asset("report.css")),
        "script": Markup(script),
        "policy": _policy(script),
    }
    return _environment().get_template("page.html").render(context)


def _environment() -> Environment:
    """Return the template environment: it escapes all text except drawings of this package."""
    return Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def _policy(script: str) -> str:
    """Return the Content-Security-Policy: nothing is loaded, and only this script runs, by its hash."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _data(material: Material, shown: ShownSamples | None, every: Sequence[ReportFigure]) -> dict[str, Any]:
    """Return the data that the script reads."""
    page: dict[str, Any] = {
        "figures": [figure.to_json() for figure in every],
        "palettes": {name: hex_colours(name) for name in ("size", "signed", "gate")},
        "moments": [found.name for found in material.moments],
        "steps": 0,
        "samples": [],
        "tracks": [],
    }
    if shown is None or material.ranking is None:
        return page
    ranking: Ranking = material.ranking
    page |= {
        "steps": material.moments[0].tracks[0].steps,
        "samples": [
            {
                "number": material.labels[i],
                "loss": None if material.losses is None else float(material.losses[i]),
                "target": material.targets[i],
            }
            for i in range(len(material.numbers))
        ],
        "order": [i for i in ranking.order if i in set(shown.curves)],
        "by_loss": material.losses is not None,
        "typical": ranking.typical,
        "hardest": ranking.hardest,
        "easiest": ranking.easiest,
        "tracks": [_track_json(material, number) for number in range(len(material.moments[0].tracks))],
    }
    if material.words is not None:
        page["words"] = {str(i): material.words[i] for i in shown.maps}
    return page


def _track_json(material: Material, number: int) -> dict[str, Any]:
    track = material.moments[0].tracks[number]
    columns, _ = weight_norms(track, material.weights)
    total = None
    if columns:
        total = np.sqrt(sum(values**2 for name, values in columns.items() if name != LEAVING))
    keys = sort_keys(track, total)
    return {
        "title": track.title,
        "layer": track.layer,
        "units": track.units,
        "steps": track.steps,
        "keys": {name: [_rounded(v) for v in values] for name, values in keys.items()},
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _clean(value: Any) -> Any:
    """Replace numbers that are not finite by null, and NumPy scalars by Python's."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
