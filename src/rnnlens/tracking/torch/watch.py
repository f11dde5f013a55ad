"""``TorchWatch``: watches a training in torch by hooks during a ``with`` block, and removes them at its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, Self

from ...adapters.registry import adapter_for
from ...adapters.torch.training_capture import TrainingCapture
from ...errors import InputError, TrackingWarning, UnsupportedError, has_attribute, message, short_repr
from ...results.training_run import Gap
from ..alerts import Alerts, Incidents
from ..live_page import serve
from ..loggers import event_folder, sinks
from ..recorder import Recorder
from ..records import Probe, TrainingRecord
from ..store import Store
from ..watch_arguments import names_tuple, refuse_unknown_layers
from ..weight_updates import is_due_at, trained_shares
from .plan import WatchPlan, inner_module, rank_and_world
from .steps import NO_STEP, NonfiniteCheck, StepOfWeights, Steps, scaler_on_stack, steps_taken, uncaptured_reason
from .watched_batch import WatchedBatch, record_of


class TorchWatch:
    """Watch of a training within a ``with`` block; :func:`rnnlens.torch.watch` creates one.

    Attributes
    ----------
    latest
        Last captured batch, None before the first: ``watch.latest["lstm"].output_grad``.
    steps
        Number of batches trained on so far.
    target
        Target of the current batch; a loop sets it to have it in the report of ``on_nonfinite=``.
    """

    def __init__(self, model: Any, plan: WatchPlan, model_loss: Callable[..., Any] | None = None) -> None:
        self.model, self.plan, self._model_loss = inner_module(model), plan, model_loss
        self._path = plan.path
        self._recorder = Recorder([], plan.batch_schedule)
        self.latest: WatchedBatch | None = None
        self._loss: Any = None
        self.steps = self._start_step = 0
        self._epoch = 0
        self._is_open = False
        self._capture_has_failed = False  # True if the capture of this step's batch failed
        self._captured_pass: int | None = None  # number of the backward pass captured for the next step
        self._capture: TrainingCapture | None = None
        self._steps: Steps | None = None
        self._store: Store | None = None
        self._nonfinite: NonfiniteCheck | None = None
        self._step_of_weights: StepOfWeights | None = None  # of the step that the optimizer is taking
        self._update_scalars: dict[str, float] = {}
        self.model_input: Any = None
        self.target: Any = None

    # ---- the block

    def __enter__(self) -> Self:
        if self._is_open:
            raise InputError("This watch is open already.", hint="one with block at a time")
        refuse_unknown_layers(self.plan.layers, adapter_for(self.model), self.model)
        self.rank, self.world = rank_and_world()
        schedule = self.plan.batch_schedule if self.plan.probe_schedule.is_off else self.plan.probe_schedule
        self._recorder = Recorder([], schedule, rank=self.rank, alerts=Alerts(self.plan.stop_on, self.plan.on_alert))
        self._is_open = True
        try:
            if not self.plan.is_off:
                self._begin()
        except BaseException as error:
            self._is_open = False
            self._remove_hooks()
            self._recorder.abort(type(error).__name__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        (self.close if kind is None else self.fail)(reason_of(kind))

    def close(self, reason: str = "finished") -> None:
        """End the watch: remove every hook, and write all records to disk. A second call does nothing."""
        if not self._is_open:
            return
        if reason in ("finished", "stopped"):
            self._end_epoch()
        self._is_open = False
        self._remove_hooks()
        if self.steps == self._start_step:
            self._recorder.count_missed(NO_STEP)
        self._recorder.close(reason, steps=self.steps - self._start_step)

    def fail(self, reason: str) -> None:
        """End the watch after an error, without warnings about missing records."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrackingWarning)
            self.close(reason)

    def _begin(self) -> None:
        provenance = adapter_for(self.model).facts(self.model).provenance
        if self.rank == 0:
            self._recorder.sinks = sink_list = sinks(self.plan.loggers, event_folder(self.plan.path))
            if self.plan.path is not None:
                resume, points = self.plan.resume, self.plan.points
                self._store = Store(self.plan.path, resume=resume, points=points, provenance=provenance)
                sink_list.insert(0, self._store)
        self.steps = self._start_step = self._steps_before()
        self._recorder.start(self.steps)
        if not self.plan.batch_schedule.is_off:
            self._start_capture()
        if self.plan.on_nonfinite is not None and self._recorder.writes:
            incidents = Incidents(self.plan.path, provenance)
            self._nonfinite = NonfiniteCheck(self.model, self.plan.loss, incidents, self._model_loss)
        recurrent_weights = () if self._capture is None else self._capture.weights.slots
        self._steps = Steps(
            self.model,
            recurrent_weights,
            self.plan.optimizers,
            before_step=self._before_step,
            after_step=self._after_step,
        )
        if self._store is None or self._store.last_step_of("probe") != self.steps:
            self._record_probe_if_due()
        self._prepare()

    def _steps_before(self) -> int:
        """Return how many batches were trained before: the number given, else that of the optimizers, else of the run.

        Records of later steps, whose weights no longer exist, are dropped.
        """
        if self.plan.step is not None:
            if self._store is not None:
                self._store.cut(self.plan.step)
            return self.plan.step
        step_count = steps_taken(self.plan.optimizers)
        return step_count if self._store is None else self._store.resume_step(step_count)

    def _start_capture(self) -> None:
        self._capture = TrainingCapture(
            self.model, self.plan.layers, whole=not self.plan.is_only_direct, failed=self._note_capture_failure
        )
        if not self._capture.modules and not self._capture.candidates:
            raise UnsupportedError(
                "Batch mode records nn.RNN, nn.LSTM, nn.GRU, their cells and cells of your own, and none of them is "
                "among the watched layers.",
                got=", ".join(self._capture.unrecorded_layers) or "no recurrent layer of torch's own",
                hint="a probe records every layer: rl.torch.watch(model, path, probe=(x, y), loss=loss)",
            )

    def _remove_hooks(self) -> None:
        for hooks in (self._capture, self._steps, self._nonfinite):
            if hooks is not None:
                hooks.remove()

    # ---- called by the training loop

    @property
    def captures(self) -> bool:
        """True if the current or next batch is captured."""
        return self._capture is not None and self._capture.is_recording

    @property
    def reports(self) -> bool:
        """True while batches are tested for non-finite numbers."""
        return self._nonfinite is not None and self._nonfinite.is_active

    @property
    def record(self) -> TrainingRecord | None:
        """Last record; None before the first."""
        return self._recorder.latest

    serve = serve

    def __repr__(self) -> str:
        return self._recorder.describe("TorchWatch", self.steps - self._start_step, self._path)

    @property
    def stop(self) -> str | None:
        """Reason to end training, after a finding of ``stop_on=``; else None: ``if watch.stop: break``."""
        return self._recorder.stop

    @property
    def loss(self) -> Any:
        """Loss of the batch, one number; set it before ``optimizer.step()`` to record it."""
        return self._loss

    @loss.setter
    def loss(self, value: Any) -> None:
        if not (value is None or (value.numel() == 1 if has_attribute(value, "numel") else isinstance(value, Real))):
            got = f"shape {tuple(value.shape)}" if has_attribute(value, "shape") else short_repr(value)
            raise InputError("watch.loss is one number.", got=got, hint="watch.loss = loss.mean()")
        self._loss = value

    def set_loss(self, value: Any) -> None:
        """Set the loss that a trainer reports; a value that is not one number is ignored."""
        try:
            self.loss = value
        except InputError:
            self._loss = None

    @property
    def gaps(self) -> list[Gap]:
        """Missing records, and the reasons."""
        return self._recorder.gaps

    @property
    def epoch(self) -> int:
        """Current epoch, from 0; set it to name it in records."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        if int(value) != self._epoch:
            self._end_epoch()
        self._epoch = int(value)
        self._prepare()

    def _end_epoch(self) -> None:
        if not self._is_open:
            return
        latest_record = self._recorder.latest
        is_recorded = latest_record is not None and latest_record.kind == "probe" and latest_record.step == self.steps
        if not is_recorded and self.steps > self._start_step and self.plan.probe_schedule.is_due_after(self._epoch):
            self._record_probe()

    def counted(self, steps: int) -> None:
        """Set the number of steps that a trainer has counted, including those without an optimizer step."""
        if self._is_open and steps != self.steps:
            self.steps = steps
            self._record_probe_if_due()
            self._prepare()

    def take(self) -> None:
        """Capture the batch when its gradients are complete and clipped; called by trainers that have such an event.

        With a loss scale the gradients are not yet unscaled; they are then captured when the optimizer steps.
        """
        if (
            self.plan.scaler is None
            and self._capture is not None
            and self._capture.is_recording
            and self._capture.calls
        ):
            self._captured_pass = None
            self._capture_once()

    def check_finite(self) -> None:
        """Test loss and gradients after the backward pass and before the weights change; called by trainers.

        A batch that is not finite is written if ``on_nonfinite=`` is set.
        """
        if self._nonfinite is not None:
            step_info = {"step": self.steps + 1, "epoch": self._epoch, "loss": _as_float(self.loss)}
            try:
                self._nonfinite.check(step_info, self.model_input, self.target)
            except Exception as error:
                self._nonfinite.remove()
                self._nonfinite = None
                problem = f"Step {self.steps + 1} is not finite, and its incident could not be saved; training goes on."
                warnings.warn(message(problem, got=f"{type(error).__name__}: {error}"), TrackingWarning, stacklevel=2)

    def step(self, loss: Any = None) -> None:
        """Count one step of a loop without a torch optimizer; not needed with one.

        Parameters
        ----------
        loss
            Loss of the batch, recorded with it.

        Raises
        ------
        InputError
            If an optimizer has counted the steps already.
        """
        if self._steps is None:
            return
        if self._steps.has_counted:
            raise InputError(
                "watch.step() counts a step that optimizer.step() has already counted.",
                hint="leave it out; watch.loss = loss before optimizer.step() records the loss",
            )
        self.loss = loss
        self._after_step()

    # ---- called by the hooks

    def _prepare(self) -> None:
        """Switch the capture of the next batch on or off, according to the schedule."""
        if self._capture is not None:
            schedule = self.plan.batch_schedule
            self._capture.is_recording = self._is_open and self._recorder.is_due_by(
                schedule, self.steps + 1, self._epoch
            )

    def _before_step(self, optimizer: Any, applied_scale: float) -> None:
        # A closure runs the batch within the step, so there are no gradients to test yet.
        if self._steps is None or not self._steps.runs_batch:
            self.check_finite()
        self._capture_once(applied_scale)
        if self._steps is not None and self._steps.is_counting(optimizer):
            try:
                if self._update_is_due:
                    others = None if self.plan.optimizers else self._steps.known_weights
                    self._step_of_weights = StepOfWeights(
                        self.model, optimizer, applied_scale, others, runs_batch=self._steps.runs_batch
                    )
            except Exception as error:
                self._recorder.fail_record(self.steps + 1, error, "update")

    @property
    def _update_is_due(self) -> bool:
        """Whether a record is due after the next step, which has the change of the weights by it."""
        schedules = (self.plan.probe_schedule, self.plan.batch_schedule)
        has_sinks = self._recorder.writes and bool(self._recorder.sinks)
        return has_sinks and any(is_due_at(schedule, self.steps + 1, self._epoch) for schedule in schedules)

    def _finish_step_of_weights(self) -> None:
        """Compare the weights after a step with those before it."""
        step_of_weights, self._step_of_weights = self._step_of_weights, None
        if step_of_weights is not None:
            try:
                self._update_scalars = step_of_weights.scalars()
            except Exception as error:
                self._recorder.fail_record(self.steps + 1, error, "update")

    def _capture_once(self, applied_scale: float = 1.0) -> None:
        """Capture the batch of the last backward pass, unless it was captured already.

        After a failure there is no record.
        """
        capture = self._capture
        if (
            capture is None
            or not capture.is_recording
            or not capture.calls
            or self._captured_pass == capture.last_backward_id
        ):
            return
        if not capture.differentiates_gradients:
            try:
                self._build_batch(capture, applied_scale)
            except Exception as error:
                self._note_capture_failure(error)

    def _note_capture_failure(self, error: Exception) -> None:
        """Note that the batch of this step is missing because its capture failed."""
        self._capture_has_failed = True
        self._recorder.fail_record(self.steps + 1, error, "batch")

    def _build_batch(self, capture: TrainingCapture, applied_scale: float) -> None:
        """Build the batch of the last backward pass, with the gradients passed to the optimizer."""
        scaler = self.plan.scaler or scaler_on_stack()
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        calls, notes = capture.recorded_calls()
        batch = WatchedBatch(
            self.model,
            calls,
            capture.weights.read(scale, applied_scale),
            step=self.steps + 1,
            scale=scale,
            passes=capture.passes,
            notes=[*self._standing_notes(capture), *notes],
        )
        batch.loss, batch.epoch = _as_float(self.loss), self._epoch
        self.latest, self._captured_pass = batch, capture.last_backward_id

    def _standing_notes(self, capture: TrainingCapture) -> list[str]:
        notes = []
        if self.world > 1:
            notes.append(
                f"Written by rank {self.rank} of {self.world}, from its own samples; accumulated and applied weight "
                "gradients are those that the processes averaged."
            )
        if capture.unrecorded_layers and self.plan.layers is None:
            cells = ", ".join(capture.unrecorded_layers)
            notes.append(
                f"Not recorded in batch mode: {cells}. It records torch's own layers, and cells that get, as their "
                "state, the very tensor that the call before returned. A probe records the others."
            )
        if self._captured_pass not in (None, capture.last_backward_id):
            notes.append(
                "Another optimizer stepped in between, after a backward pass of its own, "
                "which is not recorded; optimizer= selects the optimizer to follow."
            )
        if capture.has_earlier_gradients:
            notes.append("Weight gradients were not zeroed before the step, so they include earlier steps.")
        return notes

    def _after_step(self) -> None:
        """Count a step, after the weights changed, and write the records that are due."""
        if not self._is_open:
            return
        was_capturing = self.captures
        self._capture_once()  # where a closure ran the batch within the step
        self._finish_step_of_weights()
        self.steps += 1
        if was_capturing:
            self._record_batch()
        self._record_probe_if_due()
        self.loss, self._captured_pass, self._capture_has_failed = None, None, False
        self._update_scalars = {}
        self._prepare()

    # ---- records

    def _record_batch(self) -> None:
        assert self._capture is not None
        batch = self.latest if self._captured_pass is not None and not self._capture_has_failed else None
        if self._capture_has_failed:
            pass  # a gap already
        elif batch is None or not batch.has_calls:
            notes = [] if batch is None else batch.notes
            self._record_weights(" ".join(notes) or uncaptured_reason(self._capture))
        elif self._recorder.writes and self._recorder.sinks:
            batch.counted_weights = None if self._steps is None else self._steps.counted_weights
            updates = self._update_scalars
            self._recorder.record(self.steps, lambda: record_of(batch, self.plan).with_scalars(updates), source="batch")
        else:
            self._recorder.count_examined()
        self._capture.reset()
        if batch is not None and self.plan.on_batch is not None:
            self.plan.on_batch(batch)

    def _record_weights(self, why_alone: str) -> None:
        """Record the change of the weights in a step whose recurrent layers have nothing to record."""
        updates = self._update_scalars
        if not updates:
            self._recorder.count_missed(why_alone)
            return
        self._recorder.count_missed(f"{why_alone}; of these batches only the change of the weights was recorded")
        loss = _as_float(self.loss)
        losses = {} if loss is None else {"loss": loss}

        def make_record() -> TrainingRecord:
            layers = [info.name for info in adapter_for(self.model).known_layers(self.model)]
            scalars = {**losses, **trained_shares(self.model, layers), **updates}
            return TrainingRecord(self.steps, self._epoch, "batch", scalars)

        self._recorder.record(self.steps, make_record, source="batch")

    def _record_probe_if_due(self) -> None:
        if not self.plan.probe_schedule.is_off and self._recorder.is_due_by(
            self.plan.probe_schedule, self.steps, self._epoch
        ):
            self._record_probe()

    def _record_probe(self) -> None:
        if self._recorder.writes:
            x, y, weight = (*(self.plan.probe or ()), None, None)[:3]
            probe = Probe(x, y, weight, names_tuple(self.plan.layers), tuple(self.plan.keep), self.plan.loss)
            before_training, updates = self.steps == self._start_step, self._update_scalars
            self._recorder.record(
                self.steps,
                lambda: probe.record(self.model, self.steps, self._epoch).with_scalars(updates),
                before_training=before_training,
            )


class TrainerEvents:
    """Base of a trainer's callback, which has a :class:`TorchWatch` while the trainer trains."""

    plan: WatchPlan
    watch: TorchWatch | None = None

    @property
    def latest(self) -> Any:
        """Last captured training batch; None before the first."""
        return None if self.watch is None else self.watch.latest

    @property
    def gaps(self) -> list[Gap]:
        """Records that could not be made, each with the reason; empty before training."""
        return [] if self.watch is None else self.watch.gaps


def _as_float(loss: Any) -> float | None:
    return None if loss is None else float(loss.detach() if hasattr(loss, "detach") else loss)


def reason_of(kind: type[BaseException] | None) -> str:
    """Return why a training ended, from the type of the exception that left its ``with`` block."""
    if kind is None:
        return "finished"
    return "interrupted" if issubclass(kind, KeyboardInterrupt) else kind.__name__
