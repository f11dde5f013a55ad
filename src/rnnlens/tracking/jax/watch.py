"""``JaxWatch``: records a training loop of JAX between its compiled steps; nothing enters the steps themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ...adapters.jax.models import JaxModel, OpenedModel, library_of, open_model
from ...adapters.protocol import Batch
from ...adapters.registry import adapter_for
from ...errors import InputError, TrackingWarning, short_repr
from ...results.training_run import Gap
from ...verbs.find_nonfinite import find_nonfinite
from ..alerts import Alerts, Incidents, checked_on_nonfinite, is_finite, text_or_error
from ..live_page import serve
from ..loggers import event_folder, sinks
from ..recorder import Recorder
from ..records import Probe, TrainingRecord
from ..store import Store
from ..watch_arguments import (
    Every,
    Schedule,
    names_tuple,
    quantity_names,
    refuse_idle_arguments,
    refuse_unknown_layers,
)
from ..weight_updates import is_due_at, update_scalars

NO_STEP = "watch.step(params) was not called; call it after each training step"


@dataclass(frozen=True)
class WatchOptions:
    """Arguments of :func:`rnnlens.jax.watch` besides the model."""

    path: str | PathLike[str] | None
    probe: Sequence[Any] | None
    loss: Callable[..., Any] | None
    every: Every
    epochs: Collection[int]
    layers: str | Iterable[str] | None
    keep: str | Iterable[str]
    loggers: Any
    stop_on: str | Iterable[str]
    on_alert: Callable[[Any], object] | None
    on_nonfinite: str | None
    resume: bool
    points: int | None
    step: int | None


class JaxWatch:
    """Watch of a training within a ``with`` block; :func:`rnnlens.jax.watch` creates one.

    Attributes
    ----------
    steps
        Number of training steps so far.
    """

    def __init__(self, model: Any, options: WatchOptions) -> None:
        given = model if isinstance(model, JaxModel) else JaxModel(model)
        #: A copy, whose parameters are the current ones while a record is made.
        self._model = JaxModel(
            given.source,
            given.params,
            rng=given.rng,
            example=given.example,
            batched=given.batched,
            names=given.names,
        )
        self._library = library_of(given.source)
        self._path, self._loggers, self._resume = options.path, options.loggers, options.resume
        self._points, self._step = options.points, options.step
        schedule = Schedule(options.every, options.epochs)
        refuse_idle_arguments(options.probe, None, schedule.epochs, {})
        self._schedule = schedule if options.probe is not None else Schedule(0)
        self._loss, self._layers = options.loss, names_tuple(options.layers)
        self._stop_on, self._on_alert = options.stop_on, options.on_alert
        self._reports = checked_on_nonfinite(options.on_nonfinite) is not None
        if options.probe is None and not self._reports:
            raise InputError(
                "There is nothing to record: a compiled training step of JAX cannot be looked into from outside.",
                got="probe=None",
                expected="a batch that is traced between the steps",
                hint="probe=(x, y), loss=loss",
            )
        self._probe = self._checked_probe(options.probe, quantity_names(options.keep) or ())
        self._recorder = Recorder([], self._schedule, alerts=Alerts(options.stop_on))
        self.steps = self._start_step = self._epoch = 0
        self._last_params: Any = None  # what the last step returned, in an epoch at whose end a record is due
        self._is_open = False
        self._store: Store | None = None
        self._incidents: Incidents | None = None
        self._before: OpenedModel | None = None  # copies of the weights before the current step
        self._trained_before: dict[str, Any] | None = None  # the same in host memory, if a record is due after it

    def _checked_probe(self, probe: Any, keep: tuple[str, ...]) -> Probe | None:
        if probe is None:
            return None
        if not isinstance(probe, tuple | list) or not 1 <= len(probe) <= 3:
            expected = "(x, y) or (x, y, sample_weight)"
            raise InputError("probe= is a batch.", got=short_repr(probe), expected=expected)
        x, y, weight = (*probe, None, None)[:3]
        return Probe(x, y, weight, self._layers, keep, self._loss)

    # ---- the block

    def __enter__(self) -> Self:
        if self._is_open:
            raise InputError("This watch is open already.", hint="one with block at a time")
        rank = jax.process_index()
        self._recorder = Recorder([], self._schedule, rank=rank, alerts=Alerts(self._stop_on, self._on_alert))
        self._is_open = True
        try:
            self._begin(rank)
        except BaseException as error:
            self._is_open = False
            self._recorder.abort(type(error).__name__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrackingWarning)
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else kind.__name__)

    def close(self, reason: str = "finished") -> None:
        """End the watch, and write all records to disk. A second call does nothing."""
        if not self._is_open:
            return
        if reason == "finished":
            self._end_epoch()
        self._is_open, self._before, self._trained_before, self._last_params = False, None, None, None
        if self.steps == self._start_step:
            self._recorder.count_missed(NO_STEP)
        self._recorder.close(reason, steps=self.steps - self._start_step)

    def _begin(self, rank: int) -> None:
        adapter = adapter_for(self._model)
        if self._probe is not None:
            refuse_unknown_layers(self._layers, adapter, self._probe.bound(self._model))
        provenance = adapter.facts(self._model).provenance
        if rank == 0:
            self._recorder.sinks = sink_list = sinks(self._loggers, event_folder(self._path))
            if self._path is not None:
                self._store = Store(self._path, resume=self._resume, points=self._points, provenance=provenance)
                sink_list.insert(0, self._store)
        self.steps = self._start_step = self._steps_before()
        self._recorder.start(self.steps)
        if self._reports and self._recorder.writes:
            self._incidents = Incidents(self._path, provenance)
            self._before = self._copied()
        is_recorded = self._store is not None and self._store.last_step_of("probe") == self.steps
        if not is_recorded and self._recorder.is_due(self.steps, self._epoch):
            self._record_probe(before_training=True)
        self._keep_trained()
        self._release()

    def _steps_before(self) -> int:
        """Return how many steps were trained before: ``step=``, else those of the run."""
        if self._store is None or self._step is None:
            return self._step or (0 if self._store is None else self._store.resume_step(0))
        self._store.cut(self._step)
        return self._step

    # ---- called by the training loop

    def step(self, params: Any = None, *, loss: Any = None, batch: Any = None, steps: int = 1) -> None:
        """Count training steps, and record what is due. No error of a record is raised.

        Parameters
        ----------
        params
            What the step returned: the parameters of a function, a Linen module or a Haiku transform; the module of
            Equinox. A module of Flax NNX is changed in place, and nothing is passed.
        loss
            Loss of the step, one number, which ``on_nonfinite=`` examines.
        batch
            The data ``(x, y)`` of the step, for the report of ``on_nonfinite=``.
        steps
            Number of training steps since the last call: more than 1 after a compiled loop over steps.
        """
        if not self._is_open:
            return
        before, self.steps = self.steps, self.steps + steps
        self._last_params = params if self._schedule.is_due_after(self._epoch) else None
        try:
            with self._current(params):
                self._examine(loss, batch)
                due = any(self._recorder.is_due(n, self._epoch) for n in range(before + 1, self.steps + 1))
                if due and self._probe is not None:
                    self._record_probe(updates=self._updates() if steps == 1 else {})
                self._keep_trained()
        except Exception as error:
            self._recorder.fail_record(self.steps, error)

    @property
    def epoch(self) -> int:
        """Current epoch, from 0; a loop sets it to name it in records."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        if int(value) != self._epoch:
            self._end_epoch()
        self._epoch = int(value)

    def _end_epoch(self) -> None:
        """Record the probe with what the last step returned, if the end of this epoch is to be recorded."""
        params, self._last_params = self._last_params, None
        latest = self._recorder.latest
        is_recorded = latest is not None and latest.step == self.steps
        is_due = self._is_open and self.steps > self._start_step and self._schedule.is_due_after(self._epoch)
        if is_recorded or not is_due:
            return
        try:
            with self._current(params):
                self._record_probe()
        except Exception as error:
            self._recorder.fail_record(self.steps, error)

    serve = serve

    def __repr__(self) -> str:
        return self._recorder.describe("JaxWatch", self.steps - self._start_step, self._path)

    @property
    def record(self) -> TrainingRecord | None:
        """Last record; None before the first."""
        return self._recorder.latest

    @property
    def stop(self) -> str | None:
        """Reason to end training, after a finding of ``stop_on=``; else None: ``if watch.stop: break``."""
        return self._recorder.stop

    @property
    def gaps(self) -> list[Gap]:
        """Missing records, and the reasons."""
        return self._recorder.gaps

    # ---- the model at a step

    @contextmanager
    def _current(self, params: Any) -> Iterator[None]:
        """Hold the parameters of a step within the block: after it they may be donated to the next one."""
        self._refuse_unusable(params)
        if self._library == "equinox":
            self._model.source = params
        elif self._library != "nnx":
            self._model.params = params
        try:
            yield
        finally:
            self._release()

    def _refuse_unusable(self, params: Any) -> None:
        """Raise InputError for parameters that are absent, deleted, or inside a compiled function."""
        if self._library == "nnx":
            params = open_model(self._model, training=False).values
        elif params is None:
            hint = "watch.step(params)"
            raise InputError("The watch needs the parameters that the step returned.", got="no parameters", hint=hint)
        leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise InputError(
                "watch.step was called inside a compiled function, which runs once, while it is traced.",
                got="traced parameters",
                expected="a call between compiled steps",
                hint="scan over a chunk of steps, then watch.step(params, steps=chunk)",
            )
        if any(leaf.is_deleted() for leaf in leaves):
            raise InputError(
                "The parameters were donated to a step and do not exist any more.",
                got="deleted arrays",
                expected="the parameters that the step returned",
                hint="params, state, loss = train_step(params, state, batch); watch.step(params)",
            )

    def _release(self) -> None:
        """Drop the references to the parameters: the next step may donate them.

        Those of Flax NNX are in the user's model, which the watch keeps.
        """
        if self._library == "nnx":
            return
        if self._library == "equinox":
            self._model.source = None
        else:
            self._model.params = None

    # ---- records

    def _record_probe(
        self, *, before_training: bool = False, updates: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        probe = self._probe
        if probe is not None and self._recorder.writes:
            self._recorder.record(
                self.steps,
                lambda: probe.record(self._model, self.steps, self._epoch).with_scalars(updates),
                before_training=before_training,
            )

    def _keep_trained(self) -> None:
        """Copy the trained weights to host memory if a record is due after the next step."""
        is_due = self._recorder.writes and bool(self._recorder.sinks) and self._probe is not None
        is_due = is_due and is_due_at(self._schedule, self.steps + 1, self._epoch)
        self._trained_before = self._trained() if is_due else None

    def _trained(self) -> dict[str, Any]:
        opened = open_model(self._model, training=False)
        weights = zip(opened.weight_names, opened.values, opened.trainable, strict=True)
        return {
            name: np.array(value, dtype=jnp.result_type(value.dtype, jnp.float32))
            for name, value, trained in weights
            if trained
        }

    def _updates(self) -> dict[str, float]:
        """Return the change of the trained weights by the last step; empty if they were not kept before it."""
        return {} if self._trained_before is None else update_scalars(self._trained_before, self._trained())

    def _copied(self) -> OpenedModel:
        """Return the model with copies of its arrays, which no step can delete."""
        opened = open_model(self._model, training=False)
        values = [jnp.array(value, copy=True) for value in opened.values]
        return OpenedModel(opened.apply, values, opened.weight_names, opened.trainable, opened.library, opened.key)

    def _examine(self, loss: Any, batch: Any) -> None:
        """Write the first step whose loss, or whose update, is not finite, with the weights before it."""
        if self._incidents is None or self._incidents.written_path is not None or self._before is None:
            return
        loss = None if loss is None else float(jnp.reshape(loss, ()))
        after = self._copied()
        if is_finite(loss) and bool(_are_finite_compiled(after.values)):
            self._before = after
            return
        before, self._before = self._before, None
        x, y = (*_as_pair(batch), None, None)[:2]
        weights = dict(zip(before.weight_names, before.values, strict=True))
        found = text_or_error(lambda: self._origin_sentence(before, weights, x, y))
        step_info = {"step": self.steps, "epoch": self.epoch, "loss": loss, "found": found}
        self._incidents.report(Batch(x, y), {n: v for n, v in weights.items() if _is_number(v)}, step_info)

    def _origin_sentence(self, before: OpenedModel, weights: Mapping[str, Any], x: Any, y: Any) -> str:
        if x is None:
            return "watch.step was given no batch=, so the origin was not searched"

        def apply(params: Mapping[str, Any], *data: Any, **named: Any) -> Any:
            return before.apply([params[name] for name in before.weight_names], *data, **named)

        model = JaxModel(apply, dict(weights), names=self._model.names)
        nonfinite = find_nonfinite(model, x, y, loss=self._loss)
        if not nonfinite and y is None:
            return "in the loss or after it: pass the target, batch=(x, y), to locate it"
        return nonfinite.sentence


def _as_pair(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _is_number(value: Any) -> bool:
    return not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)


def _are_finite(values: Sequence[Any]) -> Any:
    floats = [v for v in values if jnp.issubdtype(v.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(v).all() for v in floats])) if floats else True


_are_finite_compiled = jax.jit(_are_finite)
