"""Certificates of traces: outputs, loss, and weight gradients recomputed from labelled arrays.

A reference run of all samples costs as much as the capture. Once a trace of a model was certified with all samples, the
next ones run the model on a few consecutive samples, a different part at each call, given the capture's dL/dy of these
samples. The outputs, the gradients at the inputs and the gradients of the recurrent weights that these samples alone
explain are compared. If they differ, for instance because a layer mixes the samples of its batch, the trace is computed
again with a certificate of all samples, and so is every later one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ... import data
from ...adapters.protocol import Batch, Capture, RecurrentCall, ReferenceRun, SequenceCall
from ...recurrence.adjoint import PROBES, probe_combinations
from ...recurrence.cells import affine
from ...recurrence.replay import Replay
from ...recurrence.rounding import perturbed_replay, plain_replay
from ...results.checks import Certificate, Check, coarser_dtype, epsilon, worst_checks
from ...results.schema import LabelledLayer, to_host
from ...settings import current
from ...typing import Array, arrays_of, named_constants
from ...vocabulary import DIRECTION, FEATURE, GATE, SAMPLE, STATE, TIME
from ..names import CertifiedCalls
from ..request import ModelRequest
from .compare import (
    INITIAL,
    INPUTS,
    LAYER_INPUT,
    LOSS,
    OUTPUTS,
    UNPLACED,
    WEIGHTS,
    Comparisons,
    attempt,
    compare_in_turn,
    could_not_compare,
    fill_missing,
    mismatch,
    untouched,
)

#: Function that waits for the reference run, and returns it and "", or None and the reason for its failure.
Attempt = Callable[[], tuple[ReferenceRun | None, str]]
#: Smallest batch of which only a part is compared, and the share of its samples in that part.
FEWEST, SHARE = 16, 16


@dataclass(frozen=True)
class SamplePart:
    """Consecutive samples of a batch of ``count`` samples: ``start`` up to, but without, ``stop``."""

    start: int
    stop: int
    count: int

    def __str__(self) -> str:
        last_sample = self.stop - 1
        return (
            f"sample {last_sample} of {self.count}"
            if last_sample == self.start
            else f"samples {self.start} to {last_sample} of {self.count}"
        )

    @property
    def slice(self) -> slice:
        """Slice of the compared samples along the sample axis."""
        return slice(self.start, self.stop)

    def select(self, array: Any) -> Any:
        """Return the compared samples of an array whose first axis counts samples."""
        return array[self.slice]

    def batch(self, batch: Batch) -> Batch:
        """Return a batch with the inputs of the compared samples, without targets."""
        return replace(batch.without_loss(), x=data.samples_of_arrays(batch.x, self.start, self.stop))


def part_to_compare(certified: CertifiedCalls, batch: Batch, key: Hashable) -> SamplePart | None:
    """Return the samples to compare in a certified trace; None for all of them.

    ``key`` has the request and the shapes. All samples are compared at the first call with a key, in training
    mode, of fewer than ``FEWEST`` samples, and under ``rl.options(certify=)`` other than ``"auto"``.
    """
    count = _divisible_samples(batch)
    if count is None or current().certify != "auto":
        return None
    calls = certified.traces.get(key)
    if calls is None or not calls.divisible:
        return None
    calls.number += 1
    size = max(count // SHARE, 2)
    start = int(np.random.default_rng(calls.number).integers(count - size + 1))
    return SamplePart(start, start + size, count)


def with_part(whole: Certificate, of_part: Certificate, part: SamplePart) -> Certificate:
    """Return the certificate of all samples of an earlier trace, with the comparisons of a part of this one's."""
    checks = tuple(worst_checks([*whole.checks, *of_part.checks]))
    return replace(whole, checks=checks, samples=str(part), earlier=True)


def is_divisible(batch: Batch, capture: Capture) -> bool:
    """Return whether all tensors of a trace have one entry per sample, so that some of them can be compared alone."""
    count = _divisible_samples(batch)
    if count is None or not any(grad is not None for grad in capture.output_grads):
        return False
    sizes = [call.output.shape[0] for call in capture.calls]
    sizes += [np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in capture.output_grads if leaf is not None]
    return all(size == count for size in sizes)


def _divisible_samples(batch: Batch) -> int | None:
    """Return the number of samples; None if a part of them cannot be run alone, or would save too little time."""
    leaves = data.leaves_of(batch.x)
    if batch.training or batch.initial_state or batch.frozen or any(data.is_packed(leaf) for leaf in leaves):
        return None
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves}
    return counts.pop() if len(counts) == 1 and min(counts) >= FEWEST else None


class BoundaryGradients(NamedTuple):
    """Pairs of gradients (rnnlens, framework) at the boundary of a call, and the scale of their rounding."""

    comparison: str
    layer: str
    pairs: list[tuple[Array, Array]]
    scale: float


@dataclass
class ReplayedValues:
    """Values computed by rnnlens, to be compared with a reference run.

    ``weights`` are weight gradients by (layer, direction or None, name). Those of kernels in ``probed`` are random
    combinations of their rows. ``scales`` has, by layer, the scale of their rounding (:class:`rounding.Rounding`).
    ``part`` limits weight gradients and the comparison to some samples.
    """

    capture: Capture
    part: SamplePart | None = None
    weights: dict[tuple[str, str | None, str], Array] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    incomplete: set[tuple[str, str | None, str]] = field(default_factory=set)
    computed: set[tuple[str, str | None, str]] = field(default_factory=set)
    probed: set[tuple[str, str | None, str]] = field(default_factory=set)
    boundaries: list[BoundaryGradients] = field(default_factory=list)
    steps: int = 1
    dtype: str = ""

    def add_weights(self, call: RecurrentCall, sums: Mapping[str, Array], scale: float) -> None:
        """Add the weight gradients of one call; mark them incomplete if the call has no framework gradients."""
        layer = call.layer.partition("#")[0]
        self.scales[layer] = math.hypot(self.scales.get(layer, 0.0), scale)
        for name, array in sums.items():
            key = (layer, call.direction if call.bidirectional else None, name)
            if call.weight_grads is None and not self.capture.topmost:
                self.incomplete.add(key)
            if name in call.computed:
                self.computed.add(key)
            if not call.cell.by_framework and len(array.shape) == 2:
                self.probed.add(key)
            self.weights[key] = self.weights[key] + to_host(array) if key in self.weights else to_host(array)

    def include_scans(self, calls: Iterable[SequenceCall]) -> None:
        """Take steps and dtype of whole-sequence layers into account in the bounds of the comparisons."""
        for call in calls:
            self.steps = max(self.steps, call.cell.steps)
            self.dtype = coarser_dtype(self.dtype, call.compute_dtype)

    def with_rounding_scales(self, plain: ReplayedValues, perturbed: ReplayedValues) -> ReplayedValues:
        """Return a copy with rounding scales at least as large as the effect of one more rounding.

        ``plain`` and ``perturbed`` are computed alike but for that rounding. These values themselves may be wrong.
        """
        unit, scales = epsilon(self.dtype), dict(self.scales)
        for key, array in plain.weights.items():
            scales[key[0]] = max(scales.get(key[0], 0.0), mismatch(array, perturbed.weights[key]) / unit)
        boundaries = []
        for boundary, *others in zip(self.boundaries, plain.boundaries, perturbed.boundaries, strict=True):
            differences = [mismatch(a, b) for (a, _), (b, _) in zip(*(other.pairs for other in others), strict=True)]
            boundaries.append(boundary._replace(scale=max(boundary.scale, *(size / unit for size in differences))))
        return replace(self, scales=scales, boundaries=boundaries)


@contextmanager
def start_reference_run(request: ModelRequest, claim: ReplayedValues) -> Iterator[Attempt]:
    """Start the reference run after the capture, in a thread beside the replay if the adapter can prepare it."""
    batch = request.batch
    gradients, part = _has_gradients(claim.capture), claim.part
    if part is not None:
        output_grads = [None if grad is None else part.select(to_host(grad)) for grad in claim.capture.output_grads]
        yield lambda: attempt(
            lambda: untouched(request, part.batch(batch), gradients=gradients).reference(output_grads)
        )
        return
    batch = _batch_as_captured(batch, claim.capture)
    with ThreadPoolExecutor(1) as thread:
        run, reason = attempt(lambda: untouched(request, batch, gradients=gradients).prepared())
        if run is None:
            yield lambda: (None, reason)
        elif run.is_prepared:
            yield thread.submit(attempt, run.reference).result
        else:
            yield lambda: attempt(run.reference)


def _batch_as_captured(batch: Batch, capture: Capture) -> Batch:
    """Return the batch, without targets and weights if the capture has no loss."""
    return batch if capture.loss is not None else batch.without_loss()


def _has_gradients(capture: Capture) -> bool:
    return bool(capture.input_grads or capture.outside_weight_grads) and not capture.alteration


def certify(
    request: ModelRequest,
    claim: ReplayedValues,
    reference_attempt: Attempt,
    claim_of_replays: Callable[[Callable[[Replay], Replay]], ReplayedValues],
    datasets: Mapping[str, LabelledLayer],
) -> Certificate:
    """Compare replayed values with the reference run; return "could not" if that run is not reproducible itself.

    ``claim_of_replays`` recomputes the replayed values from other replays; it is called only if the comparison fails.
    ``datasets`` are the layers of the result.
    """

    def compare(run: ReferenceRun, claim: ReplayedValues = claim) -> Certificate:
        comparisons = _compare_all(request, claim, run)
        names: dict[str, Any] = _names_by_certification(comparisons.checks, claim, datasets)
        return comparisons.certificate(request.adapter.engine, **names)

    def compare_perturbed(run: ReferenceRun) -> Certificate:
        return compare(run, claim.with_rounding_scales(*map(claim_of_replays, (plain_replay, perturbed_replay))))

    if claim.part is not None:
        run, reason = reference_attempt()
        return could_not_compare(request, reason) if run is None else compare(run)
    captured_request = replace(request, batch=_batch_as_captured(request.batch, claim.capture))
    certificate = compare_in_turn(captured_request, reference_attempt, [compare, compare_perturbed], steps=claim.steps)
    alteration = claim.capture.alteration
    return could_not_compare(request, alteration) if alteration and certificate.state != "failed" else certificate


def _names_by_certification(
    checks: Sequence[Check], claim: ReplayedValues, datasets: Mapping[str, LabelledLayer]
) -> dict[str, tuple[str, ...]]:
    """Return the names of quantities that were compared, that rest on them, and that do neither.

    A gradient within a recurrence rests on the comparison of its layer's weights, input or initial state. Of a chain
    swept from its last layer on, it also rests on the gradient at the model's input. A gradient of any other layer is
    the framework's, from the same backward pass as all compared ones.
    """
    compared = {(check.name, check.layer) for check in checks}
    ends = {name for name, layer in compared if layer == "" or name == WEIGHTS}
    swept = {call.layer for call in claim.capture.calls}
    by_state: dict[str, dict[str, list[str]]] = {"certified": {}, "resting": {}, "uncertified": {}}
    for node, layer in datasets.items():
        own = [(LAYER_INPUT, node), (INITIAL, node), (WEIGHTS, node), (WEIGHTS, node.partition("#")[0])]
        rests = bool(compared.intersection(own)) or (INPUTS in ends and claim.capture.topmost)
        for name in layer.variables:
            comparison = LAYER_INPUT if name == "input_grad" else INITIAL if name.startswith("initial_") else ""
            if not name.endswith("_grad"):
                continue
            if (comparison, node) in compared:
                state = "certified"
            else:
                state = "resting" if (rests if node in swept else ends & {INPUTS, WEIGHTS}) else "uncertified"
            by_state[state].setdefault(name, []).append(node)

    def names(state: str) -> list[str]:
        """Return each name once where it is in this state alone, else once for each of the layers."""
        return [
            text
            for name, nodes in by_state[state].items()
            for text in (
                [name]
                if not any(name in by_state[other] for other in by_state.keys() - {state})
                else [f"{node}.{name}" for node in nodes]
            )
        ]

    inputs_and_weights = " and ".join(
        word for word, name in (("at inputs", INPUTS), ("of weights", WEIGHTS)) if name in ends
    )
    ends_certified = [word for word, name in (("outputs", OUTPUTS), ("loss", LOSS)) if name in ends]
    if inputs_and_weights:
        ends_certified.append("gradients " + inputs_and_weights.replace("and of weights", "and weights"))
    return {
        "certified": (*ends_certified, *names("certified")),
        "resting": tuple(names("resting")),
        "uncertified": tuple(names("uncertified")),
    }


def _compare_all(request: ModelRequest, claim: ReplayedValues, run: ReferenceRun) -> Comparisons:
    """Compare all quantities that both the capture and the reference run have."""
    comparisons = Comparisons(claim.steps, claim.dtype)
    capture, part = claim.capture, claim.part
    if capture.loss is not None and run.loss is not None:
        comparisons.compare(LOSS, "", [(capture.loss, run.loss)])
    outputs = [to_host(leaf) for leaf in arrays_of(capture.outputs)]
    for name, value in named_constants(capture.outputs).items():
        label = f"output[{name}]" if name else "output"
        comparisons.left_out[f"{label}, which is no array but {_with_article(type(value).__name__)}"] = None
    if outputs or run.outputs:
        has_same_count = len(outputs) == len(run.outputs)
        pairs = list(zip(outputs, run.outputs, strict=True)) if has_same_count else [(np.inf, 1.0)]
        if part is not None and has_same_count:
            part_pairs = [(part.select(a), b) for a, b in pairs if np.shape(a)[:1] == (part.count,)]
            if len(part_pairs) < len(pairs):
                comparisons.left_out["outputs without samples on their first axis"] = None
            pairs = part_pairs
        comparisons.compare(OUTPUTS, "", pairs)
    if not _has_gradients(capture):
        return comparisons
    if capture.input_grads:
        input_grads = list(zip(arrays_of(request.batch.x), capture.input_grads, run.input_grads, strict=True))
        if part is not None:
            input_grads = [(part.select(x), None if a is None else part.select(a), b) for x, a, b in input_grads]
        input_grads = [(x, a, b) for x, a, b in input_grads if a is not None or b is not None]
        comparisons.compare(INPUTS, "", [fill_missing(a, b) for x, a, b in input_grads if not _is_binary(x)])
        if any(_is_binary(x) for x, _, _ in input_grads):
            comparisons.left_out["inputs whose values are only 0 and 1"] = None
    _compare_weights(comparisons, request, claim, run)
    for boundary in claim.boundaries:
        comparisons.compare(boundary.comparison, boundary.layer, boundary.pairs, scale=boundary.scale)
    return comparisons


def _compare_weights(comparisons: Comparisons, request: ModelRequest, claim: ReplayedValues, run: ReferenceRun) -> None:
    """Compare weight gradients with the framework's, minus the framework's gradient along other paths."""
    other_gradients, whole_names = claim.capture.outside_weight_grads, claim.capture.full_gradient_names
    by_location: dict[tuple[str, str], list[Any]] = {}
    for key, array in claim.weights.items():
        location = request.facts.weight_location(*key)
        if location is not None:
            by_location.setdefault((location.name, location.part), []).append((key, location, array))
    for layer in {key[0] for key in claim.weights} - {
        key[0] for entries in by_location.values() for key, *_ in entries
    }:
        comparisons.left_out[UNPLACED.format(layer)] = None
    computed = {name for (name, _), entries in by_location.items() if any(key in claim.computed for key, *_ in entries)}
    swept = {name for name, _ in by_location} - computed
    by_layer: dict[str, list[tuple[Any, Any]]] = {}
    for (name, _), entries in by_location.items():
        key, location, _ = entries[0]
        if name in computed:
            comparisons.left_out[f"weights of {key[0]}, which the model computes from its parameters"] = None
            continue
        if any(weight_key in claim.incomplete for weight_key, _, _ in entries) or (
            name in whole_names and location.tied
        ):
            comparisons.left_out[f"weights of {key[0]}, which are shared with other layers"] = None
            continue
        if claim.part is not None and name not in whole_names and np.any(to_host(other_gradients.get(name, 0.0))):
            comparisons.left_out[f"weights of {key[0]}, which the model also uses outside of the layer"] = None
            continue
        total, part = run.weight_grads.get(name), None if name in whole_names else other_gradients.get(name)
        if part is not None:  # less the framework's gradient along other paths
            total = -to_host(part) if total is None else to_host(total) - to_host(part)
        claimed_gradient = sum(array for _, _, array in entries)
        reference = np.zeros_like(claimed_gradient) if total is None else location.take(to_host(total))
        if total is not None and key in claim.probed:
            reference = to_host(probe_combinations({key[2]: reference})[key[2]])
        by_layer.setdefault(key[0], []).append((claimed_gradient, reference))
    for layer, pairs in by_layer.items():
        comparisons.compare(WEIGHTS, layer, pairs, scale=claim.scales[layer])
    if claim.part is not None:  # gradients of the other weights were captured as sums over all samples
        return
    unswept = claim.capture.recurrent_weight_names - swept - whole_names
    if any(run.weight_grads.get(name) is not None for name in unswept):
        comparisons.left_out["weights of recurrent layers whose gradients were not requested"] = None
    other_names = [name for name in other_gradients if name in whole_names or name not in swept | unswept]
    gradient_pairs = [(other_gradients[name], run.weight_grads.get(name)) for name in other_names]
    pairs = [fill_missing(a, b) for a, b in gradient_pairs if a is not None or b is not None]
    comparisons.compare(WEIGHTS, "other layers" if swept else "", pairs)


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def _is_binary(leaf: Any) -> bool:
    """Return whether an input has only the values 0 and 1. Its gradient is then not compared."""
    return bool(np.all(np.isin(to_host(leaf), (0, 1))))


_NEEDED = {"input", "hidden", "gate_grad", "gates"}


def weight_sums(layer: LabelledLayer, call: RecurrentCall, samples: slice) -> dict[str, Array] | None:
    """Sum dL/dW of one direction over some samples by weight name, kernels as random combinations of rows, or None.

    Biases sum steps first, which rounds less than one sum over all.
    """
    cell = call.cell
    is_scaled = call.input_scale is not None or call.state_scale is not None
    if (
        cell.by_framework
        or is_scaled
        or not layer.variables.keys() >= _NEEDED
        or layer.coords[GATE].dtype.kind not in "UO"
    ):
        return None
    dz = _variable_of_direction(layer, "gate_grad", call)[samples]
    x = _variable_of_direction(layer, "input", call)[samples]
    has_received = call.start_states is not None
    previous_states = _variable_of_direction(layer, "previous_hidden" if has_received else "hidden", call)[samples]
    if not has_received:  # the states after each step, shifted by one in the direction of the recurrence
        initial_state = to_host(call.initial_state[0])[:, None].astype(previous_states.dtype)
        ordered_states = (
            [previous_states[:, 1:], initial_state]
            if call.direction == "backward"
            else [initial_state, previous_states[:, :-1]]
        )
        previous_states = np.concatenate(ordered_states, axis=1)
    terms = cell.recurrent_terms(dz, _variable_of_direction(layer, "gates", call)[samples], previous_states)
    if terms is None:
        return None
    recurrent_dz, operands = terms
    products = [_outer(_probe_rows(operand), recurrent_dz[:, :, gates]) for gates, operand in operands]
    sums = {
        "kernel": _outer(_probe_rows(x), dz),
        "bias": dz.sum(axis=1).sum(axis=0).ravel(),
        "recurrent_kernel": np.concatenate(products, axis=1),
        "recurrent_bias": recurrent_dz.sum(axis=1).sum(axis=0).ravel(),
    }
    return {name: sums[name] for name in cell.weights()}


def _variable_of_direction(layer: LabelledLayer, name: str, call: RecurrentCall) -> Array:
    """Return one direction of a labelled variable as (sample, time, ..., unit), with gates in the order of the cell."""
    variable = layer.variables[name]
    if DIRECTION in variable.dims:
        variable = variable.isel({DIRECTION: _labels(layer, DIRECTION).index(call.direction)})
    if GATE in variable.dims:
        labels = _labels(layer, GATE)
        if labels != list(call.cell.gates):
            variable = variable.isel({GATE: [labels.index(gate) for gate in call.cell.gates]})
        return np.asarray(variable.transpose(SAMPLE, TIME, GATE, ...).values)
    return np.asarray(variable.transpose(SAMPLE, TIME, ...).values)


def _labels(layer: LabelledLayer, dim: str) -> list[str]:
    """Return the coordinate labels of a dimension of a traced layer as text."""
    return [str(label) for label in layer.coords[dim].values]


def _probe_rows(x: Array) -> Array:
    signs = affine.probe_rows(x.shape[-1], x, affine.Contraction(probes=PROBES))
    return x @ signs.T


def _outer(x: Array, dz: Array) -> Array:
    rows = dz.shape[0] * dz.shape[1]
    return x.reshape(rows, -1).T @ dz.reshape(rows, -1)


def input_gradient(layer: LabelledLayer) -> Array | None:
    """Return the gradient at a layer's input, (sample, time, feature); None if there is none."""
    variable = layer.variables.get("input_grad")
    return None if variable is None else np.asarray(variable.transpose(SAMPLE, TIME, ..., FEATURE).values)


def initial_state_gradients(layer: LabelledLayer, call: RecurrentCall, names: Any) -> list[Array] | None:
    """Return the gradients at a layer's initial states, (sample, unit) each; None if one is missing."""
    gradients = []
    for name in names:
        variable_name = f"initial_{name}_grad"
        if variable_name in layer.variables:
            variable = layer.variables[variable_name]
        elif "initial_state_grad" in layer.variables:
            variable = layer.variables["initial_state_grad"]
            variable = variable.isel({STATE: _labels(layer, STATE).index(str(name))})
        else:
            return None
        if DIRECTION in variable.dims:
            variable = variable.isel({DIRECTION: _labels(layer, DIRECTION).index(call.direction)})
        gradients.append(np.asarray(variable.transpose(SAMPLE, ...).values))
    return gradients
