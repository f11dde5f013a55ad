"""Lightning's trainer, followed: what its events tell a watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..adapters.torch.discover import recurrent_modules
from ..results.training_run import Gap
from .torch.plan import Plan
from .torch.steps import weights_in
from .torch.watch import Watch, reason_of


class Following:
    """The events of Lightning's ``Callback`` that a watch needs.

    The module that is watched is the ``LightningModule``; batches are counted as its trainer counts them.
    """

    plan: Plan
    watch: Watch | None = None

    @property
    def latest(self) -> Any:
        """The last batch that was looked at; None before."""
        return None if self.watch is None else self.watch.latest

    @property
    def gaps(self) -> list[Gap]:
        """What could not be recorded, and why; empty before training."""
        return [] if self.watch is None else self.watch.gaps

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run; a training that was restored goes on from its step."""
        step = int(trainer.global_step) or None
        loggers = trainer.loggers if self.plan.loggers is True else self.plan.loggers
        plan = replace(
            self.plan, optimizer=_in_order(trainer.optimizers, pl_module), loggers=loggers, step=self.plan.step or step
        )
        if plan.scaler is None:
            plan = replace(plan, scaler=getattr(trainer.precision_plugin, "scaler", None))
        self.watch = Watch(pl_module, plan).__enter__()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Which epoch the steps belong to."""
        if self.watch is not None:
            self.watch.epoch = int(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """What a report of ``on_nonfinite=`` holds, where a batch is of input and target."""
        if self.watch is not None and self.watch.reports and isinstance(batch, tuple | list) and len(batch) == 2:
            self.watch.fed, self.watch.target = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The loss of the batch: Lightning has divided it by the number of batches accumulated, and scaled it."""
        if self.watch is not None and (self.watch.listens or self.watch.reports):
            scaler = self.watch.plan.scaler
            scale = 1.0 if scaler is None else float(scaler.get_scale())
            self.watch.set_loss(loss.detach() * (trainer.accumulate_grad_batches / scale))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The backward pass is over: Lightning runs it within the step of the optimizer."""
        if self.watch is not None and self.watch.reports:
            self.watch.look()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End training where a finding of ``stop_on=`` says so."""
        if self.watch is not None and self.watch.stop is not None:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the run; warn if nothing is in it."""
        if self.watch is not None:
            self.watch.close("stopped" if trainer.should_stop else "finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run with what ended it."""
        if self.watch is not None:
            self.watch.fail(reason_of(type(exception)))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind, whatever happened."""
        if self.watch is not None:
            self.watch.fail("interrupted")


def _in_order(optimizers: Sequence[Any], module: Any) -> list[Any]:
    """As configured, but those that move a recurrent layer first: the first is the one whose steps count."""
    if len(optimizers) < 2:
        return list(optimizers)
    recurrent = {id(p) for _, layer in recurrent_modules(module) for p in layer.parameters()}
    return sorted(optimizers, key=lambda optimizer: not weights_in(optimizer) & recurrent)
