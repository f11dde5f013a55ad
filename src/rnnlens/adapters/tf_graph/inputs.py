"""Feeds and loss of a run: data, targets and states, checked and converted; the scalar that is differentiated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import (
    InputError,
    LayerNotFoundError,
    UnsupportedError,
    UserCodeError,
    did_you_mean,
    has_attribute,
    raised_by,
    shown,
)
from ...trees import leaves_of
from ...typing import Array
from ..protocol import Batch
from . import keras_v1
from .open_net import OpenNet
from .public import Net, scalar, tensor_of


def names_of_inputs(net: Net, x: Any) -> list[str]:
    """Return the names of the net's inputs, in the order of the arrays in x.

    Raise InputError if x does not match the inputs.
    """
    known = list(net.inputs)
    if not known:
        raise InputError(
            "A session by itself does not say what x is fed to.",
            expected="a net: a part of its graph as a model, with names for what it is fed and what it returns",
            hint='net = rl.tf1.graph(session, inputs={"x": placeholder}, outputs={"y": tensor}, loss=loss, '
            "targets=labels, feed={keep_prob: 1.0}), and then rl.trace(net, x, y)",
        )
    if isinstance(x, Mapping):
        unknown = [key for key in x if key not in known]
        if unknown or len(x) < len(known):
            missing = [name for name in known if name not in x]
            got = f"{list(map(str, x))}" + (f", without {missing}" if missing else "")
            raise InputError("x does not fit the inputs of the graph.", got=got, expected=", ".join(known))
        return list(x)
    if len(leaves_of(x)) != len(known):
        got, expected = f"{len(leaves_of(x))} arrays", f"{len(known)}: {', '.join(known)}"
        raise InputError("x does not fit the inputs of the graph.", got=got, expected=expected)
    return known


def fed(found: OpenNet, batch: Batch) -> dict[Any, Array]:
    """Return the feeds of a run of a batch, by tensor of the copy."""
    feed = fed_in(found.net, found.copy.graph, batch)
    if is_built(found.net, batch):
        feed |= fed_to(loss_in(found.net, found.copy.graph, found.copy.tensor, batch, found.copy.built), batch)
    for layer, states in (batch.initial_state or {}).items():
        feed |= _started(found, layer, states)
    return feed


def fed_in(net: Net, graph: Any, batch: Batch) -> dict[Any, Array]:
    """Return the feeds of a batch for any copy of the net's graph, without those of losses built in that copy."""
    _refuse(net, batch)
    feed = {tensor.name: _fitting(f"feed[{tensor.op.name!r}]", tensor, value) for tensor, value in net.feed.items()}
    for name, leaf in zip(names_of_inputs(net, batch.x), leaves_of(batch.x), strict=True):
        given = {tensor.name: _fitting(f"x[{name!r}]", tensor, leaf) for tensor in net.inputs[name]}
        if any(0 in array.shape for array in given.values()):
            got, expected = f"x[{name!r}] of shape {np.shape(leaf)}", "at least 1 sample and 1 time step"
            raise InputError("x is empty.", got=got, expected=expected)
        feed |= given
    if net.keras is not None:
        feed |= {name: np.asarray(value) for name, value in keras_v1.phase_feed(net, batch.training).items()}
    if not is_built(net, batch):
        feed |= _targets(net, batch)
    return {graph.get_tensor_by_name(name): value for name, value in feed.items()}


def _targets(net: Net, batch: Batch) -> dict[str, Array]:
    """Return the feeds of targets, and of a Keras model's sample weights, by tensor name."""
    leaves = [np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf) for leaf in leaves_of(batch.y)]
    if not leaves:
        return {}
    if len(leaves) != len(net.targets):
        got = f"{len(leaves)} array{'s' * (len(leaves) != 1)}"
        expected = f"{len(net.targets)}, one for each of targets=" if net.targets else "none: the net has no targets="
        hint = "rl.tf1.graph(..., targets=labels) says what y is fed to"
        raise InputError("y does not fit the targets of the graph.", got=got, expected=expected, hint=hint)
    pairs = list(zip(net.targets, leaves, strict=True))
    feed = {tensor.name: _fitting("y", tensor, _ranked(net, tensor, leaf)) for alike, leaf in pairs for tensor in alike}
    if net.keras is not None:
        given = zip(net.keras.weights, keras_v1.sample_weights(batch), strict=False)
        feed |= {name: np.asarray(weight) for name, weight in given if weight is not None}
    return feed


def _ranked(net: Net, tensor: Any, leaf: Array) -> Array:
    """Add a last axis of length 1 to a target of a Keras model that has one number per sample."""
    short = net.keras is not None and tensor.shape.rank == np.ndim(leaf) + 1 and tensor.shape[-1] in (1, None)
    return leaf[..., None] if short else leaf


def _refuse(net: Net, batch: Batch) -> None:
    """Raise ``UnsupportedError`` for training mode and sample or class weights, which a plain graph does not have."""
    if net.keras is not None:
        return
    if batch.training:
        raise UnsupportedError(
            "A graph has no training mode of its own: it has what you feed for it.",
            got="training=True",
            hint="rl.tf1.graph(..., feed={phase: True})",
        )
    for name in ("sample_weight", "class_weight"):
        if getattr(batch, name) is not None:
            raise UnsupportedError(
                f"{name}= has no place in a graph: its loss weighs as it was built.",
                hint="feed the weights: rl.tf1.graph(..., targets=(labels, weights)), y=(labels, weights)",
            )


def _started(found: OpenNet, layer: str, states: Sequence[Any]) -> dict[Any, Array]:
    """Return the feeds that set the initial states of a layer."""
    loops = found.layer(layer)
    if not loops:
        names = [loop.name for loop in found.loops]
        raise LayerNotFoundError(f"No layer is called {layer!r}.", hint=did_you_mean(layer, names))
    entries = [boundary.tensors[0] for loop in loops for boundary in loop.initial]
    if len(states) != len(entries):
        got, expected = f"{len(states)} states", f"{len(entries)}"
        raise InputError(f"initial_state[{layer!r}] does not fit.", got=got, expected=expected)
    return {tap: _fitting(f"initial_state[{layer!r}]", tap, state) for tap, state in zip(entries, states, strict=True)}


def _fitting(where: str, tensor: Any, value: Any) -> Array:
    """Return a value as an array that can be fed to a tensor.

    Raise InputError if its shape or dtype does not match the tensor.
    """
    dtype = tensor.dtype.base_dtype
    array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    if array.dtype.kind in "OUS" and dtype != tf.string:
        raise InputError(f"{where} holds no numbers.", got=shown(value), expected=f"{tensor.name} {dtype.name}")
    if not tensor.shape.is_compatible_with(array.shape):
        got, expected = f"shape {array.shape}", f"{tensor.name} {tensor.shape}"
        raise InputError(f"{where} does not fit the graph.", got=got, expected=expected)
    if not (dtype.is_floating or dtype.is_complex) and array.dtype.kind == "f" and not np.all(array == np.round(array)):
        got, expected = f"{array.dtype}", f"{tensor.name} {dtype.name}"
        raise InputError(f"{where} does not fit the graph.", got=got, expected=expected)
    return array.astype(dtype.as_numpy_dtype, copy=False) if dtype != tf.string else array


def loss_tensor(found: OpenNet, batch: Batch) -> Any:
    """Return the scalar tensor, in the copy of the graph, that is differentiated; see :func:`loss_in`."""
    return loss_in(found.net, found.copy.graph, found.copy.tensor, batch, found.copy.built).tensor


_UNFED = re.compile(r"You must feed a value for placeholder tensor '([^']+)'")

#: Beginnings of lines in TensorFlow's errors that give the location only.
_NOISE = ("Graph execution error", "Detected at node", "node ", "Node: ", "File ", "(0)", "(1)", "Errors may have")


@contextmanager
def clear_errors(net: Net) -> Iterator[None]:
    """Convert TensorFlow's run errors to errors of rnnlens while the context is active.

    Raise InputError if a placeholder is not fed. Raise UserCodeError if the user's graph fails on this batch.
    """
    try:
        yield
    except tf.errors.OpError as error:
        unfed = _UNFED.search(error.message or "")
        if unfed:
            known = [tensor.op.name for alike in net.targets for tensor in alike]
            hint = f"of rl.tf1.graph: feed={{{unfed[1]!r}: ...}}, or targets={unfed[1]!r} if it is what y is fed to"
            hint = "y, which is fed to targets=" if unfed[1] in known else hint
            raise InputError(
                f"The placeholder {unfed[1]!r} is not fed.", expected="a value in every run", hint=hint
            ) from error
        said = [line.strip() for line in (error.message or "").splitlines() if line.strip()]
        told = [line for line in said if not line.startswith(_NOISE)]
        first = next(iter(told or said), type(error).__name__)
        raise UserCodeError("The graph failed on this batch.", got=f"{type(error).__name__}: {first}") from error


# The loss.

#: Function from a tensor's name in the user's graph to the tensor of a copy.
Get = Callable[[str], Any]


@dataclass(frozen=True)
class Loss:
    """Loss in a copy of the graph.

    Attributes
    ----------
    tensor
        The scalar, with the losses that layers add.
    targets, weights
        Placeholders of targets and sample weights of a built loss; empty for a loss of the user's graph.
    """

    tensor: Any
    targets: tuple[Any, ...] = ()
    weights: tuple[Any, ...] = field(default=())


def is_built(net: Net, batch: Batch) -> bool:
    """Return whether the loss has to be built in the copy, since it is no tensor of the user's graph."""
    if batch.loss is None:
        return _weighs_anew(net, batch)
    return not isinstance(batch.loss, str) or (net.keras is not None and not _is_name(batch.loss))


def _weighs_anew(net: Net, batch: Batch) -> bool:
    """Return whether samples have weights, and the compiled Keras model has no placeholder for these."""
    weighed = batch.sample_weight is not None or batch.class_weight is not None
    return weighed and net.keras is not None and not net.keras.weights


def _is_name(text: str) -> bool:
    return ":" in text or "/" in text


def key_of(batch: Batch) -> Any:
    """Return the cache key of a built loss: calls with equal keys use the same tensors."""
    shapes = tuple((np.ndim(leaf), str(np.asarray(leaf).dtype)) for leaf in leaves_of(batch.y))
    weighed = batch.sample_weight is not None or batch.class_weight is not None
    loss = batch.loss if not isinstance(batch.loss, Mapping | list) else tuple(leaves_of(batch.loss))
    return ("loss", loss, shapes, weighed, tuple(np.ndim(w) for w in leaves_of(batch.sample_weight)))


def loss_in(net: Net, graph: Any, get: Get, batch: Batch, built: dict[Any, Any]) -> Loss:
    """Return the loss of a batch in a copy of the net's graph.

    ``get`` maps names to tensors of the copy, and ``built`` is the cache of losses built there. Raise InputError if
    there is no loss, or it is not one number.
    """
    if not is_built(net, batch):
        return Loss(_of_graph(net, get, batch))
    key = key_of(batch)
    if key not in built:
        with graph.as_default(), tf.name_scope("rnnlens/loss"):
            built[key] = _built(net, get, batch)
    found: Loss = built[key]
    return found


def _of_graph(net: Net, get: Get, batch: Batch) -> Any:
    given = net.loss if batch.loss is None else scalar(tensor_of(net.graph, "loss", batch.loss))
    if given is None:
        hint = "model.compile(loss=...)" if net.keras is not None else "rl.tf1.graph(..., loss=tensor)"
        raise InputError("There is no loss.", expected="loss=, or a model that has one", hint=hint)
    return get(given.name)


def _built(net: Net, get: Get, batch: Batch) -> Loss:
    outputs = [get(tensor.name) for tensor in net.outputs.values()]
    arrays = [np.asarray(leaf) for leaf in leaves_of(batch.y)]
    if net.keras is None:
        targets = _places(arrays, outputs)
        with raised_by("loss"):
            value = batch.loss(*targets, *outputs)
        return Loss(_one_number(value), targets)
    terms = _terms(net, batch, outputs, len(arrays))
    targets = _places(arrays, [term.output for term in terms])
    weights = [None if w is None else np.asarray(w) for w in keras_v1.sample_weights(batch)]
    places = tuple(tf.placeholder(outputs[0].dtype, [None] * w.ndim) for w in weights if w is not None)
    spare = iter(places)
    given = [None if w is None else next(spare) for w in weights]
    value = _keras_loss(net, get, terms, targets, given)
    return Loss(_one_number(value), targets, places)


def _places(arrays: Sequence[Array], outputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tf.placeholder(_kind(a, out), [None] * a.ndim) for a, out in zip(arrays, outputs, strict=False))


def _kind(array: Array, output: Any) -> Any:
    return output.dtype if array.dtype.kind == "f" else tf.as_dtype(array.dtype)


@dataclass(frozen=True)
class _Term:
    """Term of one output in a Keras loss: the loss function, the name of the mask's tensor, and the loss weight."""

    output: Any
    loss: Any
    mask: str | None
    scale: float


def _terms(net: Net, batch: Batch, outputs: Sequence[Any], count: int) -> list[_Term]:
    """Return one term per output that has a loss; their number must equal the number of targets."""
    names = net.keras
    compiled = batch.loss is None
    scales = names.scales if compiled and names.scales != () else [1.0] * len(outputs)
    if scales is None:
        what, hint = "loss_weights of a compiled model are tensors, and samples are weighed.", "loss_weights of numbers"
        raise UnsupportedError(what, hint=hint)
    masks = [*names.masks, *[None] * len(outputs)]
    losses = _by_output(names.loss if compiled else batch.loss, list(net.outputs), len(outputs))
    every = zip(outputs, losses, masks, scales, strict=False)
    terms = [_Term(*one) for one in every if one[1] is not None]
    if len(terms) != count:
        expected = f"{len(terms)}, one for each output that has a loss"
        raise InputError("y does not fit the loss.", got=f"{count} arrays", expected=expected)
    return terms


def _keras_loss(net: Net, get: Get, terms: Sequence[_Term], targets: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Build the loss of ``compile(loss=)``: with masks, sample weights, reduction and the losses of layers."""
    parts = []
    with raised_by("loss"):
        for i, (target, term) in enumerate(zip(targets, terms, strict=True)):
            part = _of_output(get, target, term, weights[i] if i < len(weights) else None)
            parts.append(term.scale * (tf.reduce_sum(part) if part.shape.rank else part))
    parts += [tf.reduce_sum(tf.cast(get(name), terms[0].output.dtype)) for name in net.keras.extra]
    return tf.add_n(parts)


def _of_output(get: Get, target: Any, term: _Term, weight: Any) -> Any:
    from tf_keras.src.engine import training_utils_v1
    from tf_keras.src.utils import losses_utils

    function: Any = training_utils_v1.get_loss_function(term.loss)
    if term.mask is not None and hasattr(function, "call"):
        mask = tf.cast(get(term.mask), term.output.dtype)
        each = function.call(target, term.output)
        weight = losses_utils.apply_valid_mask(each, weight, mask, function.reduction)
    return function(target, term.output, **({} if weight is None else {"sample_weight": weight}))


def _by_output(loss: Any, names: Sequence[str], count: int) -> list[Any]:
    if isinstance(loss, Mapping):
        return [loss.get(name) for name in names]
    if isinstance(loss, list | tuple):
        return list(loss)
    return [loss] * count


def _one_number(value: Any) -> Any:
    if not has_attribute(value, "op") or value.shape.rank not in (None, 0):
        got = f"shape {value.shape}" if has_attribute(value, "shape") else shown(value)
        raise InputError("loss= has to return one number.", got=got, hint="tf.reduce_mean of it")
    return value


def fed_to(loss: Loss, batch: Batch) -> dict[Any, Array]:
    """Return the feeds of the placeholders of a built loss: targets and sample weights."""
    feed = dict(zip(loss.targets, (np.asarray(leaf) for leaf in leaves_of(batch.y)), strict=False))
    if loss.weights:
        present = [w for w in keras_v1.sample_weights(batch) if w is not None]
        feed |= dict(zip(loss.weights, present, strict=True))
    return feed
