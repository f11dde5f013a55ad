"""The value of a target, without differentiating anything: what experiments on a model compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from .... import data
from ....adapters.protocol import Batch, Capture, CaptureRequest
from ....errors import LayerNotFoundError, message
from ....results.schema import plain
from ....typing import Array
from ...inside import Inside
from ...names import TensorName
from ...outside import Outside
from ..question import Question, dims_for, is_inside, is_outside


def observed_value(question: Question, batch: Batch) -> Array:
    """The target of a question on a batch, from one captured forward pass (of one run, compiled once)."""
    with_loss = any(leaf.what == "loss" for leaf in question.leaves)
    layers = tuple(dict.fromkeys(str(leaf.layer) for leaf in question.leaves if leaf.layer is not None))
    request = CaptureRequest(layers or _any_layer(question), gradients=with_loss, weight_grads=False)
    batch = batch if with_loss else replace(batch, y=None, loss=None, sample_weight=None, class_weight=None)
    capture = question.adapter.capture(question.model, batch, request)
    outside = Outside(question.axes, question.axes.samples(batch))
    values = [_leaf(question, leaf, capture, outside) for leaf in question.leaves]

    def differentiate(function: Any, arrays: Any) -> Any:
        return question.adapter.differentiate(function, arrays, question.model)

    if question.function is None:
        return np.asarray(question.target.evaluate(values[0], differentiate)[0], dtype=np.float64)
    ports = [leaf.port() if is_outside(leaf, question.known) else None for leaf in question.leaves]
    arrays = [v.values if p is None else outside.closed(p, v) for p, v in zip(ports, values, strict=True)]
    result, pull = differentiate(question.function, arrays)
    whole = outside.named_result(result, pull, ports, arrays)
    return np.asarray(question.target.evaluate(whole, differentiate)[0], dtype=np.float64)


def _any_layer(question: Question) -> tuple[str, ...] | None:
    """Something to capture where only the model's output is of interest."""
    known = question.known
    return None if known.recurrent else tuple(known.layers)[:1]


def _leaf(question: Question, leaf: TensorName, capture: Capture, outside: Outside) -> xr.DataArray:
    value = _value(question, leaf, capture)
    if is_outside(leaf, question.known):
        opened, names = outside.opened(leaf.port(), value)
        return xr.DataArray(opened, dims=names)
    return xr.DataArray(value, dims=dims_for(leaf, value, question.known, question.target.per_sample))


def _value(question: Question, leaf: TensorName, capture: Capture) -> Array:
    if leaf.what == "loss":
        return np.asarray(capture.loss)
    if is_inside(leaf, question.known):
        return Inside.of(capture.calls).value(leaf)
    if leaf.layer is None:
        return plain(data.leaves_of(capture.outputs)[leaf.index])
    for call in capture.plain:
        if call.layer == leaf.layer:
            return plain(call.output)
    halves = [plain(call.output) for call in capture.calls if call.layer == leaf.layer]
    if not halves:
        raise LayerNotFoundError(message(f"Layer {leaf.layer!r} was not called in this forward pass."))
    return halves[0] if len(halves) == 1 else np.stack(halves, axis=min(2, halves[0].ndim - 1))
