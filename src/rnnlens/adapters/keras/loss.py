"""The loss of a run: the compiled one as training counts it, or a given one plus the model's own losses."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...errors import InputError, ModelError, message
from ..protocol import Batch
from .dialect import Dialect, dialect_of

Loss = Callable[[Any, Any, Any, Any], Any]


def plan(model: Any, batch: Batch) -> Loss:
    """A function ``(x, y, y_pred, sample_weight) -> scalar tensor``, decided before anything runs.

    Raises
    ------
    InputError, ModelError
        If there is no loss to take, or no target for it.
    """
    if batch.loss is None:
        return _compiled(model, batch)
    keras = dialect_of(model)
    given = _given(keras, batch)

    def loss(x: Any, y: Any, y_pred: Any, weight: Any) -> Any:
        _check_weight(keras, weight, y_pred)
        return _with_own_losses(model, _scalar(keras, given(y, y_pred, weight)))

    return loss


def _check_weight(keras: Dialect, weight: Any, y_pred: Any) -> None:
    """Keras multiplies one weight per sample with values per step along the last axis, which is time."""
    if weight is None or not keras.weighs_steps or keras.tree.is_nested(weight) or keras.tree.is_nested(y_pred):
        return
    if len(weight.shape) == 1 and len(y_pred.shape) == 3:
        samples, steps = y_pred.shape[0], y_pred.shape[1]
        raise InputError(
            message(
                "One weight per sample does not fit a loss of every step: Keras would weigh the steps with it.",
                got=f"sample_weight of shape {tuple(weight.shape)}, output of shape {tuple(y_pred.shape)}",
                expected=f"shape ({samples}, {steps}), or ({samples}, 1)",
                hint="sample_weight[:, None]",
            )
        )


def of_outputs(model: Any, batch: Batch) -> Callable[[Any, Any, Any], Any]:
    """A function ``(y, y_pred, sample_weight) -> scalar tensor``, without the losses that the model makes itself."""
    keras = dialect_of(model)
    if batch.loss is not None:
        given = _given(keras, batch)
        return lambda y, y_pred, weight: _scalar(keras, given(y, y_pred, weight))
    _compiled(model, batch)
    return lambda y, y_pred, weight: _scalar(keras, keras.compiled_loss(model)(y, y_pred, weight))


def undisturbed(model: Any, *, regularised: bool = False) -> AbstractContextManager[None]:
    """No trace of an unbuilt loss; weight regularisers count in the loss, and in its gradient if ``regularised``."""
    return dialect_of(model).undisturbed(model, regularised)


def _compiled(model: Any, batch: Batch) -> Loss:
    keras = dialect_of(model)
    if not isinstance(model, keras.Model):
        raise ModelError(
            message("A layer on its own has no compiled loss.", hint="pass loss=, a name or a function of (y, output)")
        )
    overridden = keras.is_overridden(model)
    if not keras.is_compiled(model) and not overridden:
        raise ModelError(
            message(
                f"Model {model.name!r} has no loss: it is not compiled.",
                hint='model.compile(loss=...), or pass loss=, such as loss="mse"',
            )
        )
    has_loss = keras.compiled_loss(model) is not None
    if has_loss and batch.y is None and not overridden:
        raise InputError(
            message("The compiled loss needs a target.", got="y=None", hint="pass y, or loss= of outputs alone")
        )

    def compiled(x: Any, y: Any, y_pred: Any, weight: Any) -> Any:
        _check_weight(keras, weight, y_pred)
        value = keras.whole_loss(model, x, y, y_pred, weight, batch.training)
        if value is None and not overridden:
            raise ModelError(
                message(
                    f"Model {model.name!r} was compiled without a loss.",
                    hint="model.compile(loss=...), or pass loss=, as a train_step of your own computes it",
                )
            )
        return _scalar(keras, value)

    return compiled


def _given(keras: Dialect, batch: Batch) -> Callable[[Any, Any, Any], Any]:
    loss = batch.loss
    if isinstance(loss, str) or _is_own_function(keras, loss):
        _need_target(batch)
        return keras.compiled_form(_named(keras, loss))
    if isinstance(loss, keras.losses.Loss):
        _need_target(batch)
        return lambda y, y_pred, weight: loss(y, y_pred, sample_weight=weight)
    if isinstance(loss, (list, tuple, dict)):
        _need_target(batch)
        return keras.compiled_form(loss)
    if not callable(loss):
        raise InputError(
            message(
                "loss cannot be used.",
                got=repr(loss),
                expected=f"a function of (y_true, y_pred), a {keras.name}.losses.Loss, or a name that Keras knows",
            )
        )
    if batch.sample_weight is not None or batch.class_weight is not None:
        raise InputError(
            message(
                "A loss function of (y_true, y_pred) has no place for sample weights.",
                hint=f"pass a {keras.name}.losses.Loss or a name, or weight inside the function",
            )
        )
    return lambda y, y_pred, weight: loss(*_aligned(keras, y, y_pred))


def _aligned(keras: Dialect, y: Any, y_pred: Any) -> tuple[Any, Any]:
    """Targets and outputs as ``compile(loss=function)`` hands them over: (n,) beside (n, 1) becomes (n, 1)."""
    if y is None or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred):
        return y, y_pred
    return keras.aligned(y, y_pred)


def _named(keras: Dialect, loss: Any) -> Any:
    try:
        return keras.losses.get(loss)
    except ValueError:
        raise InputError(
            message("Keras knows no loss of that name.", got=repr(loss), hint='a name such as "mse", or a function')
        ) from None


def _is_own_function(keras: Dialect, loss: Any) -> bool:
    """Keras' own loss functions give one value per sample; compile() averages them, and so do we."""
    return isinstance(loss, types.FunctionType) and getattr(keras.losses, loss.__name__, None) is loss


def _need_target(batch: Batch) -> None:
    if batch.y is None:
        raise InputError(message("This loss needs a target.", got="y=None", hint="pass y"))


def _scalar(keras: Dialect, loss: Any) -> Any:
    if loss is None:
        raise InputError(message("The loss is None.", expected="one number", hint="return the loss from the function"))
    loss = keras.ops.convert_to_tensor(loss)
    if tuple(loss.shape) != ():
        raise InputError(
            message(
                "The loss is not one number.",
                got=f"shape {tuple(loss.shape)}",
                expected="shape ()",
                hint=f"{keras.says_mean} or {keras.says_sum} around it",
            )
        )
    return loss


def _with_own_losses(model: Any, loss: Any) -> Any:
    """What training adds to any loss: add_loss, activity and weight regularisers."""
    keras = dialect_of(model)
    for extra in model.losses:
        loss = loss + keras.ops.cast(keras.ops.sum(extra), loss.dtype)
    return loss
