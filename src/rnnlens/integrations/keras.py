"""``rl.keras``: a callback of Keras' ``fit`` that records gradients and states, and models made of functions.

>>> import rnnlens as rl  # doctest: +SKIP
>>> model.fit(x, y, callbacks=[rl.keras.Watch("runs/a.zarr", probe=(xv, yv), every=50)])  # doctest: +SKIP
>>> rl.open("runs/a.zarr")["lstm"].adjoint_profile  # doctest: +SKIP
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from ..adapters.keras.function_model import model
from ..adapters.keras.run import CompiledTraining
from ..adapters.keras.training_capture import (
    RecordedStep,
    batches_per_execution,
    largest_weight,
    notes_of_training,
    optimizer_steps,
    process_index_and_count,
    record_fit,
    synchronise_variables,
    trained_weights_of,
    updates_at_each_batch,
    weights_of,
)
from ..adapters.registry import adapter_for
from ..errors import InputError, RnnlensError, TrackingWarning, UnbuiltModelError, message, short_repr
from ..results.training_run import Gap
from ..tracking.alerts import Alerts, Incidents, checked_on_nonfinite, is_finite
from ..tracking.batches import TrainedBatch, direct_trace
from ..tracking.live_page import serve
from ..tracking.loggers import event_folder
from ..tracking.loggers import sinks as sinks_of
from ..tracking.recorder import Recorder
from ..tracking.records import Probe, TrainingRecord
from ..tracking.store import Store
from ..tracking.watch_arguments import (
    Every,
    Schedule,
    check_arguments,
    names_tuple,
    quantity_names,
    refuse_idle_arguments,
    refuse_unknown_layers,
)
from ..tracking.weight_updates import is_due_at, update_scalars
from .keras_cuts import cuts

__all__ = ["Watch", "cuts", "model"]

#: Number of stack frames above a callback that are searched for the list of callbacks.
_STACK_DEPTH = 6
#: Note of the first record of a model whose weights are created by its first batch.
LATE_START_NOTE = "The model was built by its first batch, so records begin after the first step."


class _Callback:
    """Base class with the callback interface of Keras 3 and ``tf_keras``; imports neither. All hooks do nothing."""

    async_safe = False
    _supports_tf_logs = True
    model: Any = None

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}

    def set_params(self, params: dict[str, Any]) -> None:
        """Store the parameters of ``fit``, such as the number of epochs and steps."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Store the model that ``fit`` trains."""
        self.model = model

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def _do_nothing(*arguments: Any, **keywords: Any) -> None:
    """Do nothing: the default of each callback hook."""


#: Keras runs steps ahead of its callbacks if all hooks are marked as defaults.
_do_nothing._is_default = True  # type: ignore[attr-defined]

for _edge in ("begin", "end"):
    for _event in ("train", "test", "predict", "epoch", "batch", "train_batch", "test_batch", "predict_batch"):
        setattr(_Callback, f"on_{_event}_{_edge}", staticmethod(_do_nothing))


class Watch(_Callback):
    """A Keras callback that records gradients and states during training, on a probe or on the training batches.

    Parameters
    ----------
    path
        Folder of the run, ending in ``.zarr``; :func:`rnnlens.open` reads it, also during training. None writes nothing
        to disk: records are available by ``on_batch``, ``latest`` and loggers only.
    probe
        ``(x, y)`` or ``(x, y, sample_weight)``: a fixed batch, not used for training, that is traced in evaluation
        mode.
    every
        When to record: a number of steps, with 0 for never; ``"powers of two"``; or a function ``(step, epoch) ->
        bool``. The probe is recorded before training as well.
    epochs
        Epochs, counted from 0, at the end of which the probe is recorded as well.
    batches
        When to record the training batch, with the same values as ``every``. By default never if there is a probe,
        otherwise the value of ``every``.
    on_batch
        Function that is called with a :class:`TrainedBatch` after each batch selected by ``batches``.
    direct
        Names of layers whose direct gradients are captured in the training step itself (TensorFlow; torch without
        compilation), so that ``batch["lstm"].output_grad`` needs no further pass. On other engines it is recomputed.
    layers
        Names of the layers to record; all recurrent layers by default.
    keep
        Quantities whose full arrays are recorded, such as ``"hidden_grad"`` (step, sample, time, unit).
    loggers
        Further destinations of the records: a ``SummaryWriter`` of ``tf.summary`` or another, a run of ``wandb`` or
        ``mlflow``, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, an object with ``write(record)`` and
        ``close(reason)``, or a list.
    stop_on
        Findings that end training: ``"exploding"``, ``"vanishing"``, ``"saturated"``. All three are logged once with
        their step, whether or not they end training; see :mod:`rnnlens.tracking.alerts` for the rule.
    on_alert
        Function that is called with each new :class:`~rnnlens.results.training_run.Alert`, once; training goes on if it
        raises.
    on_nonfinite
        ``"report"``: the first batch whose loss, or whose update, is not finite is written to ``runs/a.nonfinite.nc``
        with the weights from before its step, and the first non-finite quantity is logged. Every batch is then
        captured, and its loss is read.
    resume
        Continue an existing run at ``path``; False replaces it.
    points
        Maximal number of points stored per profile over time; None stores every step.

    Attributes
    ----------
    latest
        Last captured training batch, a :class:`TrainedBatch`; None before the first. Callbacks that read it must come
        after the watch in the list.
    record
        Last record; None before the first.
    gaps
        Records that could not be made, each with the reason.

    Raises
    ------
    InputError
        If an argument is unknown, has an invalid value, or would have no effect with the others.
    LayerNotFoundError
        When training begins: if ``layers`` or ``direct`` names a layer that the model does not have.
    UnsupportedError
        When training begins: if the training batches of this model cannot be captured.
    FileError
        When training begins: if ``path`` exists and is no run, or a run of a newer rnnlens; if another process writes
        this run; or if ``path`` is not writable.

    Warns
    -----
    TrackingWarning
        At the end, if nothing was recorded, with the reason; once for each cause of failed records. Training continues
        if a probe, the disk or a logger fails.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import rnnlens as rl
    >>> model = keras.Sequential([keras.Input((9, 2)), keras.layers.LSTM(4, name="lstm"), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 9, 2), "float32"), np.zeros((8, 1), "float32")
    >>> watch = rl.keras.Watch("run.zarr", probe=(x, y), every=1)
    >>> history = model.fit(x, y, batch_size=4, verbose=0, callbacks=[watch])
    >>> rl.open("run.zarr").steps.values.tolist()
    [0, 1, 2]
    """

    @check_arguments
    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        probe: Sequence[Any] | None = None,
        every: Every = 50,
        epochs: Collection[int] = (),
        batches: Every | None = None,
        on_batch: Callable[[TrainedBatch], object] | None = None,
        direct: str | Iterable[str] = (),
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
        self._path, self._resume, self._points = path, resume, points
        self._layers, self._keep, self._loggers = names_tuple(layers), quantity_names(keep) or (), loggers
        self._probe = None if probe is None else _checked_probe(probe, self._layers, self._keep)
        schedule = Schedule(every, epochs)
        self._schedule = schedule if probe is not None else Schedule(0)
        self._batches = Schedule(batches if batches is not None else 0 if probe is not None else every)
        self._on_batch, self._alerts = on_batch, Alerts(stop_on, on_alert)
        self._report_is_requested = checked_on_nonfinite(on_nonfinite) is not None
        self._incidents: Incidents | None = None
        self._direct_layers = names_tuple(direct) or ()
        refuse_idle_arguments(probe, batches, schedule.epochs, {"on_batch": on_batch, "direct": direct})
        self._recorder: Recorder | None = None
        self._standing_notes: tuple[str, ...] = ()
        self._awaits_weights = False
        self._training: Any = None
        self._finalizer: Any = None
        self._train_step: Any = None
        self._step = self._start_step = self._epoch = self._steps_in_epoch = 0
        self._batch_is_due = False
        self._weights_before: dict[str, Any] | None = None  # of the batch that is being trained on
        self._update_scalars: dict[str, float] = {}
        self.latest: TrainedBatch | None = None
        if not self._is_active:
            vars(self).update(on_train_batch_begin=_do_nothing, on_train_batch_end=_do_nothing)

    @property
    def _is_active(self) -> bool:
        return not (self._schedule.is_off and self._batches.is_off and not self._report_is_requested)

    @property
    def _running_recorder(self) -> Recorder:
        """Recorder of the training that has begun."""
        assert self._recorder is not None
        return self._recorder

    @property
    def record(self) -> TrainingRecord | None:
        """Last record; None before the first."""
        return None if self._recorder is None else self._recorder.latest

    @property
    def gaps(self) -> list[Gap]:
        """Records that could not be made, each with the reason; empty before training."""
        return [] if self._recorder is None else self._recorder.gaps

    serve = serve

    def __repr__(self) -> str:
        recorder = Recorder([], self._batches) if self._recorder is None else self._recorder
        return recorder.describe("Watch", self._step - self._start_step, self._path)

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the run, and record the probe before the first step."""
        if not self._is_active:
            return
        self._close_as_interrupted()  # closes the run of an earlier training that ended by an error or Ctrl-C
        self._training = CompiledTraining(self.model)
        rank, workers = process_index_and_count(self.model)
        schedule = self._schedule if self._probe is not None else self._batches
        self._recorder = Recorder([], schedule, rank=rank, alerts=self._alerts)
        self._standing_notes = (f"Written by worker {rank} of {workers}, from its own samples.",) if workers > 1 else ()
        try:
            self._begin()
        except BaseException as error:
            self._stop_recording()
            self._recorder.abort(type(error).__name__)
            if isinstance(error, RnnlensError) or not isinstance(error, Exception):  # of the arguments, or Ctrl-C
                raise
            problem = "This training is not watched; it goes on."
            got = f"{type(error).__name__}: {error}"
            warnings.warn(message(problem, got=got), TrackingWarning, stacklevel=2)
            self._recorder = None
            return
        callbacks = _caller_of("on_train_begin")
        if callbacks is not None:  # the list of callbacks lives as long as this fit runs
            self._finalizer = weakref.finalize(callbacks, self._close_as_interrupted)

    def _begin(self) -> None:
        """Open stores and loggers; once the model has weights, capture its steps and record the probe."""
        self._awaits_weights = not self.model.built  # a model without Input creates its weights at its first batch
        if not self._awaits_weights:
            refuse_unknown_layers(self._layers, adapter_for(self.model), self.model)
        self._open_sinks()
        self._step = self._start_step
        self._running_recorder.start(self._step)
        if not self._awaits_weights:
            self._begin_records()

    def _begin_records(self) -> None:
        """Attach the capture of training steps, and record the probe; the model must have weights."""
        if not (self._batches.is_off and not self._report_is_requested) and self._running_recorder.writes:
            self._train_step = record_fit(self.model, self._direct_layers)
        if (
            self._probe is not None
            and not self._schedule.is_off
            and self._running_recorder.writes
            and not self._start_is_recorded
        ):
            try:
                self._record_probe(before_training=not self._awaits_weights)
            except UnbuiltModelError:
                self._awaits_weights = True

    def _close_as_interrupted(self) -> None:
        """Remove the capture of training steps, and close the run as interrupted: ``on_train_end`` was not called."""
        self._stop_recording()
        if self._recorder is not None:
            self._recorder.abort("interrupted")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch to which the following steps belong."""
        self._epoch, self._steps_in_epoch = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Decide whether the next execution of the training step is captured; copy the weights if a record is due."""
        self._weights_before, self._update_scalars = None, {}
        if self._recorder is not None:
            try:
                if self._update_is_due:
                    synchronise_variables(self.model)
                    self._weights_before = trained_weights_of(self.model)
            except Exception as error:
                self._recorder.fail_record(self._step + 1, error, "update")
        if self._train_step is not None:
            steps = range(self._step + 1, self._step + batches_per_execution(self.model) + 1)
            # Asked once: a schedule may be a function with side effects.
            self._batch_is_due = any(
                self._running_recorder.is_due_by(self._batches, step, self._epoch) for step in steps
            )
            self._train_step.records_next = self._batch_is_due or self._is_reporting

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the steps of the execution, and record the batch and the probe where the schedules require it."""
        if self._recorder is None:
            return
        recorded_step, failure = (None, None) if self._train_step is None else self._train_step.take_record()
        # The last execution of an epoch may have fewer steps than ``batch`` implies.
        steps_in_epoch = min(batch + 1, self.params.get("steps") or batch + 1)
        previous_step = self._step
        self._step += steps_in_epoch - self._steps_in_epoch if recorded_step is None else recorded_step.batches
        self._steps_in_epoch = steps_in_epoch
        if failure is not None:
            self._running_recorder.fail_record(self._step, failure, "batch")
        if self._weights_before is not None:
            try:
                synchronise_variables(self.model)
                self._update_scalars = update_scalars(self._weights_before, trained_weights_of(self.model))
            except Exception as error:
                self._running_recorder.fail_record(self._step, error, "update")
        with self._training():
            if self._awaits_weights:
                try:
                    refuse_unknown_layers(self._layers, adapter_for(self.model), self.model)
                    self._begin_records()
                except Exception as error:
                    self._running_recorder.fail_record(self._step, error, "the run")
                self._awaits_weights = False
                return
            if recorded_step is not None:
                self._examine(recorded_step, previous_step + 1, logs)
            steps = range(previous_step + 1, self._step + 1)
            if self._probe is not None and any(self._running_recorder.is_due(step, self._epoch) for step in steps):
                self._record_probe()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record the probe at the end of each epoch listed in ``epochs``."""
        if self._recorder is not None and self._probe is not None and self._schedule.is_due_after(epoch):
            latest_record = self._recorder.latest
            if latest_record is None or latest_record.step != self._step:
                self._record_probe()

    def on_train_end(self, logs: Any = None) -> None:
        """Close the run; warn if it has no records."""
        if self._recorder is None:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        self._stop_recording()
        is_stopped = getattr(self.model, "stop_training", False)
        self._training = None
        self._recorder.close("stopped" if is_stopped else "finished", steps=self._step - self._start_step)

    def _stop_recording(self) -> None:
        """Remove the capture of training steps, and restore the model's own training step."""
        if self._train_step is not None:
            self._train_step.remove()
            self._train_step = None

    def _open_sinks(self) -> None:
        """Open the store and the loggers, and determine the step at which the run resumes."""
        self._start_step, self._start_is_recorded = 0, False
        if not self._running_recorder.writes:
            return
        self._running_recorder.sinks = sinks = sinks_of(self._loggers, event_folder(self._path))
        provenance = adapter_for(self.model).facts(self.model).provenance
        if self._report_is_requested and self._incidents is None:
            self._incidents = Incidents(self._path, provenance)
        if self._path is not None:
            store = Store(self._path, resume=self._resume, points=self._points, provenance=provenance)
            self._resume = True  # a second fit of the same callback goes on
            self._start_step = store.resume_step(optimizer_steps(self.model))
            self._start_is_recorded = store.last_step_of("probe") == self._start_step
            sinks.insert(0, store)

    @property
    def _update_is_due(self) -> bool:
        """Whether a record is due after the next batch, which has the change of the weights by it."""
        recorder = self._running_recorder
        return (
            recorder.writes
            and bool(recorder.sinks)
            and not self._awaits_weights
            and any(is_due_at(schedule, self._step + 1, self._epoch) for schedule in (self._schedule, self._batches))
            and updates_at_each_batch(self.model)
        )

    def _record_probe(self, *, before_training: bool = False) -> None:
        probe = self._probe
        assert probe is not None

        def make_record() -> TrainingRecord:
            synchronise_variables(self.model)
            return probe.record(self.model, self._step, self._epoch)

        self._record(make_record, "probe", before_training=before_training)

    def _record(self, make_record: Callable[[], TrainingRecord], source: str, *, before_training: bool = False) -> None:
        """Write a record made by ``make_record``, and end training if it has a finding listed in ``stop_on``."""
        notes = (*self._standing_notes, *((LATE_START_NOTE,) if self._awaits_weights else ()))

        def record_with_notes() -> TrainingRecord:
            record = make_record().with_scalars(self._update_scalars)
            return replace(record, notes=(*record.notes, *notes))

        self._running_recorder.record(self._step, record_with_notes, before_training=before_training, source=source)
        if self._running_recorder.stop is not None:
            self.model.stop_training = True

    @property
    def _is_reporting(self) -> bool:
        """Whether non-finite batches are still searched for: none has been reported yet."""
        return self._incidents is not None and self._incidents.written_path is None

    def _trained_batch(self, recorded_step: RecordedStep, step: int) -> TrainedBatch:
        """Convert a captured training step to a ``TrainedBatch``, with the variables from before the step."""
        synchronise_variables(self.model)
        data = (recorded_step.x, recorded_step.y, recorded_step.sample_weight)
        notes = notes_of_training(self.model, recorded_step)
        direct = direct_trace(self.model, recorded_step.direct_gradients, recorded_step.loss)
        return TrainedBatch(
            self.model, data, (step, self._epoch), recorded_step.state_before.restored, notes=notes, direct=direct
        )

    def _examine(self, recorded_step: RecordedStep, step: int, logs: Any) -> None:
        """Record a captured batch if it is due, pass it to ``on_batch``, and report it if it is not finite."""
        recorder = self._running_recorder
        try:
            trained_batch = self._trained_batch(recorded_step, step)
        except Exception as error:
            recorder.fail_record(step, error, "batch")
            return
        if self._batch_is_due:
            self.latest = trained_batch
            if recorder.sinks:
                self._record(lambda: trained_batch.record(layers=self._layers, keep=self._keep), "batch")
            else:
                recorder.count_examined()
            if self._on_batch is not None:
                self._on_batch(trained_batch)
        if self._is_reporting:
            self._report(trained_batch, logs)

    def _report(self, trained_batch: TrainedBatch, logs: Any) -> None:
        """Write a report of the batch if its loss or a weight after its step is not finite."""
        assert self._incidents is not None
        try:
            loss = dict(logs or {}).get("loss")
            if not (is_finite(loss) and is_finite(largest_weight(self.model))):
                self._incidents.report_trained(trained_batch, lambda: weights_of(self.model), loss)
        except Exception as error:
            self._incidents, self._report_is_requested = None, False
            problem = f"Step {self._step} is not finite, and its incident could not be saved; training goes on."
            warnings.warn(message(problem, got=f"{type(error).__name__}: {error}"), TrackingWarning, stacklevel=2)


def _caller_of(method: str) -> Any:
    """Return the object whose method of that name is on the call stack: the list of callbacks of this ``fit``.

    Only frames of that method are read, because reading a frame's locals keeps them alive.
    """
    frame = sys._getframe(2)
    for _ in range(_STACK_DEPTH):
        if frame is None:
            return None
        if frame.f_code.co_name == method and frame.f_code.co_varnames[:1] == ("self",):
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _checked_probe(probe: Any, layers: Sequence[str] | None, keep: tuple[str, ...]) -> Probe:
    if not isinstance(probe, tuple | list) or not 1 <= len(probe) <= 3:
        raise InputError("probe= is a batch.", got=short_repr(probe), expected="(x, y) or (x, y, sample_weight)")
    x, y, weight = (*probe, None, None)[:3]
    return Probe(x, y, weight, layers, keep)
