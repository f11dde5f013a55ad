"""One run of a model with hooks, compiled and cached per model or eager; the model is left unchanged."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ...autodiff import Engine, Memo, Tap
from ...errors import raised_by
from ...settings import current
from ..shared.call_errors import explain_layers, explain_loss
from .dialect import Dialect
from .hooks import (
    ChangedStateError,
    LayerCall,
    LayerRecorder,
    RunRequest,
    SeparateCallsError,
    Starts,
    SteppedLayerError,
)
from .restore import borrowed, open_log, python_state_restored

Result = TypeVar("Result")


def program(job: RunRequest, arguments: Mapping[str, Any], tap: Tap) -> tuple[Any, Any]:
    """Run ``job`` once: return (loss or None, (tensors of each call, outputs of the model))."""
    keras, recorder = job.keras, LayerRecorder(job, tap, arguments["initial_state"] or {})
    x, y, weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    x = _tap_tensors(job, "model|input", x, tap)
    # An engine may call the program several times; each call must start from the user's model, unchanged.
    values, seeds = arguments["values"], arguments["seeds"]
    with (
        python_state_restored(open_log(job.model)),
        keras.variables_substituted(job.model, values, seeds, job.weights, tap),
    ):
        with recorder.layers_hooked():
            with raised_by("Your model", partial(explain_layers, job.batch.x)):
                outputs = call_model(job.model, x, job.batch.training)
            outputs = _tap_tensors(job, "model|output", outputs, tap)
        loss = job.batch.loss
        with raised_by("Your loss", partial(explain_loss, loss, outputs, job.batch.y, output_first=False)):
            value = None if job.loss is None else job.loss(x, y, outputs, weight)
        has_added_losses = keras.adds_losses(job.model)
    for call in job.calls:
        call.arrays = stack_steps(keras, call.arrays)
    recorded_outputs = outputs if "outputs" in job.record_names else None
    if "masks" in job.record_names:
        recorded_outputs = {
            "outputs": outputs,
            "masks": [keras.mask_of(t) for t in keras.tree.flatten(outputs)],
            "adds": keras.ops.convert_to_tensor(has_added_losses),
        }
    return value, ([call.arrays for call in job.calls], recorded_outputs)


def _tap_tensors(job: RunRequest, kind: str, tree: Any, tap: Tap) -> Any:
    """Tap those inputs or outputs of the model that are requested by name or kind; return the structure with taps.

    Where the loss may be computed from the logits of an output, only outputs that are requested by name have taps.
    """
    keras = job.keras
    flat = keras.tree.flatten(tree)
    taps_floats = kind in job.tap_names and not any(keras.has_logits(t) for t in flat)
    for i, tensor in enumerate(flat):
        key = f"{kind}/{i}"
        if key in job.tap_names or (taps_floats and keras.is_float(tensor)):
            flat[i] = keras.with_mask(tensor, tap(key, tensor))
    return keras.tree.pack_sequence_as(tree, flat)


@dataclass
class RunResult:
    """Arrays of each call and gradients by tap key of one run, and as tensors the loss and the model's outputs."""

    calls: list[LayerCall]
    gradients: dict[str, Any]
    loss: Any
    outputs: Any


def run(job: RunRequest) -> RunResult:
    """Run ``job`` and differentiate its loss with respect to each tap; the model is restored afterwards."""
    return run_with_loops(job, _run_once)


def run_with_loops(job: RunRequest, attempt: Callable[[RunRequest], Result]) -> Result:
    """Call ``attempt(job)``; if it finds a layer or cell called in a loop, add that to the request and repeat it."""
    changes_states = False
    while True:
        try:
            return attempt(with_starts(job) if changes_states else job)
        except SteppedLayerError as error:
            job = replace(job, stepped_layers=job.stepped_layers | {error.layer}, calls=[])
        except SeparateCallsError as error:
            job = replace(
                job,
                stepped_layers=job.stepped_layers - {error.layer},
                separate_layers=job.separate_layers | {error.layer},
                calls=[],
            )
        except ChangedStateError:
            changes_states = True


def _run_once(job: RunRequest) -> RunResult:
    engine, stamp = job.keras.engine, stamp_of_request(job)  # a borrowed model has another loss
    with borrowed(job.model, job.keras, job.batch.seed, regularised=False):
        arguments = job.arguments()
        memo = None if getattr(job.model, "run_eagerly", False) else memo_for(job, arguments, stamp)
        with raised_by("The forward or backward pass of your model"):
            results, calls = _run_compiled_or_eager(job, arguments, engine, memo)
    value, (arrays, outputs), gradients = results

    def as_arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: engine.to_array(tensor) for name, tensor in tensors.items()}

    recorded = [replace(call, arrays=as_arrays(tensors)) for call, tensors in zip(calls, arrays, strict=True)]
    return RunResult(recorded, as_arrays(stack_steps(job.keras, gradients)), value, outputs)


def with_starts(job: RunRequest) -> RunRequest:
    """Add to a request which calls of each cell start a recurrence: those whose states depend on no earlier call.

    They are found by one run per cell, with NaN in all that the cell returns. A layer of which each call starts one
    is not called in a loop over the steps.
    """
    no_starts: Starts = {
        site.name: frozenset() for site in job.hooked_sites if site.is_loop or site.name in job.stepped_layers
    }
    starts, separate_layers = {}, set[str]()
    for name in no_starts:
        trial_job = replace(
            job, nan_site=name, starts=no_starts, gradients=False, loss=None, record_names=frozenset(), calls=[]
        )
        with borrowed(job.model, job.keras, job.batch.seed):
            _run_program(trial_job, trial_job.arguments(), job.keras.engine)
        arrays = next((call.arrays for call in trial_job.calls if call.layer_name == name), {})
        states = [job.keras.value_of(a) for key, a in arrays.items() if key.startswith("received/")]
        nan_by_step = [np.isnan(np.moveaxis(state, 1, 0)).reshape(state.shape[1], -1).any(axis=1) for state in states]
        starts[name] = frozenset(np.flatnonzero(~np.any(nan_by_step, axis=0)).tolist() if states else ())
        if name in job.stepped_layers and len(starts[name]) == (states[0].shape[1] if states else 0):
            separate_layers.add(name)
    starts = {name: calls for name, calls in starts.items() if name not in separate_layers}
    return replace(
        job,
        starts=starts,
        stepped_layers=job.stepped_layers - separate_layers,
        separate_layers=job.separate_layers | separate_layers,
        calls=[],
    )


def stack_steps(keras: Dialect, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Join tensors of single steps, named ``"output@3"``, along a time axis: ``"output"`` (sample, time, unit)."""
    steps: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        steps.setdefault(name.partition("@")[0], []).append(tensor)
    return {
        name: keras.ops.stack(step_tensors, axis=1) if f"{name}@0" in tensors else step_tensors[0]
        for name, step_tensors in steps.items()
    }


def _run_program(job: RunRequest, arguments: Any, engine: Engine) -> Any:
    if job.loss is None or not job.gradients:
        value, aux = engine.forward(lambda tap: program(job, arguments, tap))
        return value, aux, {}
    return engine.gradients(lambda tap: program(job, arguments, tap))


def _run_compiled_or_eager(
    job: RunRequest, arguments: Any, engine: Engine, memo: Memo | None
) -> tuple[Any, list[LayerCall]]:
    if memo is not None:
        try:
            compiled_run = memo.once(
                "run", lambda: engine.compile(lambda a: _run_program(job, a, engine), (arguments,), memo)
            )
            calls = memo.once("calls", lambda: [replace(c, arrays={}) for c in job.calls])
            return compiled_run(arguments), calls
        except (ChangedStateError, SeparateCallsError):
            discard_memo(job.model, memo)
            raise
        except Exception:
            # Some models cannot be compiled. An error of the user's code is raised again by the eager run.
            discard_memo(job.model, memo)
    return _run_program(job, arguments, engine), job.calls


def stamp_of_request(job: RunRequest) -> Hashable | None:
    """Return the stamp of a request's model and loss, on an engine that compiles; the model is not borrowed yet."""
    return stamp_of_run(job.keras, job.model, job.batch.loss) if job.keras.engine.compiles else None


def memo_for(job: RunRequest, arguments: Any, stamp: Hashable | None, *more_keys: Hashable) -> Memo | None:
    """Return the cache of compiled functions for this request and its stamp; None if the run is not compiled."""
    if not job.keras.engine.compiles:
        return None
    names = tuple((site.name, site.direction) for site in job.sites), tuple(job.other_layers), tuple(job.weights)
    options = (job.batch.training, job.loss is None, job.gradients, job.tap_names, job.record_names)
    more_keys = (*more_keys, tuple(sorted(job.starts.items())), job.stepped_layers, job.separate_layers)
    request_key = (names, options, stamp_of_tensors(job.keras, arguments), *more_keys)
    if stamp is None and job.keras.is_short(job.data["x"]):
        return None
    return memo_of(job.model, request_key, stamp)


def call_model(model: Any, x: Any, training: bool) -> Any:
    """Call ``model`` on ``x``, with ``training`` if its ``call`` has that argument; return its outputs."""
    # Keras 2 has no such attribute: each of its models takes ``training`` and passes it to its layers.
    return model(x, training=training) if getattr(model, "_call_has_training_arg", True) else model(x)


class CompiledTraining:
    """One training by Keras with a compiled step, which runs no user code again: nor do our runs within it.

    Outside of training a run of user code is traced again at each call, since the code may read anything.
    """

    def __init__(self, model: Any) -> None:
        self._eager = bool(getattr(model, "run_eagerly", False))
        self.cells: dict[int, tuple[Hashable, Any]] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Cache compiled functions in this block, and use those that earlier blocks of the same training cached."""
        token = _compiled_training.set(None if self._eager else self)
        try:
            yield
        finally:
            _compiled_training.reset(token)


_compiled_training: ContextVar[CompiledTraining | None] = ContextVar("compiled_training", default=None)


def stamp_of_run(keras: Dialect, model: Any, loss: Any) -> Hashable | None:
    """Return a hashable that changes with everything a run reads; None if that is not known."""
    return keras.stamp(model, loss, training=_compiled_training.get())


def compiled_cell(keras: Dialect, cell: Any, make: Callable[[], Result]) -> Result:
    """Return the compiled step of a cell, created by ``make()`` once per watched training and then reused."""
    training = _compiled_training.get()
    stamp = None if training is None else stamp_of_run(keras, cell, None)
    if training is None or stamp is None:
        return make()
    if training.cells.get(id(cell), (None, None))[0] != stamp:
        training.cells[id(cell)] = stamp, make()
    return training.cells[id(cell)][1]  # type: ignore[no-any-return]


_memos: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, Memo]] = weakref.WeakKeyDictionary()


def memo_of(model: Any, request_key: Hashable, stamp: Hashable | None) -> Memo:
    """Return the cache of compiled functions for one kind of request on ``model``.

    Without a ``stamp``, the run may read anything: it gets a new cache, which shares only executables with the old
    one.
    """
    memos = _memos.setdefault(model, OrderedDict())
    memo = memos.setdefault((request_key, stamp), Memo())
    memos.move_to_end((request_key, stamp))
    while len(memos) > current().compiled:
        memos.popitem(last=False)
    return memo if stamp is not None else Memo(memo.executables)


def stamp_of_tensors(keras: Dialect, tree: Any) -> Hashable:
    """Return a hashable of structure, shapes and dtypes of a tree, and of the sharding of JAX arrays."""
    paths = keras.tree.flatten_with_path(tree)
    return tuple(
        (path, None if t is None else (tuple(t.shape), str(t.dtype), getattr(t, "sharding", None))) for path, t in paths
    )


def discard_memo(model: Any, memo: Memo) -> None:
    """Delete a cache of compiled functions that an error left incomplete."""
    memos = _memos.get(model, OrderedDict())
    for key in [key for key, cached_memo in memos.items() if cached_memo is memo]:
        del memos[key]
