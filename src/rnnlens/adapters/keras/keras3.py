"""Keras 3, on TensorFlow, JAX and torch: what :class:`.dialect.Dialect` asks, in its own words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.layers.rnn.conv_lstm import ConvLSTMCell
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.utils.tracking import Tracker

from ...autodiff import Engine, Tap, engine
from ...recurrence.cells import GRU, LSTM, Cell, ConvLSTM1D, ConvLSTM2D, ConvLSTM3D, SimpleRNN
from ...typing import Array, Namespace
from ..shared.threads import substitute_in_this_thread
from . import keras3_loop
from .dialect import Dialect, own_array
from .keras3_stamps import stamp_of

_NAMES = (
    *("linear", "tanh", "sigmoid", "relu", "leaky_relu", "relu6", "elu", "celu", "selu", "softplus", "softsign"),
    *("squareplus", "soft_shrink", "hard_shrink", "tanh_shrink", "sparse_plus", "silu", "gelu", "sparse_sigmoid"),
    *("exponential", "hard_sigmoid", "hard_silu", "hard_tanh", "mish", "log_sigmoid", "softmax", "log_softmax"),
)

_UNINITIALIZED = "uninitialized_variables"
_SEEDS = "global_seed_generator"


class Keras3:
    """See :class:`rnnlens.adapters.keras.dialect.Dialect`."""

    name = "keras"
    says_mean, says_sum = "keras.ops.mean(...)", "keras.ops.sum(...)"
    weighs_steps = True
    version = str(keras.__version__)
    layers, activations, losses, models = keras.layers, keras.activations, keras.losses, keras.models
    ops, tree = keras.ops, keras.tree
    Layer, Model, Sequential, Functional = keras.layers.Layer, keras.Model, keras.Sequential, Functional
    Variable = keras.Variable

    #: The cells whose equations are known, by their exact types.
    #: The convolutional one by its number of axes of space.
    cells: Mapping[type, type[Cell] | Mapping[int, type[Cell]]] = {
        keras.layers.SimpleRNNCell: SimpleRNN,
        keras.layers.LSTMCell: LSTM,
        keras.layers.GRUCell: GRU,
        ConvLSTMCell: {1: ConvLSTM1D, 2: ConvLSTM2D, 3: ConvLSTM3D},
    }

    #: Keras' own activation functions that keep the shape of their input, by identity. Not ``sparsemax``: what Keras
    #: computes under that name is another function wherever the support is full.
    known_activations: Mapping[Any, str] = {getattr(keras.activations, name): name for name in _NAMES}

    listen = staticmethod(keras3_loop.listen)

    def is_graph(self, thing: Any) -> bool:
        """Never."""
        del thing
        return False

    # -- the engine, dtypes, values
    @cached_property
    def engine(self) -> Engine:
        """The engine that Keras runs on in this process."""
        return engine(keras.backend.backend(), _with_mask)

    @property
    def single_precision(self) -> frozenset[str]:
        """Activations with constants of single precision, by engine."""
        by_engine = {"torch": frozenset({"hard_sigmoid"}), "tensorflow": frozenset({"leaky_relu", "gelu"})}
        return by_engine.get(self.engine.name, frozenset())

    def floatx(self) -> str:
        """The dtype of floats unless a layer says otherwise."""
        return str(keras.backend.floatx())

    def dtype_of(self, tensor: Any) -> str:
        """Its name, such as ``"float32"``."""
        return str(keras.backend.standardize_dtype(tensor.dtype))

    def is_float(self, tensor: Any) -> bool:
        """Whether a tensor or variable holds floats."""
        return bool(keras.backend.is_float_dtype(self.dtype_of(tensor)))

    def computed(self, dtype: str) -> str:
        """On JAX and torch Keras' operations round float64 to float32 unless told not to."""
        return str(keras.backend.result_type(dtype, dtype))

    def value_of(self, tensor: Any) -> Array:
        """By way of the engine: where Keras itself asks a variable for an array, NumPy warns of how Keras gives it."""
        return own_array(self.engine.to_array(keras.ops.convert_to_tensor(tensor)))

    mask_of = staticmethod(get_keras_mask)

    def set_mask(self, tensor: Any, mask: Any) -> None:
        """Attach a mask to a tensor."""
        set_keras_mask(tensor, mask)

    def namespace(self) -> Namespace:
        """The array functions that the step of a registered cell is given, on tensors of this engine."""
        if self.engine.name == "torch":
            import array_api_compat.torch as xp

            return xp
        if self.engine.name == "jax":
            import jax.numpy

            return jax.numpy
        return _KerasOps()

    # -- variables
    def variable_name(self, variable: Any) -> str:
        """The last part of its path: ``"kernel"``."""
        return str(variable.name)

    def path(self, variable: Any) -> str:
        """``"lstm/lstm_cell/kernel"``."""
        return str(variable.path)

    def own_variables(self, layer: Any) -> list[Any]:
        """Of a layer alone, without those of its parts."""
        return [*layer._trainable_variables, *layer._non_trainable_variables]

    def regularizers(self, layer: Any) -> Mapping[int, Any]:
        """By the id of a variable of the layer or its parts, what penalises it."""
        found = getattr(layer, "variables", ())
        return {id(v): v.regularizer for v in found if getattr(v, "regularizer", None) is not None}

    def variables(self, model: Any) -> list[Any]:
        """All whose values a run may read; those that it makes itself are not among them."""
        seeds = global_state.get_global_attribute(_SEEDS)
        metrics = getattr(model, "metrics_variables", [])
        found = [*model.variables, *metrics, *([] if seeds is None else [seeds.state])]
        return [v for v in {id(v): v for v in found}.values() if v._value is not None]

    # -- layers and cells
    def state_size(self, layer: Any) -> Any:
        """State sizes declared by the layer's cell; of a convolution, which declares none, channels of h and c."""
        return [layer.cell.filters] * 2 if type(layer.cell) is ConvLSTMCell else layer.state_size

    def template(self, cell: Any) -> Any:
        """The nesting in which ``keras.layers.RNN`` hands the states to the cell, with sizes for leaves."""
        size = cell.state_size
        return [size] if isinstance(size, int) else list(size)

    def output_size(self, cell: Any) -> Any:
        """What a cell says of its output; None where it says nothing."""
        return getattr(cell, "output_size", None)

    def draws(self, layer: Any) -> bool:
        """Whether a layer has a generator of random numbers."""
        return bool(getattr(layer, "_seed_generators", None))

    refusal = staticmethod(keras3_loop.refusal)

    def time_major(self, layer: Any) -> bool:
        """Never: Keras 3 has samples first."""
        del layer
        return False

    def inputs_of(self, node: Any) -> list[Any]:
        """Tensors that went into one call of a layer."""
        return list(keras.tree.flatten(node.input_tensors))

    def in_order(self, model: Any) -> list[Any] | None:
        """The layers of a model that is one plain chain; None for any other."""
        if type(model) not in (keras.Sequential, Functional, keras.Model) or "call" in vars(model):
            return None
        functional = getattr(model, "_functional", None)
        operations = getattr(model, "operations", None) or getattr(functional, "operations", None)
        if operations is None or len(model.inputs) != 1 or len(model.outputs) != 1:
            return None
        operations = list(operations)
        for first, second in pairwise(operations):
            nodes = second._inbound_nodes
            if len(nodes) != 1 or len(nodes[0].input_tensors) != 1:
                return None
            if nodes[0].input_tensors[0]._keras_history.operation is not first:
                return None
        return [op for op in operations if type(op) is not keras.layers.InputLayer]

    def graph_of(self, model: Any) -> tuple[Any, Any]:
        """Nested inputs and outputs of a model that was built from tensors; None for each where it was not."""
        return getattr(model, "_inputs_struct", None), getattr(model, "_outputs_struct", None)

    def built_on(self, model: Any) -> Any:
        """The shape that a model was built on; None where there are several."""
        shapes = getattr(model, "_build_shapes_dict", None) or {}
        return next(iter(shapes.values())) if len(shapes) == 1 else None

    def build(self, model: Any, x: Any) -> None:
        """Create the weights of a model by a symbolic call, as ``fit`` does."""
        symbols = keras.tree.map_structure(lambda t: keras.KerasTensor((None, *t.shape[1:]), self.dtype_of(t)), x)
        backend.compute_output_spec(model, symbols)

    def is_own(self, thing: Any) -> bool:
        """Whether a class or function stands in this package."""
        return str(getattr(thing, "__module__", "")).startswith("keras.src.")

    # -- a run
    def asks_for_training(self, model: Any) -> bool:
        """Whether a model is told if it trains."""
        return bool(getattr(model, "_call_has_training_arg", False))

    def values(self, variables: Sequence[Any]) -> list[Any] | None:
        """What to run with in place of the values of variables; None where the run may read them itself."""
        return self.engine.values([v._value for v in variables])

    def seeds(self, model: Any, seed: int | None) -> list[Any]:
        """The states of the seed generators, or new ones after ``seed``."""
        random = _seed_states(self.variables(model))
        return [keras.ops.convert_to_tensor(v) if seed is None else _seeded(v, seed, i) for i, v in enumerate(random)]

    @contextmanager
    def running(
        self, model: Any, values: Sequence[Any] | None, seeds: Sequence[Any], weights: Mapping[str, Any], tap: Tap
    ) -> Iterator[None]:
        """No variable of the user's is written: they are read and written inside a ``keras.StatelessScope``."""
        variables = self.variables(model)
        held = {} if values is None else {id(v): a for v, a in zip(variables, values, strict=True)}
        held.update({id(v): a for v, a in zip(_seed_states(variables), seeds, strict=True)})
        for key, variable in weights.items():
            held[id(variable)] = tap(f"weight|{key}", held.get(id(variable), keras.ops.convert_to_tensor(variable)))
        for variable in variables:
            # Within a stateless scope Keras hands a regulariser None for a variable that the scope does not hold.
            if variable.regularizer is not None:
                held.setdefault(id(variable), keras.ops.convert_to_tensor(variable))
        mapping = [(v, held[id(v)]) for v in variables if id(v) in held]
        with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False):
            yield

    @contextmanager
    def stepping(self, cell: Any, weights: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """Within the block the variables of a cell hold the tensors that stand beside them."""
        del cell
        with keras.StatelessScope(list(weights), collect_losses=True, initialize_variables=False):
            yield

    def step(self, cell: Any, x: Any, states: Any) -> tuple[Any, Any]:
        """One call of a cell as its recurrent layer makes it."""
        output, new = cell(x, states)
        return output, new

    @contextmanager
    def as_found(self, model: Any, seed: int | None) -> Iterator[None]:
        """Random generators and Keras' process-wide state come back on exit. Variables need no care here."""
        del model
        pending = list(global_state.get_global_attribute(_UNINITIALIZED, []) or [])
        seeds = global_state.get_global_attribute(_SEEDS)
        if seeds is None:
            # Keras would make one from Python's random numbers, and keep it.
            global_state.set_global_attribute(_SEEDS, keras.random.SeedGenerator(0, name="rnnlens_seeds"))
        try:
            with self.engine.preserved(seed):
                yield
        finally:
            global_state.set_global_attribute(_UNINITIALIZED, pending or None)
            global_state.set_global_attribute(_SEEDS, seeds)

    def plain_values(self, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """All of them as tensors to run with."""
        return [keras.ops.convert_to_tensor(v) for v in variables], []

    @contextmanager
    def standing(self, model: Any, values: Sequence[Any], seeds: Sequence[Any]) -> Iterator[None]:
        """In a ``keras.StatelessScope`` of all variables."""
        variables = self.variables(model)
        mapping = [*zip(variables, values, strict=True), *zip(_seed_states(variables), seeds, strict=True)]
        with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False):
            yield

    def initial_state(self, cell: Any, samples: int) -> Any:
        """The states that a cell with a ``get_initial_state`` of its own starts from."""
        return cell.get_initial_state(batch_size=samples)

    def books(self, layer: Any) -> Iterator[Any]:
        """Containers in which a layer keeps what its calls add."""
        yield from (layer._losses, layer._loss_ids)

    def inside(self, value: Any) -> Any:
        """Keras 3 tracks in containers of its own kinds."""
        del value

    def tracks(self, value: Any) -> bool:
        """Whether this is a tracker of what layers hold."""
        return isinstance(value, Tracker)

    def is_short(self, x: Any) -> bool:
        """Never: JAX and TensorFlow run Keras 3 faster compiled."""
        del x
        return False

    def stamp(self, model: Any, loss: Any) -> Hashable | None:
        """All that a run depends on, where that is known."""
        return stamp_of(model, loss, self.engine)

    # -- the loss
    def is_overridden(self, model: Any) -> bool:
        """Whether a model computes its loss in a method of its own."""
        return isinstance(model, keras.Model) and type(model).compute_loss is not keras.Model.compute_loss

    def is_compiled(self, model: Any) -> bool:
        """Whether ``compile`` was called."""
        return bool(model.compiled)

    def compiled_loss(self, model: Any) -> Any:
        """What ``compile`` made of the loss."""
        return getattr(model, "_compile_loss", None)

    def user_loss(self, model: Any) -> Any:
        """The loss as it was given to ``compile``."""
        return getattr(self.compiled_loss(model), "_user_loss", None)

    def compiled_form(self, loss: Any, weights: Any = None, names: Any = None) -> Callable[[Any, Any, Any], Any]:
        """The loss as ``compile(loss=...)`` would take it: averaged over samples, several outputs, sample weights."""
        form: Callable[[Any, Any, Any], Any] = CompileLoss(loss, weights, output_names=names)
        return form

    def whole_loss(self, model: Any, x: Any, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
        """The loss that training minimises."""
        return model._compute_loss(x, y, y_pred, weight, training=training)

    @contextmanager
    def undisturbed(self, model: Any, regularised: bool) -> Iterator[None]:
        """No trace of an unbuilt loss; penalties of weights have a gradient if ``regularised``."""
        own = vars(model)
        saved = {name: own[name] for name in ("_get_regularization_losses", "_compile_loss") if name in own}
        regularisation = model._get_regularization_losses
        if not regularised:
            stopped = substitute_in_this_thread(
                lambda: [keras.ops.stop_gradient(loss) for loss in regularisation()], regularisation
            )
            own["_get_regularization_losses"] = stopped
        compiled = saved.get("_compile_loss")
        if compiled is not None and not compiled.built:
            given, weights = compiled._user_loss, compiled._user_loss_weights
            own["_compile_loss"] = self.compiled_form(given, weights, compiled.output_names)
        try:
            yield
        finally:
            own.pop("_get_regularization_losses", None)
            own.update(saved)

    def aligned(self, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """(n,) beside (n, 1) becomes (n, 1)."""
        found: tuple[Any, Any] = squeeze_or_expand_to_same_rank(y, y_pred)
        return found

    def adds_losses(self, model: Any) -> bool:
        """After a call: whether a layer called ``add_loss``."""
        return any(la._get_own_losses() and la.activity_regularizer is None for la in model._flatten_layers())


def _with_mask(old: Any, new: Any) -> Any:
    """The new tensor, with the mask that Keras attached to the old one."""
    mask = get_keras_mask(old)
    if mask is not None:
        set_keras_mask(new, mask)
    return new


def _seed_states(variables: Sequence[Any]) -> list[Any]:
    return [v for v in variables if v.name == "seed_generator_state"]


def _seeded(variable: Any, seed: int, index: int) -> Any:
    # Torch adds the two numbers of a seed, so neighbouring pairs would meet.
    mixed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) % 2**31
    return keras.ops.convert_to_tensor([mixed, 0], dtype=variable.dtype)


class _KerasOps:
    """Keras' operations under the names of the array-API standard."""

    __name__ = "keras.ops"

    def __getattr__(self, name: str) -> Any:
        ops = keras.ops
        renamed = {
            "concat": ops.concatenate,
            "permute_dims": ops.transpose,
            "astype": ops.cast,
            "pow": ops.power,
            "asarray": ops.convert_to_tensor,
        }
        return renamed[name] if name in renamed else getattr(ops, name)


dialect: Dialect = Keras3()
