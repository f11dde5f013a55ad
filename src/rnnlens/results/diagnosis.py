"""Results of ``rl.diagnose``, ``rl.compare``, ``rl.fixed_points``: ``Diagnosis``, ``Comparison``, ``FixedPoints``."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import xarray as xr

from ..errors import InputError, LayerNotFoundError, did_you_mean
from ..measures.dynamics import point_kinds
from ..vocabulary import DIRECTION
from .base import Part, Result
from .encoding import to_strict_json
from .page import ShownFinding

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


@dataclass(frozen=True)
class StepsBack:
    """One measure of how far back a model looks.

    Attributes
    ----------
    measure
        ``"prediction depends on"``, ``"state carries"``, ``"training signal reaches"`` or ``"gradient in use"``.
    steps, of
        Number of last steps, and of all steps up to the examined one.
    sentence
        What the number means.
    layer
        Name of the layer whose state it is; empty for the whole model.
    low, high
        95 % interval; None where there is none.
    of_prediction
        Whether the prediction is what changes; False for a layer that was measured alone.
    """

    measure: str
    steps: float
    of: int
    sentence: str
    layer: str = ""
    low: float | None = None
    high: float | None = None
    of_prediction: bool = True

    @property
    def label(self) -> str:
        """The measure, with its layer: ``"state of gru carries"``."""
        return self.measure.replace("state", f"state of {self.layer}", 1) if self.layer else self.measure

    @property
    def text(self) -> str:
        """The number as text, with ``≥`` where all steps count, and its interval."""
        interval = "" if self.low is None or self.high is None else f" (95 % CI {self.low:.0f}-{self.high:.0f})"
        return f"{self.steps:.0f}{interval}" if self.steps < self.of else f"≥ {self.of}"


class Diagnosis(Result, kind="diagnosis"):
    """Diagnosis of a model: ``print(d)`` shows sentences and findings, ``d["lstm"]`` is the dataset of measures.

    ``d["model"]`` contains the measures of the whole model: the curves ``use`` and ``benefit`` over ``context`` with
    their intervals, ``memory`` (n at 5 % and 1 %), ``skill``, the residual test by lag. A layer's node contains
    ``kappa`` and the adjoint's profile by ``lag``, the leading exponent, gate timescales, dead units.

    Attributes
    ----------
    sentences : by ``"the model"`` and by layer
    findings : list of :class:`Finding`, faults first
    how_far_back : list of :class:`StepsBack`, the measures of memory and of the gradient side by side
    why_they_differ : list of sentences on these measures
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        sentences: Mapping[str, str] | None = None,
        findings: Iterable[Finding | Mapping[str, Any]] = (),
        how_far_back: Iterable[StepsBack | Mapping[str, Any]] = (),
        why_they_differ: Iterable[str] = (),
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.sentences = dict(sentences or {})
        self.findings = [f if isinstance(f, Finding) else Finding(**f) for f in findings]
        self.how_far_back = [row if isinstance(row, StepsBack) else StepsBack(**row) for row in how_far_back]
        self.why_they_differ = list(why_they_differ)

    @property
    def codes(self) -> tuple[str, ...]:
        """Distinct codes of the findings, in order."""
        return tuple(dict.fromkeys(finding.code for finding in self.findings))

    def to_json(self) -> str:
        """Return JSON in a stable layout: schema, sentences, findings, how far back, measures, notes, provenance.

        Numbers that are not finite are null. A measure of a bidirectional layer is a mapping: forward, backward.
        """
        measures = {
            name: {
                str(k): to_strict_json(_number_or_halves(v))
                for k, v in self.dataset(name).data_vars.items()
                if v.dims in ((), (DIRECTION,))
            }
            for name in self
        }
        document = {
            "schema": SCHEMA,
            "sentences": self.sentences,
            "findings": to_strict_json([asdict(finding) for finding in self.findings]),
            "how_far_back": to_strict_json([asdict(row) for row in self.how_far_back]),
            "why_they_differ": self.why_they_differ,
            "measures": measures,
            "notes": self.notes,
            "provenance": self.provenance,
        }
        return json.dumps(document, indent=2, default=str)

    def _meta(self) -> dict[str, Any]:
        return {
            **super()._meta(),
            "sentences": self.sentences,
            "findings": [json.loads(json.dumps(asdict(f), default=float)) for f in self.findings],
            "how_far_back": [asdict(row) for row in self.how_far_back],
            "why_they_differ": self.why_they_differ,
        }

    def _headline(self) -> str:
        return ", ".join(self.codes) or "nothing to report"

    def __str__(self) -> str:
        lines = [*self.sentences.values(), *map(str, self.findings), *self._card()]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])

    def _card(self) -> list[str]:
        """Return the measures of how far back the model looks as lines of a table, and why they differ."""
        if not self.how_far_back:
            return []
        widths = [max(len(text) for text in column) for column in self._card_columns()]
        rows = zip(*self._card_columns(), self.how_far_back, strict=True)
        lines = [f"  {label:{widths[0]}}  {number:{widths[1]}}  {row.sentence}" for label, number, row in rows]
        return [
            f"How far back, in steps of {self.how_far_back[0].of}:",
            *lines,
            *(f"  why: {reason}" for reason in self.why_they_differ),
        ]

    def _card_columns(self) -> tuple[list[str], list[str]]:
        return [row.label for row in self.how_far_back], [row.text for row in self.how_far_back]

    def _rows(self) -> list[tuple[str, str]]:
        rows = [*self.sentences.items(), *((f.code, f.advice) for f in self.findings)]
        if self.how_far_back:
            rows.append(("how far back", ", ".join(map(" ".join, zip(*self._card_columns(), strict=True)))))
        return rows

    def _notebook_findings(self) -> list[ShownFinding]:
        sentences = [*self.sentences.values(), *(text for name, text in self._rows() if name == "how far back")]
        shown = [ShownFinding("", "", sentence) for sentence in sentences]
        return shown + [ShownFinding(f.severity, f.code, f.advice) for f in self.findings]

    def _parts(self) -> list[Part]:
        return [(name, "", self.dataset(name)) for name in self]


#: Columns of the table: variable, heading, format of a number.
COLUMNS = (("skill", "skill", "{:.2f}"), ("memory", "memory", "{:.0f}"), ("memory_1_percent", "at 1 %", "{:.0f}"))


class Comparison(Result, kind="comparison"):
    """Several diagnoses side by side: ``c.table``, a Dataset over ``name``, ``c["a"]``, one of them; prints as a table.

    ``difference`` and ``difference_interval`` compare the memory with that of the first diagnosis, by a bootstrap over
    the samples common to all. The memory is NaN where it is unknown. ``error`` has the error of a model that could
    not be diagnosed, and is empty otherwise.

    Attributes
    ----------
    diagnoses : all diagnoses by name; empty in a comparison that was opened from a file
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        diagnoses: Mapping[Any, Diagnosis] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.diagnoses = dict(diagnoses or {})

    def __getitem__(self, name: Any) -> Any:
        """Return the diagnosis of a model by its name, or a table by its own."""
        if isinstance(name, Hashable) and name in self.diagnoses:
            return self.diagnoses[name]
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return (isinstance(name, Hashable) and name in self.diagnoses) or super().__contains__(name)

    def _resolve(self, name: str) -> str:
        if name in self.layers:
            return super()._resolve(name)
        models = self.table["name"].values.tolist()
        if name not in models:
            hint = did_you_mean(name, map(str, models))
            raise LayerNotFoundError("No model of this comparison has this name.", got=repr(name), hint=hint)
        row = f"comparison.table.sel(name={name!r})"
        error = str(self.table["error"].sel(name=name).item()).partition("\n")[0]
        if name in self.diagnoses:
            message, hint = "A model of a comparison has no dataset of its own.", f"{row}, or comparison[{name!r}]"
        elif error:
            message, hint = f"This model could not be diagnosed: {error}", f"{row}.error"
        else:
            message, hint = "A comparison read from a file has the numbers of its models alone.", row
        raise LayerNotFoundError(message, got=repr(name), hint=hint)

    @property
    def table(self) -> xr.Dataset:
        """Dataset over ``name`` with one row per model."""
        return self.dataset(self.layers[0])

    @property
    def scorecard(self) -> xr.Dataset:
        """Dataset over ``name`` and ``measure``: value, interval, layer, verb, and the reason where it is not defined.

        ``c.scorecard.value.to_pandas()`` is a table.
        """
        if "scorecard" not in self.layers:
            hint = "rl.compare(models, x, y, scorecard=True)"
            raise InputError("This comparison has no scorecard.", got="diagnoses alone", hint=hint)
        return self.dataset("scorecard")

    def __str__(self) -> str:
        return "\n".join([repr(self), *(_scorecard_lines(self.scorecard) if "scorecard" in self.layers else [])])

    def _headline(self) -> str:
        failed_count = int((self.table["error"] != "").sum())
        return f"{self.table.sizes['name'] - failed_count} diagnoses" + (
            f", {failed_count} failed" if failed_count else ""
        )

    def _rows(self) -> list[tuple[str, str]]:
        table = self.table
        rows = []
        for i, (name, error) in enumerate(zip(table["name"].values, table["error"].values, strict=True)):
            if error:
                rows.append((str(name), f"failed: {str(error).splitlines()[0]}"))
                continue
            parts = [_table_cell(table, key, label, number_format, i) for key, label, number_format in COLUMNS]
            if i != table.attrs["reference"]:
                parts.append(_memory_difference(table, i))
            codes = str(table["findings"].values[i])
            rows.append((str(name), ", ".join([*parts, codes] if codes else parts)))
        return rows

    def _parts(self) -> list[Part]:
        return [(name, description, None) for name, description in self._rows()]


def _scorecard_lines(scorecard: xr.Dataset) -> list[str]:
    """Format a scorecard as a table, measures down and models across, with the reasons of empty cells below it."""
    names, measures = [str(name) for name in scorecard["name"].values], scorecard["measure"].values.tolist()
    columns = [["scorecard", *measures]]
    for i, name in enumerate(names):
        bounds = scorecard["interval"].values[i]
        values = scorecard["value"].values[i]
        columns.append([name, *(_score_text(value, *bound) for value, bound in zip(values, bounds, strict=True))])
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons: dict[tuple[str, str], list[str]] = {}
    for (i, j), reason in np.ndenumerate(scorecard["reason"].values):
        if reason:
            reasons.setdefault((measures[j], str(reason)), []).append(names[i])
    undefined = [
        f"not defined: {measure} of {', '.join(of)}: {reason}" for (measure, reason), of in sorted(reasons.items())
    ]
    return [*lines, *undefined]


def _score_text(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "-"
    if math.isnan(low):
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{value:.3g} ({low:.3g} to {high:.3g})"


def _memory_difference(table: xr.Dataset, row: int) -> str:
    """Describe how the memory of one diagnosis differs from that of the first one."""
    reference_row = int(table.attrs["reference"])
    value, (low, high) = float(table["difference"].values[row]), table["difference_interval"].values[row]
    if not bool(table["known"].values[[reference_row, row]].all()):
        return "no difference of memory, as one is unknown"
    if math.isnan(value) or math.isnan(low):
        return "no difference of memory, as the samples are not the same"
    return f"memory {value:+.0f} against {table['name'].values[reference_row]} (95 % CI {low:+.0f} to {high:+.0f})"


def _table_cell(table: xr.Dataset, key: str, heading: str, number_format: str, row: int) -> str:
    value = float(table[key].values[row])
    if math.isnan(value) or (key != "skill" and not bool(table["known"].values[row])):
        return f"{heading} unknown"
    low, high = (float(v) for v in table[f"{key}_interval"].values[row])
    return f"{heading} {number_format.format(value)} ({number_format.format(low)} to {number_format.format(high)})"


_KINDS = ("stable", "saddle", "repeller", "marginal")


class FixedPoints(Result, kind="dynamics"):
    """Fixed and slow points of one layer: ``p.states (point, state)``, ``p.eigenvalues``, ``p.kinds``, ``p.curves``."""

    @property
    def data(self) -> xr.Dataset:
        """All variables of the layer."""
        return self.dataset(self.layers[0])

    @property
    def eigenvalues(self) -> xr.DataArray:
        """Eigenvalues of the step Jacobian (point, mode), complex, largest modulus first."""
        return self.data["eigenvalue_real"] + 1j * self.data["eigenvalue_imag"]

    @property
    def eigenvectors(self) -> xr.DataArray:
        """Eigenvectors of the step Jacobian (point, state, mode), complex."""
        return self.data["eigenvector_real"] + 1j * self.data["eigenvector_imag"]

    @property
    def states(self) -> xr.DataArray:
        """Fixed and slow points (point, state); the states of the cell are concatenated."""
        return self.data["states"]

    @property
    def stable(self) -> xr.DataArray:
        """Stability of each point: (point,) of bool."""
        return self.data["stable"]

    @property
    def fixed(self) -> xr.DataArray:
        """Mask of the fixed points: (point,) of bool; the others are slow points."""
        return self.data["fixed"]

    @property
    def kinds(self) -> list[str]:
        """Kind of each point: ``"stable"``, ``"saddle"``, ``"repeller"``, ``"marginal"`` or ``"slow"``."""
        curve = self.data["curve"] if "curve" in self.data else xr.full_like(self.fixed, -1, dtype=int)
        return point_kinds(self.eigenvalues.values, self.fixed.values, curve.values, self.curves)

    @property
    def curves(self) -> list[str]:
        """Kind of each curve: ``"line"`` or ``"ring"`` of marginal points, ``"slow line"`` or ``"slow ring"``."""
        return [name for name in str(self.data.attrs.get("curves", "")).split(", ") if name]

    def _headline(self) -> str:
        kinds = self.kinds
        counts = [_counted_noun(kinds.count(kind), kind) for kind in _KINDS if kind in kinds] or ["no fixed points"]
        counts += [_counted_noun(kinds.count("slow"), "slow", "point")] if "slow" in kinds else []
        curve_texts = [self._curve_text(i, name) for i, name in enumerate(self.curves)]
        return f"{', '.join(curve_texts)}; {', '.join(counts)}" if curve_texts else ", ".join(counts)

    def _curve_text(self, index: int, name: str) -> str:
        kind = "slow" if name.startswith("slow") else "marginal"
        return f"a {name.removeprefix('slow ')} of {int((self.data['curve'] == index).sum())} {kind} points"

    def _rows(self) -> list[tuple[str, str]]:
        moduli, kinds, data = abs(self.eigenvalues).values, self.kinds, self.data
        return [
            (
                f"point {i}",
                f"{kinds[i]}, {int((moduli[i] > 1).sum())} unstable modes, largest |eigenvalue| {moduli[i].max():.4g}, "
                f"from {int(data['starts'][i])} starts, speed {float(data['speed'][i]):.1g}",
            )
            for i in range(min(len(moduli), 12))
        ]


def _number_or_halves(measure: xr.DataArray) -> Any:
    """Return a measure without axes as a number, and one with an axis of directions as numbers by direction."""
    if not measure.ndim:
        return measure.item()
    return dict(zip(measure[DIRECTION].values.tolist(), measure.values.tolist(), strict=True))


def _counted_noun(count: int, adjective: str, noun: str = "fixed point") -> str:
    return f"{count} {adjective} {noun}" + ("" if count == 1 else "s")
