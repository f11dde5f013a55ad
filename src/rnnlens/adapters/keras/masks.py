"""What each engine of Keras returns at masked steps, read from ``keras/src/backend/*/rnn.py`` and checked by autodiff.

====================  =======================================  ==============================================
                      carried over                             ``zero_output_for_mask``
====================  =======================================  ==============================================
TensorFlow, torch     the previous output; zero before the     zero
                      first real step
JAX                   the first state (of the last cell)       zero
JAX, ``unroll``       as TensorFlow                            ignored: as carried over
TensorFlow,           as above                                 zero where the mask *of the mirrored step* is
``unroll`` backwards                                           False: Keras forgets to turn the mask round
====================  =======================================  ==============================================
"""

from __future__ import annotations

from typing import Any, Literal

from ...typing import Array
from .dialect import dialect_of


def masked_output(layer: Any, known: bool) -> Literal["state", "output", "zero"]:
    """What ``layer`` returns at a masked step that it does not return zeros at."""
    keras = dialect_of(layer)
    engine = keras.engine.name
    if layer.zero_output_for_mask and not (engine == "jax" and layer.unroll):
        return "zero"
    nested = any(keras.tree.is_nested(size) for size in keras.template(layer.cell))
    return "state" if known or (engine == "jax" and not layer.unroll and not nested) else "output"


def output_from_state(layer: Any, mask: Array | None) -> Array | None:
    """(sample, time) of bool: where the output moves with the state after that step; None for everywhere.

    ``mask`` is chronological. For a layer that returns its last output only, the entry that counts is that of the step
    run last.
    """
    if mask is None:
        return None
    engine = dialect_of(layer).engine.name
    backwards = layer.go_backwards
    in_order = mask[:, ::-1] if backwards else mask
    if engine == "jax" and not layer.unroll:
        follows = in_order | (not layer.zero_output_for_mask)
        return _chronological(follows, backwards)
    follows = in_order.cumsum(axis=1) > 0
    if layer.zero_output_for_mask and engine != "jax":
        mirrored = layer.unroll and backwards and layer.return_sequences
        follows = follows & (mask if mirrored else in_order)
    return _chronological(follows, backwards)


def _chronological(follows: Array, backwards: bool) -> Array:
    return (follows[:, ::-1] if backwards else follows).copy()
