"""A recurrence that was replayed, as a linear system that rows of cotangents can be swept through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...autodiff.tensors import like
from ...recurrence.arrays import Workspace
from ...recurrence.linear import System
from ...recurrence.sweep_rows import PointRows
from ...typing import Array
from ..inside import Half


@dataclass
class Linearised:
    """One direction of one recurrent call, linearised around what it did.

    Attributes
    ----------
    output
        Which of its states the layer returns.
    """

    half: Half
    system: System
    output: int

    @classmethod
    def of(cls, half: Half) -> Linearised:
        """Linearise a replayed call."""
        return cls(half, half.run.linear_system(masked_output=half.call.masked_output), half.run.output_state)

    @property
    def layer(self) -> str:
        """Name of the node in results."""
        return self.half.call.layer

    @property
    def work(self) -> Workspace:
        """Where its arrays live."""
        return self.system.work

    def output_moves(self) -> Array | None:
        """(sample, time) of bool: where the output moves with the state; None for everywhere."""
        call = self.half.call
        if call.masked_output == "zero" and call.mask is not None and self.output < len(self.half.run.states):
            return call.mask
        return call.output_from_state

    def points(self, state: int, times: Sequence[int], block: Array) -> PointRows:
        """Cotangents (sample or 1, time or 1, row, size) that enter a state at single steps."""
        return PointRows(list(times), {state: like(block, self.half.run.input)}, self.system.order)

    def output_points(self, times: Sequence[int], block: Array) -> PointRows:
        """Cotangents of the layer's output."""
        moves = self.output_moves()
        block = like(block, self.half.run.input)
        if moves is not None:
            xp = self.work.xp
            block = xp.where(moves[:, :, None, None], block, xp.zeros_like(block))
        return self.points(self.output, times, block)
