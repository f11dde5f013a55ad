"""Holds the answer to a question, and gradients of weights as they are labelled, against the plain run of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Adapter, ReferenceRun
from ...errors import UnsupportedError
from ...recurrence.adjoint import weight_gradients
from ...recurrence.rounding import rounding_of
from ...results.certificate import Certificate
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ..axes import in_order
from ..certify import LOSS, PROBES, WEIGHTS, Comparisons, filled, probed
from ..names import TensorName, uncalled
from ..outside import Outside
from ..reference_run import attempt, steadied
from ..sweep import weights_of
from .question import Answer, Part, Question

GRADIENT = "plain gradient"


def certify_answer(question: Question, part: Part, answer: Answer) -> Certificate:
    """Compare what was asked for, and what it rests on, with one vector-Jacobian product of the plain run."""
    engine = question.adapter.engine
    why = _out_of_reach(question, part)
    if why:
        return Certificate("could not", engine, why=why)
    of_loss, batch = question.of_loss, part.batch
    value: list[Array] = []
    outside = Outside(question.axes, answer.samples)

    def cotangents(outputs: Sequence[Array]) -> Sequence[Array | None]:
        value[:], found = _evaluated(question, part, outside, outputs)
        return found

    # A sweep through a layer knows nothing of what its regularisers add.
    regularised = not part.target.per_sample
    run, why = attempt(
        lambda: question.adapter.reference_run(
            question.model, batch, None if of_loss else cotangents, regularised=regularised
        )
    )
    if run is None:
        return Certificate("could not", engine, why=why)
    comparisons = Comparisons(_steps(answer), _dtype(question, answer))
    theirs: Any = run.loss if of_loss else value[0]
    if np.shape(theirs) == np.shape(answer.value):
        comparisons.compare(LOSS if of_loss else "plain target", "", [(answer.value, theirs)])
    certified = _compare_named(comparisons, question, outside, answer, run, data.leaves_of(batch.x))
    resting = _compare_swept(comparisons, question, answer, run, regularised)
    certificate = comparisons.certificate(engine, certified=("value", *certified), resting=tuple(resting))
    if certificate.state != "failed":
        return certificate
    reason = _without_a_share(question, part)
    if reason:
        return Certificate("could not", engine, why=reason)
    return steadied(certificate, question.adapter, question.model, batch, run)


def _out_of_reach(question: Question, part: Part) -> str:
    """Why a plain run has nothing that the answer could be held against; "" where it has."""
    if question.cotangents is not None and question.with_loss:
        return "the loss of several batches includes what the model itself adds"
    if not question.of_loss and any(leaf.layer is not None or leaf.what != "output" for leaf in question.leaves):
        return f"{part.target.text} lies inside the model, where a plain run cannot be looked at"
    if question.scale != 1.0:
        return "the loss is scaled while gradients flow; a plain run scales nothing"
    return ""


def _without_a_share(question: Question, part: Part) -> str:
    """Why shares of samples do not sum to the gradient of the batch: the loss is more than a function of outputs."""
    if not (question.of_loss and part.target.per_sample):
        return ""
    bare = replace(part.batch, y=None, sample_weight=None, class_weight=None, loss=None)
    try:
        question.adapter.loss_of(question.model, part.batch, question.adapter.outputs_of(question.model, bare))
    except UnsupportedError:
        return "the loss takes weights of the model themselves, of which no sample has a share"
    return ""


def _evaluated(
    question: Question, part: Part, outside: Outside, outputs: Sequence[Array]
) -> tuple[list[Array], list[Array | None]]:
    """The target of these outputs, and its cotangent for each of them."""
    found: list[Array | None] = [None] * len(outputs)
    value: Array = np.zeros(())
    cotangents: Sequence[Array]
    if question.cotangents is not None:
        cotangents = question.cotangents
    else:
        opened = [outside.opened(leaf.port(), outputs[leaf.index]) for leaf in question.leaves]
        values = [xr.DataArray(array, dims=names) for array, names in opened]
        value, cotangents = question.evaluate(part.target, outside, values)
    for leaf, cotangent in zip(question.leaves, cotangents, strict=True):
        cotangent = np.asarray(cotangent).reshape(outputs[leaf.index].shape)
        before = found[leaf.index]
        found[leaf.index] = cotangent if before is None else before + cotangent
    return [np.asarray(value)], found


def _compare_named(
    comparisons: Comparisons,
    question: Question,
    outside: Outside,
    answer: Answer,
    run: ReferenceRun,
    leaves: Sequence[Any],
) -> list[str]:
    """Inputs and weights, by their names; what of them was compared. A packed input has no shape of ours."""
    certified: list[str] = []
    inputs = [name for name in question.wrt if name.what == "input" and name.layer is None]
    for name in inputs:
        index = _leaf_of(name, run)
        if index is not None and index < len(run.input_grads) and not data.is_packed(leaves[index]):
            mine, theirs = answer.gradients.get(name), run.input_grads[index]
            if theirs is not None:
                theirs, _ = in_order(*outside.opened(name.port(), theirs))
            if mine is not None or theirs is not None:
                comparisons.compare(GRADIENT, name.text, [filled(mine, theirs)])
                certified.append(name.text)
    for layer in dict.fromkeys(str(name.layer) for name in question.wrt if name.what == "weight"):
        pairs = []
        for name in question.wrt:
            if name.what == "weight" and name.layer == layer:
                mine = answer.gradients.get(name)
                pairs += list(named_pairs(question.adapter, question.model, run, name, mine, answer.dims.get(name)))
        comparisons.compare(WEIGHTS, layer, pairs)
        certified += ["gradients of weights"] if pairs and "gradients of weights" not in certified else []
    return certified


def _leaf_of(name: TensorName, run: ReferenceRun) -> int | None:
    """Which leaf of x a name stands for: by its key where x has keys."""
    key = name.text.partition("[")[2].rstrip("]")
    if run.input_names and key:
        return run.input_names.index(key) if key in run.input_names else None
    return name.index


def named_pairs(
    adapter: Adapter,
    model: Any,
    run: ReferenceRun,
    name: TensorName,
    mine: Array | None,
    dims: Sequence[str] | None,
    beside: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """The gradient of one weight as it is labelled, and the framework's, for each direction.

    Samples and steps are summed over. Without a gradient of ours there must be none of the framework's.
    """
    both = dims is not None and DIRECTION in dims
    for d, direction in enumerate(("forward", "backward") if both else (None,)):
        place = adapter.place(model, str(name.layer), direction, name.key)
        if place is None or place.tied:
            continue
        theirs = run.weight_grads.get(place.name)
        around = (beside or {}).get(place.name)
        theirs = theirs if theirs is None or around is None else theirs - to_host(around)
        if mine is None or dims is None:
            if theirs is not None:
                yield np.zeros_like(theirs), theirs
            continue
        array, left = _summed(np.asarray(mine), list(dims))
        if both:
            array = np.take(array, d, axis=left.index(DIRECTION))
            left.remove(DIRECTION)
        if GATE in left:
            array = array.reshape(*array.shape[: left.index(GATE)], -1)
        yield array, np.zeros_like(array) if theirs is None else place.take(theirs)


def _summed(array: Array, dims: list[str]) -> tuple[Array, list[str]]:
    for dim in (SAMPLE, TIME):
        if dim in dims:
            array = array.sum(axis=dims.index(dim))
            dims.remove(dim)
    return array, dims


def _compare_swept(
    comparisons: Comparisons, question: Question, answer: Answer, run: ReferenceRun, regularised: bool
) -> list[str]:
    """The weight gradients of the same sweeps that states and gates were taken from; what rests on them."""
    known = question.known
    for layer, halves in answer.swept.items():
        base = uncalled(layer, known.recurrent)
        penalties = known.weights[base].penalties if base in known.weights else {}
        if layer != base or (regularised and penalties):
            continue
        pairs, scale = [], 0.0
        for half, swept in halves:
            call = half.call
            scale = math.hypot(scale, rounding_of(half.run, swept).weights / question.scale)
            is_known = not call.cell.by_framework
            sums = weight_gradients(half.run, swept, probes=PROBES) if is_known else weights_of(call, half.run, swept)
            for key, mine in sums.items():
                place = question.adapter.place(
                    question.model, base, call.direction if call.bidirectional else None, key
                )
                if place is None or place.tied or run.weight_grads.get(place.name) is None:
                    continue
                theirs = place.take(run.weight_grads[place.name])
                mine = to_host(mine) / question.scale
                pairs.append((mine, probed(theirs) if is_known and mine.ndim == 2 else theirs))
        comparisons.compare(WEIGHTS, layer, pairs, scale=scale)
    inside = [name.text for name in question.wrt if name.what != "weight" and name.layer is not None]
    return list(dict.fromkeys(inside))


def _steps(answer: Answer) -> int:
    """The most steps that any of the arrays has."""
    pairs = [(answer.dims[name], grad.shape) for name, grad in answer.gradients.items() if grad is not None]
    lengths: list[int] = [shape[dims.index(TIME)] for dims, shape in pairs if TIME in dims]
    lengths += [half.run.input.shape[1] for halves in answer.swept.values() for half, _ in halves]
    return max([*lengths, 64])


def _dtype(question: Question, answer: Answer) -> str:
    words = str(question.adapter.provenance(question.model).get("dtype", ""))
    for name in ("bfloat16", "float16"):
        if name in words:
            return name
    arrays = [grad for grad in answer.gradients.values() if grad is not None]
    return str(arrays[0].dtype) if arrays else ""
