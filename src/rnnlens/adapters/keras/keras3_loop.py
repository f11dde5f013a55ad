"""Hooks of Keras 3: the ``inner_loop`` of a recurrent layer is hooked.

``inner_loop`` receives the mask and the initial state (given, stored, or zeros), the dropout multipliers are drawn by
then, and its result is the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from ...errors import UnsupportedError
from .discover import RecurrentSite
from .hooks import LayerRecorder, own_errors_unchanged, refuse_random
from .loops import StepRecorder

if TYPE_CHECKING:
    from .dialect import Override

_OWN_LOOPS = (keras.layers.RNN, keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU)


def refusal(layer: Any) -> tuple[str, str] | None:
    """Return (reason, workaround) if a recurrent layer cannot be hooked; None if it can."""
    if any(type(layer).inner_loop is loop.inner_loop for loop in _OWN_LOOPS):
        return None
    return "overrides inner_loop", "write the recurrence as a cell, keras.layers.RNN(cell)"


def hook(recorder: LayerRecorder, site: RecurrentSite, half: int, override: Override) -> None:
    """Override the ``inner_loop`` of a recurrent layer, and switch off the fused kernel of a bidirectional one.

    The fused kernel would run both directions without calling ``inner_loop``.
    """
    override(site.layer, "inner_loop", _loop(recorder, site, half))
    if site.bidirectional:
        override(site.owner, "_can_attempt_fused_lstm", lambda *args, **kwargs: False)
        override(site.owner, "_can_attempt_fused_gru", lambda *args, **kwargs: False)


def _loop(recorder: LayerRecorder, site: RecurrentSite, half: int) -> Callable[..., Any]:
    original, layer = site.layer.inner_loop, site.layer

    def inner_loop(sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        mask = mask[0] if keras.tree.is_nested(mask) else mask
        initial_state = keras.tree.map_structure(_value_of, initial_state)
        with own_errors_unchanged():
            _refuse_triple(site, mask)
            refuse_random(site, bool(training))
            steps = recorder.steps_of(site, sequences, initial_state)
            if steps is not None:
                return _one_step(steps, sequences, initial_state, mask)
            call, sequences, initial_state = recorder.enters(site, half, sequences, initial_state, mask)
        if "dropout" in recorder.keep and training:
            call.arrays.update(dropout(layer))
        with recorder.inside_a_layer():
            last, outputs, states = original(sequences, initial_state, mask, training=training)
        if layer.return_sequences:
            outputs = recorder.record(call, "output", outputs)
        else:
            last = recorder.record(call, "output", last)
        if layer.return_state:
            states = recorder.record_all(call, "final_state", states)
            recorder.returns(site)
        return last, outputs, states

    def _one_step(steps: StepRecorder, sequences: Any, initial_state: Any, mask: Any) -> Any:
        run, x, states = steps.enter(sequences[:, 0], initial_state)
        options = {"training": recorder.training} if getattr(layer.cell, "_call_has_training_arg", False) else {}
        with recorder.inside_a_layer():
            last, new = layer.cell(x, states, **options)
        new = keras.tree.pack_sequence_as(states, keras.tree.flatten(new))
        last, new = steps.leave(run, last, new)
        if mask is not None:
            new = keras.tree.map_structure(lambda a, b: keras.ops.where(mask, a, b), new, states)
            # Its only step is a layer's first, before which there is no output.
            from_state = keras.backend.backend() == "jax" and not layer.unroll and not layer.zero_output_for_mask
            before = keras.tree.flatten(states)[0] if from_state else keras.ops.zeros_like(last)
            last = keras.ops.where(mask, last, before)
        return last, keras.ops.expand_dims(last, 1), new

    return inner_loop


def _value_of(state: Any) -> Any:
    """Return the value of a stateful layer's variable as a tensor that can be differentiated."""
    if not isinstance(state, keras.Variable):
        return state
    value = state.value  # on TensorFlow a tf.Variable; a tape only watches a value that is read from it
    return value.read_value() if hasattr(value, "read_value") else keras.ops.convert_to_tensor(value)


def _refuse_triple(site: RecurrentSite, mask: Any) -> None:
    layer = site.layer
    if keras.backend.backend() == "torch" and layer.unroll and layer.go_backwards and mask is not None:
        raise UnsupportedError(
            f"Layer {site.name!r}: Keras on torch cannot run unroll=True with go_backwards=True and a mask.",
            hint="unroll=False",
        )


def dropout(layer: Any) -> dict[str, Any]:
    """Return the dropout multipliers of a layer's cell, the same at each step.

    There is one per gate for ``implementation=1``.
    """
    cell, found = layer.cell, {}
    for name, attribute, rate in (
        ("input_scale", "_dropout_mask", "dropout"),
        ("state_scale", "_recurrent_dropout_mask", "recurrent_dropout"),
    ):
        mask = getattr(cell, attribute, None)
        if mask is not None and 0.0 < getattr(cell, rate, 0.0) < 1.0:
            found[name] = keras.ops.stack(mask) if isinstance(mask, list | tuple) else mask
    return found
