"""Feeds of a run: data, targets and states, checked and converted; and errors of a run that failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import Batch
from rnnlens.errors import InputError, LayerNotFoundError, UnsupportedError, UserCodeError, did_you_mean, short_repr
from rnnlens.typing import Array, is_leaf, leaves_of, values_of

from . import keras_v1
from .graph_copy import GraphCopy
from .losses import feed_of_loss, is_built_loss
from .open_net import OpenNet
from .public import Net


def names_of_inputs(net: Net, x: Any) -> list[str]:
    """Return the names of the inputs in the order of the arrays in x. Raise InputError if x does not match them."""
    input_names = list(net.inputs)
    if not input_names:
        raise InputError(
            "A session by itself does not say what x is fed to.",
            expected="a net: a part of its graph as a model, with names for what it is fed and what it returns",
            hint='net = rl.tf1.graph(session, inputs={"x": placeholder}, outputs={"y": tensor}, loss=loss, '
            "targets=labels, feed={keep_prob: 1.0}), and then rl.trace(net, x, y)",
        )
    if isinstance(x, Mapping):
        unknown = [key for key in x if key not in input_names]
        if unknown or len(x) < len(input_names):
            missing = [name for name in input_names if name not in x]
            got = f"{list(map(str, x))}" + (f", without {missing}" if missing else "")
            raise InputError("x does not fit the inputs of the graph.", got=got, expected=", ".join(input_names))
        return [name for name in x if is_leaf(x[name])]
    values = _values(x)
    if len(values) != len(input_names):
        got, expected = f"{len(values)} arrays", f"{len(input_names)}: {', '.join(input_names)}"
        raise InputError("x does not fit the inputs of the graph.", got=got, expected=expected)
    return [name for name, value in zip(input_names, values, strict=True) if is_leaf(value)]


def _values(x: Any) -> list[Any]:
    """Return what is fed to the inputs of a graph: arrays and numbers."""
    return [value for value in values_of(x) if value is not None]


def feed_of_batch(opened: OpenNet, batch: Batch) -> dict[Any, Array]:
    """Return the ``feed_dict`` of one batch: arrays by placeholder of the copied graph."""
    feed = feed_of_copy(opened.net, opened.copy, batch) | feed_of_loss(opened.net, opened.copy, batch)
    for layer, states in (batch.initial_state or {}).items():
        loops, argument = opened.layer_loops(layer), f"initial_state[{layer!r}]"
        if not loops:
            loop_names = [loop.name for loop in opened.loops]
            raise LayerNotFoundError(f"No layer is called {layer!r}.", hint=did_you_mean(layer, loop_names))
        entries = [boundary.tensors[0] for loop in loops for boundary in loop.initial]
        if len(states) != len(entries):
            got, expected = f"{len(states)} states", f"{len(entries)}"
            raise InputError(f"{argument} does not fit.", got=got, expected=expected)
        feed |= {tap: _as_feed(argument, tap, state) for tap, state in zip(entries, states, strict=True)}
    return feed


def feed_of_copy(net: Net, copy: GraphCopy, batch: Batch) -> dict[Any, Array]:
    """Return the ``feed_dict`` of a batch for any copy of the net's graph, except placeholders of a built loss."""
    if net.keras is None:
        _refuse_training_options(batch)
    feed = {tensor.name: _as_feed(f"feed[{tensor.op.name!r}]", tensor, value) for tensor, value in net.feed.items()}
    names_of_inputs(net, batch.x)  # refuses other names
    named_values = batch.x.items() if isinstance(batch.x, Mapping) else zip(net.inputs, _values(batch.x), strict=True)
    for name, leaf in named_values:
        input_feed = {tensor.name: _as_feed(f"x[{name!r}]", tensor, leaf) for tensor in net.inputs[name]}
        if any(0 in array.shape for array in input_feed.values()):
            got, expected = f"x[{name!r}] of shape {np.shape(leaf)}", "at least 1 sample and 1 time step"
            raise InputError("x is empty.", got=got, expected=expected)
        feed |= input_feed
    if net.keras is not None:
        feed |= {name: np.asarray(value) for name, value in keras_v1.phase_feed(net, batch.training).items()}
    if not is_built_loss(net, batch):
        feed |= _target_feed(net, batch)
    return {copy.graph.get_tensor_by_name(name): value for name, value in feed.items()}


def _target_feed(net: Net, batch: Batch) -> dict[str, Array]:
    """Return the feeds of targets, and of a Keras model's sample weights, by tensor name."""
    leaves = [np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf) for leaf in leaves_of(batch.y)]
    if not leaves:
        return {}
    if len(leaves) != len(net.targets):
        got = f"{len(leaves)} array{'s' * (len(leaves) != 1)}"
        expected = f"{len(net.targets)}, one for each of targets=" if net.targets else "none: the net has no targets="
        hint = "rl.tf1.graph(..., targets=labels) says what y is fed to"
        raise InputError("y does not fit the targets of the graph.", got=got, expected=expected, hint=hint)
    feed = {}
    for tensor, leaf in ((t, leaf) for tensors, leaf in zip(net.targets, leaves, strict=True) for t in tensors):
        # A target of a Keras model may have one number per sample.
        lacks_last_axis = (
            net.keras is not None and tensor.shape.rank == np.ndim(leaf) + 1 and tensor.shape[-1] in (1, None)
        )
        feed[tensor.name] = _as_feed("y", tensor, leaf[..., None] if lacks_last_axis else leaf)
    if net.keras is not None:
        weight_feeds = zip(net.keras.weights, keras_v1.sample_weights(batch), strict=False)
        feed |= {name: np.asarray(weight) for name, weight in weight_feeds if weight is not None}
    return feed


def _refuse_training_options(batch: Batch) -> None:
    """Raise ``UnsupportedError`` for training mode and sample or class weights, which a plain graph does not have."""
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


def _as_feed(argument: str, tensor: Any, value: Any) -> Array:
    """Convert a value to an array that can be fed to ``tensor``. Raise InputError for another shape or dtype."""
    dtype = tensor.dtype.base_dtype
    array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    if array.dtype.kind in "OUS" and dtype != tf.string:
        raise InputError(f"{argument} holds no numbers.", got=short_repr(value), expected=f"{tensor.name} {dtype.name}")
    if not tensor.shape.is_compatible_with(array.shape):
        got, expected = f"shape {array.shape}", f"{tensor.name} {tensor.shape}"
        raise InputError(f"{argument} does not fit the graph.", got=got, expected=expected)
    if not (dtype.is_floating or dtype.is_complex) and array.dtype.kind == "f" and not np.all(array == np.round(array)):
        got, expected = f"{array.dtype}", f"{tensor.name} {dtype.name}"
        raise InputError(f"{argument} does not fit the graph.", got=got, expected=expected)
    return array.astype(dtype.as_numpy_dtype, copy=False) if dtype != tf.string else array


_UNFED = re.compile(r"You must feed a value for placeholder tensor '([^']+)'")

#: Beginnings of lines in TensorFlow's errors that give the location only.
_NOISE = ("Graph execution error", "Detected at node", "node ", "Node: ", "File ", "(0)", "(1)", "Errors may have")


@contextmanager
def convert_run_errors(net: Net) -> Iterator[None]:
    """Convert a run's errors: InputError for a placeholder that is not fed, else UserCodeError."""
    try:
        yield
    except tf.errors.OpError as error:
        unfed = _UNFED.search(error.message or "")
        if unfed:
            target_names = [tensor.op.name for tensors in net.targets for tensor in tensors]
            hint = f"of rl.tf1.graph: feed={{{unfed[1]!r}: ...}}, or targets={unfed[1]!r} if it is what y is fed to"
            hint = "y, which is fed to targets=" if unfed[1] in target_names else hint
            raise InputError(
                f"The placeholder {unfed[1]!r} is not fed.", expected="a value in every run", hint=hint
            ) from error
        message_lines = [line.strip() for line in (error.message or "").splitlines() if line.strip()]
        error_lines = [line for line in message_lines if not line.startswith(_NOISE)]
        first_line = next(iter(error_lines or message_lines), type(error).__name__)
        raise UserCodeError("The graph failed on this batch.", got=f"{type(error).__name__}: {first_line}") from error
