"""Takes records and hands them to their sinks; says once why there were none."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..errors import TrackingWarning
from .alerts import Alerts
from .records import Record, Sink
from .schedule import Schedule


class Recorder:
    """The end of a watch: everything that a callback or a loop records goes through here.

    Parameters
    ----------
    sinks
        The store, loggers, alerts, in the order in which they are told.
    schedule
        When a record is due; only asked, and named where nothing was recorded.
    rank
        Number of this worker among those that train together; only the first writes.
    alerts
        Looks at every record before the sinks, and may end training: see :attr:`stop`.
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
        self.latest: Record | None = None
        self.closed = False
        self._trained = 0  # records of training itself, which that of step 0 is not
        self._reasons: dict[str, None] = {}
        self._untold: Counter[str] = Counter()
        self._said: set[tuple[str, str]] = set()
        self._first: int | None = None

    def start(self, step: int) -> None:
        """Training starts, or goes on, after ``step`` batches."""
        self.closed, self._trained, self._first = False, 0, step
        self._reasons.clear()
        self._untold.clear()

    def due(self, step: int, epoch: int) -> bool:
        """Whether this worker is to record now."""
        return self.writes and self.schedule.due(step, epoch)

    def write(self, record: Record) -> None:
        """Hand a record to every sink; one that fails does not keep it from the others. A note is written once."""
        if self.alerts is not None:
            record = self.alerts.look(record)
        fresh = tuple(note for note in record.notes if (record.kind, note) not in self._said)
        self._said.update((record.kind, note) for note in fresh)
        record = replace(record, notes=fresh)
        self.latest = record
        self._trained += record.kind == "batch" or record.step != self._first
        self._each(lambda sink: sink.write(record))

    @property
    def stop(self) -> str | None:
        """Why training is to end now (``stop_on=``); None while it goes on."""
        return None if self.alerts is None else self.alerts.stop

    def counted(self) -> None:
        """Something was looked at, though there is nowhere to record it."""
        self._trained += 1

    def missed(self, reason: str) -> None:
        """Remember why there was nothing to record of a batch that was due; told at the end."""
        self._reasons[reason] = None
        self._untold[reason] += 1

    def failed(self, reason: str) -> bool:
        """Remember why a record could not be made; whether that is news, to be told at once."""
        news = reason not in self._reasons
        self._reasons[reason] = None
        return news

    def close(self, reason: str, *, steps: int = 0) -> None:
        """Training ends after ``steps`` batches of this run; a second call does nothing.

        Warns
        -----
        TrackingWarning
            If nothing was recorded of what was due, or not of every batch, and why.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self._each(lambda sink: sink.close(reason))
        finally:
            self._tell_what_is_missing(steps)

    def fail(self, reason: str) -> None:
        """Training did not even begin: that nothing was recorded is no news beside what kept it."""
        self.closed = True
        self._each(lambda sink: sink.close(reason))

    def _each(self, told: Callable[[Sink], None]) -> None:
        """Tell every sink; what fails of one reaches the others all the same, and is raised at the end."""
        errors: list[Exception] = []
        for sink in self.sinks:
            try:
                told(sink)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _tell_what_is_missing(self, steps: int) -> None:
        """Warn where nothing was recorded, or not all that was due."""
        if not self.writes or self.schedule.off:
            return
        if not self._trained:
            warnings.warn(self._nothing(steps), TrackingWarning, stacklevel=4)
        elif self._untold:
            why = "; ".join(f"{reason} ({count} times)" for reason, count in self._untold.items())
            what = f"{self._untold.total()} of the batches that were due were not recorded: {why}."
            warnings.warn(what, TrackingWarning, stacklevel=4)

    def _nothing(self, steps: int) -> str:
        why = (
            "; ".join(self._reasons) or f"{steps} batches were trained on, and {self.schedule} was due at none of them"
        )
        return f"Nothing of this training was recorded: {why}."
