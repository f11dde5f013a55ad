"""``tf_keras`` (Keras 2 on TensorFlow): implementation of :class:`.dialect.Dialect`.

Models must run eagerly or in a ``tf.function``; graph models of TensorFlow 1 are refused. The module uses private names
of the package, so versions other than the tested ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src.engine import base_layer_v1, compile_utils
from tf_keras.src.engine.functional import Functional
from tf_keras.src.layers.rnn import base_conv_lstm, gru_v1, lstm_v1
from tf_keras.src.utils import losses_utils

from ...autodiff import Engine, Tap, engine
from ...errors import UnsupportedError
from ...recurrence.cells import GRU, LSTM, Cell, ConvLSTM1D, ConvLSTM2D, ConvLSTM3D, SimpleRNN
from ...typing import Namespace
from . import keras2_run
from .dialect import Dialect
from .keras2_ops import ArrayFunctions, Ops, Tree, UntrackedLosses, undisturbed

#: Prefixes of the tested versions of ``tf_keras``.
_VERSIONS = ("2.21.",)

#: Largest number of steps for which eager execution takes less time than tracing.
_SHORT = 64

#: Name of an activation in Keras 2 -> its name in ``recurrence.activations``.
_NAMES = {
    **{name: name for name in ("linear", "tanh", "sigmoid", "relu", "elu", "selu", "softplus", "softsign", "gelu")},
    **{name: name for name in ("exponential", "mish", "softmax")},
    "swish": "silu",
    "hard_sigmoid": "hard_sigmoid_keras2",
}
#: TensorFlow's functions that users pass as activations -> their names in ``recurrence.activations``.
_OF_TENSORFLOW = {
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


class Keras2(Dialect):
    """Dialect of ``tf_keras``; see :class:`rnnlens.adapters.keras.dialect.Dialect`."""

    name = "tf_keras"
    version = str(tf_keras.__version__)
    says_mean, says_sum = "tf.reduce_mean(...)", "tf.reduce_sum(...)"
    weighs_steps = False
    layers, activations, losses, models = tf_keras.layers, tf_keras.activations, tf_keras.losses, tf_keras.models
    ops, tree = Ops, Tree
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
        **{getattr(tf_keras.activations, theirs): ours for theirs, ours in _NAMES.items()},
        **_OF_TENSORFLOW,
    }
    single_precision = frozenset({"gelu"})

    hook = staticmethod(keras2_run.hook)
    dropout = staticmethod(keras2_run.dropout)
    refusal = staticmethod(keras2_run.refusal)
    undisturbed = staticmethod(undisturbed)

    def is_graph(self, thing: Any) -> bool:
        """Return whether a layer is one of ``base_layer_v1``, which runs in graphs and sessions only."""
        return isinstance(thing, base_layer_v1.Layer)

    # -- the engine, dtypes, values
    @cached_property
    def engine(self) -> Engine:
        """The TensorFlow engine; it carries Keras masks over to replaced tensors."""
        return engine("tensorflow", self.with_mask)

    def floatx(self) -> str:
        """Return the default float dtype, such as ``"float32"``."""
        return str(tf_keras.backend.floatx())

    def dtype_of(self, tensor: Any) -> str:
        """Return the name of a tensor's dtype, such as ``"float32"``."""
        return str(tf.as_dtype(tensor.dtype).name)

    def is_float(self, tensor: Any) -> bool:
        """Return whether the dtype of a tensor or variable is a float."""
        return bool(tf.as_dtype(tensor.dtype).is_floating)

    def computed(self, dtype: str) -> str:
        """Return ``dtype``: TensorFlow computes in the dtype of its inputs."""
        return dtype

    def mask_of(self, tensor: Any) -> Any:
        """Return the mask that Keras attached to a tensor; None if there is none."""
        return getattr(tensor, "_keras_mask", None)

    def set_mask(self, tensor: Any, mask: Any) -> None:
        """Attach a mask to a tensor."""
        tensor._keras_mask = mask

    def namespace(self) -> Namespace:
        """Return TensorFlow's functions under the names of the array-API standard."""
        return ArrayFunctions()

    # -- variables
    def path(self, variable: Any) -> str:
        """Return the path of a variable, such as ``"lstm/lstm_cell/kernel"``."""
        return str(variable.name).partition(":")[0]

    def own_variables(self, layer: Any) -> list[Any]:
        """Return the variables of a layer without those of its sublayers."""
        return [*layer._trainable_weights, *layer._non_trainable_weights]

    def regularizers(self, layer: Any) -> Mapping[int, Any]:
        """Map the id of each regularised variable of the layer and its sublayers to its regulariser.

        Keras 2 stores a penalty as a function without arguments; the regulariser is read from its closure.
        """
        found: dict[int, Any] = {}
        for part in layer._flatten_layers() if isinstance(layer, tf_keras.layers.Layer) else ():
            for callable_loss in part._callable_losses:
                inner: Any = getattr(callable_loss, "args", (None,))[0]
                variable = next(iter(getattr(inner, "args", ())), None)
                if variable is not None:
                    inside = dict(zip(inner.func.__code__.co_freevars, inner.func.__closure__ or (), strict=True))
                    found[id(variable)] = inside["regularizer"].cell_contents
        return found

    def variables(self, model: Any) -> list[Any]:
        """Return all variables that a run may read, those of metrics and stateful layers included."""
        metrics = [v for metric in getattr(model, "metrics", ()) for v in metric.variables]
        layers = model._flatten_layers() if isinstance(model, tf_keras.layers.Layer) else ()
        states = [v for layer in layers for v in tf.nest.flatten(getattr(layer, "_states", None))]
        found = [*getattr(model, "variables", ()), *metrics, *states]
        return [v for v in {id(v): v for v in found}.values() if isinstance(v, tf.Variable)]

    # -- layers and cells
    def state_size(self, layer: Any) -> Any:
        """Return the state sizes declared by the layer's cell as integers, nested as in the cell."""
        return _sizes(layer.cell.state_size)

    def template(self, cell: Any) -> Any:
        """Return the nested structure of the states that a cell takes, with sizes as leaves."""
        size = _sizes(cell.state_size)
        return size if tf.nest.is_nested(size) else [size]

    def output_size(self, cell: Any) -> Any:
        """Return the output size declared by a cell; None if it declares none or raises NotImplementedError."""
        try:
            size = getattr(cell, "output_size", None)
        except NotImplementedError:
            return None
        return None if size is None else _sizes(size)

    def draws(self, layer: Any) -> bool:
        """Return whether a layer has a random generator that no dropout rate among its attributes accounts for."""
        rates = ("dropout", "recurrent_dropout", "rate")
        return hasattr(layer, "_random_generator") and not any(hasattr(layer, name) for name in rates)

    def time_major(self, layer: Any) -> bool:
        """Return whether the first axis of a layer's input is time."""
        return bool(layer.time_major)

    def inputs_of(self, node: Any) -> list[Any]:
        """Return the input tensors of one symbolic call of a layer."""
        return list(tf.nest.flatten(node.input_tensors))

    def in_order(self, model: Any) -> list[Any] | None:
        """Return the layers of a model that is one plain chain, without input layers; None for any other model."""
        if type(model) not in (tf_keras.Sequential, Functional) or "call" in vars(model) or not model._is_graph_network:
            return None
        if len(model.inputs) != 1 or len(model.outputs) != 1:
            return None
        layers = [layer for layer in model._self_tracked_trackables if isinstance(layer, tf_keras.layers.Layer)]
        for first, second in pairwise(layers):
            nodes = second._inbound_nodes
            if len(nodes) != 1 or len(nodes[0].keras_inputs) != 1:
                return None
            if nodes[0].keras_inputs[0]._keras_history.layer is not first:
                return None
        return [layer for layer in layers if type(layer) is not tf_keras.layers.InputLayer]

    def graph_of(self, model: Any) -> tuple[Any, Any]:
        """Return the nested symbolic inputs and outputs of a functional model; (None, None) for any other model."""
        return getattr(model, "_nested_inputs", None), getattr(model, "_nested_outputs", None)

    def built_on(self, model: Any) -> Any:
        """Return the shape on which a model was built; None if unknown."""
        shape = getattr(model, "_build_input_shape", None)
        return tuple(shape.as_list()) if isinstance(shape, tf.TensorShape) and shape.rank is not None else shape

    def build(self, model: Any, x: Any) -> None:
        """Create the weights of a model: from the shape of ``x`` for a ``Sequential``, else by a call on ``x``."""
        if isinstance(model, tf_keras.Sequential) and tf.is_tensor(x):
            model.build((None, *x.shape[1:]))
        else:
            model(x)

    # -- a run
    def asks_for_training(self, model: Any) -> bool:
        """Return True: every Keras 2 model takes ``training`` and passes it to its layers."""
        del model
        return True

    def seeds(self, model: Any, seed: int | None) -> list[Any]:
        """Return one seed of two integers for each random generator; the same at each call unless ``seed`` differs."""
        return keras2_run.seeds(model, seed)

    @contextmanager
    def running(
        self, model: Any, values: Sequence[Any] | None, seeds: Sequence[Any], weights: Mapping[str, Any], tap: Tap
    ) -> Iterator[None]:
        """Tap ``weights``, and within the block draw random numbers from ``seeds``.

        ``values`` is not used: variables are read as they are. :meth:`as_found` restores what a run assigns.
        """
        del values
        for key, variable in weights.items():
            tap(f"weight|{key}", variable)
        with keras2_run.stateless(model, seeds):
            yield

    @contextmanager
    def standing(self, model: Any, values: Sequence[Any], seeds: Sequence[Any]) -> Iterator[None]:
        """Draw random numbers from ``seeds`` within the block; ``values`` is not used."""
        del values
        with keras2_run.stateless(model, seeds):
            yield

    stepping = staticmethod(keras2_run.stepping)

    def step(self, cell: Any, x: Any, states: Any) -> tuple[Any, Any]:
        """Call a cell once, as ``RNN.call`` does; return its output and its list of states.

        Cells of TensorFlow itself take and may return a single state without a list.
        """
        bare = getattr(cell, "_is_tf_rnn_cell", None) is not None and len(states) == 1
        called = cell if callable(cell) else cell.call
        output, new = called(x, states[0] if bare else states)
        return output, new if tf.nest.is_nested(new) else [new]

    @contextmanager
    def as_found(self, model: Any, seed: int | None) -> Iterator[None]:
        """Restore on exit the variables, the collected losses and TensorFlow's random generator."""
        del seed
        with keras2_run.held(self.variables(model)), keras2_run.collected(model), keras2_run.generators():
            yield

    def plain_values(self, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return no replacement tensors, and the float variables to differentiate directly."""
        return [], [v for v in variables if self.is_float(v)]

    def initial_state(self, cell: Any, samples: int) -> Any:
        """Return the states from the cell's own ``get_initial_state`` for a number of samples."""
        return cell.get_initial_state(inputs=None, batch_size=samples, dtype=cell.dtype or self.floatx())

    def books(self, layer: Any) -> Iterator[Any]:
        """Iterate over the containers that a layer's calls append to."""
        for name in ("_losses", "_callable_losses", "_updates", "_metrics"):
            if name in vars(layer):
                yield vars(layer)[name]

    inside = staticmethod(keras2_run.inside)

    def is_short(self, x: Any) -> bool:
        """Return whether ``x`` has at most 64 steps: tracing takes longer than running these eagerly."""
        return all(len(t.shape) < 2 or t.shape[1] <= _SHORT for t in tf.nest.flatten(x))

    # -- the loss
    def is_compiled(self, model: Any) -> bool:
        """Return whether ``compile`` was called on the model."""
        return bool(model._is_compiled)

    def compiled_loss(self, model: Any) -> Any:
        """Return the compiled loss, a function of ``(y, y_pred, sample_weight)``; None if there is none."""
        return None if self.user_loss(model) is None else model.compiled_loss

    def user_loss(self, model: Any) -> Any:
        """Return the loss that was passed to ``compile``; None if there is none."""
        return getattr(getattr(model, "compiled_loss", None), "_user_losses", None)

    def compiled_form(self, loss: Any, weights: Any = None, names: Any = None) -> Callable[[Any, Any, Any], Any]:
        """Return ``loss`` as the function of ``(y, y_pred, sample_weight)`` that ``compile(loss=...)`` makes of it.

        It updates no metric.
        """
        return UntrackedLosses(loss, weights, names)

    def whole_loss(self, model: Any, x: Any, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
        """Return the loss that training minimises: compiled loss, loss weights, regularisers and ``add_loss``."""
        del training
        return model.compute_loss(x, y, y_pred, weight)

    def aligned(self, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """Return targets and outputs with the dtype and rank matched, as a compiled loss function receives them."""
        y, y_pred, _ = compile_utils.match_dtype_and_rank(tf.convert_to_tensor(y), y_pred, None)
        y_pred, y = losses_utils.squeeze_or_expand_dimensions(y_pred, y)
        return y, y_pred

    def adds_losses(self, model: Any) -> bool:
        """Return whether a layer called ``add_loss`` in the last call of the model."""
        layers = model._flatten_layers()
        return any((la._losses or la._eager_losses) and la._activity_regularizer is None for la in layers)


def _sizes(sizes: Any) -> Any:
    """Return the same nested sizes as integers; a cell may declare ``TensorShape([3])`` for 3."""
    return tf.nest.map_structure(lambda size: int(np.prod(tf.TensorShape(size).as_list())), sizes)


dialect: Dialect = Keras2()
