"""Collect the values of a sweep while it runs: as the full Jacobian, or reduced to one number per pair of steps.

A reduction is a function of blocks (sample, group, out, in): the derivatives of all units of one output step by all
features of one input step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..typing import Array
from .arrays import Workspace, namespace


def frobenius(block: Array) -> Array:
    """Return the Frobenius norm of each block."""
    xp = namespace(block)
    if isinstance(block, np.ndarray):
        return np.sqrt(np.einsum("bgof,bgof->bg", block, block))
    return xp.sqrt(xp.sum(block * block, axis=(-2, -1)))


def spectral(block: Array) -> Array:
    """Return the largest singular value of each block, from the smaller of its two Gram matrices."""
    xp = namespace(block)
    if 1 in block.shape[-2:]:
        return frobenius(block)
    # Scaled first, because the squares in the Gram matrix of a vanishing block would underflow.
    scale = xp.max(xp.abs(block), axis=(-2, -1), keepdims=True)
    scale = xp.where(scale > 0, scale, xp.ones_like(scale))
    scaled = block / scale
    transposed = xp.permute_dims(scaled, (0, 1, 3, 2))
    gram = xp.matmul(scaled, transposed) if block.shape[-2] <= block.shape[-1] else xp.matmul(transposed, scaled)
    largest = xp.linalg.eigvalsh(gram)[..., -1]
    return xp.sqrt(xp.where(largest > 0, largest, xp.zeros_like(largest))) * scale[..., 0, 0]


def total(block: Array) -> Array:
    """Return the sum over each block."""
    return namespace(block).sum(block, axis=(-2, -1))


def _mean(block: Array) -> Array:
    return namespace(block).mean(block, axis=(-2, -1))


def _abs_mean(block: Array) -> Array:
    xp = namespace(block)
    return xp.mean(xp.abs(block), axis=(-2, -1))


#: Reductions by their public names.
REDUCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "norm": frobenius,
    "spectral": spectral,
    "sum": total,
    "mean": _mean,
    "abs_mean": _abs_mean,
}


@dataclass(frozen=True)
class Extent:
    """Sizes of the values at one step of a sweep: samples, groups of rows, rows per group, numbers per row."""

    samples: int
    groups: int
    rows: int
    width: int


@dataclass(frozen=True)
class Reduction:
    """Reduction of a sweep's blocks: by a function of each block, by averaging over samples, or both.

    Attributes
    ----------
    by, tail
        Function from blocks (sample, group, out, in) to (sample, group, *tail), and that tail; ``by`` is None for no
        reduction.
    average
        Whether samples are summed, for an average, instead of stored one by one.
    """

    by: Callable[[Array], Array] | None = None
    tail: tuple[int, ...] = ()
    average: bool = False


#: No reduction: every sample, row and number is stored.
NO_REDUCTION = Reduction()


class Collector:
    """A sink that stores the values of a sweep, reduced or in full.

    Parameters
    ----------
    steps
        Time index -> position along the step axis; other steps are not stored. Index -1 is the initial state.
    readout
        Function ``readout(t, values)`` applied to the values before the reduction, or None.
    swapped
        Whether rows are inputs (tangents) rather than outputs, so that blocks are (in, out).
    result
        Zeros of the shape stated below, to write to; allocated by default.

    Attributes
    ----------
    result
        ``(sample, step, group, *tail)`` if reduced, else ``(sample, step, group, row, width)``; without the sample axis
        if averaged.
    error_squares
        Sum over input steps of the estimated mean square of the values that pruned rows would have had.
    """

    def __init__(
        self,
        work: Workspace,
        extent: Extent,
        steps: Mapping[int, int],
        reduction: Reduction = NO_REDUCTION,
        *,
        readout: Callable[[int, Array], Array] | None = None,
        swapped: bool = False,
        result: Array | None = None,
    ) -> None:
        self.work, self.groups, self.rows, self.steps = work, extent.groups, extent.rows, steps
        self.reduce, self.average = reduction.by, reduction.average
        self.readout, self.swapped = readout, swapped
        tail = reduction.tail if reduction.by is not None else (extent.rows, extent.width)
        sample_axis = () if reduction.average else (extent.samples,)
        self.result = work.zeros(*sample_axis, len(steps), extent.groups, *tail) if result is None else result
        self.error_squares = 0.0

    def take(self, t: int, first_row: int, values: Array) -> None:
        """Store values (sample, row, n) of step t, reduced if requested; ``first_row`` is their first number."""
        if t not in self.steps or values.shape[1] == 0:
            return
        values = values if self.readout is None else self.readout(t, values)
        shape = (int(values.shape[0]), int(values.shape[1]) // self.rows, self.rows, int(values.shape[2]))
        block = self.work.xp.reshape(values, shape)
        if self.reduce is not None:
            block = self.reduce(self.work.xp.permute_dims(block, (0, 1, 3, 2)) if self.swapped else block)
        self.store(t, first_row // self.rows, block)

    def store(self, t: int, first_group: int, block: Array) -> None:
        """Store reduced values (sample, group, ...) of step t, for the groups from ``first_group`` on."""
        position = self.steps[t]
        groups = slice(first_group, first_group + int(block.shape[1]))
        if self.average:
            target = self.result[position, groups]
            target[...] = target + block.sum(0)
        else:
            self.result[:, position, groups] = block

    def take_residue(self, t: int, values: Array) -> None:
        """Estimate the squared norm of pruned rows at step t from their random-sign sums (sample, probe, n)."""
        if t not in self.steps:
            return
        values = values if self.readout is None else self.readout(t, values)
        self.add_error(t, values * values)

    def add_error(self, t: int, squares: Array) -> None:
        """Add estimates (sample, probe, ...) of the squared norm of pruned rows at step t to the error."""
        if t in self.steps:
            self.error_squares += float(squares.sum()) / int(squares.shape[1])


class FieldCollector:
    """A sink that adds values to an array (sample, row, time, n), to which several sweeps may contribute."""

    def __init__(self, field: Array) -> None:
        self.field = field

    def take(self, t: int, first_row: int, values: Array) -> None:
        """Add values (sample, row, n) of step t to the array."""
        target = self.field[:, first_row : first_row + int(values.shape[1]), t]
        target[...] = target + values

    def take_residue(self, t: int, values: Array) -> None:
        """Do nothing: sweeps with this sink are not pruned."""


def probe_signs(probes: int, outputs: int, times: int, samples: int, seed: int) -> np.ndarray[Any, Any]:
    """Return random signs (sample, time, probe, output): E[z z^T] = I, so E|z^T G|^2 = |G|_F^2 (Hutchinson 1990)."""
    signs = np.random.default_rng(seed).integers(0, 2, size=(samples, times, probes, outputs))
    return 2.0 * signs - 1.0


def sketch_statistics(block: Array) -> Array:
    """Estimate |G|_F^2 and its variance (sample, group, 2) from z^T G (sample, group, probe, in)."""
    xp = namespace(block)
    squares = xp.sum(block * block, axis=-1)
    probes = int(squares.shape[-1])
    mean = xp.mean(squares, axis=-1)
    deviation = squares - mean[..., None]
    variance = xp.sum(deviation * deviation, axis=-1) / (probes * (probes - 1)) if probes > 1 else mean * math.nan
    return xp.stack([mean, variance], axis=-1)
