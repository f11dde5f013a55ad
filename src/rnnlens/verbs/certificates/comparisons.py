"""Comparisons of results with a reference run: the user's own model, run and differentiated by its framework alone.

Self-checks compare a replay with a capture; a common error of both would not show. A reference run contains no code
of rnnlens. It gives outputs, loss, and one vector-Jacobian product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ... import data
from ...adapters.protocol import Adapter, Batch, Capture, RecurrentCall, ReferenceRun, SequenceCall
from ...autodiff.tensors import like
from ...errors import CertificateError
from ...recurrence.adjoint import probed
from ...recurrence.rounding import one_rounding
from ...results.checks import Certificate, Check, coarser, epsilon, residual, rounding_bound, underflow_unit
from ...results.schema import to_host
from ...trees import is_packed
from ...typing import Array
from ..names import known_model
from .of_samples import SamplePart

T = TypeVar("T")

#: Function that waits for the reference run, and returns it and "", or None and the reason for its failure.
Attempt = Callable[[], tuple[ReferenceRun | None, str]]


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """Call ``run``; return its result and "", or None and the reason for the failure."""
    try:
        return run(), ""
    except CertificateError as reason:
        return None, str(reason)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return None, f"the reference run of the model raised {type(error).__name__}: {first}"


def recheck_failure(
    failed: Certificate, adapter: Adapter, model: Any, batch: Batch, first: ReferenceRun, *, steps: int
) -> Certificate:
    """Check a failed certificate again, with the rounding of the coarsest dtype that ran in the model.

    Return it as failed, as passed, or as "could not" if the reference run itself is random or chaotic.
    """
    dtype, _ = attempt(lambda: adapter.coarsest_dtype(model, batch))
    if dtype:
        bounds = rounding_bound(dtype, steps)
        checks = tuple(replace(check, bound=max(check.bound, bounds)) for check in failed.checks)
        failed = replace(failed, checks=checks, state="passed" if all(c.ok for c in checks) else "failed")
        if failed.state == "passed":
            return failed
    if known_model(adapter, model).sequences:
        failed = _with_rounding_of_scans(failed, adapter, model, batch, first, dtype or "")
        if failed.state == "passed":
            return failed
    again = _rerun_difference(adapter, model, batch, first)
    if again > 1e-6:
        return Certificate("could not", failed.against, why="two reference runs of the model give different numbers")
    if batch.training and _rerun_difference(adapter, model, replace(batch, seed=(batch.seed or 0) + 1), first) > 1e-6:
        why = "the model draws random numbers in training mode, and drew others in the traced run"
        return Certificate("could not", failed.against, why=why)
    unit = epsilon(adapter.provenance(model).get("dtype"))
    moved = _rerun_difference(
        adapter, model, replace(batch, x=data.map_leaves(lambda leaf: _perturbed_leaf(leaf, unit), batch.x)), first
    )
    if all(check.ok or check.residual <= check.bound * moved / unit for check in failed.checks):
        why = f"the model is chaotic: rounding its input changes its outputs by {moved:.1g}"
        return Certificate("could not", failed.against, why=why)
    return failed


def _with_rounding_of_scans(
    failed: Certificate, adapter: Adapter, model: Any, batch: Batch, first: ReferenceRun, dtype: str
) -> Certificate:
    """Widen the bounds of a failed certificate by what one rounding of the weights changes in the reference run.

    The models' own scans round more than a loop does: in chunks, with triangular inverses. A gradient that is zero but
    for rounding, such as that of a router with one expert per token, differs as a whole.
    """
    unit = max(epsilon(adapter.provenance(model).get("dtype")), epsilon(dtype) if dtype else 0.0)
    again, _ = attempt(lambda: adapter.rounded_run(model, batch, unit))
    if again is None:
        return failed
    pairs: dict[str, list[tuple[Array, Array]]] = {}
    for name, gradient in first.weight_grads.items():
        other = again.weight_grads.get(name)
        if gradient is not None and other is not None:
            pairs.setdefault(name.rpartition(".")[0], []).append((to_host(other), to_host(gradient)))
    whole = _largest_share([pair for found in pairs.values() for pair in found])

    def widened(check: Check) -> Check:
        of_layer = check.name == WEIGHTS and check.layer in pairs
        moved = _largest_share(pairs[check.layer]) if of_layer else whole
        return check if check.ok else replace(check, bound=check.bound * max(1.0, moved / unit))

    checks = tuple(map(widened, failed.checks))
    return replace(failed, checks=checks, state="passed" if all(check.ok for check in checks) else "failed")


def _largest_share(pairs: list[tuple[Array, Array]]) -> float:
    """Return the largest difference of all pairs, relative to the largest number of their second arrays."""
    size = max((float(np.abs(b).max(initial=0.0)) for _, b in pairs), default=0.0)
    off = max((float(np.abs(np.subtract(a, b, dtype=np.float64)).max(initial=0.0)) for a, b in pairs), default=0.0)
    return off / size if size else 0.0


def _rerun_difference(adapter: Adapter, model: Any, batch: Batch, first: ReferenceRun) -> float:
    """Return the relative difference between outputs and loss of a repeated reference run and the first one."""
    again, _ = attempt(lambda: adapter.reference_run(model, batch, gradients=False))
    if again is None:
        return 0.0
    pairs = list(zip(again.outputs, first.outputs, strict=True))
    if again.loss is not None and first.loss is not None:
        pairs.append((again.loss, first.loss))
    both = ((np.asarray(to_host(a), dtype=float), np.asarray(to_host(b), dtype=float)) for a, b in pairs)
    return max((residual(a, b) for a, b in both), default=0.0)


def _perturbed_leaf(leaf: Any, unit: float) -> Any:
    """Perturb each float by one rounding, up or down; integers and packed sequences stay unchanged."""
    if data.is_packed(leaf) or to_host(leaf).dtype.kind != "f":
        return leaf
    values: Any = to_host(leaf)
    return like(one_rounding(np, unit)(values), leaf)


LOSS, OUTPUTS, INPUTS, WEIGHTS = (
    "reference loss",
    "reference outputs",
    "reference input gradient",
    "reference weight gradients",
)
LAYER_INPUT, INITIAL = "reference layer input gradient", "reference initial state gradient"


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
            if call.weight_grads is None:
                self.incomplete.add(key)
            if name in call.computed:
                self.computed.add(key)
            if not call.cell.by_framework and len(array.shape) == 2:
                self.probed.add(key)
            self.weights[key] = self.weights[key] + to_host(array) if key in self.weights else to_host(array)

    def include_scans(self, calls: Iterable[SequenceCall]) -> None:
        """Widen the number of steps and the dtype of comparisons to those of whole-sequence layers."""
        for call in calls:
            self.steps = max(self.steps, call.cell.steps)
            self.dtype = coarser(self.dtype, call.compute_dtype)

    def beside(self, perturbed: ReplayedValues) -> ReplayedValues:
        """Return a copy with rounding scales at least as large as the effect of one more rounding."""
        unit, scales = epsilon(self.dtype), dict(self.scales)
        for key, array in self.weights.items():
            scales[key[0]] = max(scales.get(key[0], 0.0), _mismatch(array, perturbed.weights[key]) / unit)
        boundaries = []
        for boundary, other in zip(self.boundaries, perturbed.boundaries, strict=True):
            apart = [_mismatch(a, b) for (a, _), (b, _) in zip(boundary.pairs, other.pairs, strict=True)]
            boundaries.append(boundary._replace(scale=max(boundary.scale, *(size / unit for size in apart))))
        return replace(self, scales=scales, boundaries=boundaries)


#: Numbers in a part of an array whose difference is taken at a time.
_CACHED = 1 << 16


class Comparisons:
    """A list of comparisons, each with a bound on the mismatch that rounding explains."""

    def __init__(self, steps: int, dtype: str) -> None:
        self.checks: list[Check] = []
        self.left_out: dict[str, None] = {}
        self.steps, self.dtype = steps, dtype

    @np.errstate(invalid="ignore")  # infinity less infinity
    def compare(self, name: str, layer: str, pairs: Iterable[tuple[Any, Any]], *, scale: float = 0.0) -> None:
        """Add a comparison of pairs of arrays: their largest difference, relative to the largest value or ``scale``.

        If the rounding of numbers of size ``scale`` is as large as all values, agreement proves nothing; the quantity
        is then listed as not compared. A difference beyond the bound fails nevertheless.
        """
        every = list(pairs)
        both = [(_array(a), _array(b)) for a, b in every]
        if not both:
            return
        # Python floats were converted from tensors of unknown dtype; float32 is assumed.
        kinds = ["float32" if isinstance(v, float) else str(_array(v).dtype) for pair in every for v in pair]
        kind = self.dtype or functools.reduce(coarser, kinds)
        bound, largest = rounding_bound(kind, self.steps), max(_largest(b) for _, b in both)
        unit = max(scale, underflow_unit(kind, self.steps), largest)
        check = Check(name, layer, max(_residual(a, b, unit) for a, b in both), bound)
        if check.ok and 0.0 < largest <= bound * scale:
            what = " ".join(part for part in (layer, name.removeprefix("reference ")) if part)
            self.left_out[f"{what} (no larger than what rounding explains)"] = None
        else:
            self.checks.append(check)

    def certificate(self, against: str, more: Iterable[Check] = (), **words: Any) -> Certificate:
        """Return the certificate of all comparisons, with ``words`` as in :meth:`Certificate.of`."""
        if self.left_out and not self.checks:
            return Certificate("could not", against, why=", ".join(self.left_out))
        words["uncertified"] = (*words.get("uncertified", ()), *self.left_out)
        return Certificate.of(against, [*self.checks, *more], **words)


@contextmanager
def start_reference_run(adapter: Adapter, model: Any, batch: Batch, claim: ReplayedValues) -> Iterator[Attempt]:
    """Start the reference run after the capture, in a thread beside the replay if the adapter can prepare it."""
    gradients, part = _has_gradients(claim.capture), claim.part
    if part is not None:
        given = part.cotangents(claim.capture)
        yield lambda: attempt(lambda: adapter.reference_run(model, part.batch(batch), given, gradients=gradients))
        return
    batch = _as_captured(batch, claim.capture)
    with ThreadPoolExecutor(1) as thread:
        ready, why = attempt(lambda: adapter.prepared_reference_run(model, batch, gradients=gradients))
        if why:
            yield lambda: (None, why)
        elif ready is None:
            yield lambda: attempt(lambda: adapter.reference_run(model, batch, gradients=gradients))
        else:
            yield thread.submit(attempt, ready).result


def _as_captured(batch: Batch, capture: Capture) -> Batch:
    """Return the batch, without targets and weights if the capture has no loss."""
    return batch if capture.loss is not None else batch.without_loss()


def _has_gradients(capture: Capture) -> bool:
    return bool(capture.input_grads or capture.beside) and not capture.altered


def certify(
    adapter: Adapter,
    model: Any,
    batch: Batch,
    claim: ReplayedValues,
    reference_attempt: Attempt,
    perturbed: Callable[[], ReplayedValues],
    **words: Any,
) -> Certificate:
    """Compare replayed values with the reference run; return "could not" if that run is not reproducible itself.

    ``perturbed`` recomputes the replayed values with one more rounding; it is called only if the comparison fails.
    ``words`` as in :meth:`Certificate.of`.
    """
    altered, engine = claim.capture.altered, adapter.engine
    run, why = reference_attempt()
    if run is None:
        return Certificate("could not", engine, why=why)

    def compare(claim: ReplayedValues) -> Certificate:
        comparisons = compared(adapter, model, batch, claim, run)
        return comparisons.certificate(engine, **words)

    certificate = compare(claim)
    if claim.part is not None:
        return replace(certificate, samples=str(claim.part))
    if certificate.state == "failed":
        certificate = compare(claim.beside(perturbed()))
    if certificate.state == "failed":
        compared_batch = _as_captured(batch, claim.capture)
        certificate = recheck_failure(certificate, adapter, model, compared_batch, run, steps=claim.steps)
    if altered and certificate.state != "failed":
        return Certificate("could not", engine, why=altered)
    return certificate


def compared(adapter: Adapter, model: Any, batch: Batch, claim: ReplayedValues, run: ReferenceRun) -> Comparisons:
    """Compare all quantities that both the capture and the reference run have."""
    comparisons = Comparisons(claim.steps, claim.dtype)
    capture, some = claim.capture, _whole if claim.part is None else claim.part.of
    if capture.loss is not None and run.loss is not None:
        comparisons.compare(LOSS, "", [(capture.loss, run.loss)])
    outputs = [to_host(leaf) for leaf in outputs_of(capture.outputs)]
    if outputs or run.outputs:
        same = len(outputs) == len(run.outputs)
        pairs = list(zip(outputs, run.outputs, strict=True)) if same else [(np.inf, 1.0)]
        if claim.part is not None and same:
            cut = [(a, b) for a, b in pairs if np.shape(a)[:1] == (claim.part.count,)]
            if len(cut) < len(pairs):
                comparisons.left_out["outputs without samples on their first axis"] = None
            pairs = [(some(a), b) for a, b in cut]
        comparisons.compare(OUTPUTS, "", pairs)
    if not _has_gradients(capture):
        return comparisons
    if capture.input_grads:
        sides = list(zip(outputs_of(batch.x), capture.input_grads, run.input_grads, strict=True))
        sides = [(some(x), None if a is None else some(a), b) for x, a, b in sides if _either(a, b)]
        comparisons.compare(INPUTS, "", [filled(a, b) for x, a, b in sides if not _flags(x)])
        if any(_flags(x) for x, _, _ in sides):
            comparisons.left_out["inputs whose values are only 0 and 1"] = None
    _compare_weights(comparisons, adapter, model, claim, run)
    for boundary in claim.boundaries:
        comparisons.compare(boundary.comparison, boundary.layer, boundary.pairs, scale=boundary.scale)
    return comparisons


def _whole(array: Any) -> Any:
    return array


def outputs_of(tree: Any) -> list[Any]:
    """Return the leaves of a nested output; of a packed sequence its data."""
    return [leaf.data if is_packed(leaf) else leaf for leaf in data.leaves_of(tree)]


def _compare_weights(
    comparisons: Comparisons, adapter: Adapter, model: Any, claim: ReplayedValues, run: ReferenceRun
) -> None:
    """Compare weight gradients with the framework's, minus the framework's gradient along other paths."""
    beside, whole = claim.capture.beside, claim.capture.whole
    by_place: dict[tuple[str, str], list[Any]] = {}
    for key, array in claim.weights.items():
        place = adapter.place(model, *key)
        if place is not None:
            by_place.setdefault((place.name, place.part), []).append((key, place, array))
    computed = {name for (name, _), entries in by_place.items() if any(key in claim.computed for key, *_ in entries)}
    swept = {name for name, _ in by_place} - computed
    by_layer: dict[str, list[tuple[Any, Any]]] = {}
    for (name, _), entries in by_place.items():
        key, place, _ = entries[0]
        if name in computed:
            comparisons.left_out[f"weights of {key[0]}, which the model computes from its parameters"] = None
            continue
        if any(one in claim.incomplete for one, _, _ in entries) or (name in whole and place.tied):
            comparisons.left_out[f"weights of {key[0]}, which are shared with other layers"] = None
            continue
        if claim.part is not None and name not in whole and np.any(to_host(beside.get(name, 0.0))):
            comparisons.left_out[f"weights of {key[0]}, which the model also uses outside of the layer"] = None
            continue
        total = _difference(run.weight_grads.get(name), None if name in whole else beside.get(name))
        claimed = sum(array for _, _, array in entries)
        reference = np.zeros_like(claimed) if total is None else place.take(total)
        if total is not None and key in claim.probed:
            reference = to_host(probed({key[2]: reference})[key[2]])
        by_layer.setdefault(key[0], []).append((claimed, reference))
    for layer, pairs in by_layer.items():
        comparisons.compare(WEIGHTS, layer, pairs, scale=claim.scales[layer])
    if claim.part is not None:  # gradients of the other weights were captured as sums over all samples
        return
    unfollowed = claim.capture.inside - swept - whole
    if any(run.weight_grads.get(name) is not None for name in unfollowed):
        comparisons.left_out["weights of recurrent layers whose gradients were not requested"] = None
    others = [name for name in beside if name in whole or name not in swept | unfollowed]
    pairs = [filled(beside[n], run.weight_grads.get(n)) for n in others if _either(beside[n], run.weight_grads.get(n))]
    comparisons.compare(WEIGHTS, "other layers" if swept else "", pairs)


def _difference(total: Array | None, part: Any) -> Array | None:
    if total is None:
        return None if part is None else -to_host(part)
    return to_host(total) if part is None else to_host(total) - to_host(part)


def _either(*arrays: Any) -> bool:
    return any(array is not None for array in arrays)


def _flags(leaf: Any) -> bool:
    """Return whether an input has only the values 0 and 1. Its gradient is then not compared."""
    return bool(np.all(np.isin(to_host(leaf), (0, 1))))


def filled(one: Any, other: Any) -> tuple[Any, Any]:
    """Return both gradients, with zeros for a missing one."""
    if one is None:
        return np.zeros_like(to_host(other)), other
    return one, np.zeros_like(to_host(one)) if other is None else other


def _array(value: Any) -> Array:
    array = np.asarray(to_host(value))
    return array.astype(np.float64) if array.dtype.kind in "biu" else array


def _largest(array: Array) -> float:
    largest = max(float(np.max(array)), -float(np.min(array))) if array.size else 0.0
    return largest if np.isfinite(largest) else 0.0


@np.errstate(invalid="ignore")
def _mismatch(one: Array, other: Array) -> float:
    """Return the largest finite difference of two arrays."""
    difference = np.abs(_array(one) - _array(other))
    return float(np.max(difference, where=np.isfinite(difference), initial=0.0))


def _largest_difference(one: Array, other: Array) -> float:
    """Return the largest difference of two arrays, NaN if any is; in parts that fit the processor's cache."""
    one, other = np.atleast_1d(one, other)
    rows = max(1, _CACHED * len(one) // one.size)
    return float(np.max([np.max(np.abs(one[i : i + rows] - other[i : i + rows])) for i in range(0, len(one), rows)]))


def _residual(claimed: Array, reference: Array, unit: float) -> float:
    if claimed.shape != reference.shape:
        return float("inf")
    difference = _largest_difference(claimed, reference) if claimed.size else 0.0
    if np.isfinite(difference) and (unit or not difference):
        return difference / unit if unit else 0.0
    return residual(
        claimed, reference.astype(claimed.dtype) if reference.dtype != claimed.dtype else reference, scale=unit
    )
