"""Weights of Keras layers: by name, and as known cells in our gate order (which is Keras' own: i,f,c,o and z,r,h)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from ...recurrence.cells import KnownCell
from ..protocol import LayerWeights

_KINDS = {
    keras.layers.SimpleRNNCell: "simple_rnn",
    keras.layers.LSTMCell: "lstm",
    keras.layers.GRUCell: "gru",
}

_NAMES = (
    *("linear", "tanh", "sigmoid", "relu", "leaky_relu", "relu6", "elu", "celu", "selu", "softplus", "softsign"),
    *("squareplus", "soft_shrink", "hard_shrink", "tanh_shrink", "sparse_plus", "silu", "gelu", "sparse_sigmoid"),
    *("exponential", "hard_sigmoid", "hard_silu", "hard_tanh", "mish", "log_sigmoid", "softmax", "log_softmax"),
    "sparsemax",
)

#: Variables that a layer keeps for itself, and no optimizer moves.
_STATISTICS = ("moving_mean", "moving_variance")

#: Keras' own activation functions that keep the shape of their input, by identity.
_ACTIVATIONS: dict[Any, str] = {getattr(keras.activations, name): name for name in _NAMES}


def known_kind(cell: Any) -> str | None:
    """``"simple_rnn"``, ``"lstm"``, ``"gru"``, or None for a cell whose equations are not known for certain.

    Only the exact Keras types with Keras' own activation functions are known: a subclass may compute anything.
    """
    kind = _KINDS.get(type(cell))
    if kind is None or "call" in vars(cell):
        return None
    return kind if all(_activation(cell, role) is not None for role in _roles(kind)) else None


def likeness(cell: Any) -> tuple[Any, ...]:
    """What two cells have to have in common to be shown side by side: kind, sizes, biases."""
    kind = known_kind(cell)
    sizes = tuple(keras.tree.flatten(cell.state_size))
    details = (cell.bias is not None, getattr(cell, "reset_after", None)) if kind else ()
    return (kind or type(cell).__name__, ", ".join(map(str, sizes)), details)


def known_cell(cell: Any, convert: Callable[[Any], Any]) -> KnownCell:
    """The record of a known cell; ``convert`` turns a Keras variable into an array that belongs to us."""
    kind = known_kind(cell)
    assert kind is not None
    arrays = known_arrays(cell, {name: convert(getattr(cell, name)) for name in _variables(cell)})
    names = {role: _activation(cell, role) or "" for role in _roles(kind)}
    return KnownCell(kind=kind, reset_after=bool(getattr(cell, "reset_after", True)), **names, **arrays)


def known_arrays(cell: Any, by_variable: Mapping[str, Any]) -> dict[str, Any]:
    """From kernel, recurrent_kernel, bias as Keras has them to the names of KnownCell: also for their gradients."""
    arrays = dict(by_variable)
    if known_kind(cell) == "gru" and cell.reset_after and "bias" in arrays:
        both = arrays["bias"]
        arrays["bias"], arrays["recurrent_bias"] = both[0], both[1]
    return arrays


def cell_variables(cell: Any) -> dict[str, Any]:
    """The weights of a cell by the name that ``weight_grads`` and ``weight_vjp`` give them."""
    if known_kind(cell) is not None:
        return {name: getattr(cell, name) for name in _variables(cell)}
    return named_variables(cell)


def named_variables(layer: Any) -> dict[str, Any]:
    """The weights of any layer by a name unique within it: the shortest end of the path that is."""
    weights = [v for v in getattr(layer, "weights", []) if v.name != "rnn_state"]
    names = [v.name for v in weights]
    if len(set(names)) == len(names):
        return dict(zip(names, weights, strict=True))
    paths = [_within(layer, v.path) for v in weights]
    if len(set(paths)) < len(paths):
        paths = [f"{path}_{i}" for i, path in enumerate(paths)]
    return dict(zip(paths, weights, strict=True))


def layer_weights(layer: Any, halves: Mapping[str, Any], convert: Callable[[Any], Any]) -> LayerWeights:
    """All weights of one layer. ``halves`` maps a direction to the recurrent layer that runs that way."""
    variables = named_variables(layer)
    alike = len({likeness(half.cell) for half in halves.values()}) == 1
    known = halves.items() if alike else ()
    cells = {direction: known_cell(half.cell, convert) for direction, half in known if known_kind(half.cell)}
    return LayerWeights(
        values={name: convert(v) for name, v in variables.items()},
        trainable={name: bool(v.trainable) for name, v in variables.items()},
        cells=cells,
        penalties={name: v.regularizer for name, v in variables.items() if v.regularizer is not None},
        statistics=frozenset(name for name, v in variables.items() if v.name in _STATISTICS),
        tables=frozenset(name for name, v in variables.items() if v.name == "embeddings"),
    )


def _roles(kind: str) -> tuple[str, ...]:
    return ("activation",) if kind == "simple_rnn" else ("activation", "recurrent_activation")


def _activation(cell: Any, role: str) -> str | None:
    function = getattr(cell, role)
    if function is None:
        return "linear"
    try:
        return _ACTIVATIONS.get(function)
    except TypeError:  # an unhashable callable is the user's own
        return None


def _variables(cell: Any) -> list[str]:
    return ["kernel", "recurrent_kernel", *(["bias"] if cell.bias is not None else [])]


def _within(layer: Any, path: str) -> str:
    marker = f"{layer.name}/"
    return path[path.index(marker) + len(marker) :] if marker in path else path
