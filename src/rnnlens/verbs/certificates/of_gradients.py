"""Certificates of ``rl.gradients`` and ``rl.weights``: labelled gradients, compared with those of the reference run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Adapter, CaptureRequest, LayerWeights, ReferenceRun
from ...errors import UnsupportedError
from ...recurrence.adjoint import PROBES, probed, weight_gradients
from ...recurrence.rounding import rounding_of
from ...results.checks import Certificate, coarser
from ...results.schema import LabelledLayer, to_host
from ...typing import Array
from ...vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ..axes import BatchAxes, in_order
from ..differentiation.request import BatchGradients, BatchRequest
from ..names import TensorName, layer_of_node
from ..request import ModelRequest
from ..weight_gradients import FoundGradients
from ..weight_layout import sources
from .compare import LOSS, UNPLACED, WEIGHTS, Comparisons, attempt, certified, could_not, filled

GRADIENT, TARGET = "reference gradient", "reference target"


def certify_answer(request: BatchRequest, answer: BatchGradients) -> Certificate:
    """Compare the requested gradients of one batch with one vector-Jacobian product of a reference run."""
    why = _out_of_reach(request)
    if why:
        return could_not(request, why)
    adapter, of_loss, batch = request.adapter, request.of_loss, request.batch
    value: list[Array] = []
    outside, steps = BatchAxes(request.axes, answer.samples), _steps(answer)
    # A sweep through a layer does not include the gradient of its weight regularisers.
    regularised = not request.target.per_sample

    def cotangents(outputs: Sequence[Array]) -> Sequence[Array | None]:
        value[:], found = _evaluated(request, outside, outputs)
        return found

    def reference() -> ReferenceRun:
        given = None if of_loss else cotangents
        return adapter.reference_run(request.model, batch, given, regularised=regularised)

    def compared(run: ReferenceRun, beside: Mapping[str, Any] = MappingProxyType({})) -> Certificate:
        comparisons = Comparisons(steps, _dtype(request, answer))
        target: Any = run.loss if of_loss else value[0]
        if np.shape(target) == np.shape(answer.value):
            comparisons.compare(LOSS if of_loss else TARGET, "", [(answer.value, target)])
        named = _compare_named(comparisons, request, outside, answer, run, data.leaves_of(batch.x))
        resting = _compare_swept(comparisons, request, answer, run, regularised, beside)
        # Gradients inside the model rest on those of weights and inputs; on the value alone they are not certified.
        alone = all(check.name in (LOSS, TARGET) for check in comparisons.checks)
        return comparisons.certificate(
            adapter.engine,
            certified=("value", *named),
            resting=() if alone else tuple(resting),
            uncertified=tuple(resting) if alone else (),
        )

    def without_other_paths(run: ReferenceRun) -> Certificate | None:
        """Compare without the gradients along other paths than a recurrence, as of a penalty in the user's loss."""
        layers = CaptureRequest(tuple(answer.swept), boundaries=True)
        capture = (
            attempt(lambda: adapter.capture(request.model, batch, layers))[0] if of_loss and answer.swept else None
        )
        beside = {} if capture is None else {n: g for n, g in capture.beside.items() if n not in capture.whole}
        return compared(run, beside) if any(grad is not None for grad in beside.values()) else None

    def divisible(run: ReferenceRun) -> Certificate | None:
        reason = "the loss depends directly on weights of the model, which cannot be divided among samples"
        return could_not(request, reason) if of_loss and not regularised and _reads_weights(request) else None

    comparisons = [compared, without_other_paths, divisible]
    return certified(request, lambda: attempt(reference), comparisons, steps=steps)


def _out_of_reach(request: BatchRequest) -> str:
    """Return why gradients cannot be compared with a reference run; "" if they can."""
    if request.cotangents is not None and request.with_loss:
        return "the loss of several batches includes penalties that the model adds"
    if not request.of_loss and any(leaf.layer is not None or leaf.kind != "output" for leaf in request.leaves):
        return f"{request.target.text} lies inside the model, where a reference run gives no value"
    if request.scale != 1.0:
        return "the loss is scaled in the backward pass, but not in the reference run"
    return ""


def _reads_weights(request: BatchRequest) -> bool:
    """Return whether the loss depends on weights directly, so that it is no function of the outputs alone."""
    try:
        outputs = request.adapter.outputs_of(request.model, request.batch.without_loss())
        request.adapter.loss_of(request.model, request.batch, outputs)
    except UnsupportedError:
        return True
    return False


def _evaluated(
    request: BatchRequest, outside: BatchAxes, outputs: Sequence[Array]
) -> tuple[list[Array], list[Array | None]]:
    """Evaluate the target on outputs of the model; return its value, and one cotangent for each output."""
    found: list[Array | None] = [None] * len(outputs)
    value: Array = np.zeros(())
    cotangents: Sequence[Array]
    if request.cotangents is not None:
        cotangents = request.cotangents
    else:
        opened = [outside.opened(leaf.port(), outputs[leaf.index]) for leaf in request.leaves]
        values = [xr.DataArray(array, dims=names) for array, names in opened]
        value, cotangents = request.evaluate(outside, values)
    for leaf, cotangent in zip(request.leaves, cotangents, strict=True):
        cotangent = np.asarray(cotangent).reshape(outputs[leaf.index].shape)
        before = found[leaf.index]
        found[leaf.index] = cotangent if before is None else before + cotangent
    return [np.asarray(value)], found


def _compare_named(
    comparisons: Comparisons,
    request: BatchRequest,
    outside: BatchAxes,
    answer: BatchGradients,
    run: ReferenceRun,
    leaves: Sequence[Any],
) -> list[str]:
    """Compare gradients of inputs and weights by name; return the names compared. Packed inputs are skipped."""
    compared: list[str] = []
    inputs = [name for name in request.wrt if name.kind == "input" and name.layer is None]
    for name in inputs:
        index: int | None = name.index
        key = name.text.partition("[")[2].rstrip("]")
        if run.input_names and key:  # x has keys
            index = run.input_names.index(key) if key in run.input_names else None
        if index is not None and index < len(run.input_grads) and not data.is_packed(leaves[index]):
            claimed, reference = answer.gradients.get(name), run.input_grads[index]
            if reference is not None:
                reference, _ = in_order(*outside.opened(name.port(), reference))
            if claimed is not None or reference is not None:
                comparisons.compare(GRADIENT, name.text, [filled(claimed, reference)])
                compared.append(name.text)
    for layer in dict.fromkeys(str(name.layer) for name in request.wrt if name.kind == "weight"):
        pairs = []
        for name in request.wrt:
            if name.kind == "weight" and name.layer == layer:
                claimed = answer.gradients.get(name)
                pairs += list(named_pairs(request.adapter, request.model, run, name, claimed, answer.dims.get(name)))
        comparisons.compare(WEIGHTS, layer, pairs)
        if not (pairs or _has_place(request.adapter, request.model, layer, request.known.weights[layer])):
            comparisons.left_out[UNPLACED.format(layer)] = None
        compared += ["gradients of weights"] if pairs and "gradients of weights" not in compared else []
    return compared


def _has_place(adapter: Adapter, model: Any, layer: str, weights: LayerWeights) -> bool:
    """Return whether the adapter finds any weight of a layer among those of its framework."""
    directions = tuple(weights.cells) if len(weights.cells) > 1 else (None,)
    return any(adapter.place(model, layer, d, key) is not None for key in sources(weights) for d in directions)


def named_pairs(
    adapter: Adapter,
    model: Any,
    run: ReferenceRun,
    name: TensorName,
    claimed: Array | None,
    dims: Sequence[str] | None,
    beside: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield one weight's labelled gradient, summed over samples and steps, and the framework's, for each direction."""
    both = dims is not None and DIRECTION in dims
    for d, direction in enumerate(("forward", "backward") if both else (None,)):
        place = adapter.place(model, str(name.layer), direction, name.key)
        if place is None or place.tied:
            continue
        reference = run.weight_grads.get(place.name)
        reference = None if reference is None else _without(reference, (beside or {}).get(place.name))
        if claimed is None or dims is None:
            if reference is not None:
                yield np.zeros_like(reference), reference
            continue
        array = np.asarray(claimed)
        array = array[(slice(None),) * dims.index(DIRECTION) + (d,)] if both else array
        left = [dim for dim in dims if dim != DIRECTION]
        array = array.sum(axis=tuple(i for i, dim in enumerate(left) if dim in (SAMPLE, TIME)))
        left = [dim for dim in left if dim not in (SAMPLE, TIME)]
        if GATE in left:
            array = array.reshape(*array.shape[: left.index(GATE)], -1)
        yield array, np.zeros_like(array) if reference is None else place.take(reference)


def _without(gradient: Any, beside: Any) -> Any:
    return gradient if beside is None else gradient - to_host(beside)


def _compare_swept(
    comparisons: Comparisons,
    request: BatchRequest,
    answer: BatchGradients,
    run: ReferenceRun,
    regularised: bool,
    beside: Mapping[str, Any],
) -> list[str]:
    """Compare dL/dW of sweeps with the framework's, minus ``beside`` along other paths; return the names certified."""
    known, shared = request.known, set[str]()
    for layer, directions in answer.swept.items():
        base = layer_of_node(layer, known.recurrent)
        penalties = known.weights[base].penalties if base in known.weights else {}
        if layer != base or (regularised and penalties):
            continue
        pairs, scale = [], 0.0
        for replayed, swept in directions:
            call = replayed.call
            scale = math.hypot(scale, rounding_of(replayed.run, swept).weights / request.scale)
            for key, claimed in weight_gradients(replayed.run, swept, probes=PROBES).items():
                place = request.adapter.place(request.model, base, call.direction if call.bidirectional else None, key)
                if place is None or place.tied or run.weight_grads.get(place.name) is None or key in call.computed:
                    continue
                if _is_held_elsewhere(request, base, place.name, key):
                    comparisons.left_out[f"weights of {layer}, which are shared with other layers"] = None
                    shared.add(layer)
                    continue
                reference = place.take(_without(run.weight_grads[place.name], beside.get(place.name)))
                reference = reference if call.cell.by_framework else probed({key: reference})[key]
                pairs.append((to_host(claimed) / request.scale, reference))
        comparisons.compare(WEIGHTS, layer, pairs, scale=scale)
        if not (
            pairs or base not in known.weights or _has_place(request.adapter, request.model, base, known.weights[base])
        ):
            comparisons.left_out[UNPLACED.format(layer)] = None
            shared.add(layer)
    inside = [n.text for n in request.wrt if n.kind != "weight" and n.layer is not None and n.layer not in shared]
    return list(dict.fromkeys(inside))


def _is_held_elsewhere(request: BatchRequest, layer: str, weight: str, key: str) -> bool:
    """Return whether another recurrent layer has the same framework weight, as a cell in a layer and in a loop."""
    others = (other for other in request.known.recurrent if other != layer)
    places = (request.adapter.place(request.model, other, None, key) for other in others)
    return any(place is not None and place.name == weight for place in places)


def _steps(answer: BatchGradients) -> int:
    """Return the largest number of steps in any gradient, at least 64, for the rounding bound."""
    pairs = [(answer.dims[name], grad.shape) for name, grad in answer.gradients.items() if grad is not None]
    lengths: list[int] = [shape[dims.index(TIME)] for dims, shape in pairs if TIME in dims]
    lengths += [replayed.run.input.shape[1] for directions in answer.swept.values() for replayed, _ in directions]
    return max([*lengths, 64])


def _dtype(request: BatchRequest, answer: BatchGradients) -> str:
    words = str(request.adapter.provenance(request.model).get("dtype", ""))
    for name in ("bfloat16", "float16"):
        if name in words:
            return name
    kinds = [str(grad.dtype) for grad in answer.gradients.values() if grad is not None][:1]
    kinds += [replayed.call.compute_dtype for directions in answer.swept.values() for replayed, _ in directions]
    return functools.reduce(coarser, kinds, "")


def certify_weights(
    request: ModelRequest,
    found: Mapping[str, LayerWeights],
    labelled: Mapping[str, LabelledLayer],
    gradients: FoundGradients,
) -> Certificate:
    """Compare the labelled weight gradients with a reference run; norms of single steps are not compared."""
    adapter, model, batch = request.adapter, request.model, request.batch
    capture, loss = gradients.capture, gradients.loss
    if capture is not None and capture.altered:
        return could_not(request, capture.altered)
    calls = [] if capture is None else capture.calls
    lengths = [int(call.input.shape[1]) for call in calls]
    lengths += [sizes[TIME] for layer in labelled.values() if TIME in (sizes := layer.sizes)]
    steps, dtype = max([*lengths, 64]), functools.reduce(coarser, [call.compute_dtype for call in calls], "")
    beside = {} if capture is None else {n: g for n, g in capture.beside.items() if n not in capture.whole}
    computed = {(call.layer.partition("#")[0], key) for call in calls for key in call.computed}

    def compared(run: ReferenceRun) -> Certificate:
        comparisons = Comparisons(steps, dtype)
        comparisons.compare(LOSS, "", [(loss, run.loss)] if loss is not None else [])
        for layer, arrays in labelled.items():
            pairs = []
            for name in arrays.variables:
                key = _key(name, found[layer])
                if key is None or key in found[layer].penalties:
                    continue
                if (layer, key.rpartition("/")[2]) in computed:
                    comparisons.left_out[f"weights of {layer}, which the model computes from its parameters"] = None
                    continue
                tensor = TensorName(f"{layer}/{key}", "weight", layer, key=key)
                claimed, dims = _in_our_order(arrays, name, found[layer])
                around = beside if found[layer].cells else {}
                pairs += list(named_pairs(adapter, model, run, tensor, claimed, dims, around))
            comparisons.compare(WEIGHTS, layer, pairs, scale=gradients.scales.get(layer, 0.0))
            has_gradients = any(_key(name, found[layer]) is not None for name in arrays.variables)
            if has_gradients and not (pairs or _has_place(adapter, model, layer, found[layer])):
                comparisons.left_out[UNPLACED.format(layer)] = None
        of_weights = ["gradients of weights"] if any(c.name == WEIGHTS for c in comparisons.checks) else []
        has_norms = any(name.endswith("_grad_norm") for arrays in labelled.values() for name in arrays.variables)
        open_ends = ("norms of single steps",) if has_norms else ()
        return comparisons.certificate(adapter.engine, certified=("loss", *of_weights), uncertified=open_ends)

    reference = partial(attempt, lambda: adapter.reference_run(model, batch))
    return certified(request, reference, [compared], steps=steps)


def _key(name: str, weights: LayerWeights) -> str | None:
    """Return the weight key of a gradient variable's name; None for any other variable."""
    if not name.endswith("_grad") or name == "bias_total_grad":
        return None
    stem = name.removesuffix("_grad")
    return stem if weights.cells else next((key for key in weights.values if key.replace("/", ".") == stem), None)


def _in_our_order(layer: LabelledLayer, name: str, weights: LayerWeights) -> tuple[Array, tuple[str, ...]]:
    """Return the values of a weight gradient with gates in the order of the cell, and the dimension names."""
    variable = layer.variables[name]
    values, dims = np.asarray(variable.values), tuple(map(str, variable.dims))
    labels = layer.coords[GATE].values.tolist() if GATE in dims else []
    if labels and isinstance(labels[0], str):
        wanted = [labels.index(gate) for gate in next(iter(weights.cells.values())).gates]
        values = np.take(values, wanted, axis=dims.index(GATE))
    return values, dims
