"""Certificates of ``rl.gradients`` and ``rl.weights``: labelled gradients, compared with those of the reference run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import LayerWeights, ModelFacts, ReferenceRun, Taps
from ...errors import UnsupportedError
from ...layout import canonical_order
from ...recurrence.adjoint import PROBES, probe_combinations, weight_gradients
from ...recurrence.rounding import rounding_of
from ...results.checks import Certificate, coarser_dtype
from ...results.schema import LabelledLayer, to_host
from ...typing import Array
from ...vocabulary import DIRECTION, GATE, SAMPLE, TIME
from ..axes import BatchAxes, in_canonical_order
from ..differentiation.pull import batch_gradients
from ..differentiation.request import BatchGradients, BatchRequest, is_trainable
from ..names import TensorName, read, uncalled_layer
from ..request import ModelRequest
from ..weight_gradients import WeightGradients
from ..weight_layout import sources
from .compare import (
    LOSS,
    UNPLACED,
    WEIGHTS,
    Comparisons,
    attempt,
    compare_in_turn,
    could_not_compare,
    fill_missing,
    untouched,
)

GRADIENT, TARGET = "reference gradient", "reference target"


def certificate_of_batch(request: BatchRequest, answer: BatchGradients) -> Certificate:
    """Certify the requested gradients of one batch, or return the certificate of an earlier call like it."""
    details = ("gradients", request.kind)
    certificate = request.earlier_certificate(*details)
    if certificate is None:
        certificate = certify_batch(request, answer)
        request.remember(certificate, *details)
    return certificate


def certify_batch(request: BatchRequest, answer: BatchGradients) -> Certificate:
    """Compare the requested gradients of one batch with one vector-Jacobian product of a reference run."""
    obstacle = _uncomparable_reason(request)
    if obstacle:
        return could_not_compare(request, obstacle)
    adapter, of_loss, batch = request.adapter, request.of_loss, request.batch
    value: list[Array] = []
    batch_axes, steps = BatchAxes(request.axes, answer.samples), _longest_gradient(answer)
    # A sweep through a layer does not include the gradient of its weight regularisers.
    regularised = not request.target.per_sample

    def cotangents(outputs: Sequence[Array]) -> Sequence[Array | None]:
        value[:], cotangents_found = _evaluate_target(request, batch_axes, outputs)
        return cotangents_found

    def run_reference(in_double: bool = False) -> ReferenceRun:
        run = untouched(request, batch, regularised=regularised)
        return (run.in_double() if in_double else run).reference(None if of_loss else cotangents)

    def compare_all(run: ReferenceRun, other_gradients: Mapping[str, Any] = MappingProxyType({})) -> Certificate:
        comparisons = Comparisons(steps, _coarsest_dtype(request, answer))
        target: Any = run.loss if of_loss else value[0]
        if np.shape(target) == np.shape(answer.value):
            comparisons.compare(LOSS if of_loss else TARGET, "", [(answer.value, target)])
        compared_names = _compare_named(comparisons, request, batch_axes, answer, run, data.leaves_of(batch.x))
        compared_names += _compare_outputs(comparisons, request, batch_axes, answer, run)
        resting_names, uncompared = _compare_swept(comparisons, request, answer, run, regularised, other_gradients)
        # Gradients inside the model rest on those of weights and inputs; on the value alone they are not certified.
        compared = {check.name for check in comparisons.checks}
        only_values = compared <= {LOSS, TARGET}
        resting_names = [name for name in resting_names if name not in compared_names]
        value_name = ("value",) if compared & {LOSS, TARGET} else ()
        return comparisons.certificate(
            adapter.engine,
            certified=(*value_name, *compared_names),
            resting=() if only_values else tuple(resting_names),
            uncertified=(*uncompared, *(resting_names if only_values else ())),
        )

    def compare_own_paths(run: ReferenceRun) -> Certificate | None:
        """Compare without the gradients along other paths than a recurrence, as of a penalty in the user's loss."""
        taps = Taps.everything(tuple(answer.swept))
        capture = (
            attempt(lambda: adapter.run(request.model, batch, taps).capture)[0] if of_loss and answer.swept else None
        )
        other_gradients = (
            {}
            if capture is None
            else {n: g for n, g in capture.outside_weight_grads.items() if n not in capture.full_gradient_names}
        )
        return compare_all(run, other_gradients) if any(grad is not None for grad in other_gradients.values()) else None

    def refuse_if_indivisible(run: ReferenceRun) -> Certificate | None:
        reason = "the loss depends directly on weights of the model, which cannot be divided among samples"
        return could_not_compare(request, reason) if of_loss and not regularised and _reads_weights(request) else None

    comparisons = [compare_all, compare_own_paths, refuse_if_indivisible]
    reference, in_double = partial(attempt, run_reference), partial(attempt, partial(run_reference, in_double=True))
    return compare_in_turn(request, reference, comparisons, steps=steps, in_double=in_double)


def _uncomparable_reason(request: BatchRequest) -> str:
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
        outputs = request.adapter.run(request.model, request.batch.without_loss(), Taps()).outputs
        request.adapter.loss_of(request.model, request.batch, outputs)
    except UnsupportedError:
        return True
    return False


def _evaluate_target(
    request: BatchRequest, batch_axes: BatchAxes, outputs: Sequence[Array]
) -> tuple[list[Array], list[Array | None]]:
    """Evaluate the target on outputs of the model; return its value, and one cotangent for each output."""
    output_cotangents: list[Array | None] = [None] * len(outputs)
    value: Array = np.zeros(())
    cotangents: Sequence[Array]
    if request.cotangents is not None:
        cotangents = request.cotangents
    else:
        split_outputs = [batch_axes.split_folded(leaf.port(), outputs[leaf.index]) for leaf in request.leaves]
        values = [xr.DataArray(array, dims=names) for array, names in split_outputs]
        value, cotangents = request.evaluate(batch_axes, values)
    for leaf, cotangent in zip(request.leaves, cotangents, strict=True):
        cotangent = np.asarray(cotangent).reshape(outputs[leaf.index].shape)
        earlier = output_cotangents[leaf.index]
        output_cotangents[leaf.index] = cotangent if earlier is None else earlier + cotangent
    return [np.asarray(value)], output_cotangents


def _compare_named(
    comparisons: Comparisons,
    request: BatchRequest,
    batch_axes: BatchAxes,
    answer: BatchGradients,
    run: ReferenceRun,
    leaves: Sequence[Any],
) -> list[str]:
    """Compare gradients of inputs and weights by name; return the names compared. Packed inputs are skipped."""
    compared_names: list[str] = []
    inputs = [name for name in request.wrt if name.kind == "input" and name.layer is None]
    for name in inputs:
        index: int | None = name.index
        key = name.text.partition("[")[2].rstrip("]")
        if run.input_names and key:  # x has keys
            index = run.input_names.index(key) if key in run.input_names else None
        if index is not None and index < len(run.input_grads) and not data.is_packed(leaves[index]):
            claimed_gradient, reference = answer.gradients.get(name), run.input_grads[index]
            if reference is not None:
                reference, _ = in_canonical_order(*batch_axes.split_folded(name.port(), reference))
            if claimed_gradient is not None or reference is not None:
                comparisons.compare(GRADIENT, name.text, [fill_missing(claimed_gradient, reference)])
                compared_names.append(name.text)
    for layer in dict.fromkeys(str(name.layer) for name in request.wrt if name.kind == "weight"):
        pairs = []
        for name in request.wrt:
            if name.kind == "weight" and name.layer == layer:
                claimed_gradient = answer.gradients.get(name)
                pairs += list(named_pairs(request.facts, run, name, claimed_gradient, answer.dims.get(name)))
        comparisons.compare(WEIGHTS, layer, pairs)
        if not (pairs or _has_location(request.facts, layer, request.catalogue.weights[layer])):
            comparisons.left_out[UNPLACED.format(layer)] = None
        compared_names += ["gradients of weights"] if pairs and "gradients of weights" not in compared_names else []
    return compared_names


def _compare_outputs(
    comparisons: Comparisons,
    request: BatchRequest,
    batch_axes: BatchAxes,
    answer: BatchGradients,
    run: ReferenceRun,
) -> list[str]:
    """Compare gradients of outputs of layers that are not recurrent; return the names compared.

    The labelled gradient is pulled back to the weights of its layer, and compared with the framework's gradient of
    these. A difference proves no fault, since the model may use the weights elsewhere as well, as a table for both
    ends: then the gradient is not listed.
    """
    catalogue, compared_names = request.catalogue, list[str]()
    for name in request.wrt:
        gradient, layer = answer.gradients.get(name), str(name.layer)
        if name.kind != "output" or gradient is None or layer not in catalogue.weights or not catalogue.is_free(name):
            continue
        layout = batch_axes.layout(name.port(), gradient)
        cotangent = layout.fold(np.transpose(gradient, np.argsort(canonical_order(layout.names))))
        weights = tuple(weight for weight in read(f"{layer}.weights", catalogue) if is_trainable(weight, catalogue))
        from_output = replace(
            request,
            named=(name,),
            function=None,
            cotangents=(cotangent,),
            wrt=weights,
            target=replace(request.target, per_sample=False),
        )
        pulled, _ = attempt(partial(batch_gradients, from_output))
        output_comparisons = Comparisons(comparisons.steps, comparisons.dtype)
        if pulled is None:
            continue
        for weight in weights:
            pairs = named_pairs(request.facts, run, weight, pulled.gradients.get(weight), pulled.dims.get(weight))
            output_comparisons.compare(GRADIENT, name.text, pairs)
        checks = output_comparisons.checks
        if checks and all(check.ok for check in checks):
            comparisons.checks += checks
            compared_names.append(name.text)
    return compared_names


def _has_location(facts: ModelFacts, layer: str, weights: LayerWeights) -> bool:
    """Return whether the adapter finds any weight of a layer among those of its framework."""
    directions = tuple(weights.cells) if len(weights.cells) > 1 else (None,)
    return any(
        facts.weight_location(layer, direction, key) is not None for key in sources(weights) for direction in directions
    )


def named_pairs(
    facts: ModelFacts,
    run: ReferenceRun,
    name: TensorName,
    claimed_gradient: Array | None,
    dims: Sequence[str] | None,
    other_gradients: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield one weight's labelled gradient, summed over samples and steps, and the framework's, for each direction."""
    has_directions = dims is not None and DIRECTION in dims
    for position, direction in enumerate(("forward", "backward") if has_directions else (None,)):
        location = facts.weight_location(str(name.layer), direction, name.key)
        if location is None or location.tied:
            continue
        reference = run.weight_grads.get(location.name)
        reference = None if reference is None else _subtract(reference, (other_gradients or {}).get(location.name))
        if claimed_gradient is None or dims is None:
            if reference is not None:
                yield np.zeros_like(reference), reference
            continue
        array = np.asarray(claimed_gradient)
        array = array[(slice(None),) * dims.index(DIRECTION) + (position,)] if has_directions else array
        remaining_dims = [dim for dim in dims if dim != DIRECTION]
        array = array.sum(axis=tuple(i for i, dim in enumerate(remaining_dims) if dim in (SAMPLE, TIME)))
        remaining_dims = [dim for dim in remaining_dims if dim not in (SAMPLE, TIME)]
        if GATE in remaining_dims:
            gate = remaining_dims.index(GATE)
            array = array.reshape(*array.shape[:gate], int(np.prod(array.shape[gate:])))
        yield array, np.zeros_like(array) if reference is None else location.take(reference)


def _subtract(gradient: Any, other_gradient: Any) -> Any:
    return gradient if other_gradient is None else gradient - to_host(other_gradient)


def _compare_swept(
    comparisons: Comparisons,
    request: BatchRequest,
    answer: BatchGradients,
    run: ReferenceRun,
    regularised: bool,
    other_gradients: Mapping[str, Any],
) -> tuple[list[str], list[str]]:
    """Compare dL/dW of sweeps with the framework's, minus ``other_gradients``.

    Return the names of gradients inside the model that rest on what was compared, and of those that do not.
    """
    catalogue, shared_layers, compared_layers = request.catalogue, set[str](), set[str]()
    for layer, directions in answer.swept.items():
        layer_name = uncalled_layer(layer, catalogue.recurrent)
        penalties = catalogue.weights[layer_name].penalties if layer_name in catalogue.weights else {}
        if layer != layer_name or (regularised and penalties):
            continue
        pairs, scale = [], 0.0
        for replayed, swept in directions:
            call = replayed.call
            scale = math.hypot(scale, rounding_of(replayed.run, swept).weights / request.scale)
            for key, claimed_gradient in weight_gradients(replayed.run, swept, probes=PROBES).items():
                location = request.facts.weight_location(
                    layer_name, call.direction if call.bidirectional else None, key
                )
                if (
                    location is None
                    or location.tied
                    or run.weight_grads.get(location.name) is None
                    or key in call.computed
                ):
                    continue
                if _is_held_elsewhere(request, layer_name, location.name, key):
                    comparisons.left_out[f"weights of {layer}, which are shared with other layers"] = None
                    shared_layers.add(layer)
                    continue
                reference = location.take(
                    _subtract(run.weight_grads[location.name], other_gradients.get(location.name))
                )
                reference = reference if call.cell.by_framework else probe_combinations({key: reference})[key]
                pairs.append((to_host(claimed_gradient) / request.scale, reference))
        comparisons.compare(WEIGHTS, layer, pairs, scale=scale)
        compared_layers |= {layer} if pairs else set()
        if not (
            pairs
            or layer_name not in catalogue.weights
            or _has_location(request.facts, layer_name, catalogue.weights[layer_name])
        ):
            comparisons.left_out[UNPLACED.format(layer)] = None
            shared_layers.add(layer)
    inner_names = {
        name.text: name.layer not in answer.swept or name.layer in compared_layers - shared_layers
        for name in request.wrt
        if name.kind != "weight" and name.layer is not None
    }
    return [text for text, rests in inner_names.items() if rests], [t for t, rests in inner_names.items() if not rests]


def _is_held_elsewhere(request: BatchRequest, layer: str, weight: str, key: str) -> bool:
    """Return whether another recurrent layer has the same framework weight, as a cell in a layer and in a loop."""
    other_layers = (other_layer for other_layer in request.catalogue.recurrent if other_layer != layer)
    locations = (request.facts.weight_location(other_layer, None, key) for other_layer in other_layers)
    return any(location is not None and location.name == weight for location in locations)


def _longest_gradient(answer: BatchGradients) -> int:
    """Return the largest number of steps in any gradient, at least 64, for the rounding bound."""
    pairs = [(answer.dims[name], grad.shape) for name, grad in answer.gradients.items() if grad is not None]
    lengths: list[int] = [shape[dims.index(TIME)] for dims, shape in pairs if TIME in dims]
    lengths += [replayed.run.input.shape[1] for directions in answer.swept.values() for replayed, _ in directions]
    return max([*lengths, 64])


def _coarsest_dtype(request: BatchRequest, answer: BatchGradients) -> str:
    """Return the coarsest dtype that the gradients passed through, for the rounding bound; "" if none is known.

    A model of half-precision weights is coarse throughout, also where its gradients are stored as float32.
    """
    model_dtype = str(request.facts.provenance.get("dtype", ""))
    for half_precision in ("bfloat16", "float16"):
        if half_precision in model_dtype:
            return half_precision
    gradient_dtype = next((str(grad.dtype) for grad in answer.gradients.values() if grad is not None), "")
    swept_calls = (replayed.call for directions in answer.swept.values() for replayed, _ in directions)
    return functools.reduce(coarser_dtype, (call.compute_dtype for call in swept_calls), gradient_dtype)


def certify_weights(
    request: ModelRequest,
    layer_weights: Mapping[str, LayerWeights],
    labelled: Mapping[str, LabelledLayer],
    gradients: WeightGradients,
) -> Certificate:
    """Compare the labelled weight gradients with a reference run; norms of single steps are not compared."""
    adapter = request.adapter
    capture, loss = gradients.capture, gradients.loss
    if capture is not None and capture.alteration:
        return could_not_compare(request, capture.alteration)
    calls = [] if capture is None else capture.calls
    lengths = [int(call.input.shape[1]) for call in calls]
    lengths += [sizes[TIME] for layer in labelled.values() if TIME in (sizes := layer.sizes)]
    steps, model_dtype = max([*lengths, 64]), str(request.facts.provenance.get("dtype", ""))
    dtype = functools.reduce(coarser_dtype, [call.compute_dtype for call in calls], "") or model_dtype
    other_gradients = (
        {}
        if capture is None
        else {n: g for n, g in capture.outside_weight_grads.items() if n not in capture.full_gradient_names}
    )
    computed = {(call.layer.partition("#")[0], key) for call in calls for key in call.computed}

    def compare_all(run: ReferenceRun) -> Certificate:
        comparisons = Comparisons(steps, dtype)
        comparisons.compare(LOSS, "", [(loss, run.loss)] if loss is not None else [])
        for layer, arrays in labelled.items():
            pairs = []
            for name in arrays.variables:
                key = _weight_key(name, layer_weights[layer])
                if key is None or key in layer_weights[layer].penalties:
                    continue
                if (layer, key.rpartition("/")[2]) in computed:
                    comparisons.left_out[f"weights of {layer}, which the model computes from its parameters"] = None
                    continue
                tensor = TensorName(f"{layer}/{key}", "weight", layer, key=key)
                claimed_gradient, dims = _with_cell_gate_order(arrays, name, layer_weights[layer])
                layer_gradients = other_gradients if layer_weights[layer].cells else {}
                pairs += list(named_pairs(request.facts, run, tensor, claimed_gradient, dims, layer_gradients))
            comparisons.compare(WEIGHTS, layer, pairs, scale=gradients.scales.get(layer, 0.0))
            has_gradients = any(_weight_key(name, layer_weights[layer]) is not None for name in arrays.variables)
            if has_gradients and not (pairs or _has_location(request.facts, layer, layer_weights[layer])):
                comparisons.left_out[UNPLACED.format(layer)] = None
        compared = {check.name for check in comparisons.checks}
        names = [text for text, name in (("loss", LOSS), ("gradients of weights", WEIGHTS)) if name in compared]
        has_norms = any(name.endswith("_grad_norm") for arrays in labelled.values() for name in arrays.variables)
        uncertified = ("norms of single steps",) if has_norms else ()
        return comparisons.certificate(adapter.engine, certified=tuple(names), uncertified=uncertified)

    reference = partial(attempt, lambda: untouched(request, request.batch).reference())
    in_double = partial(attempt, lambda: untouched(request, request.batch).in_double().reference())
    return compare_in_turn(request, reference, [compare_all], steps=steps, in_double=in_double)


def _weight_key(name: str, weights: LayerWeights) -> str | None:
    """Return the weight key of a gradient variable's name; None for any other variable."""
    if not name.endswith("_grad") or name == "bias_total_grad":
        return None
    stem = name.removesuffix("_grad")
    return stem if weights.cells else next((key for key in weights.values if key.replace("/", ".") == stem), None)


def _with_cell_gate_order(layer: LabelledLayer, name: str, weights: LayerWeights) -> tuple[Array, tuple[str, ...]]:
    """Return the values of a weight gradient with gates in the order of the cell, and the dimension names."""
    variable = layer.variables[name]
    values, dims = np.asarray(variable.values), tuple(map(str, variable.dims))
    labels = layer.coords[GATE].values.tolist() if GATE in dims else []
    if labels and isinstance(labels[0], str):
        order = [labels.index(gate) for gate in next(iter(weights.cells.values())).gates]
        values = np.take(values, order, axis=dims.index(GATE))
    return values, dims
