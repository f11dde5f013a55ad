"""Reference run: the user's model without hooks and taps, differentiated by its engine.

Certificates compare results with it. With the capture it shares only the preparation of the data, the loss and the
restoring of the model; names and layouts of weights are read here independently. A run is traced anew at every call;
only a closed model (see ``keras3_stamps.py``) reuses what was compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ...autodiff import Engine, engine
from ...errors import CertificateError
from ...recurrence.cells.registry import Registration
from ...typing import Array
from ..protocol import Batch, Cotangents, ReferenceRun, WeightLocation
from . import losses
from .cells import initial_state_weights
from .dialect import dialect_of
from .inputs import input_order
from .restore import as_found
from .run import RunRequest, call_model, memo_of, stamp_of_run, stamp_of_tensors
from .weights import attributes, has_two_biases, registration_of


def reference_run(
    model: Any,
    batch: Batch,
    cotangents: Cotangents | None = None,
    *,
    gradients: bool = True,
    regularised: bool = False,
) -> ReferenceRun:
    """Run the user's model without hooks, and differentiate it by its engine if ``gradients``.

    ``cotangents`` are those of the outputs, or a function of their values; else the loss is differentiated. Penalties
    of weights have a gradient if ``regularised``. See :meth:`rnnlens.adapters.protocol.Adapter.reference_run`.
    """
    if batch.initial_state:
        raise CertificateError("initial_state= was set by rnnlens; the model on its own starts from other states")
    keras = dialect_of(model)
    with_loss = batch.loss is not None or batch.y is not None or (gradients and cotangents is None)
    with _reference_function(model, batch, with_loss, regularised) as run:
        outputs, value, found = run.forward() if not gradients else run.backward(cotangents)
    names = names_of(model)
    grads = dict(zip(map(id, run.watched or run.job.variables), found[1], strict=True)) if found else {}
    weights = {name: grads.get(key) for key, name in names.items() if grads}
    is_flat = isinstance(batch.x, dict) and not any(map(keras.tree.is_nested, batch.x.values()))
    keys = tuple(map(str, batch.x)) if is_flat else ()
    by_input = [found[0][i] for i in input_order(keras, batch.x)] if found else []
    return ReferenceRun(outputs, value, by_input, weights, keys)


def coarsest_dtype(model: Any, batch: Batch) -> str:
    """Return the coarsest float dtype of the operations of the user's model, loss included; "" if it has none."""
    with _reference_function(model, batch, batch.loss is not None or batch.y is not None, regularised=False) as run:
        return run.engine.coarsest_dtype(run.program, run.split(None))


@contextmanager
def _reference_function(model: Any, batch: Batch, with_loss: bool, regularised: bool) -> Iterator[_ReferenceFunction]:
    """Yield the reference run of a model; restore the model after the block."""
    keras = dialect_of(model)
    loss = losses.plan(model, batch) if with_loss else None
    job = RunRequest(model, batch)
    stamp = stamp_of_run(keras, model, batch.loss) if keras.engine.compiles else None
    with as_found(model, keras, batch.seed), keras.undisturbed(model, regularised=regularised):
        arguments = job.arguments()
        # Variables that the program reads itself are differentiated directly.
        watched = [v for v in job.variables if keras.is_float(v)] if arguments["values"] is None else []
        yield _ReferenceFunction(job, watched, loss, arguments, (regularised, stamp))


class _ReferenceFunction:
    """One run of the model as a function of its float tensors: those of x, then those of its variables."""

    def __init__(
        self,
        job: RunRequest,
        watched: list[Any],
        loss: Any,
        arguments: dict[str, Any],
        closed: tuple[bool, Hashable | None],
    ) -> None:
        self.keras, self.engine, self.watched = job.keras, job.keras.engine, watched
        self.job, self.loss, self.arguments = job, loss, arguments
        self.regularised, self.stamp = closed
        self.x = self.keras.tree.flatten(arguments["x"])
        self.floats = [self.keras.is_float(t) for t in (*self.x, *(arguments["values"] or ()))]

    def forward(self) -> tuple[list[Array], float | None, None]:
        """Run the model; return its outputs, the loss (None if there is none) and None for the gradients."""
        value, outputs = self._run("forward", self.program)
        return (*self._told(outputs, value), None)

    def backward(self, cotangents: Cotangents | None) -> tuple[list[Array], float | None, Any]:
        """Run and differentiate; return outputs, loss, and gradients at the leaves of x and at the variables."""
        given = None if cotangents is None else self._as_tensors(cotangents)
        (value, outputs), grads = self._run("backward", self._differentiated, given)
        arrays = iter([None if g is None else np.asarray(plain_of(self.engine, g)) for g in grads])
        every = [next(arrays) if is_float else None for is_float in self.floats] + list(arrays)
        return (*self._told(outputs, value), (every[: len(self.x)], every[len(self.x) :]))

    def _as_tensors(self, cotangents: Cotangents) -> list[Any]:
        """Return the cotangents as tensors; a function of the outputs' values needs a run of the model."""
        if not callable(cotangents):
            return [None if c is None else self.keras.ops.convert_to_tensor(c) for c in cotangents]
        with as_found(self.job.model, self.keras, self.job.batch.seed):  # the run below starts from the same states
            _, values = self._run("forward", self.program)
        found = cotangents([np.asarray(self.engine.to_array(t)) for t in values])
        return [
            None if c is None else self.keras.ops.convert_to_tensor(c, dtype=t.dtype)
            for t, c in zip(values, found, strict=True)
        ]

    def _told(self, outputs: Any, value: Any) -> tuple[list[Array], float | None]:
        arrays = [np.asarray(plain_of(self.engine, t)) for t in outputs]
        return arrays, None if value is None else float(plain_of(self.engine, value))

    def _run(self, name: str, function: Callable[[Any, Any], Any], given: list[Any] | None = None) -> Any:
        """Call ``function`` on the floats and the other arguments, compiled if the engine compiles.

        A closed model reuses what was compiled before.
        """
        arguments = self.split(given)
        eager = getattr(self.job.model, "run_eagerly", False) or (self.stamp is None and self.keras.is_short(self.x))
        if eager or not self.engine.compiles:
            return function(*arguments)
        options = (name, self.job.batch.training, self.loss is None, self.regularised, tuple(self.floats))
        memo = memo_of(
            self.job.model, ("plain", *options, stamp_of_tensors(self.keras, (self.arguments, given))), self.stamp
        )
        return memo.once("run", lambda: self.engine.compile(function, arguments, memo))(*arguments)

    def split(self, given: list[Any] | None) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of :meth:`program`: the floats of x and of the variables, and everything else."""
        rest = {**{key: self.arguments[key] for key in ("y", "sample_weight", "seeds")}, "given": given}
        every = [*self.x, *(self.arguments["values"] or ())]
        sources = [t for t, is_float in zip(every, self.floats, strict=True) if is_float]
        others = [t for t, is_float in zip(every, self.floats, strict=True) if not is_float]
        return sources, {**rest, "others": others}

    def program(self, sources: Sequence[Any], rest: Any) -> tuple[Any, list[Any]]:
        """Run the model on the given values; return (loss or None, outputs)."""
        mine, others = iter(sources), iter(rest["others"])
        every = [next(mine) if is_float else next(others) for is_float in self.floats]
        keras, job, count = self.keras, self.job, len(self.x)
        x = keras.tree.pack_sequence_as(self.arguments["x"], every[:count])
        with keras.running(job.model, every[count:] or None, rest["seeds"], {}, lambda key, tensor: tensor):
            outputs = call_model(job.model, x, job.batch.training)
            value = None if self.loss is None else self.loss(x, rest["y"], outputs, rest["sample_weight"])
        return value, keras.tree.flatten(outputs)

    def _differentiated(self, sources: Sequence[Any], rest: Any) -> Any:
        """Return ((loss, outputs), gradients at the sources).

        The gradients are of the loss, or of the sum of the outputs times their cotangents.
        """
        given = rest["given"]

        def target(sources: Sequence[Any]) -> tuple[Any, Any]:
            value, outputs = self.program(sources, rest)
            if given is None:
                return value, (value, outputs)
            parts = [self.keras.ops.sum(t * c) for t, c in zip(outputs, given, strict=True) if c is not None]
            return sum(parts[1:], start=parts[0]), (value, outputs)

        return _GRADIENTS[self.engine.name](target, list(sources), self.watched)


def _by_jax(target: Any, sources: list[Any], watched: list[Any]) -> Any:
    del watched  # only variables of TensorFlow
    import jax

    (_, told), grads = jax.value_and_grad(target, has_aux=True)(sources)
    return told, grads


def _by_tensorflow(target: Any, sources: list[Any], watched: list[Any]) -> Any:
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        # A variable of Keras 3 wraps one of TensorFlow.
        watched = [v if isinstance(v, tf.Variable) else v.value for v in watched]
        tape.watch([*sources, *watched])
        value, told = target(sources)
    grads = tape.gradient(value, [*sources, *watched], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return told, [tf.convert_to_tensor(g) for g in grads]


def _by_torch(target: Any, sources: list[Any], watched: list[Any]) -> Any:
    del watched  # only variables of TensorFlow
    import torch

    torch_engine: Any = engine("torch")
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in sources]
        # The model may change its inputs in place, which torch forbids for leaves.
        value, (loss, outputs) = target([t.clone() for t in leaves])
        grads = torch_engine.backward_pass([value], leaves) if value.requires_grad else [None] * len(leaves)
    return (loss, outputs), [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]


_GRADIENTS = {"jax": _by_jax, "tensorflow": _by_tensorflow, "torch": _by_torch}


def plain_of(engine: Engine, tensor: Any) -> Any:
    """Return a tensor on any device as a NumPy array."""
    array = engine.to_array(tensor)
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def names_of(model: Any) -> dict[int, str]:
    """Return a unique name for each variable, by the variable's id: its path, numbered if several share it."""
    seen: dict[str, int] = {}
    found: dict[int, str] = {}
    for variable in model.variables:
        if id(variable) not in found:
            path = dialect_of(variable).path(variable)
            count = seen[path] = seen.get(path, 0) + 1
            found[id(variable)] = path if count == 1 else f"{path}#{count}"
    return found


def place(model: Any, layer: str, direction: str | None, key: str) -> WeightLocation | None:
    """Return the Keras variable that contains the weight ``key`` of a layer, or None if there is no single one.

    See :meth:`rnnlens.adapters.protocol.Adapter.place`.
    """
    for found in _called(model, layer.partition("#")[0]):
        sides = ("forward_layer", "backward_layer") if direction is not None else ()
        halves = [getattr(found, side, None) for side in sides]
        half = next((h for h in halves if h is not None and h.go_backwards == (direction == "backward")), found)
        recurrent = isinstance(half, dialect_of(half).layers.RNN)
        cell = half.cell if recurrent else half if hasattr(half, "state_size") else None
        place = _within(model, half, key) if cell is None else _of_cell(model, cell, key)
        if place is not None:
            return place
    return None


def _of_cell(model: Any, cell: Any, key: str) -> WeightLocation | None:
    """Return the variable, or the row of a variable, that contains the weight ``key`` of a recurrent cell."""
    known = registration_of(cell)
    if known is not None:
        return _registered_place(model, cell, known, key.rpartition("/")[2])
    started = key.rpartition("/")[2] in initial_state_weights(dialect_of(model), cell)
    # A GRU with reset_after has both biases as the rows of one variable.
    both = has_two_biases(cell) and len(cell.bias.shape) == 2 and key in ("bias", "recurrent_bias")
    found = _within(model, cell, "bias" if both else key, ("bias", "recurrent_bias").index(key) if both else None)
    return replace(found, tied=True) if found is not None and started else found


def _within(model: Any, owner: Any, key: str, row: int | None = None) -> WeightLocation | None:
    """Return the variable of a cell or layer that has the name ``key``.

    Returns None if not exactly one variable has it. With ``row``, the location is that row of the variable.
    """
    wanted = key.rpartition("/")[2]
    keras, weights = dialect_of(model), list(getattr(owner, "weights", ()))
    below = [v for v in weights if keras.path(v).endswith(f"/{key}")]
    found = [v for v in weights if keras.variable_name(v) == wanted] or below
    if len(found) > 1:
        found = [v for v in found if keras.path(v).endswith(f"/{key}")]
    name = names_of(model).get(id(found[0])) if len(found) == 1 else None
    if name is None:
        return None
    return WeightLocation(
        name,
        (lambda array: array) if row is None else (lambda array: array[row]),
        str(row),
        id(found[0]) in tied_variables(model),
    )


def _registered_place(model: Any, cell: Any, known: Registration, name: str) -> WeightLocation | None:
    """Return the variable that is a weight of a registered cell; None if several variables compose it."""
    single = known.single(name)
    variable = None if single is None else attributes(cell).get(single[0])
    found = names_of(model).get(id(variable))
    if single is None or found is None:
        return None
    tied = id(variable) in tied_variables(model)
    return WeightLocation(found, (lambda array: array.T) if single[1] else (lambda array: array), tied=tied)


def tied_variables(model: Any) -> set[int]:
    """Return the ids of the variables that more than one layer of the model has among its own."""
    once: set[int] = set()
    again: set[int] = set()
    for layer in model._flatten_layers():
        own = {id(v) for v in dialect_of(layer).own_variables(layer)}
        again |= own & once
        once |= own
    return again


def _called(model: Any, name: str) -> Iterator[Any]:
    """Yield the layers at the path of names ``name``, such as ``"encoder/lstm"``, in nested models."""
    if name == model.name:
        yield model
    for child in model._flatten_layers(include_self=False, recursive=False):
        if child.name == name:
            yield child
        elif name.startswith(f"{child.name}/"):
            yield from _called(child, name[len(child.name) + 1 :])
        elif isinstance(model, dialect_of(model).Sequential) and child is getattr(model, "_functional", None):
            yield from _called(child, name)
