"""How ``tf_keras`` is listened to: at ``_process_inputs`` and ``call`` of a recurrent layer.

In the one the input and the initial state (given, recorded, or zeros) are settled; the other returns what the layer
returns. Between them the layer may take any of its ways: a loop over its cell, an unrolled one, or the fused kernel.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import tf_keras
from tf_keras.src.layers.rnn import base_cudnn_rnn, gru_v1, lstm_v1

from ...errors import UnsupportedError, message
from .hooks import Call, Listener, own_errors_unchanged, refuse_random

if TYPE_CHECKING:
    from .dialect import Override
    from .discover import Site

_OWN_CALLS = tuple(
    kind.call
    for kind in (
        *(tf_keras.layers.RNN, tf_keras.layers.SimpleRNN, tf_keras.layers.LSTM, tf_keras.layers.GRU),
        *(lstm_v1.LSTM, gru_v1.GRU),
    )
)


def refusal(layer: Any) -> tuple[str, str] | None:
    """Why a recurrent layer cannot be listened to, and what to do instead."""
    if isinstance(layer, base_cudnn_rnn._CuDNNRNN):
        return "is one kernel of cuDNN, which runs on a GPU only", "the layer LSTM or GRU, which uses that kernel there"
    if type(layer).call not in _OWN_CALLS:
        return "has a call of its own", "write the recurrence as a cell, tf_keras.layers.RNN(cell)"
    if layer._num_constants:
        return "hands constants to its cell", "make them a part of the input of every step"
    sizes = [size for size in tf.nest.flatten(layer.cell.state_size) if not isinstance(size, int)]
    if any(tf.TensorShape(size).rank not in (0, 1) for size in sizes):
        return "has states with several axes", "a cell whose states are (sample, unit)"
    if _ignores_its_activation(layer):
        return (
            "was made for tanh and sigmoid, and goes on with them whatever its cell was given since",
            "give activation= when making the layer",
        )
    return None


def _ignores_its_activation(layer: Any) -> bool:
    if not getattr(layer, "_could_use_gpu_kernel", False):
        return False
    act, rec = layer.cell.activation, layer.cell.recurrent_activation
    own = tf_keras.activations
    return act not in (own.tanh, tf.tanh) or rec not in (own.sigmoid, tf.sigmoid)


def listen(listener: Listener, site: Site, half: int, override: Override) -> None:
    """Override what settles the input, and what returns the output.

    The fused kernel drops another part of its input at every step, before the recurrence starts: that is done here, so
    that what is heard as the input is what the recurrence takes.
    """
    layer = site.layer
    settle, run, signature = layer._process_inputs, layer.call, inspect.signature(layer.call)
    fused = getattr(layer, "_could_use_gpu_kernel", False)
    drop: Any = layer.get_dropout_mask_for_cell if fused else None
    given: list[dict[str, Any]] = []

    def process(inputs: Any, initial_state: Any, constants: Any) -> Any:
        sequence, state, constants = settle(inputs, initial_state, constants)
        with own_errors_unchanged():
            _refuse_nested(site, sequence, constants)
            refuse_random(site, bool(given[-1]["training"]))
        state = tf.nest.map_structure(tf.convert_to_tensor, state)
        if fused and 0.0 < layer.cell.dropout < 1.0 and given[-1]["training"]:
            sequence = sequence * drop(sequence, True, count=_gates(layer))[0]
        with own_errors_unchanged():
            mask = given[-1]["mask"]
            swapped, mask = _samples_first(layer, sequence), None if mask is None else _samples_first(layer, mask)
            call, swapped, state = listener.enters(site, half, swapped, state, mask)
        given[-1]["call"] = call
        return _samples_first(layer, swapped), state, constants

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        with own_errors_unchanged():
            _refuse_ragged(site, bound.arguments["inputs"])
        mask: Any = bound.arguments.get("mask")
        mask = mask[0] if tf.nest.is_nested(mask) else mask
        given.append({"mask": mask, "training": bound.arguments.get("training")})
        result = run(*args, **kwargs)
        with own_errors_unchanged():
            return _heard(listener, site, result, **given.pop())

    override(layer, "_process_inputs", process)
    if fused:
        override(layer, "get_dropout_mask_for_cell", lambda *args, **kwargs: None)
    override(layer, "call", call)


def _gates(layer: Any) -> int:
    """How many masks the fused kernel draws, of which it uses the first."""
    return 4 if isinstance(layer, tf_keras.layers.LSTM) else 3


def _heard(listener: Listener, site: Site, result: Any, *, call: Call, mask: Any, training: Any) -> Any:
    """What the layer returned: the output, and the states where it returns them."""
    del mask
    layer = site.layer
    if "dropout" in listener.keep and training:
        call.arrays.update(_dropout(layer))
    output, states = (result[0], result[1:]) if layer.return_state else (result, None)
    if tf.nest.is_nested(output):
        raise UnsupportedError(
            message(
                f"Layer {site.name!r}: the cell has several outputs.", expected="one tensor of shape (sample, unit)"
            )
        )
    if layer.return_sequences:
        output = _samples_first(layer, listener.hears(call, "output", _samples_first(layer, output)))
    else:
        output = listener.hears(call, "output", output)
    return output if states is None else [output, *listener.hears_all(call, "final_state", states)]


def _samples_first(layer: Any, tensor: Any) -> Any:
    """Of a layer that has time first, the tensor turned; and back, if it is asked again."""
    if not layer.time_major:
        return tensor
    return tf.transpose(tensor, [1, 0, *range(2, len(tensor.shape))])


def _refuse_nested(site: Site, sequence: Any, constants: Any) -> None:
    if tf.nest.is_nested(sequence):
        raise UnsupportedError(
            message(f"Layer {site.name!r}: its input is nested.", hint="concatenate the parts along the last axis")
        )
    if constants:
        raise UnsupportedError(
            message(f"Layer {site.name!r}: constants are handed to its cell.", hint="make them a part of the input")
        )


def _refuse_ragged(site: Site, inputs: Any) -> None:
    if any(isinstance(part, tf.RaggedTensor) for part in (inputs if isinstance(inputs, list) else [inputs])):
        raise UnsupportedError(
            message(
                f"Layer {site.name!r}: its input is a RaggedTensor.",
                expected="a tensor of shape (sample, time, feature), with a mask where samples are shorter",
                hint="x.to_tensor(), and a Masking layer",
            )
        )


def _dropout(layer: Any) -> dict[str, Any]:
    """The multipliers that a known cell applies at every step; one per gate for ``implementation=1``."""
    cell: Any = layer.cell
    found: dict[str, Any] = {}
    if getattr(layer, "_could_use_gpu_kernel", False):
        return found
    for name, cache, rate in (
        ("input_scale", "_dropout_mask_cache", "dropout"),
        ("state_scale", "_recurrent_dropout_mask_cache", "recurrent_dropout"),
    ):
        if not 0.0 < getattr(cell, rate, 0.0) < 1.0:
            continue
        kept = getattr(cell, cache)
        masks = kept._get_recursive(kept._key())
        if isinstance(masks, list):
            found[name] = tf.stack(masks) if cell.implementation == 1 else masks[0]
        else:
            found[name] = masks
    return found
