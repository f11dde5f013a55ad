"""The scalar that is differentiated: a loss of the user's graph, or one that is built in its copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import Batch
from rnnlens.errors import InputError, UnsupportedError, has_attribute, raised_by, short_repr
from rnnlens.typing import Array, leaves_of, values_of

from . import keras_v1
from .graph_copy import GraphCopy
from .public import Net, scalar, tensor_of


@dataclass(frozen=True)
class Loss:
    """Loss in a copy of the graph: a scalar, and the placeholders of targets and sample weights of a built loss."""

    tensor: Any
    placeholders: tuple[Any, ...] = ()


def is_built_loss(net: Net, batch: Batch) -> bool:
    """Return whether the loss of a batch must be added to the copied graph, as no tensor of the user computes it."""
    if batch.loss is None:  # or samples have weights, for which a compiled Keras model has no placeholder
        is_weighted = batch.sample_weight is not None or batch.class_weight is not None
        return is_weighted and net.keras is not None and not net.keras.weights
    is_name = isinstance(batch.loss, str) and (net.keras is None or ":" in batch.loss or "/" in batch.loss)
    return not is_name


def loss_cache_key(batch: Batch) -> Any:
    """Return the cache key of a built loss: calls with equal keys use the same tensors."""
    shapes = tuple((np.ndim(leaf), str(np.asarray(leaf).dtype)) for leaf in leaves_of(batch.y))
    is_weighted = batch.sample_weight is not None or batch.class_weight is not None
    loss = batch.loss if not isinstance(batch.loss, Mapping | list) else tuple(values_of(batch.loss))
    return ("loss", loss, shapes, is_weighted, tuple(np.ndim(w) for w in leaves_of(batch.sample_weight)))


def loss_in(net: Net, copy: GraphCopy, batch: Batch) -> Loss:
    """Return the loss of a batch in a copy of the net's graph; raise InputError unless it is one number."""
    if not is_built_loss(net, batch):
        loss_tensor = net.loss if batch.loss is None else scalar(tensor_of(net.graph, "loss", batch.loss))
        if loss_tensor is None:
            hint = "model.compile(loss=...)" if net.keras is not None else "rl.tf1.graph(..., loss=tensor)"
            raise InputError("There is no loss.", expected="loss=, or a model that has one", hint=hint)
        return Loss(copy.tensor(loss_tensor.name))
    with copy.graph.as_default(), tf.name_scope("rnnlens/loss"):
        return copy.build_once(loss_cache_key(batch), lambda: _build_loss(net, copy.tensor, batch))


def _build_loss(net: Net, get_tensor: Callable[[str], Any], batch: Batch) -> Loss:
    outputs = [get_tensor(tensor.name) for tensor in net.outputs.values()]
    arrays = [np.asarray(leaf) for leaf in leaves_of(batch.y)]
    if net.keras is None:
        targets = _target_placeholders(arrays, outputs)
        with raised_by("loss"):
            value = batch.loss(*targets, *outputs)
        return Loss(_checked_scalar(value), targets)
    terms = _loss_terms(net, batch, outputs, len(arrays))
    targets = _target_placeholders(arrays, [term.output for term in terms])
    weight_shapes = [None if w is None else [None] * np.ndim(w) for w in keras_v1.sample_weights(batch)]
    weights = [None if shape is None else tf.placeholder(outputs[0].dtype, shape) for shape in weight_shapes]
    value = _keras_loss(net, get_tensor, terms, targets, weights)
    return Loss(_checked_scalar(value), (*targets, *(w for w in weights if w is not None)))


def _target_placeholders(arrays: Sequence[Array], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return a placeholder for each target array: floats in the dtype of the output, others in their own dtype."""
    pairs = zip(arrays, outputs, strict=False)
    return tuple(tf.placeholder(out.dtype if a.dtype.kind == "f" else a.dtype, [None] * a.ndim) for a, out in pairs)


@dataclass(frozen=True)
class _Term:
    """Term of one output in a Keras loss: the loss function, the name of the mask's tensor, and the loss weight."""

    output: Any
    loss: Any
    mask: str | None
    scale: float


def _loss_terms(net: Net, batch: Batch, outputs: Sequence[Any], count: int) -> list[_Term]:
    """Return one term per output that has a loss; their number must equal the number of targets."""
    keras_names = net.keras
    is_compiled = batch.loss is None
    loss_weights = keras_names.scales if is_compiled and keras_names.scales != () else [1.0] * len(outputs)
    if loss_weights is None:
        problem = "loss_weights of a compiled model are tensors, and samples are weighed."
        hint = "loss_weights of numbers"
        raise UnsupportedError(problem, hint=hint)
    masks = [*keras_names.masks, *[None] * len(outputs)]
    losses = keras_names.loss if is_compiled else batch.loss
    if isinstance(losses, Mapping):
        losses = [losses.get(name) for name in net.outputs]
    elif not isinstance(losses, list | tuple):
        losses = [losses] * len(outputs)
    term_fields = zip(outputs, losses, masks, loss_weights, strict=False)
    terms = [_Term(*fields) for fields in term_fields if fields[1] is not None]
    if len(terms) != count:
        expected = f"{len(terms)}, one for each output that has a loss"
        raise InputError("y does not fit the loss.", got=f"{count} arrays", expected=expected)
    return terms


def _keras_loss(
    net: Net, get_tensor: Callable[[str], Any], terms: Sequence[_Term], targets: Sequence[Any], weights: Sequence[Any]
) -> Any:
    """Build the loss of ``compile(loss=)``: with masks, sample weights, reduction and the losses of layers."""
    from tf_keras.src.engine import training_utils_v1
    from tf_keras.src.utils import losses_utils

    loss_values = []
    with raised_by("loss"):
        for target, term, weight in zip(targets, terms, weights, strict=False):
            loss_function: Any = training_utils_v1.get_loss_function(term.loss)
            if term.mask is not None and hasattr(loss_function, "call"):
                mask = tf.cast(get_tensor(term.mask), term.output.dtype)
                sample_losses = loss_function.call(target, term.output)
                weight = losses_utils.apply_valid_mask(sample_losses, weight, mask, loss_function.reduction)
            loss_value = loss_function(target, term.output, **({} if weight is None else {"sample_weight": weight}))
            loss_values.append(term.scale * (tf.reduce_sum(loss_value) if loss_value.shape.rank else loss_value))
    loss_values += [tf.reduce_sum(tf.cast(get_tensor(name), terms[0].output.dtype)) for name in net.keras.added_losses]
    return tf.add_n(loss_values)


def _checked_scalar(value: Any) -> Any:
    if not has_attribute(value, "op") or value.shape.rank not in (None, 0):
        got = f"shape {value.shape}" if has_attribute(value, "shape") else short_repr(value)
        raise InputError("loss= has to return one number.", got=got, hint="tf.reduce_mean of it")
    return value


def feed_of_loss(net: Net, copy: GraphCopy, batch: Batch) -> dict[Any, Array]:
    """Return the feeds of the placeholders of a built loss, targets and sample weights; empty for another loss."""
    if not is_built_loss(net, batch):
        return {}
    weights = [] if net.keras is None else [w for w in keras_v1.sample_weights(batch) if w is not None]
    return dict(
        zip(loss_in(net, copy, batch).placeholders, [*map(np.asarray, leaves_of(batch.y)), *weights], strict=False)
    )
