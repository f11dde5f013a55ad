"""Conversion of ``loggers=`` to sinks: a logger object, the name of a tool, or a sink."""

from __future__ import annotations

import importlib
import sys
from os import PathLike
from pathlib import Path
from typing import Any

from ...errors import InputError, MissingDependencyError, did_you_mean, shown
from ..records import Sink

#: Import name of each tool -> name of the package to install.
TOOLS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


def beside(path: str | PathLike[str] | None) -> Path:
    """Return the folder of TensorBoard's files for a run: ``runs/a`` for ``runs/a.zarr``, ``runs`` without a path."""
    return Path("runs") if path is None else Path(path).with_suffix("")


def sinks(loggers: Any, directory: str | Path) -> list[Sink]:
    """Return a sink for each logger.

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
    given = loggers if isinstance(loggers, list | tuple | set) else [loggers]  # a run of mlflow can be iterated, too
    return [_sink(logger, Path(directory)) for logger in given]


def _sink(logger: Any, directory: Path) -> Sink:
    if isinstance(logger, str):
        return _by_name(logger, directory)
    if _home(logger) == "lightning":
        return _of_lightning(logger)
    return _of(_home(logger), logger)


def _of_lightning(logger: Any) -> Sink:
    """Return a sink for the client inside a logger of Lightning."""
    inner = getattr(logger, "experiment", logger)
    if _home(inner) == "mlflow":
        from .tools import MLflow

        return MLflow(inner.get_run(logger.run_id), client=inner)
    return _of(_home(inner), inner)


def _of(home: str, logger: Any) -> Sink:
    if hasattr(logger, "add_scalar") or (home == "tensorflow" and hasattr(logger, "as_default")):
        from .tools import TensorBoard

        return TensorBoard(logger)
    if home == "wandb" and hasattr(logger, "define_metric"):
        from .tools import WandB

        return WandB(logger)
    if home == "mlflow" and hasattr(logger, "info"):
        from .tools import MLflow

        return MLflow(logger)
    if isinstance(logger, Sink):
        return logger
    raise _unknown(logger)


def _home(logger: Any) -> str:
    """Return the top-level package of an object's class; ``"lightning"`` for all loggers of Lightning."""
    for cls in type(logger).__mro__:
        module = cls.__module__
        if module.startswith(("lightning.", "pytorch_lightning.", "lightning_fabric.")):
            return "lightning"
    return type(logger).__module__.partition(".")[0]


def _by_name(name: str, directory: Path) -> Sink:
    if name not in TOOLS:
        raise InputError("No logger has that name.", got=repr(name), hint=did_you_mean(name, TOOLS))
    try:
        tool = importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"loggers={name!r}: its client is not installed.", got=str(error), hint=f"pip install {TOOLS[name]}"
        ) from error
    if name == "tensorboard":
        from .tools import TensorBoard

        return TensorBoard(_event_writer(directory), owned=True)
    if name == "wandb":
        from .tools import WandB

        return WandB(tool.init(), owned=True) if tool.run is None else WandB(tool.run)
    from .tools import MLflow

    active = tool.active_run()
    return MLflow(tool.start_run(), owned=True) if active is None else MLflow(active)


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


def _unknown(logger: Any) -> InputError:
    return InputError(
        "loggers= contains an object that is not a logger.",
        got=f"{type(logger).__module__}.{type(logger).__qualname__}: {shown(logger)}",
        expected="a SummaryWriter, a run of wandb or mlflow, 'tensorboard', 'wandb', 'mlflow', "
        "or an object with write(record) and close(reason)",
    )
