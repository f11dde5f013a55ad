"""A copy of a model with fresh weights."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError, message
from .dialect import Dialect, dialect_of


def reinitialised(model: Any, seed: int) -> Any:
    """A model of the same configuration, built on the same shapes, with weights drawn by its own initializers.

    Raises
    ------
    UnsupportedError
        If the model cannot be made from its configuration.
    """
    try:
        keras = dialect_of(model)
        twin = (
            keras.models.clone_model(model)
            if hasattr(model, "_functional") or _is_graph(keras, model)
            else _again(model)
        )
        if not twin.built:
            twin.build_from_config(model.get_build_config())
        if [tuple(v.shape) for v in twin.variables] != [tuple(v.shape) for v in model.variables]:
            raise ValueError("its weights have other shapes")
        _compile_like(keras, twin, model)
    except Exception as error:
        raise UnsupportedError(
            message(
                f"Model {model.name!r} cannot be built anew from its configuration.",
                got=f"{type(error).__name__}: {error}",
                hint="pass a copy of the model from before training: baseline=that_model",
            )
        ) from error
    del seed  # Keras draws from the global state; the copy is untrained either way
    return twin


def _compile_like(keras: Dialect, twin: Any, model: Any) -> None:
    """The loss of the model for its copy; tf_keras copies none."""
    loss = keras.compiled_loss(model) if isinstance(model, keras.Model) else None
    if loss is not None and not keras.is_compiled(twin):
        twin.compile(loss=keras.user_loss(model), loss_weights=loss._user_loss_weights)


def _is_graph(keras: Dialect, model: Any) -> bool:
    return (
        isinstance(model, keras.Sequential)
        or bool(getattr(model, "_is_graph_network", False))
        or bool(getattr(model, "_operations", None))
    )


def _again(model: Any) -> Any:
    return type(model).from_config(model.get_config())
