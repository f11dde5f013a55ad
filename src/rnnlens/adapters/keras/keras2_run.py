"""Hooks and stateless runs of ``tf_keras``: ``_process_inputs`` and ``call`` of a recurrent layer are hooked.

``_process_inputs`` prepares the input and the initial state (given, stored, or zeros); ``call`` returns the output and
the final states. Between them the layer may run a loop over its cell, an unrolled loop, or the fused kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.python.trackable import data_structures
from tf_keras.src import backend
from tf_keras.src.layers.rnn import base_conv_lstm, base_conv_rnn, base_cudnn_rnn, gru_v1, lstm_v1

from ...errors import UnsupportedError, impure_cell_message
from .dialect import Override
from .discover import RecurrentSite, refuse_random
from .hooks import LayerCall, LayerRecorder, own_errors_unchanged
from .restore import overriding
from .weights import known_class

_OWN_CALLS = tuple(
    kind.call
    for kind in (
        *(tf_keras.layers.RNN, tf_keras.layers.SimpleRNN, tf_keras.layers.LSTM, tf_keras.layers.GRU),
        *(lstm_v1.LSTM, gru_v1.GRU, base_conv_lstm.ConvLSTM, base_conv_rnn.ConvRNN),
    )
)


def refusal(layer: Any) -> tuple[str, str] | None:
    """Return (reason, workaround) if a recurrent layer cannot be hooked; None if it can."""
    if isinstance(layer, base_cudnn_rnn._CuDNNRNN):
        return "is a cuDNN kernel, which runs on a GPU only", "the layer LSTM or GRU, which uses that kernel there"
    if type(layer).call not in _OWN_CALLS:
        return "has a call of its own", "write the recurrence as a cell, tf_keras.layers.RNN(cell)"
    if layer._num_constants:
        return "hands constants to its cell", "concatenate them to the input of every step"
    sizes = [size for size in tf.nest.flatten(layer.cell.state_size) if not isinstance(size, int)]
    if any(tf.TensorShape(size).rank not in (0, 1) for size in sizes):
        return "has states with several axes", "a cell whose states are (sample, unit)"
    if getattr(layer, "_could_use_gpu_kernel", False):
        activations, cell = tf_keras.activations, layer.cell
        if cell.activation not in (activations.tanh, tf.tanh) or cell.recurrent_activation not in (
            activations.sigmoid,
            tf.sigmoid,
        ):
            reason = "was built for tanh and sigmoid, and ignores activations that its cell was given later"
            return reason, "pass activation= when creating the layer"
    return None


def hook(recorder: LayerRecorder, site: RecurrentSite, direction_index: int, override: Override) -> None:
    """Override the methods of a recurrent layer that prepare its input and return its output.

    With the fused kernel, the layer applies dropout to its input before the recurrence. The hook applies it instead, so
    that the recorded input is the input of the recurrence.
    """
    layer = site.layer
    process_inputs, original_call, signature = layer._process_inputs, layer.call, inspect.signature(layer.call)
    fused = getattr(layer, "_could_use_gpu_kernel", False)
    draw_dropout: Any = layer.get_dropout_mask_for_cell if fused else None
    pending_calls: list[dict[str, Any]] = []

    def process(inputs: Any, initial_state: Any, constants: Any) -> Any:
        sequence, state, constants = process_inputs(inputs, initial_state, constants)
        with own_errors_unchanged():
            if tf.nest.is_nested(sequence):
                problem = f"Layer {site.name!r}: its input is nested."
                raise UnsupportedError(problem, hint="concatenate the parts along the last axis")
            if constants:
                problem = f"Layer {site.name!r}: its cell takes constants."
                raise UnsupportedError(problem, hint="make them a part of the input")
            refuse_random(site, bool(pending_calls[-1]["training"]))
        state = tf.nest.map_structure(tf.convert_to_tensor, state)
        if fused and 0.0 < layer.cell.dropout < 1.0 and pending_calls[-1]["training"]:
            # The fused kernel draws one mask per gate, and uses the first.
            sequence = (
                sequence * draw_dropout(sequence, True, count=4 if isinstance(layer, tf_keras.layers.LSTM) else 3)[0]
            )
        with own_errors_unchanged():
            mask = pending_calls[-1]["mask"]
            swapped_input, mask = _samples_first(layer, sequence), None if mask is None else _samples_first(layer, mask)
            can_join_steps = mask is None and known_class(layer.cell) is not None
            step_recorder = recorder.step_recorder(site, swapped_input, state) if can_join_steps else None
            if step_recorder is not None:
                cell_run, x, state = step_recorder.start_step(swapped_input[:, 0], state)
                pending_calls[-1]["step"] = partial(step_recorder.end_step, cell_run)
                return _samples_first(layer, x[:, None]), state, constants
            call, swapped_input, state = recorder.start_recurrent_call(
                site, direction_index, swapped_input, state, mask
            )
        pending_calls[-1]["call"] = call
        return _samples_first(layer, swapped_input), state, constants

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        with own_errors_unchanged():
            inputs = bound.arguments["inputs"]
            if any(
                isinstance(tensor, tf.RaggedTensor) for tensor in (inputs if isinstance(inputs, list) else [inputs])
            ):
                raise UnsupportedError(
                    f"Layer {site.name!r}: its input is a RaggedTensor.",
                    expected="a tensor of shape (sample, time, feature), with a mask for samples that are shorter",
                    hint="x.to_tensor(), and a Masking layer",
                )
        mask: Any = bound.arguments.get("mask")
        mask = mask[0] if tf.nest.is_nested(mask) else mask
        pending_calls.append({"mask": mask, "training": bound.arguments.get("training")})
        with recorder.inside_a_layer():
            result = original_call(*args, **kwargs)
        pending_call = pending_calls.pop()
        with own_errors_unchanged():
            if "step" in pending_call:
                output, states = pending_call["step"](result[1], list(result[1:]))
                sequence = _samples_first(layer, output[:, None])
                return [sequence if layer.return_sequences else output, *states]
            return _record_output(recorder, site, result, pending_call["call"], pending_call["training"])

    override(layer, "_process_inputs", process)
    if fused:
        override(layer, "get_dropout_mask_for_cell", lambda *args, **kwargs: None)
    override(layer, "call", call)


def _record_output(recorder: LayerRecorder, site: RecurrentSite, result: Any, call: LayerCall, training: Any) -> Any:
    """Record the output of a layer and its final states; return the tapped tensors, with which the run continues."""
    layer = site.layer
    output, states = (result[0], result[1:]) if layer.return_state else (result, None)
    if tf.nest.is_nested(output):
        raise UnsupportedError(
            f"Layer {site.name!r}: the cell has several outputs.", expected="one tensor of shape (sample, unit)"
        )
    swap_axes: Any = _samples_first if layer.return_sequences else lambda _, tensor: tensor
    output, states = recorder.record_results(site, call, swap_axes(layer, output), states, training)
    output = swap_axes(layer, output)
    return output if states is None else [output, *states]


def _samples_first(layer: Any, tensor: Any) -> Any:
    """Swap the first two axes of a tensor if the layer is time-major. A second call restores the order."""
    if not layer.time_major:
        return tensor
    return tf.transpose(tensor, [1, 0, *range(2, len(tensor.shape))])


def dropout_multipliers(layer: Any) -> dict[str, Any]:
    """Return the dropout multipliers of a known cell, the same at each step; one per gate for ``implementation=1``."""
    if getattr(layer, "_could_use_gpu_kernel", False):
        return {}  # the fused kernel drops entries of the layer's input, which is recorded after that
    cell: Any = layer.cell
    multipliers: dict[str, Any] = {}
    for name, cache, rate in (
        ("input_scale", "_dropout_mask_cache", "dropout"),
        ("state_scale", "_recurrent_dropout_mask_cache", "recurrent_dropout"),
    ):
        if not 0.0 < getattr(cell, rate, 0.0) < 1.0:
            continue
        mask_cache = getattr(cell, cache)
        masks = mask_cache._get_recursive(mask_cache._key())
        if isinstance(masks, list):
            multipliers[name] = tf.stack(masks) if getattr(cell, "implementation", 1) == 1 else masks[0]
        else:
            multipliers[name] = masks
    return multipliers


#: Attributes with the dropout masks that a cell has drawn, and the methods that draw them.
_DROPOUT_MASKS = {
    "_dropout_mask_cache": "_create_dropout_mask",
    "_recurrent_dropout_mask_cache": "_create_recurrent_dropout_mask",
}


class _MaskPerCall(backend.ContextValueCache):  # type: ignore[misc]  # tf_keras has no types
    """Cache of one dropout mask for all steps of a call, shared with the graphs of loops inside it.

    The cache of Keras 2 would draw another mask in such a graph.
    """

    def setdefault(self, key: Any = None, default: Any = None, kwargs: Any = None) -> Any:
        cached_mask = self._get_recursive(self._key())
        return super().setdefault(key, default, kwargs) if cached_mask is None else cached_mask


class _Generator:
    """Substitute for a ``RandomGenerator``: all draws are determined by one seed."""

    _rng_type = "stateless"

    def __init__(self, seed: Any) -> None:
        self._seed, self._draws = seed, 0

    def make_seed_for_stateless_op(self) -> Any:
        self._draws += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._draws)

    def make_legacy_seed(self) -> int:
        self._draws += 1
        return self._draws

    def dropout(self, inputs: Any, rate: Any, noise_shape: Any = None) -> Any:
        seed = self.make_seed_for_stateless_op()
        return tf.nn.experimental.stateless_dropout(inputs, rate=rate, noise_shape=noise_shape, seed=seed)

    def random_normal(self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, **_: Any) -> Any:
        return self._draw_with_seed(tf.random.stateless_normal, shape, mean, stddev, dtype)

    def random_uniform(self, shape: Any, minval: Any = 0.0, maxval: Any = None, dtype: Any = None, **_: Any) -> Any:
        return self._draw_with_seed(
            tf.random.stateless_uniform, shape, minval, 1.0 if maxval is None else maxval, dtype
        )

    def truncated_normal(self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, **_: Any) -> Any:
        return self._draw_with_seed(tf.random.stateless_truncated_normal, shape, mean, stddev, dtype)

    def _draw_with_seed(self, draw: Any, shape: Any, first_parameter: Any, second_parameter: Any, dtype: Any) -> Any:
        return draw(
            shape,
            self.make_seed_for_stateless_op(),
            first_parameter,
            second_parameter,
            dtype or tf_keras.backend.floatx(),
        )


def _random_layers(model: Any) -> list[Any]:
    return [layer for layer in model._flatten_layers() if "_random_generator" in vars(layer)]


def seed_tensors(model: Any, seed: int | None) -> list[Any]:
    """Return one seed of two integers for each random generator in ``model``."""
    pairs = [
        np.random.SeedSequence([seed or 0, i]).generate_state(2) % 2**31 for i, _ in enumerate(_random_layers(model))
    ]
    return [tf.constant(seed_pair.astype(np.int32)) for seed_pair in pairs]


@contextmanager
def stateless(model: Any, seeds: Sequence[Any]) -> Iterator[None]:
    """Let the layers of ``model`` draw from ``seeds`` within the block; their own generators do not advance."""
    with overriding() as override:
        for layer, seed in zip(_random_layers(model), seeds, strict=True):
            override(layer, "_random_generator", _Generator(seed))
            for name, make in _DROPOUT_MASKS.items():
                if name in vars(layer):
                    override(layer, name, _MaskPerCall(getattr(layer, make)))
        for layer in model._flatten_layers():
            if isinstance(layer, tf_keras.Sequential) and layer._graph_initialized:
                # For another number of steps it would rebuild its graph, by calling its layers on symbolic tensors
                # during the run; its present graph accepts any number.
                override(layer, "_build_graph_network_for_inferred_shape", lambda *shape_and_dtype: None)
        yield


@contextmanager
def state_restored(model: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Restore on exit the values of variables, and the losses that layers collected.

    Losses collected in a compiled run are tensors of a graph that no longer exists.
    """
    # read_value shares memory with the variable, and an assignment allocates new memory: no copy is made here.
    values = [(v, v.read_value()) for v in variables if v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool]
    layers = list(model._flatten_layers()) if isinstance(model, tf_keras.layers.Layer) else []
    losses = [(layer, list(layer._eager_losses)) for layer in layers]
    try:
        yield
    finally:
        for variable, value in values:
            current, original = np.asarray(variable.read_value()), np.asarray(value)
            shares_memory = current.__array_interface__["data"] == original.__array_interface__["data"]
            if not shares_memory and current.tobytes() != original.tobytes():
                variable.assign(value)
        for layer, collected in losses:
            layer._thread_local._eager_losses = collected


@contextmanager
def cell_weights_substituted(cell: Any, weights: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Temporarily substitute tensors for variables of a cell and its sublayers; ``weights`` lists such pairs."""
    tensors_by_id = {id(variable): tensor for variable, tensor in weights}
    substituted_ids: set[int] = set()
    with overriding() as override:
        for layer in (cell, *getattr(cell, "submodules", ())):
            dtype = getattr(layer, "compute_dtype", None)
            for name, value in list(vars(layer).items()):
                if not name.startswith(("_trainable_w", "_non_trainable_w", "_self_")):
                    substitute = _substitute_variables(value, tensors_by_id, dtype, substituted_ids)
                    if substitute is not value:
                        override(layer, name, substitute)
        if tensors_by_id.keys() - substituted_ids:
            missing_names = [variable.name for variable, _ in weights if id(variable) not in substituted_ids]
            raise UnsupportedError(
                impure_cell_message(type(cell).__name__, f"weights not found in it: {missing_names}")
            )
        yield


def _substitute_variables(
    value: Any, tensors_by_id: dict[int, Any], dtype: str | None, substituted_ids: set[int]
) -> Any:
    """Return a value, or nested lists and dicts, with each ``tf.Variable`` replaced by the tensor given for its ``id``.

    The ids of replaced variables are added to ``substituted_ids``. A value without such variables is returned as it is.
    """
    if isinstance(value, tf.Variable):
        tensor = tensors_by_id.get(id(value))
        if tensor is None:
            return value
        substituted_ids.add(id(value))
        return tf.cast(tensor, dtype) if dtype and tensor.dtype.is_floating else tensor
    if isinstance(value, (list, tuple)):
        substitutes = [_substitute_variables(item, tensors_by_id, dtype, substituted_ids) for item in value]
        return value if all(a is b for a, b in zip(substitutes, value, strict=True)) else type(value)(substitutes)
    if isinstance(value, dict):
        items = {key: _substitute_variables(item, tensors_by_id, dtype, substituted_ids) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    return value


def unwrapped(value: Any) -> Any:
    """Return the list, dict or tuple inside a tracking wrapper of TensorFlow; None for other objects."""
    if isinstance(value, data_structures.ListWrapper):
        return value._storage
    if type(value) in (data_structures._DictWrapper, data_structures._TupleWrapper):
        return value.__wrapped__
    return None
