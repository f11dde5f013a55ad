"""What every sweep of rows shares: where values go, what is wanted, what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .arrays import Array

#: Bytes of product matrices held at a time.
BLOCK_BUDGET = 32 * 2**20

#: Steps between two looks for numbers that have become negligible.
FLUSH_EVERY = 4


class Sink(Protocol):
    """Takes the values that a sweep passes by."""

    def take(self, t: int, first: int, values: Array) -> None:
        """Values (sample, row, n) at step t; ``first`` is the number of the first of these rows."""

    def residue(self, t: int, values: Array) -> None:
        """What signed sums of pruned rows (sample, probe, n) are at step t."""


@dataclass
class Taps:
    """What a sweep hands out, each None where nobody wants it.

    ``input``: at the layer's input. ``states``: by state index, at the states after each step.
    ``initial``: by state index, at the initial state (t = -1). ``steps``: the steps of interest, None for all.
    """

    input: Sink | None = None
    states: dict[int, Sink] = field(default_factory=dict)
    initial: dict[int, Sink] = field(default_factory=dict)
    steps: frozenset[int] | None = None

    def wants(self, t: int) -> bool:
        """Whether step t is of interest."""
        return self.steps is None or t in self.steps


@dataclass
class Cost:
    """Floating-point operations done, and the bytes of the sweep's own buffers."""

    flops: float = 0.0
    buffer_bytes: int = 0


def elements(array: Array) -> int:
    """How many numbers an array holds."""
    count = 1
    for n in array.shape:
        count *= int(n)
    return count
