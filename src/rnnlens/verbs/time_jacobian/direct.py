"""The direct route: one recurrence between the ends, with only local segments above and below it.

Norms are computed inside the sweep, and the sweep may run forward or in reverse (``sweep.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...adapters.protocol import Port
from ...autodiff.tensors import like
from ...recurrence.jacobian import forward_flops, reverse_flops, unit_flops
from ...recurrence.linear import Pattern
from ...recurrence.sweep_reverse import plan_blocks
from ...typing import Array
from ..recurrent_layers import ReplayedCall
from .network import JacobianNetwork
from .request import JacobianEnds
from .segments import Segment


@dataclass(frozen=True)
class DirectRoute:
    """One recurrence that rows enter at single steps, to be read at its input or at a state.

    Attributes
    ----------
    state
        Index of the state that rows enter.
    readout
        (sample or 1, time or 1, row, size): matrix from the state to the rows; None for the state itself.
    below
        The local segment below the layer's input; None if the lower end is a state of the layer.
    times
        Steps at which rows enter.
    in_times
        Requested input steps; -1 for the initial state.
    pattern
        Sharing pattern for rows of all state units that never mix; None with a readout or without a pattern.
    """

    one: ReplayedCall
    state: int
    readout: Array | None
    below: Segment | None
    ends: JacobianEnds
    times: list[int]
    in_times: list[int]
    pattern: Pattern | None

    def alive(self) -> np.ndarray[Any, Any]:
        """Return the number of active rows at each step of a reverse sweep, in its order."""
        run, ends = self.one.run, self.ends
        position = {t: i for i, t in enumerate(run.steps())}
        outs, ins = sorted(position[t] for t in self.times), [position.get(t, -1) for t in self.in_times]
        steps = np.arange(max(min(ins), 0), outs[-1] + 1)
        found: np.ndarray[Any, Any] = ends.rows * (len(outs) - np.searchsorted(outs, steps))
        return found[::-1]

    def flops(self, mode: str) -> float:
        """Return the FLOPs of a sweep in this mode."""
        run, system, ends = self.one.run, self.one.system, self.ends
        if mode == "reverse" and self.pattern is not None:
            features = 1 if self.below is None or ends.measured_by is not None else ends.wrt.size
            return unit_flops(system, self.state, self.alive() // ends.rows, features)
        if mode == "reverse":
            return reverse_flops(system, self.alive(), self.below is not None)
        position = {t: i for i, t in enumerate(run.steps())}
        last, ins = max(position[t] for t in self.times), sorted(position.get(t, -1) for t in self.in_times)
        alive = ends.wrt.size * np.searchsorted(ins, np.arange(ins[0] + 1, last + 1))
        return forward_flops(system, int(alive.sum()), 0 if self.readout is None else ends.rows)

    def buffer_bytes(self, mode: str, groups: int) -> int:
        """Return the buffer bytes per sample for ``groups`` output steps (reverse) or input steps (forward)."""
        system, features = self.one.system, self.one.system.features
        rows = groups * (self.ends.rows if mode == "reverse" else self.ends.wrt.size)
        if mode == "reverse" and self.pattern is not None:
            rows, features = groups * self.pattern.count, 0
        width = 2 * (system.rows + (features if mode == "reverse" else 0)) + system.scratch
        if mode == "reverse":
            width += system.rows
        return rows * width * self.one.system.work.itemsize

    def unit_bytes(self, mode: str) -> int:
        """Return the extra bytes per sample of a blocked reverse sweep, independent of the number of output steps."""
        system = self.one.system
        if mode == "forward" or self.below is None or self.pattern is not None:
            return 0
        length = plan_blocks(system, self.alive(), system.features).length
        width = 3 * system.rows + (2 + length) * system.features + system.scratch
        return system.rows * width * system.work.itemsize if length else 0


def direct_route(network: JacobianNetwork, ends: JacobianEnds) -> DirectRoute | None:
    """Return the direct route if a single recurrence is on the path with local segments around it; else None."""
    above = _from_above(network, ends)
    if above is None:
        return None
    one, state, readout, step = above
    below = None
    if ends.wrt.port is not None:
        below = _below(network, one, ends.wrt.port)
        if below is None:
            return None
    elif ends.wrt.within[0] is not one:
        return None
    times = ends.out_times or [one.last if step is None else step]
    pattern = one.system.pattern(state) if readout is None else None
    return DirectRoute(one, state, readout, below, ends, times, ends.in_times or [-1], pattern)


def _from_above(
    network: JacobianNetwork, ends: JacobianEnds
) -> tuple[ReplayedCall, int, Array | None, int | None] | None:
    """Return the recurrence in which rows start, the index of the state, the readout, and the step if it is fixed.

    None if there is no such recurrence.
    """
    of = ends.of
    if of.port is None:
        return of.within[0], of.state, ends.weights, None
    useful = _on_path(network, of.port, ends.wrt.port)
    if len(useful) != 1 or useful[0][0] == ends.wrt.port:
        return None
    port, segment = useful[0]
    one = network.recurrences[network.returned_by[port]]
    if port != one.above()[0]:
        return None
    rows, sequences = ends.rows_at(of.size), one.call.returns_sequences
    if segment.kind == "local" and sequences:
        identity = segment.block is None and ends.weights is None
        return one, one.run.output_state, None if identity else segment.at_every_step(rows), None
    if segment.kind == "step" and sequences:
        return one, one.run.output_state, segment.at_every_step(rows), segment.step
    if segment.kind == "flat" and not sequences:
        assert segment.block is not None
        return one, one.run.output_state, (like(rows[:, 0], segment.block) @ segment.block)[:, None], None
    return None


def _below(network: JacobianNetwork, one: ReplayedCall, wrt: Port) -> Segment | None:
    """Return the only local segment from the layer's input to the lower end; None if there is no such."""
    own_input, *initial = one.below()
    found = [(port, *rest) for port in (own_input, *initial) for rest in _on_path(network, port, wrt)]
    if len(found) != 1:
        return None
    port, reached, segment = found[0]
    return segment if port == own_input and reached == wrt and segment.kind == "local" else None


def _on_path(network: JacobianNetwork, port: Port, wrt: Port | None) -> list[tuple[Port, Segment]]:
    """Return the segments from a tensor that lead to the lower end."""
    return [
        (below, segment)
        for below, segment in network.around.below(port).items()
        if below == wrt or network.returned_by.get(below) in network.path.recurrences
    ]
