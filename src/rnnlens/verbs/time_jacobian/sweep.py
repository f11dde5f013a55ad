"""Executes pieces of the direct route: samples dealt to threads, values measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from ...autodiff.tensors import like
from ...recurrence.jacobian import Entrances, Taps, forward, reverse
from ...recurrence.parallel import for_each, large_parts
from ...recurrence.reductions import Collector, Extent, Reduction
from ...recurrence.sweep_rows import Cost, PointRows, Units, Vanished
from ...typing import Array
from .pieces import Piece
from .plan import Part
from .tally import Tally

Advance = Callable[[], None]


def sweep_piece(part: Part, piece: Piece, tally: Tally, advance: Advance) -> np.ndarray[Any, Any]:
    """([sample], out step, [row], in step, [feature]) of one piece, measured if that is wanted."""
    return _Sweep(part, piece).values(tally, advance)


class _Sweep:
    """One sweep over the samples of a piece, its output steps and its input steps."""

    def __init__(self, part: Part, piece: Piece) -> None:
        assert part.direct is not None
        self.direct, self.mode, self.rtol = part.direct.at(piece.ins), part.mode, part.rtol
        self.samples, self.times = piece.samples, self.direct.times[piece.outs]
        self.one, self.ends, self.work = self.direct.one, self.direct.ends, self.direct.one.work
        reverse = self.mode == "reverse"
        self.places = {t: i for i, t in enumerate(self.direct.in_times if reverse else self.times)}
        self.rows, self.width = (
            (self.ends.rows, self.ends.wrt.size) if reverse else (self.ends.wrt.size, self.ends.rows)
        )
        self.groups = len(self.times) if reverse else len(self.entrances.times) or 1

    def values(self, tally: Tally, advance: Advance) -> np.ndarray[Any, Any]:
        """(sample, group, [row,] in step, [feature]); measured (sample, group, in step, *tail); averaged no sample."""
        whole = None if self.ends.average else self._collector(self.samples, None)
        parts, done = self._parts(), {}

        def one(some: slice) -> None:
            room = None
            if whole is not None:
                room = whole.result[some.start - self.samples.start : some.stop - self.samples.start]
            collector = self._collector(some, room)
            pruning = None if self.rtol is None else Vanished(self.work, self.rtol, self.rows)
            walk = self._reverse if self.mode == "reverse" else self._forward
            cost = walk(some, collector, pruning, advance if some is parts[0] else None)
            done[some.start] = (collector, cost, pruning)

        for_each(one, parts, xp=self.work.xp)
        finished = [done[some.start] for some in parts]
        for collector, cost, pruning in finished:
            _count(tally, cost, pruning, collector)
        result = whole.result if whole is not None else sum(collector.result for collector, _, _ in finished)
        return self._arranged(self.work.numpy(result))

    def _parts(self) -> list[slice]:
        """Samples as they are dealt. Rows are pruned once they vanished in every sample, so those stay together."""
        count = self.samples.stop - self.samples.start
        if self.rtol is not None:
            return [self.samples]
        system = self.one.system
        # Rows enter one group after the other: half of them are alive on average.
        numbers = self.groups * self.rows * (system.rows + system.features) // 2
        start = self.samples.start
        return [slice(start + p.start, start + p.stop) for p in large_parts(count, numbers, xp=self.work.xp)]

    def _collector(self, samples: slice, room: Array | None) -> Collector:
        forward = self.mode == "forward"
        return Collector(
            self.work,
            Extent(samples.stop - samples.start, self.groups, self.rows, self.width),
            self.places,
            Reduction(self.ends.measured_by, self.ends.tail, self.ends.average),
            readout=self._above(samples) if forward else self._below(samples),
            swapped=forward,
            result=room,
        )

    def _reverse(self, samples: slice, collector: Collector, pruning: Vanished | None, advance: Advance | None) -> Cost:
        taps = self._taps(collector)
        return reverse(self.one.system, self.points, taps, samples=samples, pruning=pruning, progress=advance)

    def _forward(self, samples: slice, collector: Collector, pruning: Vanished | None, advance: Advance | None) -> Cost:
        return forward(
            self.one.system,
            self.entrances,
            {self.direct.state: collector},
            frozenset(self.times),
            samples=samples,
            pruning=pruning,
            progress=advance,
        )

    def _arranged(self, result: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Steps in the order asked for, and the axes in that of the result."""
        axis = 0 if self.ends.average else 1
        if self.mode == "reverse":
            order = {t: i for i, t in enumerate(self.points.sequence)}
            result = _reorder(result, [order[t] for t in self.times], axis + 1)
            return np.moveaxis(result, axis, axis + (1 if self.ends.measured_by is not None else 2))
        if self.groups > 1:
            entered = [t for t in self.one.half.run.steps() if t in set(self.direct.in_times)][::-1]
            order = {t: i for i, t in enumerate(entered)}
            result = _reorder(result, [order[t] for t in self.direct.in_times], axis + 1)
        return result if self.ends.measured_by is not None else np.moveaxis(result, -1, axis + 1)

    @cached_property
    def points(self) -> PointRows | Units:
        """Where rows of a reverse sweep enter."""
        one, state, readout = self.one, self.direct.state, self.direct.readout
        if self.direct.pattern is not None:
            moves = one.output_moves() if self.ends.of.what == "output" else None
            return Units(self.times, state, one.system.state_sizes[state], one.system.order, moves)
        block = np.eye(one.system.state_sizes[state])[None, None] if readout is None else readout
        if self.ends.of.what == "output":
            return one.output_points(self.times, block)
        return one.points(state, self.times, block)

    @cached_property
    def entrances(self) -> Entrances:
        """Where rows of a forward sweep enter."""
        wrt, below, times = self.ends.wrt, self.direct.below, self.direct.in_times
        if wrt.what == "initial_state":
            return Entrances("initial", state=wrt.state)
        if below is None:
            return Entrances("state", times, state=wrt.state)
        block = below.block
        if block is not None:
            block = like(block, self.one.half.run.input).swapaxes(-1, -2)
        return Entrances("input", times, block)

    def _taps(self, collector: Collector) -> Taps:
        wrt = self.ends.wrt
        if wrt.what == "initial_state":
            return Taps(initial={wrt.state: collector}, steps=frozenset())
        steps = frozenset(self.direct.in_times)
        if self.direct.below is not None:
            return Taps(input=collector, steps=steps)
        return Taps(states={wrt.state: collector}, steps=steps)

    def _below(self, samples: slice) -> Callable[[int, Array], Array] | None:
        below = self.direct.below
        if below is None or below.block is None:
            return None
        block = like(below.block, self.one.half.run.input)

        def readout(t: int, values: Array) -> Array:
            at = block[:, 0 if block.shape[1] == 1 else t]
            return values @ (at if at.shape[0] == 1 else at[samples])

        return readout

    def _above(self, samples: slice) -> Callable[[int, Array], Array] | None:
        block = self.direct.readout
        moves = self.one.output_moves() if self.ends.of.what == "output" else None
        if block is None and moves is None:
            return None
        if block is not None:
            block = like(block, self.one.half.run.input)

        def readout(t: int, values: Array) -> Array:
            if block is not None:
                at = block[:, 0 if block.shape[1] == 1 else t]
                values = values @ (at if at.shape[0] == 1 else at[samples]).swapaxes(-1, -2)
            if moves is not None:
                values = values * like(moves[samples, t], values)[:, None, None]
            return values

        return readout


def _count(tally: Tally, cost: Cost, pruning: Vanished | None, collector: Collector) -> None:
    tally.flops += cost.flops
    if pruning is not None:
        tally.pruned_error_square += collector.error_squares
        tally.pruned_rows += pruning.dropped
        tally.pruned = True


def _reorder(array: np.ndarray[Any, Any], order: list[int], axis: int) -> np.ndarray[Any, Any]:
    """Take along an axis, as a view where the order is straight or reversed."""
    count = len(order)
    index: list[Any] = [slice(None)] * array.ndim
    if order == list(range(count)):
        return array
    if order == list(range(count))[::-1]:
        index[axis] = slice(None, None, -1)
    else:
        index[axis] = order
    taken: np.ndarray[Any, Any] = array[tuple(index)]
    return taken
