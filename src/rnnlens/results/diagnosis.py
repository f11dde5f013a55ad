"""``Diagnosis``, the result of ``rl.diagnose``: sentences, findings and the measures behind them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import xarray as xr

from .base import Part, Result
from .certificate import Certificate
from .checks import Check
from .page import Said

Severity = Literal["fault", "caution", "fact", "unknown"]

#: Version of the layout of :meth:`Diagnosis.to_json`; it grows when a field is renamed or removed.
SCHEMA = 1


@dataclass(frozen=True)
class Finding:
    """One finding: a sentence with its numbers, the threshold that they met, and a remedy.

    Attributes
    ----------
    code
        ``"VANISHING"`` and so on; docs/findings has a page for each.
    severity
        ``"fault"``: something to repair; ``"caution"``: read the numbers with care; ``"fact"``; ``"unknown"``: nothing
        can be concluded.
    layer
        Name of the layer, or ``"model"``.
    sentence
        The finding in words, with the numbers.
    evidence
        The numbers by name.
    threshold
        The rule that the numbers met.
    remedy
        Suggested change, its condition, and a reference.
    """

    code: str
    severity: Severity
    layer: str
    sentence: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    threshold: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.code} ({self.severity}, {self.layer}): {self.advice}"

    @property
    def advice(self) -> str:
        """The sentence, followed by the remedy if there is one."""
        return f"{self.sentence} Try: {self.remedy}" if self.remedy else self.sentence


class Diagnosis(Result, kind="diagnosis"):
    """Diagnosis of a model: ``print(d)`` shows sentences and findings, ``d["lstm"]`` is the dataset of measures.

    ``d["model"]`` contains the measures of the whole model: the curves ``use`` and ``benefit`` over ``context`` with
    their intervals, ``memory`` (n at 5 % and 1 %), ``skill``, the residual test by lag. A layer's node contains
    ``kappa`` and the adjoint's profile by ``lag``, the leading exponent, gate timescales, dead units.

    Attributes
    ----------
    sentences : by ``"the model"`` and by layer
    findings : list of :class:`Finding`, faults first
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        sentences: Mapping[str, str] | None = None,
        findings: Iterable[Finding | Mapping[str, Any]] = (),
        provenance: Mapping[str, str] | None = None,
        notes: Iterable[str] = (),
        checks: Iterable[Check | Mapping[str, Any]] = (),
        certificate: Certificate | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(datasets, provenance=provenance, notes=notes, checks=checks, certificate=certificate)
        self.sentences = dict(sentences or {})
        self.findings = [f if isinstance(f, Finding) else Finding(**f) for f in findings]

    @property
    def codes(self) -> tuple[str, ...]:
        """Distinct codes of the findings, in order."""
        return tuple(dict.fromkeys(finding.code for finding in self.findings))

    def to_json(self) -> str:
        """Return JSON in a stable layout: schema, sentences, findings, scalar measures, notes, provenance."""
        measures = {
            name: {
                str(key): _number(variable)
                for key, variable in self.dataset(name).data_vars.items()
                if variable.ndim == 0
            }
            for name in self
        }
        whole = {
            "schema": SCHEMA,
            "sentences": self.sentences,
            "findings": [asdict(finding) for finding in self.findings],
            "measures": measures,
            "notes": self.notes,
            "provenance": self.provenance,
        }
        return json.dumps(whole, indent=2, default=str)

    def _meta(self) -> dict[str, Any]:
        return {
            **super()._meta(),
            "sentences": self.sentences,
            "findings": [json.loads(json.dumps(asdict(f), default=float)) for f in self.findings],
        }

    def _headline(self) -> str:
        return ", ".join(self.codes) or "nothing to report"

    def __str__(self) -> str:
        return "\n".join([*self.sentences.values(), *map(str, self.findings), *(f"note: {n}" for n in self.notes)])

    def _rows(self) -> list[tuple[str, str]]:
        return [*self.sentences.items(), *((f.code, f.advice) for f in self.findings)]

    def _said(self) -> list[Said]:
        sentences = [Said("", "", sentence) for sentence in self.sentences.values()]
        return sentences + [Said(f.severity, f.code, f.advice) for f in self.findings]

    def _parts(self) -> list[Part]:
        return [(name, "", self.dataset(name)) for name in self]


def _number(variable: xr.DataArray) -> Any:
    value = variable.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
