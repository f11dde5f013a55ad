"""``rl.transformers``: what only users of Hugging Face's ``Trainer`` need: a callback that follows training.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trainer = Trainer(model, args, callbacks=[rl.transformers.Watch("runs/a.zarr", every=50)])  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self

from ..adapters.torch.training_capture import ModuleHook
from ..errors import MissingDependencyError, message
from ..results.training_run import Gap
from ..tracking.torch.plan import Plan
from ..tracking.torch.watch import TorchWatch, reason_of
from ..tracking.watch_arguments import Every, at_the_door


class TransformersEvents:
    """The events of a ``TrainerCallback`` that a watch needs; batches are counted as the Trainer counts them."""

    plan: Plan
    watch: TorchWatch | None = None
    _handle: Any = None

    @property
    def latest(self) -> Any:
        """The last batch that was looked at; None before."""
        return None if self.watch is None else self.watch.latest

    @property
    def gaps(self) -> list[Gap]:
        """What could not be recorded, and why; empty before training."""
        return [] if self.watch is None else self.watch.gaps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._close(reason_of(kind), failed=kind is not None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run; a training that was restored goes on from its step."""
        self._close("interrupted", failed=True)
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        plan = replace(self.plan, optimizer=optimizer, step=int(state.global_step) or None)
        plan = replace(plan, scaler=getattr(optimizer, "scaler", None))
        self.watch = TorchWatch(model, plan, own_loss).__enter__()
        self._handle = (
            None
            if plan.off
            else self.watch.model.register_forward_hook(ModuleHook(self.watch.model, self._told, _ignore))
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Which epoch the steps belong to."""
        if self.watch is not None:
            self.watch.epoch = int(state.epoch or 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradients are complete and clipped."""
        if self.watch is not None:
            self.watch.take()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Count as the Trainer does, which counts steps that a loss scale made it skip; end where a finding says so."""
        if self.watch is not None:
            self.watch.counted(int(state.global_step))
            if self.watch.stop is not None:
                control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the run; warn if nothing is in it."""
        stopped = state.global_step < state.max_steps
        self._close("stopped" if stopped else "finished")

    def _told(self, model: Any, args: Any, output: Any) -> None:
        """The loss that a model of Hugging Face returns by itself."""
        watch = self.watch
        if watch is not None and (watch.listens or watch.reports) and model.training:
            watch.set_loss(own_loss(output))

    def _close(self, reason: str, *, failed: bool = False) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self.watch is not None:
            (self.watch.fail if failed else self.watch.close)(reason)


def own_loss(output: Any) -> Any:
    """The loss among what a model returned; None where there is none."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output and getattr(output[0], "ndim", 1) == 0:
        found = output[0]
    return found


def _ignore(error: Exception) -> None:
    """Do nothing: the record then has no loss."""


try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependencyError(
        message("rl.transformers needs transformers and accelerate.", hint="pip install 'transformers[torch]'")
    ) from error

__all__ = ["Watch"]


class Watch(TransformersEvents, TrainerCallback):
    """A callback of Hugging Face's ``Trainer`` that follows training: on a probe between the steps, or on its batches.

    Gradients are taken when the Trainer has clipped them (``on_pre_optimizer_step``), and before. The Trainer tells its
    callbacks nothing of an error or Ctrl-C: what was written is readable all the same, and ``with
    rl.transformers.Watch(...) as watch: ...`` around ``trainer.train()`` closes the run then too.

    Parameters
    ----------
    path, every, epochs, batches, on_batch, quantities, layers, keep, loggers, stop_on, on_nonfinite, resume,
    points
        As for :func:`rnnlens.torch.watch`. A finding of ``stop_on`` ends training.
    probe, loss
        As there; or a dict of what the model takes, its labels among them, whose own loss is meant.

    Attributes
    ----------
    latest
        The last batch that was looked at: ``callback.latest["lstm"].output_grad``.

    Raises
    ------
    InputError, LayerNotFoundError, UnsupportedError, FileError
        As for :func:`rnnlens.torch.watch`; what depends on the model, when training begins.
    """

    @at_the_door
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
        on_nonfinite: str | None = None,
        resume: bool = True,
        points: int | None = 64,
    ) -> None:
        super().__init__()
        if isinstance(probe, Mapping):
            probe, loss = (dict(probe),), own_loss if loss is None else loss
        self.plan = Plan.asked(locals())
