"""Self-checks that travel with a result: a residual, and the bound that its dtype explains.

Two ways to the same number differ by rounding. Each of T steps adds an error of the order of the machine epsilon, in an
arbitrary direction, so the sum grows as sqrt(T) (a random walk; Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., section 2.8). ``FACTOR`` covers what is not counted: inner products over features and units, and the
approximate exp and tanh of fused kernels, which are off by a few units in the last place. A wrong gate order, a lost
mask or a missing bias gives residuals of 1e-2 and more: far above the bound for float32 (1e-4 at 1000 steps). In half
precision the checks find only gross faults.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import SelfCheckWarning
from ..typing import Array

FACTOR = 32.0

#: No rounding explains more, in however coarse a dtype: half precision is off by a few percent after hundreds of steps.
CEILING = 0.25

#: Machine epsilon by name: bfloat16 is no NumPy dtype.
_EPSILON = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}

#: Smallest normal number by name; of float16 the smallest of all.
_SMALLEST = {
    "float64": 2.0**-1022,
    "complex128": 2.0**-1022,
    "float32": 2.0**-126,
    "complex64": 2.0**-126,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-126,
}

REPLAY = "replay"
WEIGHT_SUM = "weight gradient sum"

_MEANING = {
    REPLAY: "the replayed output differs from the captured one",
    WEIGHT_SUM: "the sum over time of per-step weight gradients differs from the framework's dL/dW",
    "plain loss": "the loss differs from that of the model run plainly",
    "plain outputs": "what the model returned differs from what it returns when run plainly",
    "plain input gradient": "the gradient at the model's input differs from that of the model run plainly",
    "plain weight gradients": "weight gradients differ from those of the model run plainly",
    "plain jacobian": "random combinations of the rows differ from those of the model run plainly",
    "bound of the measure": "random combinations of the rows are longer than their measured size allows, or shorter",
    "plain target": "the value of the target differs from that of the model run plainly",
    "plain gradient": "the gradient differs from that of the model run plainly",
    "plain layer input gradient": "input_grad differs from the framework's own differentiation of the layer",
    "plain initial state gradient": "initial_state_grad differs from the framework's own differentiation of the layer",
}


@dataclass(frozen=True)
class Check:
    """One residual of one layer, relative to the largest value compared or a scale, and what rounding explains."""

    name: str
    layer: str
    residual: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether rounding explains the residual; NaN never passes."""
        return self.residual <= self.bound

    @property
    def sentence(self) -> str:
        """What was compared, and how it came out.

        >>> Check("replay", "lstm", 0.5, 1e-4).sentence
        'lstm: the replayed output differs from the captured one by 0.5 (relative); rounding explains 0.0001'
        """
        meaning = _MEANING.get(self.name, f"{self.name}: two ways to the same number differ")
        return (
            f"{self.layer or 'model'}: {meaning} by {self.residual:.3g} (relative); rounding explains {self.bound:.3g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, as stored in files."""
        return asdict(self)


def epsilon(dtype: Any) -> float:
    """Machine epsilon of a dtype of any library, by its name; of float64 for what is not floating.

    >>> epsilon("float32") == 2.0**-23
    True
    """
    return _EPSILON.get(_name(dtype), _EPSILON["float64"])


def _name(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def coarser(one: str, other: str) -> str:
    """Of the names of two dtypes, the one with fewer digits; the other one where one is empty.

    >>> coarser("float64", "torch.float32"), coarser("", "float64")
    ('torch.float32', 'float64')
    """
    return max((one, other), key=epsilon) if one and other else one or other


def rounding_bound(dtype: Any, steps: int, *, factor: float = FACTOR) -> float:
    """Largest relative residual that rounding explains after ``steps`` steps: factor * eps * sqrt(steps), if below 1/4.

    >>> rounding_bound("float64", 100) < 1e-13, rounding_bound("bfloat16", 100)
    (True, 0.25)
    """
    return min(factor * epsilon(dtype) * math.sqrt(max(steps, 1)), CEILING)


def underflow_unit(dtype: Any, steps: int) -> float:
    """What to divide a difference by, at least: then one of a smallest normal number is what rounding explains.

    Below it numbers lose their digits one by one, or are set to zero, as the engine pleases. float16 is computed with
    all the digits that it has there.

    >>> 1e-45 / underflow_unit("float32", 500) < rounding_bound("float32", 500) < 1e-30 / underflow_unit("float32", 500)
    True
    """
    return _SMALLEST.get(_name(dtype), _SMALLEST["float64"]) / rounding_bound(dtype, steps)


def residual(actual: Array, expected: Array, *, scale: float | None = None) -> float:
    """Largest absolute difference over the largest absolute value expected.

    Parameters
    ----------
    actual, expected
        Arrays of one shape and one library. Where neither is finite they agree: what a sum becomes that overflowed, an
        infinity or NaN, goes by the order of its terms.
    scale
        What to divide by, if it exceeds the largest value expected: a sum of large terms that cancel is as exact as its
        terms, not as its result.

    Returns
    -------
    float
        inf where only one of the two is finite; 0 where both are 0 everywhere.
    """
    from array_api_compat import array_namespace

    xp = array_namespace(actual, expected)
    if 0 in expected.shape:
        return 0.0
    finite = xp.isfinite(expected)
    if not bool(xp.all(finite == xp.isfinite(actual))):
        return math.inf
    nothing = xp.zeros_like(expected)
    actual, expected = xp.where(finite, actual, nothing), xp.where(finite, expected, nothing)
    difference, largest = float(xp.max(xp.abs(actual - expected))), float(xp.max(xp.abs(expected)))
    unit = max(largest, scale or 0.0)
    if unit == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / unit


def weight_sum_check(
    layer: str,
    summed: Mapping[str, Array],
    reference: Mapping[str, Array],
    *,
    steps: int,
    dtype: Any = None,
    scale: float | None = None,
) -> Check:
    """Sum over time of per-step weight gradients against the framework's dL/dW: the worst weight of the layer.

    Weights that only one side has are compared with nothing and do not count. ``scale`` as in :func:`residual`.
    """
    shared = [name for name in summed if name in reference]
    # One scale for the layer: a bias gradient that vanishes by cancellation is as exact as the kernel's.
    largest = max((_largest(reference[name]) for name in shared), default=0.0)
    kind = dtype if dtype is not None else next((reference[name].dtype for name in shared), "float64")
    unit = max(largest, scale or 0.0, underflow_unit(kind, steps))
    worst = max((residual(summed[name], reference[name], scale=unit) for name in shared), default=0.0)
    return Check(WEIGHT_SUM, layer, worst, rounding_bound(kind, steps))


def _largest(array: Array) -> float:
    """Largest finite absolute value; 0 of nothing."""
    from array_api_compat import array_namespace

    xp = array_namespace(array)
    if 0 in array.shape:
        return 0.0
    return float(xp.max(xp.where(xp.isfinite(array), xp.abs(array), xp.zeros_like(array))))


def warn_about(checks: Iterable[Check]) -> None:
    """Warn once for each check that rounding does not explain, pointing at the line that called rnnlens."""
    stacklevel, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("rnnlens."):
        stacklevel, frame = stacklevel + 1, frame.f_back
    for check in checks:
        if not check.ok:
            warnings.warn(check.sentence, SelfCheckWarning, stacklevel=stacklevel)
