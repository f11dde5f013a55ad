"""Execution of a plan piece by piece, into memory or to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from ...autodiff.tensors import converted_like
from ...recurrence.arrays import at_step, for_each, large_parts, on_cpu
from ...recurrence.jacobian import Entrances, Taps, forward, reverse
from ...recurrence.linear import transpose
from ...recurrence.reductions import Collector, Extent, Reduction
from ...recurrence.sweep_rows import PointRows, Units, VanishedRowPruning
from ...results.array import LabelledArray
from ...results.checks import warn_of_failed_checks
from ...settings import Progress
from ...typing import Array
from ...vocabulary import DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from ..recurrent_layers import replay_check
from .composed import compose_piece, pull_piece
from .label import JacobianLabels, ZarrTarget
from .plan import IN_DIRECTION, JacobianPart, JacobianPiece, JacobianPlan, WorkCount

Advance = Callable[[], None]


class _PieceSweep:
    """One sweep over the samples, output steps and input steps of a piece."""

    def __init__(self, part: JacobianPart, piece: JacobianPiece) -> None:
        assert part.direct is not None
        self.direct = replace(part.direct, in_times=part.direct.in_times[piece.ins])
        self.mode, self.rtol = part.mode, part.rtol
        self.samples, self.times = piece.samples, self.direct.times[piece.outs]
        self.replayed, self.ends, self.work = self.direct.replayed, self.direct.ends, self.direct.replayed.system.work
        is_reverse = self.mode == "reverse"
        self.places = {t: i for i, t in enumerate(self.direct.in_times if is_reverse else self.times)}
        sizes = (self.ends.rows, self.ends.wrt.size)
        self.rows, self.width = sizes if is_reverse else sizes[::-1]
        self.groups = len(self.times) if is_reverse else len(self.entrances.times) or 1

    def values(self, tally: WorkCount, advance: Advance) -> np.ndarray[Any, Any]:
        """Run the sweep; return ([sample], out step, [row], in step, [feature]), or measured and averaged values."""
        full_collector = None if self.ends.average else self._collector(self.samples, None)
        parts, sweeps_by_start = self._parts(), {}

        def sweep_samples(samples: slice) -> None:
            result_part = None
            if full_collector is not None:
                result_part = full_collector.result[
                    samples.start - self.samples.start : samples.stop - self.samples.start
                ]
            collector = self._collector(samples, result_part)
            pruning = None if self.rtol is None else VanishedRowPruning(self.work, self.rtol, self.rows)
            tick = advance if samples is parts[0] else None
            if self.mode == "reverse":
                taps = self._taps(collector)
                cost = reverse(self.replayed.system, self.points, taps, samples=samples, pruning=pruning, progress=tick)
            else:
                system, ends = self.replayed.system, {self.direct.state: collector}
                last_steps = frozenset(self.times)
                cost = forward(
                    system, self.entrances, ends, last_steps, samples=samples, pruning=pruning, progress=tick
                )
            sweeps_by_start[samples.start] = (collector, cost, pruning)

        for_each(sweep_samples, parts, xp=self.work.xp)
        finished = [sweeps_by_start[samples.start] for samples in parts]
        for collector, cost, pruning in finished:
            tally.flops += cost.flops
            if pruning is not None:
                tally.pruned_error_square += collector.error_squares
                tally.pruned_rows += pruning.dropped
                tally.pruned = True
        result = (
            full_collector.result
            if full_collector is not None
            else sum(collector.result for collector, _, _ in finished)
        )
        return self._in_result_order(on_cpu(result))

    def _parts(self) -> list[slice]:
        """Return slices of samples for parallel sweeps; a single one with pruning, which needs all samples."""
        count = self.samples.stop - self.samples.start
        if self.rtol is not None:
            return [self.samples]
        system = self.replayed.system
        # Groups of rows enter at successive steps, so that half of the rows are active on average.
        numbers = self.groups * self.rows * (system.rows + system.features) // 2
        start = self.samples.start
        return [slice(start + p.start, start + p.stop) for p in large_parts(count, numbers, xp=self.work.xp)]

    def _collector(self, samples: slice, result_part: Array | None) -> Collector:
        forward = self.mode == "forward"
        return Collector(
            self.work,
            Extent(samples.stop - samples.start, self.groups, self.rows, self.width),
            self.places,
            Reduction(self.ends.measured_by, self.ends.tail, self.ends.average),
            readout=self._readout_above(samples) if forward else self._readout_below(samples),
            swapped=forward,
            result=result_part,
        )

    def _in_result_order(self, result: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Put the steps into the requested order and the axes into that of the result."""
        axis = 0 if self.ends.average else 1
        if self.mode == "reverse":
            order = {t: i for i, t in enumerate(self.points.sequence)}
            result = _reorder(result, [order[t] for t in self.times], axis + 1)
            return np.moveaxis(result, axis, axis + (1 if self.ends.measured_by is not None else 2))
        if self.groups > 1:
            entry_steps = [t for t in self.replayed.run.steps() if t in set(self.direct.in_times)][::-1]
            order = {t: i for i, t in enumerate(entry_steps)}
            result = _reorder(result, [order[t] for t in self.direct.in_times], axis + 1)
        return result if self.ends.measured_by is not None else np.moveaxis(result, -1, axis + 1)

    @cached_property
    def points(self) -> PointRows | Units:
        """Cotangent rows of a reverse sweep and the steps at which they enter."""
        replayed, state, readout = self.replayed, self.direct.state, self.direct.readout
        if self.direct.pattern is not None:
            moving_mask = replayed.moving_output_mask() if self.ends.of.kind == "output" else None
            return Units(self.times, state, replayed.system.state_sizes[state], replayed.system.order, moving_mask)
        block = np.eye(replayed.system.state_sizes[state])[None, None] if readout is None else readout
        return replayed.points(state, self.times, block, of_output=self.ends.of.kind == "output")

    @cached_property
    def entrances(self) -> Entrances:
        """Tangent rows of a forward sweep: they enter at the input, a state or the initial state."""
        wrt, below, times = self.ends.wrt, self.direct.below, self.direct.in_times
        if wrt.kind == "initial_state":
            return Entrances("initial", state=wrt.state)
        if below is None:
            return Entrances("state", times, state=wrt.state)
        block = below.block
        if block is not None:
            block = converted_like(block, self.replayed.run.input).swapaxes(-1, -2)
        return Entrances("input", times, block)

    def _taps(self, collector: Collector) -> Taps:
        wrt = self.ends.wrt
        if wrt.kind == "initial_state":
            return Taps(initial={wrt.state: collector}, steps=frozenset())
        steps = frozenset(self.direct.in_times)
        if self.direct.below is not None:
            return Taps(input=collector, steps=steps)
        return Taps(states={wrt.state: collector}, steps=steps)

    def _readout_below(self, samples: slice) -> Callable[[int, Array], Array] | None:
        below = self.direct.below
        if below is None or below.block is None:
            return None
        block = converted_like(below.block, self.replayed.run.input)
        return lambda t, values: values @ at_step(block, samples, t)

    def _readout_above(self, samples: slice) -> Callable[[int, Array], Array] | None:
        block = self.direct.readout
        moving_mask = self.replayed.moving_output_mask() if self.ends.of.kind == "output" else None
        if block is None and moving_mask is None:
            return None
        if block is not None:
            block = converted_like(block, self.replayed.run.input)

        def readout(t: int, values: Array) -> Array:
            if block is not None:
                values = values @ transpose(at_step(block, samples, t))
            if moving_mask is not None:
                values = values * converted_like(moving_mask[samples, t], values)[:, None, None]
            return values

        return readout


def _reorder(array: np.ndarray[Any, Any], order: list[int], axis: int) -> np.ndarray[Any, Any]:
    """Reorder an array along an axis, as a view if the order is ascending or descending."""
    ascending = list(range(len(order)))
    if order == ascending:
        return array
    return np.flip(array, axis) if order == ascending[::-1] else np.take(array, order, axis)


Values = np.ndarray[Any, Any]


def execute(labels: JacobianLabels, out: str | PathLike[str] | None = None) -> LabelledArray:
    """Compute a planned time Jacobian and label it; write it to a file piece by piece if ``out`` is given."""
    plan, tally = labels.plan, WorkCount()
    checks = [replay_check(replayed.call, replayed.run) for replayed in plan.network.recurrences]
    if out is None:
        result = labels.array(numbers(plan, tally), tally, checks)
    else:
        with ZarrTarget(out, labels, tally, checks) as target, Progress("time Jacobian", plan.ticks) as progress:
            for part in plan.parts:
                _fill(target, plan, part, tally, progress.advance)
        result = target.result()
    warn_of_failed_checks(checks)
    return result


def numbers(plan: JacobianPlan, tally: WorkCount) -> Values:
    """Compute all pieces of a planned time Jacobian in memory."""
    with Progress("time Jacobian", plan.ticks) as progress:
        first_part = plan.parts[0]
        if len(plan.parts) == 1 and len(first_part.pieces) == 1 and not plan.network.sample_order:
            ((_, values),) = _results(first_part, tally, progress.advance)
            return np.asarray(values, dtype=plan.dtype).reshape(plan.shape)
        result = np.zeros(plan.shape, dtype=plan.dtype)
        for part in plan.parts:
            _fill(result, plan, part, tally, progress.advance)
        return result


def _fill(target: Any, plan: JacobianPlan, part: JacobianPart, tally: WorkCount, advance: Advance) -> None:
    """Compute all pieces of a part of the Jacobian, and write each to its place in ``target``."""
    order = () if part.ends.average else plan.network.sample_order
    for piece, values in _results(part, tally, advance):
        if order:
            for number, sample in enumerate(range(piece.samples.start, piece.samples.stop)):
                sample_piece = replace(piece, samples=slice(order.index(sample), order.index(sample) + 1))
                target[_result_index(plan, part, sample_piece)] = _without_absent_times(
                    part, values[number : number + 1]
                )
        else:
            target[_result_index(plan, part, piece)] = _without_absent_times(part, values)


def _results(part: JacobianPart, tally: WorkCount, advance: Advance) -> Iterator[tuple[JacobianPiece, Values]]:
    """Compute one part of a plan; yield each piece with its values, averaged over samples if requested."""
    partial_sums: dict[tuple[int, int], Values] = {}
    for piece in sorted(part.pieces, key=lambda p: (p.outs.start, p.ins.start, p.samples.start)):
        if part.route == "direct":
            values = _PieceSweep(part, piece).values(tally, advance)
        else:
            advance()
            full_rows = {"composed": compose_piece, "uncut": pull_piece}[part.route](part, piece, tally)
            ends, groups = part.ends, piece.outs.stop - piece.outs.start
            rows = full_rows.reshape(part.network.samples, groups, ends.rows, -1, ends.wrt.size)
            rows = rows if ends.in_times is None else rows[:, :, :, ends.in_times]
            if ends.measured_by is not None:
                steps = range(rows.shape[3])
                rows = np.stack([np.asarray(ends.measured_by(rows[:, :, :, k])) for k in steps], axis=2)
            values = rows.sum(axis=0) if ends.average else rows
        if not part.ends.average:
            yield piece, values
            continue
        key = (piece.outs.start, piece.ins.start)
        values = values if key not in partial_sums else partial_sums.pop(key) + values
        if piece.samples.stop == part.network.samples:
            yield piece, values / part.network.samples
        else:
            partial_sums[key] = values


def _result_index(plan: JacobianPlan, part: JacobianPart, piece: JacobianPiece) -> tuple[Any, ...]:
    """Return where a computed block of the time Jacobian belongs in the result array, an index or slice per axis."""
    index_by_dim = {
        SAMPLE: piece.samples,
        OUT_TIME: piece.outs,
        DIRECTION: part.direction_index.get(DIRECTION),
        OUT_UNIT: slice(None),
        IN_TIME: piece.ins,
        IN_DIRECTION: part.direction_index.get(IN_DIRECTION),
        IN_FEATURE: slice(None),
    }
    return tuple(index_by_dim[dim] for dim in plan.dims)


def _without_absent_times(part: JacobianPart, values: Values) -> Values:
    """Remove the time axes of ends that have no time."""
    ends = part.ends
    leading_axes = 0 if ends.average else 1
    in_axis = leading_axes + (1 if ends.measured_by is not None else 2)
    axes = ([leading_axes] if ends.out_times is None else []) + ([in_axis] if ends.in_times is None else [])
    return np.squeeze(values, axis=tuple(axes)) if axes else values
