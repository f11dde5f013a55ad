"""``tf_keras``, the Keras 2 that lives on: what :class:`.dialect.Dialect` asks, answered on TensorFlow.

Only what runs eagerly or in a ``tf.function``: models of the engine without eager execution are graphs. Names that are
private to the package are relied on, so other versions than the one that the tests run on are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src.engine import base_layer_v1, compile_utils
from tf_keras.src.engine.functional import Functional
from tf_keras.src.layers.rnn import gru_v1, lstm_v1
from tf_keras.src.utils import losses_utils

from ...autodiff import Engine, Tap, engine
from ...errors import UnsupportedError, message
from ...recurrence.cells import GRU, LSTM, Cell, SimpleRNN
from ...typing import Array, Namespace
from . import keras2_run
from .dialect import Dialect, own_array
from .keras2_ops import ArrayFunctions, Ops, Tree, UntrackedLosses, undisturbed

#: The versions on which the tests run.
_VERSIONS = ("2.21.",)

#: Steps that are run one by one sooner than they are traced.
_SHORT = 64

#: Names of Keras 2 and ours.
_NAMES = {
    **{name: name for name in ("linear", "tanh", "sigmoid", "relu", "elu", "selu", "softplus", "softsign", "gelu")},
    **{name: name for name in ("exponential", "mish", "softmax")},
    "swish": "silu",
    "hard_sigmoid": "hard_sigmoid_keras2",
}
#: TensorFlow's own functions, which people write for the same.
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
        message(
            "This version of tf_keras is not one that rnnlens was tested on.",
            got=f"tf_keras {tf_keras.__version__}",
            expected=", ".join(f"tf_keras {version}x" for version in _VERSIONS),
            hint="pip install --no-deps 'tf_keras==2.21.*', with tensorflow 2.21",
        )
    )


class Keras2:
    """See :class:`rnnlens.adapters.keras.dialect.Dialect`."""

    name = "tf_keras"
    version = str(tf_keras.__version__)
    says_mean, says_sum = "tf.reduce_mean(...)", "tf.reduce_sum(...)"
    weighs_steps = False
    layers, activations, losses, models = tf_keras.layers, tf_keras.activations, tf_keras.losses, tf_keras.models
    ops, tree = Ops, Tree
    Layer, Model, Sequential, Functional = tf_keras.layers.Layer, tf_keras.Model, tf_keras.Sequential, Functional
    Variable = tf.Variable

    #: The cells whose equations are known, by their exact types; those of ``tf.compat.v1`` have other defaults only.
    cells: Mapping[type, type[Cell]] = {
        tf_keras.layers.SimpleRNNCell: SimpleRNN,
        tf_keras.layers.LSTMCell: LSTM,
        tf_keras.layers.GRUCell: GRU,
        lstm_v1.LSTMCell: LSTM,
        gru_v1.GRUCell: GRU,
    }
    known_activations: Mapping[Any, str] = {
        **{getattr(tf_keras.activations, theirs): ours for theirs, ours in _NAMES.items()},
        **_OF_TENSORFLOW,
    }
    single_precision = frozenset({"gelu"})

    listen = staticmethod(keras2_run.listen)
    refusal = staticmethod(keras2_run.refusal)
    undisturbed = staticmethod(undisturbed)

    def is_graph(self, thing: Any) -> bool:
        """Whether a layer is one of the engine for graphs and sessions."""
        return isinstance(thing, base_layer_v1.Layer)

    # -- the engine, dtypes, values
    @cached_property
    def engine(self) -> Engine:
        """TensorFlow."""
        return engine("tensorflow", _with_mask)

    def floatx(self) -> str:
        """The dtype of floats unless a layer says otherwise."""
        return str(tf_keras.backend.floatx())

    def dtype_of(self, tensor: Any) -> str:
        """Its name, such as ``"float32"``."""
        return str(tf.as_dtype(tensor.dtype).name)

    def is_float(self, tensor: Any) -> bool:
        """Whether a tensor or variable holds floats."""
        return bool(tf.as_dtype(tensor.dtype).is_floating)

    def computed(self, dtype: str) -> str:
        """What operations on this dtype are computed in."""
        return dtype

    def value_of(self, tensor: Any) -> Array:
        """A NumPy copy; halves become float32."""
        return own_array(self.engine.to_array(tf.convert_to_tensor(tensor)))

    def mask_of(self, tensor: Any) -> Any:
        """The mask that Keras attached to a tensor; None where there is none."""
        return getattr(tensor, "_keras_mask", None)

    def set_mask(self, tensor: Any, mask: Any) -> None:
        """Attach a mask to a tensor."""
        tensor._keras_mask = mask

    def namespace(self) -> Namespace:
        """TensorFlow's functions under the names of the array-API standard."""
        return ArrayFunctions()

    # -- variables
    def variable_name(self, variable: Any) -> str:
        """The last part of its path: ``"kernel"``."""
        return self.path(variable).rpartition("/")[2]

    def path(self, variable: Any) -> str:
        """``"lstm/lstm_cell/kernel"``."""
        return str(variable.name).partition(":")[0]

    def own_variables(self, layer: Any) -> list[Any]:
        """Of a layer alone, without those of its parts."""
        return [*layer._trainable_weights, *layer._non_trainable_weights]

    def regularizers(self, layer: Any) -> Mapping[int, Any]:
        """Keras 2 keeps a penalty as a function of no arguments: what it calls, and on what, is written in it."""
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
        """All whose values a run may read, those of metrics and recorded states included."""
        metrics = [v for metric in getattr(model, "metrics", ()) for v in metric.variables]
        layers = model._flatten_layers() if isinstance(model, tf_keras.layers.Layer) else ()
        states = [v for layer in layers for v in tf.nest.flatten(getattr(layer, "_states", None))]
        found = [*getattr(model, "variables", ()), *metrics, *states]
        return [v for v in {id(v): v for v in found}.values() if isinstance(v, tf.Variable)]

    # -- layers and cells
    def state_size(self, layer: Any) -> Any:
        """Whole numbers, nested as the cell nests them."""
        return _sizes(layer.cell.state_size)

    def template(self, cell: Any) -> Any:
        """The nesting in which a recurrent layer hands states to a cell, with sizes for leaves."""
        size = _sizes(cell.state_size)
        return size if tf.nest.is_nested(size) else [size]

    def output_size(self, cell: Any) -> Any:
        """None where it says nothing: ``AbstractRNNCell`` raises, which ``getattr`` lets through."""
        try:
            size = getattr(cell, "output_size", None)
        except NotImplementedError:
            return None
        return None if size is None else _sizes(size)

    def draws(self, layer: Any) -> bool:
        """Whether a layer has a generator of random numbers that no rate of it speaks of."""
        rates = ("dropout", "recurrent_dropout", "rate")
        return hasattr(layer, "_random_generator") and not any(hasattr(layer, name) for name in rates)

    def time_major(self, layer: Any) -> bool:
        """Whether the first axis of a layer's input is time."""
        return bool(layer.time_major)

    def inputs_of(self, node: Any) -> list[Any]:
        """Tensors that went into one call of a layer."""
        return list(tf.nest.flatten(node.input_tensors))

    def in_order(self, model: Any) -> list[Any] | None:
        """The layers of a model that is one plain chain; None for any other."""
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
        """Nested inputs and outputs of a model that was built from tensors; None for each where it was not."""
        return getattr(model, "_nested_inputs", None), getattr(model, "_nested_outputs", None)

    def built_on(self, model: Any) -> Any:
        """The shape that a model was built on; None where not known."""
        shape = getattr(model, "_build_input_shape", None)
        return tuple(shape.as_list()) if isinstance(shape, tf.TensorShape) and shape.rank is not None else shape

    def build(self, model: Any, x: Any) -> None:
        """Create the weights of a model: by its shape for a ``Sequential``, else by a call on ``x``."""
        if isinstance(model, tf_keras.Sequential) and tf.is_tensor(x):
            model.build((None, *x.shape[1:]))
        else:
            model(x)

    def is_own(self, thing: Any) -> bool:
        """Whether a class or function stands in this package."""
        return str(getattr(thing, "__module__", "")).startswith("tf_keras.")

    # -- a run
    def asks_for_training(self, model: Any) -> bool:
        """Always: what ``call`` does not take, Keras 2 keeps for the layers within."""
        del model
        return True

    def values(self, variables: Sequence[Any]) -> list[Any] | None:
        """The run reads the variables themselves."""
        del variables
        return None

    def seeds(self, model: Any, seed: int | None) -> list[Any]:
        """One pair of numbers for each generator; the same every time unless ``seed`` says otherwise."""
        return keras2_run.seeds(model, seed)

    @contextmanager
    def running(
        self, model: Any, values: Sequence[Any] | None, seeds: Sequence[Any], weights: Mapping[str, Any], tap: Tap
    ) -> Iterator[None]:
        """Variables are read as they are, and watched where they are tapped; what a run writes is put back later."""
        del values
        for key, variable in weights.items():
            tap(f"weight|{key}", variable)
        with keras2_run.stateless(model, seeds):
            yield

    @contextmanager
    def standing(self, model: Any, values: Sequence[Any], seeds: Sequence[Any]) -> Iterator[None]:
        """The model as it stands."""
        del values
        with keras2_run.stateless(model, seeds):
            yield

    stepping = staticmethod(keras2_run.stepping)

    def step(self, cell: Any, x: Any, states: Any) -> tuple[Any, Any]:
        """As ``RNN.call`` does: cells of TensorFlow take a single state bare, and may return it so."""
        bare = getattr(cell, "_is_tf_rnn_cell", None) is not None and len(states) == 1
        called = cell if callable(cell) else cell.call
        output, new = called(x, states[0] if bare else states)
        return output, new if tf.nest.is_nested(new) else [new]

    @contextmanager
    def as_found(self, model: Any, seed: int | None) -> Iterator[None]:
        """Variables that a run assigns, losses that it collects, and TensorFlow's random numbers come back on exit."""
        del seed
        with keras2_run.held(self.variables(model)), keras2_run.collected(model), keras2_run.generators():
            yield

    def plain_values(self, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Nothing to run with; the variables of floats, to be watched."""
        return [], [v for v in variables if self.is_float(v)]

    def initial_state(self, cell: Any, samples: int) -> Any:
        """The states that a cell with a ``get_initial_state`` of its own starts from."""
        return cell.get_initial_state(inputs=None, batch_size=samples, dtype=cell.dtype or self.floatx())

    def books(self, layer: Any) -> Iterator[Any]:
        """Containers in which a layer keeps what its calls add."""
        for name in ("_losses", "_callable_losses", "_updates", "_metrics"):
            if name in vars(layer):
                yield vars(layer)[name]

    def tracks(self, value: Any) -> bool:
        """Keras 2 tracks in the containers themselves."""
        del value
        return False

    inside = staticmethod(keras2_run.inside)

    def is_short(self, x: Any) -> bool:
        """A step takes some milliseconds as it is; to trace a loop and its gradient takes a second."""
        return all(len(t.shape) < 2 or t.shape[1] <= _SHORT for t in tf.nest.flatten(x))

    def stamp(self, model: Any, loss: Any) -> Hashable | None:
        """Not known: every run is traced."""
        del model, loss
        return None

    # -- the loss
    def is_overridden(self, model: Any) -> bool:
        """Whether a model computes its loss in a method of its own."""
        return isinstance(model, tf_keras.Model) and type(model).compute_loss is not tf_keras.Model.compute_loss

    def is_compiled(self, model: Any) -> bool:
        """Whether ``compile`` was called."""
        return bool(model._is_compiled)

    def compiled_loss(self, model: Any) -> Any:
        """What ``compile`` made of the loss; None where it was given none."""
        return None if self.user_loss(model) is None else model.compiled_loss

    def user_loss(self, model: Any) -> Any:
        """The loss as it was given to ``compile``."""
        return getattr(getattr(model, "compiled_loss", None), "_user_losses", None)

    def compiled_form(self, loss: Any, weights: Any = None, names: Any = None) -> Callable[[Any, Any, Any], Any]:
        """The loss as ``compile(loss=...)`` would take it; no metric of anybody's is moved."""
        return UntrackedLosses(loss, weights, names)

    def whole_loss(self, model: Any, x: Any, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
        """The loss that training minimises."""
        del training
        return model.compute_loss(x, y, y_pred, weight)

    def aligned(self, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """As the wrapper of a compiled function does: dtype and rank of the output."""
        y, y_pred, _ = compile_utils.match_dtype_and_rank(tf.convert_to_tensor(y), y_pred, None)
        y_pred, y = losses_utils.squeeze_or_expand_dimensions(y_pred, y)
        return y, y_pred

    def adds_losses(self, model: Any) -> bool:
        """After a call: whether a layer called ``add_loss``."""
        layers = model._flatten_layers()
        return any((la._losses or la._eager_losses) and la._activity_regularizer is None for la in layers)


def _with_mask(old: Any, new: Any) -> Any:
    """The new tensor, with the mask that Keras attached to the old one."""
    mask = getattr(old, "_keras_mask", None)
    if mask is not None:
        new._keras_mask = mask
    return new


def _sizes(sizes: Any) -> Any:
    """Sizes as whole numbers: a cell may say ``TensorShape([3])`` for 3."""
    return tf.nest.map_structure(lambda size: int(np.prod(tf.TensorShape(size).as_list())), sizes)


dialect: Dialect = Keras2()
