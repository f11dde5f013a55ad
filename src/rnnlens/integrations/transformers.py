"""``rl.transformers``: a callback of Hugging Face's ``Trainer`` that records gradients and states during training.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trainer = Trainer(model, args, callbacks=[rl.transformers.Watch("runs/a.zarr", every=50)])  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self

from ..adapters.torch.training_capture import ModuleHook
from ..errors import MissingDependencyError
from ..tracking.torch.plan import WatchPlan
from ..tracking.torch.watch import TorchWatch, TrainerEvents, reason_of
from ..tracking.watch_arguments import Every, check_arguments


class TransformersEvents(TrainerEvents):
    """Callback methods of Hugging Face's ``Trainer`` that drive a :class:`TorchWatch` by the Trainer's steps."""

    _handle: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._close(reason_of(kind), has_failed=kind is not None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run; training restored from a checkpoint resumes at its step."""
        self._close("interrupted", has_failed=True)
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        plan = replace(self.plan, optimizer=optimizer, step=int(state.global_step) or None)
        plan = replace(plan, scaler=getattr(optimizer, "scaler", None))
        self.watch = TorchWatch(model, plan, model_loss).__enter__()
        self._handle = (
            None
            if plan.is_off
            else self.watch.model.register_forward_hook(ModuleHook(self.watch.model, self._record_loss, _ignore))
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the number of the epoch to which the following steps belong."""
        if self.watch is not None:
            self.watch.epoch = int(state.epoch or 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Capture the weight gradients, which are complete and clipped at this event."""
        if self.watch is not None:
            self.watch.take()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Take over the Trainer's step count, and ask it to stop for a finding listed in ``stop_on``."""
        if self.watch is not None:
            self.watch.counted(int(state.global_step))
            if self.watch.stop is not None:
                control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the run; warn if it has no records."""
        is_stopped = state.global_step < state.max_steps
        self._close("stopped" if is_stopped else "finished")

    def _record_loss(self, model: Any, args: Any, output: Any) -> None:
        """Record the loss in the output of a Hugging Face model (forward hook)."""
        watch = self.watch
        if watch is not None and (watch.captures or watch.reports) and model.training:
            watch.set_loss(model_loss(output))

    def _close(self, reason: str, *, has_failed: bool = False) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self.watch is not None:
            (self.watch.fail if has_failed else self.watch.close)(reason)


def model_loss(output: Any) -> Any:
    """Return the loss contained in a model's output; None if there is none."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and getattr(output[0], "ndim", 1) == 0:
        loss = output[0]
    return loss


def _ignore(error: Exception) -> None:
    """Ignore an error of the forward hook: the record then has no loss."""


try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependencyError(
        "rl.transformers needs transformers and accelerate.", hint="pip install 'transformers[torch]'"
    ) from error

__all__ = ["Watch"]


class Watch(TransformersEvents, TrainerCallback):  # type: ignore[misc]
    """A ``Trainer`` callback that records gradients and states during training, on a probe or the training batches.

    Gradients are captured before and after the Trainer clips them (``on_pre_optimizer_step``). The Trainer does not
    inform callbacks about an error or Ctrl-C. The records written until then remain readable; to close the run as well,
    put ``with rl.transformers.Watch(...) as watch: ...`` around ``trainer.train()``.

    Parameters
    ----------
    path, every, epochs, batches, on_batch, quantities, layers, keep, loggers, stop_on, on_alert, on_nonfinite, resume,
    points
        Same as in :func:`rnnlens.torch.watch`. A finding of ``stop_on`` ends training.
    probe, loss
        Same as in :func:`rnnlens.torch.watch`; or ``probe`` is a dict of the model's arguments with its labels, and the
        loss is by default the one that the model returns.

    Attributes
    ----------
    latest
        Last captured training batch; None before the first: ``callback.latest["lstm"].output_grad``.

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
        probe: Sequence[Any] | Mapping[str, Any] | None = None,
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
        if isinstance(probe, Mapping):
            probe, loss = (dict(probe),), model_loss if loss is None else loss
        self.plan = WatchPlan.from_arguments(locals())
