"""The Trainer of Hugging Face, followed: what its events tell a watch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from ..adapters.torch.training_capture import ModuleHook
from ..results.training_run import Gap
from .torch.plan import Plan
from .torch.watch import Watch, reason_of


class Following:
    """The events of a ``TrainerCallback`` that a watch needs; batches are counted as the Trainer counts them."""

    plan: Plan
    watch: Watch | None = None
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
        self.watch = Watch(model, plan, own_loss).__enter__()
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
