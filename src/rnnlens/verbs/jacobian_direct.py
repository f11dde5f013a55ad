"""The direct route: one recurrent layer between the ends, with nothing but local links around it.

Values are reduced inside the sweep, and the sweep may run either way (:mod:`rnnlens.verbs.jacobian_sweep`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..recurrence.jacobian import forward_flops, reverse_flops
from ..recurrence.sweep_blocked import plan_blocks
from ..typing import Array
from .jacobian_graph import Link
from .jacobian_target import Swept
from .jacobian_wanted import Ends


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
        width = 2 * (system.rows + (features if mode == "reverse" else 0)) + system.scratch
        if mode == "reverse":
            width += system.rows
        return rows * width * self.swept.work.itemsize

    def unit_bytes(self, mode: str) -> int:
        """Bytes per sample of what a reverse sweep in blocks holds on top, however many output steps there are."""
        system = self.swept.system
        if mode == "forward" or self.link is None:
            return 0
        length = plan_blocks(system, self.alive(), system.features).length
        width = 3 * system.rows + (2 + length) * system.features + system.scratch
        return system.rows * width * system.work.itemsize if length else 0
