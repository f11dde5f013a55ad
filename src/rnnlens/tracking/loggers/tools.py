"""Sinks for TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import math
import re
import time
import warnings
from typing import Any

from ..records import TrainingRecord
from .names import ROOM, Film, distributions, numbers


class TensorBoard:
    """Sink that writes through a ``SummaryWriter`` of torch or tensorboardX, or a writer of ``tf.summary``.

    Parameters
    ----------
    writer
        Writer of the user. It is flushed at the end, and closed only if ``owned``.
    """

    def __init__(self, writer: Any, *, owned: bool = False) -> None:
        self._writer, self._owned, self._film, self._last = writer, owned, Film(), 0
        self._write: Any = _Torch(writer) if hasattr(writer, "add_scalar") else _TensorFlow(writer)

    def write(self, record: TrainingRecord) -> None:
        """Write one point per scalar and one histogram per array at the step of the record."""
        self._last = record.step
        for name, value in numbers(record).items():
            self._write.scalar(name, value, record.step)
        for name, values in distributions(record):
            self._write.histogram(name, values, record.step)
        if self._film.add(record):
            self._draw()

    def close(self, reason: str) -> None:
        """Write the film of all records, flush the writer, and close it if it is owned."""
        self._draw()
        self._writer.flush()
        if self._owned:
            self._writer.close()

    def _draw(self) -> None:
        for name, picture in self._film.pictures().items():
            self._write.image(name, picture, self._last)


class _Torch:
    """Adapter to the methods of torch's ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def scalar(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def histogram(self, name: str, values: Any, step: int) -> None:
        self.writer.add_histogram(name, values, step)

    def image(self, name: str, picture: Any, step: int) -> None:
        self.writer.add_image(name, picture, step, dataformats="HWC")


class _TensorFlow:
    """Adapter to the functions of ``tf.summary``, called within the writer."""

    def __init__(self, writer: Any) -> None:
        import tensorflow as tf

        self.writer, self.summary = writer, tf.summary

    def scalar(self, name: str, value: float, step: int) -> None:
        with self.writer.as_default():
            self.summary.scalar(name, value, step=step)

    def histogram(self, name: str, values: Any, step: int) -> None:
        with self.writer.as_default():
            self.summary.histogram(name, values, step=step)

    def image(self, name: str, picture: Any, step: int) -> None:
        with self.writer.as_default():
            self.summary.image(name, picture[None], step=step)


#: Metric used as the horizontal axis of all charts.
STEP = f"{ROOM}/step"


class WandB:
    """Sink that writes to a ``wandb`` run.

    W&B keeps one row per committed ``run.log``, and drops values logged for an earlier row. In a run that the user logs
    to, a record is added to the open row without committing it, as ``wandb.watch`` does. In an owned run every record
    is a row.

    Parameters
    ----------
    run
        Return value of ``wandb.init()``. It is finished at the end only if ``owned``.
    """

    def __init__(self, run: Any, *, owned: bool = False) -> None:
        self._run, self._owned, self._film = run, owned, Film()
        self._open: int | None = None
        self._lost = 0
        run.define_metric(STEP, hidden=True)
        run.define_metric(f"{ROOM}/*", step_metric=STEP)

    def write(self, record: TrainingRecord) -> None:
        """Log scalars as numbers, arrays as histograms, and the film when it is due."""
        from wandb import Histogram

        self._lost += self._open is not None and self._open == self._run.step
        row: dict[str, Any] = {STEP: record.step, **numbers(record)}
        row |= {name: Histogram(values) for name, values in distributions(record)}
        if self._film.add(record):
            row |= self._pictures()
        self._log(row)

    def close(self, reason: str) -> None:
        """Log the film of all records and the reason of the end; warn once if rows were overwritten."""
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


_FORBIDDEN = re.compile(r"[^\w\-. /]")


class MLflow:
    """Sink that writes to an MLflow run.

    MLflow has no histograms, and no brackets in names: ``lstm[1]`` becomes ``lstm.1``. Numbers that are not finite are
    not logged, but counted in a metric whose name ends in ``.not_finite``.

    Parameters
    ----------
    run
        An ``mlflow.ActiveRun`` or ``mlflow.entities.Run``. It is ended by ``close`` only if ``owned``.
    """

    def __init__(self, run: Any, *, owned: bool = False, client: Any = None) -> None:
        from mlflow import MlflowClient

        self._id, self._owned, self._film = run.info.run_id, owned, Film()
        self._client = MlflowClient() if client is None else client
        self._broken: dict[str, int] = {}

    def write(self, record: TrainingRecord) -> None:
        """Log all scalars at the step of the record in one call, and the film when it is due."""
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
        """Log the film of all records, and the reason of the end as a tag; end the run if it is owned."""
        self._draw()
        self._client.set_tag(self._id, f"{ROOM}.ended", reason)
        if self._owned:
            import mlflow

            mlflow.end_run()

    def _draw(self) -> None:
        for name, picture in self._film.pictures().items():
            self._client.log_image(self._id, picture, artifact_file=f"{allowed(name)}.png")


def allowed(name: str) -> str:
    """Convert a name to the characters that MLflow allows."""
    return _FORBIDDEN.sub("_", name.replace("[", ".").replace("]", "").replace("#", "."))
