"""Reference run: the user's model without hooks and taps, differentiated by its engine.

Certificates compare results with it. With the capture it shares only the preparation of the data, the loss and the
restoring of the model; names and layouts of weights are read here independently. A run is traced anew at every call;
only a closed model (see ``keras3_stamps.py``) reuses what was compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from ...autodiff import engine
from ...autodiff.tensors import to_numpy
from ...typing import Array
from ..protocol import Batch, Cotangents, ReferenceRun, WeightLocation
from . import losses
from .cells import initial_state_weights
from .dialect import Dialect, dialect_of
from .discover import root_name
from .hooks import RunRequest
from .inputs import input_order
from .restore import borrowed
from .run import call_model, memo_of, stamp_of_run, stamp_of_tensors
from .weights import attribute_variables, has_two_biases, registration_of


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
    of weights have a gradient if ``regularised``. See :meth:`rnnlens.adapters.protocol.Run.reference`.
    """
    keras = dialect_of(model)
    with_loss = batch.loss is not None or batch.y is not None or (gradients and cotangents is None)
    with _reference_function(model, batch, with_loss, regularised) as run:
        outputs, value, grads = run.results(cotangents, gradients)
    variable_gradients = {id(variable): grads.get(len(run.x) + i) for i, variable in enumerate(run.job.variables)}
    weights = {name: variable_gradients.get(key) for key, name in names_of(model).items() if gradients}
    is_flat = isinstance(batch.x, dict) and not any(map(keras.tree.is_nested, batch.x.values()))
    keys = tuple(map(str, batch.x)) if is_flat else ()
    return ReferenceRun(outputs, value, [grads.get(i) for i in input_order(keras, batch.x) if gradients], weights, keys)


def coarsest_dtype(model: Any, batch: Batch) -> str:
    """Return the coarsest float dtype of the operations of the user's model, loss included; "" if it has none."""
    with _reference_function(model, batch, batch.loss is not None or batch.y is not None, regularised=False) as run:
        return run.job.keras.engine.coarsest_dtype(run.program, run.split_arguments(None))


@contextmanager
def _reference_function(model: Any, batch: Batch, with_loss: bool, regularised: bool) -> Iterator[_ReferenceFunction]:
    """Yield a function that runs the unmodified model and differentiates it; restore the model after the block."""
    keras = dialect_of(model)
    loss = losses.scalar_loss(model, batch) if with_loss else None
    stamp = stamp_of_run(keras, model, batch.loss) if keras.engine.compiles else None
    with borrowed(model, keras, batch.seed, regularised=regularised):
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
        self.other_tensors = {i: t for i, t in tensors.items() if i not in self.floats}
        program_variables = enumerate(job.variables if self.arguments["values"] is None else (), start=len(self.x))
        self.watched = {i: v for i, v in program_variables if job.keras.is_float(v)}

    def results(
        self, cotangents: Cotangents | None, gradients: bool
    ) -> tuple[list[Array], float | None, dict[int, Array]]:
        """Run the model; return its outputs, the loss (None if there is none) and gradients by tensor number."""
        if gradients:
            output_cotangents = None if cotangents is None else self._as_tensors(cotangents)
            (value, outputs), grads = self._run("backward", self._differentiated, output_cotangents)
        else:
            (value, outputs), grads = self._run("forward", self.program), {}
        arrays = {i: self._array(grad) for i, grad in grads.items()}
        return [self._array(t) for t in outputs], None if value is None else float(self._array(value)), arrays

    def _as_tensors(self, cotangents: Cotangents) -> list[Any]:
        """Return the output cotangents as tensors.

        If they are a function of the outputs, run the model to evaluate it.
        """
        convert = self.job.keras.ops.convert_to_tensor
        if not callable(cotangents):
            return [None if c is None else convert(c) for c in cotangents]
        # The next run starts from the same states.
        with borrowed(self.job.model, self.job.keras, self.job.batch.seed):
            _, values = self._run("forward", self.program)
        cotangent_arrays = cotangents([self._array(t) for t in values])
        return [None if c is None else convert(c, dtype=t.dtype) for t, c in zip(values, cotangent_arrays, strict=True)]

    def _array(self, tensor: Any) -> Array:
        return to_numpy(self.job.keras.engine.to_array(tensor))

    def _run(self, name: str, function: Callable[[Any, Any], Any], cotangents: list[Any] | None = None) -> Any:
        """Call ``function`` on the float tensors and the other arguments, compiled if the engine compiles.

        A model with a stamp (all that its run reads is known) reuses the executable of an earlier call.
        """
        job, engine, arguments = self.job, self.job.keras.engine, self.split_arguments(cotangents)
        eager = getattr(job.model, "run_eagerly", False) or (self.stamp is None and job.keras.is_short(self.x))
        if eager or not engine.compiles:
            return function(*arguments)
        shapes = stamp_of_tensors(job.keras, (self.arguments, cotangents))
        options = (name, job.batch.training, job.loss is None, self.regularised, tuple(self.floats), shapes)
        memo = memo_of(job.model, ("plain", *options), self.stamp)
        return memo.once("run", lambda: engine.compile(function, arguments, memo))(*arguments)

    def split_arguments(self, cotangents: list[Any] | None) -> tuple[dict[int, Any], dict[str, Any]]:
        """Return the arguments of :meth:`program`: the float tensors by number, and everything else."""
        other_arguments = {key: self.arguments[key] for key in ("y", "sample_weight", "seeds")}
        return self.floats, {**other_arguments, "others": self.other_tensors, "given": cotangents}

    def program(self, sources: Mapping[int, Any], other_arguments: Any) -> tuple[Any, list[Any]]:
        """Run the model on the float tensors ``sources`` and all other arguments ``other_arguments``.

        Return (loss or None, outputs).
        """
        job, keras = self.job, self.job.keras
        tensors = [tensor for _, tensor in sorted({**sources, **other_arguments["others"]}.items())]
        x = keras.tree.pack_sequence_as(self.arguments["x"], tensors[: len(self.x)])
        values = tensors[len(self.x) :] or None
        with keras.variables_substituted(job.model, values, other_arguments["seeds"], {}, lambda key, tensor: tensor):
            outputs = call_model(job.model, x, job.batch.training)
            value = (
                None
                if job.loss is None
                else job.loss(x, other_arguments["y"], outputs, other_arguments["sample_weight"])
            )
        return value, keras.tree.flatten(outputs)

    def _differentiated(self, sources: Mapping[int, Any], other_arguments: Any) -> Any:
        """Differentiate the loss, or the outputs times their cotangents, by all ``sources``.

        Return the loss and the outputs, and the gradients by the key of their source.
        """
        cotangents, keras = other_arguments["given"], self.job.keras

        def target(sources: Mapping[int, Any]) -> tuple[Any, Any]:
            value, outputs = self.program(sources, other_arguments)
            if cotangents is None:
                return value, (value, outputs)
            products = [keras.ops.sum(t * c) for t, c in zip(outputs, cotangents, strict=True) if c is not None]
            return sum(products[1:], start=products[0]), (value, outputs)

        return _GRADIENTS[keras.engine.name](target, dict(sources), self.watched)


def _gradients_by_jax(target: Any, sources: dict[int, Any], watched: dict[int, Any]) -> Any:
    del watched  # only variables of TensorFlow
    import jax

    (_, results), grads = jax.value_and_grad(target, has_aux=True)(sources)
    return results, grads


def _gradients_by_tensorflow(target: Any, sources: dict[int, Any], watched: dict[int, Any]) -> Any:
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        # A variable of Keras 3 wraps one of TensorFlow.
        variables = {i: v if isinstance(v, tf.Variable) else v.value for i, v in watched.items()}
        tape.watch([*sources.values(), *variables.values()])
        value, results = target(sources)
    grads = tape.gradient(value, {**sources, **variables}, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return results, {i: tf.convert_to_tensor(g) for i, g in grads.items()}


def _gradients_by_torch(target: Any, sources: dict[int, Any], watched: dict[int, Any]) -> Any:
    del watched  # only variables of TensorFlow
    import torch

    torch_engine: Any = engine("torch", on_host=True)
    with torch.enable_grad():
        leaves = {i: t.detach().requires_grad_() for i, t in sources.items()}
        # The model may change its inputs in place, which torch forbids for leaves.
        value, (loss, outputs) = target({i: t.clone() for i, t in leaves.items()})
        gradients = torch_engine.backward_pass([value], list(leaves.values())) if value.requires_grad else ()
    grads = dict(zip(leaves, gradients or [None] * len(leaves), strict=True))
    return (loss, outputs), {i: torch.zeros_like(leaves[i]) if g is None else g for i, g in grads.items()}


_GRADIENTS = {"jax": _gradients_by_jax, "tensorflow": _gradients_by_tensorflow, "torch": _gradients_by_torch}


def names_of(model: Any) -> dict[int, str]:
    """Return a unique name for each variable, by the variable's id: its path, numbered if several share it."""
    path_counts: dict[str, int] = {}
    names: dict[int, str] = {}
    keras = dialect_of(model)
    for variable in model.variables:
        if id(variable) not in names and isinstance(variable, keras.Variable):
            path = keras.path(variable)
            count = path_counts[path] = path_counts.get(path, 0) + 1
            names[id(variable)] = path if count == 1 else f"{path}#{count}"
    return names


class WeightLocations:
    """Variables behind the weights of a model; their names, and which ones are shared, are read once."""

    def __init__(self, model: Any) -> None:
        self.model, self._keras = model, dialect_of(model)

    @cached_property
    def _names(self) -> dict[int, str]:
        return names_of(self.model)

    @cached_property
    def _tied_ids(self) -> set[int]:
        return tied_variables(self.model)

    def find(self, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Return the variable of a layer's weight ``key``: see :meth:`.protocol.ModelFacts.weight_location`."""
        root_models = [self.model] if layer == root_name(self.model) else []
        for owner in (*root_models, *_layers_at(self._keras, self.model, layer.partition("#")[0])):
            attribute_names = ("forward_layer", "backward_layer") if direction is not None else ()
            direction_layers = [getattr(owner, attribute, None) for attribute in attribute_names]
            inner_layer = next(
                (h for h in direction_layers if h is not None and h.go_backwards == (direction == "backward")), owner
            )
            is_recurrent = isinstance(inner_layer, self._keras.layers.RNN)
            cell = inner_layer.cell if is_recurrent else inner_layer if hasattr(inner_layer, "state_size") else None
            if cell is not None:
                location = self._of_cell(cell, key)
            else:  # a variable that the layer adds itself comes before those of its sublayers
                own_location = self._of_variable(self._keras.own_variables(inner_layer), key)
                location = own_location or self._of_variable(self._keras.weights(inner_layer), key)
            if location is not None:
                return location
        return None

    def _of_cell(self, cell: Any, key: str) -> WeightLocation | None:
        """Return the variable, or the row of a variable, that contains the weight ``key`` of a recurrent cell."""
        registration, name = registration_of(cell), key.rpartition("/")[2]
        if registration is not None:
            source_weight = registration.single(name)  # None if several variables compose the weight
            variable = None if source_weight is None else attribute_variables(cell).get(source_weight[0])
            variable_name = self._names.get(id(variable))
            if source_weight is None or variable_name is None:
                return None
            take = (lambda array: array.T) if source_weight[1] else (lambda array: array)
            return WeightLocation(variable_name, take, tied=id(variable) in self._tied_ids)
        is_initial_state = name in initial_state_weights(self._keras, cell)
        # A GRU with reset_after has both biases as the rows of one variable.
        has_both = has_two_biases(cell) and len(cell.bias.shape) == 2 and key in ("bias", "recurrent_bias")
        row = ("bias", "recurrent_bias").index(key) if has_both else None
        location = self._of_variable(getattr(cell, "weights", ()), "bias" if has_both else key, row)
        return replace(location, tied=True) if location is not None and is_initial_state else location

    def _of_variable(self, weights: Sequence[Any], key: str, row: int | None = None) -> WeightLocation | None:
        """Find the only variable that is named ``key``, or row ``row`` of it; None for none or several."""
        variable_name, keras = key.rpartition("/")[2], self._keras
        ending_matches = [v for v in weights if keras.path(v).endswith(f"/{key}")]
        matches = [v for v in weights if keras.variable_name(v) == variable_name] or ending_matches
        if len(matches) > 1:
            matches = [v for v in matches if keras.path(v).endswith(f"/{key}")]
        name = self._names.get(id(matches[0])) if len(matches) == 1 else None
        if name is None:
            return None
        take = (lambda array: array) if row is None else (lambda array: array[row])
        return WeightLocation(name, take, str(row), id(matches[0]) in self._tied_ids)


def tied_variables(model: Any) -> set[int]:
    """Return the ids of the variables that more than one layer of the model has among its own."""
    keras = dialect_of(model)
    seen_ids: set[int] = set()
    repeated_ids: set[int] = set()
    for layer in model._flatten_layers():
        own_ids = {id(v) for v in keras.own_variables(layer)}
        repeated_ids |= own_ids & seen_ids
        seen_ids |= own_ids
    return repeated_ids


def _layers_at(keras: Dialect, model: Any, name: str) -> Iterator[Any]:
    """Yield the layers at the path of names ``name``, such as ``"encoder/lstm"``, in nested models."""
    for child in model._flatten_layers(include_self=False, recursive=False):
        if child.name == name:
            yield child
        elif name.startswith(f"{child.name}/"):
            yield from _layers_at(keras, child, name[len(child.name) + 1 :])
        elif isinstance(model, keras.Sequential) and child is getattr(model, "_functional", None):
            yield from _layers_at(keras, child, name)
