"""The loss of a data set as one function of what the model returned for all of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...autodiff import Engine, Memo, Tap
from ...errors import UnsupportedError, message, raised_by
from ...typing import Array
from ..protocol import Batch, Outputs
from . import loss as losses
from .data import prepare, targets
from .dialect import Dialect, dialect_of
from .discover import given_states, places
from .found import as_found
from .run import Job, run

#: Losses that are one value per sample (and step): means of equal batches are the mean of the whole.
_PLAIN = {
    "mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_logarithmic_error",
    "huber", "log_cosh", "hinge", "squared_hinge", "categorical_hinge", "binary_crossentropy", "kl_divergence",
    "categorical_crossentropy", "sparse_categorical_crossentropy", "poisson", "cosine_similarity",
    "binary_focal_crossentropy", "categorical_focal_crossentropy",
    "MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredLogarithmicError",
    "Huber", "LogCosh", "Hinge", "SquaredHinge", "CategoricalHinge", "BinaryCrossentropy", "KLDivergence",
    "CategoricalCrossentropy", "SparseCategoricalCrossentropy", "Poisson", "CosineSimilarity",
    "BinaryFocalCrossentropy", "CategoricalFocalCrossentropy",
}  # fmt: skip


def combination(model: Any, batch: Batch) -> str | None:
    """How losses of batches make up that of the data set: ``"mean"``, ``"sum"``; None where that is not known."""
    keras = dialect_of(model)
    if keras.is_overridden(model) or not _all_keras(model) or _may_be_masked(model):
        return None
    given = batch.loss if batch.loss is not None else keras.user_loss(model)
    found = {_kind(keras, part) for part in keras.tree.flatten(given) if part is not None}
    if len(found) != 1 or (found == {"sum"} and _has_own_losses(model)):
        return None
    return found.pop()


def mixes_samples(model: Any, training: bool) -> str | None:
    """A layer that uses statistics of its batch; ``"?"`` where a layer of the user's own may do it; None: none does."""
    keras = dialect_of(model)
    for layer in _layers(model):
        if training and isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            return str(layer.name)
    return None if _all_keras(model) else "?"


def outputs_of(model: Any, batch: Batch) -> Outputs:
    """What the model returns for one batch, and the masks that go with it."""
    keras = dialect_of(model)
    engine = keras.engine
    found = places(model)
    names = given_states(found, batch.initial_state)
    job = Job(
        model=model,
        data=prepare(model, batch),
        sites=[site for site in found.sites if site.name in names],
        plain={},
        training=batch.training,
        seed=batch.seed,
        keep=frozenset({"outputs", "masks"}),
    )
    kept = run(job).outputs
    leaves = keras.tree.flatten(kept["outputs"])
    masks = [None if mask is None else np.asarray(engine.to_array(mask)) for mask in kept["masks"]]
    arrays = [keras.value_of(leaf) for leaf in leaves]
    structure = {"outputs": kept["outputs"], "adds": bool(np.asarray(engine.to_array(kept["adds"])))}
    return Outputs(arrays, structure, masks, _nothing_of(keras) if _has_own_losses(model) else None)


def loss_of(model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
    """The loss of joined outputs, and its gradient at each of them; None where it does not depend on one.

    Raises
    ------
    UnsupportedError
        If the loss takes more than the outputs: the model's weights, its input, or what ``add_loss`` adds.
    """
    keras = dialect_of(model)
    if keras.is_overridden(model) and batch.loss is None:
        raise UnsupportedError(_not_from_outputs("compute_loss() is the model's own"))
    if outputs.tree["adds"]:
        raise UnsupportedError(_not_from_outputs("a layer of the model calls add_loss()"))
    engine = keras.engine
    loss = losses.of_outputs(model, batch)
    like = keras.tree.flatten(outputs.tree["outputs"])
    floats = [keras.ops.convert_to_tensor(a, dtype=t.dtype) for a, t in zip(outputs.leaves, like, strict=True)]
    y, weight = targets(model, batch, len(outputs.leaves[0]))
    arguments = {"outputs": floats, "masks": outputs.masks, "y": y, "weight": weight}
    known = {id(v) for v in keras.variables(model)}
    weights = {str(i): v for i, v in enumerate(model.trainable_variables) if id(v) in known}

    def program(given: Any, tap: Tap) -> tuple[dict[str, Any], Any]:
        y_pred = keras.tree.pack_sequence_as(outputs.tree["outputs"], list(_tapped(keras, given, tap)))
        with keras.running(model, None, seeds, weights, tap), raised_by("Your loss"):
            return {"loss": loss(given["y"], y_pred, given["weight"])}, None

    with as_found(model, keras, batch.seed), losses.undisturbed(model):
        seeds = keras.seeds(model, batch.seed)
        linear = engine.linearise(program, arguments, Memo())
        value = float(np.asarray(engine.to_array(linear.targets["loss"])))
        found = linear.vjp({"loss": np.ones(1)})
    _refuse_other_paths(engine, found)
    grads = [found.get(f"output/{i}") for i in range(len(floats))]
    return value, [None if grad is None else np.asarray(engine.to_array(grad))[0] for grad in grads]


def _tapped(keras: Dialect, given: Any, tap: Tap) -> Iterator[Any]:
    for i, (tensor, mask) in enumerate(zip(given["outputs"], given["masks"] or [None] * 99, strict=False)):
        if keras.is_float(tensor):
            tensor = tap(f"output/{i}", tensor)
        if mask is not None:
            keras.set_mask(tensor, keras.ops.cast(mask, "bool"))
        yield tensor


def _refuse_other_paths(engine: Engine, found: dict[str, Any]) -> None:
    for key, grad in found.items():
        if key.startswith("weight|") and grad is not None and np.any(np.asarray(engine.to_array(grad))):
            raise UnsupportedError(_not_from_outputs("the loss reads the model's weights itself"))


def _not_from_outputs(why: str) -> str:
    return message(
        "The loss of a data set is evaluated on the outputs of all batches, and this one takes more than outputs.",
        got=why,
        expected='combine="mean" or "sum" if it is one of these over samples, or all samples as one batch',
    )


def _nothing_of(keras: Dialect) -> Callable[[Any, Any], Any]:
    """A loss of 0, to be completed by what the model adds to any loss."""

    def nothing(y: Any, y_pred: Any) -> Any:
        del y
        return keras.ops.zeros((), dtype=keras.dtype_of(keras.tree.flatten(y_pred)[0]))

    return nothing


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())


def _all_keras(model: Any) -> bool:
    """Whether nothing in a model is of the user's own making."""
    keras = dialect_of(model)
    return all(keras.is_own(type(la)) and not isinstance(la, keras.layers.Lambda) for la in _layers(model))


def _may_be_masked(model: Any) -> bool:
    """Whether a mask may go with an output of a model: Keras' losses are then means over what is not masked."""
    keras = dialect_of(model)
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    if outputs:
        return any(keras.mask_of(tensor) is not None for tensor in outputs)
    return any(isinstance(la, keras.layers.Masking) or getattr(la, "mask_zero", False) for la in _layers(model))


def _has_own_losses(model: Any) -> bool:
    """Whether regularisers, of weights or of activities, add to the loss."""
    regularised = bool(dialect_of(model).regularizers(model))
    return regularised or any(layer.activity_regularizer is not None for layer in _layers(model))


def _kind(keras: Dialect, loss: Any) -> str | None:
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    name = getattr(loss, "__name__", type(loss).__name__)
    if name not in _PLAIN or getattr(keras.losses, name, None) not in (loss, type(loss)):
        return None
    if getattr(loss, "ignore_class", None) is not None:
        return None
    return {"sum": "sum", "mean": "mean", "sum_over_batch_size": "mean", "auto": "mean"}.get(
        getattr(loss, "reduction", "mean")
    )
