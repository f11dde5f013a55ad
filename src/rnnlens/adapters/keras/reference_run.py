"""Reference run: the user's model without hooks and taps, differentiated by its engine.

Certificates compare results with it. With the capture it shares only the preparation of the data, the loss and the
restoring of the model; names and layouts of weights are read here independently. A run is traced anew at every call;
only a closed model (see ``keras3_stamps.py``) reuses what was compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ...autodiff import engine
from ...autodiff.tensors import to_numpy
from ...errors import CertificateError
from ...typing import Array
from ..protocol import Batch, Cotangents, ReferenceRun, WeightLocation
from . import losses
from .cells import initial_state_weights
from .dialect import dialect_of
from .discover import root_name
from .hooks import RunRequest
from .inputs import input_order
from .restore import as_found
from .run import call_model, memo_of, stamp_of_run, stamp_of_tensors
from .weights import attributes, has_two_biases, registration_of


def reference_run(
    model: Any,
    batch: Batch,
    cotangents: Cotangents | None = None,
    *,
    gradients: bool = True,
    regularised: bool = False,
) -> ReferenceRun:
    """Run the user's model without hooks; with ``gradients`` also differentiate it by its backend's own autodiff.

    ``cotangents`` are those of the outputs, or a function of their values; else the loss is differentiated. Penalties
    of weights have a gradient if ``regularised``. See :meth:`rnnlens.adapters.protocol.Adapter.reference_run`.
    """
    if batch.initial_state:
        raise CertificateError("initial_state= was set by rnnlens; the model on its own starts from other states")
    keras = dialect_of(model)
    with_loss = batch.loss is not None or batch.y is not None or (gradients and cotangents is None)
    with _reference_function(model, batch, with_loss, regularised) as run:
        outputs, value, grads = run.results(cotangents, gradients)
    of_variables = {id(variable): grads.get(len(run.x) + i) for i, variable in enumerate(run.job.variables)}
    weights = {name: of_variables.get(key) for key, name in names_of(model).items() if gradients}
    is_flat = isinstance(batch.x, dict) and not any(map(keras.tree.is_nested, batch.x.values()))
    keys = tuple(map(str, batch.x)) if is_flat else ()
    return ReferenceRun(outputs, value, [grads.get(i) for i in input_order(keras, batch.x) if gradients], weights, keys)


def coarsest_dtype(model: Any, batch: Batch) -> str:
    """Return the coarsest float dtype of the operations of the user's model, loss included; "" if it has none."""
    with _reference_function(model, batch, batch.loss is not None or batch.y is not None, regularised=False) as run:
        return run.job.keras.engine.coarsest_dtype(run.program, run.split(None))


@contextmanager
def _reference_function(model: Any, batch: Batch, with_loss: bool, regularised: bool) -> Iterator[_ReferenceFunction]:
    """Yield a function that runs the unmodified model and differentiates it; restore the model after the block."""
    keras = dialect_of(model)
    loss = losses.plan(model, batch) if with_loss else None
    stamp = stamp_of_run(keras, model, batch.loss) if keras.engine.compiles else None
    with as_found(model, keras, batch.seed), keras.undisturbed(model, regularised=regularised):
        yield _ReferenceFunction(RunRequest(model, batch, loss=loss), regularised, stamp)


class _ReferenceFunction:
    """One run of the model as a function of its float tensors, by number: the leaves of x, then the variables.

    Variables that the program reads itself are no arguments; they are differentiated directly.
    """

    def __init__(self, job: RunRequest, regularised: bool, stamp: Hashable | None) -> None:
        self.job, self.regularised, self.stamp = job, regularised, stamp
        self.arguments = job.arguments()
        self.x = job.keras.tree.flatten(self.arguments["x"])
        tensors = dict(enumerate([*self.x, *(self.arguments["values"] or ())]))
        self.floats = {i: t for i, t in tensors.items() if job.keras.is_float(t)}
        self.others = {i: t for i, t in tensors.items() if i not in self.floats}
        own = enumerate(job.variables if self.arguments["values"] is None else (), start=len(self.x))
        self.watched = {i: v for i, v in own if job.keras.is_float(v)}

    def results(
        self, cotangents: Cotangents | None, gradients: bool
    ) -> tuple[list[Array], float | None, dict[int, Array]]:
        """Run the model; return its outputs, the loss (None if there is none) and gradients by tensor number."""
        if gradients:
            given = None if cotangents is None else self._as_tensors(cotangents)
            (value, outputs), grads = self._run("backward", self._differentiated, given)
        else:
            (value, outputs), grads = self._run("forward", self.program), {}
        arrays = {i: self._array(grad) for i, grad in grads.items()}
        return [self._array(t) for t in outputs], None if value is None else float(self._array(value)), arrays

    def _as_tensors(self, cotangents: Cotangents) -> list[Any]:
        """Return the output cotangents as tensors.

        If they are a function of the outputs, run the model to evaluate it.
        """
        tensor = self.job.keras.ops.convert_to_tensor
        if not callable(cotangents):
            return [None if c is None else tensor(c) for c in cotangents]
        with as_found(self.job.model, self.job.keras, self.job.batch.seed):  # the next run starts from the same states
            _, values = self._run("forward", self.program)
        found = cotangents([self._array(t) for t in values])
        return [None if c is None else tensor(c, dtype=t.dtype) for t, c in zip(values, found, strict=True)]

    def _array(self, tensor: Any) -> Array:
        return to_numpy(self.job.keras.engine.to_array(tensor))

    def _run(self, name: str, function: Callable[[Any, Any], Any], given: list[Any] | None = None) -> Any:
        """Call ``function`` on the float tensors and the other arguments, compiled if the engine compiles.

        A model with a stamp (all that its run reads is known) reuses the executable of an earlier call.
        """
        job, engine, arguments = self.job, self.job.keras.engine, self.split(given)
        eager = getattr(job.model, "run_eagerly", False) or (self.stamp is None and job.keras.is_short(self.x))
        if eager or not engine.compiles:
            return function(*arguments)
        shapes = stamp_of_tensors(job.keras, (self.arguments, given))
        options = (name, job.batch.training, job.loss is None, self.regularised, tuple(self.floats), shapes)
        memo = memo_of(job.model, ("plain", *options), self.stamp)
        return memo.once("run", lambda: engine.compile(function, arguments, memo))(*arguments)

    def split(self, given: list[Any] | None) -> tuple[dict[int, Any], dict[str, Any]]:
        """Return the arguments of :meth:`program`: the float tensors by number, and everything else."""
        rest = {key: self.arguments[key] for key in ("y", "sample_weight", "seeds")}
        return self.floats, {**rest, "others": self.others, "given": given}

    def program(self, sources: Mapping[int, Any], rest: Any) -> tuple[Any, list[Any]]:
        """Run the model on the float tensors ``sources`` and all other arguments ``rest``.

        Return (loss or None, outputs).
        """
        job, keras = self.job, self.job.keras
        tensors = [tensor for _, tensor in sorted({**sources, **rest["others"]}.items())]
        x = keras.tree.pack_sequence_as(self.arguments["x"], tensors[: len(self.x)])
        values = tensors[len(self.x) :] or None
        with keras.running(job.model, values, rest["seeds"], {}, lambda key, tensor: tensor):
            outputs = call_model(job.model, x, job.batch.training)
            value = None if job.loss is None else job.loss(x, rest["y"], outputs, rest["sample_weight"])
        return value, keras.tree.flatten(outputs)

    def _differentiated(self, sources: Mapping[int, Any], rest: Any) -> Any:
        """Differentiate the loss, or the outputs times their cotangents, by all ``sources``.

        Return the loss and the outputs, and the gradients by the key of their source.
        """
        given, keras = rest["given"], self.job.keras

        def target(sources: Mapping[int, Any]) -> tuple[Any, Any]:
            value, outputs = self.program(sources, rest)
            if given is None:
                return value, (value, outputs)
            parts = [keras.ops.sum(t * c) for t, c in zip(outputs, given, strict=True) if c is not None]
            return sum(parts[1:], start=parts[0]), (value, outputs)

        return _GRADIENTS[keras.engine.name](target, dict(sources), self.watched)


def _by_jax(target: Any, sources: dict[int, Any], watched: dict[int, Any]) -> Any:
    del watched  # only variables of TensorFlow
    import jax

    (_, told), grads = jax.value_and_grad(target, has_aux=True)(sources)
    return told, grads


def _by_tensorflow(target: Any, sources: dict[int, Any], watched: dict[int, Any]) -> Any:
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        # A variable of Keras 3 wraps one of TensorFlow.
        variables = {i: v if isinstance(v, tf.Variable) else v.value for i, v in watched.items()}
        tape.watch([*sources.values(), *variables.values()])
        value, told = target(sources)
    grads = tape.gradient(value, {**sources, **variables}, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return told, {i: tf.convert_to_tensor(g) for i, g in grads.items()}


def _by_torch(target: Any, sources: dict[int, Any], watched: dict[int, Any]) -> Any:
    del watched  # only variables of TensorFlow
    import torch

    torch_engine: Any = engine("torch", on_host=True)
    with torch.enable_grad():
        leaves = {i: t.detach().requires_grad_() for i, t in sources.items()}
        # The model may change its inputs in place, which torch forbids for leaves.
        value, (loss, outputs) = target({i: t.clone() for i, t in leaves.items()})
        found = torch_engine.backward_pass([value], list(leaves.values())) if value.requires_grad else ()
    grads = dict(zip(leaves, found or [None] * len(leaves), strict=True))
    return (loss, outputs), {i: torch.zeros_like(leaves[i]) if g is None else g for i, g in grads.items()}


_GRADIENTS = {"jax": _by_jax, "tensorflow": _by_tensorflow, "torch": _by_torch}


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
    """Return the variable with the weight ``key`` of a layer, or None: see :meth:`.protocol.Adapter.place`."""
    held = [model] if layer == root_name(model) else []
    for found in (*held, *_called(model, layer.partition("#")[0])):
        sides = ("forward_layer", "backward_layer") if direction is not None else ()
        halves = [getattr(found, side, None) for side in sides]
        half = next((h for h in halves if h is not None and h.go_backwards == (direction == "backward")), found)
        recurrent = isinstance(half, dialect_of(half).layers.RNN)
        cell = half.cell if recurrent else half if hasattr(half, "state_size") else None
        if cell is not None:
            place = _of_cell(model, cell, key)
        else:  # a variable that the layer adds itself comes before those of its sublayers
            place = _within(model, dialect_of(half).own_variables(half), key) or _within(model, half.weights, key)
        if place is not None:
            return place
    return None


def _of_cell(model: Any, cell: Any, key: str) -> WeightLocation | None:
    """Return the variable, or the row of a variable, that contains the weight ``key`` of a recurrent cell."""
    known, name = registration_of(cell), key.rpartition("/")[2]
    if known is not None:
        single = known.single(name)  # None if several variables compose the weight
        variable = None if single is None else attributes(cell).get(single[0])
        found = names_of(model).get(id(variable))
        if single is None or found is None:
            return None
        tied = id(variable) in tied_variables(model)
        return WeightLocation(found, (lambda array: array.T) if single[1] else (lambda array: array), tied=tied)
    started = name in initial_state_weights(dialect_of(model), cell)
    # A GRU with reset_after has both biases as the rows of one variable.
    both = has_two_biases(cell) and len(cell.bias.shape) == 2 and key in ("bias", "recurrent_bias")
    row = ("bias", "recurrent_bias").index(key) if both else None
    place = _within(model, getattr(cell, "weights", ()), "bias" if both else key, row)
    return replace(place, tied=True) if place is not None and started else place


def _within(model: Any, weights: Sequence[Any], key: str, row: int | None = None) -> WeightLocation | None:
    """Find the only variable in ``weights`` that is named ``key``, or row ``row`` of it; None for none or several."""
    wanted = key.rpartition("/")[2]
    keras = dialect_of(model)
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
    for child in model._flatten_layers(include_self=False, recursive=False):
        if child.name == name:
            yield child
        elif name.startswith(f"{child.name}/"):
            yield from _called(child, name[len(child.name) + 1 :])
        elif isinstance(model, dialect_of(model).Sequential) and child is getattr(model, "_functional", None):
            yield from _called(child, name)
