"""Dialect: the interface of what differs between Keras 3 and ``tf_keras``, with one object for each package.

Both packages may be loaded in one process; :func:`dialect_of` returns the dialect of a layer, cell or variable. Only
the modules of the dialects import the packages. Attributes have the names of Keras 3, so that code reads as Keras code
does: ``keras = dialect_of(model)``.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ...autodiff import Engine, Tap, engine
from ...autodiff.tensors import dtype_name, global_random_states_restored, to_numpy
from ...errors import UnsupportedError
from ...recurrence.cells import Cell
from ...typing import Array, Namespace

#: Name of a Keras package -> module of its dialect. The package must be loaded already.
_DIALECTS = {"keras": "keras3", "tf_keras": "keras2"}

#: Function of (layer, name, value) that overrides a method or an attribute of a layer during a run.
Override = Callable[[Any, str, Any], None]


@dataclass(frozen=True, eq=False)
class LoopOverCell:
    """A cell that the user's code calls step by step, with the options of a recurrent layer around it.

    All other attributes, such as the name and the state size, are those of the cell.
    """

    cell: Any
    go_backwards = stateful = unroll = zero_output_for_mask = False
    return_sequences = return_state = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cell, name)


class Dialect(Protocol):
    """Interface of one Keras package, with what both share and, as defaults, what Keras 3 does without an import of it.

    Attributes without a comment are those of Keras 3 with the same name.
    """

    #: Name of the package: ``"keras"`` or ``"tf_keras"``.
    name: str
    #: Name of the engine on which the package computes in this process.
    engine_name: str
    layers: Any
    activations: Any
    losses: Any
    models: Any
    #: Operations on tensors of the engine, such as ``convert_to_tensor``, ``cast`` and ``sum``.
    ops: Any
    #: Functions on nested structures: ``flatten``, ``map_structure``, ``pack_sequence_as`` and the like.
    tree: Any
    Layer: Any
    Model: Any
    Sequential: Any
    Functional: Any
    Variable: Any
    version: str
    #: Code for a mean and a sum, for messages.
    mean_code: str
    sum_code: str
    #: Whether Keras multiplies sample weights of shape (sample,) along the time axis of a loss per step.
    weighs_steps: bool

    # -- the engine, dtypes, values
    @cached_property
    def engine(self) -> Engine:
        """The autodiff engine; it carries Keras masks over to replaced tensors."""
        return engine(self.engine_name, self.with_mask, on_host=True)

    def floatx(self) -> str:
        """Return the default float dtype, such as ``"float32"``."""

    def is_float(self, tensor: Any) -> bool:
        """Return whether the dtype of a tensor or variable is a float."""
        return dtype_name(tensor).startswith(("float", "bfloat"))

    def computation_dtype(self, dtype: str) -> str:
        """Return the name of the dtype in which operations on ``dtype`` are computed."""

    def value_of(self, tensor: Any) -> Array:
        """Return the value of a variable or tensor as a NumPy copy; float16 and bfloat16 become float32."""
        # The engine converts: Keras' own conversion raises a warning in NumPy.
        return np.array(to_numpy(self.engine.to_array(self.ops.convert_to_tensor(tensor))))

    def mask_of(self, tensor: Any) -> Any:
        """Return the mask that Keras attached to a tensor; None if there is none."""

    def set_mask(self, tensor: Any, mask: Any) -> None:
        """Attach a mask to a tensor."""

    def with_mask(self, old: Any, new: Any) -> Any:
        """Attach the mask of ``old``, if it has one, to ``new``, and return ``new``."""
        mask = self.mask_of(old)
        if mask is not None:
            self.set_mask(new, mask)
        return new

    def has_logits(self, tensor: Any) -> bool:
        """Return whether Keras computes a cross-entropy of ``tensor`` from the logits behind its softmax or sigmoid.

        On TensorFlow it does, if softmax or sigmoid is the last operation. Even an identity behind it changes the loss.
        """
        if self.engine.name != "tensorflow":
            return False
        operation = getattr(getattr(tensor, "op", None), "type", "")
        return hasattr(tensor, "_keras_logits") or operation in {"Softmax", "Sigmoid"}

    def namespace(self) -> Namespace:
        """Return the namespace of array functions for the step of a registered cell."""

    # -- variables
    def variable_name(self, variable: Any) -> str:
        """Return the last part of a variable's path, such as ``"kernel"``."""
        return self.path(variable).rpartition("/")[2]

    def path(self, variable: Any) -> str:
        """Return the path of a variable, such as ``"lstm/lstm_cell/kernel"``."""
        return str(variable.path)

    def weights(self, layer: Any) -> list[Any]:
        """Return the variables among the weights of a layer or model: a table of words in Keras 2 is none."""
        return [v for v in getattr(layer, "weights", ()) if isinstance(v, self.Variable)]

    def own_variables(self, layer: Any) -> list[Any]:
        """Return the variables of a layer without those of its sublayers."""
        return [*layer._trainable_variables, *layer._non_trainable_variables]

    def regularizers(self, layer: Any) -> Mapping[int, Any]:
        """Map the id of each regularised variable of the layer and its sublayers to its regulariser."""
        variables = getattr(layer, "variables", ())
        return {id(v): v.regularizer for v in variables if getattr(v, "regularizer", None) is not None}

    def variables(self, model: Any) -> list[Any]:
        """Return all variables that a run may read, states and metrics included."""

    # -- layers and cells
    @property
    def cells(self) -> Mapping[type, type[Cell] | Mapping[int, type[Cell]]]:
        """Map from exact Keras cell types to the classes with their equations; of a convolution by the spatial axes."""

    @property
    def known_activations(self) -> Mapping[Any, str]:
        """Map from each activation function of Keras to its name in ``recurrence.activations``."""

    @property
    def single_precision(self) -> frozenset[str]:
        """Names of the activations that this engine computes with single-precision constants."""

    def state_size(self, layer: Any) -> Any:
        """Return the state sizes declared by the layer's cell."""

    def state_template(self, cell: Any) -> Any:
        """Return the sizes of the states that a cell takes, nested as the cell nests its states."""
        size = cell.state_size
        return [size] if isinstance(size, int) else list(size)

    def output_size(self, cell: Any) -> Any:
        """Return the output size declared by a cell; None if it declares none."""
        return getattr(cell, "output_size", None)

    def draws_random_numbers(self, layer: Any) -> bool:
        """Return whether a layer draws random numbers for anything else than a dropout rate among its attributes."""
        return bool(getattr(layer, "_seed_generators", None))

    def refusal(self, layer: Any) -> tuple[str, str] | None:
        """Return (reason, workaround) if a recurrent layer cannot be hooked; None if it can."""

    def time_major(self, layer: Any) -> bool:
        """Return whether the first axis of a layer's input is time."""
        del layer
        return False

    def name_counters(self) -> dict[str, int]:
        """Return how many objects have a name of each kind, by which Keras numbers the next one."""

    def operations(self, model: Any) -> list[Any] | None:
        """Return the layers and operations of a functional model in their order.

        Returns None if the model may run other code.
        """
        if type(model) not in (self.Sequential, self.Functional, self.Model) or "call" in vars(model):
            return None
        operations = getattr(model, "operations", None) or getattr(model, "_functional", None)
        return None if operations is None else list(getattr(operations, "operations", operations))

    def layers_in_order(self, model: Any) -> list[Any] | None:
        """Return the layers of a model that calls them one after the other, without input layers.

        Returns None for any other model.
        """
        operations = self.operations(model)
        if operations is None or len(model.inputs) != 1 or len(model.outputs) != 1:
            return None
        for previous, following in pairwise(operations):
            nodes = following._inbound_nodes
            if len(nodes) != 1:
                return None
            # Keras 2 has all inputs of a call under a name of its own.
            inputs = getattr(nodes[0], "keras_inputs", None) or nodes[0].input_tensors
            if len(inputs) != 1 or inputs[0]._keras_history[0] is not previous:
                return None
        return [op for op in operations if type(op) is not self.layers.InputLayer]

    def graph_of(self, model: Any) -> tuple[Any, Any]:
        """Return the nested symbolic inputs and outputs of a functional model; (None, None) for any other model."""
        return getattr(model, "_inputs_struct", None), getattr(model, "_outputs_struct", None)

    def build_shape(self, model: Any) -> Any:
        """Return the input shape, or shapes by name, on which a model was built; None if unknown."""
        shapes = getattr(model, "_build_shapes_dict", None) or {}
        return next(iter(shapes.values())) if len(shapes) == 1 else None

    def is_from_keras(self, definition: Any) -> bool:
        """Return whether a class or function is defined in this Keras package."""
        return str(getattr(definition, "__module__", "")).startswith(f"{self.name}.")

    # -- a run
    def dropout_multipliers(self, layer: Any) -> dict[str, Any]:
        """Return the dropout multipliers of a layer's known cell in training: ``input_scale``, ``state_scale``."""

    def hook(self, recorder: Any, site: Any, direction_index: int, override: Override) -> None:
        """Let ``recorder`` record a recurrent layer's calls; ``direction_index`` is 1 for the second."""

    def switch_cudnn_off(self, model: Any, override: Override) -> None:
        """Let all layers of a model run by operations that the engine can differentiate for several cotangents at once.

        On JAX cuDNN's LSTM has no batching rule.
        """
        del model, override

    def variable_values(self, variables: Sequence[Any]) -> list[Any] | None:
        """Return the tensors that replace the variables in a run; None if the run reads the variables."""
        del variables
        return None

    def seed_tensors(self, model: Any, seed: int | None) -> list[Any]:
        """Return the state of each random generator as a tensor: the present one, or one derived from ``seed``."""

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Let initializers draw from ``seed`` within the block; restore all random generators on exit.

        An initializer without a seed of its own takes one from Python's random numbers.
        """
        with self.engine.random_state_restored(seed), global_random_states_restored():
            random.seed(seed)
            yield

    def variables_substituted(
        self, model: Any, values: Sequence[Any] | None, seeds: Sequence[Any], weights: Mapping[str, Any], tap: Tap
    ) -> AbstractContextManager[None]:
        """Temporarily substitute ``values`` for the variables, tap ``weights`` and draw from ``seeds``."""

    def cell_weights_substituted(self, cell: Any, weights: Sequence[tuple[Any, Any]]) -> AbstractContextManager[None]:
        """Temporarily substitute tensors for a cell's variables; ``weights`` lists pairs (variable, tensor)."""

    def model_state_restored(self, model: Any, seed: int | None) -> AbstractContextManager[None]:
        """Restore on exit the variables and random generators that a run changes.

        Seed the generators with ``seed`` before.
        """

    def initial_state(self, cell: Any, samples: int) -> Any:
        """Return the states from the cell's own ``get_initial_state`` for a number of samples."""
        return cell.get_initial_state(batch_size=samples)

    def step(self, cell: Any, x: Any, states: Any) -> tuple[Any, Any]:
        """Call a cell once, as its recurrent layer does; return its output and its new states."""
        output, new_states = cell(x, states)
        return output, new_states

    def unwrapped(self, value: Any) -> Any:
        """Return the container inside a tracking wrapper of the package; None for other objects."""
        del value

    def is_tracker(self, value: Any) -> bool:
        """Return whether ``value`` is an object by which Keras tracks the variables and layers of a model."""
        del value
        return False

    def is_short(self, x: Any) -> bool:
        """Return whether ``x`` is so short that eager execution takes less time than tracing a graph for one run."""
        del x
        return False

    def stamp(self, model: Any, loss: Any, training: Any = None) -> Hashable | None:
        """Return a hashable that changes with everything a run reads; None if that is not known.

        ``training`` is the :class:`CompiledTraining` in which user code counts as a constant, except for the attributes
        of its layers.
        """
        del model, loss, training
        return None

    # -- the loss
    def is_overridden(self, model: Any) -> bool:
        """Return whether the model overrides ``compute_loss``."""
        return isinstance(model, self.Model) and type(model).compute_loss is not self.Model.compute_loss

    def is_compiled(self, model: Any) -> bool:
        """Return whether ``compile`` was called on the model."""
        return bool(model.compiled)

    def compiled_loss(self, model: Any) -> Any:
        """Return the compiled loss, a function of ``(y, y_pred, sample_weight)``; None if there is none."""
        return getattr(model, "_compile_loss", None)

    def compiled_form(self, loss: Any, weights: Any = None, names: Any = None) -> Callable[[Any, Any, Any], Any]:
        """Return ``loss`` as the function of ``(y, y_pred, sample_weight)`` that ``compile(loss=...)`` makes of it."""

    def user_loss(self, model: Any) -> Any:
        """Return the loss that was passed to ``compile``; None if there is none."""
        return getattr(self.compiled_loss(model), "_user_loss", None)

    def training_loss(self, model: Any, x: Any, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
        """Return the loss that training minimises: compiled loss, loss weights, regularisers and ``add_loss``."""
        return model._compute_loss(x, y, y_pred, weight, training=training)

    def compiled_loss_unchanged(self, model: Any, regularised: bool) -> AbstractContextManager[None]:
        """Keep the compiled loss unchanged by runs within the block; penalties have a gradient if ``regularised``."""

    def align_ranks(self, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """Return targets and outputs with the ranks matched, as a compiled loss function receives them."""

    def builds_graph(self, layer: Any) -> bool:
        """Return whether a layer belongs to a TensorFlow 1 graph, which only a session can run."""
        return False

    def adds_losses(self, model: Any) -> bool:
        """Return whether a layer called ``add_loss`` in the last call of the model."""
        return any(la._get_own_losses() and la.activity_regularizer is None for la in model._flatten_layers())


def is_layer(candidate: Any) -> bool:
    """Return whether an object is a layer of a Keras package; a cell may be any object with ``call``."""
    return any(isinstance(candidate, keras.Layer) for keras in loaded_dialects())


def dialect_of(keras_object: Any) -> Dialect:
    """Return the dialect of the Keras package that a model, layer, cell or variable belongs to.

    Raises UnsupportedError for a layer of a TensorFlow 1 graph, and TypeError for an object of neither package.
    """
    keras_object = keras_object.cell if isinstance(keras_object, LoopOverCell) else keras_object
    for keras in loaded_dialects():
        if not isinstance(keras_object, (keras.Layer, keras.Variable)):
            continue
        if keras.builds_graph(keras_object):
            raise UnsupportedError(
                f"{type(keras_object).__name__} was created without eager execution.",
                expected="a model that runs eagerly or in a tf.function",
                hint="create it before tf.compat.v1.disable_eager_execution(), or in a process that does not call it",
            )
        return keras
    raise TypeError(f"{type(keras_object).__name__} belongs to no Keras")


@cache
def dialect(package: str) -> Dialect:
    """Return the dialect of a Keras package that is loaded, by the package's name."""
    instance: Dialect = importlib.import_module(f"{__package__}.{_DIALECTS[package]}").dialect
    return instance


def loaded_dialects() -> Iterator[Dialect]:
    """Iterate over the dialects of the Keras packages that are loaded."""
    for package in _DIALECTS:
        if hasattr(sys.modules.get(package), "layers"):
            yield dialect(package)
