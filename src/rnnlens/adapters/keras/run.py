"""Runs a model once, listening, without leaving a trace in it: compiled and cached per model, or eagerly."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import numpy as np

from ...autodiff import Engine, Memo, Tap
from ...errors import raised_by
from . import loss as losses
from .data import Data
from .discover import Site
from .found import SEEDS, as_found, global_state
from .hooks import Call, Listener
from .memos import forget, memo_of
from .remember import unchanged
from .stamps import stamp_of_run, stamp_of_tensors


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
    gradients: bool = True
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
        return {**self.data.arrays(), "values": engine.values([v._value for v in variables]), "seeds": seeds}


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
        # Within a stateless scope Keras hands a regulariser None for a variable that the scope does not hold.
        if variable.regularizer is not None:
            values.setdefault(id(variable), keras.ops.convert_to_tensor(variable))
    mapping = [(v, values[id(v)]) for v in variables if id(v) in values]
    listener = Listener(tap, job.wanted, job.keep, arguments["initial_state"] or {})
    x, y, weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    if job.tap_inputs:
        flat = [tap(f"model|input/{i}", t) if _is_float(t) else t for i, t in enumerate(keras.tree.flatten(x))]
        x = keras.tree.pack_sequence_as(x, flat)
    # An engine may go through the program several times: each time the model has to be the one that the user has.
    with unchanged(job.model), keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False):
        with listener.listening(job.sites, job.plain):
            with raised_by("Your model"):
                outputs = call_model(job.model, x, job.training)
            outputs = _tapped(outputs, job.wanted, tap)
        with raised_by("Your loss"):
            value = None if job.loss is None else job.loss(x, y, outputs, weight)
        adds = any(la._get_own_losses() and la.activity_regularizer is None for la in job.model._flatten_layers())
    job.calls[:] = listener.calls
    kept = outputs if "outputs" in job.keep else None
    if "masks" in job.keep:
        kept = {"outputs": outputs, "masks": _masks(outputs), "adds": keras.ops.convert_to_tensor(adds)}
    return value, ([call.arrays for call in listener.calls], kept)


def _masks(outputs: Any) -> list[Any]:
    """The masks that Keras attached to the outputs of the model; None where there is none."""
    return [keras.src.backend.get_keras_mask(tensor) for tensor in keras.tree.flatten(outputs)]


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
        memo = None if getattr(job.model, "run_eagerly", False) else memo_for(job, arguments, engine)
        with losses.undisturbed(job.model), raised_by("Your model, run or differentiated,"):
            raw, calls = _compiled_or_eager(job, arguments, engine, memo)
    value, (arrays, outputs), gradients = raw
    made = [Call(c.place, c.half, c.index, a) for c, a in zip(calls, arrays, strict=True)]
    return Result(made, gradients, value, outputs)


def _body(job: Job, arguments: Any, engine: Engine) -> Any:
    if job.loss is None or not job.gradients:
        value, aux = engine.forward(lambda tap: program(job, arguments, tap))
        return value, aux, {}
    return engine.gradients(lambda tap: program(job, arguments, tap))


def _compiled_or_eager(job: Job, arguments: Any, engine: Engine, memo: Memo | None) -> tuple[Any, list[Call]]:
    if memo is not None:
        try:
            run = memo.once("run", lambda: engine.compile(lambda a: _body(job, a, engine), (arguments,), memo))
            calls = memo.once("calls", lambda: [Call(c.place, c.half, c.index) for c in job.calls])
            return run(arguments), calls
        except Exception:
            # Not everything can be compiled. If it was the user's own error, running eagerly raises it unchanged.
            forget(job.model, memo)
    return _body(job, arguments, engine), job.calls


def memo_for(job: Job, arguments: Any, engine: Engine, *more: Hashable) -> Memo | None:
    """What was compiled for the same question about the same model; None where nothing is to be compiled."""
    if not engine.compiles:
        return None
    names = tuple((site.name, site.direction) for site in job.sites), tuple(job.plain), tuple(job.weights)
    options = (job.training, job.loss is None, job.gradients, job.tap_inputs, job.wanted, job.keep)
    question = (names, options, stamp_of_tensors(arguments), *more)
    return memo_of(job.model, question, stamp_of_run(job.model, job.loss_given))


def call_model(model: Any, x: Any, training: bool) -> Any:
    """The outputs of ``model``, told whether it trains where it asks for that."""
    return model(x, training=training) if getattr(model, "_call_has_training_arg", False) else model(x)


def _is_float(tensor: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)))


def _seed_states(variables: Sequence[Any]) -> list[Any]:
    return [v for v in variables if v.name == "seed_generator_state"]


def _seeded(variable: Any, seed: int, index: int) -> Any:
    # Torch adds the two numbers of a seed, so neighbouring pairs would meet.
    mixed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) % 2**31
    return keras.ops.convert_to_tensor([mixed, 0], dtype=variable.dtype)
