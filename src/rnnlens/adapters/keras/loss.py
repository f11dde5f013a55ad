"""The loss of a run: the compiled one as training counts it, or a given one plus the model's own losses."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss

from ...errors import InputError, ModelError, message
from ..protocol import Batch
from ..threads import heard_here

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
    given = _given(batch)

    def loss(x: Any, y: Any, y_pred: Any, weight: Any) -> Any:
        _check_weight(weight, y_pred)
        return _with_own_losses(model, _scalar(given(y, y_pred, weight)))

    return loss


def _check_weight(weight: Any, y_pred: Any) -> None:
    """Keras multiplies one weight per sample with values per step along the last axis, which is time."""
    if weight is None or keras.tree.is_nested(weight) or keras.tree.is_nested(y_pred):
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


def is_overridden(model: Any) -> bool:
    """Whether a model computes its loss in a method of its own."""
    return isinstance(model, keras.Model) and type(model).compute_loss is not keras.Model.compute_loss


def of_outputs(model: Any, batch: Batch) -> Callable[[Any, Any, Any], Any]:
    """A function ``(y, y_pred, sample_weight) -> scalar tensor``, without the losses that the model makes itself."""
    if batch.loss is not None:
        given = _given(batch)
        return lambda y, y_pred, weight: _scalar(given(y, y_pred, weight))
    _compiled(model, batch)
    return lambda y, y_pred, weight: _scalar(model._compile_loss(y, y_pred, weight))


@contextmanager
def undisturbed(model: Any, *, regularised: bool = False) -> Iterator[None]:
    """No trace of an unbuilt loss; weight regularisers count in the loss, and in its gradient if ``regularised``."""
    own = vars(model)
    saved = {name: own[name] for name in ("_get_regularization_losses", "_compile_loss") if name in own}
    regularisation = model._get_regularization_losses
    if not regularised:
        stopped = heard_here(lambda: [keras.ops.stop_gradient(loss) for loss in regularisation()], regularisation)
        own["_get_regularization_losses"] = stopped
    compiled = saved.get("_compile_loss")
    if compiled is not None and not compiled.built:
        given, weights = compiled._user_loss, compiled._user_loss_weights
        own["_compile_loss"] = CompileLoss(given, weights, output_names=compiled.output_names)
    try:
        yield
    finally:
        own.pop("_get_regularization_losses", None)
        own.update(saved)


def _compiled(model: Any, batch: Batch) -> Loss:
    if not isinstance(model, keras.Model):
        raise ModelError(
            message("A layer on its own has no compiled loss.", hint="pass loss=, a name or a function of (y, output)")
        )
    overridden = is_overridden(model)
    if not model.compiled and not overridden:
        raise ModelError(
            message(
                f"Model {model.name!r} has no loss: it is not compiled.",
                hint='model.compile(loss=...), or pass loss=, such as loss="mse"',
            )
        )
    has_loss = getattr(model, "_compile_loss", None) is not None
    if has_loss and batch.y is None and not overridden:
        raise InputError(
            message("The compiled loss needs a target.", got="y=None", hint="pass y, or loss= of outputs alone")
        )

    def compiled(x: Any, y: Any, y_pred: Any, weight: Any) -> Any:
        _check_weight(weight, y_pred)
        return _scalar(model._compute_loss(x, y, y_pred, weight, training=batch.training))

    return compiled


def _given(batch: Batch) -> Callable[[Any, Any, Any], Any]:
    loss = batch.loss
    if isinstance(loss, str) or _is_own_function(loss):
        _need_target(batch)
        return _compiled_form(_named(loss))
    if isinstance(loss, keras.losses.Loss):
        _need_target(batch)
        return lambda y, y_pred, weight: loss(y, y_pred, sample_weight=weight)
    if isinstance(loss, (list, tuple, dict)):
        _need_target(batch)
        return _compiled_form(loss)
    if not callable(loss):
        raise InputError(
            message(
                "loss cannot be used.",
                got=repr(loss),
                expected="a function of (y_true, y_pred), a keras.losses.Loss, or a name that Keras knows",
            )
        )
    if batch.sample_weight is not None or batch.class_weight is not None:
        raise InputError(
            message(
                "A loss function of (y_true, y_pred) has no place for sample weights.",
                hint="pass a keras.losses.Loss or a name, or weight inside the function",
            )
        )
    return lambda y, y_pred, weight: loss(*_aligned(y, y_pred))


def _aligned(y: Any, y_pred: Any) -> tuple[Any, Any]:
    """Targets and outputs as ``compile(loss=function)`` hands them over: (n,) beside (n, 1) becomes (n, 1)."""
    if y is None or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred):
        return y, y_pred
    aligned: tuple[Any, Any] = squeeze_or_expand_to_same_rank(y, y_pred)
    return aligned


def _compiled_form(loss: Any) -> Callable[[Any, Any, Any], Any]:
    """The loss as ``compile(loss=...)`` would take it: averaged over samples, several outputs, sample weights."""
    form: Callable[[Any, Any, Any], Any] = CompileLoss(loss)
    return form


def _named(loss: Any) -> Any:
    try:
        return keras.losses.get(loss)
    except ValueError:
        raise InputError(
            message("Keras knows no loss of that name.", got=repr(loss), hint='a name such as "mse", or a function')
        ) from None


def _is_own_function(loss: Any) -> bool:
    """Keras' own loss functions give one value per sample; compile() averages them, and so do we."""
    return isinstance(loss, types.FunctionType) and getattr(keras.losses, loss.__name__, None) is loss


def _need_target(batch: Batch) -> None:
    if batch.y is None:
        raise InputError(message("This loss needs a target.", got="y=None", hint="pass y"))


def _scalar(loss: Any) -> Any:
    if loss is None:
        raise InputError(message("The loss is None.", expected="one number", hint="return the loss from the function"))
    loss = keras.ops.convert_to_tensor(loss)
    if tuple(loss.shape) != ():
        raise InputError(
            message(
                "The loss is not one number.",
                got=f"shape {tuple(loss.shape)}",
                expected="shape ()",
                hint="keras.ops.mean(...) or keras.ops.sum(...) around it",
            )
        )
    return loss


def _with_own_losses(model: Any, loss: Any) -> Any:
    """What training adds to any loss: add_loss, activity and weight regularisers."""
    for extra in model.losses:
        loss = loss + keras.ops.cast(keras.ops.sum(extra), loss.dtype)
    return loss
