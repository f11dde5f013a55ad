"""Measures of the state of one scan: half-life of its decay, effective state size, effective rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from ..measures.scans import effective_state_size, half_life_of, logarithms
from ..measures.spectrum import effective_rank
from ..recurrence.sequence import SequenceCell, chunks
from ..results.schema import to_host
from ..typing import Array


def scan_measures(cell: SequenceCell, last: Array) -> dict[str, xr.Variable]:
    """Return ``half_life``, ``state_rank`` of the last state (sample, *axes) and ``state_size`` of a scan.

    Each has the axes of a state along which it differs. ``state_rank`` needs two axes, ``state_size`` a readout, and
    ``half_life`` states that are not relative to a running maximum, since its change is part of their decay.
    """
    found = {}
    if not cell.relative:
        parts = [logarithms(to_host(cell.at(steps).decays())) for steps in chunks(cell.steps)]
        half_life = half_life_of(sum(total for total, _ in parts), sum(count for _, count in parts))
        found["half_life"] = _labelled(cell.axes, half_life, "half-life of the decay", "step")
    if len(cell.axes) > 1:
        rank = np.median(effective_rank(last), axis=0)
        words = "effective rank of the last state, median over samples"
        found["state_rank"] = xr.Variable(cell.axes[:-2], rank, {"long_name": words, "units": "1"})
    if cell.read is not None and cell.steps > 1:
        words = "effective state size in the middle of the first sample"
        axes = [axis for axis in cell.axes if axis != cell.axes[cell.contracted]]
        found["state_size"] = _labelled(axes, _state_size(cell), words, "1")
    return found


def _state_size(cell: SequenceCell) -> Array:
    """Count the used directions of the state along the axis that the output sums over, in the middle of sample 0."""
    one = cell.with_parts(lambda part: to_host(part)[:1])
    summed = one.axis
    writes = [part for part in one.write if part.shape[summed] > 1] or list(one.write)
    arrays = [one.decays(), writes[0], one.read, one.left, one.right]
    given = [None if a is None else np.moveaxis(_lengthened(np.asarray(a), one.steps)[0], summed, -1) for a in arrays]
    decay, write, read, left, right = given
    assert decay is not None
    assert write is not None
    assert read is not None
    return effective_state_size(decay, write, read, one.steps // 2, left=left, right=right)


def _lengthened(array: Array, steps: int) -> Array:
    return np.broadcast_to(array, (array.shape[0], steps, *array.shape[2:]))


def _labelled(axes: Sequence[str], values: Array, long_name: str, units: str) -> xr.Variable:
    """Return a variable over the axes along which the values differ in size from 1."""
    kept = [axis for axis, size in zip(axes, values.shape, strict=True) if size > 1]
    return xr.Variable(kept, np.squeeze(values), {"long_name": long_name, "units": units})
