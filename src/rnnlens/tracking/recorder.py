"""``Recorder``: passes records to sinks, and turns failures of rnnlens into gaps and warnings."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ..errors import InputError, LayerNotFoundError, TrackingWarning, message
from ..results.training_run import Gap
from .alerts import Alerts
from .records import Sink, TrainingRecord
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
        self.closed = False
        self._gaps: dict[tuple[str, str], Gap] = {}
        self._trained = 0  # number of records after training began, without that of step 0
        self._missed: Counter[str] = Counter()
        self._noted: set[tuple[str, str]] = set()
        self._first: int | None = None

    @property
    def gaps(self) -> list[Gap]:
        """Missing records and the reasons: one entry for each cause."""
        return list(self._gaps.values())

    def start(self, step: int) -> None:
        """Begin the records of a training that has already taken ``step`` steps."""
        self.closed, self._trained, self._first = False, 0, step
        self._missed.clear()

    def due(self, step: int, epoch: int) -> bool:
        """Return whether a record is due after ``step`` steps, and this process is the one that writes records."""
        return self.writes and self.on_schedule(self.schedule, step, epoch)

    def on_schedule(self, schedule: Schedule, step: int, epoch: int) -> bool:
        """Return whether a record is due by a schedule; one that raises becomes a gap, and nothing is due."""
        try:
            return schedule.due(step, epoch)
        except Exception as error:
            self._note_gap(step, "every", error, f"every= raised at step {step}; training goes on.")
            return False

    def record(
        self, step: int, make: Callable[[], TrainingRecord], *, before: bool = False, what: str = "probe"
    ) -> None:
        """Call ``make`` for a record and pass it to every sink; errors become gaps, wrong arguments only later."""
        try:
            self.write(make())
        except Exception as error:
            if before and isinstance(error, InputError | LayerNotFoundError):
                raise
            self.fail_record(step, error, what)

    def write(self, record: TrainingRecord) -> None:
        """Pass a record to every sink, also after one of them failed. Each note is written once."""
        if self.alerts is not None:
            record = self.alerts.look(record)
        fresh = tuple(note for note in record.notes if (record.kind, note) not in self._noted)
        self._noted.update((record.kind, note) for note in fresh)
        record = replace(record, notes=fresh)
        self.latest = record
        self._trained += record.kind == "batch" or record.step != self._first
        self._each(lambda sink: sink.write(record), record.step, "was not written to")

    @property
    def stop(self) -> str | None:
        """Reason to end training now (``stop_on=``); None while training continues."""
        return None if self.alerts is None else self.alerts.stop

    def counted(self) -> None:
        """Count a batch that was examined, but has no sink to be recorded in."""
        self._trained += 1

    def missed(self, reason: str) -> None:
        """Count a batch that was due and had nothing to record; :meth:`close` warns with the reason."""
        self._missed[reason] += 1

    def fail_record(self, step: int, error: Exception, what: str = "probe") -> None:
        """Note that a step has no record because ``error`` was raised; warn once for each cause."""
        self._note_gap(step, what, error, f"Step {step} was not recorded; training goes on.")

    def close(self, reason: str, *, steps: int = 0) -> None:
        """End the records of a training of ``steps`` batches, once, and warn of what is missing."""
        if self.closed:
            return
        self.closed = True
        self._each(lambda sink: sink.close(reason), None, "was not closed")
        self._warn_of_missing(steps)

    def abort(self, reason: str) -> None:
        """Close all sinks after an error or Ctrl-C, without warnings."""
        if self.closed:
            return
        self.closed = True
        for sink in self.sinks:
            with suppress(Exception):
                sink.close(reason)

    def _each(self, call: Callable[[Sink], None], step: int | None, failed: str) -> None:
        """Call ``call`` on every sink; note a gap for a sink that fails."""
        for sink in self.sinks:
            try:
                call(sink)
            except Exception as error:
                name = "the run" if hasattr(sink, "note_gaps") else f"the logger {type(sink).__name__}"
                when = "The end of training" if step is None else f"Step {step}"
                self._note_gap(step, name, error, f"{when} {failed} {name}; training goes on.")

    def _note_gap(self, step: int | None, where: str, error: Exception, what: str) -> None:
        reason = f"{type(error).__name__}: {error}"
        cause = where, re.sub(r"\d+", "#", reason.partition("\n")[0])
        if cause not in self._gaps and len(self._gaps) >= MOST_GAPS:
            cause, reason = (where, ""), "other errors"
        known = self._gaps.get(cause)
        gap = Gap(where, step, step, 0, reason) if known is None else known._replace(last=step)
        self._gaps[cause] = gap._replace(records=gap.records + 1)
        for sink in self.sinks:
            with suppress(Exception):  # if the run cannot be written, its next record writes the gaps
                if hasattr(sink, "note_gaps"):  # a logger has no place for gaps
                    sink.note_gaps(self.gaps)
        if known is None:
            hint = "watch.gaps, and run.gaps after rl.open, list what is missing"
            warnings.warn(message(what, got=reason, hint=hint), TrackingWarning, stacklevel=4)

    def _warn_of_missing(self, steps: int) -> None:
        """Warn if nothing, or not all that was due, was recorded; failures are not repeated."""
        if not self.writes or self.schedule.off:
            return
        if not self._trained and not self._gaps:
            due_never = f"{steps} batches were trained, and {self.schedule} selected none of them"
            why = "; ".join(self._missed) or due_never
            warnings.warn(f"Nothing of this training was recorded: {why}.", TrackingWarning, stacklevel=4)
        elif self._missed:
            why = "; ".join(f"{reason} ({count} times)" for reason, count in self._missed.items())
            what = f"{self._missed.total()} of the batches that were due were not recorded: {why}."
            warnings.warn(what, TrackingWarning, stacklevel=4)
