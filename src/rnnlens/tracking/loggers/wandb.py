"""Weights & Biases: the user's run gets our numbers with their own step, and keeps its own."""

from __future__ import annotations

import warnings
from typing import Any

from ..records import Record
from .film import Film
from .named import ROOM, distributions, numbers

#: The x axis of all our charts.
STEP = f"{ROOM}/step"


class WandB:
    """Writes through a ``wandb`` run.

    W&B keeps one row per ``run.log`` of the user, and drops what is logged for a row that has passed. So in a run that
    others log to, a record is put into the row that is open, as ``wandb.watch`` does, and rows are left to their owner;
    in a run of our own every record is a row.

    Parameters
    ----------
    run
        What ``wandb.init()`` returned. It is finished at the end only if ``owned``.
    """

    def __init__(self, run: Any, *, owned: bool = False) -> None:
        self._run, self._owned, self._film = run, owned, Film()
        self._open: int | None = None
        self._lost = 0
        run.define_metric(STEP, hidden=True)
        run.define_metric(f"{ROOM}/*", step_metric=STEP)

    def write(self, record: Record) -> None:
        """Scalars as numbers, arrays as histograms, now and then the film."""
        from wandb import Histogram

        self._lost += self._open is not None and self._open == self._run.step
        row: dict[str, Any] = {STEP: record.step, **numbers(record)}
        row |= {name: Histogram(values) for name, values in distributions(record)}
        if self._film.add(record):
            row |= self._pictures()
        self._log(row)

    def close(self, reason: str) -> None:
        """The whole film, and why training ended; one warning where rows were written over."""
        self._log(self._pictures())
        self._run.summary[f"{ROOM}/ended"] = reason
        if self._owned:
            self._run.finish()
        elif self._lost:
            warnings.warn(
                f"{self._lost} records came between two run.log() of yours, and W&B keeps one row for each of these: "
                "its charts show the last. The run on disk has all. For all in W&B log once per record, or name the "
                'logger, loggers=["wandb"], without a run of yours.',
                stacklevel=2,
            )

    def _log(self, row: dict[str, Any]) -> None:
        if not row:
            return
        self._open = None if self._owned else self._run.step
        self._run.log(row, commit=self._owned)

    def _pictures(self) -> dict[str, Any]:
        from wandb import Image

        return {name: Image(picture) for name, picture in self._film.pictures().items()}
