"""TensorBoard: scalars, histograms and the film as an image, through the user's writer."""

from __future__ import annotations

import math
import re
import time
import warnings
from typing import Any

from ..records import TrainingRecord
from .names import ROOM, Film, distributions, numbers


class TensorBoard:
    """Writes through a ``SummaryWriter``: torch's, tensorboardX's, or TensorFlow's.

    Parameters
    ----------
    writer
        As its user made it. It is flushed at the end, and closed only if ``owned``.
    """

    def __init__(self, writer: Any, *, owned: bool = False) -> None:
        self._writer, self._owned, self._film, self._last = writer, owned, Film(), 0
        self._write: Any = _Torch(writer) if hasattr(writer, "add_scalar") else _TensorFlow(writer)

    def write(self, record: TrainingRecord) -> None:
        """One point per scalar, one histogram per array, at the step of the record."""
        self._last = record.step
        for name, value in numbers(record).items():
            self._write.scalar(name, value, record.step)
        for name, values in distributions(record):
            self._write.histogram(name, values, record.step)
        if self._film.add(record):
            self._draw()

    def close(self, reason: str) -> None:
        """The whole film, and everything on disk."""
        self._draw()
        self._writer.flush()
        if self._owned:
            self._writer.close()

    def _draw(self) -> None:
        for name, picture in self._film.pictures().items():
            self._write.image(name, picture, self._last)


class _Torch:
    """The calls of torch's ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def scalar(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def histogram(self, name: str, values: Any, step: int) -> None:
        self.writer.add_histogram(name, values, step)

    def image(self, name: str, picture: Any, step: int) -> None:
        self.writer.add_image(name, picture, step, dataformats="HWC")


class _TensorFlow:
    """The calls of ``tf.summary``, within the writer."""

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

    def write(self, record: TrainingRecord) -> None:
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

    def write(self, record: TrainingRecord) -> None:
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
