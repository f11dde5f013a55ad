"""Loggers: records written to TensorBoard, Weights & Biases and MLflow, each through its own client, by equal names."""

from __future__ import annotations

import importlib
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import xarray as xr

from ..errors import InputError, MissingDependencyError, did_you_mean, has_attribute, short_repr
from ..results.training_run import Alert
from ..typing import Array
from ..vocabulary import DIRECTION, GATE
from .records import Sink, TrainingRecord

#: First part of all logged names, which groups them.
PREFIX = "rnnlens"

#: Name of the adjoint over time in a record.
PROFILE = "adjoint_profile"


def named_scalars(record: TrainingRecord) -> dict[str, float]:
    """Return all scalars of a record by logged name, including those that are not finite."""
    return {f"{PREFIX}/{record.kind}/{name}": float(value) for name, value in record.scalars.items()}


def distributions(record: TrainingRecord) -> Iterator[tuple[str, Array]]:
    """Yield name and finite values, flattened, of every labelled array, one entry per gate; empty ones are skipped."""
    for layer, arrays in record.layers.items():
        for name, array in arrays.items():
            stem = f"{PREFIX}/{record.kind}/{layer}/{name}"
            for suffix, entry in _entries_along(GATE, array):
                values = entry.ravel()[np.isfinite(entry.ravel())]
                if values.size:
                    yield stem + suffix, values


def _entries_along(dim: str, array: xr.DataArray) -> Iterator[tuple[str, Array]]:
    """Yield name suffix and values for every entry along a dimension; the whole array if it lacks the dimension."""
    if dim not in array.dims:
        yield "", np.asarray(array, dtype=np.float64)
        return
    for index, label in enumerate(array[dim].values):  # 0, 1, 2, ... without labels
        yield f"/{label}", np.asarray(array.isel({dim: index}), dtype=np.float64)


#: Decades below the peak of a record that the colours cover.
DECADES = 6.0
#: Smallest number of pixels of each side of an image.
PIXELS = 240


class Film:
    """Adjoint profiles of all records of each layer, drawn as one image per layer."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Array]] = {}
        self._count = 0

    def add(self, record: TrainingRecord) -> bool:
        """Add the profiles of a record; return True when a new picture is due: at 2, 4, 8, ... records."""
        has_profile = False
        for layer, arrays in record.layers.items():
            if PROFILE in arrays:
                has_profile = True
                for suffix, row in _entries_along(DIRECTION, arrays[PROFILE]):
                    name = f"{PREFIX}/{record.kind}/{layer}{suffix}/film"
                    self._rows.setdefault(name, []).append(row)
        self._count += has_profile
        return has_profile and self._count >= 2 and math.log2(self._count).is_integer()

    def pictures(self) -> dict[str, Array]:
        """Return one image per layer, (height, width, 3) of uint8: first record on top, first time step on the left."""
        return {name: _film_image(rows) for name, rows in self._rows.items() if len(rows) > 1}


def _film_image(rows: list[Array]) -> Array:
    axes = importlib.import_module("rnnlens.plot._axes")  # matplotlib is loaded only where an image is logged
    width = max(len(row) for row in rows)
    image = np.full((len(rows), width), np.nan)
    for index, row in enumerate(rows):
        peak = np.max(row, where=np.isfinite(row), initial=0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            image[index, : len(row)] = np.log10(row / peak)
    share = np.clip(1 + image / DECADES, 0.0, 1.0)
    colours = axes.POSITIVE(np.ma.masked_invalid(np.where(np.isneginf(image), 0.0, share)), bytes=True)[..., :3]
    row_repeats, column_repeats = (max(1, -(-PIXELS // size)) for size in image.shape)
    return np.repeat(np.repeat(colours, row_repeats, axis=0), column_repeats, axis=1)


class TensorBoard:
    """Sink that writes through a ``SummaryWriter`` or a writer of ``tf.summary``; it is closed only if ``owned``."""

    def __init__(self, writer: Any, *, owned: bool = False) -> None:
        self._writer, self._owned, self._film, self._last_step = writer, owned, Film(), 0

    def write(self, record: TrainingRecord) -> None:
        """Write one point per scalar and one histogram per array at the step of the record."""
        self._last_step = record.step
        for name, value in named_scalars(record).items():
            self._write_summary("scalar", name, value, record.step)
        for name, values in distributions(record):
            self._write_summary("histogram", name, values, record.step)
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
            self._write_summary("image", name, picture, self._last_step)

    def _write_summary(self, kind: str, name: str, value: Any, step: int) -> None:
        """Write a scalar, a histogram or an image (height, width, colour)."""
        if hasattr(self._writer, "add_scalar"):
            options = {"dataformats": "HWC"} if kind == "image" else {}
            getattr(self._writer, f"add_{kind}")(name, value, step, **options)
            return
        import tensorflow as tf

        with self._writer.as_default():
            getattr(tf.summary, kind)(name, value[None] if kind == "image" else value, step=step)


#: Metric used as the horizontal axis of all charts.
STEP = f"{PREFIX}/step"


class WandB:
    """Sink that writes to a ``wandb`` run, which is finished at the end only if ``owned``.

    W&B keeps one row per committed ``run.log``, and drops values logged for an earlier row. In a run that the user logs
    to, a record is added to the open row without committing it, as ``wandb.watch`` does; if several fell into one row,
    the scalars of all records are logged as a table at the end. In an owned run every record is a row.
    """

    def __init__(self, run: Any, *, owned: bool = False) -> None:
        self._run, self._owned, self._film = run, owned, Film()
        self._open_row: int | None = None
        self._lost_count = 0
        self._rows: list[dict[str, float]] = []
        run.define_metric(STEP, hidden=True)
        run.define_metric(f"{PREFIX}/*", step_metric=STEP)

    def write(self, record: TrainingRecord) -> None:
        """Log scalars as numbers, arrays as histograms, and the film when it is due."""
        from wandb import Histogram

        self._lost_count += self._open_row is not None and self._open_row == self._run.step
        row: dict[str, Any] = {STEP: record.step, **named_scalars(record)}
        self._rows += [] if self._owned else [row.copy()]
        row |= {name: Histogram(values) for name, values in distributions(record)}
        if self._film.add(record):
            row |= self._pictures()
        self._log(row)

    def alert(self, alert: Alert) -> None:
        """Send an alert by ``wandb.alert``, which W&B passes on by mail or chat as the user has set."""
        self._run.alert(title=f"{alert.finding} at step {alert.step}", text=alert.sentence, level="WARN")

    def close(self, reason: str) -> None:
        """Log the film and the reason of the end; if rows were overwritten, also a table of all, and warn once."""
        self._log({**self._pictures(), **(self._table() if self._lost_count else {})})
        self._run.summary[f"{PREFIX}/ended"] = reason
        if self._owned:
            self._run.finish()
        elif self._lost_count:
            warnings.warn(
                f"{self._lost_count} records came between two run.log() of yours, and W&B keeps one row for each of "
                f"these: its charts show the last. The table {PREFIX}/records there has the numbers of all, the run on "
                "disk everything. For all in the charts log once per record, or name the logger, "
                'loggers=["wandb"], without a run of yours.',
                stacklevel=2,
            )

    def _log(self, row: dict[str, Any]) -> None:
        if not row:
            return
        self._open_row = None if self._owned else self._run.step
        self._run.log(row, commit=self._owned)

    def _table(self) -> dict[str, Any]:
        from wandb import Table

        names: list[Any] = list(dict.fromkeys(name for row in self._rows for name in row))
        return {f"{PREFIX}/records": Table(names, [[row.get(name) for name in names] for row in self._rows])}

    def _pictures(self) -> dict[str, Any]:
        from wandb import Image

        return {name: Image(picture) for name, picture in self._film.pictures().items()}


_FORBIDDEN = re.compile(r"[^\w\-. /]")


class MLflow:
    """Sink that writes to an MLflow run, which is ended by ``close`` only if ``owned``.

    MLflow has no histograms, and no brackets in names: ``lstm[1]`` becomes ``lstm.1``. Numbers that are not finite are
    not logged, but counted in a metric whose name ends in ``.not_finite``.
    """

    def __init__(self, run: Any, *, owned: bool = False, client: Any = None) -> None:
        from mlflow import MlflowClient

        self._id, self._owned, self._film = run.info.run_id, owned, Film()
        self._client = MlflowClient() if client is None else client
        self._nonfinite_counts: dict[str, int] = {}

    def write(self, record: TrainingRecord) -> None:
        """Log all scalars at the step of the record in one call, and the film when it is due."""
        from mlflow.entities import Metric

        now, metrics = int(time.time() * 1000), []
        for name, value in named_scalars(record).items():
            key = mlflow_name(name)
            if not math.isfinite(value):
                self._nonfinite_counts[key] = self._nonfinite_counts.get(key, 0) + 1
                key, value = f"{key}.not_finite", float(self._nonfinite_counts[key])
            metrics.append(Metric(key, value, now, record.step))
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)
        if self._film.add(record):
            self._draw()

    def close(self, reason: str) -> None:
        """Log the film of all records, and the reason of the end as a tag; end the run if it is owned."""
        self._draw()
        self._client.set_tag(self._id, f"{PREFIX}.ended", reason)
        if self._owned:
            import mlflow

            mlflow.end_run()

    def _draw(self) -> None:
        for name, picture in self._film.pictures().items():
            self._client.log_image(self._id, picture, artifact_file=f"{mlflow_name(name)}.png")


def mlflow_name(name: str) -> str:
    """Convert a name to the characters that MLflow allows."""
    return _FORBIDDEN.sub("_", name.replace("[", ".").replace("]", "").replace("#", "."))


#: Import name of each tool -> name of the package to install.
TOOLS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


def event_folder(path: str | PathLike[str] | None) -> Path:
    """Return the folder of TensorBoard's files for a run: ``runs/a`` for ``runs/a.zarr``, ``runs`` without a path."""
    return Path("runs") if path is None else Path(path).with_suffix("")


def sinks(loggers: Any, directory: str | Path) -> list[Sink]:
    """Return the sink that writes to each logger of the user.

    Parameters
    ----------
    loggers
        One, or a list, of: a ``SummaryWriter`` (torch, tensorboardX, ``tf.summary``); a run of ``wandb`` or ``mlflow``;
        a logger of Lightning; ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, which use the active run or start one; or
        any object with ``write(record)`` and ``close(reason)``.
    directory
        Folder of TensorBoard's files if it is given by name.

    Raises
    ------
    InputError
        For any other object.
    MissingDependencyError
        If a tool was named that is not installed.
    """
    if loggers is None:
        return []
    # A run of mlflow can be iterated, too.
    logger_list = loggers if isinstance(loggers, list | tuple | set) else [loggers]
    return [_sink(logger, Path(directory)) for logger in logger_list]


def _sink(logger: Any, directory: Path) -> Sink:
    if isinstance(logger, str):
        return _sink_by_name(logger, directory)
    if _package_of(logger) == "lightning":  # with a client inside
        client = getattr(logger, "experiment", logger)
        if _package_of(client) == "mlflow":
            return MLflow(client.get_run(logger.run_id), client=client)
        logger = client
    package = _package_of(logger)
    if has_attribute(logger, "add_scalar") or (package == "tensorflow" and has_attribute(logger, "as_default")):
        return TensorBoard(logger)
    if package == "wandb" and has_attribute(logger, "define_metric"):
        return WandB(logger)
    if package == "mlflow" and has_attribute(logger, "info"):
        return MLflow(logger)
    if all(has_attribute(logger, name) for name in ("write", "close")):
        return cast(Sink, logger)
    raise InputError(
        "loggers= contains an object that is not a logger.",
        got=f"{type(logger).__module__}.{type(logger).__qualname__}: {short_repr(logger)}",
        expected="a SummaryWriter, a run of wandb or mlflow, 'tensorboard', 'wandb', 'mlflow', "
        "or an object with write(record) and close(reason)",
    )


def _package_of(logger: Any) -> str:
    """Return the top-level package of an object's class; ``"lightning"`` for all loggers of Lightning."""
    packages = [cls.__module__.partition(".")[0] for cls in type(logger).__mro__]
    return "lightning" if {"lightning", "pytorch_lightning", "lightning_fabric"} & set(packages) else packages[0]


def _sink_by_name(name: str, directory: Path) -> Sink:
    if name not in TOOLS:
        raise InputError("No logger has that name.", got=repr(name), hint=did_you_mean(name, TOOLS))
    try:
        tool = importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"loggers={name!r}: its client is not installed.", got=str(error), hint=f"pip install {TOOLS[name]}"
        ) from error
    if name == "tensorboard":
        return TensorBoard(_event_writer(directory), owned=True)
    if name == "wandb":
        return WandB(tool.init(), owned=True) if tool.run is None else WandB(tool.run)
    active_run = tool.active_run()
    return MLflow(tool.start_run(), owned=True) if active_run is None else MLflow(active_run)


def _event_writer(directory: Path) -> Any:
    """Return a writer of TensorBoard event files, from torch if it is imported, else from TensorFlow."""
    if "torch" in sys.modules:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(directory))
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        return tf.summary.create_file_writer(str(directory))
    raise MissingDependencyError(
        "TensorBoard's event files are written by torch or TensorFlow, and neither is loaded.",
        hint="give a writer of your own, loggers=[writer], such as tensorboardX.SummaryWriter(directory)",
    )
