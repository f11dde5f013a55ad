"""Stamps of Keras 3 models: a hashable of everything a run depends on, which decides about compiled runs.

A *closed* model consists of Keras' own models, layers, cells, operations, activations, losses and regularisers, of
exactly these types, with plain values as settings. Any change of it changes the stamp, so its compiled run can be used
again. A subclass, a Lambda, a user's function or an unknown object may read anything at any time. Such a model is
*open*: it has no stamp, and each run is traced again. While Keras trains it with a compiled step, which does not run
user code again either, its layers are stamped by their attributes.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Hashable
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.keras_tensor import KerasTensor
from keras.src.dtype_policies.dtype_policy import DTypePolicy
from keras.src.ops.function import Function
from keras.src.trainers.compile_utils import CompileLoss

from ...autodiff import engine

#: Attributes for Keras' bookkeeping, which do not affect the computation.
_BOOKKEEPING = frozenset(
    [
        *("_tracker", "_trainable_variables", "_non_trainable_variables", "_metrics", "_lock", "_path"),
        *("_auto_config", "build", "quantize", "_inbound_nodes", "_outbound_nodes", "_parent_path", "_call_signature"),
        *("_called", "_losses", "_loss_ids", "_losses_override", "_dropout_mask", "_recurrent_dropout_mask"),
        *("_seed_generators", "seed", "_build_shapes_dict", "_input_tensor", "_tracked"),
        # used by training only
        *("optimizer", "train_function", "test_function", "predict_function", "stop_training", "stop_evaluating"),
        *("stop_predicting", "history", "_jax_state_synced", "_jax_state", "_loss_tracker", "_compile_metrics"),
        *("_compile_loss", "_compile_config", "_compiled_trainable_state", "_eval_epoch_iterator", "loss"),
        *("_initial_epoch", "steps_per_execution", "_jit_compile"),
        # the graph of a functional model: ``_graph_stamp`` makes its stamp from the nodes
        *("_inputs_struct", "_outputs_struct", "_inputs", "_outputs", "_nodes", "_nodes_by_depth", "_operations"),
        *("_operations_by_depth", "_layers_by_depth"),
    ]
)
_UNUSED_SUFFIXES = ("_initializer", "_constraint")
#: Prefixes of attributes that TensorFlow uses for checkpoints.
_TENSORFLOW_PREFIXES = ("_self_", "_obj_reference_counts")
#: Methods that compute; if one of them is not Keras' own, it may read anything.
_COMPUTING_METHODS = ("__call__", "call", "inner_loop", "build", "compute_mask", "get_initial_state", "compute_loss")
_LARGEST_ARRAY = 2**16


class _DependsOnAnything(Exception):  # noqa: N818 - no error, but what was found
    """Raised for an object whose behaviour may depend on anything outside it."""


class _SameObject:
    """Stamp of an object's identity, without a strong reference to the object."""

    def __init__(self, value: Any) -> None:
        self._id, self._ref = id(value), weakref.ref(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self._ref() is not None and self._ref() is other._ref()


def stamp_of(model: Any, loss: Any, training: Any = None) -> Hashable | None:
    """Return a hashable of everything that a run of ``model`` reads, with ``loss`` or else with the compiled loss.

    Returns None if user code may read anything else. During a compiled training ``training``, user code is taken as
    fixed, and only the attributes of user layers are included.
    """
    used_loss = getattr(model, "_compile_loss", None) if loss is None else loss
    config = keras.config
    settings = (config.floatx(), config.epsilon(), config.image_data_format(), config.is_flash_attention_enabled())
    try:
        return (
            settings,
            engine(keras.backend.backend()).settings(),
            _Stamp(training).stamp(model),
            _Stamp(training).stamp(used_loss),
        )
    except _DependsOnAnything:
        return None


class _Stamp:
    """Recursive computation of stamps; a repeated object is replaced by the number of its first occurrence."""

    def __init__(self, training: Any) -> None:
        self._training = training
        self._first_indices: dict[int, int] = {}

    def stamp(self, value: Any) -> Hashable:
        """Return a hashable that changes with the behaviour of ``value``; raise _DependsOnAnything if none is known."""
        if value is None or isinstance(value, (bool, int, float, str, np.number)):
            return (type(value).__name__, repr(value))
        if isinstance(value, (list, tuple, set, frozenset)):
            return (type(value).__name__, *map(self.stamp, value))
        if isinstance(value, dict):
            return ("dict", *((self.stamp(key), self.stamp(item)) for key, item in value.items()))
        if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY and value.dtype != object:
            return (str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            return _identity(value) if self._training is not None else _keras_identity(value)
        return self._object_stamp(value)

    def _object_stamp(self, value: Any) -> Hashable:
        if id(value) in self._first_indices:
            return ("met", self._first_indices[id(value)])
        self._first_indices[id(value)] = len(self._first_indices)
        kind = type(value)
        if isinstance(value, keras.Variable):
            settings = (value.trainable, value.dtype, value._autocast, value.name)
            return (_SameObject(value), settings, self.stamp(value.regularizer))
        if isinstance(value, types.ModuleType) and value.__name__.startswith("keras.src."):
            return ("module", value.__name__)
        if isinstance(value, DTypePolicy):
            return str(value.name)
        if isinstance(value, KerasTensor):
            return self._symbol_stamp(value)
        if not _is_closed(value):
            return self._user_object_stamp(value)
        if isinstance(value, CompileLoss):
            loss_settings = (value._user_loss, value._user_loss_weights, value.output_names, value.reduction)
            return ("compiled", *map(self.stamp, loss_settings))
        graph = self._graph_stamp(value) if isinstance(value, Function) else None
        return (_SameObject(kind), _SameObject(value), graph, self._settings_stamp(value))

    def _user_object_stamp(self, value: Any) -> Hashable:
        """Return a hashable of an object with user code if a training has fixed that code.

        Else raise _DependsOnAnything.
        """
        if self._training is None:
            raise _DependsOnAnything
        identities = tuple(map(_identity, (self._training, type(value), value)))
        return (identities, self._settings_stamp(value) if isinstance(value, keras.layers.Layer) else None)

    def _settings_stamp(self, value: Any) -> Hashable:
        return tuple(
            (name, self.stamp(item))
            for name, item in vars(value).items()
            if name not in _BOOKKEEPING
            and not name.endswith(_UNUSED_SUFFIXES)
            and not name.startswith(_TENSORFLOW_PREFIXES)
        )

    def _symbol_stamp(self, tensor: Any) -> Hashable:
        """Return a hashable of a symbolic tensor of a functional model: its operation, node and tensor index."""
        history = getattr(tensor, "_keras_history", None)
        if history is None:
            raise _DependsOnAnything
        return (self.stamp(history.operation), history.node_index, history.tensor_index)

    def _graph_stamp(self, model: Any) -> Hashable:
        nodes = [node for depth in sorted(model._nodes_by_depth) for node in model._nodes_by_depth[depth]]
        calls = [
            (self.stamp(node.operation), self.stamp(node.arguments.args), self.stamp(node.arguments.kwargs))
            for node in nodes
        ]
        return (tuple(calls), self.stamp(model._inputs_struct), self.stamp(model._outputs_struct))


def _is_keras(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).startswith("keras.src.")


def _is_closed(value: Any) -> bool:
    """Return whether all code of an object is in Keras."""
    kind = type(value)
    if not _is_keras(kind) or kind is keras.layers.Lambda or not hasattr(value, "__dict__"):
        return False
    methods = [vars(base)[name] for name in _COMPUTING_METHODS for base in kind.__mro__ if name in vars(base)]
    # A method's ``__module__`` does not tell: a wrapper may copy it from the wrapped function.
    module_names = [str(getattr(method, "__globals__", {}).get("__name__", "")) for method in methods]
    return all(module_name.startswith("keras.src.") for module_name in module_names)


def _identity(value: Any) -> Hashable:
    """Return a hashable that is equal only for the same object."""
    try:
        return _SameObject(value)
    except TypeError:  # no weak references
        return id(value)


def _keras_identity(value: Any) -> Hashable:
    """Return a hashable of a function or class that a module of Keras defines, or raise _DependsOnAnything."""
    module = sys.modules.get(value.__module__ or "")
    if not _is_keras(value) or getattr(module, value.__qualname__, None) is not value:
        raise _DependsOnAnything
    return _SameObject(value)
