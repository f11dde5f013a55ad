"""The direct route: one recurrent layer between the ends, with nothing but local links around it.

Values are reduced inside the sweep, and the sweep may run either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..recurrence.jacobian import Entrances, Taps, forward, forward_flops, reverse, reverse_flops
from ..recurrence.pruning import Vanished
from ..recurrence.reductions import Collector
from ..recurrence.sweep_blocked import plan_blocks
from ..typing import Array
from .inside import like
from .jacobian_graph import Link
from .jacobian_target import Swept
from .jacobian_wanted import Ends, Tally


@dataclass
class Direct:
    """The direct route: points enter one recurrent call, and one tap of it is wanted.

    Attributes
    ----------
    readout
        (sample or 1, time or 1, row, size) from the state to the rows; None for the state itself.
    link
        The local link below the layer's input; None where the tap is a state of the layer itself.
    """

    swept: Swept
    state: int
    readout: Array | None
    link: Link | None
    ends: Ends

    @property
    def times(self) -> list[int]:
        """Steps at which targets lie."""
        if self.ends.out_times is not None:
            return self.ends.out_times
        *_, last = self.swept.half.run.steps()
        return [last]

    @property
    def in_times(self) -> list[int]:
        """Steps of interest below; -1 for the initial state."""
        return [-1] if self.ends.in_times is None else self.ends.in_times

    def alive(self) -> np.ndarray[Any, Any]:
        """Rows alive at each step of a reverse sweep, in its order."""
        run, ends = self.swept.half.run, self.ends
        position = {t: i for i, t in enumerate(run.steps())}
        outs, ins = sorted(position[t] for t in self.times), [position.get(t, -1) for t in self.in_times]
        steps = np.arange(max(min(ins), 0), outs[-1] + 1)
        found: np.ndarray[Any, Any] = ends.rows * (len(outs) - np.searchsorted(outs, steps))
        return found[::-1]

    def flops(self, mode: str) -> float:
        """Operations that a sweep in this mode takes."""
        run, system, ends = self.swept.half.run, self.swept.system, self.ends
        if mode == "reverse":
            return reverse_flops(system, self.alive(), self.link is not None)
        position = {t: i for i, t in enumerate(run.steps())}
        last, ins = max(position[t] for t in self.times), sorted(position.get(t, -1) for t in self.in_times)
        alive = ends.wrt.size * np.searchsorted(ins, np.arange(ins[0] + 1, last + 1))
        return forward_flops(system, int(alive.sum()), 0 if self.readout is None else ends.rows)

    def buffer_bytes(self, mode: str, groups: int) -> int:
        """Bytes per sample of a sweep's buffers with so many output steps (reverse) or input steps (forward)."""
        system, features = self.swept.system, self.swept.system.features
        rows = groups * (self.ends.rows if mode == "reverse" else self.ends.wrt.size)
        width = 2 * (system.rows + (features if mode == "reverse" else 0)) + (system.columns if system.gated else 0)
        if mode == "reverse":
            width += system.rows
        return rows * width * self.swept.work.itemsize

    def unit_bytes(self, mode: str) -> int:
        """Bytes per sample of what a reverse sweep in blocks holds on top, however many output steps there are."""
        system = self.swept.system
        if mode == "forward" or self.link is None:
            return 0
        length = plan_blocks(system, self.alive(), system.features).length
        width = 3 * system.rows + (2 + length) * system.features + (system.columns if system.gated else 0)
        return system.rows * width * system.work.itemsize if length else 0

    def sweep(
        self,
        mode: str,
        samples: slice,
        times: Sequence[int],
        rtol: float | None,
        tally: Tally,
        progress: Callable[[], None] | None,
    ) -> np.ndarray[Any, Any]:
        """(sample, group, [row,] in step, [feature]); reduced (sample, group, in step, *tail); averaged no sample."""
        if mode == "reverse":
            return self._reverse(samples, times, rtol, tally, progress)
        return self._forward(samples, times, rtol, tally, progress)

    def _count(self, samples: slice) -> int:
        return len(range(*samples.indices(self.swept.system.batch)))

    def _pruning(self, rtol: float | None, group: int) -> Vanished | None:
        return None if rtol is None else Vanished(self.swept.work, rtol, group)

    def _reverse(
        self,
        samples: slice,
        times: Sequence[int],
        rtol: float | None,
        tally: Tally,
        progress: Callable[[], None] | None,
    ) -> np.ndarray[Any, Any]:
        swept, ends = self.swept, self.ends
        system, work = swept.system, swept.work
        block = np.eye(system.state_sizes[self.state])[None, None] if self.readout is None else self.readout
        points = (swept.output_points if ends.of.what == "output" else lambda t, b: swept.points(self.state, t, b))(
            times, block
        )
        places = {t: i for i, t in enumerate(self.in_times)}
        collector = Collector(
            work,
            self._count(samples),
            len(times),
            ends.rows,
            ends.wrt.size,
            places,
            reduce=ends.reduce,
            tail=ends.tail,
            readout=self._below(samples),
            average=ends.average,
        )
        pruning = self._pruning(rtol, ends.rows)
        cost = reverse(system, points, self._taps(collector), samples=samples, pruning=pruning, progress=progress)
        self._count_cost(tally, cost, pruning, collector)
        result: np.ndarray[Any, Any] = work.numpy(collector.result)
        axis = 0 if ends.average else 1
        order = {t: i for i, t in enumerate(points.sequence)}
        result = _reorder(result, [order[t] for t in times], axis + 1)
        if ends.reduce is not None:
            return np.moveaxis(result, axis, axis + 1)
        return np.moveaxis(result, axis, axis + 2)

    def _taps(self, collector: Collector) -> Taps:
        wrt = self.ends.wrt
        if wrt.what == "initial_state":
            return Taps(initial={wrt.state: collector}, steps=frozenset())
        steps = frozenset(self.in_times)
        if self.link is not None:
            return Taps(input=collector, steps=steps)
        return Taps(states={wrt.state: collector}, steps=steps)

    def _below(self, samples: slice) -> Callable[[int, Array], Array] | None:
        if self.link is None or self.link.block is None:
            return None
        block = like(self.link.block, self.swept.half.run.input)

        def readout(t: int, values: Array) -> Array:
            at = block[:, 0 if block.shape[1] == 1 else t]
            return values @ (at if at.shape[0] == 1 else at[samples])

        return readout

    def _forward(
        self,
        samples: slice,
        times: Sequence[int],
        rtol: float | None,
        tally: Tally,
        progress: Callable[[], None] | None,
    ) -> np.ndarray[Any, Any]:
        swept, ends = self.swept, self.ends
        system, work = swept.system, swept.work
        entrances = self._entrances()
        places = {t: i for i, t in enumerate(times)}
        groups = 1 if entrances.kind == "initial" else len(self.in_times)
        collector = Collector(
            work,
            self._count(samples),
            groups,
            ends.wrt.size,
            ends.rows,
            places,
            reduce=ends.reduce,
            tail=ends.tail,
            readout=self._above(samples),
            swapped=True,
            average=ends.average,
        )
        pruning = self._pruning(rtol, ends.wrt.size)
        cost = forward(
            system,
            entrances,
            {self.state: collector},
            frozenset(times),
            samples=samples,
            pruning=pruning,
            progress=progress,
        )
        self._count_cost(tally, cost, pruning, collector)
        result = work.numpy(collector.result)  # (sample, out, in group, [feature, row] or *tail)
        axis = 0 if ends.average else 1
        entered = [t for t in swept.half.run.steps() if t in set(self.in_times)][::-1]
        if groups > 1:
            order = {t: i for i, t in enumerate(entered)}
            result = _reorder(result, [order[t] for t in self.in_times], axis + 1)
        return result if ends.reduce is not None else np.moveaxis(result, -1, axis + 1)

    def _entrances(self) -> Entrances:
        wrt = self.ends.wrt
        if wrt.what == "initial_state":
            return Entrances("initial", state=wrt.state)
        if self.link is None:
            return Entrances("state", self.in_times, state=wrt.state)
        block = self.link.block
        if block is not None:
            block = like(block, self.swept.half.run.input)
            block = block.swapaxes(-1, -2)
        return Entrances("input", self.in_times, block)

    def _above(self, samples: slice) -> Callable[[int, Array], Array] | None:
        block = self.readout
        moves = self.swept.output_moves() if self.ends.of.what == "output" else None
        if block is None and moves is None:
            return None
        if block is not None:
            block = like(block, self.swept.half.run.input)

        def readout(t: int, values: Array) -> Array:
            if block is not None:
                at = block[:, 0 if block.shape[1] == 1 else t]
                values = values @ (at if at.shape[0] == 1 else at[samples]).swapaxes(-1, -2)
            if moves is not None:
                values = values * like(moves[samples, t], values)[:, None, None]
            return values

        return readout

    @staticmethod
    def _count_cost(tally: Tally, cost: Any, pruning: Vanished | None, collector: Collector) -> None:
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
