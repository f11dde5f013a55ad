"""Losses of a run: the compiled loss as in training, or a given loss plus the model's own losses."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from ...autodiff import Memo, Tap
from ...autodiff.tensors import dtype_name
from ...errors import InputError, ModelError, UnsupportedError, did_you_mean, message, raised_by
from ...typing import Array
from ..protocol import Batch, Outputs
from .dialect import Dialect, dialect_of
from .discover import given_state_layers, locate_layers
from .hooks import Loss, RunRequest
from .inputs import targets
from .restore import borrowed
from .run import run


def scalar_loss(model: Any, batch: Batch) -> Loss:
    """Return the loss as a function ``(x, y, y_pred, sample_weight) -> scalar``; raise an error without one."""
    if batch.loss is None:
        return _compiled_loss(model, batch)
    keras = dialect_of(model)
    user_loss = _user_loss(keras, batch)

    def loss(x: Any, y: Any, y_pred: Any, weight: Any) -> Any:
        _check_weight(keras, weight, y_pred)
        value = _checked_scalar(keras, user_loss(y, y_pred, weight))
        for extra in model.losses:  # add_loss, activity and weight regularisers
            value = value + keras.ops.cast(keras.ops.sum(extra), value.dtype)
        return value

    return loss


def _check_weight(keras: Dialect, weight: Any, y_pred: Any) -> None:
    """Refuse one weight per sample for a loss of each step: Keras would multiply it along the time axis."""
    if weight is None or not keras.weighs_steps or keras.tree.is_nested(weight) or keras.tree.is_nested(y_pred):
        return
    if len(weight.shape) == 1 and len(y_pred.shape) == 3:
        samples, steps = y_pred.shape[0], y_pred.shape[1]
        raise InputError(
            "A loss at every step needs one weight per sample and step: Keras would apply weights per sample to "
            "the steps.",
            got=f"sample_weight of shape {tuple(weight.shape)}, output of shape {tuple(y_pred.shape)}",
            expected=f"shape ({samples}, {steps}), or ({samples}, 1)",
            hint="sample_weight[:, None]",
        )


def _compiled_loss(model: Any, batch: Batch) -> Loss:
    keras = dialect_of(model)
    if not isinstance(model, keras.Model):
        raise ModelError(
            "A layer on its own has no compiled loss.", hint="pass loss=, a name or a function of (y, output)"
        )
    overridden = keras.is_overridden(model)
    if not keras.is_compiled(model) and not overridden:
        raise ModelError(
            f"Model {model.name!r} has no loss: it is not compiled.",
            hint='model.compile(loss=...), or pass loss=, such as loss="mse"',
        )
    has_loss = keras.compiled_loss(model) is not None
    if has_loss and batch.y is None and not overridden:
        raise InputError("The compiled loss needs a target.", got="y=None", hint="pass y, or loss= of outputs alone")

    def compiled(x: Any, y: Any, y_pred: Any, weight: Any) -> Any:
        _check_weight(keras, weight, y_pred)
        value = keras.training_loss(model, x, y, y_pred, weight, batch.training)
        if value is None and not overridden:
            raise ModelError(
                f"Model {model.name!r} was compiled without a loss.",
                hint="model.compile(loss=...), or pass loss=, with the loss that your own train_step computes",
            )
        return _checked_scalar(keras, value)

    return compiled


def _user_loss(keras: Dialect, batch: Batch) -> Callable[[Any, Any, Any], Any]:
    loss = batch.loss
    # Keras' own loss functions return one value per sample; they are averaged, as by compile().
    is_own = isinstance(loss, types.FunctionType) and getattr(keras.losses, loss.__name__, None) is loss
    if (is_own or isinstance(loss, (str, list, tuple, dict, keras.losses.Loss))) and batch.y is None:
        raise InputError("This loss needs a target.", got="y=None", hint="pass y")
    if isinstance(loss, keras.losses.Loss):
        return lambda y, y_pred, weight: loss(y, y_pred, sample_weight=weight)
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            problem = "Keras has no loss of that name."
            names = [name for name, value in vars(keras.losses).items() if inspect.isfunction(value)]
            hint = did_you_mean(loss, sorted({"mse", "mae", *names} - {"get", "serialize", "deserialize"}))
            raise InputError(problem, got=repr(loss), hint=hint) from None
        return keras.compiled_form(loss)
    if is_own or isinstance(loss, (list, tuple, dict)):
        return keras.compiled_form(loss)
    if not callable(loss):
        raise InputError(
            "loss cannot be used.",
            got=repr(loss),
            expected=f"a function of (y_true, y_pred), a {keras.name}.losses.Loss, or the name of a Keras loss",
        )
    if batch.sample_weight is not None or batch.class_weight is not None:
        raise InputError(
            "A loss function of (y_true, y_pred) cannot take sample weights.",
            hint=f"pass a {keras.name}.losses.Loss or a name, or weight inside the function",
        )
    # After TensorFlow has differentiated such a graph under a persistent tape or inside another graph, it may fail to
    # differentiate it eagerly, also for the user: loops of CTC.
    is_graph = keras.engine.name == "tensorflow" and hasattr(loss, "python_function")
    function = keras.engine.inlined(loss) if is_graph else loss

    def aligned_loss(y: Any, y_pred: Any, weight: Any) -> Any:
        """Call the user's loss on targets and outputs of equal rank, as a compiled loss does: (n,) becomes (n, 1)."""
        del weight
        cannot_align = y is None or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred)
        return function(y, y_pred) if cannot_align else function(*keras.align_ranks(y, y_pred))

    return aligned_loss


def _checked_scalar(keras: Dialect, loss: Any) -> Any:
    if loss is None:
        raise InputError("The loss is None.", expected="one number", hint="return the loss from the function")
    loss = keras.ops.convert_to_tensor(loss)
    if tuple(loss.shape) != ():
        raise InputError(
            "The loss is not one number.",
            got=f"shape {tuple(loss.shape)}",
            expected="shape ()",
            hint=f"{keras.mean_code} or {keras.sum_code} around it",
        )
    return loss


#: Losses with one value per sample (and step): the mean over batches of one size is the mean over the data set.
#: Their functions (``mean_squared_error``) and classes (``MeanSquaredError``), without case and underscores.
_PER_SAMPLE_LOSSES = {
    "meansquarederror", "meanabsoluteerror", "meanabsolutepercentageerror", "meansquaredlogarithmicerror",
    "huber", "logcosh", "hinge", "squaredhinge", "categoricalhinge", "binarycrossentropy", "kldivergence",
    "categoricalcrossentropy", "sparsecategoricalcrossentropy", "poisson", "cosinesimilarity",
    "binaryfocalcrossentropy", "categoricalfocalcrossentropy",
}  # fmt: skip


def combination(model: Any, batch: Batch) -> str | None:
    """Return how the losses of batches combine to that of the data set: ``"mean"``, ``"sum"`` or None (unknown)."""
    keras = dialect_of(model)
    if keras.is_overridden(model) or not _all_keras(model) or _may_be_masked(model):
        return None
    user_losses = batch.loss if batch.loss is not None else keras.user_loss(model)
    combinations = {_combination_of(keras, loss) for loss in keras.tree.flatten(user_losses) if loss is not None}
    if len(combinations) != 1 or (combinations == {"sum"} and _has_own_losses(model)):
        return None
    return combinations.pop()


def ignores_weight_zero(model: Any, batch: Batch) -> bool:
    """Return whether a sample of weight zero adds nothing to the loss, and a mean still divides by all samples.

    Regularisers have no weight by sample, and the targets of several outputs need weights of their own.
    """
    one_target = hasattr(batch.y, "shape") and batch.class_weight is None
    return one_target and combination(model, batch) is not None and not _has_own_losses(model) and not model.losses


def mixes_samples(model: Any, training: bool) -> str | None:
    """Return the name of a layer that uses batch statistics; ``"?"`` if a layer is not Keras' own; else None."""
    keras = dialect_of(model)
    for layer in model._flatten_layers():
        if training and isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            return str(layer.name)
    return None if _all_keras(model) else "?"


def outputs_of(model: Any, batch: Batch) -> Outputs:
    """Run the model on one batch and return its outputs, with their masks."""
    keras, model_layers = dialect_of(model), locate_layers(model)
    engine = keras.engine
    names = given_state_layers(model_layers, batch.initial_state)
    sites = [site for site in model_layers.sites if site.name in names]
    recorded = run(RunRequest(model, batch, sites, record_names=frozenset({"outputs", "masks"}))).outputs
    masks = [None if mask is None else np.asarray(engine.to_array(mask)) for mask in recorded["masks"]]
    arrays = [keras.value_of(leaf) for leaf in keras.tree.flatten(recorded["outputs"])]
    structure = {"outputs": recorded["outputs"], "adds": bool(np.asarray(engine.to_array(recorded["adds"])))}

    def zero_loss(y: Any, y_pred: Any) -> Any:
        """Return a loss of 0, so that only losses added by the model's own layers remain."""
        del y
        return keras.ops.zeros((), dtype=dtype_name(keras.tree.flatten(y_pred)[0]))

    adds = structure["adds"] or _regularises_activity(model)
    return Outputs(arrays, structure, masks, zero_loss if _has_own_losses(model) else None, layer_losses=adds)


def loss_of(model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
    """Return the loss of joined outputs, and its gradients at them.

    Raise UnsupportedError if the loss depends on more than outputs and targets.
    """
    keras = dialect_of(model)
    if keras.is_overridden(model) and batch.loss is None:
        raise UnsupportedError(_needs_more_than_outputs("the model overrides compute_loss()"))
    if outputs.tree["adds"]:
        raise UnsupportedError(_needs_more_than_outputs("a layer of the model calls add_loss()"))
    engine = keras.engine
    if batch.loss is not None:
        loss = _user_loss(keras, batch)
    else:
        _compiled_loss(model, batch)  # refuses a model without a loss

        def loss(y: Any, y_pred: Any, weight: Any) -> Any:
            return keras.compiled_loss(model)(y, y_pred, weight)

    template_outputs = keras.tree.flatten(outputs.tree["outputs"])
    output_tensors = [
        keras.ops.convert_to_tensor(a, dtype=t.dtype) for a, t in zip(outputs.leaves, template_outputs, strict=True)
    ]
    y, weight = targets(model, batch, len(outputs.leaves[0]))
    arguments = {"outputs": output_tensors, "masks": outputs.masks, "y": y, "weight": weight}
    variable_ids = {id(v) for v in keras.variables(model)}
    weights = {str(i): v for i, v in enumerate(model.trainable_variables) if id(v) in variable_ids}

    def program(inputs: Any, tap: Tap) -> tuple[dict[str, Any], Any]:
        flat = [tap(f"output/{i}", t) if keras.is_float(t) else t for i, t in enumerate(inputs["outputs"])]
        for tensor, mask in zip(flat, inputs["masks"], strict=False):
            if mask is not None:
                keras.set_mask(tensor, keras.ops.cast(mask, "bool"))
        y_pred = keras.tree.pack_sequence_as(outputs.tree["outputs"], flat)
        with keras.variables_substituted(model, None, seeds, weights, tap), raised_by("Your loss"):
            return {"loss": _checked_scalar(keras, loss(inputs["y"], y_pred, inputs["weight"]))}, None

    with borrowed(model, keras, batch.seed, regularised=False):
        seeds = keras.seed_tensors(model, batch.seed)
        linearised = engine.linearise(program, arguments, Memo())
        value = float(np.asarray(engine.to_array(linearised.targets["loss"])))
        gradients = linearised.vjp({"loss": np.ones(1)})
    weight_gradients = [grad for key, grad in gradients.items() if key.startswith("weight|") and grad is not None]
    if any(np.any(np.asarray(engine.to_array(grad))) for grad in weight_gradients):
        raise UnsupportedError(_needs_more_than_outputs("the loss reads the model's weights itself"))
    grads = [gradients.get(f"output/{i}") for i in range(len(output_tensors))]
    return value, [None if grad is None else np.asarray(engine.to_array(grad))[0] for grad in grads]


def _needs_more_than_outputs(reason: str) -> str:
    return message(
        "The loss of a data set is computed from the outputs of all batches, and this loss needs more than outputs.",
        got=reason,
        expected='combine="mean" or "sum", if the loss is a mean or a sum over samples, or all samples as one batch',
    )


def _all_keras(model: Any) -> bool:
    """Return whether all layers of a model are Keras' own, without a Lambda."""
    keras = dialect_of(model)
    return all(
        keras.is_from_keras(type(la)) and not isinstance(la, keras.layers.Lambda) for la in model._flatten_layers()
    )


def _may_be_masked(model: Any) -> bool:
    """Return whether an output of a model may have a mask: Keras' losses are then means over unmasked steps."""
    keras = dialect_of(model)
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    if outputs:
        return any(keras.mask_of(tensor) is not None for tensor in outputs)
    return any(
        isinstance(la, keras.layers.Masking) or getattr(la, "mask_zero", False) for la in model._flatten_layers()
    )


def _has_own_losses(model: Any) -> bool:
    """Return whether a Keras model has regularisers, of weights or activity, that add to its loss."""
    return bool(dialect_of(model).regularizers(model)) or _regularises_activity(model)


def _regularises_activity(model: Any) -> bool:
    return any(layer.activity_regularizer is not None for layer in model._flatten_layers())


def _combination_of(keras: Dialect, loss: Any) -> str | None:
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    name = getattr(loss, "__name__", type(loss).__name__)
    is_own = getattr(keras.losses, name, None) in (loss, type(loss))
    if (
        not is_own
        or name.replace("_", "").lower() not in _PER_SAMPLE_LOSSES
        or getattr(loss, "ignore_class", None) is not None
    ):
        return None
    return {"sum": "sum", "mean": "mean", "sum_over_batch_size": "mean", "auto": "mean"}.get(
        getattr(loss, "reduction", "mean")
    )
