"""Estimates of rounding errors of replayed numbers, from magnitudes or by random perturbation.

The estimate from magnitudes is cheap and computed with every sweep. Perturbation is for mismatches that it does not
explain: the same numbers are recomputed from gates and states perturbed by one rounding each, with random signs, and
their change estimates the rounding error (Vignes 1993, doi:10.1016/0378-4754(93)90003-D). Perturbation includes
cancellation, as in 1 - h^2 of a saturated unit or in 1 - z of a gate that is nearly 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import device

from ..typing import Array
from .arrays import for_each, sample_chunks
from .replay import Replay, distance, replay
from .trajectory import Adjoint, Scales


@dataclass(frozen=True)
class Rounding:
    """Magnitudes that determine the rounding error of a sweep.

    The derivative of an activation, 1 - h^2, has an absolute error of eps even if it is small. The absolute error of
    gradients through saturated units is therefore no smaller than through other units (Higham, Accuracy and Stability
    of Numerical Algorithms, 2nd ed., section 1.7).

    Attributes
    ----------
    weights
        For sums over time: the root of the sum of (|x_t| |dL/ds_t|)^2, because errors of many terms add up like a
        random walk.
    input
        For gradients at the input: the largest |dL/ds_t| times the largest norm of a kernel's row, 0 without a kernel.
    initial
        For gradients of the initial states: the largest of them times the digits lost on the way. At each step these
        are the ratio of the strongest state's gradient one step later to the weakest state's gradient.
    """

    weights: float = 0.0
    input: float = 0.0
    initial: float = 0.0


@np.errstate(over="ignore", invalid="ignore")
def rounding_of(run: Replay, result: Adjoint) -> Rounding:
    """Return the magnitudes that bound differences by rounding between two BPTT sweeps of one run."""
    xp = run.xp
    squares = xp.empty_like(_flat(run.states[0], xp)[:, :, 0])
    peaks = xp.stack([squares] * len(result.state_grads))

    def measure_samples(samples: slice) -> None:
        squares[samples] = sum(xp.sum(_flat(array[samples], xp) ** 2, axis=-1) for array in (run.input, *run.states))
        for peak, grad in zip(peaks, result.state_grads, strict=True):
            peak[samples] = xp.max(xp.abs(_flat(grad[samples], xp)), axis=-1)

    for_each(measure_samples, sample_chunks(int(squares.shape[0]), math.prod(run.states[0].shape[1:])), xp=xp)
    largest_grads = xp.max(peaks, axis=0)
    kernels = {} if run.cell.by_framework else run.cell.weights()
    rows = [_largest_row(kernels.get(name), xp) for name in ("kernel", "recurrent_kernel")]
    terms = xp.sqrt(1.0 + squares) * largest_grads
    largest = float(xp.max(terms))
    if not 0.0 < largest < math.inf:
        return Rounding()
    size = largest * math.sqrt(float(xp.sum((terms / largest) ** 2)))
    return Rounding(
        size, rows[0] * float(xp.max(largest_grads)), max(rows[1], 1.0) * _initial_rounding(run, result, peaks)
    )


def _initial_rounding(run: Replay, result: Adjoint, peaks: Array) -> float:
    """Estimate the scale of rounding errors in dL/ds_0, the gradients of a layer's initial states, as one number.

    It is the largest of these gradients times the digits lost at all steps, as the root of the sum of squares.

    ``peaks``: largest magnitude (state, sample, time) of the gradient of each state.
    """
    xp = run.xp
    by_state = []
    for initial_grad, peak in zip(result.initial_state_grad, peaks, strict=True):
        later_peaks = xp.max(peak, axis=0)
        later_peaks = later_peaks if run.order == "forward" else xp.flip(later_peaks)
        by_state.append(xp.concat([xp.max(xp.abs(initial_grad))[None], later_peaks]))
    sizes = xp.stack(by_state)  # (state, 1 + time)
    weakest = xp.min(xp.where(sizes > 0, sizes, xp.full_like(sizes, math.inf)), axis=0)
    lost_digits = xp.max(sizes, axis=0)[1:] / weakest[:-1]
    initial_size = float(xp.max(sizes[:, 0]))
    return initial_size * math.sqrt(float(xp.sum(lost_digits * lost_digits))) if initial_size else 0.0


def _flat(array: Array, xp: Any) -> Array:
    """Join the axes behind time: (sample, time, ...) to (sample, time, n)."""
    return xp.reshape(array, (*array.shape[:2], -1))


def _largest_row(kernel: Array | None, xp: Any) -> float:
    """Return the largest norm of a kernel's row: the weights of one input number to all gates and positions."""
    if kernel is None or len(kernel.shape) < 2 or 0 in kernel.shape:
        return 0.0
    other_axes = tuple(axis for axis in range(len(kernel.shape)) if axis != len(kernel.shape) - 2)
    return float(xp.max(xp.sqrt(xp.sum(xp.abs(kernel) ** 2, axis=other_axes))))


@np.errstate(over="ignore", invalid="ignore")
def perturbed_replay(run: Replay) -> Replay:
    """Replay a run from an input perturbed by one rounding, and perturb gates and states by one rounding each.

    In a recurrence that amplifies small differences, this trajectory deviates as any second run does. How far, its
    difference from :func:`plain_replay` shows: ``run`` may rest on captured states, which may be wrong.
    """
    return _replay_with(run, lambda: rounding_perturbation(run.xp))


def plain_replay(run: Replay) -> Replay:
    """Replay a run from its input and initial state alone, whatever states were captured."""
    return _replay_with(run, lambda: lambda array: array)


def _replay_with(run: Replay, perturbation: Callable[[], Callable[[Array], Array]]) -> Replay:
    perturb = perturbation()
    start = tuple(map(perturbation(), run.start_states or run.initial_state))
    scales = Scales(run.input_scale, run.state_scale)
    rerun = replay(run.cell, perturb(run.input), start, mask=run.mask, order=run.order, scales=scales)
    record = None if rerun.record is None else rerun.record._replace(gates=perturb(rerun.record.gates))
    return replace(rerun, record=record, states=tuple(map(perturb, rerun.states)))


def replay_sensitivity(run: Replay) -> float:
    """Return the change of a step's output for gates perturbed by one rounding, relative to the largest output.

    The result is 0 for a cell whose output does not follow from its gates and previous states (:attr:`Cell.at_once`).
    """
    if run.record is None or not run.cell.at_once:
        return 0.0
    perturb, states = rounding_perturbation(run.xp), run.states
    perturbed_hidden, hidden = (
        run.cell.hidden(gates, run.before(0), states[1:], run.xp)
        for gates in (perturb(run.record.gates), run.record.gates)
    )
    difference, largest = distance(perturbed_hidden, hidden, run.mask, run.xp)
    return difference / (largest or 1.0)


def rounding_perturbation(xp: Any, unit: float | None = None) -> Callable[[Array], Array]:
    """Return a function that perturbs each number of an array by one rounding, with random signs.

    ``unit`` is the machine epsilon, by default that of the array.
    """
    random = np.random.default_rng(0)

    def perturb(array: Array) -> Array:
        signs = 2.0 * random.integers(0, 2, size=tuple(array.shape)) - 1.0
        sign_array = xp.asarray(signs, dtype=array.dtype, device=device(array))
        return array * (1.0 + sign_array * (unit or float(xp.finfo(array.dtype).eps)))

    return perturb
