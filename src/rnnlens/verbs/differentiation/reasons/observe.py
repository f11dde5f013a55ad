"""The value of a target, without differentiating anything: what experiments on a model compare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xarray as xr

from .... import data
from ....adapters.protocol import Capture, CaptureRequest
from ....errors import LayerNotFoundError, message
from ....layout import dims_of, direction_axis
from ....results.schema import to_host
from ....typing import Array
from ...inside import Inside
from ...names import TensorName
from ...outside import Outside
from ..question import Part, Question


def observed_value(question: Question, part: Part) -> Array:
    """The target of a question on one batch, from one captured forward pass (of one run, compiled once)."""
    batch, with_loss = part.batch, question.with_loss
    layers = tuple(dict.fromkeys(str(leaf.layer) for leaf in question.leaves if leaf.layer is not None))
    request = CaptureRequest(layers or _any_layer(question), gradients=with_loss, weight_grads=False)
    batch = batch if with_loss else replace(batch, y=None, loss=None, sample_weight=None, class_weight=None)
    capture = question.adapter.capture(question.model, batch, request)
    outside = Outside(question.axes, question.axes.samples(batch))
    values = [_leaf(question, leaf, capture, outside) for leaf in question.leaves]
    return np.asarray(question.evaluate(part.target, outside, values)[0], dtype=np.float64)


def _any_layer(question: Question) -> tuple[str, ...] | None:
    """Something to capture where only the model's output is of interest."""
    known = question.known
    return None if known.recurrent else (*known.weights, *known.layers)[:1]


def _leaf(question: Question, leaf: TensorName, capture: Capture, outside: Outside) -> xr.DataArray:
    value = _value(question, leaf, capture)
    if question.known.is_free(leaf):
        opened, names = outside.opened(leaf.port(), value)
        return xr.DataArray(opened, dims=names)
    return xr.DataArray(value, dims=question.known.dims(leaf, value))


def _value(question: Question, leaf: TensorName, capture: Capture) -> Array:
    if leaf.what == "loss":
        return np.asarray(capture.loss)
    if question.known.is_inside(leaf):
        return Inside.of(capture.calls).value(leaf)
    if leaf.layer is None:
        return to_host(data.leaves_of(capture.outputs)[leaf.index])
    for call in capture.plain:
        if call.layer == leaf.layer:
            return to_host(call.output)
    halves = [to_host(call.output) for call in capture.calls if call.layer == leaf.layer]
    if not halves:
        raise LayerNotFoundError(message(f"Layer {leaf.layer!r} was not called in this forward pass."))
    return halves[0] if len(halves) == 1 else np.stack(halves, axis=direction_axis(dims_of(halves[0].shape)))
