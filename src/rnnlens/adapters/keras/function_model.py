"""``rl.keras.model``: a function and the layers that it calls, as one Keras model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ...errors import InputError
from ..shared.function_namespaces import namespaces
from .dialect import dialect_of, is_layer, loaded_dialects

_CALL = "rl.keras.model(function, encoder, decoder)"


@cache
def _model_class(base: Any) -> Any:
    """Return the class of models whose call is a user's function; ``base`` is the ``Model`` of a Keras package."""

    class FunctionModel(base):  # type: ignore[misc]
        """Model whose call is a function of the user's; its sublayers are the layers that the function calls."""

        def __init__(self, function: Callable[..., Any], parts: list[Any]) -> None:
            super().__init__(name=getattr(function, "__name__", "").strip("_<>") or "function")
            self.argument_names = _argument_names(function)
            self.user_layers = parts
            self.user_function = function
            self.built = all(layer.built for part in parts for layer in part._flatten_layers())

        def call(self, inputs: Any) -> Any:
            """Call the function: inputs by name where they are a dict of its parameters, else by position."""
            names = self.argument_names
            if isinstance(inputs, dict) and set(inputs) <= set(names):
                return self.user_function(**inputs)
            several = isinstance(inputs, list | tuple) and 1 < len(inputs) <= len(names)
            return self.user_function(*inputs) if several else self.user_function(inputs)

        def get_config(self) -> Any:
            """Refuse a configuration: a function has none."""
            raise NotImplementedError("the model is a function")

    return FunctionModel


def argument_names(model: Any) -> tuple[str, ...]:
    """Return the names of the parameters of the function of ``rl.keras.model``; empty for any other model."""
    is_function = any(type(model) is _model_class(keras.Model) for keras in loaded_dialects())
    return tuple(model.argument_names) if is_function else ()


def _argument_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _layers_within(value: Any) -> Iterator[Any]:
    """Yield a layer itself, or those that a list, tuple or dict holds."""
    if is_layer(value):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _layers_within(part)


def model(function: Callable[..., Any], *layers: Any) -> Any:
    """Return a function and the Keras layers that it calls as one model, for every verb.

    For a loop over time that is outside of the layers: in a training script, in an agent, or in a plain class. Write
    the loop as a function from the data to the outputs. The layers are not changed: weights, names and flags of the
    model are those of the layers.

    Parameters
    ----------
    function
        Function or method from the inputs to the outputs. Its parameters are the names of the inputs; several inputs
        are given as a tuple, a list, or a dict by these names. It starts from the same state at every call.
    *layers
        Layers and models that the function calls. Those that it refers to by its own variables, or by attributes of
        its object, are found without being named here.

    Returns
    -------
    keras.Model
        The model, with ``function`` as its call. Its layers have to be built: call the function once before.

    Raises
    ------
    InputError
        If ``function`` is not callable, no layer is found, or something else than a layer is given.

    Examples
    --------
    >>> import keras, numpy as np, rnnlens as rl
    >>> cell, head = keras.layers.GRUCell(4, name="cell"), keras.layers.Dense(2)
    >>> def classify(lines):
    ...     hidden = keras.ops.zeros((lines.shape[0], 4))
    ...     for t in range(lines.shape[1]):
    ...         hidden, _ = cell(lines[:, t], [hidden])
    ...     return head(hidden)
    >>> x = np.random.normal(size=(2, 5, 3)).astype("float32")
    >>> _ = classify(x)
    >>> rl.trace(rl.keras.model(classify, cell, head), x)["cell"].hidden.shape
    (2, 5, 4)
    """
    if not callable(function) or is_layer(function):
        hint = "a layer with a call is a model: rl.trace(layer, x)" if is_layer(function) else _CALL
        got = f"a {type(function).__name__}"
        raise InputError("rl.keras.model takes a function of the data.", got=got, expected="a function", hint=hint)
    for part in layers:
        if not is_layer(part):
            got = type(part).__name__
            raise InputError("A part of a model is a layer.", got=got, expected="keras.layers.Layer", hint=_CALL)
    layer_types = tuple(keras.Layer for keras in loaded_dialects())
    owner = getattr(function, "__self__", None)
    referred = (
        [owner] if is_layer(owner) else [v for scope in namespaces(function, layer_types) for v in scope.values()]
    )
    found = [layer for value in (*layers, *referred) for layer in _layers_within(value)]
    parts = list({id(layer): layer for layer in found}.values())
    if not parts:
        raise InputError("No layer was given.", got="a function alone", expected="the layers it calls", hint=_CALL)
    return _model_class(dialect_of(parts[0]).Model)(function, parts)
