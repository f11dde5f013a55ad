"""Keras 3 on TensorFlow, JAX and torch: implementation of :class:`.dialect.Dialect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from ...autodiff import Tap
from ...errors import UnsupportedError
from ...recurrence.cells import GRU, LSTM, Cell, ConvLSTM1D, ConvLSTM2D, ConvLSTM3D, SimpleRNN
from ...typing import Namespace
from ..shared import substitute_in_this_thread
from .dialect import Dialect, Override
from .discover import RecurrentSite, refuse_random
from .hooks import LayerRecorder, StepRecorder, own_errors_unchanged
from .keras3_stamps import stamp_of
from .restore import overriding

_ACTIVATION_NAMES = (
    *("linear", "tanh", "sigmoid", "relu", "leaky_relu", "relu6", "elu", "celu", "selu", "softplus", "softsign"),
    *("squareplus", "soft_shrink", "hard_shrink", "tanh_shrink", "sparse_plus", "silu", "gelu", "sparse_sigmoid"),
    *("exponential", "hard_sigmoid", "hard_silu", "hard_tanh", "mish", "log_sigmoid", "softmax", "log_softmax"),
)

_OWN_LOOPS = (keras.layers.RNN, keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU)
_UNINITIALIZED = "uninitialized_variables"
_SEEDS = "global_seed_generator"


class Keras3(Dialect):
    """Dialect of Keras 3; see :class:`rnnlens.adapters.keras.dialect.Dialect`."""

    name, engine_name = "keras", keras.backend.backend()
    mean_code, sum_code = "keras.ops.mean(...)", "keras.ops.sum(...)"
    weighs_steps = True
    version = str(keras.__version__)
    layers, activations, losses, models = keras.layers, keras.activations, keras.losses, keras.models
    ops, tree = keras.ops, keras.tree
    Layer, Model, Sequential, Functional = keras.layers.Layer, keras.Model, keras.Sequential, Functional
    Variable = keras.Variable

    #: Exact cell types and the classes with their equations.
    #: For ConvLSTMCell, number of spatial axes -> class.
    cells: Mapping[type, type[Cell] | Mapping[int, type[Cell]]] = {
        keras.layers.SimpleRNNCell: SimpleRNN,
        keras.layers.LSTMCell: LSTM,
        keras.layers.GRUCell: GRU,
        ConvLSTMCell: {1: ConvLSTM1D, 2: ConvLSTM2D, 3: ConvLSTM3D},
    }

    #: Keras' activation functions that keep the shape of their input, by identity. Without ``sparsemax``: Keras
    #: computes a different function if all entries of the result are positive.
    known_activations: Mapping[Any, str] = {getattr(keras.activations, name): name for name in _ACTIVATION_NAMES}

    # -- the engine, dtypes, values
    @property
    def single_precision(self) -> frozenset[str]:
        by_engine = {"torch": frozenset({"hard_sigmoid"}), "tensorflow": frozenset({"leaky_relu", "gelu"})}
        return by_engine.get(self.engine.name, frozenset())

    floatx = staticmethod(keras.backend.floatx)

    def computation_dtype(self, dtype: str) -> str:
        """Return the dtype of operations on ``dtype``: JAX and torch may round float64 to float32."""
        return str(keras.backend.result_type(dtype, dtype))

    mask_of, set_mask = staticmethod(get_keras_mask), staticmethod(set_keras_mask)

    def namespace(self) -> Namespace:
        if self.engine.name == "torch":
            import array_api_compat.torch as xp

            return xp
        if self.engine.name == "jax":
            import jax.numpy

            return jax.numpy
        return _KerasOps()

    # -- variables
    def variables(self, model: Any) -> list[Any]:
        seeds = global_state.get_global_attribute(_SEEDS)
        metrics = getattr(model, "metrics_variables", [])
        all_variables = [*model.variables, *metrics, *([] if seeds is None else [seeds.state])]
        return [v for v in {id(v): v for v in all_variables}.values() if v._value is not None]

    # -- layers and cells
    def state_size(self, layer: Any) -> Any:
        """Return the state sizes declared by the layer's cell; for a ConvLSTM the channels of h and c."""
        return [layer.cell.filters] * 2 if type(layer.cell) is ConvLSTMCell else layer.state_size

    def refusal(self, layer: Any) -> tuple[str, str] | None:
        if any(type(layer).inner_loop is loop.inner_loop for loop in _OWN_LOOPS):
            return None
        return "overrides inner_loop", "write the recurrence as a cell, keras.layers.RNN(cell)"

    # -- a run
    def name_counters(self) -> dict[str, int]:
        counters: dict[str, int] = global_state.get_global_attribute("object_name_uids") or {}
        return counters

    def hook(self, recorder: LayerRecorder, site: RecurrentSite, direction_index: int, override: Override) -> None:
        """Override the ``inner_loop`` of a recurrent layer, and switch off the fused kernel of a bidirectional one.

        ``inner_loop`` receives the mask and the initial state (given, stored, or zeros), the dropout multipliers are
        drawn by then, and its result is the layer's output. The fused kernel would not call it.
        """
        override(site.layer, "inner_loop", _hooked_loop(recorder, site, direction_index))
        if site.bidirectional:
            override(site.owner, "_can_attempt_fused_lstm", lambda *args, **kwargs: False)
            override(site.owner, "_can_attempt_fused_gru", lambda *args, **kwargs: False)

    def switch_cudnn_off(self, model: Any, override: Override) -> None:
        if self.engine.on_accelerator:
            for layer in model._flatten_layers():
                if getattr(layer, "use_cudnn", False):
                    override(layer, "use_cudnn", False)

    def dropout_multipliers(self, layer: Any) -> dict[str, Any]:
        cell, multipliers = layer.cell, {}
        for name, attribute, rate in (
            ("input_scale", "_dropout_mask", "dropout"),
            ("state_scale", "_recurrent_dropout_mask", "recurrent_dropout"),
        ):
            mask = getattr(cell, attribute, None)
            if mask is not None and 0.0 < getattr(cell, rate, 0.0) < 1.0:
                multipliers[name] = keras.ops.stack(mask) if isinstance(mask, list | tuple) else mask
        return multipliers

    def variable_values(self, variables: Sequence[Any]) -> list[Any] | None:
        return self.engine.values([v._value for v in variables])

    def seed_tensors(self, model: Any, seed: int | None) -> list[Any]:
        seed_states = _seed_states(self.variables(model))
        return [
            keras.ops.convert_to_tensor(v) if seed is None else _seed_tensor(v, seed, i)
            for i, v in enumerate(seed_states)
        ]

    @contextmanager
    def variables_substituted(
        self, model: Any, values: Sequence[Any] | None, seeds: Sequence[Any], weights: Mapping[str, Any], tap: Tap
    ) -> Iterator[None]:
        """Open a ``keras.StatelessScope`` with tapped weights, values and seeds: no variable is written."""
        variables = self.variables(model)
        substitutes = {} if values is None else {id(v): a for v, a in zip(variables, values, strict=True)}
        substitutes.update({id(v): a for v, a in zip(_seed_states(variables), seeds, strict=True)})
        for key, variable in weights.items():
            substitutes[id(variable)] = tap(
                f"weight|{key}", substitutes.get(id(variable), keras.ops.convert_to_tensor(variable))
            )
        for variable in variables:
            # For a variable without a value in the scope, Keras would pass None to its regulariser.
            if variable.regularizer is not None:
                substitutes.setdefault(id(variable), keras.ops.convert_to_tensor(variable))
        mapping = [(v, substitutes[id(v)]) for v in variables if id(v) in substitutes]
        with keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False):
            yield

    @contextmanager
    def cell_weights_substituted(self, cell: Any, weights: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        del cell
        with keras.StatelessScope(list(weights), collect_losses=True, initialize_variables=False):
            yield

    @contextmanager
    def model_state_restored(self, model: Any, seed: int | None) -> Iterator[None]:
        """Restore on exit the random generators and Keras' process-wide state.

        Variables need no restoring, because a run writes them only in its ``keras.StatelessScope``.
        """
        del model
        pending = list(global_state.get_global_attribute(_UNINITIALIZED, []) or [])
        seeds = global_state.get_global_attribute(_SEEDS)
        if seeds is None:
            # Otherwise Keras would create and keep one, seeded from Python's random numbers.
            global_state.set_global_attribute(_SEEDS, keras.random.SeedGenerator(0, name="rnnlens_seeds"))
        try:
            with self.engine.random_state_restored(seed):
                yield
        finally:
            global_state.set_global_attribute(_UNINITIALIZED, pending or None)
            global_state.set_global_attribute(_SEEDS, seeds)

    def is_tracker(self, value: Any) -> bool:
        return isinstance(value, Tracker)

    stamp = staticmethod(stamp_of)

    # -- the loss
    def compiled_form(self, loss: Any, weights: Any = None, names: Any = None) -> Callable[[Any, Any, Any], Any]:
        form: Callable[[Any, Any, Any], Any] = CompileLoss(loss, weights, output_names=names)
        return form

    @contextmanager
    def compiled_loss_unchanged(self, model: Any, regularised: bool) -> Iterator[None]:
        """Temporarily replace a compiled loss that is not built yet by a copy; the model's own stays unbuilt.

        Penalties of weights have a gradient if ``regularised``.
        """
        regularisation, compiled = model._get_regularization_losses, vars(model).get("_compile_loss")
        with overriding() as override:
            if not regularised:
                stopped = substitute_in_this_thread(
                    lambda: [keras.ops.stop_gradient(loss) for loss in regularisation()], regularisation
                )
                override(model, "_get_regularization_losses", stopped)
            if compiled is not None and not compiled.built:
                loss_arguments = compiled._user_loss, compiled._user_loss_weights, compiled.output_names
                override(model, "_compile_loss", self.compiled_form(*loss_arguments))
            yield

    def align_ranks(self, y: Any, y_pred: Any) -> tuple[Any, Any]:
        """Return targets and outputs with the same rank: (n,) becomes (n, 1) if the other is (n, 1)."""
        aligned_pair: tuple[Any, Any] = squeeze_or_expand_to_same_rank(y, y_pred)
        return aligned_pair


def _hooked_loop(recorder: LayerRecorder, site: RecurrentSite, direction_index: int) -> Callable[..., Any]:
    original, layer = site.layer.inner_loop, site.layer
    is_reversed = not site.bidirectional and _is_reversed_by_cudnn(layer)  # before cuDNN is switched off

    def inner_loop(sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        mask = mask[0] if keras.tree.is_nested(mask) else mask
        initial_state = keras.tree.map_structure(_state_tensor, initial_state)
        with own_errors_unchanged():
            if mask is not None and dialect.engine.name == "torch" and layer.unroll and layer.go_backwards:
                raise UnsupportedError(
                    f"Layer {site.name!r}: Keras on torch cannot run unroll=True with go_backwards=True and a mask.",
                    hint="unroll=False",
                )
            if is_reversed and mask is None:
                raise UnsupportedError(
                    f"Layer {site.name!r}: on a GPU, Keras on JAX returns the steps of this layer in another order.",
                    got="go_backwards=True, return_sequences=True, computed by cuDNN",
                    expected="the order of every other engine, the last step first",
                    hint="keras.layers.LSTM(..., use_cudnn=False)",
                )
            refuse_random(site, bool(training))
            step_recorder = recorder.step_recorder(site, sequences, initial_state)
            if step_recorder is not None:
                return run_one_step(step_recorder, sequences, initial_state, mask)
            call, sequences, initial_state = recorder.start_recurrent_call(
                site, direction_index, sequences, initial_state, mask
            )
        with recorder.inside_a_layer():
            last_output, outputs, states = original(sequences, initial_state, mask, training=training)
        if layer.return_sequences:
            outputs, states = recorder.record_results(site, call, outputs, states, training)
        else:
            last_output, states = recorder.record_results(site, call, last_output, states, training)
        return last_output, outputs, states

    def run_one_step(step_recorder: StepRecorder, sequences: Any, initial_state: Any, mask: Any) -> Any:
        cell_run, x, states = step_recorder.start_step(sequences[:, 0], initial_state)
        options = {"training": recorder.training} if getattr(layer.cell, "_call_has_training_arg", False) else {}
        with recorder.inside_a_layer(), step_recorder.early_state_tapped(cell_run):
            output, new_states = layer.cell(x, states, **options)
        new_states = keras.tree.pack_sequence_as(states, keras.tree.flatten(new_states))
        output, new_states = step_recorder.end_step(cell_run, output, new_states)
        if mask is not None:
            new_states = keras.tree.map_structure(lambda a, b: keras.ops.where(mask, a, b), new_states, states)
            # Its only step is a layer's first, before which there is no output.
            from_state = keras.backend.backend() == "jax" and not layer.unroll and not layer.zero_output_for_mask
            previous_output = keras.tree.flatten(states)[0] if from_state else keras.ops.zeros_like(output)
            output = keras.ops.where(mask, output, previous_output)
        return output, keras.ops.expand_dims(output, 1), new_states

    return inner_loop


def _is_reversed_by_cudnn(layer: Any) -> bool:
    """Return whether Keras' JAX engine computes a layer by cuDNN and turns its output round (as of Keras 3.15)."""
    backwards = layer.go_backwards and layer.return_sequences and dialect.engine_name == "jax"
    if not (backwards and isinstance(layer, keras.layers.LSTM) and dialect.engine.on_accelerator):
        return False
    cell = layer.cell
    is_fused = backend.cudnn_ok(cell.activation, cell.recurrent_activation, layer.unroll, use_bias=cell.use_bias)
    return bool(layer.use_cudnn and is_fused and not layer.recurrent_dropout)


def _state_tensor(state: Any) -> Any:
    """Return the value of a stateful layer's variable as a tensor that can be differentiated."""
    if not isinstance(state, keras.Variable):
        return state
    value = state.value  # on TensorFlow a tf.Variable; a tape only watches a value that is read from it
    return value.read_value() if hasattr(value, "read_value") else keras.ops.convert_to_tensor(value)


def _seed_states(variables: Sequence[Any]) -> list[Any]:
    return [v for v in variables if v.name == "seed_generator_state"]


def _seed_tensor(variable: Any, seed: int, index: int) -> Any:
    # Torch adds the two numbers of a seed, so different pairs could give the same draws.
    seed_number = int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) % 2**31
    return keras.ops.convert_to_tensor([seed_number, 0], dtype=variable.dtype)


class _KerasOps:
    """Namespace of Keras' operations under the names of the array-API standard."""

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
