"""Runs a model once, listening, without leaving a trace in it: compiled and cached per model, or eagerly."""

from __future__ import annotations

import contextvars
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import numpy as np

from ...errors import raised_by
from . import loss as losses
from .data import Data
from .discover import Site
from .engines import Engine, Tap
from .found import SEEDS, as_found, global_state
from .hooks import Call, Listener
from .stamps import stamp, stamp_of_layers, stamp_of_tensors

_eagerly: contextvars.ContextVar[bool] = contextvars.ContextVar("eagerly", default=False)
_CACHED_PER_MODEL = 8


@contextmanager
def eagerly() -> Iterator[None]:
    """Within this block nothing is compiled: quicker for a single run on little data."""
    token = _eagerly.set(True)
    try:
        yield
    finally:
        _eagerly.reset(token)


@dataclass
class Job:
    """What to run and what to listen to. Alive during one run only: nothing cached refers to it."""

    model: Any
    data: Data
    sites: Sequence[Site]
    plain: Mapping[str, Any]
    training: bool
    seed: int | None = None
    loss: losses.Loss | None = None
    loss_given: Any = None
    wanted: frozenset[str] = frozenset()
    keep: frozenset[str] = frozenset()
    weights: Mapping[str, Any] = field(default_factory=dict)
    tap_inputs: bool = False
    calls: list[Call] = field(default_factory=list)

    @cached_property
    def variables(self) -> list[Any]:
        """All variables whose values the run may read; those that it makes itself are not among them."""
        seeds = global_state.get_global_attribute(SEEDS)
        metrics = getattr(self.model, "metrics_variables", [])
        found = [*self.model.variables, *metrics, *([] if seeds is None else [seeds.state])]
        return [v for v in {id(v): v for v in found}.values() if v._value is not None]

    def arguments(self, engine: Engine) -> dict[str, Any]:
        """Everything that changes from run to run, as one tree of tensors."""
        variables = self.variables
        random = _seed_states(variables)
        seeds = [
            keras.ops.convert_to_tensor(v) if self.seed is None else _seeded(v, self.seed, i)
            for i, v in enumerate(random)
        ]
        return {**self.data.arrays(), "values": engine.values(variables), "seeds": seeds}


def program(job: Job, arguments: Mapping[str, Any], tap: Tap) -> tuple[Any, Any]:
    """Run ``job`` once: (loss or None, (tensors of every call, outputs of the model))."""
    variables = job.variables
    values = (
        {} if arguments["values"] is None else {id(v): a for v, a in zip(variables, arguments["values"], strict=True)}
    )
    values.update({id(v): a for v, a in zip(_seed_states(variables), arguments["seeds"], strict=True)})
    for key, variable in job.weights.items():
        values[id(variable)] = tap(f"weight|{key}", values.get(id(variable), keras.ops.convert_to_tensor(variable)))
    for variable in variables:
        # Keras asks the scope itself for the value of a regularised weight.
        if variable.regularizer is not None and id(variable) not in values:
            values[id(variable)] = keras.ops.convert_to_tensor(variable)
    for variable in variables:
        # Within a stateless scope Keras hands a regulariser None for a variable that the scope does not hold.
        if variable.regularizer is not None:
            values.setdefault(id(variable), keras.ops.convert_to_tensor(variable))
    mapping = [(v, values[id(v)]) for v in variables if id(v) in values]
    listener = Listener(tap, job.wanted, job.keep, arguments["initial_state"] or {})
    x, y, weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    if job.tap_inputs:
        flat = [tap(f"model|input/{i}", t) if _is_float(t) else t for i, t in enumerate(keras.tree.flatten(x))]
        x = keras.tree.pack_sequence_as(x, flat)
    with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False):
        with listener.listening(job.sites, job.plain):
            with raised_by("Your model"):
                outputs = _call(job.model, x, job.training)
            outputs = _tapped(outputs, job.wanted, tap)
        with raised_by("Your loss"):
            value = None if job.loss is None else job.loss(x, y, outputs, weight)
    job.calls[:] = listener.calls
    kept = outputs if "outputs" in job.keep else None
    return value, ([call.arrays for call in listener.calls], kept)


def _tapped(outputs: Any, wanted: frozenset[str], tap: Tap) -> Any:
    """The outputs of the model, tapped where they are wanted themselves."""
    keys = [f"model|output/{i}" for i in range(len(keras.tree.flatten(outputs)))]
    if wanted.isdisjoint(keys):
        return outputs
    flat = zip(keys, keras.tree.flatten(outputs), strict=True)
    return keras.tree.pack_sequence_as(outputs, [tap(key, t) if key in wanted else t for key, t in flat])


@dataclass
class Result:
    """Tensors of one run: per call, gradients by tap, the loss and the outputs of the model."""

    calls: list[Call]
    gradients: dict[str, Any]
    loss: Any
    outputs: Any


def run(job: Job, engine: Engine) -> Result:
    """Run ``job`` and differentiate its loss with respect to every tap; the model is left as it was found."""
    with as_found(job.model, engine, job.seed):
        arguments = job.arguments(engine)
        compile_it = not (_eagerly.get() or getattr(job.model, "run_eagerly", False))
        key = key_of(job, arguments) if compile_it else None
        with losses.undisturbed(job.model), raised_by("Your model, run or differentiated,"):
            raw, calls = _compiled_or_eager(job, arguments, engine, key)
    value, (arrays, outputs), gradients = raw
    made = [Call(c.place, c.half, c.index, a) for c, a in zip(calls, arrays, strict=True)]
    return Result(made, gradients, value, outputs)


def _body(job: Job, arguments: Any, engine: Engine) -> Any:
    if job.loss is None:
        value, aux = engine.forward(lambda tap: program(job, arguments, tap))
        return value, aux, {}
    return engine.gradients(lambda tap: program(job, arguments, tap))


@dataclass
class _Entry:
    """A compiled run. ``live`` holds the job only while it runs, so that no model is kept alive by its cache."""

    live: list[Job] = field(default_factory=list)
    compiled: Callable[[Any], Any] | None = None
    calls: list[Call] = field(default_factory=list)


_cache: weakref.WeakKeyDictionary[Any, OrderedDict[Any, _Entry]] = weakref.WeakKeyDictionary()


def _compiled_or_eager(job: Job, arguments: Any, engine: Engine, key: Any) -> tuple[Any, list[Call]]:
    if key is not None:
        entry = _entry(job, key, engine)
        entry.live.append(job)
        try:
            assert entry.compiled is not None
            return entry.compiled(arguments), entry.calls
        except Exception:
            # Not everything can be compiled. If it was the user's own error, running eagerly raises it unchanged.
            _cache.get(job.model, OrderedDict()).pop(key, None)
        finally:
            entry.live.clear()
    return _body(job, arguments, engine), job.calls


def _entry(job: Job, key: Any, engine: Engine) -> _Entry:
    entries = _cache.setdefault(job.model, OrderedDict())
    entry = entries.get(key)
    if entry is None:
        entry = entries[key] = _Entry()
        live, calls = entry.live, entry.calls

        def body(arguments: Any) -> Any:
            result = _body(live[0], arguments, engine)
            calls[:] = [Call(c.place, c.half, c.index) for c in live[0].calls]
            return result

        entry.compiled = engine.compile(body)
    entries.move_to_end(key)
    while len(entries) > _CACHED_PER_MODEL:
        entries.popitem(last=False)
    return entry


def key_of(job: Job, arguments: Any) -> Any:
    """Everything on which a compiled run depends; None where that cannot be told, and nothing is cached."""
    loss = stamp(job.loss_given if job.loss_given is not None else getattr(job.model, "_compile_loss", None))
    layers = stamp_of_layers(job.model)
    names = tuple(site.name for site in job.sites), tuple(job.plain), tuple(job.weights)
    options = (job.training, job.loss is None, job.tap_inputs, job.wanted, job.keep)
    return (names, options, loss, layers, stamp_of_tensors(arguments))


def _call(model: Any, x: Any, training: bool) -> Any:
    return model(x, training=training) if getattr(model, "_call_has_training_arg", False) else model(x)


def _is_float(tensor: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)))


def _seed_states(variables: Sequence[Any]) -> list[Any]:
    return [v for v in variables if v.name == "seed_generator_state"]


def _seeded(variable: Any, seed: int, index: int) -> Any:
    # Torch adds the two numbers of a seed, so neighbouring pairs would meet.
    mixed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) % 2**31
    return keras.ops.convert_to_tensor([mixed, 0], dtype=variable.dtype)
