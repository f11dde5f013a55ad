"""Comparison of a claim with a reference run: the user's own model, run and differentiated by its framework.

Self-checks compare a replay with a capture; a common error of both would not show. A reference run contains no code
of rnnlens. It gives outputs, loss, and one vector-Jacobian product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ... import data
from ...adapters.protocol import Batch, ReferenceRun, Run, Taps
from ...autodiff import without_fused_sums
from ...autodiff.tensors import converted_like
from ...errors import CertificateError
from ...recurrence.rounding import rounding_perturbation
from ...results.checks import (
    CUDNN_ACTIVATIONS,
    Certificate,
    Check,
    coarser_dtype,
    epsilon,
    residual,
    rounding_bound,
    underflow_unit,
)
from ...results.schema import to_host
from ...typing import Array
from ..request import ModelRequest

T = TypeVar("T")

#: Names of comparisons.
LOSS = "reference loss"
OUTPUTS = "reference outputs"
INPUTS = "reference input gradient"
WEIGHTS = "reference weight gradients"
#: What is not compared of a layer whose weights an adapter does not find in its framework (`Adapter.weight_location`).
UNPLACED = "weights of {}, which the adapter does not find among those of the framework"
#: Names of what is certified, where some weights were compared and others were not.
WITH_OTHER_WEIGHTS = {
    "gradients of weights": "gradients of other weights",
    "gradients at inputs and weights": "gradients at inputs and other weights",
}
LAYER_INPUT, INITIAL = "reference layer input gradient", "reference initial state gradient"


#: Why no reference run has the numbers of a run with ``initial_state=``.
OWN_STATES = "initial_state= was set by rnnlens; the model on its own starts from other states"


def attempt(function: Callable[[], T]) -> tuple[T | None, str]:
    """Call ``function``; return its result and "", or None and the reason for the failure."""
    try:
        return function(), ""
    except CertificateError as reason:
        return None, str(reason)
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return None, f"the reference run of the model raised {type(error).__name__}: {first_line}"


def untouched(request: ModelRequest, batch: Batch, **options: bool) -> Run:
    """Return a run of the user's model as it stands; see :meth:`Taps.nothing`.

    Raises ``CertificateError`` if rnnlens set initial states, which the model on its own does not have.
    """
    if batch.initial_state:
        raise CertificateError(OWN_STATES)
    return request.adapter.run(request.model, batch, Taps.nothing(**options))


def could_not_compare(request: ModelRequest, reason: str) -> Certificate:
    """Return the certificate of a result that cannot be compared."""
    return Certificate("could not", request.adapter.engine, why=reason)


def compare_in_turn(
    request: ModelRequest,
    reference: Callable[[], tuple[ReferenceRun | None, str]],
    comparisons: Sequence[Callable[[ReferenceRun], Certificate | None]],
    *,
    steps: int,
    in_double: Callable[[], tuple[ReferenceRun | None, str]] | None = None,
) -> Certificate:
    """Compare a claim with a reference run by each of ``comparisons`` in turn, until one does not fail.

    A later comparison takes more into account than the ones before; it returns None where it has nothing to add. If
    all fail, the reference is run once more without kernels that round much, then by ``in_double`` in float64, and then
    the failure is checked again.
    """
    run, reason = reference()
    if run is None:
        return could_not_compare(request, reason)
    certificate = Certificate()
    for compare in comparisons:
        certificate = compare(run) or certificate
        if certificate.state != "failed":
            return certificate
    precise_kernels = without_fused_sums(request.adapter.engine)
    if precise_kernels is not None:
        with precise_kernels:
            precise_run, _ = reference()
        precise = None if precise_run is None else comparisons[0](precise_run)
        if precise is not None and precise.state == "passed":
            return precise
    double_run = None if in_double is None else in_double()[0]
    precise = None if double_run is None else comparisons[0](double_run)
    if double_run is not None and precise is not None:
        precise = _within_measured_rounding(precise, run, double_run)
        if precise.state == "passed":
            return precise
    if not run.outputs:  # a pull-back by the adapter, which returns no outputs
        output_run, reason = attempt(lambda: untouched(request, request.batch, gradients=False).reference())
        if output_run is None:
            return could_not_compare(request, reason)
        run = replace(run, outputs=output_run.outputs)
    return recheck_failure(certificate, request, run, steps=steps)


#: How many times the framework's own rounding error that of a claim may be; and the largest of those errors, relative
#: to a layer's largest gradient, from which anything follows.
_ERRORS, _LARGEST_ERROR = 4.0, 1 / 64


def _within_measured_rounding(certificate: Certificate, run: ReferenceRun, double_run: ReferenceRun) -> Certificate:
    """Widen the bounds on gradients of weights, compared in float64, by what the framework's own float32 is off there.

    Gradients that are sums of much larger terms, as behind a normalisation of two features, are rounded by far more
    than their own size explains. A claim then has to be as near to float64 as the framework itself.
    """
    errors = {layer: _largest_share(pairs) for layer, pairs in _weights_by_layer(run, double_run).items()}

    def widen(check: Check) -> Check:
        error = errors.get(check.layer, 0.0) if check.name == WEIGHTS else 0.0
        return replace(check, bound=max(check.bound, _ERRORS * error)) if error <= _LARGEST_ERROR else check

    checks = tuple(map(widen, certificate.checks))
    is_passed = bool(checks) and all(check.ok for check in checks)
    against = f"{certificate.against} in float64"
    return replace(certificate, checks=checks, state="passed" if is_passed else "failed", against=against)


def _weights_by_layer(run: ReferenceRun, other: ReferenceRun) -> dict[str, list[tuple[Array, Array]]]:
    """Return the gradients of weights of two reference runs in pairs, by the path of their module."""
    pairs: dict[str, list[tuple[Array, Array]]] = {}
    for name, gradient in run.weight_grads.items():
        other_gradient = other.weight_grads.get(name)
        if gradient is not None and other_gradient is not None:
            pairs.setdefault(name.rpartition(".")[0], []).append((to_host(gradient), to_host(other_gradient)))
    return pairs


def recheck_failure(failed: Certificate, request: ModelRequest, first_run: ReferenceRun, *, steps: int) -> Certificate:
    """Check a failed certificate by the coarsest dtype that ran; return "could not" for a random or chaotic model."""
    batch = request.batch
    dtype, _ = attempt(lambda: untouched(request, batch).coarsest_dtype())
    if dtype:
        by_cudnn = dtype == "float32" and request.provenance().get("device", "").startswith("cuda")
        bounds = max(rounding_bound(dtype, steps), CUDNN_ACTIVATIONS if by_cudnn else 0.0)
        checks = tuple(replace(check, bound=max(check.bound, bounds)) for check in failed.checks)
        failed = replace(failed, checks=checks, state="passed" if all(c.ok for c in checks) else "failed")
        if failed.state == "passed":
            return failed
    if request.catalogue.sequences:
        failed = _with_rounding_of_scans(failed, request, first_run, dtype or "")
        if failed.state == "passed":
            return failed
    if _difference_of_rerun(request, first_run) > 1e-6:
        return could_not_compare(request, "two reference runs of the model give different numbers")
    if batch.training and _difference_of_rerun(request, first_run, seed=(batch.seed or 0) + 1) > 1e-6:
        return could_not_compare(
            request, "the model draws random numbers in training mode, and drew others in the traced run"
        )
    unit = epsilon(request.provenance().get("dtype"))
    relative_change = _difference_of_rerun(
        request, first_run, x=data.map_leaves(lambda leaf: _perturbed_leaf(leaf, unit), batch.x)
    )
    if all(check.ok or check.residual <= check.bound * relative_change / unit for check in failed.checks):
        return could_not_compare(
            request, f"the model is chaotic: rounding its input changes its outputs by {relative_change:.1g}"
        )
    return failed


def _with_rounding_of_scans(
    failed: Certificate, request: ModelRequest, first_run: ReferenceRun, dtype: str
) -> Certificate:
    """Widen the bounds of a failed certificate by what one rounding of the weights changes in the reference run.

    The models' own scans round more than a loop does: in chunks, with triangular inverses. A gradient that is zero but
    for rounding, such as that of a router with one expert per token, differs as a whole.
    """
    unit = max(epsilon(request.provenance().get("dtype")), epsilon(dtype) if dtype else 0.0)
    rounded_run, _ = attempt(lambda: untouched(request, request.batch).rounded(unit))
    if rounded_run is None:
        return failed
    pairs = _weights_by_layer(rounded_run, first_run)
    largest_share = _largest_share([pair for layer_pairs in pairs.values() for pair in layer_pairs])

    def widen(check: Check) -> Check:
        is_layer_weights = check.name == WEIGHTS and check.layer in pairs
        share = _largest_share(pairs[check.layer]) if is_layer_weights else largest_share
        return check if check.ok else replace(check, bound=check.bound * max(1.0, share / unit))

    checks = tuple(map(widen, failed.checks))
    return replace(failed, checks=checks, state="passed" if all(check.ok for check in checks) else "failed")


def _largest_share(pairs: list[tuple[Array, Array]]) -> float:
    """Return the largest difference of all pairs, relative to the largest number of their second arrays."""
    arrays = [(_as_array(a).astype(np.float64), _as_array(b).astype(np.float64)) for a, b in pairs]
    size = max((float(np.abs(b).max(initial=0.0)) for _, b in arrays), default=0.0)
    difference = max((float(np.abs(a - b).max(initial=0.0)) for a, b in arrays), default=0.0)
    return difference / size if size else 0.0


def _difference_of_rerun(request: ModelRequest, first_run: ReferenceRun, **changed: Any) -> float:
    """Run the reference with fields of the batch ``changed``; return the relative difference of outputs and loss."""
    batch = replace(request.batch, **changed)
    second_run, _ = attempt(lambda: untouched(request, batch, gradients=False).reference())
    if second_run is None:
        return 0.0
    pairs = list(zip(second_run.outputs, first_run.outputs, strict=True))
    if second_run.loss is not None and first_run.loss is not None:
        pairs.append((second_run.loss, first_run.loss))
    return max((residual(_as_array(a).astype(float), _as_array(b).astype(float)) for a, b in pairs), default=0.0)


def _perturbed_leaf(leaf: Any, unit: float) -> Any:
    """Perturb each float by one rounding, up or down; integers and packed sequences stay unchanged."""
    if data.is_packed(leaf) or to_host(leaf).dtype.kind != "f":
        return leaf
    values: Any = to_host(leaf)
    return converted_like(rounding_perturbation(np, unit)(values), leaf)


def random_factors(sizes: tuple[int, ...]) -> Array:
    """Draw a random sign for each number, multiplied by 1, 3/4 or 1/2 in turn along the last axis.

    Probabilities of classes sum to one, so that equal factors at all of them give a derivative of zero, which compares
    nothing. No factor exceeds 1, as the bound of a measure needs, and each is exact in bfloat16.
    """
    signs: Array = 2.0 * np.random.default_rng(0).integers(0, 2, size=sizes) - 1.0
    return signs * (1.0 - np.arange(sizes[-1]) % 3 / 4)


#: Numbers in a part of an array whose difference is taken at a time.
_PART_SIZE = 1 << 16


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
        pair_list = list(pairs)
        arrays = [(_as_array(a), _as_array(b)) for a, b in pair_list]
        if not arrays:
            return
        dtype = self.dtype
        if not dtype:  # Python floats were converted from tensors of unknown dtype; float32 is assumed.
            dtypes = [
                "float32" if isinstance(v, float) else str(_as_array(v).dtype) for pair in pair_list for v in pair
            ]
            dtype = functools.reduce(coarser_dtype, dtypes)
        for array_dtype in {v.dtype for pair in arrays for v in pair if isinstance(v, np.ndarray)}:
            dtype = coarser_dtype(dtype, str(array_dtype))  # as the gradient of a float32 state in a float64 model
        bound, largest = rounding_bound(dtype, self.steps), max(_largest(b) for _, b in arrays)
        unit = max(scale, underflow_unit(dtype, self.steps), largest)
        check = Check(name, layer, max(_residual(a, b, unit) for a, b in arrays), bound)
        if check.ok and 0.0 < largest <= bound * scale:
            quantity = " ".join(part for part in (layer, name.removeprefix("reference ")) if part)
            self.left_out[f"{quantity} (no larger than what rounding explains)"] = None
        else:
            self.checks.append(check)

    def certificate(self, against: str, further_checks: Iterable[Check] = (), **names: Any) -> Certificate:
        """Return the certificate of all comparisons, with ``names`` as in :meth:`Certificate.of`."""
        if self.left_out and not self.checks:
            return Certificate("could not", against, why=", ".join(self.left_out))
        names["uncertified"] = (*names.get("uncertified", ()), *self.left_out)
        if any(name.startswith("weights of ") for name in self.left_out):
            names["certified"] = tuple(WITH_OTHER_WEIGHTS.get(name, name) for name in names["certified"])
        return Certificate.of(against, [*self.checks, *further_checks], **names)


def fill_missing(first: Any, second: Any) -> tuple[Any, Any]:
    """Return two gradients, with zeros in place of one that is None."""
    if first is None:
        return np.zeros_like(to_host(second)), second
    return first, np.zeros_like(to_host(first)) if second is None else second


def _as_array(value: Any) -> Array:
    """Convert to NumPy: integers to float64, complex numbers to their two parts on an axis behind."""
    array = np.asarray(to_host(value))
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], axis=-1)
    return array.astype(np.float64) if array.dtype.kind in "biu" else array


def _largest(array: Array) -> float:
    largest = max(float(np.max(array)), -float(np.min(array))) if array.size else 0.0
    return largest if np.isfinite(largest) else 0.0


@np.errstate(invalid="ignore")
def mismatch(first: Array, second: Array) -> float:
    """Return the largest finite difference of two arrays."""
    difference = np.abs(_as_array(first) - _as_array(second))
    return float(np.max(difference, where=np.isfinite(difference), initial=0.0))


def _residual(claimed: Array, reference: Array, unit: float) -> float:
    if claimed.shape != reference.shape:
        return float("inf")
    difference = 0.0
    if claimed.size:  # NaN if any is; in parts that fit the processor's cache
        flat_claimed, flat_reference = np.atleast_1d(claimed, reference)
        rows = max(1, _PART_SIZE * len(flat_claimed) // flat_claimed.size)
        starts = range(0, len(flat_claimed), rows)
        difference = float(
            np.max([np.max(np.abs(flat_claimed[i : i + rows] - flat_reference[i : i + rows])) for i in starts])
        )
    if np.isfinite(difference) and (unit or not difference):
        return difference / unit if unit else 0.0
    return residual(
        claimed, reference.astype(claimed.dtype) if reference.dtype != claimed.dtype else reference, scale=unit
    )
