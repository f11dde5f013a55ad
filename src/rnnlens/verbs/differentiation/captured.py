"""The short way to an answer: one captured pass has all gradients of the loss within recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...adapters.protocol import CaptureRequest
from ...layout import dims_of, direction_axis
from ...recurrence.trajectory import Adjoint
from ...results.schema import to_host
from ...typing import Array
from ..inside import Half, Inside
from ..names import TensorName, uncalled
from .question import Answer, Part, Question


def captured(question: Question, part: Part) -> Answer | None:
    """Gradients of the loss with respect to what recurrent layers carry and return.

    None where the question is another one, or where a gradient is zero throughout: then a pull-back tells why.
    """
    if not fits(question, part):
        return None
    layers = tuple(dict.fromkeys(str(name.layer) for name in question.wrt))
    capture = question.adapter.capture(question.model, part.batch, CaptureRequest(layers, weight_grads=False))
    inside = Inside.of(capture.calls)
    if any(name.what == "final_state" and inside.is_stepwise(name) for name in question.wrt):
        return None
    grads: dict[TensorName, Array | None] = {}
    swept: dict[str, list[tuple[Half, Adjoint]]] = {}
    for name in question.wrt:
        halves = inside.layer(name.layer)
        if name.what == "output":
            grads[name] = side_by_side([to_host(half.call.output_grad)[None] for half in halves])
        else:
            sweeps = [half.sweep(half.call.state_grad or {}, half.arrived()) for half in halves]
            swept[str(name.layer)] = list(zip(halves, sweeps, strict=True))
            grads[name] = inside.gradient(name, sweeps)
    if any(grad is None or not np.any(grad) for grad in grads.values()):
        return None
    dims = {name: question.known.dims(name, grad) for name, grad in grads.items() if grad is not None}
    return Answer(np.asarray(capture.loss), question.axes.samples(part.batch), grads, dims, swept)


def fits(question: Question, part: Part) -> bool:
    """Whether the loss is asked about, with respect to nothing but what recurrent layers carry and return."""
    if part.target.text != "loss" or part.target.per_sample or question.scale != 1.0:
        return False
    known = question.known
    recurrent = all(uncalled(name.layer, known.recurrent) in known.recurrent for name in question.wrt)
    return recurrent and all(name.what == "output" or known.is_inside(name) for name in question.wrt)


def side_by_side(parts: Sequence[Array | None]) -> Array | None:
    """Gradients that arrived for each direction of one tensor, one cotangent each; zeros where only one has any."""
    arrays = [None if part is None else to_host(part)[0] for part in parts]
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(parts) == 1:
        return present[0]
    filled = [np.zeros_like(present[0]) if array is None else array for array in arrays]
    return np.stack(filled, axis=direction_axis(dims_of(filled[0].shape)))
