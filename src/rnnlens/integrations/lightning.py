"""``rl.lightning``: a callback of Lightning's trainer that records gradients and states during training.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trainer = L.Trainer(callbacks=[rl.lightning.Watch("runs/a.zarr", every=50)])  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from ..adapters.torch.discover import recurrent_modules
from ..errors import MissingDependencyError
from ..tracking.torch.plan import WatchPlan
from ..tracking.torch.steps import weights_in
from ..tracking.torch.watch import TorchWatch, TrainerEvents, reason_of
from ..tracking.watch_arguments import Every, check_arguments


class LightningEvents(TrainerEvents):
    """Callback methods of Lightning that drive a :class:`TorchWatch` by the trainer's steps."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run; training restored from a checkpoint resumes at its step."""
        step = int(trainer.global_step) or None
        loggers = trainer.loggers if self.plan.loggers is True else self.plan.loggers
        plan = replace(
            self.plan,
            optimizer=_recurrent_first(trainer.optimizers, pl_module),
            loggers=loggers,
            step=self.plan.step or step,
        )
        if plan.scaler is None:
            plan = replace(plan, scaler=getattr(trainer.precision_plugin, "scaler", None))
        self.watch = TorchWatch(pl_module, plan).__enter__()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Store the number of the epoch to which the following steps belong."""
        if self.watch is not None:
            self.watch.epoch = int(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Store the batch for a report of ``on_nonfinite``, if it is a pair of input and target."""
        if self.watch is not None and self.watch.reports and isinstance(batch, tuple | list) and len(batch) == 2:
            self.watch.model_input, self.watch.target = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Record the batch's loss, undoing Lightning's division by accumulated batches and its loss scaling."""
        if self.watch is not None and (self.watch.captures or self.watch.reports):
            scaler = self.watch.plan.scaler
            scale = 1.0 if scaler is None else float(scaler.get_scale())
            self.watch.set_loss(loss.detach() * (trainer.accumulate_grad_batches / scale))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Check the gradients for non-finite numbers; Lightning has just finished the backward pass."""
        if self.watch is not None and self.watch.reports:
            self.watch.check_finite()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ask the trainer to stop if a finding listed in ``stop_on`` was recorded."""
        if self.watch is not None and self.watch.stop is not None:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the run; warn if it has no records."""
        if self.watch is not None:
            self.watch.close("stopped" if trainer.should_stop else "finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run with the exception as the reason."""
        if self.watch is not None:
            self.watch.fail(reason_of(type(exception)))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the run as interrupted if it is still open, and remove its hooks."""
        if self.watch is not None:
            self.watch.fail("interrupted")


def _recurrent_first(optimizers: Sequence[Any], module: Any) -> list[Any]:
    """Sort optimizers that update a recurrent layer to the front; the first one's steps are counted."""
    if len(optimizers) < 2:
        return list(optimizers)
    recurrent_weights = {id(p) for _, layer in recurrent_modules(module) for p in layer.parameters()}
    return sorted(optimizers, key=lambda optimizer: not weights_in(optimizer) & recurrent_weights)


__all__ = ["Watch"]

_PACKAGE_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """Return ``Callback`` of each loaded package of Lightning, or of the installed one if none is loaded."""
    packages = [sys.modules[name] for name in _PACKAGE_NAMES if name in sys.modules]
    for name in () if packages else _PACKAGE_NAMES:
        try:
            packages = [importlib.import_module(name)]
            break
        except ModuleNotFoundError:
            continue
    if not packages:
        raise MissingDependencyError("rl.lightning needs Lightning.", hint="pip install lightning")
    return tuple(dict.fromkeys(package.Callback for package in packages))


class Watch(LightningEvents, *_callback_classes()):  # type: ignore[misc]
    """A Lightning callback that records gradients and states during training, on a probe or on the training batches.

    Layers have their names in the ``LightningModule``. The trainer's mixed precision, accumulation and gradient
    clipping are supported; early stopping, an error and Ctrl-C close the run. Under DDP, rank 0 writes records of its
    own samples, with a note.

    Parameters
    ----------
    path, probe, loss, every, epochs, batches, on_batch, quantities, layers, keep, stop_on, on_alert, on_nonfinite,
    resume, points
        Same as in :func:`rnnlens.torch.watch`. A finding of ``stop_on`` sets ``trainer.should_stop``.
    loggers
        Same as in :func:`rnnlens.torch.watch`, or True for the trainer's own loggers.

    Attributes
    ----------
    latest
        Last captured training batch; None before the first: ``callback.latest["net.lstm"].output_grad``.

    Raises
    ------
    InputError, LayerNotFoundError, UnsupportedError, FileError
        Same as in :func:`rnnlens.torch.watch`; errors that depend on the model are raised when training begins.
    """

    @check_arguments
    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        probe: Sequence[Any] | None = None,
        loss: Callable[..., Any] | str | None = None,
        every: Every = 50,
        epochs: Collection[int] = (),
        batches: Every | None = None,
        on_batch: Callable[[Any], object] | None = None,
        quantities: str | Iterable[str] | None = None,
        layers: str | Iterable[str] | None = None,
        keep: str | Iterable[str] = (),
        loggers: Any = None,
        stop_on: str | Iterable[str] = (),
        on_alert: Callable[[Any], object] | None = None,
        on_nonfinite: str | None = None,
        resume: bool = True,
        points: int | None = 64,
    ) -> None:
        super().__init__()
        self.plan = WatchPlan.from_arguments(locals())
