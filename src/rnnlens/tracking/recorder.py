"""``Recorder``: passes records to sinks, and turns failures of rnnlens into gaps and warnings."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ..errors import InputError, LayerNotFoundError, TrackingWarning, UnbuiltModelError, message
from ..results.training_run import Alert, Gap
from .alerts import Alerts
from .records import AlertSink, Sink, TrainingRecord
from .watch_arguments import Schedule

#: Largest number of gaps with separate causes; further causes are counted together.
MOST_GAPS = 100


class Recorder:
    """Distributor of the records of a watch to its sinks; no failure of a sink is raised while training runs.

    Parameters
    ----------
    sinks
        The store and the loggers, in the order in which they receive a record.
    schedule
        When a record is due; named in the warning that nothing was recorded.
    rank
        Rank of this process; only rank 0 writes.
    alerts
        Examines every record before the sinks, and may end training: see :attr:`stop`.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        schedule: Schedule,
        *,
        rank: int = 0,
        alerts: Alerts | None = None,
    ) -> None:
        self.sinks = list(sinks)
        self.schedule = schedule
        self.writes = rank == 0
        self.alerts = alerts
        self.latest: TrainingRecord | None = None
        self.is_closed = False
        self._gaps: dict[tuple[str, str], Gap] = {}
        self._record_count = 0  # number of records after training began, without that of step 0
        self._written_count = 0  # number of all records
        self._missed_reasons: Counter[str] = Counter()
        self._written_notes: set[tuple[str, str]] = set()
        self._first_step: int | None = None

    @property
    def gaps(self) -> list[Gap]:
        """Missing records and the reasons: one entry for each cause."""
        return list(self._gaps.values())

    def describe(self, name: str, step: int, path: object) -> str:
        """Return a line on a watch by its class name: its batches, records, alerts and gaps, and where its run is."""
        alert_count = 0 if self.alerts is None else len(self.alerts.raised_alerts)
        counts = [
            (step, "batch", "batches"),
            (self._written_count, "record", "records"),
            (alert_count, "alert", "alerts"),
        ]
        counts += [(len(self.gaps), "gap", "gaps")] * bool(self.gaps)
        numbers = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts)
        state = "closed" if self.is_closed else "not begun" if self._first_step is None else "open"
        return f"<rnnlens {name}> {state}: {numbers}" + (f"; the run: {path}" if path is not None else "")

    def start(self, step: int) -> None:
        """Begin the records of a training that has already taken ``step`` steps."""
        self.is_closed, self._first_step = False, step
        self._record_count = self._written_count = 0
        self._missed_reasons.clear()

    def is_due(self, step: int, epoch: int) -> bool:
        """Return whether a record is due after ``step`` steps, and this process is the one that writes records."""
        return self.writes and self.is_due_by(self.schedule, step, epoch)

    def is_due_by(self, schedule: Schedule, step: int, epoch: int) -> bool:
        """Return whether a record is due by a schedule; one that raises becomes a gap, and nothing is due."""
        try:
            return schedule.is_due(step, epoch)
        except Exception as error:
            self._note_gap(step, "every", error, f"every= raised at step {step}; training goes on.")
            return False

    def record(
        self,
        step: int,
        make_record: Callable[[], TrainingRecord],
        *,
        before_training: bool = False,
        source: str = "probe",
    ) -> None:
        """Pass the result of ``make_record`` to every sink. An error becomes a gap in the record of the training.

        Raises
        ------
        InputError, LayerNotFoundError, UnbuiltModelError
            If the arguments of the watch do not fit, or weights do not exist yet, and ``before_training``.
        """
        try:
            self.write(make_record())
        except Exception as error:
            if before_training and isinstance(error, InputError | LayerNotFoundError | UnbuiltModelError):
                raise
            self.fail_record(step, error, source)

    def write(self, record: TrainingRecord) -> None:
        """Pass a record to every sink, also after one of them failed. Each note is written once."""
        if self.alerts is not None:
            known_count = len(self.alerts.raised_alerts)
            record = self.alerts.examine(record)
            for alert in self.alerts.raised_alerts[known_count:]:
                self._announce(alert, record.step)
        new_notes = tuple(note for note in record.notes if (record.kind, note) not in self._written_notes)
        self._written_notes.update((record.kind, note) for note in new_notes)
        record = replace(record, notes=new_notes)
        self.latest = record
        self._written_count += 1
        self._record_count += record.kind == "batch" or record.step != self._first_step
        self._call_sinks(lambda sink: sink.write(record), record.step, "was not written to")

    @property
    def stop(self) -> str | None:
        """Reason to end training now (``stop_on=``); None while training continues."""
        return None if self.alerts is None else self.alerts.stop

    def count_examined(self) -> None:
        """Count a batch that was examined, but has no sink to be recorded in."""
        self._record_count += 1

    def count_missed(self, reason: str) -> None:
        """Count a batch that was due and had nothing to record; :meth:`close` warns with the reason."""
        self._missed_reasons[reason] += 1

    def fail_record(self, step: int, error: Exception, source: str = "probe") -> None:
        """Note that a step has no record because ``error`` was raised; warn once for each cause."""
        self._note_gap(step, source, error, f"Step {step} was not recorded; training goes on.")

    def close(self, reason: str, *, steps: int = 0) -> None:
        """End the records of a training of ``steps`` batches, once, and warn of what is missing."""
        if self.is_closed:
            return
        self.is_closed = True
        self._call_sinks(lambda sink: sink.close(reason), None, "was not closed")
        self._warn_of_missing(steps)

    def abort(self, reason: str) -> None:
        """Close all sinks after an error or Ctrl-C, without warnings."""
        if self.is_closed:
            return
        self.is_closed = True
        for sink in self.sinks:
            with suppress(Exception):
                sink.close(reason)

    def _announce(self, alert: Alert, step: int) -> None:
        """Pass an alert to ``on_alert=`` and to the loggers that have a place for it; a failure becomes a gap."""
        announcers: list[Callable[[Alert], object]] = [sink.alert for sink in self.sinks if isinstance(sink, AlertSink)]
        if self.alerts is not None and self.alerts.on_alert is not None:
            announcers.insert(0, self.alerts.on_alert)
        for announce in announcers:
            try:
                announce(alert)
            except Exception as error:
                self._note_gap(
                    step, "an alert", error, f"The alert of step {step} was not passed on; training goes on."
                )

    def _call_sinks(self, call_sink: Callable[[Sink], None], step: int | None, failure_text: str) -> None:
        """Call ``call_sink`` on every sink; note a gap for a sink that fails."""
        for sink in self.sinks:
            try:
                call_sink(sink)
            except Exception as error:
                name = "the run" if hasattr(sink, "note_gaps") else f"the logger {type(sink).__name__}"
                moment = "The end of training" if step is None else f"Step {step}"
                self._note_gap(step, name, error, f"{moment} {failure_text} {name}; training goes on.")

    def _note_gap(self, step: int | None, source: str, error: Exception, problem: str) -> None:
        reason = f"{type(error).__name__}: {error}"
        cause = source, re.sub(r"\d+", "#", reason.partition("\n")[0])
        if cause not in self._gaps and len(self._gaps) >= MOST_GAPS:
            cause, reason = (source, ""), "other errors"
        known_gap = self._gaps.get(cause)
        gap = Gap(source, step, step, 0, reason) if known_gap is None else known_gap._replace(last=step)
        self._gaps[cause] = gap._replace(records=gap.records + 1)
        for sink in self.sinks:
            with suppress(Exception):  # if the run cannot be written, its next record writes the gaps
                if hasattr(sink, "note_gaps"):  # a logger has no place for gaps
                    sink.note_gaps(self.gaps)
        if known_gap is None:
            hint = "watch.gaps, and run.gaps after rl.open, list what is missing"
            warnings.warn(message(problem, got=reason, hint=hint), TrackingWarning, stacklevel=4)

    def _warn_of_missing(self, steps: int) -> None:
        """Warn if nothing, or not all that was due, was recorded; failures are not repeated."""
        if not self.writes or self.schedule.is_off:
            return
        if not self._record_count and not self._gaps:
            never_due = f"{steps} batches were trained, and {self.schedule} selected none of them"
            reasons = "; ".join(self._missed_reasons) or never_due
            warnings.warn(f"Nothing of this training was recorded: {reasons}.", TrackingWarning, stacklevel=4)
        elif self._missed_reasons:
            reasons = "; ".join(f"{reason} ({count} times)" for reason, count in self._missed_reasons.items())
            problem = f"{self._missed_reasons.total()} of the batches that were due were not recorded: {reasons}."
            warnings.warn(problem, TrackingWarning, stacklevel=4)
