"""Self-checks and the certificate of a result: residuals, and the bounds that rounding of the dtype explains.

Two computations of the same number differ by rounding. Each of T steps adds an error of the order of the machine
epsilon, in an arbitrary direction, so the sum grows as sqrt(T) (a random walk; Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., section 2.8). ``FACTOR`` covers further errors: inner products over features
and units, and the approximate exp and tanh of fused kernels, which are off by a few units in the last place. A wrong
gate order, a lost mask or a missing bias gives residuals of 1e-2 and more: far above the bound
for float32 (1e-4 at 1000 steps). In half precision the checks find only gross faults.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from array_api_compat import array_namespace

from ..errors import SelfCheckWarning
from ..typing import Array

FACTOR = 32.0

#: Upper limit of every bound: half precision is off by a few percent after hundreds of steps.
CEILING = 0.25

#: Largest relative error of a state in float32 that cuDNN's sigmoid and tanh explain, three times that seen (1.5e-5).
CUDNN_ACTIVATIONS = 5e-5

#: Machine epsilon and smallest normal number by dtype name, since bfloat16 is no NumPy dtype; for float16 the smallest
#: subnormal number.
_FLOATS = {
    "float64": (2.0**-52, 2.0**-1022),
    "complex128": (2.0**-52, 2.0**-1022),
    "float32": (2.0**-23, 2.0**-126),
    "complex64": (2.0**-23, 2.0**-126),
    "float16": (2.0**-10, 2.0**-24),
    "bfloat16": (2.0**-7, 2.0**-126),
}

State = Literal["passed", "failed", "could not", "off"]

REPLAY = "replay"
WEIGHT_SUM = "weight gradient sum"

_MEANING = {
    REPLAY: "the replayed output differs from the captured one",
    WEIGHT_SUM: "the sum over time of per-step weight gradients differs from the framework's dL/dW",
    "hidden attention": "the sum of alpha[i, j] x_j differs from the scan's own output y_i",
    "reference loss": "the loss differs from the reference run of the model",
    "reference outputs": "the output differs from the reference run of the model",
    "reference input gradient": "the gradient at the model's input differs from the reference run of the model",
    "reference weight gradients": "weight gradients differ from the reference run of the model",
    "reference jacobian": "random combinations of the rows differ from the reference run of the model",
    "bound of the measure": "the norms of random combinations of the rows contradict the measured sizes",
    "reference target": "the value of the target differs from the reference run of the model",
    "reference gradient": "the gradient differs from the reference run of the model",
    "reference layer input gradient": "input_grad differs from the framework's autodiff of the layer",
    "reference initial state gradient": "initial_state_grad differs from the framework's autodiff of the layer",
}


@dataclass(frozen=True)
class Check:
    """One comparison: a relative residual of one layer, and the bound that rounding explains."""

    name: str
    layer: str
    residual: float
    bound: float

    @property
    def ok(self) -> bool:
        """True if the residual is within the bound; False for NaN."""
        return self.residual <= self.bound

    @property
    def sentence(self) -> str:
        """The comparison and its outcome as one sentence.

        >>> Check("replay", "lstm", 0.5, 1e-4).sentence
        'lstm: the replayed output differs from the captured one by 0.5 (relative); rounding explains 0.0001'
        """
        meaning = _MEANING.get(self.name, f"{self.name}: two computations of the same quantity differ")
        return (
            f"{self.layer or 'model'}: {meaning} by {self.residual:.3g} (relative); rounding explains {self.bound:.3g}"
        )

    @property
    def ratio(self) -> float:
        """Residual relative to the bound; infinity for NaN."""
        return math.inf if math.isnan(self.residual) else self.residual / self.bound

    @property
    def figures(self) -> str:
        """Residual and bound as short text."""
        return f"largest residual {self.residual:.1g}, rounding explains {self.bound:.1g}"

    def to_dict(self) -> dict[str, Any]:
        """Convert the check to plain numbers and strings, as stored in files."""
        return asdict(self)


def worst_checks(checks: Iterable[Check]) -> list[Check]:
    """Return, for each check name and layer, the check closest to its bound, or furthest beyond it."""
    worst_checks: dict[tuple[str, str], Check] = {}
    for check in checks:
        worst_check = worst_checks.setdefault((check.name, check.layer), check)
        if check.ratio > worst_check.ratio:
            worst_checks[check.name, check.layer] = check
    return list(worst_checks.values())


@dataclass(frozen=True)
class Certificate:
    """Outcome of comparing a result with a reference run of the model by its framework alone.

    Attributes
    ----------
    state
        ``"passed"``; ``"failed"``; ``"could not"`` if nothing could be compared, with the reason in ``why``; ``"off"``
        if ``rl.options(certify=...)`` disables certificates.
    against
        Framework of the reference run.
    certified
        Names of the quantities that were compared.
    resting
        Names of quantities that the framework does not return, and that follow from the compared ones.
    uncertified
        Names of all other quantities.
    checks
        All comparisons: each a residual, and the bound that rounding explains.
    samples
        The samples that were compared, such as ``"samples 8 to 11 of 64"``; "" for all.
    earlier
        Whether all samples were compared at an earlier call of the same kind, which passed: of the same request on the
        same model, with data of the same shapes. The names are those of that call. ``samples`` were compared at this
        call too.
    """

    state: State = "off"
    against: str = ""
    certified: tuple[str, ...] = ()
    resting: tuple[str, ...] = ()
    uncertified: tuple[str, ...] = ()
    why: str = ""
    checks: tuple[Check, ...] = ()
    samples: str = ""
    earlier: bool = False

    @classmethod
    def of(cls, against: str, checks: Iterable[Check], **fields: Any) -> Self:
        """Build a certificate from comparisons: passed if all passed, failed if one failed, "could not" without any."""
        all_checks = tuple(checks)
        if not all_checks:
            return cls("could not", against, why="no computed quantity can be compared with a reference run", **fields)
        return cls(
            "passed" if all(check.ok for check in all_checks) else "failed", against, checks=all_checks, **fields
        )

    @property
    def worst(self) -> Check | None:
        """The comparison with the largest ratio of residual to bound; None without comparisons."""
        return worst_of(self.checks)

    @property
    def sentence(self) -> str:
        """The outcome as one line of text.

        >>> Certificate.of("torch", [Check("reference loss", "", 1e-8, 1e-5)], certified=("loss",)).sentence
        'certified against torch: worst 1e-08 (loss); rounding explains 1e-05. Certified: loss'
        >>> Certificate("could not", "torch", why="the model draws random numbers").sentence
        'could not certify: the model draws random numbers'
        """
        if self.state == "off":
            return "not certified in this call (rl.options(certify=...))"
        if self.state == "could not":
            return f"could not certify: {self.why}"
        worst = self.worst
        assert worst is not None
        compared = " ".join(
            name_part for name_part in (worst.layer, worst.name.removeprefix("reference ")) if name_part
        )
        if self.state == "failed":
            failed_count = sum(not check.ok for check in self.checks)
            headline = f"NOT certified against {self.against}: {failed_count} of {len(self.checks)} comparisons failed"
            return f"{headline}, worst {worst.residual:.1g} ({compared}); rounding explains {worst.bound:.1g}"
        compared_samples = f" on {self.samples}" if self.samples else ""
        if self.earlier:
            compared_samples += f"{', and on all' if self.samples else ''} at an earlier call"
        text = f"certified against {self.against}{compared_samples}: worst {worst.residual:.1g} ({compared})"
        text += f"; rounding explains {worst.bound:.1g}. Certified: {', '.join(self.certified)}"
        if self.resting:
            text += f"; {', '.join(self.resting)} rest on them"
        return text + "".join(f"; not certified: {name}" for name in self.uncertified)

    def to_dict(self) -> dict[str, Any]:
        """Convert the certificate to plain strings, numbers and sequences, as stored in files."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Rebuild a certificate from the mapping that :meth:`to_dict` returned, or from its JSON."""
        names = {key: tuple(stored[key]) for key in ("certified", "resting", "uncertified")}
        return cls(**{**stored, **names, "checks": tuple(Check(**check) for check in stored["checks"])})


def worst_of(checks: Iterable[Check]) -> Check | None:
    """Return the check with the largest ratio of residual to bound; None without checks."""
    return max(checks, key=lambda check: check.ratio, default=None)


def _limits(dtype: Any) -> tuple[float, float]:
    """Return machine epsilon and smallest number of a dtype of any library, found by its name; float64's if unknown."""
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return _FLOATS.get(name, _FLOATS["float64"])


def epsilon(dtype: Any) -> float:
    """Return the machine epsilon of a dtype of any library, found by its name; float64's for unknown dtypes.

    >>> epsilon("float32") == 2.0**-23
    True
    """
    return _limits(dtype)[0]


def coarser_dtype(first_dtype: str, second_dtype: str) -> str:
    """Return the dtype name with fewer digits; if one name is empty, the other one.

    >>> coarser_dtype("float64", "torch.float32"), coarser_dtype("", "float64")
    ('torch.float32', 'float64')
    """
    return (
        max((first_dtype, second_dtype), key=epsilon) if first_dtype and second_dtype else first_dtype or second_dtype
    )


def rounding_bound(dtype: Any, steps: int) -> float:
    """Return the largest relative residual that rounding explains: min(32 * eps * sqrt(steps), 1/4).

    >>> rounding_bound("float64", 100) < 1e-13, rounding_bound("bfloat16", 100)
    (True, 0.25)
    """
    return min(FACTOR * epsilon(dtype) * math.sqrt(max(steps, 1)), CEILING)


def underflow_unit(dtype: Any, steps: int) -> float:
    """Return the smallest divisor for relative residuals, so that underflow alone never exceeds the rounding bound.

    A difference of one smallest normal number, divided by it, equals the bound.

    Below the smallest normal number, digits are lost or numbers are flushed to zero, depending on the engine. float16
    keeps its subnormal numbers.

    >>> 1e-45 / underflow_unit("float32", 500) < rounding_bound("float32", 500) < 1e-30 / underflow_unit("float32", 500)
    True
    """
    return _limits(dtype)[1] / rounding_bound(dtype, steps)


def residual(actual: Array, expected: Array, *, scale: float | None = None) -> float:
    """Return the largest absolute difference divided by the largest absolute expected value.

    Parameters
    ----------
    actual, expected
        Arrays of one shape and one library. Elements that are not finite in both arrays count as equal: whether an
        overflowed sum is infinite or NaN depends on the order of its terms.
    scale
        Divisor used instead of the largest expected value, if larger. The error of a sum whose terms cancel is relative
        to the terms, not to the sum.

    Returns
    -------
    float
        The residual; inf if an element is finite in only one array, 0 if both arrays are 0 everywhere.
    """
    xp = array_namespace(actual, expected)
    if 0 in expected.shape:
        return 0.0
    is_finite = xp.isfinite(expected)
    if not bool(xp.all(is_finite == xp.isfinite(actual))):
        return math.inf
    zeros = xp.zeros_like(expected)
    actual, expected = xp.where(is_finite, actual, zeros), xp.where(is_finite, expected, zeros)
    largest_difference, largest_expected = float(xp.max(xp.abs(actual - expected))), float(xp.max(xp.abs(expected)))
    divisor = max(largest_expected, scale or 0.0)
    if divisor == 0.0:
        return 0.0 if largest_difference == 0.0 else math.inf
    return largest_difference / divisor


def weight_sum_check(
    layer: str,
    summed: Mapping[str, Array],
    reference: Mapping[str, Array],
    *,
    steps: int,
    dtype: Any = None,
    scale: float | None = None,
) -> Check:
    """Check the sum over time of per-step weight gradients against the framework's dL/dW; report the worst weight."""
    shared_names = [name for name in summed if name in reference]
    # One scale for the layer: a bias gradient that vanishes by cancellation is as exact as the kernel's.
    largest_gradient = max((_largest(reference[name]) for name in shared_names), default=0.0)
    checked_dtype = dtype if dtype is not None else next((reference[name].dtype for name in shared_names), "float64")
    divisor = max(largest_gradient, scale or 0.0, underflow_unit(checked_dtype, steps))
    worst_residual = max((residual(summed[name], reference[name], scale=divisor) for name in shared_names), default=0.0)
    return Check(WEIGHT_SUM, layer, worst_residual, rounding_bound(checked_dtype, steps))


def _largest(array: Array) -> float:
    """Return the largest finite absolute value of an array; 0 for an empty one."""
    xp = array_namespace(array)
    if 0 in array.shape:
        return 0.0
    return float(xp.max(xp.where(xp.isfinite(array), xp.abs(array), xp.zeros_like(array))))


def warn_of_failed_checks(checks: Iterable[Check], certificate: Certificate | None = None) -> None:
    """Issue one SelfCheckWarning for each failed check, at the line of user code that called rnnlens.

    Those of ``certificate`` count too. If it passed for the weights' gradients of all samples, a sum of gradients that
    differs from the framework's shows only how the framework's own kernels round.
    """
    is_confirmed = certificate is not None and certificate.state == "passed" and not certificate.earlier
    for check in [*checks, *(certificate.checks if certificate is not None else ())]:
        if not check.ok and not (check.name == WEIGHT_SUM and is_confirmed):
            _warn_at_call(check.sentence)


def warn_of_missing_certificate(certificate: Certificate) -> None:
    """Issue one SelfCheckWarning with the reason if a result could not be compared with a reference run."""
    if certificate.state == "could not":
        _warn_at_call(
            f"rnnlens could not compare this result with a reference run of the model: {certificate.why}. Its numbers "
            f"are not certified. Try: finite differences of a few entries; "
            f'rl.options(certify="never") ends this message.'
        )


def _warn_at_call(text: str) -> None:
    """Issue a SelfCheckWarning at the line of user code that called rnnlens."""
    stacklevel, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("rnnlens."):
        stacklevel, frame = stacklevel + 1, frame.f_back
    warnings.warn(text, SelfCheckWarning, stacklevel=stacklevel)
