"""Alerts: what a run has begun to do that it did not do before, said once, with its step.

No fixed number is too large or too small for every network, so a number is held against the run itself: against the
median of the records before it, of all and of the last few, in units of their spread (the median absolute deviation,
scaled to a standard deviation, about the median or from record to record, whichever is less: what a drift moves, as the
gradient falls with the loss, is no spread), both on a scale on which the quantity varies evenly: the logarithm of
gradients and reaches, the logit of shares. Median and deviation are not moved by the outlier that they are to find
(Hampel 1974, J. Am. Stat. Assoc. 69; Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers, which takes 3.5
deviations). Gradients of training have heavier tails than that rule is made for, and are looked at at every record; so
a finding takes :data:`DEVIATIONS`, a change that matters (:data:`EFFECT`), and two records in a row.
``benchmarks/alerts.py`` counts false alarms and misses.

A vanishing gradient is looked for in two numbers, since neither shows it everywhere: the reach of a network of long
memory falls from 24 steps to 1 while what is kept per step back need only fall from 0.9 to 0.5; that of a network which
reached 2 steps has no third to fall to, but what is kept per step back falls from 0.6 to 0.02.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from ..errors import InputError, did_you_mean, message, shown
from .records import TrainingRecord
from .watch_arguments import listed

Finding = Literal["exploding", "vanishing", "saturated"]
FINDINGS: tuple[Finding, ...] = ("exploding", "vanishing", "saturated")

#: Records that a new one is held against, and how many there have to be.
WINDOW, LEAST = 32, 8
#: How many deviations from the median are out of the ordinary.
DEVIATIONS = 6.0
#: Records in a row that have to be.
PERSIST = 2
#: The least change that matters: a gradient ten times as large; a third of the reach, or of what is kept per step back;
#: the odds of saturation by e^3: from 5 % to half of the gate, from half to 95 %. A network that learns to hold a value
#: saturates a third of its update gates, and is well.
EFFECT = {"exploding": math.log(10.0), "vanishing": math.log(3.0), "saturated": 3.0}
#: Spread that no run is taken to be below, on the same scales.
_LEAST_SPREAD = {"exploding": 0.2, "vanishing": 0.15, "saturated": 0.2}
#: Shares below the first, and above the second, are noise of counting.
_SHARES = (0.05, 0.99)

_log = logging.getLogger("rnnlens")


@dataclass(frozen=True)
class Alert:
    """One finding on a training: what, where, since which step.

    ``value`` is that of the record, ``usual`` the median of those before it.
    """

    finding: Finding
    name: str
    step: int
    value: float
    usual: float

    @property
    def sentence(self) -> str:
        """One line.

        >>> Alert("exploding", "lstm/adjoint", 400, 5.0, 0.01).sentence
        'exploding since step 400: lstm/adjoint is 5, and was 0.01 (median of the records before)'
        """
        was = f"{self.usual:.3g} (median of the records before)"
        return f"{self.finding} since step {self.step}: {self.name} is {self.value:.3g}, and was {was}"


def checked_stop_on(value: str | Iterable[str]) -> tuple[Finding, ...]:
    """The findings that end training, by name.

    Raises
    ------
    InputError
        If one is none.
    """
    given = listed(value) or ()
    for name in given:
        if name not in FINDINGS:
            hint = did_you_mean(str(name), FINDINGS)
            raise InputError(message("stop_on= names no finding.", got=shown(name), hint=hint))
    return given  # type: ignore[return-value]


@dataclass
class _Watched:
    """One number over training, on the scale on which it varies evenly, and what it is held against."""

    finding: Finding
    sign: float
    scale: Callable[[float], float]
    before: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    odd: list[tuple[int, float, float]] = field(default_factory=list)
    told: bool = False

    def look(self, step: int, value: float) -> tuple[int, float] | None:
        """The step since which it is out of the ordinary, and what it was before; once."""
        usual = median([raw for _, raw in self.before]) if self.before else math.nan
        if not math.isfinite(value):
            # A gradient that is not finite needs no second record; of a share it says nothing.
            sudden = self.finding == "exploding" and bool(self.before) and not self.told
            self.told |= sudden
            return (step, usual) if sudden else None
        scaled = self.scale(value)
        if len(self.before) >= LEAST and self._is_odd(scaled):
            self.odd.append((step, scaled, value))
            if len(self.odd) >= PERSIST and not self.told:
                self.told = True
                return self.odd[0][0], usual
            if len(self.odd) < WINDOW:
                return None
        # What lasts is the new ordinary; what passed was noise, and part of it.
        self.before.extend((s, v) for _, s, v in self.odd)
        self.odd.clear()
        self.before.append((scaled, value))
        return None

    def _is_odd(self, scaled: float) -> bool:
        """Out of the ordinary of the whole window and of its end; what a drift moved is no spread."""
        values = [s for s, _ in self.before]
        centre = median(values)
        around = median(abs(v - centre) for v in values)
        between = median(abs(after - before) for before, after in pairwise(values)) / math.sqrt(2.0)
        spread = max(1.4826 * min(around, between), _LEAST_SPREAD[self.finding])
        away = min(self.sign * (scaled - middle) for middle in (centre, median(values[-LEAST:])))
        return away > DEVIATIONS * spread and away > EFFECT[self.finding]


class Alerts:
    """Looks at every record of a run; a finding is logged once, with its step, and may end training.

    Parameters
    ----------
    stop_on
        Findings that end training: ``"exploding"``, ``"vanishing"``, ``"saturated"``.

    Attributes
    ----------
    found : list of :class:`Alert`
    stop : str, or None
        Why training is to end.
    """

    def __init__(self, stop_on: str | Iterable[str] = ()) -> None:
        self.stop_on = checked_stop_on(stop_on)
        self.found: list[Alert] = []
        self.stop: str | None = None
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._told: set[tuple[str, Finding, str]] = set()

    def look(self, record: TrainingRecord) -> TrainingRecord:
        """The record, with a note of each finding that is new with it."""
        new = []
        for name, value in record.scalars.items():
            alert = self._one(record, name, value)
            if alert is not None and (place := (record.kind, alert.finding, _place(alert))) not in self._told:
                self._told.add(place)
                new.append(alert)
        self.found += new
        for alert in new:
            _log.warning("%s", alert.sentence)
            if alert.finding in self.stop_on and self.stop is None:
                self.stop = alert.sentence
        return replace(record, notes=(*record.notes, *(alert.sentence for alert in new))) if new else record

    def _one(self, record: TrainingRecord, name: str, value: float) -> Alert | None:
        made = _WATCHED.get(name.rpartition("/")[2]) if "/" in name else None
        if made is None or not _says_something(record, name):
            return None
        finding, sign, scale = made
        watched = self._watched.setdefault((record.kind, name), _Watched(finding, sign, scale))
        since = watched.look(record.step, float(value))
        return None if since is None else Alert(finding, name, since[0], float(value), since[1])


def _says_something(record: TrainingRecord, name: str) -> bool:
    """What follows from a gradient that is not finite is no finding of its own."""
    layer, _, what = name.rpartition("/")
    return what not in ("reach", "decay") or math.isfinite(record.scalars.get(f"{layer}/adjoint", 0.0))


def _place(alert: Alert) -> str:
    """What is said once: of a layer that its gradient vanishes, whichever number shows it; of a gate each end."""
    return alert.name if alert.finding == "saturated" else alert.name.rpartition("/")[0]


def _log_of(value: float) -> float:
    return math.log(max(value, 1e-38))


def _logit(share: float) -> float:
    inside = min(max(share, _SHARES[0]), _SHARES[1])
    return math.log(inside / (1.0 - inside))


#: What is looked at, by the last part of its name: the finding, the direction that is bad, the scale.
_WATCHED: dict[str, tuple[Finding, float, Any]] = {
    "adjoint": ("exploding", 1.0, _log_of),
    "reach": ("vanishing", -1.0, _log_of),
    "decay": ("vanishing", -1.0, _log_of),
    "near_0": ("saturated", 1.0, _logit),
    "near_1": ("saturated", 1.0, _logit),
}
