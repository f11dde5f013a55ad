"""Alerts (exploding or vanishing gradients, saturated gates), and the report of a batch that is not finite.

Each is reported once, with its step.

No fixed threshold fits every network, so a value is compared with the run itself: with the median of the records before
it, of all in the window and of the last few, in units of their spread. The spread is the median absolute deviation,
scaled to a standard deviation, about the median or between successive records, whichever is smaller; so a drift, such
as a gradient that falls with the loss, does not increase it. Gradients and reaches are compared on a logarithmic scale,
shares on a logit scale. Median and deviation are robust against the outlier to be found (Hampel 1974, J. Am. Stat.
Assoc. 69; Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers, with a threshold of 3.5 deviations). Gradients
of training have heavier tails than that rule assumes, and are tested at every record; so a finding requires
:data:`DEVIATIONS`, a change of at least :data:`EFFECT`, and two records in a row. A gradient that is :data:`EXPLODED`
times the largest of the records before it is a finding at once, however few they are: the next may not be finite.
``benchmarks/alerts.py`` counts false alarms and misses.

A vanishing gradient is detected by two scalars, reach and decay, since neither suffices alone. In a network with long
memory the reach may fall from 24 steps to 1 while the decay only falls from 0.9 to 0.5. In a network with a reach of 2
steps the reach cannot fall to a third, but the decay may fall from 0.6 to 0.02.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from .. import data
from ..adapters.protocol import Batch
from ..errors import InputError, did_you_mean, short_repr
from ..results.nonfinite import Incident
from ..results.training_run import ALERT_FINDINGS as FINDINGS
from ..results.training_run import Alert, AlertFinding
from .batches import TrainedBatch
from .records import TrainingRecord
from .watch_arguments import names_tuple

#: Largest and smallest number of earlier records with which a new one is compared.
WINDOW, LEAST = 32, 8
#: Deviations from the median from which a value is abnormal.
DEVIATIONS = 6.0
#: Number of abnormal records in a row that make a finding.
PERSIST = 2
#: Smallest change that makes a finding: a gradient ten times as large; a third of the reach or of the decay; odds of
#: saturation larger by e^3, such as from 5 % to 50 %, or from 50 % to 95 %. A healthy network that learns to store a
#: value may saturate a third of its update gates.
EFFECT = {"exploding": math.log(10.0), "vanishing": math.log(3.0), "saturated": 3.0}
#: Increase of a gradient, over the largest one before it, that makes a finding in one record. The largest gradient of a
#: healthy network increases less between two records; zeros, as below a head that is initialised with zeros, do not
#: count.
EXPLODED = 1e3
#: Lower limit of the spread, on the same scales.
_LEAST_SPREAD = {"exploding": 0.2, "vanishing": 0.15, "saturated": 0.2}
#: Shares are clipped to these limits, beyond which they are counting noise.
_SHARES = (0.05, 0.99)

_log = logging.getLogger("rnnlens")


def checked_stop_on(value: str | Iterable[str]) -> tuple[AlertFinding, ...]:
    """Return the findings that end training as a tuple; raise InputError for a name that is no finding."""
    findings = names_tuple(value) or ()
    for name in findings:
        if name not in FINDINGS:
            hint = did_you_mean(str(name), FINDINGS)
            raise InputError("stop_on= names no finding.", got=short_repr(name), hint=hint)
    return findings  # type: ignore[return-value]


@dataclass
class _WatchedScalar:
    """One scalar over training, on a scale on which it varies evenly, with the window of earlier records."""

    finding: AlertFinding
    sign: float
    scale: Callable[[float], float]
    earlier_values: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    outliers: list[tuple[int, float, float]] = field(default_factory=list)
    is_reported: bool = False

    def add_value(self, step: int, value: float) -> tuple[int, float] | None:
        """Add the value of a scalar at a step; once it is abnormal, return that step and the earlier median."""
        earlier_median = median([raw for _, raw in self.earlier_values]) if self.earlier_values else math.nan
        if not math.isfinite(value):
            # A gradient that is not finite is a finding at once; shares that are not finite are ignored.
            is_new_finding = self.finding == "exploding" and bool(self.earlier_values) and not self.is_reported
            self.is_reported |= is_new_finding
            return (step, earlier_median) if is_new_finding else None
        scaled_value = self.scale(value)
        has_enough = len(self.earlier_values) >= LEAST
        is_outlier = has_enough and self._is_outlier(scaled_value)
        is_explosion = (is_outlier or not has_enough) and self._has_exploded(value)
        if is_outlier or (is_explosion and not self.is_reported):
            self.outliers.append((step, scaled_value, value))
            if (len(self.outliers) >= PERSIST or is_explosion) and not self.is_reported:
                self.is_reported = True
                return self.outliers[0][0], earlier_median
            if len(self.outliers) < WINDOW:
                return None
        # Abnormal values join the window: if they last they are the new normal, otherwise they were noise.
        self.earlier_values.extend((scaled, raw) for _, scaled, raw in self.outliers)
        self.outliers.clear()
        self.earlier_values.append((scaled_value, value))
        return None

    def _has_exploded(self, value: float) -> bool:
        """Return whether a value is a gradient that is much larger than each before it."""
        largest = max((raw for _, raw in self.earlier_values), default=0.0)
        return self.finding == "exploding" and value >= EXPLODED * largest > 0.0

    def _is_outlier(self, scaled_value: float) -> bool:
        """Return whether a value is an outlier of the whole window, drift aside, and of its most recent records."""
        scaled_values = [s for s, _ in self.earlier_values]
        centre = median(scaled_values)
        median_deviation = median(abs(v - centre) for v in scaled_values)
        step_deviation = median(
            abs(following - previous) for previous, following in pairwise(scaled_values)
        ) / math.sqrt(2.0)
        spread = max(1.4826 * min(median_deviation, step_deviation), _LEAST_SPREAD[self.finding])
        distance = min(self.sign * (scaled_value - reference) for reference in (centre, median(scaled_values[-LEAST:])))
        return distance > DEVIATIONS * spread and distance > EFFECT[self.finding]


class Alerts:
    """Examination of every record of a run: each finding is logged once with its step, and may end training.

    Parameters
    ----------
    stop_on
        Findings that end training: ``"exploding"``, ``"vanishing"``, ``"saturated"``.
    on_alert
        Function that is called with each :class:`Alert` once.

    Attributes
    ----------
    raised_alerts : list of :class:`Alert`
    stop : str, or None
        Reason to end training; None while it continues.
    """

    def __init__(self, stop_on: str | Iterable[str] = (), on_alert: Callable[[Alert], object] | None = None) -> None:
        self.stop_on, self.on_alert = checked_stop_on(stop_on), on_alert
        self.raised_alerts: list[Alert] = []
        self.stop: str | None = None
        self._watched_scalars: dict[tuple[str, str], _WatchedScalar] = {}
        self._reported_findings: set[tuple[str, AlertFinding, str]] = set()

    def examine(self, record: TrainingRecord) -> TrainingRecord:
        """Examine a record; return it with a note for each new finding."""
        new_alerts = []
        for name, value in record.scalars.items():
            alert = self._examine_scalar(record, name, value)
            if alert is None:
                continue
            # A finding is reported once for each scalar of gates, and once for all gradients of a layer.
            subject = name if alert.finding == "saturated" else name.rpartition("/")[0]
            if (record.kind, alert.finding, subject) not in self._reported_findings:
                self._reported_findings.add((record.kind, alert.finding, subject))
                new_alerts.append(alert)
        self.raised_alerts += new_alerts
        for alert in new_alerts:
            _log.warning("%s", alert.sentence)
            if alert.finding in self.stop_on and self.stop is None:
                self.stop = alert.sentence
        return (
            replace(record, notes=(*record.notes, *(alert.sentence for alert in new_alerts))) if new_alerts else record
        )

    def _examine_scalar(self, record: TrainingRecord, name: str, value: float) -> Alert | None:
        layer, _, quantity = name.rpartition("/")
        if not layer or quantity not in _WATCHED_SCALARS:
            return None
        # Reach and decay of a gradient that is not finite are no findings of their own.
        if quantity in ("reach", "decay") and not math.isfinite(record.scalars.get(f"{layer}/adjoint", 0.0)):
            return None
        finding, sign, scale = _WATCHED_SCALARS[quantity]
        watched_scalar = self._watched_scalars.setdefault((record.kind, name), _WatchedScalar(finding, sign, scale))
        onset = watched_scalar.add_value(record.step, float(value))
        return None if onset is None else Alert(finding, name, onset[0], float(value), onset[1])


def _clipped_log(value: float) -> float:
    return math.log(max(value, 1e-38))


def _log_of_steps(reach: float) -> float:
    """Return the logarithm of a reach; 0, a gradient that stays at its own step, counts as one step."""
    return math.log(max(reach, 1.0))


def _logit(share: float) -> float:
    clipped_share = min(max(share, _SHARES[0]), _SHARES[1])
    return math.log(clipped_share / (1.0 - clipped_share))


#: Watched scalars by the last part of their name: the finding, the sign of an adverse change, the scale.
_WATCHED_SCALARS: dict[str, tuple[AlertFinding, float, Any]] = {
    "adjoint": ("exploding", 1.0, _clipped_log),
    "reach": ("vanishing", -1.0, _log_of_steps),
    "decay": ("vanishing", -1.0, _clipped_log),
    "near_0": ("saturated", 1.0, _logit),
    "near_1": ("saturated", 1.0, _logit),
}


#: Value of ``on_nonfinite=`` that enables the report.
REPORT = "report"


def checked_on_nonfinite(value: Any) -> str | None:
    """Return ``on_nonfinite=`` if it is ``None`` or ``"report"``; raise InputError for any other value."""
    if not (value is None or (isinstance(value, str) and value == REPORT)):
        raise InputError("on_nonfinite= is not understood.", got=short_repr(value), expected=f"None or {REPORT!r}")
    return REPORT if value is not None else None


def is_finite(loss: Any) -> bool:
    """Return whether a loss is a finite number; True for None."""
    return loss is None or math.isfinite(float(loss))


class Incidents:
    """Writer of the first batch that is not finite, as ``nonfinite.nc`` or, of a run ``a.zarr``, ``a.nonfinite.nc``."""

    def __init__(self, run: str | PathLike[str] | None, provenance: Mapping[str, str] | None = None) -> None:
        self.path = Path("nonfinite.nc") if run is None else Path(run).with_suffix(".nonfinite.nc")
        self.written_path: Path | None = None
        self._provenance = dict(provenance or {})

    def report(self, batch: Batch, weights: Mapping[str, Any], step_info: Mapping[str, Any]) -> Path | None:
        """Write a batch, the weights before its update and ``step_info``, once; return the path, else None."""
        if self.written_path is not None:
            return None
        # A file stores packed sequences as padded ones.
        batch_data = {
            name: data.map_leaves(lambda leaf: data.pad_packed(leaf) if data.is_packed(leaf) else leaf, value)
            for name, value in (("x", batch.x), ("y", batch.y), ("sample_weight", batch.sample_weight))
        }
        incident = Incident.of(batch_data, weights, step_info, provenance=self._provenance)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        incident.save(self.path)
        self.written_path = self.path
        _log.warning(
            "Step %d of training is not finite%s. Its batch and the weights that it met are in %s; rl.open reads them.",
            incident.step,
            f": {incident.found.rstrip('.')}" if incident.found else "",
            self.path,
        )
        return self.path

    def report_trained(
        self, trained_batch: TrainedBatch, weights: Callable[[], Mapping[str, Any]], loss: Any
    ) -> Path | None:
        """Write a batch of training, ``weights()`` of before its update, and its first non-finite number."""
        batch = Batch(trained_batch.x, trained_batch.y, trained_batch.sample_weight)
        step_info = {
            "step": trained_batch.step,
            "epoch": trained_batch.epoch,
            "loss": loss,
            "found": text_or_error(lambda: trained_batch.nonfinite.sentence),
        }
        return self.report(batch, trained_batch.with_variables_before(weights), step_info)


def text_or_error(compute_text: Callable[[], str]) -> str:
    """Call ``compute_text`` and return its text; if it raises, return a sentence that names the error."""
    try:
        return compute_text()
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"its origin could not be determined ({type(error).__name__}{f': {first_line}' if first_line else ''})"
