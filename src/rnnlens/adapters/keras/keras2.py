"""``tf_keras`` (Keras 2 on TensorFlow): implementation of :class:`.dialect.Dialect`.

Models must run eagerly or in a ``tf.function``; graph models of TensorFlow 1 are refused. The module uses private names
of the package, so versions other than the tested ones are refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.python.util import nest
from tf_keras.src import backend
from tf_keras.src.engine import compile_utils
from tf_keras.src.engine.functional import Functional
from tf_keras.src.layers.rnn import base_conv_lstm, gru_v1, lstm_v1
from tf_keras.src.utils import losses_utils

from ...autodiff import Tap
from ...errors import UnsupportedError
from ...recurrence.cells import GRU, LSTM, Cell, ConvLSTM1D, ConvLSTM2D, ConvLSTM3D, SimpleRNN
from ...typing import Namespace
from ..shared import substitute_in_this_thread
from . import keras2_run
from .dialect import Dialect
from .restore import overriding

#: Prefixes of the tested versions of ``tf_keras``.
_VERSIONS = ("2.21.",)

#: Largest number of steps for which eager execution takes less time than tracing.
_MAX_EAGER_STEPS = 64

#: Name of an activation in Keras 2 -> its name in ``recurrence.activations``.
_ACTIVATION_NAMES = {
    **{name: name for name in ("linear", "tanh", "sigmoid", "relu", "elu", "selu", "softplus", "softsign", "gelu")},
    **{name: name for name in ("exponential", "mish", "softmax")},
    "swish": "silu",
    "hard_sigmoid": "hard_sigmoid_keras2",
}
#: TensorFlow's functions that users pass as activations -> their names in ``recurrence.activations``.
_TENSORFLOW_ACTIVATIONS = {
    tf.tanh: "tanh",
    tf.sigmoid: "sigmoid",
    tf.nn.relu: "relu",
    tf.nn.elu: "elu",
    tf.nn.selu: "selu",
    tf.nn.softplus: "softplus",
    tf.nn.softsign: "softsign",
    tf.identity: "linear",
    tf.nn.relu6: "relu6",
}

if not str(tf_keras.__version__).startswith(_VERSIONS):
    raise UnsupportedError(
        "rnnlens is not tested with this version of tf_keras.",
        got=f"tf_keras {tf_keras.__version__}",
        expected=", ".join(f"tf_keras {version}x" for version in _VERSIONS),
        hint="pip install --no-deps 'tf_keras==2.21.*', with tensorflow 2.21",
    )


class _Ops:
    """Operations of TensorFlow under the names of ``keras.ops``."""

    cast, stack, stop_gradient, zeros, zeros_like = tf.cast, tf.stack, tf.stop_gradient, tf.zeros, tf.zeros_like
    sum, mean, sqrt, square = tf.reduce_sum, tf.reduce_mean, tf.sqrt, tf.square
    expand_dims, is_tensor = tf.expand_dims, tf.is_tensor

    @staticmethod
    def convert_to_tensor(value: Any, dtype: Any = None) -> Any:
        """Convert ``value`` to a tensor and, if ``dtype`` is given, cast it."""
        tensor = tf.convert_to_tensor(value)
        return tensor if dtype is None else tf.cast(tensor, dtype)


class _Tree:
    """Functions of ``tf.nest`` under the names of ``keras.tree``."""

    flatten, map_structure = tf.nest.flatten, tf.nest.map_structure
    pack_sequence_as, is_nested = tf.nest.pack_sequence_as, tf.nest.is_nested
    flatten_with_path = nest.flatten_with_tuple_paths


#: Functions of the array-API standard that TensorFlow has under another name.
_RENAMED = {
    **{name: getattr(tf, f"reduce_{name}") for name in ("sum", "mean", "prod", "max", "min")},
    **{name: getattr(tf, name.replace("arc", "a")) for name in ("arcsin", "arccos", "arctan")},
    **{name: getattr(tf, name.replace("arc", "a")) for name in ("arcsinh", "arccosh", "arctanh")},
    "concat": tf.concat,
    "concatenate": tf.concat,
    "permute_dims": tf.transpose,
    "flip": tf.reverse,
    "astype": tf.cast,
    "asarray": tf.convert_to_tensor,
    "clip": tf.clip_by_value,
    "remainder": tf.math.floormod,
}


class _ArrayFunctions:
    """Namespace of TensorFlow's operations under the names of the array-API standard."""

    __name__ = "tensorflow"

    def __getattr__(self, name: str) -> Any:
        if name in _RENAMED:
            return _RENAMED[name]
        return getattr(tf.math, name) if hasattr(tf.math, name) else getattr(tf, name)


class _NoMean:
    """Metric that records nothing, in place of the mean of the losses."""

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the loss: nothing is recorded."""


class _UntrackedLosses(compile_utils.LossesContainer):  # type: ignore[misc]  # tf_keras has no types
    """Compiled form of a loss without metrics, so that evaluating it changes none of the model's."""

    def __init__(self, losses: Any, weights: Any = None, names: Any = None) -> None:
        super().__init__(losses, weights, names, total_loss_mean=_NoMean())

    def _create_metrics(self) -> None:
        self._per_output_metrics = [None] * len(self._losses)


class Keras2(Dialect):
    """Dialect of ``tf_keras``; see :class:`rnnlens.adapters.keras.dialect.Dialect`."""

    name, engine_name = "tf_keras", "tensorflow"
    version = str(tf_keras.__version__)
    mean_code, sum_code = "tf.reduce_mean(...)", "tf.reduce_sum(...)"
    weighs_steps = False
    layers, activations, losses, models = tf_keras.layers, tf_keras.activations, tf_keras.losses, tf_keras.models
    ops, tree = _Ops, _Tree
    Layer, Model, Sequential, Functional = tf_keras.layers.Layer, tf_keras.Model, tf_keras.Sequential, Functional
    Variable = tf.Variable

    #: Exact cell types and the classes with their equations; those of ``tf.compat.v1`` differ in defaults only.
    cells: Mapping[type, type[Cell] | Mapping[int, type[Cell]]] = {
        tf_keras.layers.SimpleRNNCell: SimpleRNN,
        tf_keras.layers.LSTMCell: LSTM,
        tf_keras.layers.GRUCell: GRU,
        lstm_v1.LSTMCell: LSTM,
        gru_v1.GRUCell: GRU,
        base_conv_lstm.ConvLSTMCell: {1: ConvLSTM1D, 2: ConvLSTM2D, 3: ConvLSTM3D},
    }
    known_activations: Mapping[Any, str] = {
        **{getattr(tf_keras.activations, theirs): ours for theirs, ours in _ACTIVATION_NAMES.items()},
        **_TENSORFLOW_ACTIVATIONS,
    }
    single_precision = frozenset({"gelu"})

    hook = staticmethod(keras2_run.hook)
    dropout_multipliers = staticmethod(keras2_run.dropout_multipliers)
    refusal = staticmethod(keras2_run.refusal)

    # -- the engine, dtypes, values
    floatx = staticmethod(tf_keras.backend.floatx)

    def computation_dtype(self, dtype: str) -> str:
        """Return ``dtype``: TensorFlow computes in the dtype of its inputs."""
        return dtype

    def mask_of(self, tensor: Any) -> Any:
        return getattr(tensor, "_keras_mask", None)

    def set_mask(self, tensor: Any, mask: Any) -> None:
        tensor._keras_mask = mask

    def namespace(self) -> Namespace:
        return _ArrayFunctions()

    # -- variables
    def path(self, variable: Any) -> str:
        return str(variable.name).partition(":")[0]

    def own_variables(self, layer: Any) -> list[Any]:
        return [*layer._trainable_weights, *layer._non_trainable_weights]

    def regularizers(self, layer: Any) -> Mapping[int, Any]:
        """Map the id of each regularised variable of the layer and its sublayers to its regulariser.

        Keras 2 stores a penalty as a function without arguments; the regulariser is read from its closure.
        """
        by_variable_id: dict[int, Any] = {}
        for sublayer in layer._flatten_layers() if isinstance(layer, tf_keras.layers.Layer) else ():
            for callable_loss in sublayer._callable_losses:
                bound_penalty: Any = getattr(callable_loss, "args", (None,))[0]
                variable = next(iter(getattr(bound_penalty, "args", ())), None)
                if variable is not None:
                    closure = dict(
                        zip(bound_penalty.func.__code__.co_freevars, bound_penalty.func.__closure__ or (), strict=True)
                    )
                    by_variable_id[id(variable)] = closure["regularizer"].cell_contents
        return by_variable_id

    def variables(self, model: Any) -> list[Any]:
        metrics = [v for metric in getattr(model, "metrics", ()) for v in metric.variables]
        layers = model._flatten_layers() if isinstance(model, tf_keras.layers.Layer) else ()
        states = [v for layer in layers for v in tf.nest.flatten(getattr(layer, "_states", None))]
        all_variables = [*getattr(model, "variables", ()), *metrics, *states]
        return [v for v in {id(v): v for v in all_variables}.values() if isinstance(v, tf.Variable)]

    # -- layers and cells
    def state_size(self, layer: Any) -> Any:
        return _sizes(layer.cell.state_size)

    def state_template(self, cell: Any) -> Any:
        size = _sizes(cell.state_size)
        return size if tf.nest.is_nested(size) else [size]

    def output_size(self, cell: Any) -> Any:
        try:
            size = getattr(cell, "output_size", None)
        except NotImplementedError:
            return None
        return None if size is None else _sizes(size)

    def draws_random_numbers(self, layer: Any) -> bool:
        rates = ("dropout", "recurrent_dropout", "rate")
        return hasattr(layer, "_random_generator") and not any(hasattr(layer, name) for name in rates)

    def time_major(self, layer: Any) -> bool:
        return bool(layer.time_major)

    def name_counters(self) -> dict[str, int]:
        counters: dict[str, int] = backend.get_default_graph_uid_map()
        return counters

    def operations(self, model: Any) -> list[Any] | None:
        if type(model) not in (tf_keras.Sequential, Functional) or "call" in vars(model) or not model._is_graph_network:
            return None
        return [layer for layer in model._self_tracked_trackables if isinstance(layer, tf_keras.layers.Layer)]

    def graph_of(self, model: Any) -> tuple[Any, Any]:
        return getattr(model, "_nested_inputs", None), getattr(model, "_nested_outputs", None)

    def build_shape(self, model: Any) -> Any:
        shape = getattr(model, "_build_input_shape", None)
        return tuple(shape.as_list()) if isinstance(shape, tf.TensorShape) and shape.rank is not None else shape

    # -- a run
    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Let initializers draw from ``seed`` within the block, also after a call of ``set_random_seed``."""
        members = vars(backend._SEED_GENERATOR)
        previous = members.get("generator")
        members["generator"] = random.Random(seed)
        try:
            with super().seeded(seed):
                yield
        finally:
            members["generator"] = previous

    @contextmanager
    def variables_substituted(
        self, model: Any, values: Sequence[Any] | None, seeds: Sequence[Any], weights: Mapping[str, Any], tap: Tap
    ) -> Iterator[None]:
        """Tap ``weights``, and within the block draw random numbers from ``seeds``.

        ``values`` is not used: variables are read as they are. :meth:`model_state_restored` resets what a run
        assigns.
        """
        del values
        for key, variable in weights.items():
            tap(f"weight|{key}", variable)
        with keras2_run.stateless(model, seeds):
            yield

    seed_tensors = staticmethod(keras2_run.seed_tensors)
    cell_weights_substituted = staticmethod(keras2_run.cell_weights_substituted)

    def step(self, cell: Any, x: Any, states: Any) -> tuple[Any, Any]:
        """Call a cell once, as ``RNN.call`` does; return its output and its list of states.

        Cells of TensorFlow itself take and may return a single state without a list.
        """
        takes_single_state = getattr(cell, "_is_tf_rnn_cell", None) is not None and len(states) == 1
        call_cell = cell if callable(cell) else cell.call
        output, new_states = call_cell(x, states[0] if takes_single_state else states)
        return output, new_states if tf.nest.is_nested(new_states) else [new_states]

    @contextmanager
    def model_state_restored(self, model: Any, seed: int | None) -> Iterator[None]:
        """Restore on exit the variables, the collected losses and TensorFlow's random generators."""
        with self.engine.random_state_restored(seed), keras2_run.state_restored(model, self.variables(model)):
            yield

    def initial_state(self, cell: Any, samples: int) -> Any:
        return cell.get_initial_state(inputs=None, batch_size=samples, dtype=cell.dtype or self.floatx())

    unwrapped = staticmethod(keras2_run.unwrapped)

    def is_short(self, x: Any) -> bool:
        """Return whether ``x`` has at most 64 steps: tracing takes longer than running these eagerly."""
        return all(len(t.shape) < 2 or t.shape[1] <= _MAX_EAGER_STEPS for t in tf.nest.flatten(x))

    # -- the loss
    def is_compiled(self, model: Any) -> bool:
        return bool(model._is_compiled)

    def compiled_loss(self, model: Any) -> Any:
        return None if self.user_loss(model) is None else model.compiled_loss

    def user_loss(self, model: Any) -> Any:
        return getattr(getattr(model, "compiled_loss", None), "_user_losses", None)

    def compiled_form(self, loss: Any, weights: Any = None, names: Any = None) -> Callable[[Any, Any, Any], Any]:
        return _UntrackedLosses(loss, weights, names)

    def training_loss(self, model: Any, x: Any, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
        del training
        return model.compute_loss(x, y, y_pred, weight)

    def builds_graph(self, layer: Any) -> bool:
        return any(base.__module__.endswith("base_layer_v1") for base in type(layer).__mro__)

    @contextmanager
    def compiled_loss_unchanged(self, model: Any, regularised: bool) -> Iterator[None]:
        """Temporarily replace the compiled loss by a copy that updates no metric.

        Penalties of weights have a gradient only if ``regularised``.
        """
        compiled = vars(model).get("compiled_loss")
        with overriding() as override:
            if compiled is not None:
                loss_arguments = compiled._user_losses, compiled._user_loss_weights, compiled._output_names
                override(model, "compiled_loss", _UntrackedLosses(*loss_arguments))
            for layer in () if regularised else model._flatten_layers():
                if layer._callable_losses:
                    stopped_losses = [
                        substitute_in_this_thread(_without_gradient(p), p) for p in layer._callable_losses
                    ]
                    override(layer, "_callable_losses", stopped_losses)
            yield

    def align_ranks(self, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """Return targets and outputs with the dtype and rank matched, as a compiled loss function receives them."""
        y, y_pred, _ = compile_utils.match_dtype_and_rank(tf.convert_to_tensor(y), y_pred, None)
        y_pred, y = losses_utils.squeeze_or_expand_dimensions(y_pred, y)
        return y, y_pred

    def adds_losses(self, model: Any) -> bool:
        layers = model._flatten_layers()
        return any((la._losses or la._eager_losses) and la._activity_regularizer is None for la in layers)


def _without_gradient(loss: Any) -> Any:
    def loss_without_gradient() -> Any:
        value = loss()
        return None if value is None else tf.stop_gradient(value)

    return loss_without_gradient


def _sizes(sizes: Any) -> Any:
    """Return the same nested sizes as integers; a cell may declare ``TensorShape([3])`` for 3."""
    return tf.nest.map_structure(lambda size: int(np.prod(tf.TensorShape(size).as_list())), sizes)


dialect: Dialect = Keras2()
