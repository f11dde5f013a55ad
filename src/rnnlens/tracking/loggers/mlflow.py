"""MLflow: metrics by step and the film as an artifact, through its client."""

from __future__ import annotations

import math
import re
import time
from typing import Any

from ..records import Record
from .film import Film
from .named import ROOM, numbers

_FORBIDDEN = re.compile(r"[^\w\-. /]")


class MLflow:
    """Writes to an MLflow run.

    MLflow has no histograms, and no brackets in names: ``lstm[1]`` is ``lstm.1``. A number that is not finite is left
    out, and counted in the metric of that name with ``.not_finite`` behind.

    Parameters
    ----------
    run
        An ``mlflow.ActiveRun`` or ``mlflow.entities.Run``. It is ended at the end only if ``owned``.
    """

    def __init__(self, run: Any, *, owned: bool = False, client: Any = None) -> None:
        from mlflow import MlflowClient

        self._id, self._owned, self._film = run.info.run_id, owned, Film()
        self._client = MlflowClient() if client is None else client
        self._broken: dict[str, int] = {}

    def write(self, record: Record) -> None:
        """All scalars at the step of the record, in one call."""
        from mlflow.entities import Metric

        now, metrics = int(time.time() * 1000), []
        for name, value in numbers(record).items():
            key = allowed(name)
            if not math.isfinite(value):
                self._broken[key] = self._broken.get(key, 0) + 1
                key, value = f"{key}.not_finite", float(self._broken[key])
            metrics.append(Metric(key, value, now, record.step))
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)
        if self._film.add(record):
            self._draw()

    def close(self, reason: str) -> None:
        """The whole film, and why training ended, as a tag."""
        self._draw()
        self._client.set_tag(self._id, f"{ROOM}.ended", reason)
        if self._owned:
            import mlflow

            mlflow.end_run()

    def _draw(self) -> None:
        for name, picture in self._film.pictures().items():
            self._client.log_image(self._id, picture, artifact_file=f"{allowed(name)}.png")


def allowed(name: str) -> str:
    """A name as MLflow takes it."""
    return _FORBIDDEN.sub("_", name.replace("[", ".").replace("]", "").replace("#", "."))
